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


def e2m1_pair(word: U32, pair: int) -> U32:
    """E2M1 codes `pair` and `pair + 4` of a word as two bfloat16, times 2**-126: exponent and mantissa bits fit."""
    left = 12 - 4 * pair
    return shift(word, left) & 0x80008000 | shift(word, left - 6) & 0x01C001C0


def e4m3_pair(word: U32, pair: int) -> U32:
    """E4M3 codes `pair` and `pair + 2` of a word as two bfloat16, times 2**-120."""
    left = 8 - 8 * pair
    return shift(word, left) & 0x80008000 | shift(word, left - 4) & 0x07F007F0


def shift(x: U32, left: int) -> U32:
    """x shifted left, or right where negative."""
    return x << left if left > 0 else x >> -left if left < 0 else x


def multiply(x: U32, y: U32 | int) -> U32:
    """Products of two pairs of bfloat16; subnormal ones are kept."""
    operands = x.value, U32(y).value
    return U32(mlir.ptx("mul.rn.bf16x2 $0, $1, $2;", *operands, results=mlir.int_type(), pure=True))
