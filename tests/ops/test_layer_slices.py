"""Ops whose weights are slices of stacks, in a loop over equal layers: gradients, and a whole layer on a GPU."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.quant import LayerSlice
from tests.pallas_kernels import test_flush
from tests.pallas_kernels.kernels import compile_in_process
from tests.pallas_kernels.stacks import LAYERS
from tests.pallas_kernels.test_hyper_connections import MIXED, OPTIONS, operands
from tests.pallas_kernels.test_norm_rope import rings_of


TOKENS = 2
WIDTH = 1024
EXPERTS = 128
HEADS = 64


def scan_layers(step, carry, stacks):
    """Runs `carry = step(slices, carry)` for the layers of a pytree of stacks."""

    def body(carry, layer):
        values, number = layer
        slices = jax.tree.map(
            lambda value, stack: LayerSlice(value, jax.lax.stop_gradient(stack), number), values, stacks
        )
        return step(slices, carry), None

    return jax.lax.scan(body, carry, (stacks, jnp.arange(LAYERS, dtype=jnp.int32)))[0]


def stacked(*shape, std=1.0):
    draw = np.random.default_rng(shape).standard_normal((LAYERS, *shape))
    return jnp.asarray(std * draw, jnp.float32)


def mixing_weights():
    """Stacks of (fn, base, scale, weight of the norm)."""
    return stacked(MIXED, 4 * WIDTH, std=0.02), stacked(MIXED), 1 + stacked(3, std=0.1), 1 + stacked(WIDTH, std=0.1)


def mix(weights, streams, y, mixing, implementation=None):
    fn, base, scale, norm = weights
    weights = ops.HyperConnectionWeights(fn, base, scale, **OPTIONS)
    return ops.hyper_connections(streams, weights, norm, y, mixing, implementation=implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_gradients_of_stacks_are_those_of_separate_layers(implementation):
    """Also beside a table, which has none."""
    streams, *_, y, mixing = operands(TOKENS, WIDTH)
    tables = jnp.asarray(np.random.default_rng(0).permutation(LAYERS * 64).reshape(LAYERS, 16, 4) % EXPERTS, jnp.int32)
    ids = jnp.arange(TOKENS, dtype=jnp.int32)
    weights = (*mixing_weights(), stacked(EXPERTS, WIDTH, std=0.03))
    direction = stacked(4, WIDTH)[:1]

    def step(implementation, weights, streams):
        *mixed, router, table = weights
        streams, x, _ = mix(mixed, streams, y, mixing, implementation)
        options = dict(top_k=4, scaling_factor=1.5, implementation=implementation)
        routing = ops.router(x, router, None, table, ids, **options)
        return streams + (x * routing.weights[:, :1].astype(x.dtype))[:, None, :]

    def loss(streams):
        return jnp.sum(streams.astype(jnp.float32) * direction)

    def looped(weights):
        return loss(scan_layers(functools.partial(step, implementation), streams, (*weights, tables)))

    def unrolled(weights):
        carry = streams
        for layer in range(LAYERS):
            carry = step("xla", jax.tree.map(lambda stack, layer=layer: stack[layer], (*weights, tables)), carry)
        return loss(carry)

    got, want = (jax.jit(jax.grad(function))(weights) for function in (looped, unrolled))
    for mine, other in zip(got, want, strict=True):
        largest = np.abs(other).max(axis=tuple(range(1, other.ndim)))
        assert largest.min() > 0
        # Streams of bfloat16 that are a unit off in some places, 2**-8 of a value.
        chex.assert_trees_all_close(mine, other, rtol=2**-6, atol=2**-6 * largest.max())


def layers_of_a_model():
    """(function, carry, stacks, rest): layers of all ops whose kernels take small weights, with CSA's compressors."""
    streams, *_, y, mixing = operands(TOKENS, WIDTH)
    window, slots, positions = rings_of(np.random.default_rng(0), TOKENS, "v4", ring=128)
    views = []
    compressors = []
    inputs = []
    for kind in ("csa", "index"):
        state, pool, weights, floats = test_flush.setup(kind, "v4", kinds=test_flush.RELEASED)
        views.append((state, pool))
        inputs.append((weights, floats(TOKENS, state.kv.shape[-1])))
        compressors.append((stacked(*weights.position_bias.shape), stacked(*weights.norm_weight.shape)))
    q = jnp.ones((TOKENS, HEADS, 512), jnp.bfloat16)
    stacks = mixing_weights(), (stacked(EXPERTS, WIDTH), stacked(EXPERTS)), stacked(512), compressors, stacked(HEADS)

    def run(carry, stacks, inputs, q, inv_freq, slots, positions):
        def step(weights, carry):
            streams, y, mixing, window, views = carry
            mixed, router, norm, compressors, sinks = weights
            streams, x, mixing = mix(mixed, streams, y, mixing)
            routing = ops.router(x, *router, slots=slots, top_k=6, scaling_factor=1.5)
            rotated, window = ops.norm_rope_append(window, q, x[:, :512], norm, slots, positions, inv_freq, eps=1e-6)
            given = []
            for view, (position_bias, norm_weight), (own, kv) in zip(views, compressors, inputs, strict=True):
                own = dataclasses.replace(own, position_bias=position_bias, norm_weight=norm_weight)
                given.append(ops.CompressorInputs(*view, kv, kv, own))
            views = ops.flush(given, slots, positions, max_query_tokens=1)
            kv = ops.AttentionKV(window, views[0][1])
            out = ops.sparse_attention(rotated, sinks, kv, slots, positions, inv_freq=inv_freq)
            y = out[:, :2].reshape(TOKENS, WIDTH) * routing.weights[:, :1].astype(out.dtype)
            return streams, y, mixing, window, views

        with ops.use_implementation("mosaic_gpu"):
            return scan_layers(step, carry, stacks)

    carry = streams, y, mixing, window, views
    return run, carry, stacks, inputs, q, inputs[0][0].inv_freq, slots, positions


@pytest.mark.aot
def test_no_weight_is_copied_in_a_loop_over_layers():
    compile_in_process("""
import jax
from tests.ops.test_layer_slices import layers_of_a_model
from tests.pallas_kernels.stacks import check_not_copied
run, carry, stacks, *others = layers_of_a_model()
compiled = compile_for_h100("layers", run, carry, stacks, *others, donate_argnums=0)
check_not_copied(compiled, *jax.tree.leaves(stacks))
calls = compiled.as_text().count('custom_call_target="mosaic_gpu')
assert calls == 8, calls  # two of hyper-connections and the router each, two of attention, norm_rope_append, flush
""")
