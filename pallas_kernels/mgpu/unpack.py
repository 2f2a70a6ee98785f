"""Conversions of FP4 and FP8 codes to pairs of bfloat16, by shifts and exact products."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import thread_ops
from pallas_kernels.mgpu.thread_ops import U32


def e2m1_value(code: jax.Array) -> jax.Array:
    """Returns the float32 values of E2M1 codes, int32; for interpreted kernels."""
    size = code & 7
    normal = lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    size = jnp.where(size < 2, size.astype(jnp.float32) * 0.5, normal)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.int32) | ((code & 8) << 28), jnp.float32)


def e2m1_pairs(word: U32) -> list[U32]:
    """Returns E2M1 codes i and i + 4 of a word as two bfloat16, times 2**-126, for i = 0 .. 3.

    A code has the sign, exponent and mantissa bits of a bfloat16, without the gap between sign and exponent. One
    instruction makes that gap for two pairs, the second of which lies 4 bits lower.
    """
    found = []
    for signs, others in (word << 8, word << 2), (word, word >> 6):
        # signs & mask | others & ~mask in one instruction, which compilers do not find.
        both = thread_ops.pure("lop3.b32 $0, $1, $2, 0x88008800, 0xe4;", signs, others)
        found += [both << 4 & 0x81C081C0, both & 0x81C081C0]
    return found


def e4m3_pairs(word: U32) -> list[U32]:
    """Returns E4M3 codes i and i + 2 of a word as two bfloat16, times 2**-120, for i = 0 and 1."""
    left = word << 8
    return [x & 0x80008000 | x >> 4 & 0x07F007F0 for x in (left, word)]


def multiply(x: U32, y: U32 | int) -> U32:
    """Returns the products of two pairs of bfloat16, subnormal ones included."""
    return thread_ops.pure("mul.rn.bf16x2 $0, $1, $2;", x, y)


def fp8_pairs(words: list[U32]) -> list[U32]:
    """Reorders four words of two bfloat16 to the order of `e4m3_pairs` of two words: pairs i and i + 2 of four."""
    return [halves(words[i // 2 * 2], words[i // 2 * 2 + 1], i % 2) for i in range(4)]


def halves(x: U32, y: U32, high: int) -> U32:
    """Returns the low or the high halves of two words, x's first."""
    return thread_ops.ptx(f"prmt.b32 $0, $1, $2, {'0x7632' if high else '0x5410'};", x, y)
