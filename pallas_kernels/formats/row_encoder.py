"""Encoders of rows and index keys, bit-equal to `dsv4_jax.quant`.

The functions for scales and codes take any register layout. `store_quantized` takes rows with one warp for each (see
`kv_rows`). `encode_row` and `encode_key` take vectors over a warpgroup (see `vectors`).
"""

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.formats.layouts import GROUP, KeyLayout, RowLayout
from pallas_kernels.mgpu import mlir, vectors
from pallas_kernels.runtime.launch import primitive


E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Midpoints between E2M1 magnitudes, and whether the midpoint itself rounds up.
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def block_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the E8M0 bits, int32, and the float32 factors of blocks of E4M3 values, from largest magnitudes."""
    bits = _e8m0_ceil(jnp.maximum(amax, 1e-4) * jnp.float32(1 / E4M3_MAX))
    return bits, _power_of_two(254 - bits)


def row_scale(amax: jax.Array, layout) -> tuple[jax.Array, jax.Array]:
    """Returns the inverse scales and the factors, float32, of rows of E4M3 values, from largest magnitudes."""
    inverse_scale = jnp.maximum(amax * jnp.float32(1 / E4M3_MAX), 1e-12)
    return inverse_scale, divide_one(inverse_scale, layout)


def e4m3_codes(x: jax.Array) -> jax.Array:
    """Rounds float32 to E4M3 bits, uint8, saturating."""
    return lax.bitcast_convert_type(_saturated(x).astype(jnp.float8_e4m3fn), jnp.uint8)


@primitive
def _saturated(x: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, -E4M3_MAX), E4M3_MAX)


# A GPU's conversions to E4M3 saturate.
_saturated.mosaic(lambda x: x)


@primitive
def divide_one(x: jax.Array, layout) -> jax.Array:
    """Returns 1 / x, float32 in a register layout, correctly rounded: Mosaic's own division is approximate."""
    return 1 / x


@divide_one.mosaic
def _(x, layout):
    def emit(x):
        f32 = mlir.f32_type()
        return [mlir.ptx("rcp.rn.f32 $0, $1;", value, results=f32, pure=True) for value in mlir.values(x)]

    return mlir.inline(emit, x, layout=lambda _: layout, returns=x)


def store_quantized(x: jax.Array, pools, row: jax.Array, layout: RowLayout) -> None:
    """Quantizes rows x [4, 8, 64] float32, one in each warp, and stores them, the padding of E8M0 scales included.

    `pools` are references to nope, rope and scale, [R, ..] in global memory; row -1 [4] int32 stores nothing.
    """
    nope, rope, scale = pools
    nope_groups = layout.nope_dim // GROUP
    if layout.scale_block is None:
        group = kv_rows.iota(x.shape, 1)
        largest = jnp.max(jnp.max(jnp.where(group < nope_groups, jnp.abs(x), 0.0), axis=2), axis=1)
        stored, factor = row_scale(largest, kv_rows.PER_ROW)
        factor = lax.broadcast_in_dim(factor, x.shape, (0,))
    else:
        bits, factor = block_scale(jnp.max(jnp.abs(x), axis=2))
        factor = lax.broadcast_in_dim(factor, x.shape, (0, 1))
        group = kv_rows.iota(bits.shape, 1)
        stored = jnp.where(group < nope_groups, bits, 0).astype(jnp.uint8)
    kv_rows.store_rows(nope, row, e4m3_codes(x * factor))
    kv_rows.store_rows(rope, row, x.astype(jnp.bfloat16), first_group=nope_groups)
    kv_rows.store_rows(scale, row, stored)


