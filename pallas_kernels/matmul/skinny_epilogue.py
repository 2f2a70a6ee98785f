"""Sums of `skinny_gemm`, [64 rows of a weight, N inputs], on their way to memory: each input has a row there."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.matmul.quantized_weights import HALF, ROWS, SHIFT
from pallas_kernels.matmul.swiglu import emit_swiglu, swiglu
from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.launch import primitive


@primitive
def store_swiglu(out, sums: jax.Array, tile: jax.Array, limit: float, rows: Any = None, weights: Any = None) -> None:
    """Writes 32 channels of SwiGLU, rounded, of 2**-32 times gate and up in the same threads.

    Args:
      out: [P, I] bfloat16 in global memory.
      sums: [64, N] float32, of a gated product.
      tile: number of the 32 channels.
      limit: of SwiGLU.
      rows: [N] int32 in shared memory, the row of `out` of each input, or -1; None: of input n row n, while there is
        one.
      weights: [N] float32 in shared memory, with which values are multiplied before they are rounded; None: ones.
    """
    _each_row(out, swiglu(sums, limit), tile * HALF, rows, weights)


@store_swiglu.mosaic
def _(out, sums, tile, limit, rows=None, weights=None):
    def emit(out, sums, tile, *tables):
        def store(place, column, values):
            value = emit_swiglu(values[0], values[1], limit)
            if weights is not None:
                weight = thread_ops.load(thread_ops.shared(tables[-1]) + (column << 2))
                value = arith.mulf(value, thread_ops.as_float(weight))
            llvm.store(arith.truncf(ir.BF16Type.get(), value), place, alignment=2)

        numbers = None if rows is None else tables[0]
        _each_column(out, sums, numbers, U32(mlir.scalar(tile)) * HALF, gated=True, store=store)

    tables = [table for table in (rows, weights) if table is not None]
    mlir.inline(emit, out, sums, tile, *tables, layout=lambda _: plgpu.Layout.WGMMA)


@primitive
def store_rows(out, sums: jax.Array, tile: jax.Array, rows: Any = None) -> None:
    """Writes 64 channels of 2**32 times the sums [64, N], rounded. See `store_swiglu`."""
    _each_row(out, (sums * 2.0**SHIFT).T, tile * ROWS, rows, None)


@store_rows.mosaic
def _(out, sums, tile, rows=None):
    def emit(out, sums, tile, *rows):
        bf16 = ir.BF16Type.get()

        def store(place, _, values):
            for half, value in enumerate(values):
                value = arith.truncf(bf16, arith.mulf(value, mlir.f32(2.0**SHIFT)))
                llvm.store(value, mlir.at(place, 2 * 8 * half), alignment=2)

        numbers = rows[0] if rows else None
        _each_column(out, sums, numbers, U32(mlir.scalar(tile)) * ROWS, gated=False, store=store)

    tables = [] if rows is None else [rows]
    mlir.inline(emit, out, sums, tile, *tables, layout=lambda _: plgpu.Layout.WGMMA)


def _each_row(out, values, channel, rows, weights):
    """What the primitives do, of values [N, channels]."""
    for n in range(values.shape[0] if rows is not None else min(values.shape[0], out.shape[0])):
        row = jnp.int32(n) if rows is None else rows[n]
        value = values[n] if weights is None else values[n] * weights[n]

        @pl.when(row >= 0)
        def _(row=row, value=value):
            out[row, pl.ds(channel, value.shape[0])] = value.astype(jnp.bfloat16)


def _each_column(out, sums, rows, channel, *, gated, store):
    """Calls `store(place in out, column, both rows' sums)` for each of a thread's columns that has a row of `out`."""
    thread = U32(mlir.thread())
    line = (thread >> 5) * (8 if gated else 16) + (thread % 32 >> 2)
    count, width = ir.MemRefType(out.type).shape
    held = mlir.values(sums)
    for n in range(0, len(held), 4):
        for i in range(2):
            column = ((thread & 3) << 1) + (2 * n + i)
            row = column if rows is None else thread_ops.load(thread_ops.shared(rows) + (column << 2))
            inside = arith.cmpi(arith.CmpIPredicate.ult, row.value, mlir.i32(count))
            with thread_ops.when(U32(inside)):
                offset = arith.muli(mlir.to_i64(row.value), mlir.i64(width))
                offset = arith.addi(offset, mlir.to_i64((channel + line).value))
                place = mlir.at(mlir.global_pointer(out), offset, ir.BF16Type.get())
                store(place, column, (held[n + i], held[n + 2 + i]))
