"""Layers of one kind in a loop on the device: `cache.handle` with a traced number."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.cache import CacheSchema
from dsv4_jax.config.layer_spec import CSA
from dsv4_jax.nn import Attention, StepCarry
from tests.cache.reference import poisoned_cache
from tests.cache.test_handle import make_batch
from tests.ops.pools import ints


def test_a_scan_over_stacked_layers_is_the_loop_over_them(config, draw):
    """The model's other layers are of other kinds; both CSA layers close windows in the step."""
    layers = [i for i, kind in enumerate(config.layer_types) if kind == CSA]
    assert len(layers) == 2 and len(set(config.layer_types)) == 3
    schema = CacheSchema(config, num_blocks=12, max_requests=3, max_context=64, block_tokens=16, max_query_tokens=3)
    attentions = [Attention(config, i, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(i)) for i in layers]
    graph, first = nnx.split(attentions[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), first, nnx.state(attentions[1]))

    def loop(x, cache, batch):
        for layer, attention in zip(layers, attentions, strict=True):
            y, _, cache = attention(x, cache.handle(layer, batch), StepCarry())
            x = jax.lax.optimization_barrier(x + y)  # rounded after every layer, as the carry of a scan is
        return x, cache

    def scan(x, cache, batch):
        def step(carry, layer):
            x, cache = carry
            number, state = layer
            y, _, cache = nnx.merge(graph, state)(x, cache.handle(number, batch, like=layers[0]), StepCarry())
            return (x + y, cache), None

        return jax.lax.scan(step, (x, cache), (ints(layers), stacked))[0]

    positions = [*range(16), -1]
    x = jnp.asarray(draw(17, config.hidden_size), jnp.bfloat16)
    batch = make_batch([1] * 16 + [-1], positions)
    cache = poisoned_cache(schema)
    cache = cache.begin_step(make_batch([-1], [-1], new_blocks=[(1, 0, 5)]))
    expected = jax.jit(loop)(x, cache, batch)
    found = jax.jit(scan)(x, cache, batch)
    chex.assert_trees_all_equal(found, expected)
    group = found[1].groups["csa4"]
    before = cache.groups["csa4"]
    for new, old in zip(jax.tree.leaves(group), jax.tree.leaves(before), strict=True):
        assert (np.asarray(new) != np.asarray(old)).any(axis=tuple(range(1, new.ndim))).all(), "a layer wrote nothing"


def test_a_traced_layer_needs_a_kind(config):
    cache = poisoned_cache(CacheSchema(config, num_blocks=1, max_requests=1, max_context=16, block_tokens=16))
    batch = make_batch([0], [0])
    with pytest.raises(ValueError, match="layer is traced and .* several kinds: layer 0 is .*give like="):
        jax.eval_shape(lambda layer: cache.handle(layer, batch).valid_lengths(), ints(1))
    with pytest.raises(ValueError, match="like=9 must be at most 4"):
        jax.eval_shape(lambda layer: cache.handle(layer, batch, like=9).valid_lengths(), ints(1))
