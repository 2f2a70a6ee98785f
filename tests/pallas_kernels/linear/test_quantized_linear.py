"""The linear kernel of FP8 and bfloat16 weights against float64: interpreted, on a GPU, and compiled for one."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.ops import LinearSpec
from dsv4_jax.quant import QuantizedWeight
from dsv4_jax.quant.quantized_weight import BLOCKS
from pallas_kernels.linear.quantized_linear import MAX_NORMED_TOKENS, MAX_TOKENS, Config, quantized_linear
from tests.pallas_kernels.kernels import check_repeats, registers
from tests.pallas_kernels.stacks import LAYERS, check_kernel, check_layers


BF16 = jnp.bfloat16
F32 = jnp.float32


def make_spec(outputs, groups=1):
    """The spec of outputs given as (size, dtype)."""
    sizes, dtypes = zip(*outputs, strict=True)
    return LinearSpec(sizes, dtypes, groups)


def random_weight(rng, rows, depth, scales=(110, 124), kind="FP8"):
    """A weight and its values in float64."""
    block, _ = BLOCKS[kind]
    codes = rng.integers(0, 256, (rows, depth)).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # no NaN
    scale = rng.integers(*scales, (-(-rows // block), depth // block)).astype(np.uint8)
    powers = np.repeat(np.repeat(2.0 ** (scale.astype(np.float64) - 127), block, axis=0), block, axis=1)[:rows]
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * powers
    return QuantizedWeight(jnp.asarray(codes), jnp.asarray(scale), kind, jnp.dtype(jnp.bfloat16)), values


def check(implementation, tokens, outputs, depth, groups=1, scales=(110, 124), plain=0, kind="FP8"):
    """Compares `ops.linear` or another implementation of it with float64.

    `plain`: number of outputs, the last ones, of a second weight, in bfloat16.
    """
    rng = np.random.default_rng(tokens)
    rows = sum(size for size, _ in outputs)
    x = jnp.asarray(rng.standard_normal((tokens, groups * depth)), jnp.bfloat16)
    plain_rows = sum(size for size, _ in outputs[len(outputs) - plain :])
    weight, values = random_weight(rng, rows - plain_rows, depth, scales, kind)
    if plain:
        bfloat16 = rng.standard_normal((plain_rows, depth)).astype(ml_dtypes.bfloat16)
        weight = (weight, jnp.asarray(bfloat16))
        values = np.concatenate([values, bfloat16.astype(np.float64)])
    is_name = isinstance(implementation, str)
    linear = functools.partial(ops.linear, implementation=implementation) if is_name else implementation
    found = jax.jit(functools.partial(linear, spec=make_spec(outputs, groups)))(x, weight)
    inputs = np.asarray(x, np.float64).reshape(tokens, groups, depth).swapaxes(0, 1)
    matrices = values.reshape(groups, -1, depth).swapaxes(1, 2)
    want = (inputs @ matrices).swapaxes(0, 1).reshape(tokens, -1)
    # A tensor core adds 16 products at a time and cuts off what float32 does not hold, up to 2**-23 of a partial sum;
    # none is larger than the sum of the products' sizes. bfloat16 has 8 bits.
    bound = (np.abs(inputs) @ np.abs(matrices)).swapaxes(0, 1).reshape(tokens, -1) * depth / 16 * 2.0**-23
    bounds = np.cumsum([size for size, _ in outputs])[:-1]
    for (_, dtype), got, expected, atol in zip(
        outputs, found, np.split(want, bounds, axis=1), np.split(bound, bounds, axis=1), strict=True
    ):
        assert got.dtype == dtype
        assert got.shape == expected.shape
        error = np.abs(np.float64(got) - expected)
        assert (error <= (2.0**-8 * np.abs(expected) if dtype == BF16 else 0) + atol).all()


def check_swiglu(implementation, tokens, inner, depth, limit=1.0, kind="FP8"):
    """The kernel's SwiGLU against that of exact products; a rounded gate or up may go the other way."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, depth)), jnp.bfloat16)
    weight, values = random_weight(rng, 2 * inner, depth, (115, 120), kind)
    got = jax.jit(functools.partial(ops.linear_swiglu, limit=limit, implementation=implementation))(x, weight)
    assert got.shape == (tokens, inner) and got.dtype == jnp.bfloat16
    gate, up = np.split(np.asarray(x, np.float64) @ values.T, 2, axis=1)
    assert (gate > limit).any() and (np.abs(up) > limit).any() and (np.abs(up) < limit).any()
    gate = np.minimum(gate, limit)
    up = np.clip(up, -limit, limit)
    want = gate / (1 + np.exp(-gate)) * up
    # gate and up within half a bfloat16 each of values up to the limit, whose factor is at most the limit, and the sum
    # of what is added in float32; then the result's own rounding.
    chex.assert_trees_all_close(np.float64(got), want, rtol=3 * 2.0**-8, atol=2.0**-8 * limit**2)


