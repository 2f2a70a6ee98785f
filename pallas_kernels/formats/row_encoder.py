"""Quantising rows and index keys, bit-equal to `dsv4_jax.quant`; storing one that lies over a warp or a warpgroup.

What turns largest magnitudes into scales, and values into codes, works in any register layout. `store_quantised` is for
rows of which each warp has one (see `kv_rows`), `encode_row` and `encode_key` for vectors over a warpgroup (see
`vectors`).
"""

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.formats.layouts import KeyLayout, RowLayout
from pallas_kernels.mgpu import mlir, vectors
from pallas_kernels.runtime.launch import primitive


E4M3_MAX = 448.0
E2M1_MAX = 6.0
# Midpoints between E2M1 magnitudes; the second of a pair tells whether the midpoint itself goes up.
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def block_scale(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(E8M0 bits, int32; what to multiply values with, float32) of blocks of E4M3 values, from largest magnitudes."""
    bits = _e8m0_ceil(jnp.maximum(amax, 1e-4) * jnp.float32(1 / E4M3_MAX))
    return bits, _power_of_two(254 - bits)


def row_scale(amax: jax.Array, layout) -> tuple[jax.Array, jax.Array]:
    """(inverse scale; what to multiply values with) of rows of E4M3 values; float32 in a layout of registers."""
    inverse_scale = jnp.maximum(amax * jnp.float32(1 / E4M3_MAX), 1e-12)
    return inverse_scale, divide_one(inverse_scale, layout)


def e4m3_codes(x: jax.Array) -> jax.Array:
    """E4M3 bits, uint8, saturating."""
    return lax.bitcast_convert_type(_saturated(x).astype(jnp.float8_e4m3fn), jnp.uint8)


@primitive
def _saturated(x: jax.Array) -> jax.Array:
    return jnp.minimum(jnp.maximum(x, -E4M3_MAX), E4M3_MAX)


# A GPU's conversions to E4M3 saturate.
_saturated.mosaic(lambda x: x)


@primitive
def divide_one(x: jax.Array, layout) -> jax.Array:
    """1 / x of float32, correctly rounded: Mosaic's own division is approximate. `layout`: of x in registers."""
    return 1 / x


@divide_one.mosaic
def _(x, layout):
    def emit(x):
        f32 = mlir.f32_type()
        return [mlir.ptx("rcp.rn.f32 $0, $1;", value, results=f32, pure=True) for value in mlir.values(x)]

    return mlir.inline(emit, x, layout=lambda _: layout, returns=x)


def store_quantised(x: jax.Array, pools, row: jax.Array, layout: RowLayout) -> None:
    """Quantises x [4, 8, 64] float32, a row of each warp, and writes each to a row of pools; -1 writes nothing.

    `pools`: references to (nope, rope, scale) [R, ..] in global memory; the padding of E8M0 scales is written too.
    """
    nope, rope, scale = pools
    nope_groups = layout.nope_dim // kv_rows.GROUP
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
    """Stores x [size] float32, channels first, first + 1, ... of a row, where `keep`; `first` is a multiple of 64.

    `pools`: references to the row's (nope, rope, scale) values, scales of 64 values or of the row; the padding of E8M0
    scales is written too. `largest`: of a [size] float32 over all channels of the row, whoever holds them.
    """
    nope, rope, scale = pools
    size, channel = jnp.abs(x), vectors.channels(x.shape[0]) + first
    real = channel < layout.nope_dim
    if layout.scale_block is None:
        every = layout.dim
        stored, factor = row_scale(largest(jnp.where(real, size, 0.0)), vectors.layout(x.shape[0]))
    else:
        every = layout.scale_block
        bits, factor = block_scale(vectors.butterfly(jnp.maximum, size, every // 2, 1, scratch))
        stored = jnp.where(real, bits, 0).astype(jnp.uint8)
    codes, rounded = e4m3_codes(x * factor), x.astype(jnp.bfloat16)

    @pl.when(keep)
    def _():
        vectors.store_channels(nope, codes, channel)
        vectors.store_channels(rope, rounded, channel - layout.nope_dim)
        blocks = layout.dim // every
        for at in range(0, layout.scale_width, blocks):
            scales = stored if at == 0 else jnp.zeros_like(stored)
            vectors.store_channels(scale.at[pl.ds(at, blocks)], scales, channel, every=every)


def encode_key(x: jax.Array, pools, layout: KeyLayout, scratch) -> None:
    """Stores an index key, [D] float32; pools = references to its (codes, scale) bytes."""
    codes, scale = pools
    channel = vectors.channels(x.shape[0])
    code, stored, _ = quantise_keys(x, layout, scratch)
    # The even channel of a pair writes both: its own nibble is the low one.
    pair = code | (vectors.exchange(code, 1, scratch) << 4)
    vectors.store_channels(codes, pair.astype(jnp.uint8), channel, every=2)
    vectors.store_channels(scale, stored, channel, every=layout.scale_block)


def quantise_keys(x: jax.Array, layout: KeyLayout, scratch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Quantises x [size] float32, keys of `layout.dim` channels one after the other; scratch as in `vectors.exchange`.

    Returns (E2M1 codes 0 .. 15, int32; scale bits, uint8; what codes are multiples of, float32), [size] each.
    """
    if layout.hadamard:
        x = round_bfloat16(_hadamard(x, layout.dim, scratch))
    amax = vectors.butterfly(jnp.maximum, jnp.abs(x), layout.scale_block // 2, 1, scratch)
    stored, step, factor = key_scales(amax, layout, vectors.layout(x.shape[0]))
    return e2m1_codes(x * factor), stored, step


def key_scales(amax: jax.Array, layout: KeyLayout, registers) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(Scale bits, uint8; what codes are multiples of; what to multiply values with) of blocks of E2M1 values.

    `amax`: their largest magnitudes, float32; `registers`: its layout.
    """
    if layout.scale == "e8m0":
        bits = _e8m0_ceil(jnp.maximum(amax, E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
        return bits.astype(jnp.uint8), _power_of_two(bits), _power_of_two(254 - bits)
    stored = e4m3_codes(amax * (1 / (E2M1_MAX * layout.global_scale)))
    step = _e4m3_value(stored) * layout.global_scale
    inverse = divide_one(jnp.where(step > 0, step, 1.0), registers)
    return stored, step, jnp.where(step > 0, inverse, 0.0)


def _hadamard(x, dim, scratch):
    channel, distance = vectors.channels(x.shape[0]), 1
    while distance < dim:
        other = vectors.exchange(x, distance, scratch)
        x = jnp.where((channel & distance) == 0, x + other, other - x)
        distance *= 2
    return x * dim**-0.5


def _e8m0_ceil(x):
    """Bits of the smallest power of two that is not below x."""
    return (lax.bitcast_convert_type(x, jnp.int32) + 0x7FFFFF) >> 23


def _power_of_two(bits):
    return lax.bitcast_convert_type(bits << 23, jnp.float32)


def _e4m3_value(bits):
    """Of non-negative codes. In integers: compilers may delete a pair of casts, and the rounding with it."""
    size = bits.astype(jnp.int32)
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    return jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)


def e2m1_codes(x: jax.Array) -> jax.Array:
    """Codes 0 to 15 as int32, ties to even."""
    size = jnp.abs(x)
    code = (lax.bitcast_convert_type(x, jnp.int32) >> 28) & 8
    for midpoint, up in _MIDPOINTS:
        code += jnp.where(size >= midpoint if up else size > midpoint, 1, 0)
    return code
