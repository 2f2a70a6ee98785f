"""`logprobs` on a mesh has the bits of a rollout on this mesh, and trains the arrays from which the engine runs."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.decode import RolloutShape, logprobs
from dsv4_jax.engine import Engine
from dsv4_jax.host import PrefixCache
from dsv4_jax.nn import DeepseekV4ForCausalLM, shardings
from dsv4_jax.parallel.mesh import make_mesh
from tests.engine.test_exact_logprobs import (
    CONFIGS,
    Remembered,
    exact,
    largest_difference,
    make_manager,
    padded,
    roll_out,
)


BOTH = dict(data=2, model=2)


def placed(model, mesh):
    return jax.device_put(model, shardings(model, mesh))


def make_engine(model, config, mesh, dtype=jnp.float32, drafter=None):
    """Returns an engine with a prefix cache, and with so few blocks in each shard that requests are preempted."""
    shards = mesh.shape.get("data", 1)
    sizes = dict(num_blocks=10 if shards == 1 else 6 * shards, max_requests=3 * shards)
    manager = make_manager(config, dtype, mesh=mesh, max_query_tokens=1 if drafter is None else 2, **sizes)
    prefix = PrefixCache(manager, key="model")
    return Engine(model, manager, token_budget=24, batch_invariant=True, drafter=drafter, prefix=prefix)


@pytest.mark.parametrize(
    ("name", "dtype", "drafter", "sizes"),
    [
        pytest.param("wide", jnp.float32, None, dict(model=4), marks=pytest.mark.slow),
        ("v4", jnp.bfloat16, Remembered(), dict(data=2)),
        pytest.param("v4 drafts", jnp.bfloat16, "model", BOTH, marks=pytest.mark.slow),
        pytest.param("v41", jnp.bfloat16, None, BOTH, marks=pytest.mark.slow),
    ],
)
def test_values_are_those_of_the_rollout(name, dtype, drafter, sizes):
    """Also of requests that were preempted, hit a cached prefix, or had drafts accepted."""
    config = CONFIGS[name]()
    if name == "wide":
        config = dataclasses.replace(config, o_groups=4, vocab_size=260)  # which four devices divide
    mesh = make_mesh(sizes)
    alone = DeepseekV4ForCausalLM(config, dtype, rngs=nnx.Rngs(0))
    model = placed(alone, mesh)
    engine = make_engine(model, config, mesh, dtype, drafter)
    requests = roll_out(engine, drafter)
    assert engine.metrics.preemptions > 0 and max(request.cached_tokens for request in requests) > 0
    if drafter is not None:
        assert engine.metrics.drafted_tokens > engine.metrics.accepted_tokens > 0

    tokens, lengths = padded(requests)
    values = exact(model, tokens, lengths, engine.rollout_shape)
    assert largest_difference(requests, values) == 0.0

    if drafter == "model" or "data" not in sizes:
        return
    # Packed sequences: those of each shard stand side by side, with padding at the end.
    halves = np.split(np.arange(len(requests)), sizes["data"])
    size = max(lengths[half].sum() for half in halves) + 5
    rows = [np.concatenate([requests[i].tokens for i in half]) for half in halves]
    packed = np.concatenate([np.pad(row, (0, size - len(row))) for row in rows])
    flat = [np.concatenate([np.asarray(values)[i, : lengths[i]] for i in half]) for half in halves]
    flat = np.concatenate([np.pad(row, (0, size - len(row))) for row in flat])
    np.testing.assert_array_equal(exact(model, packed, lengths, engine.rollout_shape), flat)


SMALL = DSV4Config.small([LayerSpec.csa(4)])
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def is_float(_, value):
    return jnp.issubdtype(value.get_value().dtype, jnp.floating)


class Learner:
    """A model's floating-point arrays and a program that trains them."""

    def __init__(self, model, shape):
        self.graph, self.floats, self.others = nnx.split(model, is_float, ...)
        self.shape = shape

    def model(self, floats):
        return nnx.merge(self.graph, floats, self.others)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(self, floats, tokens, lengths, weights):
        """Returns ((loss, log-probabilities), gradient) for weights [S, N] of the log-probabilities."""

        def loss(floats):
            values = logprobs(self.model(floats), tokens, lengths, self.shape)
            return jnp.sum(weights * values), values

        return jax.value_and_grad(loss, has_aux=True)(floats)

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, floats, moments, *inputs):
        """Returns (new floats, new moments, log-probabilities before the step)."""
        (_, values), gradient = self.gradient(floats, *inputs)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
            updates, moments = OPTIMIZER.update(gradient, moments, floats)
        return optax.apply_updates(floats, updates), moments, values


