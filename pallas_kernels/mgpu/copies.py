"""Asynchronous copies (`cp.async`) of rows from global to shared memory.

Each value is copied by the thread or the warp that later reads it from shared memory. So no barrier over a warpgroup is
needed. A vector is spread over the threads of a warpgroup as in `vectors`.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.mgpu import mlir, vectors
from pallas_kernels.mgpu.mlir import THREADS, WARP, Scalar
from pallas_kernels.runtime.launch import primitive


@primitive
def start_copy(target, source, row: jax.Array, column: jax.Array, *, below: int = 0, other=None) -> None:
    """Starts to copy columns of row `row + below` of `source` to `target` in shared memory.

    Each thread copies the values that it will read.

    Args:
      target: [size] float32 in shared memory.
      source: [.., width] float32 in global memory.
      row: int32 scalar, index of the row.
      column: [128] int32, the first of the `size / 128` consecutive columns that each thread copies.
      below: number of rows to add to `row`; 0 if `other` is given.
      other: array like `source`, or None. If it is given, a negative `row` means row `-1 - row` of `other`.
    """
    per_thread = target.shape[0] // THREADS
    columns = jnp.repeat(column, per_thread) + jnp.tile(lax.iota(jnp.int32, per_thread), THREADS)
    if other is None:
        target[...] = source[row + below][columns]
    else:
        values = lax.cond(row >= 0, lambda: source[jnp.maximum(row, 0)], lambda: other[jnp.maximum(-1 - row, 0)])
        target[...] = values[columns]


@vectors.emits(start_copy)
def _emit_start_copy(target, source, row, column, *, below=0, other=None):
    per_thread = target.type.shape[0] // THREADS
    row = mlir.to_i64(row)
    base = mlir.global_pointer(source)
    if other is not None:
        in_source = row.is_at_least(0)
        row = in_source.where(row, -1 - row)
        base = in_source.where(base, mlir.global_pointer(other))
    width = source.type.shape[1]
    offset = mlir.to_i64(mlir.scalar(column)) + row * width
    source_place = mlir.at(mlir.at(base, offset, mlir.f32_type()), 4 * below * width)
    first_value = mlir.wide_thread() * per_thread
    target_place = mlir.at(mlir.shared_pointer(target), first_value, mlir.f32_type())
    cache_modifier = nvvm.LoadCacheModifierKind.CG if per_thread == 4 else nvvm.LoadCacheModifierKind.CA
    nvvm.cp_async_shared_global(target_place, source_place, 4 * per_thread, cache_modifier)


@primitive
def start_rows(target, pieces, *, column: jax.Array, size: int) -> None:
    """Starts to copy `size` columns of consecutive rows to shared memory. The rows may come from several arrays.

    A warp copies the columns that its threads hold if a row is loaded as a vector [size]. After `wait_copies` and
    `sync_warp`, the warp may read these columns.

    Args:
      target: [rows * size] float32 in shared memory, the number of rows a multiple of 4.
      pieces: tuples (array, row, begin): an array [.., width] float32 in global memory, and two int32 scalars. Row r of
        the target is a copy of row `row + r` of `array`, for the last of the tuples with `begin <= r`.
      column: int32 scalar, the first of the columns to copy.
      size: number of columns to copy.
    """

    def read(r, pieces):
        *others, (array, row, begin) = pieces
        if not others:
            return array[row + r, pl.ds(column, size)]
        return lax.cond(r >= begin, lambda: array[row + r, pl.ds(column, size)], lambda: read(r, others))

    target[...] = jnp.concatenate([read(r, pieces) for r in range(target.shape[0] // size)])


@mlir.emits(start_rows)
def _emit_start_rows(target, pieces, *, column, size):
    rows = target.type.shape[0] // size
    per_thread = size // THREADS
    # A warp copies 32 * per_thread columns of each row, and each of its threads copies 4 values at a time. So
    # `row_threads` threads copy the warp's columns of one row, and the warp copies `warp_rows` rows at once.
    row_threads = 8 * per_thread
    warp_rows = 4 // per_thread
    thread = mlir.wide_thread()
    lane = thread % WARP
    first_row = lane // row_threads
    warp_column = thread // WARP * (WARP * per_thread)
    own_column = warp_column + lane % row_threads * 4
    target = mlir.at(mlir.shared_pointer(target), first_row * size + own_column, mlir.f32_type())
    sources = []
    for array, row, begin in pieces:
        width = array.type.shape[1]
        own_row = mlir.to_i64(row) + first_row
        offset = mlir.to_i64(column) + own_row * width + own_column
        begin -= Scalar(arith.trunci(mlir.int_type(), first_row))  # the loop over r counts from this thread's first row
        sources.append((mlir.at(mlir.global_pointer(array), offset, mlir.f32_type()), width, begin))
    for r in range(0, rows, warp_rows):
        source: Any = None
        for pointer, width, begin in sources:
            pointer = mlir.at(pointer, 4 * r * width)
            reached = Scalar(r).is_at_least(begin)
            source = pointer if source is None else reached.where(pointer, source)
        nvvm.cp_async_shared_global(mlir.at(target, 4 * r * size), source, 16, nvvm.LoadCacheModifierKind.CG)


@primitive
def commit_copies() -> None:
    """Closes a group of copies: all copies that this thread has started since it closed the preceding group."""


commit_copies.mosaic(lambda: mlir.inline(nvvm.cp_async_commit_group))


@primitive
def wait_copies(pending: int) -> None:
    """Waits for all groups of copies of this thread except the `pending` groups that it closed most recently."""


wait_copies.mosaic(lambda pending: mlir.inline(lambda: nvvm.cp_async_wait_group(pending)))


@primitive
def sync_warp() -> None:
    """Synchronizes the threads of a warp. Compilers do not move loads and copies across this call."""


sync_warp.mosaic(lambda: mlir.inline(mgpu.utils.warp_barrier))
