"""E4M3 codes with two kinds of scale: a power of two per block (DeepSeek-V4's) or one float32 per entry (the seeds').

All codes are uint8 bits. Inputs must be finite.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt8

from dsv4_jax.quant.numerics import e8m0_ceil, e8m0_reciprocal, e8m0_value, in_blocks


E4M3_MAX = 448.0
FP8_BLOCK = 64  # channels of a cached row that share a scale; weights have blocks of WEIGHT_BLOCK rows and columns


def encode_e4m3(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Rounds float32 to E4M3 bits, ties to even, saturating at +-448 (the cast alone overflows to NaN)."""
    codes = jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    return lax.bitcast_convert_type(codes, jnp.uint8)


def decode_e4m3(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Converts E4M3 bits to float32, exactly; 0x7F and 0xFF are NaN.

    Uses integers, because XLA on GPU deletes a pair of casts f32 -> e4m3 -> f32, and its rounding, when a value is
    quantized and read back in one program.
    """
    size = (bits & 0x7F).astype(jnp.uint32)
    # Codes below 8 are subnormal. In the others exponent and mantissa are 20 bits lower than in float32; add its bias.
    normal = lax.bitcast_convert_type((size << 20) + (120 << 23), jnp.float32)
    value = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    value = jnp.where(size == 0x7F, jnp.nan, value)
    return jnp.where(bits >= 0x80, -value, value)


def encode_fp8_block(
    x: Float[Array, "*rows N"], block: int = FP8_BLOCK
) -> tuple[UInt8[Array, "*rows N"], UInt8[Array, "*rows G"]]:
    """Encodes E4M3 with a power-of-two scale per block of the last axis (dsv4.md 7.1).

    amax = max(max|x|, 1e-4); scale = 2**ceil(log2(amax * fp32(1/448))); code = e4m3(x / scale). Takes x [..., N]
    float32, N a multiple of `block`, and returns (codes [..., N] E4M3 bits, scales [..., N // block] E8M0 bits).
    """
    blocks = in_blocks(x, block)
    amax = jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1), 1e-4)
    scale = e8m0_ceil(amax * jnp.float32(1 / E4M3_MAX))
    codes = encode_e4m3(blocks * e8m0_reciprocal(scale)[..., None])
    return codes.reshape(x.shape), scale


def decode_fp8_block(codes: UInt8[Array, "*rows N"], scale: UInt8[Array, "*rows G"]) -> Float[Array, "*rows N"]:
    """Decodes `encode_fp8_block` to [..., N] float32: code * scale, exact unless it overflows to infinity."""
    blocks = decode_e4m3(codes).reshape(*scale.shape, codes.shape[-1] // scale.shape[-1])
    return (blocks * e8m0_value(scale)[..., None]).reshape(codes.shape)


def encode_fp8_entry(x: Float[Array, "*rows N"]) -> tuple[UInt8[Array, "*rows N"], Float[Array, "*rows 1"]]:
    """Encodes E4M3 with a float32 inverse scale per entry, the seeds' format.

    inverse scale = max(amax * fp32(1/448), 1e-12); code = e4m3(x * (1 / inverse scale)).

    Both divisions of the seeds' formula are products here, so that the bytes are the same everywhere. XLA rewrites a
    division by a scalar to a product in some programs and not in others. Returns (codes [..., N] E4M3 bits, inverse
    scales [..., 1] float32) of x [..., N] float32.
    """
    amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    inv_scale = jnp.maximum(amax * jnp.float32(1 / E4M3_MAX), 1e-12)
    return encode_e4m3(x * (1 / inv_scale)), inv_scale


def decode_fp8_entry(codes: UInt8[Array, "*rows N"], inv_scale: Float[Array, "*rows 1"]) -> Float[Array, "*rows N"]:
    """Decodes `encode_fp8_entry` to [..., N] float32: code * inverse scale, rounded once."""
    return decode_e4m3(codes) * inv_scale
