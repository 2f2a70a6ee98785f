"""The epilogue of `dequant_gemm`: sums [64 rows of a weight, N inputs] to rows of an array, one for each input.

A warpgroup transposes bfloat16 values in shared memory, so that it writes whole lines.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.matmul.dequant_wgmma import permute_columns
from pallas_kernels.matmul.quantized_weights import ROWS, SHIFT
from pallas_kernels.matmul.swiglu import emit_swiglu, swiglu
from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.launch import primitive


COLUMNS = 32  # inputs at a time
LINE_BYTES = 2 * ROWS + 16  # of an input in shared memory: the padding keeps banks apart
STAGING_BYTES = COLUMNS * LINE_BYTES  # of a warpgroup


@primitive
def store_columns(out_gmem, sums: jax.Array, column, first, end, staging_smem, rows_gmem=None) -> None:
    """Stores out[first + n, column : column + 64] = 2**32 * sums[:, n] for inputs with first + n < end.

    Args:
      out_gmem: [.., width] float32, or bfloat16, for which sums are rounded.
      sums: [64, N] float32, N a multiple of 16.
      column: first column.
      first: number of the first input.
      end: number of inputs.
      staging_smem: [STAGING_BYTES] uint8, this warpgroup's own.
      rows_gmem: [..] int32, the row of each input instead of its number, or None.
    """
    values = (sums * 2.0**SHIFT).T.astype(out_gmem.dtype)

    @pl.loop(0, values.shape[0])
    def _(n):
        @pl.when(first + n < end)
        def _():
            row = first + n if rows_gmem is None else rows_gmem[first + n]
            out_gmem[row, pl.ds(column, ROWS)] = lax.dynamic_index_in_dim(values, n, keepdims=False)


@store_columns.mosaic
def _store_columns_mosaic(out_gmem, sums, column, first, end, staging_smem, rows_gmem=None):
    def emit(out, sums, column, first, end, staging, *rows):
        column, first, end = (U32(mlir.scalar(x)) for x in (column, first, end))
        held = [arith.mulf(x, mlir.f32(2.0**SHIFT)) for x in mlir.values(sums)]
        if isinstance(ir.MemRefType(out.type).element_type, ir.F32Type):
            _store_float32(out, held, column, first, end)
            return

        def put(start, place):
            # 8 x 8 values are transposed at a time: 16 rows and 16 inputs of a warp.
            thread = U32(mlir.thread())
            matrix, line = thread % 32 >> 3, thread & 7
            at = place + ((matrix >> 1) * 8 + line) * LINE_BYTES + ((thread >> 5) * 2 + (matrix & 1)) * 16
            for n in range(0, COLUMNS, 16):
                if 2 * start + 2 * n >= 4 * len(held):
                    break
                own = held[(start + n) // 2 :][:8]
                words = [_bfloat16_pair(own[i], own[i + 1]) for i in range(0, 8, 2)]
                code = f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0 + {n * LINE_BYTES}], {{$1, $2, $3, $4}};"
                mlir.ptx(code, at.value, *words)

        _store_lines(out, 2 * len(held), put, ROWS, column, first, end, staging, rows)

    operands = [] if rows_gmem is None else [rows_gmem]
    scalars = (jnp.int32(x) for x in (column, first, end))
    mlir.inline(emit, out_gmem, sums, *scalars, staging_smem, *operands, layout=lambda _: plgpu.Layout.WGMMA)


@primitive
def store_swiglu(
    out_gmem,
    sums: jax.Array,
    column,
    first,
    end,
    staging_smem,
    limit: float,
    weights_gmem: Any = None,
    permuted: bool = False,
) -> None:
    """Stores 32 channels of the SwiGLU of a gated product, rounded to bfloat16.

    Args:
      out_gmem, column, first, end, staging_smem: see `store_columns`.
      sums: [64, N] float32, 2**-32 of gate and up in the same threads.
      limit: limit of SwiGLU.
      weights_gmem: [..] float32, a factor for each input before rounding; None: ones.
      permuted: whether columns are stored in FP4's order, see `permute_columns`.
    """
    values = swiglu(sums, limit)
    values = permute_columns(values) if permuted else values

    @pl.loop(0, values.shape[0])
    def _(n):
        @pl.when(first + n < end)
        def _():
            own = lax.dynamic_index_in_dim(values, n, keepdims=False)
            own = own if weights_gmem is None else own * weights_gmem[first + n]
            out_gmem[first + n, pl.ds(column, ROWS // 2)] = own.astype(jnp.bfloat16)


@store_swiglu.mosaic
def _store_swiglu_mosaic(out_gmem, sums, column, first, end, staging_smem, limit, weights_gmem=None, permuted=False):
    def emit(out, sums, column, first, end, staging, *weights):
        column, first, end = (U32(mlir.scalar(x)) for x in (column, first, end))
        held, f32 = mlir.values(sums), mlir.f32_type()

        def put(start, place):
            thread = U32(mlir.thread())
            warp, row = thread >> 5, thread % 32 >> 2
            # The place of channel 8 * warp + row.
            in_order = warp * 8 + row
            position = (row >> 1 & 1) * 16 + (row & 1) * 8 + warp * 2 + (row >> 2) if permuted else in_order
            for n in range(start, min(start + COLUMNS, 2 * len(held)), 8):
                for i in range(2):
                    inner = (thread & 3) * 2 + (n + i)
                    value = emit_swiglu(held[n // 2 + i], held[n // 2 + 2 + i], limit)
                    for table in weights:
                        # Beyond the end the last row's weight is read, and nothing stored.
                        weight = llvm.load(f32, _element(table, (first + inner).minimum(end - 1), f32))
                        value = arith.mulf(value, weight)
                    word = _bfloat16_pair(value, value)
                    at = place + (inner - start) * LINE_BYTES + position * 2
                    mlir.ptx("{ .reg .b16 s, t; mov.b32 {s, t}, $1; st.shared.b16 [$0], s; }", at.value, word)

        _store_lines(out, 2 * len(held), put, ROWS // 2, column, first, end, staging, ())

    scalars, tables = (jnp.int32(x) for x in (column, first, end)), () if weights_gmem is None else (weights_gmem,)
    mlir.inline(emit, out_gmem, sums, *scalars, staging_smem, *tables, layout=lambda _: plgpu.Layout.WGMMA)


def _store_lines(
    out: Any, inputs: int, put: Callable[[int, U32], None], width: int, column: U32, first: U32, end: U32, staging, rows
):
    """Stores lines of `width` bfloat16; `put(start, address)` leaves those of the inputs from `start` on in memory."""
    place, thread, size = thread_ops.shared(staging), U32(mlir.thread()), width // 8
    for start in range(0, inputs, COLUMNS):
        # The lines before these were read, also those of the last tile.
        mgpu.utils.warpgroup_barrier()
        put(start, place)
        mgpu.utils.warpgroup_barrier()
        for turn in range(0, min(COLUMNS, inputs - start) * size, mlir.THREADS):
            line, part = (thread + turn) // size, (thread + turn) % size
            row = first + start + line
            inside = row < end
            if start + COLUMNS > inputs:
                inside = inside & (line < inputs - start)
            with thread_ops.when(inside):
                values = thread_ops.load_vector(place + line * LINE_BYTES + part * 16)
                row = thread_ops.load_global(rows[0], row) if rows else row
                at = _element(out, row, ir.BF16Type.get(), column + part * 8)
                mlir.ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", at, *(x.value for x in values))


def _store_float32(out, held, column, first, end):
    """Stores float32 sums; eight threads write 32 bytes."""
    thread = U32(mlir.thread())
    row = (thread >> 5) * 16 + (thread % 32 >> 2)
    for n in range(0, 2 * len(held), 8):
        for i in range(2):
            line = first + ((thread & 3) * 2 + (n + i))
            with thread_ops.when(line < end):
                at = _element(out, line, mlir.f32_type(), column + row)
                for half in range(2):
                    llvm.store(held[n // 2 + 2 * half + i], mlir.at(at, 32 * half))


def _bfloat16_pair(low, high):
    """Returns two float32, rounded, in a word."""
    operands = (U32(arith.bitcast(mlir.int_type(), x)).value for x in (high, low))
    return mlir.ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", *operands, results=mlir.int_type(), pure=True)


def _element(ref, row, element, column=None):
    """Returns a pointer into an array [rows] or [rows, width] in global memory; both are at most 2**31."""
    offset = arith.extui(mlir.int_type(64), row.value)
    if column is not None:
        offset = arith.muli(offset, mlir.i64(ir.MemRefType(ref.type).shape[1]))
        offset = arith.addi(offset, arith.extui(mlir.int_type(64), column.value))
    return mlir.at(mlir.global_pointer(ref), offset, element)
