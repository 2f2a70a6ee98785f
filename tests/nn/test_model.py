"""The whole model as a jit argument, on a real cache."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dsv4_jax.cache import Batch, CacheSchema, KVCache, init_cache
from dsv4_jax.config import LayerSpec
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.quant import FakeQuantFormat, V41Format
from tests.v41 import v41_config


@pytest.fixture(scope="module")
def model(short_config):
    return DeepseekV4ForCausalLM(short_config)


def test_an_abstract_model_has_the_shapes_of_a_real_one(model, short_config):
    abstract = DeepseekV4ForCausalLM(short_config, rngs=ABSTRACT)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(abstract))
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract, model)
    assert "hash_moe" in short_config.mlp_layer_types


def step_batch(first, count, padding_id, new_blocks=()):
    """`count` tokens of slot 0 from position `first`, then three padding tokens."""
    blocks = np.full((1, 3), -1, np.int32)
    blocks[: len(new_blocks)] = np.reshape(new_blocks, (-1, 3))
    tokens = np.arange(first, first + count)
    pad = [-1] * 3
    return Batch(
        token_ids=jnp.asarray([*tokens * 7 % 160, *[padding_id] * 3], jnp.int32),
        positions=jnp.asarray([*tokens, *pad], jnp.int32),
        slots=jnp.asarray([*[0] * count, *pad], jnp.int32),
        new_blocks=jnp.asarray(blocks),
        reset_slots=jnp.asarray([-1, -1], jnp.int32),
        prefill=count > 1,
    )


def test_padding_reaches_neither_other_tokens_nor_the_cache(model):
    schema = CacheSchema(model.config, num_blocks=2, max_requests=2, max_context=64, block_tokens=32)
    traces = []

    @jax.jit
    def step(model, cache, batch):
        traces.append(batch.prefill)
        hidden, cache = model(cache, batch)
        return hidden, model.logits(hidden), cache

    def run(padding_id):
        outputs = []
        cache = init_cache(schema)
        for first, count, blocks in [(0, 21, [(0, 0, 1)]), (21, 1, []), (22, 1, [])]:
            hidden, logits, cache = step(model, cache, step_batch(first, count, padding_id, blocks))
            assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
            chex.assert_tree_all_finite(logits)
            outputs += [np.asarray(hidden[:count]), np.asarray(logits[:count])]
        return outputs + [np.asarray(leaf) for leaf in jax.tree.leaves(cache)]

    first = run(-1)
    second = run(33)
    # One program for each shape: prefill and decode.
    assert traces == [True, False]
    assert not (first[0][0] == first[0][1]).all()
    for a, b in zip(first, second, strict=True):
        chex.assert_trees_all_equal(a, b)


def test_rope_may_take_the_whole_head(short_config):
    """Nine tokens one by one give the logits of one chunk."""
    dim = short_config.index_head_dim
    config = short_config.with_layers([LayerSpec.csa()])
    config = dataclasses.replace(config, head_dim=dim, qk_rope_head_dim=dim)
    sizes = dict(num_blocks=2, max_requests=2, max_context=64, block_tokens=32)
    with pytest.raises(ValueError, match="per_entry.*qk_rope_head_dim to be a positive multiple of 1, got 0"):
        CacheSchema(config, **sizes, kv_format="per_entry")
    schema = CacheSchema(config, **sizes, kv_format="plain", dtype=jnp.float32)
    model = DeepseekV4ForCausalLM(config, jnp.float32)

    @jax.jit
    def step(model, cache, batch):
        hidden, cache = model(cache, batch)
        return model.logits(hidden), cache

    block = [(0, 0, 1)]
    whole, _ = step(model, init_cache(schema), step_batch(0, 9, -1, block))
    cache = init_cache(schema)
    for first in range(9):
        logits, cache = step(model, cache, step_batch(first, 1, -1, block if first == 0 else ()))
        # Sums in other orders, of float32.
        chex.assert_trees_all_close(logits[0], whole[first], rtol=0, atol=2e-6)


def test_logits_are_float32_products_with_the_head(model, draw):
    hidden = jnp.asarray(draw(2, 3, model.config.hidden_size), jnp.bfloat16)
    logits = model.logits(hidden)
    assert (logits.shape, logits.dtype) == ((2, 3, model.config.vocab_size), jnp.float32)
    expected = np.asarray(hidden, np.float64) @ np.asarray(model.lm_head.weight[...], np.float64).T
    # 64 exact products, summed in float32; a bf16 result would be off by 1e-3.
    chex.assert_trees_all_close(logits, expected, rtol=1e-7, atol=1e-6)


def recorded(model, cache, batch):
    return model.record(cache, batch, ("attention_in", "attention_out"))


@pytest.mark.parametrize(("dtype", "param_dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_weights_of_one_dtype_and_activations_of_another(short_config, dtype, param_dtype):
    model = nnx.eval_shape(lambda: DeepseekV4ForCausalLM(short_config, dtype, param_dtype=param_dtype))
    layer = model.model.layers[1]
    projections = layer.self_attn.input_projections, layer.mlp.shared_experts.gate_up_proj
    parts = model.model.embed_tokens.weight, model.lm_head.weight, layer.mlp.experts.down_proj
    for weight in (*parts, *(weight for fused in projections for weight in fused.weights.values())):
        assert weight.dtype == param_dtype
    assert layer.input_layernorm.weight.dtype == jnp.float32
    sizes = dict(num_blocks=2, max_requests=2, max_context=64, block_tokens=32, dtype=dtype)
    cache = KVCache.abstract(CacheSchema(short_config, **sizes))

    for count in (1, 21):
        batch = step_batch(0, count, -1)
        hidden, seen, after = jax.eval_shape(recorded, model, cache, batch)
        assert {name: set(values) for name, values in seen.items()} == dict.fromkeys(
            ("attention_in", "attention_out"), {0, 1, 2}
        )
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)
        assert {hidden.dtype, *(x.dtype for x in jax.tree.leaves(seen))} == {jnp.dtype(dtype)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(index_topk=3), "index_topk is 4 in the model, 3 in the cache"),
        (dict(sliding_window=4), "sliding_window is 8 in the model, 4 in the cache"),
        (dict(vocab_size=200), "vocab_size is 160 in the model, 200 in the cache"),
        (
            dict(specs=(LayerSpec(), LayerSpec.csa(), LayerSpec.hca(32))),
            r"a layer is LayerSpec\(layer=2, compress_rate=16.* in the model, .*compress_rate=32.* in the cache",
        ),
        (
            dict(specs=(LayerSpec(), LayerSpec.hca(16), LayerSpec.csa())),
            r"a layer is LayerSpec\(layer=1.* in the model, .* in the cache",
        ),
        (
            dict(specs=(LayerSpec(window=4), LayerSpec.csa(), LayerSpec.hca(16))),
            r"a layer is .*window=None.* in the model, .*window=4.* in the cache",
        ),
        (
            dict(specs=(LayerSpec(),) * 4, mlp_layer_types=("moe",) * 4),
            "num_hidden_layers is 3 in the model, 4 in the cache",
        ),
    ],
)
def test_a_cache_for_another_model_is_refused(short_config, changes, message):
    """While the step is traced; these models would run, with other tokens."""
    sizes = dict(num_blocks=2, max_requests=2, max_context=64, block_tokens=32)
    cache = KVCache.abstract(CacheSchema(dataclasses.replace(short_config, **changes), **sizes))
    model = nnx.eval_shape(lambda: DeepseekV4ForCausalLM(short_config))
    for step in (DeepseekV4ForCausalLM.__call__, recorded):
        with pytest.raises(ValueError, match=f"the cache was made for another model: {message}"):
            jax.eval_shape(step, model, cache, step_batch(0, 1, -1))


def test_other_dtypes_are_refused(short_config):
    with pytest.raises(ValueError, match="param_dtype='float16' must be 'bfloat16' or 'float32'"):
        nnx.eval_shape(lambda: DeepseekV4ForCausalLM(short_config, param_dtype=jnp.float16))


def mean_loss(model, kv_format, ids):
    """The mean cross-entropy of a text's tokens in one step, as a function of the model."""
    sizes = dict(num_blocks=4, max_requests=1, max_context=64, block_tokens=16, dtype=jnp.float32)
    manager = KVCacheManager(model.config, **sizes, kv_format=kv_format)
    batch = manager.prepare_forward({manager.admit(): ids})
    cache = manager.init_cache()

    def loss(model):
        hidden, _ = model(cache, batch)
        losses = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden[:-1]), batch.token_ids[1:])
        return losses.mean()

    return loss