def shardings_of(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


@pytest.mark.slow
def test_gradients_are_those_of_one_device():
    """In the format "plain": rounding to codes could turn another order of sums into whole steps."""
    model = DeepseekV4ForCausalLM(SMALL, jnp.float32, rngs=nnx.Rngs(0))
    shape = RolloutShape(make_manager(SMALL, kv_format="plain").schema, token_budget=16, logits_rows=3)
    rng = np.random.default_rng(0)
    tokens = rng.integers(SMALL.vocab_size, size=(4, 40), dtype=np.int32)
    weights = rng.normal(size=tokens.shape).astype(np.float32)
    inputs = tokens, np.array([40, 23, 1, 34], np.int32), weights
    mesh = make_mesh(BOTH)
    one, on_mesh = (Learner(x, shape) for x in (model, placed(model, mesh)))
    expected = one.gradient(one.floats, *inputs)
    found = on_mesh.gradient(on_mesh.floats, *inputs)
    assert shardings_of(found[1]) == shardings_of(on_mesh.floats)
    assert max(np.abs(x).max() for x in jax.tree.leaves(expected[1])) > 0.05
    # Sums over devices have another order.
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(expected), rtol=1e-4, atol=3e-5)


def test_the_engine_runs_from_the_trained_arrays():
    """A rollout, a step of Adam and a swap, twice: no copy, one program of each kind, and equal log-probabilities."""
    mesh = make_mesh(BOTH)
    model = placed(DeepseekV4ForCausalLM(SMALL, jnp.float32, rngs=nnx.Rngs(0)), mesh)
    engine = make_engine(model, SMALL, mesh)
    learner = Learner(model, engine.rollout_shape)
    floats = learner.floats
    with jax.set_mesh(mesh):  # so that the counter of steps lies on the mesh too
        moments = OPTIMIZER.init(floats)
    where = shardings_of((floats, moments))
    for _ in range(2):
        requests = roll_out(engine, None)
        tokens, lengths = padded(requests)
        tokens = np.pad(tokens, ((0, 0), (0, 80 - tokens.shape[1])))
        floats, moments, values = learner.step(floats, moments, tokens, lengths, np.float32(tokens % 2))
        assert largest_difference(requests, values) == 0.0
        assert shardings_of((floats, moments)) == where
        assert shardings_of(moments[1][0].mu) == shardings_of(moments[1][0].nu) == shardings_of(floats)
        trained = learner.model(floats)
        with jax.transfer_guard("disallow"):
            engine.update_weights(trained)
        arrays = zip(engine._runner.model.arrays, jax.tree.leaves(trained), strict=True)
        assert all(mine is new for mine, new in arrays)
    assert learner.step._cache_size() == engine.metrics.compilations == 1


def test_refuses_what_does_not_fit(untyped):
    config = DSV4Config.small([LayerSpec()])
    model = placed(DeepseekV4ForCausalLM(config, jnp.float32), make_mesh(dict(data=2)))
    shape = RolloutShape(make_manager(config).schema, token_budget=16, logits_rows=3)
    lengths = np.array([30, 2])
    with pytest.raises(ValueError, match=r"mesh axis data=2 does not divide len\(tokens\)=3, len\(lengths\)=3: give"):
        logprobs(model, np.zeros((3, 40), np.int32), np.array([1, 2, 3]), shape)
    with pytest.raises(ValueError, match="sum up to 30, but there are 20 tokens in a shard"):
        logprobs(model, np.zeros((40,), np.int32), lengths, shape)

    mesh = make_mesh(dict(model=2))
    manager = make_manager(SMALL, mesh=mesh, context_parallel=True)
    engine = Engine(placed(DeepseekV4ForCausalLM(SMALL), mesh), manager, token_budget=8, batch_invariant=True)
    with pytest.raises(ValueError, match="context_parallel=True: attention adds up"):
        _ = engine.rollout_shape
