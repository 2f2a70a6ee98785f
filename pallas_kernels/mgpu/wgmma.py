"""Accumulators of `wgmma`, [64, columns] float32 in registers: products, exchange between warpgroups, and stores.

An inbox is shared memory for one accumulator from another warpgroup. A register of a thread holds two values of the
accumulator. An inbox stores these pairs by register, not by row: first the pairs in register 0 of all 128 threads, then
the pairs in register 1, and so on.
"""

import contextlib
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mgpu import mlir, thread_ops, transaction_barriers
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import primitive


def transforms(dtype: DTypeLike) -> tuple[Any, ...]:
    """Returns the tiling and the 128-byte swizzle of operands of a dtype in shared memory."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


TRANSFORMS = transforms(jnp.bfloat16)


def operand(*shape: int, dtype: DTypeLike = jnp.bfloat16) -> Any:
    """Returns the scratch type of an operand in shared memory, with the `transforms` of its dtype."""
    return plgpu.SMEM(shape, dtype, transforms=transforms(dtype))


def layout(_: tuple[int, ...]):
    """Returns the register layout of accumulators, which is the same for all shapes."""
    return plgpu.Layout.WGMMA


def zeros(shape: tuple[int, int]) -> jax.Array:
    """Returns an accumulator of zeros."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def multiply_add(acc: jax.Array, a, b) -> jax.Array:
    """Returns acc + a @ b.

    Args:
      acc: [64, columns] float32.
      a: [64, k] bfloat16 in shared memory or in registers.
      b: [k, columns] bfloat16 in shared memory.
    """
    return multiply_add_all((acc,), a, (b,))[0]


@primitive
def multiply_add_all(accs: tuple[jax.Array, ...], a, bs: tuple) -> tuple[jax.Array, ...]:
    """Returns `multiply_add(acc, a, b)` for each pair of `accs` and `bs`, and waits once for all products."""
    # Pallas's interpreter supports neither an initial accumulator nor an operand in registers in `plgpu.wgmma`.
    left = a[...].astype(jnp.float32)
    products = [jnp.dot(left, b[...].astype(jnp.float32), precision="highest") for b in bs]
    return tuple(acc + product for acc, product in zip(accs, products, strict=True))


@multiply_add_all.mosaic
def _(accs, a, bs):
    def multiply(refs):
        for ref, b in zip(refs, bs, strict=True):
            plgpu.wgmma(ref, a, b)

    run: Any = pl.run_state(multiply)
    return run(tuple(plgpu.ACC.init(acc) for acc in accs))


@primitive
def put(inbox, values: jax.Array) -> None:
    """Writes an accumulator to an inbox, [64 * columns] float32 in shared memory (interpreted: [64, columns])."""
    inbox[...] = values


@mlir.emits(put, layout=layout)
def _(inbox, values):
    for pair, there in _own_pairs(inbox, values):
        llvm.store(pair, there, alignment=8)


def send(inbox, values: jax.Array, block: jax.Array, barrier) -> None:
    """Writes an accumulator to the inbox of another block of the cluster. The function is for GPUs alone.

    Args:
      inbox: this block's inbox; the same place of the other block's shared memory is written.
      values: [64, columns] float32.
      block: int32 scalar, index of the other block in the cluster.
      barrier: [2] int32, a transaction barrier; the barrier at the same place of the other block counts the bytes.
    """

    def emit(inbox, values, block, barrier):
        peer_inbox = thread_ops.peer(llvm.ptrtoint(mlir.int_type(), _own_place(inbox)), block)
        peer_barrier = thread_ops.peer(thread_ops.shared(barrier), block)
        for i, pair in enumerate(values.registers.flat):
            words = [value.bits() for value in mlir.values(pair)]
            transaction_barriers.send(peer_inbox + 8 * mlir.THREADS * i, words, peer_barrier)

    mlir.inline(emit, inbox, values, block, barrier, layout=layout)


@primitive
def add(values: jax.Array, inbox) -> jax.Array:
    """Returns `values` plus the accumulator that `put` or `send` wrote to this block's inbox."""
    return values + inbox[...]


@mlir.emits(add, layout=layout, returns=lambda values, inbox: values)
def _(values, inbox):
    for pair, there in _own_pairs(inbox, values):
        yield arith.addf(pair, llvm.load(pair.type, there, alignment=8))


