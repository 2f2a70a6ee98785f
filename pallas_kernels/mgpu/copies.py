"""Asynchronous copies (`cp.async`) of rows from global to shared memory, by the threads that read them back.

Vectors lie over a warpgroup as in `vectors`.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.mgpu import mlir, vectors
from pallas_kernels.mgpu.mlir import THREADS, WARP
from pallas_kernels.runtime.launch import primitive


@primitive
def start_copy(target, source, row: jax.Array, column: jax.Array, *, below: int = 0, other=None) -> None:
    """Starts to copy a part of row `row + below` to shared memory; each thread copies the values that it reads back.

    Args:
      target: [size] float32 in shared memory.
      source: [.., width] float32 in global memory.
      row: int32 scalar.
      column: [128] int32, the first of the `size / 128` consecutive columns that each thread copies.
      below: added to the row.
      other: optional array like `source`, of which a negative `row` means row `-1 - row`; then `below` is 0.
    """
    held = target.shape[0] // THREADS
    columns = jnp.repeat(column, held) + jnp.tile(lax.iota(jnp.int32, held), THREADS)
    if other is None:
        target[...] = source[row + below][columns]
    else:
        read = lambda: source[jnp.maximum(row, 0)], lambda: other[jnp.maximum(-1 - row, 0)]
        target[...] = lax.cond(row >= 0, *read)[columns]


@start_copy.mosaic
def _start_copy_mosaic(target, source, row, column, *, below=0, other=None):
    held = target.shape[0] // THREADS

    def emit(target, row, column, source, other=None):
        row, column = (mlir.to_i64(mlir.scalar(x)) for x in (row, column))
        base = mlir.global_pointer(source)
        if other is not None:
            is_first = arith.cmpi(arith.CmpIPredicate.sge, row, mlir.i64(0))
            row = arith.select(is_first, row, arith.subi(mlir.i64(-1), row))
            base = arith.select(is_first, base, mlir.global_pointer(other))
        width = source.type.shape[1]
        offset = arith.addi(arith.muli(row, mlir.i64(width)), column)
        there = mlir.at(mlir.at(base, offset, mlir.f32_type()), 4 * below * width)
        own = arith.muli(mlir.thread(64), mlir.i64(held))
        here = mlir.at(mlir.shared_pointer(target), own, mlir.f32_type())
        cache = nvvm.LoadCacheModifierKind.CG if held == 4 else nvvm.LoadCacheModifierKind.CA
        nvvm.cp_async_shared_global(here, there, 4 * held, cache)

    vectors.inline(emit, target, row, column, source, *([] if other is None else [other]))


@primitive
def start_rows(target, pieces, *, column: jax.Array, size: int) -> None:
    """Starts to copy rows, `size` columns of each, to shared memory.

    After `wait_copies` and `sync_warp` a warp may read its own columns of the rows.

    Args:
      target: [rows * size] float32 in shared memory, the number of rows a multiple of 4.
      pieces: (array [.., width] float32 in global memory, row, begin), with int32 scalars. From target row `begin` to
        the next piece's `begin`, target row r is row `row + r` of the array.
      column: int32 scalar, the first of `size` columns.
      size: number of columns.
    """

    def read(r, pieces):
        *others, (array, row, begin) = pieces
        if not others:
            return array[row + r, pl.ds(column, size)]
        return lax.cond(r >= begin, lambda: array[row + r, pl.ds(column, size)], lambda: read(r, others))

    target[...] = jnp.concatenate([read(r, pieces) for r in range(target.shape[0] // size)])


@start_rows.mosaic
def _start_rows_mosaic(target, pieces, *, column, size):
    rows = target.shape[0] // size
    held = size // THREADS
    # A thread copies 4 values at once, but reads `held` of a row: 8 * held threads of a warp copy one of 4 / held rows.
    wide = 8 * held
    high = 4 // held

    def emit(target, column, *operands):
        thread = mlir.thread(64)
        lane = arith.remui(thread, mlir.i64(WARP))
        first_row = arith.divui(lane, mlir.i64(wide))
        inner = arith.muli(arith.divui(thread, mlir.i64(WARP)), mlir.i64(WARP * held))
        inner = arith.addi(inner, arith.muli(arith.remui(lane, mlir.i64(wide)), mlir.i64(4)))
        place = arith.addi(arith.muli(first_row, mlir.i64(size)), inner)
        target = mlir.at(mlir.shared_pointer(target), place, mlir.f32_type())
        sources = []
        for array, row, begin in zip(operands[::3], operands[1::3], operands[2::3], strict=True):
            width = array.type.shape[1]
            offset = arith.muli(arith.addi(mlir.to_i64(mlir.scalar(row)), first_row), mlir.i64(width))
            offset = arith.addi(arith.addi(offset, mlir.to_i64(mlir.scalar(column))), inner)
            left = arith.subi(mlir.scalar(begin), arith.trunci(mlir.int_type(), first_row))
            sources.append((mlir.at(mlir.global_pointer(array), offset, mlir.f32_type()), width, left))
        for r in range(0, rows, high):
            source: Any = None
            for pointer, width, left in sources:
                pointer = mlir.at(pointer, 4 * r * width)
                reached = arith.cmpi(arith.CmpIPredicate.sge, mlir.i32(r), left)
                source = pointer if source is None else arith.select(reached, pointer, source)
            nvvm.cp_async_shared_global(mlir.at(target, 4 * r * size), source, 16, nvvm.LoadCacheModifierKind.CG)

    mlir.inline(emit, target, column, *(x for piece in pieces for x in piece))


@primitive
def commit_copies() -> None:
    """Makes one group of the copies that this thread started since its last group."""


commit_copies.mosaic(lambda: mlir.inline(nvvm.cp_async_commit_group))


@primitive
def wait_copies(pending: int) -> None:
    """Waits for all groups of copies of this thread but the last `pending` ones."""


wait_copies.mosaic(lambda pending: mlir.inline(lambda: nvvm.cp_async_wait_group(pending)))


@primitive
def sync_warp() -> None:
    """Waits for the warp's threads; compilers move no load or copy across it."""


sync_warp.mosaic(lambda: mlir.inline(mgpu.utils.warp_barrier))
