"""Training with the values of the release's storage: what is trained is what is saved and served."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dsv4_jax.checkpoint import fake_quantize, load_checkpoint, save_release
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.decode import SamplingParams, logprobs
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM, TokenMap, add_adapters, shardings
from dsv4_jax.quant import QuantizedWeight
from tests.byte_tokenizer import write_byte_tokenizer
from tests.engine.test_engine import drain
from tests.engine.test_exact_logprobs import largest_difference, padded
from tests.paths import TINY
from tests.v41 import v41_config


# Maps of more than one block of 128 x 128, with a remainder, in two equal layers that are stacked.
WIDE = dataclasses.replace(
    DSV4Config.small([LayerSpec.csa(), LayerSpec.csa(), LayerSpec.hca(16)]), hidden_size=160, q_lora_rank=136
)
CONFIGS = {
    "v4": lambda: WIDE,
    "v4 drafts": lambda: DSV4Config.from_hf(TINY, mtp=True),
    "v41": lambda: _with_byte_tokenizer(v41_config()),
    "v41 drafts": lambda: _with_byte_tokenizer(v41_config(drafts=True)),
}


def _with_byte_tokenizer(config):
    engram = dataclasses.replace(config.engram, compressed_vocab_size=227)
    return dataclasses.replace(config, vocab_size=260, image_token_id=259, engram=engram)


def make_model(config, dtype=jnp.float32):
    """Random weights of many sizes: each row of a matrix has its own, so that scales differ."""
    model = DeepseekV4ForCausalLM(config, dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)

    def scaled(x):
        if x.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jnp.asarray(np.asarray(x) * np.exp2(rng.integers(-3, 2, (*x.shape[:-1], 1))), x.dtype)

    return jax.tree.map(scaled, model)


def variables(model):
    """{path of a variable: its value}; stacked layers and fused maps share one."""
    return {".".join(map(str, path)): np.asarray(x.get_value()) for path, x in nnx.to_flat_state(nnx.state(model))}


def saved(model, folder):
    """Writes a model in the release's storage, with a tokenizer."""
    save_release(model, folder)
    if model.config.engram is not None:
        write_byte_tokenizer(folder / "tokenizer.json", {})
    return folder


@jax.jit
def step(model, cache, batch):
    return model.logits(model(cache, batch)[0])


def run(model, ids):
    """The logits of a prefill, compiled."""
    manager = KVCacheManager(
        model.config, num_blocks=4, max_requests=1, max_context=64, block_tokens=16, dtype=model.model.dtype
    )
    batch = manager.prepare_forward({manager.admit(): ids})
    return step(model, manager.init_cache(), batch)