@primitive
def put_shared(ref, values: jax.Array) -> None:
    """Writes values to shared memory without synchronizing threads, unlike an assignment.

    The caller makes sure that earlier accesses to the memory have ended. A barrier at which every thread arrives has to
    follow. If `wgmma` reads the values, a fence has to come between the writes and that barrier.

    Args:
      ref: reference of the shape and dtype of the values; bfloat16 with `TRANSFORMS`.
      values: [64, columns] bfloat16 in the layout of an accumulator, or [64] float32, one for each row.
    """
    ref[...] = values


@put_shared.mosaic
def _put_shared_mosaic(ref, values):
    def emit(ref, values):
        if len(values.shape) == 1:
            values.store_untiled(ref, optimized=False)
        else:
            values.store_tiled(ref, swizzle=128)

    whole = len(values.shape) > 1
    registers = plgpu.Layout.WGMMA if whole else plgpu.Layout.WGMMA.reduce(1)
    mlir.inline(emit, (ref, plgpu.RefType(TRANSFORMS if whole else ())), (values, registers))


@primitive
def add_to(inbox, values: jax.Array) -> None:
    """Adds `values` to the accumulator that `put` wrote to this block's inbox."""
    inbox[...] = inbox[...] + values


@mlir.emits(add_to, layout=layout)
def _(inbox, values):
    for pair, there in _own_pairs(inbox, values):
        llvm.store(arith.addf(llvm.load(pair.type, there, alignment=8), pair), there, alignment=8)


@primitive
def store(ref, values: jax.Array, *, transposed: bool = False) -> None:
    """Writes an accumulator [rows, columns] to global memory.

    Args:
      ref: [rows, columns] float32 reference. If `transposed`: [n, m] float32 or bfloat16 reference, to which the first
        n columns of the first m rows are written.
      values: [rows, columns] float32 in the layout of an accumulator.
      transposed: whether to transpose the values.
    """
    ref[...] = values.T[: ref.shape[0], : ref.shape[1]].astype(ref.dtype) if transposed else values


@mlir.emits(store, layout=layout)
def _emit_store(ref, values, *, transposed=False):
    kind = ir.MemRefType(ref.type)
    (stride, _), _ = kind.get_strides_and_offset()
    size = 2 if isinstance(kind.element_type, ir.BF16Type) else 4
    width = values.shape[1]
    # `down` and `right` are the distances in bytes between consecutive rows and consecutive columns of the values.
    down, right = (size, size * stride) if transposed else (size * stride, size)
    first_row, first_column = map(Scalar, next(values.layout.thread_idxs(values.shape)))
    offset = first_column * right + first_row * down
    first_place = mlir.at(mlir.global_pointer(ref), mlir.to_i64(offset))
    # The distance between the places of two registers is the same in all threads. As a constant it needs no register.
    strides = values.layout.tiling.tile_strides((width, 1))
    for indices in np.ndindex(values.registers.shape):
        element = sum(i * stride for i, stride in zip(indices, strides, strict=False))
        row, column = divmod(element, width)
        pair = values.registers[indices]
        distance = row * down + column * right
        if not transposed:
            llvm.store(pair, mlir.at(first_place, distance), alignment=8)
            continue
        for i, value in enumerate(mlir.values(pair)):
            value = value if size == 4 else arith.truncf(kind.element_type, value)
            with contextlib.ExitStack() as inside:
                if kind.shape[0] < width:
                    inside.enter_context(_when_below(first_column, kind.shape[0] - column - i))
                if kind.shape[1] < values.shape[0]:
                    inside.enter_context(_when_below(first_row, kind.shape[1] - row))
                llvm.store(value, mlir.at(first_place, distance + i * right), alignment=size)


def _when_below(number, end):
    return mgpu.utils.when(number.is_below(end))


def _own_pairs(inbox, values):
    """Yields (register, pointer to its place in an inbox) for each of this thread's registers of two values each."""
    first_place = _own_place(inbox)
    for i, pair in enumerate(values.registers.flat):
        yield pair, mlir.at(first_place, 8 * mlir.THREADS * i)


def _own_place(inbox):
    """Returns a pointer to this thread's first two values in an inbox. The next two are 8 * THREADS bytes further."""
    return mlir.at(mlir.shared_pointer(inbox), mlir.thread() * 8)
