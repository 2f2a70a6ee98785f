"""Pairs of bfloat16 in 32-bit words, in code for one thread.

The functions load, store and multiply such words, and convert FP4 and FP8 codes to them. A conversion only moves bits,
so its result is the code's value times a constant power of two. A product with the inverse power removes this factor,
and is exact.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.mlir import Scalar


PARTS = 3  # number of bfloat16 terms into which `split` splits a float32


def load_four(pointer) -> list[Scalar]:
    """Loads four words (16 bytes) from global memory that the kernel does not write."""
    return thread_ops.ptx_words(4, "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", pointer)


def load_pair(pointer) -> list[Scalar]:
    """Loads two words (8 bytes) from global memory that the kernel does not write."""
    return thread_ops.ptx_words(2, "ld.global.nc.v2.b32 {$0, $1}, [$2];", pointer)


def store_four(pointer, four: Sequence[Scalar]) -> None:
    """Stores four words (16 bytes) to global memory."""
    mlir.ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", pointer, *four)


def unpack(word: Scalar) -> list[Any]:
    """Returns a word's two bfloat16 as MLIR float32."""
    return [x.as_float() for x in (word << 16, word & 0xFFFF0000)]


def pack(low, high) -> Scalar:
    """Rounds two MLIR float32 to bfloat16, and packs them into the low and the high half of a word."""
    code = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return thread_ops.pure(code, high, low)


def rotate(word: Scalar, cos, sin) -> Scalar:
    """Rotates a word's pair of bfloat16 by an angle without FMAs. `cos` and `sin` of the angle are MLIR float32."""
    even, odd = unpack(word)
    multiply = thread_ops.multiply
    rotated_even = multiply(even, cos) - multiply(odd, sin)
    return pack(rotated_even, multiply(odd, cos) + multiply(even, sin))


def split(four: Sequence[Scalar]) -> Iterator[list[Scalar]]:
    """Splits each of four float32 exactly into a sum of three bfloat16 terms.

    `four` are the bits of the float32. Yields three lists of two words: the high terms of all four, then the middle
    terms, then the low terms.
    """
    remainders = [x.as_float() for x in four]
    for _ in range(PARTS):
        two_words = [pack(*remainders[i : i + 2]) for i in (0, 2)]
        terms = [term for word in two_words for term in unpack(word)]
        remainders = [x - term for x, term in zip(remainders, terms, strict=True)]
        yield two_words


def multiply_add(acc: Sequence[Any], a: Sequence[Scalar], b: Sequence[Scalar], *, pure: bool = False) -> list[Any]:
    """Returns acc + a @ b, computed by a warp with `mma.m16n8k16`.

    The 16 products of a sum are spread over four lanes. The columns of a and the rows of b may be in any order, if both
    are in the same order.

    Args:
      acc: [16, 8] float32. Lane 4 * i + j holds columns 2 * j and 2 * j + 1 of row i, then of row i + 8.
      a: [16, 16] bfloat16. Lane 4 * i + j holds four words: two columns of row i, the same two columns of row i + 8,
        then two other columns of row i, and these columns of row i + 8.
      b: [16, 8] bfloat16. Lane 4 * i + j holds two words of column i: the four rows of b that are multiplied with the
        lane's four columns of a.
      pure: as in `mlir.ptx`.

    Returns:
      The lane's four MLIR float32 of the result, in the order of `acc`.
    """
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return mlir.ptx(code, *a, *b, *acc, results=[mlir.f32_type()] * 4, pure=pure, convergent=True)


def e2m1_value(code: jax.Array) -> jax.Array:
    """Returns the exact float32 values of E2M1 codes, 0 .. 15. `code` is an int32 array of any shape, not a word."""
    size = code & 7
    normal = lax.bitcast_convert_type((size << 22) + (126 << 23), jnp.float32)
    size = jnp.where(size < 2, size.astype(jnp.float32) * 0.5, normal)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(size, jnp.int32) | ((code & 8) << 28), jnp.float32)


def decode_e2m1(pairs: jax.Array) -> jax.Array:
    """Returns the exact float32 values, [.., 2 * n], of pairs of E2M1 codes, [.., n] uint8, the lower 4 bits first."""
    codes = pairs.astype(jnp.int32)
    return e2m1_value(jnp.stack([codes & 15, codes >> 4], axis=-1)).reshape(*pairs.shape[:-1], -1)


def decode_e4m3(codes: jax.Array) -> jax.Array:
    """Returns the exact float32 values of E4M3 codes, uint8, or of four codes in each int32, on a new last axis."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def e2m1_pairs(word: Scalar) -> list[Scalar]:
    """Converts a word of eight E2M1 codes to four words of two bfloat16, which are 2**-126 times the values.

    Word i of the result holds codes i and i + 4. The bits of an E2M1 code become the sign, the two lowest exponent bits
    and the highest mantissa bit of a bfloat16. One instruction merges the signs with the other bits, for two words of
    the result at once. In its result, the bits of one of these words lie 4 positions below their final places.
    """
    pairs = []
    for signs, others in (word << 8, word << 2), (word, word >> 6):
        # `lop3` computes signs & mask | others & ~mask in one instruction. For the expression, compilers emit several.
        both = thread_ops.pure("lop3.b32 $0, $1, $2, 0x88008800, 0xe4;", signs, others)
        pairs += [(both << 4) & 0x81C081C0, both & 0x81C081C0]
    return pairs


def e4m3_pairs(word: Scalar) -> list[Scalar]:
    """Converts a word of four E4M3 codes to two words of two bfloat16, which are 2**-120 times the values.

    Word i of the result holds codes i and i + 2.
    """
    shifted = word << 8
    return [(x & 0x80008000) | ((x >> 4) & 0x07F007F0) for x in (shifted, word)]


def multiply(x: Scalar, y: Scalar | int) -> Scalar:
    """Returns the elementwise products of two pairs of bfloat16. Subnormal numbers are not flushed to zero."""
    return thread_ops.pure("mul.rn.bf16x2 $0, $1, $2;", x, y)


def fp8_pairs(words: list[Scalar]) -> list[Scalar]:
    """Reorders eight bfloat16, in four words, to the order in which `e4m3_pairs` returns eight values.

    In each group of four values, values 0 and 2 form the first word, and values 1 and 3 the second.
    """
    return [halves(words[i // 2 * 2], words[i // 2 * 2 + 1], i % 2) for i in range(4)]


def halves(x: Scalar, y: Scalar, high: int) -> Scalar:
    """Returns the low halves of x and y in one word, x's half as the low one; with `high` = 1, their high halves."""
    return thread_ops.ptx(f"prmt.b32 $0, $1, $2, {'0x7632' if high else '0x5410'};", x, y)