@pytest.mark.parametrize("kind", ["FP8", "FP8_32", "FP8_ROWS", "FP4"])
def test_jax_and_numpy_encode_to_the_same_bytes(kind):
    """Ties, powers of two, zeros of both signs, blocks of zeros and the largest values included."""
    encode = jax.jit(lambda values: QuantizedWeight.encode(values, kind))
    for seed, exponent in enumerate([*range(-100, 101, 10), 123]):
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((3, 136, 160)).astype(np.float32)
        values[0] = np.round(values[0] * 16) / 16
        values[1, :128] = 0
        values[2, 7, 9] = 6 if seed % 2 else 448
        values *= np.exp2(rng.integers(-3, 1, values.shape[:2]))[..., None].astype(np.float32)
        values[:, rng.random(136) < 0.2] *= -0.0
        values = np.ldexp(values, exponent) if exponent < 123 else np.clip(np.ldexp(values, exponent), -3e38, 3e38)
        on_host = QuantizedWeight.encode(values, kind)
        assert isinstance(on_host.codes, np.ndarray) and on_host.codes.dtype == on_host.scale.dtype == np.uint8
        chex.assert_trees_all_equal(encode(jnp.asarray(values)), on_host)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_parameters_have_the_values_that_are_saved(name, tmp_path):
    model = make_model(CONFIGS[name]())
    rounded = fake_quantize(model)
    found = variables(rounded)
    expected = variables(load_checkpoint(saved(model, tmp_path), model.config, dtype=jnp.float32))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if not path.endswith("token_map"):
            chex.assert_trees_all_equal(found[path], value, custom_message=path)
    changed = [path for path, value in variables(model).items() if not np.array_equal(value, found[path])]
    for end in "o_b_proj.weight", "experts.down_proj", "embed_tokens.weight", "o_a_proj.weight":
        assert any(path.endswith(end) for path in changed), changed
    chex.assert_trees_all_equal(variables(fake_quantize(rounded)), found)  # values of the storage stay


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("v4", jnp.float32),
        pytest.param("v4", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("v41", jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_saved_model(name, dtype, tmp_path):
    """Dequantized at loading, and dequantized on use."""
    model = make_model(CONFIGS[name](), dtype)
    folder = saved(model, tmp_path)
    ids = np.random.default_rng(0).integers(159, size=40)
    rounded = fake_quantize(model)
    found = {w: load_checkpoint(folder, model.config, dtype=dtype, weights=w) for w in (None, "quantized")}
    nnx.update(rounded, nnx.state(found[None], TokenMap))  # loading makes it from the tokenizer
    logits = run(rounded, ids)
    assert np.abs(logits - run(model, ids)).max() > 1e-3
    for weights, loaded in found.items():
        kinds = {x.kind for x in jax.tree.leaves(loaded, is_leaf=_is_quantized) if _is_quantized(x)}
        assert bool(kinds) == (weights == "quantized")
        chex.assert_trees_all_equal(run(loaded, ids), logits)


def _is_quantized(x):
    return isinstance(x, QuantizedWeight)


@pytest.fixture(scope="module")
def one_layer():
    """A model, and an engine that rolls it out with the values of the storage."""
    config = DSV4Config.from_hf(TINY).with_layers([LayerSpec.csa()])
    model = make_model(config)
    manager = KVCacheManager(config, num_blocks=8, max_requests=2, max_context=64, block_tokens=16, dtype=jnp.float32)
    return model, Engine(fake_quantize(model), manager, token_budget=16, batch_invariant=True)


def test_what_is_trained_is_what_is_served(one_layer, tmp_path):
    """A step of an optimizer on the float weights, then the same rollout by the trained model and by the saved one."""
    model, engine = one_layer
    graph, floats, others = nnx.split(model, _is_float, ...)

    def roll_out():
        requests = [engine.add([5, 17, n], max_new_tokens=20, sampling=SamplingParams(1.0), seed=n) for n in range(2)]
        drain(engine)
        return requests

    @jax.jit
    def step(floats, tokens, lengths):
        def loss(rounding, floats):
            values = logprobs(rounding(nnx.merge(graph, floats, others)), tokens, lengths, engine.rollout_shape)
            return -values.sum(), values

        gradient, values = jax.grad(functools.partial(loss, fake_quantize), has_aux=True)(floats)
        rounded = nnx.state(fake_quantize(nnx.merge(graph, floats, others)), _is_float)
        expected, _ = jax.grad(functools.partial(loss, lambda model: model), has_aux=True)(rounded)
        updates, _ = optax.sgd(1e-2).update(gradient, optax.sgd(1e-2).init(floats))
        return optax.apply_updates(floats, updates), gradient, expected, values

    for _ in range(2):
        requests = roll_out()
        new_floats, gradient, expected, values = step(floats, *map(jnp.asarray, padded(requests)))
        assert largest_difference(requests, values) == 0.0
        # Straight-through: the gradient of the rounded weights. Sums of the two programs may differ in order.
        chex.assert_trees_all_close(gradient, expected, rtol=1e-5, atol=1e-6)
        for path, value in nnx.to_flat_state(gradient):
            if "experts" in path or "o_b_proj" in path or "embed_tokens" in path:
                assert (value.get_value() != 0).any(), path
        assert not jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), new_floats, floats))
        floats = new_floats
        engine.update_weights(fake_quantize(nnx.merge(graph, floats, others)))

    trained = roll_out()
    folder = saved(nnx.merge(graph, floats, others), tmp_path)
    engine.update_weights(load_checkpoint(folder, model.config, dtype=jnp.float32))
    served = roll_out()
    assert [r.generated for r in served] == [r.generated for r in trained] != [r.generated for r in requests]
    assert [r.logprobs for r in served] == [r.logprobs for r in trained]


def test_a_sharded_model_keeps_its_values_and_shardings(one_layer):
    """A shard of a matrix may end within a block of values with one scale."""
    model, _ = one_layer
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    sharded = jax.device_put(model, shardings(model, mesh))
    found = fake_quantize(sharded)
    chex.assert_trees_all_equal(variables(found), variables(fake_quantize(model)))
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(sharded), strict=True)
    assert all(x.sharding.is_equivalent_to(y.sharding, x.ndim) for x, y in pairs)


def test_quantized_weights_and_adapters_stay(one_layer, tmp_path):
    model, _ = one_layer
    loaded = load_checkpoint(saved(model, tmp_path), dtype=jnp.float32, weights="quantized")
    add_adapters(loaded, ["a"], rank=2)
    chex.assert_trees_all_equal(fake_quantize(loaded), loaded)


def _is_float(_, variable):
    return jnp.issubdtype(variable.get_value().dtype, jnp.floating)


def test_a_model_with_another_head_is_refused():
    model = DeepseekV4ForCausalLM(DSV4Config.small([LayerSpec()]), rngs=nnx.Rngs(0))
    model.lm_head = nnx.List([model.lm_head])
    with pytest.raises(ValueError, match=r"lacks parameters of the release:\n  lm_head\.weight"):
        fake_quantize(model)
