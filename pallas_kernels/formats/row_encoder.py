"""Quantization of KV rows and indexer keys within kernels, with the same bits as `dsv4_jax.quant`.

`dsv4_jax.quant` computes scales and codes by these functions, too. They take arrays in any register layout.
`store_quantized` takes rows, each in the registers of one warp (see `kv_rows`). `encode_row` and `encode_key` take a
vector over a warpgroup (see `mgpu.vectors`).
"""

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.exact_math import power_of_two, round_bfloat16
from pallas_kernels.formats.layouts import GROUP, KeyLayout, RowLayout
from pallas_kernels.mgpu import mlir, vectors
from pallas_kernels.runtime.launch import primitive


E4M3_MAX = 448.0  # largest value of E4M3
E2M1_MAX = 6.0  # largest value of E2M1
# Pairs (midpoint between adjacent E2M1 magnitudes, whether the midpoint itself is rounded up).
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def block_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes E8M0 scales of blocks of values that are stored as E4M3.

    Args:
      amax: float32, the largest magnitude of each block.

    Returns:
      (bits, factor). `bits` are the E8M0 bits of the scale, int32. `factor`, float32, is 1 / scale. A value times
      `factor` is rounded to its code.
    """
    bits = _e8m0_ceil(jnp.maximum(amax, 1e-4) * jnp.float32(1 / E4M3_MAX))
    return bits, power_of_two(254 - bits)


def entry_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes E4M3 scales of blocks of values that are stored as E2M1, by the rules of V4.1's compressed entries.

    Args:
      amax: float32, the largest magnitude of each block.

    Returns:
      (bits, scale). `bits` are the E4M3 bits of the scale, uint8, and `scale` is its value, float32.
    """
    bits = e4m3_codes(jnp.maximum(amax, E2M1_MAX * 2.0**-9) * jnp.float32(1 / E2M1_MAX))
    return bits, e4m3_value(bits)


def scale_values(bits: jax.Array, layout: RowLayout) -> jax.Array:
    """Converts the bits of scales, uint8, to float32. Scales are E4M3 if the codes are E2M1, otherwise E8M0."""
    return e4m3_value(bits) if layout.codes == "e2m1" else power_of_two(bits.astype(jnp.int32))


def row_scale(amax: jax.Array, layout=None) -> tuple[jax.Array, jax.Array]:
    """Computes float32 scales of rows that are stored as E4M3.

    Args:
      amax: float32, the largest magnitude of each row.
      layout: register layout of `amax`; not used outside of kernels.

    Returns:
      (stored, factor), both float32. `stored` is the scale that is stored: a value is its code times `stored`. `factor`
      is 1 / stored: a value times `factor` is rounded to its code.
    """
    inverse_scale = jnp.maximum(amax * jnp.float32(1 / E4M3_MAX), 1e-12)
    return inverse_scale, divide_one(inverse_scale, layout)


def e4m3_codes(x: jax.Array) -> jax.Array:
    """Rounds float32 to E4M3 and returns the bits, uint8. Magnitudes above 448 become 448."""
    return lax.bitcast_convert_type(_saturated(x).astype(jnp.float8_e4m3fn), jnp.uint8)


@primitive
def _saturated(x: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, -E4M3_MAX), E4M3_MAX)


# On a GPU, the conversion to E4M3 already saturates.
_saturated.mosaic(lambda x: x)


@primitive
def divide_one(x: jax.Array, layout) -> jax.Array:
    """Returns 1 / x, correctly rounded, for float32 x in a register layout; Mosaic's own division is approximate."""
    return 1 / x


@divide_one.mosaic
def _(x, layout):
    def emit(x):
        f32 = mlir.f32_type()
        return [mlir.ptx("rcp.rn.f32 $0, $1;", value, results=f32, pure=True) for value in mlir.values(x)]

    return mlir.inline(emit, x, layout=lambda _: layout, returns=x)