@pytest.mark.slow
def test_gradients_of_v41_are_those_of_central_differences():
    """All entries and experts are selected, since a selection that changes is no small change of the loss.

    The backward pass computes values again.
    """
    config = dataclasses.replace(v41_config(), index_topk=64, candidate_topk_blocks=17, num_experts_per_tok=8)
    model = DeepseekV4ForCausalLM(config, jnp.float32)
    model.model.layers.remat = True
    loss = mean_loss(model, "plain", np.random.default_rng(0).integers(159, size=48))
    graph, floats, others = nnx.split(model, lambda _, value: value.get_value().dtype == jnp.float32, ...)
    of_floats = jax.jit(lambda floats: loss(nnx.merge(graph, floats, others)))
    gradient = jax.jit(jax.grad(of_floats))(floats)
    rng = np.random.default_rng(1)
    checked = 0
    for number, part in enumerate(leaves := jax.tree.leaves(gradient)):
        if not (norm := float(jnp.linalg.norm(part))):
            continue
        # Along the gradient, mixed with as much of a random direction.
        noise = rng.standard_normal(part.shape).astype(np.float32)
        direction = part / norm + noise / np.linalg.norm(noise)
        step = 1e-2 / max(norm, 1.0)

        def moved(sign, number=number, direction=direction, step=step):
            values, tree = jax.tree.flatten(floats)
            values[number] += sign * step * direction
            return of_floats(jax.tree.unflatten(tree, values))

        difference = float(moved(1) - moved(-1)) / (2 * step)
        expected = float(jnp.vdot(part, direction))
        # The loss, about 5, is rounded by 1e-6.
        assert abs(difference - expected) < 0.03 * norm + 1e-6 / step, (number, part.shape, difference, expected)
        checked += 1
    assert checked > len(leaves) / 2


