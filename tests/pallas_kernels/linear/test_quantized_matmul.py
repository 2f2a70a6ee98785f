"""The kernel of many tokens against float64: interpreted, on a GPU, and compiled for one."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.ops import LinearSpec
from dsv4_jax.quant import LayerSlice
from pallas_kernels.linear.quantized_matmul import Config, quantized_matmul
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.linear.test_quantized_linear import BF16, F32, check, check_swiglu, random_weight
from tests.pallas_kernels.stacks import LAYERS, check_kernel


# Tiles with fewer rows and tokens than others, outputs of two dtypes; several tiles a block, not all in one batch
# of tiles of tokens, and groups with inputs of their own; one and two warpgroups that multiply.
@pytest.mark.parametrize(
    ("tokens", "outputs", "depth", "groups", "warpgroups"),
    [(5, ((64, BF16), (128, F32)), 256, 1, 1), (70, ((128, BF16), (128, F32)), 128, 2, 2)],
)
def test_interpreted(tokens, outputs, depth, groups, warpgroups):
    def linear(x, weight, spec):
        config = Config(tile_tokens=32, warpgroups=warpgroups, batch_tiles=2)
        return quantized_matmul(x, (weight.codes, weight.scale), spec=spec, config=config, interpret=True)

    check(linear, tokens, outputs, depth, groups)


# Rows and columns in no multiples of 128; groups with inputs of their own.
@pytest.mark.parametrize(("outputs", "depth", "groups"), [(((64, BF16), (128, F32)), 192, 1), (((256, F32),), 64, 2)])
def test_blocks_of_32_interpreted(outputs, depth, groups):
    def linear(x, weight, spec):
        config = Config(tile_tokens=32, batch_tiles=2)
        operands = x, (weight.codes, weight.scale)
        return quantized_matmul(*operands, spec=spec, scale_block=32, config=config, interpret=True)

    check(linear, 40, outputs, depth, groups, kind="FP8_32")


def test_swiglu_interpreted():
    check_swiglu("interpret", 33, 128, 256)


def test_swiglu_of_blocks_of_32_interpreted():
    check_swiglu("interpret", 33, 192, 320, kind="FP8_32")


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("limit", [None, pytest.param(7.0, marks=pytest.mark.slow)])
def test_one_layer_of_a_stack(implementation, limit):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((33, 256)), jnp.bfloat16)
    # Without SwiGLU: scales of one and a half blocks of rows.
    sizes = (64, 128) if limit is None else (128, 128)
    options = dict(spec=LinearSpec(sizes, BF16), swiglu_limit=limit, interpret=implementation == "interpret")

    def run(weight, **layer):
        return quantized_matmul(x, (weight.codes, weight.scale), **layer, **options)

    check_kernel(run, [random_weight(rng, sum(sizes), 256)[0] for _ in range(LAYERS)])


# The last tile of tokens is not full. XLA adds up the same products in another order.
@pytest.mark.parametrize(
    ("implementation", "tokens", "rows", "depth"),
    [("interpret", 70, 1088, 64), pytest.param("mosaic_gpu", 1000, 2624, 4096, marks=pytest.mark.gpu)],
)
def test_bfloat16_of_a_stack(implementation, tokens, rows, depth):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((tokens, depth)), BF16)
    stack = jnp.asarray(rng.standard_normal((2, rows, depth)), BF16)
    spec = LinearSpec((64, rows - 64), (BF16, F32))

    def linear(layer, implementation):
        return ops.linear(x, LayerSlice(stack[layer], stack, layer), spec, implementation=implementation)

    for layer in range(2):
        rounded, exact = linear(jnp.int32(layer), implementation)
        product = np.float64(x) @ np.float64(stack[layer]).T
        bound = np.abs(np.float64(x)) @ np.abs(np.float64(stack[layer])).T * depth / 16 * 2.0**-23
        assert (np.abs(np.float64(exact) - product[:, 64:]) <= bound[:, 64:]).all()
        chex.assert_trees_all_close(np.float64(rounded), product[:, :64], rtol=2.0**-8, atol=bound.max())


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "inner", "depth"), [(100, 2048, 4096), (2048, 2048, 4096), (300, 384, 512)])
def test_swiglu_on_gpu(tokens, inner, depth):
    check_swiglu("mosaic_gpu", tokens, inner, depth)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "outputs", "depth", "groups"),
    [
        # The second block of the last cluster has no rows.
        (33, ((64, BF16), (320, BF16)), 1024, 1),
        (400, ((64, F32), (576, BF16)), 256, 1),
        (100, ((1024, BF16), (512, F32)), 4096, 1),
        (300, ((1024, BF16),), 512, 4),
        (2048, ((4096, BF16),), 4096, 1),
        (4001, ((1024, BF16),), 1024, 1),
    ],
)
def test_on_gpu(tokens, outputs, depth, groups):
    check("mosaic_gpu", tokens, outputs, depth, groups)


# Maps of V4.1-Flash, of one device and of each of four.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "outputs", "depth", "groups"),
    [
        (100, ((1280, BF16), (512, F32)), 5120, 1),
        (300, ((1024, BF16),), 512, 4),
        (2048, ((5120, BF16),), 2304, 1),
        (4001, ((5120, BF16),), 576, 1),
    ],
)
def test_blocks_of_32_on_gpu(tokens, outputs, depth, groups):
    check("mosaic_gpu", tokens, outputs, depth, groups, kind="FP8_32")


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "inner", "depth"), [(100, 2304, 5120), (300, 576, 320)])
def test_swiglu_of_blocks_of_32_on_gpu(tokens, inner, depth):
    check_swiglu("mosaic_gpu", tokens, inner, depth, kind="FP8_32")


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(42, 60), (140, 161)])
def test_scales_far_from_one_on_gpu(scales):
    check("mosaic_gpu", 40, ((256, F32),), 512, scales=scales)


@pytest.mark.gpu
def test_a_token_has_the_same_sums_among_any_others_on_gpu():
    rng = np.random.default_rng(0)
    weight, _ = random_weight(rng, 512, 1024)
    x = jnp.asarray(rng.standard_normal((700, 1024)), jnp.bfloat16)
    whole, some = (ops.linear(part, weight, implementation="mosaic_gpu")[0] for part in (x, x[300:350]))
    chex.assert_trees_all_equal(np.asarray(whole[300:350]), np.asarray(some))


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import quantized_matmul
from pallas_kernels.linear import LinearSpec
S = jax.ShapeDtypeStruct
# All sizes of accumulators, and tokens and rows past the end of the last tile.
for tokens, rows, depth, groups in (2048, 32768, 1024, 1), (40, 4096, 8192, 1), (300, 1024, 512, 4), (99, 192, 1024, 1):
    x, codes = S((tokens, groups * depth), jnp.bfloat16), S((rows, depth), jnp.uint8)
    args = x, (codes, S((-(-rows // 128), depth // 128), jnp.uint8))
    run = functools.partial(quantized_matmul, spec=LinearSpec((64, rows - 64), (jnp.float32, jnp.bfloat16), groups))
    compile_for_h100(f"{tokens}x{rows}x{depth}", run, *args)
    if groups == 1 and rows > 192:
        spec = LinearSpec((rows // 2, rows // 2), jnp.bfloat16)
        run = functools.partial(quantized_matmul, spec=spec, swiglu_limit=7.0)
        compile_for_h100(f"swiglu{tokens}x{rows}x{depth}", run, *args)
for tokens, rows, depth in (2048, 5120, 8192), (99, 192, 576):
    args = S((tokens, depth), jnp.bfloat16), (S((rows, depth), jnp.uint8), S((rows // 32, depth // 32), jnp.uint8))
    run = functools.partial(quantized_matmul, spec=LinearSpec((64, rows - 64)), scale_block=32)
    compile_for_h100(f"small_blocks{tokens}", run, *args)
args = S((2048, 5120), jnp.bfloat16), (S((1152, 5120), jnp.uint8), S((36, 160), jnp.uint8))
run = functools.partial(quantized_matmul, spec=LinearSpec((576, 576), jnp.bfloat16), swiglu_limit=7.0, scale_block=32)
compile_for_h100("small_blocks_swiglu", run, *args)
for tokens in 128, 2048:
    args = S((tokens, 4096), jnp.bfloat16), S((2624, 4096), jnp.bfloat16)
    compile_for_h100(f"bfloat16_{tokens}", functools.partial(quantized_matmul, spec=LinearSpec()), *args)
""")
    # Three warpgroups start with 168 registers each, and may not hold more together; two with 255.
    assert len(used) == 11 and max(used.values()) <= 255, used