# Outputs of two dtypes and fewer tokens than columns of a product; groups with inputs of their own.
@pytest.mark.parametrize(
    ("tokens", "outputs", "depth", "groups"),
    [(3, ((64, BF16), (64, F32)), 256, 1), (9, ((128, BF16), (128, F32)), 256, 2)],
)
def test_interpreted(tokens, outputs, depth, groups):
    check("interpret", tokens, outputs, depth, groups)


# Nine steps a tile, which the warpgroups take in turns; the shares of a cluster's blocks with five steps each; groups.
@pytest.mark.parametrize(
    ("tokens", "outputs", "depth", "groups"),
    [(3, ((64, BF16), (256, F32)), 576, 1), (9, ((64, BF16),), 640, 1), (8, ((128, BF16), (128, F32)), 64, 2)],
)
def test_blocks_of_32_interpreted(tokens, outputs, depth, groups):
    check("interpret", tokens, outputs, depth, groups, kind="FP8_32")


def check_norm(implementation, tokens, rows, depth):
    """Some values of the norm round the other way in bfloat16: the kernel's sum of squares has an order of its own."""
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(3 * rng.standard_normal((tokens, depth)), jnp.bfloat16)
    weight, values = random_weight(rng, rows, depth)
    norm = rng.uniform(0.5, 2, depth).astype(np.float32)
    linear = functools.partial(ops.linear, implementation=implementation)
    (got,) = jax.jit(lambda x, weight, norm: linear(x, weight, norm=(norm, 1e-6)))(x, weight, norm)
    exact = np.asarray(x, np.float64)
    exact = norm * exact / np.sqrt(np.mean(exact**2, axis=1, keepdims=True) + 1e-6)
    want = exact @ values.T
    # Half a bfloat16 of each input, as if all went the same way.
    assert (np.abs(np.float64(got) - want) <= 2.0**-8 * np.abs(exact) @ np.abs(values).T).all()
    # Nearly all inputs are those of the reference: the products differ by far less than by such roundings.
    (same,) = ops.linear(x, weight, norm=(jnp.asarray(norm), 1e-6), implementation="xla")
    assert np.median(np.abs(np.float64(got) - np.float64(same))) <= 2.0**-12 * np.median(np.abs(want))


@pytest.mark.parametrize(("tokens", "depth"), [(3, 256), (18, 512)])
def test_norm_interpreted(tokens, depth):
    check_norm("interpret", tokens, 128, depth)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 9, 16, 32])
@pytest.mark.parametrize(("rows", "depth"), [(40960, 1024), (256, 4096)])
def test_norm_on_gpu(tokens, rows, depth):
    check_norm("mosaic_gpu", tokens, rows, depth)


# The last output has half a tile, as the weights of 32 index heads.
def test_half_a_tile_beside_blocks_of_32_interpreted():
    check("interpret", 3, ((64, BF16), (64, F32), (32, BF16)), 384, plain=2, kind="FP8_32")


# Two blocks: the second's stretch has tiles of the first weight and then those of the other.
@pytest.mark.parametrize("tokens", [3, 9])
def test_bfloat16_beside_fp8_interpreted(tokens):
    check("interpret", tokens, ((128, BF16), (64, BF16), (64, F32)), 512, plain=1)


def test_swiglu_interpreted():
    check_swiglu("interpret", 3, 128, 256)


# A number of rows that is no multiple of 128.
def test_swiglu_of_blocks_of_32_interpreted():
    check_swiglu("interpret", 3, 192, 320, kind="FP8_32")


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "inner", "depth"), [(1, 2048, 4096), (9, 128, 512), (32, 2048, 4096)])
def test_swiglu_on_gpu(tokens, inner, depth):
    check_swiglu("mosaic_gpu", tokens, inner, depth)