@pytest.mark.slow
def test_parameters_of_v41_that_learn():
    """Straight-through. Those that only select have no gradient."""
    model = DeepseekV4ForCausalLM(v41_config(), jnp.float32)
    loss = mean_loss(model, FakeQuantFormat(V41Format()), np.random.default_rng(0).integers(159, size=48))
    graph, floats, others = nnx.split(model, lambda _, value: value.get_value().dtype == jnp.float32, ...)
    gradient = jax.jit(jax.grad(lambda floats: loss(nnx.merge(graph, floats, others))))(floats)
    views = parameter_views(nnx.merge(graph, gradient, others))
    values = {name: np.asarray(x.read()) for name, x in views.items() if x.dtype == jnp.float32}
    assert all(np.isfinite(value).all() for value in values.values())
    selecting = "indexer", "_correction_bias", "compressor.key_"
    for name, value in values.items():
        assert value.any() != any(part in name for part in selecting), name


def test_draft_layers_of_v41_read_the_streams_that_enter_their_targets():
    config = v41_config(drafts=True)
    model = DeepseekV4ForCausalLM(config, jnp.float32)
    manager = KVCacheManager(
        config, num_blocks=4, max_requests=1, max_context=64, block_tokens=16, max_query_tokens=4, dtype=jnp.float32
    )
    batch = manager.prepare_forward({manager.admit(): [5, 6, 7]})

    @jax.jit
    def step(cache):
        _, taps, recorded, _ = model.model(cache, batch, record=["streams"])
        streams = {layer: values["streams"][i] for layers, values in recorded for i, layer in enumerate(layers)}
        return taps, jnp.stack([streams[layer].mean(1) for layer in config.dspark.target_layer_ids], 1)

    taps, means = step(manager.init_cache())
    chex.assert_trees_all_close(taps, means, rtol=0, atol=1e-6)  # sums in another order
