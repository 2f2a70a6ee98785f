"""FP4 and FP8 codes to pairs of bfloat16, by shifts and exact products."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import mlir_helpers as mlir
from pallas_kernels.common.thread_ops import U32


def e2m1_value(code: jax.Array) -> jax.Array:
    """float32 values of E2M1 codes, int32; for interpreted kernels."""
    size = code & 7
    normal = lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    size = jnp.where(size < 2, size.astype(jnp.float32) * 0.5, normal)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.int32) | ((code & 8) << 28), jnp.float32)


def e2m1_pairs(word: U32) -> list[U32]:
    """E2M1 codes i and i + 4 of a word as two bfloat16, times 2**-126, for i = 0 .. 3.

    A code's sign, exponent and mantissa bits fit into a bfloat16 as they are, with a gap between sign and exponent: the
    product with 2**12 + 2**6 puts the code there twice, and the mask keeps the sign of one and the rest of the other.
    """
    high = word >> 8
    first, second = 0x000F000F, 0x00F000F0
    return [
        (x & mask) * (0x1040 if mask == first else 0x104) & 0x81C081C0 for x in (word, high) for mask in (first, second)
    ]


def e4m3_pairs(word: U32) -> list[U32]:
    """E4M3 codes i and i + 2 of a word as two bfloat16, times 2**-120, for i = 0 and 1."""
    left = word << 8
    return [x & 0x80008000 | x >> 4 & 0x07F007F0 for x in (left, word)]


def multiply(x: U32, y: U32 | int) -> U32:
    """Products of two pairs of bfloat16; subnormal ones are kept."""
    operands = x.value, U32(y).value
    return U32(mlir.ptx("mul.rn.bf16x2 $0, $1, $2;", *operands, results=mlir.int_type(), pure=True))
