"""`logprobs` has the bits of an engine's rollout, and the gradient of the same computation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.data import packaged_checkpoint
from dsv4_jax.decode import RolloutShape, SamplingParams, logprobs
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager, PrefixCache
from dsv4_jax.nn import DeepseekV4ForCausalLM, add_adapters, parameter_views
from dsv4_jax.quant import FakeQuantFormat, V4Format
from tests.engine.test_engine import drain
from tests.paths import TINY
from tests.v41 import v41_config


CONFIGS = {
    "v4": lambda: DSV4Config.from_hf(TINY).first_layers(3),
    # Matrices large enough that the bits of a product depend on the number of rows.
    "wide": lambda: DSV4Config.from_hf(packaged_checkpoint()).with_layers([LayerSpec.csa(), LayerSpec.hca(16)]),
    "v4 drafts": lambda: DSV4Config.from_hf(TINY, mtp=True).first_layers(3),
    "v41": lambda: v41_config(drafts=False),
}
SIZES = dict(max_requests=3, max_context=96, block_tokens=16)
WARM = SamplingParams(temperature=1.0)
exact = jax.jit(logprobs, static_argnums=3)


def make_manager(config, dtype=jnp.float32, num_blocks=18, **options):
    return KVCacheManager(config, num_blocks=num_blocks, dtype=dtype, **SIZES | options)


class Remembered:
    """Drafts what an earlier request with the same tokens got, and else a token that is hardly ever right."""

    def __init__(self):
        self.requests = []

    def draft(self, tokens, max_tokens):
        for request in self.requests:
            if request.num_tokens > len(tokens) and (request.tokens[: len(tokens)] == tokens).all():
                return request.tokens[len(tokens) : len(tokens) + max_tokens]
        return [0]


def roll_out(engine, drafter):
    """Runs requests of several lengths twice, the second time with other seeds for half of them."""
    rng = np.random.default_rng(0)
    vocab = engine.manager.schema.config.vocab_size
    shared = rng.integers(vocab, size=36).tolist()
    prompts = [shared[:n] + rng.integers(4, size=more).tolist() for n, more in ((36, 9), (0, 3), (20, 12), (1, 0))]
    requests = drafter.requests if isinstance(drafter, Remembered) else []
    for again in range(2):
        seeds = [again, again, 0, 0]
        requests += [
            engine.add(p, max_new_tokens=30, sampling=WARM, seed=s) for p, s in zip(prompts, seeds, strict=True)
        ]
        drain(engine)
    return requests


def padded(requests):
    """Returns the sequences of requests as arrays (tokens [S, N], lengths [S])."""
    lengths = np.array([request.num_tokens for request in requests], np.int32)
    tokens = np.zeros((len(requests), lengths.max()), np.int32)
    for row, request in zip(tokens, requests, strict=True):
        row[: request.num_tokens] = request.tokens
    return tokens, lengths


def largest_difference(requests, values):
    """Returns the largest difference of log-probabilities [S, N] from those that the requests got in the rollout."""
    return max(
        float(np.abs(row[r.prompt_length : r.num_tokens] - np.float32(r.logprobs)).max())
        for row, r in zip(np.asarray(values), requests, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "dtype", "drafter"),
    [
        ("wide", jnp.float32, None),
        ("v4", jnp.bfloat16, Remembered()),
        ("v4 drafts", jnp.float32, "model"),
        pytest.param("v4 drafts", jnp.bfloat16, "model", marks=pytest.mark.slow),
        pytest.param("v41", jnp.bfloat16, None, marks=pytest.mark.slow),
    ],
)
def test_values_are_those_of_the_rollout(name, dtype, drafter):
    """Also of requests that were preempted, hit a cached prefix, or had drafts accepted."""
    config = CONFIGS[name]()
    model = DeepseekV4ForCausalLM(config, dtype, rngs=nnx.Rngs(0))
    manager = make_manager(config, dtype, num_blocks=10, max_query_tokens=1 if drafter is None else 2)
    prefix = PrefixCache(manager, key="model")
    engine = Engine(model, manager, token_budget=24, batch_invariant=True, drafter=drafter, prefix=prefix)
    requests = roll_out(engine, drafter)
    assert engine.metrics.preemptions > 0 and max(request.cached_tokens for request in requests) > 0
    if drafter is not None:
        assert engine.metrics.drafted_tokens > engine.metrics.accepted_tokens > 0

    tokens, lengths = padded(requests)
    values = exact(model, tokens, lengths, engine.rollout_shape)
    assert largest_difference(requests, values) == 0.0
    if name == "wide":
        other_shape = dataclasses.replace(engine.rollout_shape, token_budget=40)
        assert largest_difference(requests, exact(model, tokens, lengths, other_shape)) > 0
    assert not values[np.arange(tokens.shape[1])[None] >= lengths[:, None]].any() and not values[:, 0].any()

    if drafter == "model":  # its rollouts differ from others in their tokens alone
        return
    packed = np.concatenate([request.tokens for request in requests] + [np.zeros(5, np.int32)])
    flat = np.concatenate([row[:n] for row, n in zip(np.asarray(values), lengths, strict=True)] + [np.zeros(5)])
    np.testing.assert_array_equal(exact(model, packed, lengths, engine.rollout_shape), flat)


def test_values_and_gradients_of_adapters():
    """Two adapters and none in one batch; an adapter's gradient comes from its own sequences."""
    config = DSV4Config.from_hf(TINY).with_layers([LayerSpec.csa()])
    model = DeepseekV4ForCausalLM(config, jnp.float32, rngs=nnx.Rngs(0))
    add_adapters(model, ["a", "b"], rank=2, targets=["o_b_proj"])
    for path, view in parameter_views(model).items():
        if path.endswith(".up"):
            view.set_value(0.3 * jax.random.normal(jax.random.key(0), view.shape))
    engine = Engine(model, make_manager(model.config), token_budget=24, batch_invariant=True)
    names = ["a", None, "b"]
    requests = [engine.add([5, 17, n], max_new_tokens=20, adapter=names[n]) for n in range(3)]
    drain(engine)
    tokens, lengths = map(jnp.asarray, padded(requests))
    graph, loras, others = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    def gradient(loras, weights):
        def loss(loras):
            numbers = jnp.array([0, -1, 1], jnp.int32)
            values = logprobs(nnx.merge(graph, loras, others), tokens, lengths, engine.rollout_shape, numbers)
            return jnp.sum(values * weights[:, None]), values

        return jax.grad(loss, has_aux=True)(loras)

    gradients, values = gradient(loras, jnp.array([1.0, 1.0, 0.0]))
    assert largest_difference(requests, values) == 0.0
    (up,) = (x for path, x in nnx.to_flat_state(gradients) if path[-1] == "up")
    assert (up[...][:, :, 0] != 0).any() and (up[...][:, :, 1] == 0).all()


