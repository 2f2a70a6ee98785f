"""The FP4 formats MXFP4 and NVFP4, which store E2M1 codes, two in a byte, with scales.

MXFP4 has a power-of-two scale for each 32 values. NVFP4 has an E4M3 scale for each 16 values and a global scale.
DeepSeek-V4.1's compressed entries are NVFP4 with the global scale 1, but rounded by other rules.

The low nibble of a byte holds the value with the even index. Inputs must be finite. Subnormal inputs follow the
backend's float32 arithmetic: XLA on CPU flushes them to zero.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from dsv4_jax.quant.fp8 import decode_e4m3
from dsv4_jax.quant.numerics import e8m0_value, in_blocks
from pallas_kernels.formats.layouts import KeyLayout
from pallas_kernels.formats.row_encoder import e2m1_codes, entry_scale, key_scales
from pallas_kernels.mgpu.bfloat16_words import e2m1_value


MXFP4_BLOCK = 32
NVFP4_GROUP = 16


def encode_e2m1(x: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Rounds float32 values to E2M1 codes 0 to 15, whose bit 3 is the sign.

    Ties go to even codes. Values beyond +-6 become +-6.

    Values are compared with the midpoints of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A cast is not used, because
    some backends would cast by way of another type, and so round twice.
    """
    return e2m1_codes(x).astype(jnp.uint8)


def decode_e2m1(codes: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Converts E2M1 codes 0 to 15 to float32, exactly; code 8 is -0."""
    return e2m1_value(codes.astype(jnp.int32))


def pack_fp4(codes: UInt8[Array, "*rows N"]) -> UInt8[Array, "*rows half"]:
    """Packs codes 0 to 15, [..., N] with N even, into bytes [..., N // 2]; the even index is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(packed: UInt8[Array, "*rows half"]) -> UInt8[Array, "*rows N"]:
    """Unpacks bytes [..., N // 2] to codes 0 to 15, [..., N]."""
    return jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_mxfp4(x: Float[Array, "*rows N"]) -> tuple[UInt8[Array, "*rows half"], UInt8[Array, "*rows G"]]:
    """Encodes values as MXFP4, with a power-of-two scale for each block of 32 values (docs/dsv4.md 7.2).

        amax = max(max|x| of the block, 6 * 2**-126)
        scale = 2**ceil(log2(amax * fp32(1/6)))
        code = e2m1(x / scale)

    Args:
      x: [..., N] float32, N a multiple of 32.

    Returns:
      (packed codes [..., N // 2] uint8, scales [..., N // 32] uint8 E8M0 bits).
    """
    return _encode(x, KeyLayout(x.shape[-1], MXFP4_BLOCK, "e8m0", hadamard=False))


def decode_mxfp4(packed: UInt8[Array, "*rows half"], scale: UInt8[Array, "*rows G"]) -> Float[Array, "*rows N"]:
    """Decodes results of `encode_mxfp4` to [..., N] float32: code * scale, exact unless it overflows to infinity."""
    return _decode(packed, e8m0_value(scale), MXFP4_BLOCK)


def encode_nvfp4(
    x: Float[Array, "*rows N"], global_scale: float = 1.0
) -> tuple[UInt8[Array, "*rows half"], UInt8[Array, "*rows G"]]:
    """Encodes values as NVFP4, with an E4M3 scale for each group of 16 values and a global scale.

        amax = max|x| of the group
        scale = e4m3(amax / (6 * global_scale)), saturating
        step = scale * global_scale
        code = e2m1(x / step), a signed zero where step is 0

    Divisions are computed as products with a reciprocal, for the reason given at `fp8.encode_fp8_entry`.

    Args:
      x: [..., N] float32, N a multiple of 16.
      global_scale: scale of all values, positive.

    Returns:
      (packed codes [..., N // 2] uint8, scales [..., N // 16] uint8 E4M3 bits).
    """
    return _encode(x, KeyLayout(x.shape[-1], NVFP4_GROUP, "e4m3", hadamard=False, global_scale=global_scale))


def encode_fp4_entry(x: Float[Array, "*rows N"]) -> tuple[UInt8[Array, "*rows half"], UInt8[Array, "*rows G"]]:
    """Encodes values as FP4 with an E4M3 scale for each group of 16, by the rules of DeepSeek-V4.1's entries.

        amax = max(max|x| of the group, 6 * 2**-9)
        scale = e4m3(amax * fp32(1/6)), saturating
        code = e2m1(x / scale)

    If amax is a bfloat16 value, the scale has the bits of e4m3(amax / 6) with the exact quotient. Codes are rounded
    from the exact quotients x / scale. A product with a rounded 1 / scale would round some ties to another code.

    Args:
      x: [..., N] float32, N a multiple of 16.

    Returns:
      (packed codes [..., N // 2] uint8, scales [..., N // 16] uint8 E4M3 bits), to be decoded by `decode_nvfp4`.
    """
    groups = in_blocks(x, NVFP4_GROUP)
    scale_bits, step = entry_scale(jnp.max(jnp.abs(groups), axis=-1))
    codes = e2m1_codes(groups, step[..., None]).astype(jnp.uint8)
    return pack_fp4(codes.reshape(x.shape)), scale_bits


def decode_nvfp4(
    packed: UInt8[Array, "*rows half"], scale: UInt8[Array, "*rows G"], global_scale: float = 1.0
) -> Float[Array, "*rows N"]:
    """Decodes results of `encode_nvfp4` or `encode_fp4_entry` to [..., N] float32: code * (scale * global_scale).

    Args:
      packed, scale: as returned by the encoder.
      global_scale: as given to the encoder.
    """
    return _decode(packed, decode_e4m3(scale) * jnp.float32(global_scale), NVFP4_GROUP)


def _encode(x, layout):
    blocks = in_blocks(x, layout.scale_block)
    scale_bits, _, factor = key_scales(jnp.max(jnp.abs(blocks), axis=-1), layout)
    codes = encode_e2m1(blocks * factor[..., None])
    return pack_fp4(codes.reshape(x.shape)), scale_bits


def _decode(packed, step, size):
    values = decode_e2m1(unpack_fp4(packed))
    return (values.reshape(*step.shape, size) * step[..., None]).reshape(values.shape)
