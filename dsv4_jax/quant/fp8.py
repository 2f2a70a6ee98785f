"""FP8: E4M3 codes with a power-of-two scale per block of values, as in DeepSeek-V4, or a float32 scale per row.

All codes are uint8 bits. Inputs must be finite.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from dsv4_jax.quant.numerics import e8m0_value, in_blocks
from pallas_kernels.formats.row_encoder import block_scale, e4m3_codes, e4m3_value, row_scale


FP8_BLOCK = 64  # channels of a cached row that share a scale; for weights see quantized_weight.WEIGHT_BLOCK
MXFP8_BLOCK = 32  # channels of a window row of DeepSeek-V4.1 that share a scale


def encode_e4m3(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Rounds float32 values to E4M3 bits, ties to even. Values beyond +-448, whose casts can be NaN, become +-448."""
    return e4m3_codes(x)


def decode_e4m3(bits: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Converts E4M3 bits to float32, exactly; 0x7F and 0xFF are NaN.

    If a program quantized a value and read it back by casts f32 -> e4m3 -> f32, XLA on GPU would delete both casts, and
    the rounding with them. Therefore the conversion uses integer operations.
    """
    size = bits & 0x7F
    value = jnp.where(size == 0x7F, jnp.nan, e4m3_value(size))
    return jnp.where(bits >= 0x80, -value, value)


def encode_fp8_block(
    x: Float[Array, "*rows N"], block: int = FP8_BLOCK
) -> tuple[UInt8[Array, "*rows N"], UInt8[Array, "*rows G"]]:
    """Encodes values as E4M3 with a power-of-two scale for each block of the last axis (docs/dsv4.md 7.1).

        amax = max(max|x| of the block, 1e-4)
        scale = 2**ceil(log2(amax * fp32(1/448)))
        code = e4m3(x / scale)

    Args:
      x: [..., N] float32, N a multiple of `block`.
      block: number of values that share a scale.

    Returns:
      (codes [..., N] uint8 E4M3 bits, scales [..., N // block] uint8 E8M0 bits).
    """
    blocks = in_blocks(x, block)
    scale_bits, factor = block_scale(jnp.max(jnp.abs(blocks), axis=-1))
    codes = encode_e4m3(blocks * factor[..., None])
    return codes.reshape(x.shape), scale_bits.astype(jnp.uint8)


def decode_fp8_block(codes: UInt8[Array, "*rows N"], scale: UInt8[Array, "*rows G"]) -> Float[Array, "*rows N"]:
    """Decodes results of `encode_fp8_block` to [..., N] float32: code * scale, exact unless it overflows."""
    blocks = decode_e4m3(codes).reshape(*scale.shape, codes.shape[-1] // scale.shape[-1])
    return (blocks * e8m0_value(scale)[..., None]).reshape(codes.shape)


def encode_fp8_entry(x: Float[Array, "*rows N"]) -> tuple[UInt8[Array, "*rows N"], Float[Array, "*rows 1"]]:
    """Encodes rows as E4M3 with one float32 inverse scale per row, as in the format "per_entry".

        amax = max|x| of the row
        inv_scale = max(amax * fp32(1/448), 1e-12)
        code = e4m3(x * (1 / inv_scale))

    The formulas have products with reciprocals in the place of divisions, so that every program stores the same bytes.
    XLA rewrites a division by a scalar to a product in some programs and not in others.

    Args:
      x: [..., N] float32.

    Returns:
      (codes [..., N] uint8 E4M3 bits, inverse scales [..., 1] float32).
    """
    inv_scale, factor = row_scale(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    return encode_e4m3(x * factor), inv_scale


def decode_fp8_entry(codes: UInt8[Array, "*rows N"], inv_scale: Float[Array, "*rows 1"]) -> Float[Array, "*rows N"]:
    """Decodes results of `encode_fp8_entry` to [..., N] float32: code * inverse scale, rounded once."""
    return decode_e4m3(codes) * inv_scale
