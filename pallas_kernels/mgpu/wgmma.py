"""Accumulators of `wgmma`, [64, columns] float32 in registers: products, sums over blocks, and stores."""

import contextlib
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mgpu import mlir, thread_ops, transaction_barriers
from pallas_kernels.runtime.launch import primitive


# The layout of bfloat16 operands in shared memory.
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def layout(_: tuple[int, ...]):
    """Returns the register layout of accumulators, of any shape."""
    return plgpu.Layout.WGMMA


def zeros(shape: tuple[int, int]) -> jax.Array:
    """Returns sums before the first product."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def multiply_add(acc: jax.Array, a, b) -> jax.Array:
    """Returns acc + a @ b, [64, columns] float32, of bfloat16; b is in shared memory, a there or in registers."""
    return multiply_add_all((acc,), a, (b,))[0]


@primitive
def multiply_add_all(accs: tuple[jax.Array, ...], a, bs: tuple) -> tuple[jax.Array, ...]:
    """Returns `multiply_add` of one left operand and several right ones; waits once for all products."""
    # The interpreter has no product with a start value and none of an operand in registers.
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
    """Writes values to `inbox`, [64 * columns] float32 in shared memory (interpreted: [64, columns]), for `add`."""
    inbox[...] = values


@mlir.emits(put, layout=layout)
def _(inbox, values):
    for pair, there in _own_pairs(inbox, values):
        llvm.store(pair, there, alignment=8)


def send(inbox, values: jax.Array, block: jax.Array, barrier) -> None:
    """Writes values to the `inbox` of another block, an int32 scalar, whose transaction barrier counts the bytes."""

    def emit(inbox, values, block, barrier):
        start = thread_ops.peer(llvm.ptrtoint(mlir.int_type(), _own_place(inbox)), block)
        counted = thread_ops.peer(thread_ops.shared(barrier), block)
        for i, pair in enumerate(values.registers.flat):
            words = [mgpu.utils.bitcast(vector.extract(pair, [], [j]), mlir.int_type()) for j in range(2)]
            transaction_barriers.send(start + 8 * mlir.THREADS * i, words, counted)

    mlir.inline(emit, inbox, values, block, barrier, layout=layout)


@primitive
def add(values: jax.Array, inbox) -> jax.Array:
    """Returns the sum of `values` and the values that `put` wrote to this block's `inbox`."""
    return values + inbox[...]


@mlir.emits(add, layout=layout, returns=lambda values, inbox: values)
def _(values, inbox):
    for pair, there in _own_pairs(inbox, values):
        yield arith.addf(pair, llvm.load(pair.type, there, alignment=8))


@primitive
def put_shared(ref, values: jax.Array) -> None:
    """Writes values to shared memory, bfloat16 [64, columns] with `TRANSFORMS`, or float32 [64], one for each row.

    Unlike an assignment it does not wait for other threads. Earlier accesses must have ended, and a barrier at which
    every thread arrives has to follow. If `wgmma` reads the values, a fence has to come before that barrier.
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
    """Adds values to the values that `put` wrote to this block's `inbox`."""
    inbox[...] = inbox[...] + values


@mlir.emits(add_to, layout=layout)
def _(inbox, values):
    for pair, there in _own_pairs(inbox, values):
        llvm.store(arith.addf(llvm.load(pair.type, there, alignment=8), pair), there, alignment=8)


@primitive
def store(ref, values: jax.Array, *, transposed: bool = False) -> None:
    """Writes values [rows, columns] float32 to a float32 reference of that shape in global memory.

    A transposed one [n, rows], float32 or bfloat16, takes the first n columns, rounded.
    """
    ref[...] = values.T[: ref.shape[0]].astype(ref.dtype) if transposed else values


@mlir.emits(store, layout=layout)
def _emit_store(ref, values, *, transposed=False):
    kind = ir.MemRefType(ref.type)
    (stride, _), _ = kind.get_strides_and_offset()
    size = 2 if isinstance(kind.element_type, ir.BF16Type) else 4
    width = values.shape[1]
    # Bytes from a row to the next, and from a column to the next.
    down, right = (size, size * stride) if transposed else (size * stride, size)
    row, first_column = next(values.layout.thread_idxs(values.shape))
    offset = mlir.multiply_add(row, down, arith.muli(first_column, mlir.index(right)))
    start = mlir.at(mlir.global_pointer(ref), mlir.to_i64(offset))
    # The distance between two registers is the same in all threads: a constant, which costs no register.
    steps = values.layout.tiling.tile_strides((width, 1))
    for at in np.ndindex(values.registers.shape):
        row, column = divmod(sum(i * step for i, step in zip(at, steps, strict=False)), width)
        pair = values.registers[at]
        place = row * down + column * right
        if not transposed:
            llvm.store(pair, mlir.at(start, place), alignment=8)
            continue
        for i, value in enumerate(mlir.values(pair)):
            value = value if size == 4 else arith.truncf(kind.element_type, value)
            inside: Any = contextlib.nullcontext()
            if kind.shape[0] < width:
                end = mlir.index(kind.shape[0] - column - i)
                inside = mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, first_column, end))
            with inside:
                llvm.store(value, mlir.at(start, place + i * right), alignment=size)


def _own_pairs(inbox, values):
    """Yields this thread's registers of two values, and the place of each in an inbox."""
    start = _own_place(inbox)
    for i, pair in enumerate(values.registers.flat):
        yield pair, mlir.at(start, 8 * mlir.THREADS * i)


def _own_place(inbox):
    """Returns the address of this thread's first pair; the others follow every 8 * THREADS bytes."""
    return mlir.at(mlir.shared_pointer(inbox), mlir.thread() * 8)
