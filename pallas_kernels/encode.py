"""Quantising one row that lies over a warpgroup (see `lanes`) and storing it; bit-equal to `dsv4_jax.quant`."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import lanes
from pallas_kernels.exact import round_bfloat16


E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_BLOCK, MXFP4_BLOCK, NVFP4_GROUP = 64, 32, 16
# Midpoints between E2M1 magnitudes; the second of a pair tells whether the midpoint itself goes up.
_MIDPOINTS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))


def encode_row(x: jax.Array, pools, scratch, *, interpret: bool) -> None:
    """Stores [D] float32 as an entry: pools = references to its (nope [N], rope [R], scale) bytes.

    A uint8 scale [D / 64] takes E8M0 bits a block of 64, zero for RoPE dims; a float32 scale [1] the inverse scale.
    """
    nope, rope, scale = pools
    size = jnp.abs(x)
    if scale.dtype == jnp.uint8:
        amax = lanes.butterfly(jnp.maximum, size, FP8_BLOCK // 2, 1, scratch, interpret=interpret)
        bits = _e8m0_ceil(jnp.maximum(amax, 1e-4) * (1 / E4M3_MAX))
        factor = _power_of_two(254 - bits)
        real = lanes.channels(x.shape[0]) < nope.shape[0]
        stored, every = jnp.where(real, bits, 0).astype(jnp.uint8), FP8_BLOCK
    else:
        size = jnp.where(lanes.channels(x.shape[0]) < nope.shape[0], size, 0.0)
        amax = lanes.butterfly(jnp.maximum, size, x.shape[0] // 2, 1, scratch, interpret=interpret)
        stored, every = jnp.maximum(amax * (1 / E4M3_MAX), 1e-12), x.shape[0]
        factor = lanes.divide_one(stored, interpret=interpret)
    lanes.store(nope, _e4m3(x * factor), interpret=interpret)
    lanes.store(rope, x.astype(jnp.bfloat16), start=nope.shape[0], interpret=interpret)
    lanes.store(scale, stored, every=every, interpret=interpret)


def encode_index(x: jax.Array, pools, index_scale: float, scratch, *, interpret: bool) -> None:
    """Stores [D] float32 as an indexer key: pools = references to its (codes [D / 2], scale) bytes.

    A scale for 32 values makes it MXFP4 after a Hadamard rotation, one for 16 NVFP4 under `index_scale`.
    """
    codes, scale = pools
    block = x.shape[0] // scale.shape[0]
    if block == MXFP4_BLOCK:
        x = round_bfloat16(_hadamard(x, scratch, interpret))
    amax = lanes.butterfly(jnp.maximum, jnp.abs(x), block // 2, 1, scratch, interpret=interpret)
    if block == MXFP4_BLOCK:
        bits = _e8m0_ceil(jnp.maximum(amax, E2M1_MAX * 2.0**-126) * (1 / E2M1_MAX))
        factor, stored = _power_of_two(254 - bits), bits.astype(jnp.uint8)
    else:
        stored = _e4m3(amax * (1 / (E2M1_MAX * index_scale)))
        step = _e4m3_value(stored) * index_scale
        inverse = lanes.divide_one(jnp.where(step > 0, step, 1.0), interpret=interpret)
        factor = jnp.where(step > 0, inverse, 0.0)
    code = _e2m1(x * factor)
    # The even channel of a pair writes both: its own nibble is the low one.
    pair = code | (lanes.exchange(code, 1, scratch, interpret=interpret) << 4)
    lanes.store(codes, pair.astype(jnp.uint8), every=2, interpret=interpret)
    lanes.store(scale, stored, every=block, interpret=interpret)


def _hadamard(x, scratch, interpret):
    channel, distance = lanes.channels(x.shape[0]), 1
    while distance < x.shape[0]:
        other = lanes.exchange(x, distance, scratch, interpret=interpret)
        x = jnp.where((channel & distance) == 0, x + other, other - x)
        distance *= 2
    return x * x.shape[0] ** -0.5


def _e8m0_ceil(x):
    return (lax.bitcast_convert_type(x, jnp.int32) + 0x7FFFFF) >> 23


def _power_of_two(bits):
    return lax.bitcast_convert_type(bits << 23, jnp.float32)


def _e4m3(x):
    codes = jnp.minimum(jnp.maximum(x, -E4M3_MAX), E4M3_MAX).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(codes, jnp.uint8)


def _e4m3_value(bits):
    """Of non-negative codes. In integers: compilers may delete a pair of casts, and the rounding with it."""
    size = bits.astype(jnp.int32)
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    return jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)


def _e2m1(x):
    """Codes 0 to 15 as int32, ties to even."""
    size = jnp.abs(x)
    code = (lax.bitcast_convert_type(x, jnp.int32) >> 28) & 8
    for midpoint, up in _MIDPOINTS:
        code += jnp.where(size >= midpoint if up else size > midpoint, 1, 0)
    return code
