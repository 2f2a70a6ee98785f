"""The epilogue of `skinny_gemm`: sums [64 rows of a weight, N inputs] to rows of bfloat16, one for each input."""

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
def store_swiglu(
    out_gmem, sums: jax.Array, tile: jax.Array, limit: float, rows_smem: Any = None, weights_smem: Any = None
) -> None:
    """Stores 32 channels of the SwiGLU of a gated product, rounded.

    Args:
      out_gmem: [P, I] bfloat16.
      sums: [64, N] float32, 2**-32 of gate and up in the same threads.
      tile: number of the 32 channels.
      limit: limit of SwiGLU.
      rows_smem: [N] int32, the row of `out_gmem` of each input, or -1; None: input n has row n, while there is one.
      weights_smem: [N] float32, factors of the values before they are rounded; None: ones.
    """
    _store_rows(out_gmem, swiglu(sums, limit), tile * HALF, rows_smem, weights_smem)


@store_swiglu.mosaic
def _store_swiglu_mosaic(out_gmem, sums, tile, limit, rows_smem=None, weights_smem=None):
    def store(place, column, values, tables):
        value = emit_swiglu(values[0], values[1], limit)
        if weights_smem is not None:
            weight = thread_ops.load(thread_ops.shared(tables[-1]) + (column << 2))
            value = arith.mulf(value, thread_ops.as_float(weight))
        llvm.store(arith.truncf(ir.BF16Type.get(), value), place, alignment=2)

    _inline_store(store, out_gmem, sums, tile, rows_smem, weights_smem, gated=True)


@primitive
def store_rows(out_gmem, sums: jax.Array, tile: jax.Array, rows_smem: Any = None) -> None:
    """Stores 64 channels, 2**32 times the sums [64, N], rounded. See `store_swiglu`."""
    _store_rows(out_gmem, (sums * 2.0**SHIFT).T, tile * ROWS, rows_smem, None)


@store_rows.mosaic
def _store_rows_mosaic(out_gmem, sums, tile, rows_smem=None):
    def store(place, column, values, tables):
        for half, value in enumerate(values):
            value = arith.truncf(ir.BF16Type.get(), arith.mulf(value, mlir.f32(2.0**SHIFT)))
            llvm.store(value, mlir.at(place, 2 * 8 * half), alignment=2)

    _inline_store(store, out_gmem, sums, tile, rows_smem, None, gated=False)


def _store_rows(out_gmem, values, channel, rows_smem, weights_smem):
    """Stores values [N, channels] from a channel on; for the interpreter."""
    for n in range(values.shape[0] if rows_smem is not None else min(values.shape[0], out_gmem.shape[0])):
        row = jnp.int32(n) if rows_smem is None else rows_smem[n]
        value = values[n] if weights_smem is None else values[n] * weights_smem[n]

        @pl.when(row >= 0)
        def _(row=row, value=value):
            out_gmem[row, pl.ds(channel, value.shape[0])] = value.astype(jnp.bfloat16)


def _inline_store(store, out_gmem, sums, tile, rows_smem, weights_smem, *, gated):
    """Calls `store(place, column, sums of both rows, tables)` for each of a thread's columns that has a row."""

    def emit(out, sums, tile, *tables):
        thread, channel = U32(mlir.thread()), U32(mlir.scalar(tile)) * (HALF if gated else ROWS)
        line = (thread >> 5) * (8 if gated else 16) + (thread % 32 >> 2)
        count, width = ir.MemRefType(out.type).shape
        held = mlir.values(sums)
        for n in range(0, len(held), 4):
            for i in range(2):
                column = ((thread & 3) << 1) + (2 * n + i)
                row = column
                if rows_smem is not None:
                    row = thread_ops.load(thread_ops.shared(tables[0]) + (column << 2))
                with thread_ops.when(row < count):
                    offset = arith.muli(mlir.to_i64(row.value), mlir.i64(width))
                    offset = arith.addi(offset, mlir.to_i64((channel + line).value))
                    place = mlir.at(mlir.global_pointer(out), offset, ir.BF16Type.get())
                    store(place, column, (held[n + i], held[n + 2 + i]), tables)

    tables = [table for table in (rows_smem, weights_smem) if table is not None]
    mlir.inline(emit, out_gmem, sums, tile, *tables, layout=lambda _: plgpu.Layout.WGMMA)
