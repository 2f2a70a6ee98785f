"""Words of two bfloat16 of the streams, four at a time, for code that is written for one thread."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxlib.mlir.dialects import arith

from pallas_kernels.common import mlir_helpers as mlir, thread_ops
from pallas_kernels.common.thread_ops import U32, fma
from pallas_kernels.hyper_connections.mixing import STREAMS


def load_four(pointer: Any) -> list[U32]:
    """16 bytes of global memory that the kernel does not write."""
    code = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
    return [U32(x) for x in mlir.ptx(code, pointer, results=[mlir.int_type()] * 4)]


def store_four(pointer: Any, four: Sequence[U32]) -> None:
    """Stores 16 bytes to global memory."""
    mlir.ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", pointer, *(word.value for word in four))


def store_shared(address: U32, four: Sequence[U32]) -> None:
    """Stores 16 bytes to shared memory."""
    thread_ops.ptx_effect("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", address, *four)


def unpack(word: U32) -> list[Any]:
    """A word's two bfloat16 as MLIR float32."""
    return [thread_ops.as_float(x) for x in (word << 16, word & 0xFFFF0000)]


def pack(low: Any, high: Any) -> U32:
    """Two MLIR float32, rounded to a word of two bfloat16."""
    code = "cvt.rn.bf16x2.f32 $0, $1, $2;"
    return U32(mlir.ptx(code, high, low, results=mlir.int_type(), pure=True))


def load_factors(pointer: Any) -> list[list[Any]]:
    """A token's weights from its mixing weights in global memory: post [4], and comb [4][4], as MLIR float32."""
    fours = [load_four(mlir.at(pointer, 4 * STREAMS * (1 + j))) for j in range(1 + STREAMS)]
    return [[thread_ops.as_float(x) for x in four] for four in fours]


def mixed(words: Sequence[U32], factors: Sequence[Sequence[Any]]) -> Iterator[U32]:
    """Words of the new streams, from words of the old ones and of what is added."""
    *streams, y = [unpack(word) for word in words]
    for k in range(STREAMS):
        both = []
        for half in range(2):
            value = arith.mulf(y[half], factors[0][k])
            for j, stream in enumerate(streams):
                value = fma(stream[half], factors[1 + j][k], value)
            both.append(value)
        yield pack(*both)