@pytest.fixture(scope="module")
def one_layer():
    """(configuration, float arrays of a model with one layer, function from these to the model)."""
    config = DSV4Config.from_hf(TINY).with_layers([LayerSpec.csa()])
    graph, floats, others = nnx.split(DeepseekV4ForCausalLM(config, jnp.float32, rngs=nnx.Rngs(0)), _is_float, ...)
    return config, floats, lambda floats: nnx.merge(graph, floats, others)


def _is_float(_, value):
    return jnp.issubdtype(value.get_value().dtype, jnp.floating)


TOKENS = jnp.asarray(np.random.default_rng(1).integers(160, size=(2, 40)), jnp.int32)
LENGTHS = jnp.array([40, 23], jnp.int32)
WEIGHTS = np.random.default_rng(2).normal(size=TOKENS.shape).astype(np.float32)


@pytest.mark.parametrize("kv_format", ["v4", "plain"])
def test_gradient_is_that_of_one_prefill_in_a_differentiable_format(one_layer, kv_format):
    config, floats, merge = one_layer
    shape = RolloutShape(make_manager(config, kv_format=kv_format).schema, token_budget=16, logits_rows=3)
    found = jax.jit(jax.grad(lambda x: jnp.sum(WEIGHTS * logprobs(merge(x), TOKENS, LENGTHS, shape))))(floats)

    @jax.jit
    @jax.grad
    def expected(floats):
        total = 0.0
        for tokens, length, weights in zip(np.asarray(TOKENS), np.asarray(LENGTHS), WEIGHTS, strict=True):
            manager = make_manager(config, kv_format=FakeQuantFormat(V4Format()) if kv_format == "v4" else kv_format)
            ids = tokens[:length]
            batch = manager.prepare_forward({manager.admit(): ids})
            hidden, _ = merge(floats)(manager.init_cache(), batch)
            values = jax.nn.log_softmax(merge(floats).logits(hidden[: length - 1]))
            total += jnp.sum(weights[1:length] * values[np.arange(length - 1), ids[1:]])
        return total

    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected(floats))