def encode_row(x: jax.Array, pools, layout: RowLayout, largest: Callable, first, keep, scratch) -> None:
    """Quantizes consecutive channels of a row and stores them, the padding of E8M0 scales included.

    Args:
      x: [size] float32.
      pools: references to the row's nope, rope and scale values; a scale is for 64 values or the row.
      layout: the row's layout.
      largest: a function that returns the maximum of [size] float32 over the row's channels, whoever holds them.
      first: the first channel, a multiple of 64.
      keep: whether to store anything.
      scratch: as in `vectors.exchange`.
    """
    nope, rope, scale = pools
    size = jnp.abs(x)
    channel = vectors.channels(x.shape[0]) + first
    real = channel < layout.nope_dim
    if layout.scale_block is None:
        every = layout.dim
        stored, factor = row_scale(largest(jnp.where(real, size, 0.0)), vectors.layout(x.shape[0]))
    else:
        every = layout.scale_block
        bits, factor = block_scale(vectors.butterfly(jnp.maximum, size, every // 2, 1, scratch))
        stored = jnp.where(real, bits, 0).astype(jnp.uint8)
    codes = e4m3_codes(x * factor)
    rounded = x.astype(jnp.bfloat16)

    @pl.when(keep)
    def _():
        vectors.store_channels(nope, codes, channel)
        vectors.store_channels(rope, rounded, channel - layout.nope_dim)
        blocks = layout.dim // every
        for column in range(0, layout.scale_width, blocks):
            scales = stored if column == 0 else jnp.zeros_like(stored)
            vectors.store_channels(scale.at[pl.ds(column, blocks)], scales, channel, every=every)


def encode_key(x: jax.Array, pools, layout: KeyLayout, scratch) -> None:
    """Quantizes and stores an index key x [D] float32; `pools` are references to its codes and scale bytes."""
    codes, scale = pools
    channel = vectors.channels(x.shape[0])
    if layout.hadamard:
        x = round_bfloat16(_hadamard(x, layout.dim, scratch))
    amax = vectors.butterfly(jnp.maximum, jnp.abs(x), layout.scale_block // 2, 1, scratch)
    stored, _, factor = key_scales(amax, layout, vectors.layout(x.shape[0]))
    code = e2m1_codes(x * factor)
    # The even channel of a pair writes both nibbles, its own as the low one.
    pair = code | (vectors.exchange(code, 1, scratch) << 4)
    vectors.store_channels(codes, pair.astype(jnp.uint8), channel, every=2)
    vectors.store_channels(scale, stored, channel, every=layout.scale_block)


def key_scales(amax: jax.Array, layout: KeyLayout, registers) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the scale bits, uint8, the steps and the factors, float32, of blocks of E2M1 values.

    `registers` is the register layout of `amax`, the blocks' largest magnitudes, float32.
    """
    if layout.scale == "e8m0":
        bits = _e8m0_ceil(jnp.maximum(amax, E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
        return bits.astype(jnp.uint8), _power_of_two(bits), _power_of_two(254 - bits)
    stored = e4m3_codes(amax * (1 / (E2M1_MAX * layout.global_scale)))
    step = _e4m3_value(stored) * layout.global_scale
    inverse = divide_one(jnp.where(step > 0, step, 1.0), registers)
    return stored, step, jnp.where(step > 0, inverse, 0.0)


def _hadamard(x, dim, scratch):
    channel = vectors.channels(x.shape[0])
    distance = 1
    while distance < dim:
        partner = vectors.exchange(x, distance, scratch)
        x = jnp.where((channel & distance) == 0, x + partner, partner - x)
        distance *= 2
    return x * dim**-0.5


def _e8m0_ceil(x):
    """Returns the E8M0 bits of the smallest power of two that is not below x."""
    return (lax.bitcast_convert_type(x, jnp.int32) + 0x7FFFFF) >> 23


def _power_of_two(bits):
    return lax.bitcast_convert_type(bits << 23, jnp.float32)


def _e4m3_value(bits):
    """Decodes non-negative codes, by integer operations: compilers may delete a pair of casts and its rounding."""
    size = bits.astype(jnp.int32)
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    return jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)


def e2m1_codes(x: jax.Array) -> jax.Array:
    """Rounds float32 to E2M1 codes 0 to 15, int32, ties to even."""
    size = jnp.abs(x)
    code = (lax.bitcast_convert_type(x, jnp.int32) >> 28) & 8
    for midpoint, up in _MIDPOINTS:
        code += jnp.where(size >= midpoint if up else size > midpoint, 1, 0)
    return code