# Warpgroups add to one place, in turn; more tokens than a launch takes; blocks of a cluster that add up. Several tiles
# a block, of more stages than there are.
# With blocks of 32, five steps a tile of two stages each, in turns.
@pytest.mark.parametrize(
    ("tokens", "config", "depth", "kind"),
    [
        (25, Config(32, places=1, max_stages=8), 512, "FP8"),
        (9, Config(8, max_stages=8), 512, "FP8"),
        (8, Config(8, splits=2), 512, "FP8"),
        (9, Config(16, places=1, max_stages=8), 640, "FP8_32"),
    ],
)
def test_configs_interpreted(tokens, config, depth, kind):
    def linear(x, weight, spec):
        options = {"config": dataclasses.replace(config, workers=2), "scale_block": weight.block[0]}
        return quantized_linear(x, ((weight.codes, weight.scale),), spec=spec, interpret=True, **options)

    check(linear, tokens, ((192, BF16), (64, F32)), depth, kind=kind)


# A tile's number in its block decides which warpgroup multiplies which steps.
def test_bits_are_the_same_whichever_warpgroup_has_the_turn():
    rng = np.random.default_rng(0)
    weight, _ = random_weight(rng, 256, 320, kind="FP8_32")
    x = jnp.asarray(rng.standard_normal((2, 320)), jnp.bfloat16)
    operands = x, ((weight.codes, weight.scale),)
    options = {"spec": LinearSpec(), "scale_block": 32, "interpret": True}
    one, other = (quantized_linear(*operands, config=Config(8, workers=workers), **options) for workers in (1, 3))
    chex.assert_trees_all_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "depth", "groups"),
    [
        (((32768, BF16), (8192, BF16)), 1024, 1),
        (((1024, BF16), (512, F32)), 4096, 1),
        (((4096, BF16),), 8192, 1),
        (((8192, BF16),), 4096, 8),
    ],
)
@pytest.mark.parametrize("tokens", [1, 8, 20, 32])
def test_on_gpu(tokens, outputs, depth, groups):
    check("mosaic_gpu", tokens, outputs, depth, groups)


# Maps of V4.1-Flash, whole and a fourth of them on each of four devices.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "depth", "groups"),
    [
        (((1280, BF16), (512, BF16)), 5120, 1),
        (((32768, BF16), (4096, BF16)), 1280, 1),
        (((8192, BF16),), 4096, 8),
        (((5120, BF16),), 8192, 1),
        (((5120, BF16),), 2048, 1),
        (((5120, BF16),), 2304, 1),
        (((5120, F32),), 576, 1),
        (((25600, F32),), 6144, 1),
    ],
)
@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_blocks_of_32_on_gpu(tokens, outputs, depth, groups):
    check("mosaic_gpu", tokens, outputs, depth, groups, kind="FP8_32")


@pytest.mark.gpu
@pytest.mark.parametrize("plain", [((512, F32), (512, F32), (32, BF16)), ((512, BF16), (32, BF16)), ((32, BF16),)])
@pytest.mark.parametrize("tokens", [1, 9, 32])
def test_bfloat16_beside_blocks_of_32_on_gpu(tokens, plain):
    check("mosaic_gpu", tokens, ((1280, BF16), (512, BF16), *plain), 5120, plain=len(plain), kind="FP8_32")


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "inner", "depth"), [(1, 2304, 5120), (9, 576, 5120), (32, 576, 320)])
def test_swiglu_of_blocks_of_32_on_gpu(tokens, inner, depth):
    check_swiglu("mosaic_gpu", tokens, inner, depth, kind="FP8_32")