def test_gradient_agrees_with_differences_of_values(one_layer):
    config, floats, merge = one_layer
    shape = RolloutShape(make_manager(config, kv_format="plain").schema, token_budget=16, logits_rows=3)
    loss = jax.jit(lambda x: jnp.sum(WEIGHTS * logprobs(merge(x), TOKENS, LENGTHS, shape)))
    gradient = jax.jit(jax.grad(loss))(floats)
    size = jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(gradient)))
    step = 1e-2 / size
    ahead = loss(jax.tree.map(lambda x, y: x + step / size * y, floats, gradient))
    behind = loss(jax.tree.map(lambda x, y: x - step / size * y, floats, gradient))
    # A step of 0.01 divided by the gradient's norm squared changes the loss by 0.02, with rounding errors of 1e-5.
    np.testing.assert_allclose((ahead - behind) / (2 * step), size, rtol=5e-3)


def test_other_arrays_of_tokens_and_lengths_give_the_same_values(one_layer, untyped):
    config, floats, merge = one_layer
    shape = RolloutShape(make_manager(config).schema, token_budget=16, logits_rows=3)
    values = jax.jit(lambda tokens, lengths: logprobs(merge(floats), tokens, lengths, shape))
    expected = values(TOKENS, LENGTHS)
    for dtype in (jnp.uint8, jnp.uint32):
        np.testing.assert_array_equal(values(TOKENS.astype(dtype), LENGTHS), expected)
        np.testing.assert_array_equal(values(TOKENS, LENGTHS.astype(dtype)), expected)
    constants = np.asarray(TOKENS), np.asarray(LENGTHS)
    np.testing.assert_array_equal(jax.jit(lambda: logprobs(merge(floats), *constants, shape))(), expected)


def test_refuses_what_does_not_fit(one_layer, untyped):
    config, floats, merge = one_layer
    model = merge(floats)
    shape = RolloutShape(make_manager(config).schema, token_budget=16, logits_rows=3)
    with pytest.raises(ValueError, match="lengths must be from 0 to 40, got"):
        logprobs(model, TOKENS, np.array([41, 3]), shape)
    with pytest.raises(ValueError, match=r"tokens must be \[S, N\] or \[N\]"):
        logprobs(model, TOKENS, np.array([3]), shape)
    with pytest.raises(ValueError, match="sum up to 60, but there are 40"):
        logprobs(model, TOKENS[0], np.array([30, 30]), shape)
    with pytest.raises(TypeError, match="tokens has dtype float32"):
        logprobs(model, TOKENS.astype(jnp.float32), LENGTHS, shape)
    adapted = merge(floats)
    add_adapters(adapted, ["a"], rank=2, targets=["o_b_proj"])
    for number in (1, -2):
        with pytest.raises(ValueError, match=rf"adapters must be from -1 to 0, got \[0, {number}\]"):
            logprobs(adapted, TOKENS, LENGTHS, shape, np.array([0, number]))
    with pytest.raises(ValueError, match="batch_invariant=True"):
        _ = Engine(model, make_manager(config)).rollout_shape