def store_quantized(x: jax.Array, pools, row: jax.Array, layout: RowLayout) -> None:
    """Quantizes 4 KV rows, one in each warp, and stores them in pools. Padding of E8M0 scales is stored as zeros.

    Args:
      x: [4, 8, 64] float32 rows in the layout `kv_rows.VALUES`.
      pools: references to (nope, rope, scale), each [rows, ..] in global memory: codes, RoPE values (None if
        `layout.rope_dim` is 0) and scales.
      row: [4] int32, indices of rows in the pools, in the layout `kv_rows.PER_ROW`; -1 stores nothing.
      layout: layout of a row in the pools.
    """
    nope, rope, scale = pools
    if layout.scale_block is None:
        group = kv_rows.iota(x.shape, 1)
        largest = jnp.max(jnp.max(jnp.where(group < layout.nope_dim // GROUP, jnp.abs(x), 0.0), axis=2), axis=1)
        stored, factor = row_scale(largest, kv_rows.PER_ROW)
        factor = lax.broadcast_in_dim(factor, x.shape, (0,))
    else:
        x = kv_rows.regroup(x, layout.dim // layout.scale_block)
        bits, factor = block_scale(jnp.max(jnp.abs(x), axis=2))
        factor = lax.broadcast_in_dim(factor, x.shape, (0, 1))
        group = kv_rows.iota(bits.shape, 1)
        stored = jnp.where(group < layout.nope_dim // layout.scale_block, bits, 0).astype(jnp.uint8)
    kv_rows.store_rows(nope, row, e4m3_codes(x * factor))
    if rope is not None:
        kv_rows.store_rows(rope, row, x.astype(jnp.bfloat16), first_group=layout.nope_dim // x.shape[2])
    kv_rows.store_rows(scale, row, stored)


def encode_row(x: jax.Array, pools, layout: RowLayout, largest: Callable, first, keep, scratch) -> None:
    """Quantizes a warpgroup's channels of a KV row and stores them. Padding of E8M0 scales is stored as zeros.

    Args:
      x: [size] float32 vector over the warpgroup, consecutive channels of the row.
      pools: references to (codes, RoPE values or None, scales) of this row in the pools, [width] each.
      layout: layout of the row.
      largest: function that maps this warpgroup's [size] float32 vector to [size] equal values: the maximum over the
        vectors of all warpgroups, which form the whole row. It is called only if the row has a single scale.
      first: index of the first channel in `x`, a multiple of 64.
      keep: bool scalar, whether to store the row.
      scratch: [size] float32 scratch memory of `vectors.exchange`.
    """
    nope, rope, scale = pools
    magnitude = jnp.abs(x)
    channel = vectors.channels(x.shape[0]) + first
    has_code = channel < layout.nope_dim
    if layout.scale_block is None:
        every = layout.dim  # number of channels per scale
        stored, factor = row_scale(largest(jnp.where(has_code, magnitude, 0.0)), vectors.layout(x.shape[0]))
        codes = e4m3_codes(x * factor)
    else:
        every = layout.scale_block
        amax = vectors.butterfly(jnp.maximum, magnitude, every // 2, 1, scratch)
        if layout.codes == "e2m1":
            stored, step = entry_scale(amax)
            codes = _pairs(e2m1_codes(x, step), scratch)
        else:
            bits, factor = block_scale(amax)
            stored = jnp.where(has_code, bits, 0).astype(jnp.uint8)
            codes = e4m3_codes(x * factor)
    rounded = x.astype(jnp.bfloat16)

    @pl.when(keep)
    def _():
        vectors.store_channels(nope, codes, channel, every=layout.nope_dim // nope.shape[0])
        if rope is not None:
            vectors.store_channels(rope, rounded, channel - layout.nope_dim)
        blocks = layout.dim // every
        for column in range(0, layout.scale_width, blocks):
            scales = stored if column == 0 else jnp.zeros_like(stored)
            vectors.store_channels(scale.at[pl.ds(column, blocks)], scales, channel, every=every)


def encode_key(x: jax.Array, pools, layout: KeyLayout, scratch) -> None:
    """Quantizes an indexer key and stores it.

    Args:
      x: [D] float32 vector over the warpgroup, the key.
      pools: references to the key's codes [D / 2] and scales in the pools, uint8.
      layout: layout of the key.
      scratch: [D] float32 scratch memory of `vectors.exchange`.
    """
    codes, scale = pools
    channel = vectors.channels(x.shape[0])
    if layout.hadamard:
        x = round_bfloat16(_hadamard(x, layout.dim, scratch))
    amax = vectors.butterfly(jnp.maximum, jnp.abs(x), layout.scale_block // 2, 1, scratch)
    stored, _, factor = key_scales(amax, layout, vectors.layout(x.shape[0]))
    vectors.store_channels(codes, _pairs(e2m1_codes(x * factor), scratch), channel, every=2)
    vectors.store_channels(scale, stored, channel, every=layout.scale_block)


def key_scales(amax: jax.Array, layout: KeyLayout, registers=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes scales of blocks of values that are stored as E2M1.

    Args:
      amax: float32, the largest magnitude of each block.
      layout: layout of the key, which says the format of the scales.
      registers: register layout of `amax`; not used outside of kernels.

    Returns:
      (stored, scale, factor). `stored` are the bits of the scale, uint8. `scale`, float32, is the value of these bits
      times `global_scale`: a value is its code times `scale`. `factor`, float32, is 1 / scale, or 0 if the scale is 0:
      a value times `factor` is rounded to its code.
    """
    if layout.scale == "e8m0":
        bits = _e8m0_ceil(jnp.maximum(amax, E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
        return bits.astype(jnp.uint8), power_of_two(bits), power_of_two(254 - bits)
    stored = e4m3_codes(amax * (1 / (E2M1_MAX * layout.global_scale)))
    scale = e4m3_value(stored) * layout.global_scale
    inverse = divide_one(jnp.where(scale > 0, scale, 1.0), registers)
    return stored, scale, jnp.where(scale > 0, inverse, 0.0)


def _pairs(code, scratch):
    """Packs E2M1 codes to uint8. At an even channel c, code c is in the lower 4 bits, and code c + 1 above them."""
    return (code | (vectors.exchange(code, 1, scratch) << 4)).astype(jnp.uint8)


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


def e4m3_value(bits):
    """Returns the float32 values of non-negative E4M3 codes.

    The function uses integer operations. If it used a cast from E4M3, a compiler could remove this cast and the
    preceding cast to E4M3, and the values would not be rounded.
    """
    size = bits.astype(jnp.int32)
    # Codes below 8 are subnormal. In other codes exponent and mantissa lie 20 bits lower than in float32, and the
    # exponent's bias is smaller by 120.
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    return jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)


def e2m1_codes(x: jax.Array, step: jax.Array | float = 1.0) -> jax.Array:
    """Rounds float32 x / step to E2M1, ties to even, and returns the codes 0 .. 15, int32.

    Instead of dividing x by `step`, the function compares x with `step` times the midpoints between E2M1 values. These
    products are exact if `step` is a value of E4M3, which has few bits. Then x / step is rounded as if it were exact.
    """
    size = jnp.abs(x)
    code = (lax.bitcast_convert_type(x, jnp.int32) >> 28) & 8
    for midpoint, up in _MIDPOINTS:
        code += jnp.where(size >= midpoint * step if up else size > midpoint * step, 1, 0)
    return code