# The maps of the inputs of layers of V4-Flash; a weight of which no block has only whole tiles.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "depth", "plain"),
    [
        (((1024, BF16), (512, BF16), (1024, F32), (1024, F32), (256, F32), (256, F32), (64, BF16)), 4096, 5),
        (((1024, BF16), (512, BF16), (512, F32), (512, F32)), 4096, 2),
        (((64, BF16), (320, F32)), 512, 1),
        (((8192, BF16), (8192, BF16)), 1024, 1),
    ],
)
@pytest.mark.parametrize("tokens", [1, 8, 20, 32])
def test_bfloat16_beside_fp8_on_gpu(tokens, outputs, depth, plain):
    check("mosaic_gpu", tokens, outputs, depth, plain=plain)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "plain", "depth", "kind"),
    [
        (1536, 2624, 4096, "FP8"),
        (1536, 1024, 4096, "FP8"),
        (4096, 0, 8192, "FP8"),
        (32768, 0, 1280, "FP8_32"),
        (5120, 0, 576, "FP8_32"),
    ],
)
def test_a_token_has_the_same_bits_in_any_batch_on_gpu(rows, plain, depth, kind):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((32, depth)), jnp.bfloat16)
    weights = (random_weight(rng, rows, depth, kind=kind)[0],)
    if plain:
        weights += (jnp.asarray(rng.standard_normal((plain, depth)), jnp.bfloat16),)
    spec = LinearSpec((rows, plain)[: len(weights)])
    run = jax.jit(functools.partial(ops.linear, spec=spec, implementation="mosaic_gpu"))
    all_together = run(x, weights)
    for tokens in (1, 8, 12, 20):
        for alone, together in zip(run(x[:tokens], weights), all_together, strict=True):
            chex.assert_trees_all_equal(alone, together[:tokens])


# A stage of bfloat16 is multiplied without a loop. More than 32 tokens run in the kernels of one kind of weights.
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP8", "FP8_32"])
@pytest.mark.parametrize("tokens", [1, 32, 64, 512])
def test_equal_calls_have_equal_bits_on_gpu(tokens, kind):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((tokens, 4096)), jnp.bfloat16)
    plain = jnp.asarray(rng.standard_normal((1024, 4096)), jnp.bfloat16)
    weights = random_weight(rng, 1536, 4096, kind=kind)[0], plain
    check_repeats(ops.linear, x, weights, spec=LinearSpec((1536, 1024)))


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(42, 60), (140, 161)])
def test_scales_far_from_one_on_gpu(scales):
    check("mosaic_gpu", 8, ((256, F32),), 512, scales=scales)


def layers_of(rng, rows, plain, depth):
    """The weights of each layer, FP8 above bfloat16, and of its norm."""
    for _ in range(LAYERS):
        plain_weight = jnp.asarray(rng.standard_normal((plain, depth)), jnp.bfloat16)
        norm = jnp.asarray(rng.uniform(0.5, 2, depth), jnp.float32)
        yield (random_weight(rng, rows, depth)[0], plain_weight), norm


# The scales of 192 rows have more rows than those of 1.5 blocks; more tokens than a norm takes, and than a launch.
@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("tokens", "norm", "config"), [(3, True, None), (9, False, Config(workers=2))])
def test_one_layer_of_a_stack(implementation, tokens, norm, config):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((tokens, 512)), jnp.bfloat16)
    options = dict(spec=LinearSpec((192, 64)), eps=1e-6, config=config, interpret=implementation == "interpret")

    def run(weights, **layer):
        (quantized, plain), norm_weight = weights
        pairs = (quantized.codes, quantized.scale), plain
        return quantized_linear(x, pairs, norm_weight if norm else None, **layer, **options)

    check_kernel(run, list(layers_of(rng, 192, 64, 512)))


