"""Weights that stay quantized: the values of the bytes, by every way of reading them, and where they are read."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from dsv4_jax import ops
from dsv4_jax.nn import Experts, Linear
from dsv4_jax.quant import QuantizedWeight


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCKS = {"FP8": (128, 128), "FP8_32": (32, 32), "FP8_ROWS": (1, 32), "FP4": (1, 32)}


def random_weight(kind, shape, dtype=jnp.bfloat16, scales=(118, 127)):
    """A stored weight and its values by the definition, in float64."""
    rng = np.random.default_rng(0)
    *leading, rows, columns = shape
    codes = rng.integers(0, 256, (*leading, rows, columns // 2 if kind == "FP4" else columns), np.uint8)
    block_rows, block_columns = BLOCKS[kind]
    scale = rng.integers(*scales, (*leading, -(-rows // block_rows), -(-columns // block_columns)), np.uint8)
    powers = 2.0 ** (scale.astype(np.float64) - 127)
    if kind == "FP4":
        values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(shape)
        values = values * np.repeat(powers, 32, axis=-1)
    else:
        codes = np.where(codes & 0x7F == 0x7F, 0, codes)  # no NaN
        powers = np.repeat(np.repeat(powers, block_rows, axis=-2), block_columns, axis=-1)[..., :rows, :columns]
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * powers
    return QuantizedWeight(jnp.asarray(codes), jnp.asarray(scale), kind, jnp.dtype(dtype)), values


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("FP8", (130, 200)), ("FP8", (3, 128, 256)), ("FP8_32", (72, 200)), ("FP8_32", (3, 96, 40)),
        ("FP8_ROWS", (5, 72)), ("FP4", (6, 64)), ("FP4", (4, 5, 96)),
    ],
)  # fmt: skip
def test_values_are_exact(kind, shape, dtype):
    stored, values = random_weight(kind, shape, dtype, scales=(10, 247))
    parameter = nnx.Param(stored)
    assert (parameter.shape, parameter.dtype) == (shape, dtype)
    got = jax.jit(lambda parameter: parameter[...])(parameter)
    assert got.dtype == dtype
    chex.assert_trees_all_equal(np.asarray(got, np.float64), values)
    if len(shape) == 3:
        chosen = jnp.asarray([2, 0, 2])
        chex.assert_trees_all_equal(parameter[chosen], got[chosen])


@pytest.mark.parametrize("groups", [1, 2])
def test_linears_give_the_same_bits(groups):
    stored, values = random_weight("FP8", (200, 64))
    layer = Linear(64 * groups, 200, num_groups=groups, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (5, 64 * groups), jnp.bfloat16)
    layer.weight = nnx.Param(jnp.asarray(values, jnp.bfloat16))
    want = jax.jit(lambda layer: layer(x))(layer)
    layer.weight = nnx.Param(stored)
    chex.assert_trees_all_equal(jax.jit(lambda layer: layer(x))(layer), want)


@pytest.mark.parametrize("tokens", [2, 30], ids=["fewer pairs than experts", "more"])
def test_experts_give_the_same_bits(config, tokens):
    layer = Experts(config, 0, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    number = config.n_routed_experts
    hidden = config.hidden_size
    inner = config.moe_intermediate_size
    x = jax.random.normal(jax.random.key(1), (tokens, hidden), jnp.bfloat16)
    experts = jax.random.randint(jax.random.key(2), (tokens, 2), 0, number, jnp.int32)
    weights = jnp.ones((tokens, 2))
    up = random_weight("FP4", (number, 2, inner, hidden))
    down = random_weight("FP4", (number, hidden, inner))
    results = []
    for part in (1, 0):
        layer.gate_up_proj, layer.down_proj = (
            nnx.Param(both[0] if part == 0 else jnp.asarray(both[1], jnp.bfloat16)) for both in (up, down)
        )
        results.append(jax.jit(lambda layer: layer(x, ops.Routing(experts, weights)))(layer))
    assert np.abs(results[0]).max() > 0
    chex.assert_trees_all_equal(results[1], results[0])


def test_few_tokens_dequantize_their_experts_only(config):
    """Scratch memory of a decode step does not grow with the number of experts."""
    hidden = config.hidden_size
    inner = config.moe_intermediate_size
    scratch = []
    for number in (8, 64):
        layer = nnx.eval_shape(lambda: Experts(config, 0, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        layer.gate_up_proj = nnx.Param(random_weight("FP4", (number, 2, inner, hidden))[0])
        layer.down_proj = nnx.Param(random_weight("FP4", (number, hidden, inner))[0])
        x = jnp.zeros((2, hidden), jnp.bfloat16)
        routing = ops.Routing(jnp.zeros((2, 2), jnp.int32), jnp.ones((2, 2)))
        compiled = jax.jit(lambda layer, *args: layer(*args)).lower(layer, x, routing).compile()
        scratch.append(compiled.memory_analysis().temp_size_in_bytes)
    assert scratch[0] == scratch[1] > 0
