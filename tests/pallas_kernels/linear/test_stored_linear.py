"""The linear kernel of FP8 weights against float64: interpreted, on a GPU, and compiled for one."""

import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.quant import StoredWeight
from tests.pallas_kernels.kernels import registers


def random_weight(rng, rows, depth, scales=(110, 124)):
    """A weight and its values in float64."""
    codes = rng.integers(0, 256, (rows, depth)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # no NaN
    scale = rng.integers(*scales, (-(-rows // 128), depth // 128)).astype(np.uint8)
    powers = np.repeat(np.repeat(2.0 ** (scale.astype(np.float64) - 127), 128, axis=0), 128, axis=1)[:rows]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * powers
    return StoredWeight(jnp.asarray(codes), jnp.asarray(scale), "FP8", jnp.dtype(jnp.bfloat16)), values


def check(implementation, tokens, parts, depth, groups=1, scales=(110, 124)):
    rng = np.random.default_rng(tokens)
    rows = sum(size for size, _ in parts)
    x = jnp.asarray(rng.standard_normal((tokens, groups * depth)), jnp.bfloat16)
    weight, values = random_weight(rng, rows, depth, scales)
    found = jax.jit(functools.partial(ops.linear, parts=parts, groups=groups, implementation=implementation))(x, weight)
    inputs = np.asarray(x, np.float64).reshape(tokens, groups, depth)
    matrices = values.reshape(groups, -1, depth)
    want = np.einsum("tgk,gmk->tgm", inputs, matrices).reshape(tokens, -1)
    # A tensor core adds 16 products at a time and cuts off what float32 does not hold, up to 2**-23 of a partial sum;
    # none is larger than the sum of the products' sizes. bfloat16 has 8 bits.
    bound = np.einsum("tgk,gmk->tgm", np.abs(inputs), np.abs(matrices)).reshape(tokens, -1) * depth / 16 * 2.0**-23
    bounds = np.cumsum([size for size, _ in parts])[:-1]
    for (_, rounded), got, expected, atol in zip(
        parts, found, np.split(want, bounds, axis=1), np.split(bound, bounds, axis=1), strict=True
    ):
        assert got.dtype == (jnp.bfloat16 if rounded else jnp.float32)
        assert got.shape == expected.shape
        error = np.abs(np.float64(got) - expected)
        assert (error <= (2.0**-8 * np.abs(expected) if rounded else 0) + atol).all()
    if implementation == "interpret":
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

        assert not interpret_pallas_call.get_races().races_found


def check_swiglu(implementation, tokens, inner, depth, limit=1.0):
    """The kernel's SwiGLU against that of exact products; a rounded gate or up may go the other way."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, depth)), jnp.bfloat16)
    weight, values = random_weight(rng, 2 * inner, depth, scales=(115, 120))
    (got,) = jax.jit(functools.partial(ops.linear, swiglu_limit=limit, implementation=implementation))(x, weight)
    assert got.shape == (tokens, inner) and got.dtype == jnp.bfloat16
    gate, up = np.split(np.asarray(x, np.float64) @ values.T, 2, axis=1)
    assert (gate > limit).any() and (np.abs(up) > limit).any() and (np.abs(up) < limit).any()
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    want = gate / (1 + np.exp(-gate)) * up
    # gate and up within half a bfloat16 each of values up to the limit, whose factor is at most the limit, and the sum
    # of what is added in float32; then the result's own rounding.
    np.testing.assert_allclose(np.float64(got), want, rtol=3 * 2.0**-8, atol=2.0**-8 * limit**2)
    if implementation == "interpret":
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

        assert not interpret_pallas_call.get_races().races_found


# Parts of two dtypes and fewer tokens than columns of a product; groups with inputs of their own.
@pytest.mark.parametrize(
    ("tokens", "parts", "depth", "groups"),
    [(3, ((64, True), (64, False)), 256, 1), (9, ((128, True), (128, False)), 256, 2)],
)
def test_interpreted(tokens, parts, depth, groups):
    check("interpret", tokens, parts, depth, groups)


def test_swiglu_interpreted():
    check_swiglu("interpret", 3, 128, 256)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "inner", "depth"), [(1, 2048, 4096), (9, 128, 512), (32, 2048, 4096)])
def test_swiglu_on_gpu(tokens, inner, depth):
    check_swiglu("mosaic_gpu", tokens, inner, depth)


def test_blocks_of_a_cluster_add_up_interpreted(monkeypatch):
    monkeypatch.setattr(sys.modules["pallas_kernels.linear.stored_linear"], "LEAST_STAGES", 24)
    check("interpret", 8, ((192, False),), 512)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("parts", "depth", "groups"),
    [
        (((32768, True), (8192, True)), 1024, 1),
        (((1024, True), (512, False)), 4096, 1),
        (((4096, True),), 8192, 1),
        (((8192, True),), 4096, 8),
    ],
)
@pytest.mark.parametrize("tokens", [1, 8, 20, 32])
def test_on_gpu(tokens, parts, depth, groups):
    check("mosaic_gpu", tokens, parts, depth, groups)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(42, 60), (140, 161)])
def test_scales_far_from_one_on_gpu(scales):
    check("mosaic_gpu", 8, ((256, False),), 512, scales=scales)


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import stored_linear
S = jax.ShapeDtypeStruct
# Clusters of one block and of several.
for tokens, rows, depth, groups in (1, 32768, 1024, 1), (32, 32768, 1024, 1), (32, 4096, 8192, 1), (8, 8192, 4096, 8):
    x, codes = S((tokens, groups * depth), jnp.bfloat16), S((rows, depth), jnp.uint8)
    args = x, codes, S((rows // 128, depth // 128), jnp.uint8)
    run = functools.partial(stored_linear, parts=((rows, True),), groups=groups)
    compile_for_h100(f"{tokens}x{rows}x{depth}", run, *args)
    if groups == 1:
        run = functools.partial(run, parts=((rows // 2, True),) * 2, limit=7.0)
        compile_for_h100(f"swiglu{tokens}x{rows}x{depth}", run, *args)
""")
    # One block of 640 threads a multiprocessor.
    assert len(used) == 7 and max(used.values()) <= 96, used


def test_its_gradient_is_that_of_the_reference():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 256)), jnp.bfloat16)
    weight, _ = random_weight(rng, 64, 256)

    def gradient(implementation):
        return jax.grad(lambda x: jnp.sum(ops.linear(x, weight, implementation=implementation)[0]))(x)

    np.testing.assert_array_equal(np.float32(gradient("interpret")), np.float32(gradient("xla")))


def test_what_the_kernel_does_not_take_is_refused():
    rng = np.random.default_rng(0)
    weight, _ = random_weight(rng, 64, 256)
    for tokens in (8, 33):
        with pytest.raises(NotImplementedError, match="takes x as bfloat16"):
            ops.linear(jnp.zeros((tokens, 256), jnp.float32), weight, implementation="interpret")
    narrow, _ = random_weight(rng, 64, 128)
    with pytest.raises(NotImplementedError, match="columns in multiples of 256, got 128"):
        ops.linear(jnp.zeros((8, 128), jnp.bfloat16), narrow, implementation="interpret")
    fp4 = StoredWeight(jnp.zeros((64, 128), jnp.uint8), jnp.zeros((64, 8), jnp.uint8), "FP4", jnp.dtype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="stored as FP8, got FP4"):
        ops.linear(jnp.zeros((8, 256), jnp.bfloat16), fp4, implementation="interpret")
