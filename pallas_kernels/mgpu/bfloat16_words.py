"""Pairs of bfloat16 in 32-bit words, in code for one thread.

Loads, stores and products, and conversions from FP4 and FP8 codes, by shifts and exact products.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.mlir import U32


PARTS = 3  # bfloat16 terms whose sum is a float32


def load_four(pointer) -> list[U32]:
    """Loads 16 bytes of global memory that the kernel does not write."""
    return thread_ops.ptx_words(4, "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", pointer)


def load_pair(pointer) -> list[U32]:
    """Loads 8 bytes of global memory that the kernel does not write."""
    return thread_ops.ptx_words(2, "ld.global.nc.v2.b32 {$0, $1}, [$2];", pointer)


def store_four(pointer, four: Sequence[U32]) -> None:
    """Stores 16 bytes to global memory."""
    mlir.ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", pointer, *four)


def unpack(word: U32) -> list[Any]:
    """Returns a word's two bfloat16 as MLIR float32."""
    return [thread_ops.as_float(x) for x in (word << 16, word & 0xFFFF0000)]


def pack(low, high) -> U32:
    """Rounds two MLIR float32 to a word of two bfloat16."""
    code = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return U32(mlir.ptx(code, high, low, results=mlir.int_type(), pure=True))


def rotate(word: U32, cos, sin) -> U32:
    """Rotates a pair of bfloat16 by an angle, whose cosine and sine are MLIR float32; no FMA is used."""
    even, odd = unpack(word)
    multiply = thread_ops.multiply
    rotated_even = arith.subf(multiply(even, cos), multiply(odd, sin))
    return pack(rotated_even, arith.addf(multiply(odd, cos), multiply(even, sin)))


def split(four: Sequence[U32]) -> Iterator[list[U32]]:
    """Yields the high, middle and low bfloat16 terms of four float32, two words each; their sum is exact."""
    remainders = [thread_ops.as_float(x) for x in four]
    for _ in range(PARTS):
        both = [pack(*remainders[i : i + 2]) for i in (0, 2)]
        pieces = [piece for word in both for piece in unpack(word)]
        remainders = [arith.subf(x, piece) for x, piece in zip(remainders, pieces, strict=True)]
        yield both


def multiply_add(acc: Sequence[Any], a: Sequence[U32], b: Sequence[U32], *, pure: bool = False) -> list[Any]:
    """Returns acc [16, 8] float32 + a [16, 16] @ b [16, 8], of bfloat16, as the fragments of lane 4 * i + j.

    acc has columns 2 * j and 2 * j + 1 of row i, then of row i + 8. The four words of a have the first two of four
    terms of row i and of row i + 8, then the last two; those of b have the same four terms of column i. Which four of
    the 16 terms a lane holds does not matter. `pure` is as in `mlir.ptx`.
    """
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return mlir.ptx(code, *a, *b, *acc, results=[mlir.f32_type()] * 4, pure=pure, convergent=True)


def e2m1_value(code: jax.Array) -> jax.Array:
    """Returns the float32 values of E2M1 codes 0 to 15, int32, exactly; in jax.numpy."""
    size = code & 7
    normal = lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    size = jnp.where(size < 2, size.astype(jnp.float32) * 0.5, normal)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.int32) | ((code & 8) << 28), jnp.float32)


def e2m1_pairs(word: U32) -> list[U32]:
    """Returns E2M1 codes i and i + 4 of a word as two bfloat16, times 2**-126, for i = 0 .. 3.

    A code has the sign, exponent and mantissa bits of a bfloat16, without the gap between sign and exponent. One
    instruction makes that gap for two pairs, the second of which lies 4 bits lower.
    """
    pairs = []
    for signs, others in (word << 8, word << 2), (word, word >> 6):
        # signs & mask | others & ~mask in one instruction, which compilers do not find.
        both = thread_ops.pure("lop3.b32 $0, $1, $2, 0x88008800, 0xe4;", signs, others)
        pairs += [both << 4 & 0x81C081C0, both & 0x81C081C0]
    return pairs


def e4m3_pairs(word: U32) -> list[U32]:
    """Returns E4M3 codes i and i + 2 of a word as two bfloat16, times 2**-120, for i = 0 and 1."""
    shifted = word << 8
    return [x & 0x80008000 | x >> 4 & 0x07F007F0 for x in (shifted, word)]


def multiply(x: U32, y: U32 | int) -> U32:
    """Returns the products of two pairs of bfloat16, subnormal ones included."""
    return thread_ops.pure("mul.rn.bf16x2 $0, $1, $2;", x, y)


def fp8_pairs(words: list[U32]) -> list[U32]:
    """Reorders four words of two bfloat16 to the order of `e4m3_pairs` of two words: pairs i and i + 2 of four."""
    return [halves(words[i // 2 * 2], words[i // 2 * 2 + 1], i % 2) for i in range(4)]


def halves(x: U32, y: U32, high: int) -> U32:
    """Returns the low or the high halves of two words, x's first."""
    return thread_ops.ptx(f"prmt.b32 $0, $1, $2, {'0x7632' if high else '0x5410'};", x, y)
