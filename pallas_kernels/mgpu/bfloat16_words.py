"""Pairs of bfloat16 in 32-bit words: loads, stores, conversions and products, in code for one thread."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir.dialects import arith

from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.thread_ops import U32


PARTS = 3  # bfloat16 terms whose sum is a float32


def load_four(pointer: Any) -> list[U32]:
    """Loads 16 bytes of global memory that the kernel does not write."""
    code = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
    return [U32(x) for x in mlir.ptx(code, pointer, results=[mlir.int_type()] * 4)]


def load_pair(pointer: Any) -> list[U32]:
    """Loads 8 bytes of global memory that the kernel does not write."""
    return [U32(x) for x in mlir.ptx("ld.global.nc.v2.b32 {$0, $1}, [$2];", pointer, results=[mlir.int_type()] * 2)]


def store_four(pointer: Any, four: Sequence[U32]) -> None:
    """Stores 16 bytes to global memory."""
    mlir.ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", pointer, *(word.value for word in four))


def unpack(word: U32) -> list[Any]:
    """Returns a word's two bfloat16 as MLIR float32."""
    return [thread_ops.as_float(x) for x in (word << 16, word & 0xFFFF0000)]


def pack(low: Any, high: Any) -> U32:
    """Rounds two MLIR float32 to a word of two bfloat16."""
    code = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return U32(mlir.ptx(code, high, low, results=mlir.int_type(), pure=True))


def split(four: Sequence[U32]) -> Iterator[list[U32]]:
    """Yields the high, middle and low bfloat16 terms of four float32, two words each; their sum is exact."""
    rest = [thread_ops.as_float(x) for x in four]
    for _ in range(PARTS):
        both = [pack(*rest[i : i + 2]) for i in (0, 2)]
        pieces = [piece for word in both for piece in unpack(word)]
        rest = [arith.subf(x, piece) for x, piece in zip(rest, pieces, strict=True)]
        yield both


def multiply_add(acc: Sequence[Any], a: Sequence[U32], b: Sequence[U32]) -> list[Any]:
    """Returns acc [16, 8] float32 + a [16, 16] @ b [16, 8], of bfloat16, as the fragments of lane 4 * i + j.

    acc has columns 2 * j and 2 * j + 1 of row i, then of row i + 8. The four words of a have the first two of four
    terms of row i and of row i + 8, then the last two; those of b have the same four terms of column i. Which four of
    the 16 terms a lane holds does not matter.
    """
    code = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return mlir.ptx(code, *(word.value for word in (*a, *b)), *acc, results=[mlir.f32_type()] * 4)
