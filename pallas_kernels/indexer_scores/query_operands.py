"""A chunk's queries in shared memory, as the right operand of Hopper's matrix product."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mlir_helpers as mlir, thread_ops
from pallas_kernels.common.primitive import primitive
from pallas_kernels.common.thread_ops import U32


HEADS = 64
DIM = 128
PARTS, PART_HEADS = 4, 16  # that warpgroups encode one at a time
# The power of two of a head's largest value: 256 or 384.
_TOP = 8


def transforms(dtype) -> tuple:
    """Of queries in shared memory."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


@primitive
def encode(q, weights, token: jax.Array, part: jax.Array, queries, query_weights, at: jax.Array) -> None:
    """Writes heads 16 * part .. 16 * part + 15 of a token's queries as E4M3, and their weights times what these lack.

    A head's values are divided by a power of two, so that the largest is 256 to 448, and its weight multiplied by it:
    exact where they are at least 2**-15 of the head's largest value.

    Args:
      q, weights: [T, 64, 128] bfloat16, FP4 values times powers of two, and [T, 64] float32, in global memory.
      queries, query_weights: [tokens * 64, 128] float8_e4m3fn with `transforms`, and [tokens, 64] float32, in shared
        memory; the token is token `at` of them.
    """
    rows = pl.ds(part * PART_HEADS, PART_HEADS)
    values = q[token, rows].astype(jnp.float32)
    largest = lax.bitcast_convert_type(jnp.max(jnp.abs(values), axis=1), jnp.int32) >> 23
    exponent = jnp.maximum(largest - _TOP, 1)
    values = values * lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)[:, None]
    queries[pl.ds(at * HEADS + part * PART_HEADS, PART_HEADS)] = values.astype(jnp.float8_e4m3fn)
    query_weights[at, rows] = weights[token, rows] * lax.bitcast_convert_type(exponent << 23, jnp.float32)


@encode.mosaic
def _(q, weights, token, part, queries, query_weights, at):
    def emit(q, weights, token, part, queries, query_weights, at):
        f32, thread = mlir.f32_type(), thread_ops.thread() % mlir.THREADS
        token, part, at = (U32(mlir.scalar(x)) for x in (token, part, at))
        # 8 threads a head, of which each has 16 values: those of a step of 16 dims of `permute_dims`.
        head, sixteen = part * PART_HEADS + (thread >> 3), thread & 7
        source, place = token * HEADS + head, at * HEADS + head
        offset = arith.muli(mlir.to_i64((source * 8 + sixteen).value), mlir.i64(32))
        pointer = mlir.at(mlir.global_pointer(q), offset)
        words: list[U32] = []
        for i in range(2):
            quad = llvm.load(mlir.vector_type(4, mlir.int_type()), mlir.at(pointer, 16 * i), alignment=16)
            words += map(U32, mlir.values(quad))
        weight = llvm.load(f32, mlir.at(mlir.global_pointer(weights), mlir.to_i64(source.value), f32))

        largest = words[0] & 0x7FFF7FFF
        for word in words[1:]:
            largest = _larger(largest, word & 0x7FFF7FFF)
        for distance in (1, 2, 4):
            largest = _larger(largest, U32(mgpu.utils.shfl_bfly(largest.value, distance)))
        exponent = (largest & 0xFFFF).maximum(largest >> 16) >> 7
        exponent = exponent.maximum(_TOP + 1) - _TOP
        down = mgpu.utils.bitcast((U32(254) - exponent << 23).value, f32)

        # bfloat16: (bit 1 of a word's dims, bit 0, lane, bit 2); E4M3: (bit 2, lane, bits 1 and 0).
        start = thread_ops.shared(queries) + place * DIM + (sixteen & 1) * 2
        for half in range(2):
            line = start + (((sixteen & 6) + half ^ place & 7) << 4)
            for lane in range(4):
                pair = []
                for word in (words[4 + lane], words[lane]):
                    bits = word & 0xFFFF0000 if half else word << 16
                    pair.append(arith.mulf(mgpu.utils.bitcast(bits.value, f32), down))
                code = "{ .reg .b16 x; cvt.rn.satfinite.e4m3x2.f32 x, $1, $2; st.shared.b16 [$0], x; }"
                mlir.ptx(code, (line + 4 * lane).value, *pair)
        with thread_ops.when(sixteen.equals(0)):
            up = mgpu.utils.bitcast((exponent << 23).value, f32)
            there = mlir.at(mlir.shared_pointer(query_weights), place.value, f32)
            llvm.store(arith.mulf(weight, up), there)

    operands = token, part, (queries, plgpu.RefType(transforms(queries.dtype))), query_weights, at
    mlir.inline(emit, q, weights, *operands)


def _larger(x, y):
    return thread_ops.pure("max.u16x2 $0, $1, $2;", x, y)