# A norm in the kernel and before it; the kernel for many tokens takes one weight.
@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [2, pytest.param(17, marks=pytest.mark.slow), 33])
def test_layers_in_a_loop(implementation, tokens):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((tokens, 512)), jnp.bfloat16)

    def call(weights, carry, implementation):
        matrices, norm = weights
        matrices = matrices if tokens <= MAX_TOKENS else matrices[:1]
        spec = LinearSpec(tuple(matrix.shape[0] for matrix in matrices))
        products = ops.linear(x, matrices, spec, norm=(norm, 1e-6), implementation=implementation)
        return carry, (products, ops.linear_swiglu(x, matrices[0], 7.0, implementation=implementation))

    check_layers(implementation, call, list(layers_of(rng, 256, 64, 512)), poison=tokens <= MAX_NORMED_TOKENS)


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import quantized_linear
from pallas_kernels.linear import LinearSpec
S = jax.ShapeDtypeStruct
# Clusters of one block and of several.
for tokens, rows, depth, groups in (1, 32768, 1024, 1), (32, 32768, 1024, 1), (32, 4096, 8192, 1), (8, 8192, 4096, 8):
    x, codes = S((tokens, groups * depth), jnp.bfloat16), S((rows, depth), jnp.uint8)
    args = x, ((codes, S((rows // 128, depth // 128), jnp.uint8)),)
    run = functools.partial(quantized_linear, spec=LinearSpec(output_dtype=jnp.bfloat16, num_groups=groups))
    compile_for_h100(f"{tokens}x{rows}x{depth}", run, *args)
    if groups == 1:
        norm, some = functools.partial(run, eps=1e-6), S((min(tokens, 16), depth), jnp.bfloat16)
        compile_for_h100(f"norm{tokens}x{rows}x{depth}", norm, some, *args[1:], S((depth,), jnp.float32))
        spec = LinearSpec((rows // 2, rows // 2), jnp.bfloat16)
        run = functools.partial(quantized_linear, spec=spec, swiglu_limit=7.0)
        compile_for_h100(f"swiglu{tokens}x{rows}x{depth}", run, *args)
for tokens in 1, 16:
    weights = (S((1536, 4096), jnp.uint8), S((12, 32), jnp.uint8)), S((2624, 4096), jnp.bfloat16)
    spec = LinearSpec((1536, 2560, 64), (jnp.bfloat16, jnp.float32, jnp.bfloat16))
    run = functools.partial(quantized_linear, spec=spec)
    compile_for_h100(f"mixed{tokens}", run, S((tokens, 4096), jnp.bfloat16), weights)
# Maps of V4.1-Flash: whole steps, and tiles whose steps the warpgroups take in turns.
sizes = (16, 32768, 1280), (32, 5120, 8192), (8, 5120, 576), (32, 1792, 5120), (32, 5120, 2048)
for tokens, rows, depth in sizes:
    weights = ((S((rows, depth), jnp.uint8), S((rows // 32, depth // 32), jnp.uint8)),)
    run = functools.partial(quantized_linear, spec=LinearSpec(output_dtype=jnp.bfloat16), scale_block=32, eps=1e-20)
    norm = (S((depth,), jnp.float32),) if tokens == 16 else ()
    compile_for_h100(f"small_blocks{tokens}x{rows}x{depth}", run, S((tokens, depth), jnp.bfloat16), weights, *norm)
weights = ((S((1152, 5120), jnp.uint8), S((36, 160), jnp.uint8)),)
run = functools.partial(quantized_linear, spec=LinearSpec((576, 576), jnp.bfloat16), swiglu_limit=7.0, scale_block=32)
compile_for_h100("small_blocks_swiglu", run, S((32, 5120), jnp.bfloat16), weights)
""")
    # One block of 768 threads a multiprocessor.
    assert len(used) == 18 and max(used.values()) <= 80, used


def test_its_gradient_is_that_of_the_reference():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 256)), jnp.bfloat16)
    weight, _ = random_weight(rng, 64, 256)

    def gradient(implementation):
        return jax.grad(lambda x: jnp.sum(ops.linear(x, weight, implementation=implementation)[0]))(x)

    chex.assert_trees_all_equal(np.float32(gradient("interpret")), np.float32(gradient("xla")))


def test_what_the_kernel_does_not_take_is_refused():
    rng = np.random.default_rng(0)
    weight, _ = random_weight(rng, 64, 256)
    for tokens in (8, 33):
        with pytest.raises(NotImplementedError, match="takes x as bfloat16"):
            ops.linear(jnp.zeros((tokens, 256), jnp.float32), weight, implementation="interpret")
    narrow, _ = random_weight(rng, 64, 128)
    with pytest.raises(NotImplementedError, match="columns in multiples of 256, got 128"):
        ops.linear(jnp.zeros((8, 128), jnp.bfloat16), narrow, implementation="interpret")
    fp4 = QuantizedWeight(
        jnp.zeros((64, 128), jnp.uint8), jnp.zeros((64, 8), jnp.uint8), "FP4", jnp.dtype(jnp.bfloat16)
    )
    with pytest.raises(NotImplementedError, match="stored as FP8, got FP4"):
        ops.linear(jnp.zeros((8, 256), jnp.bfloat16), fp4, implementation="interpret")
