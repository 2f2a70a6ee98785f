"""Rows of quantised pools in registers: one warp a row, found by row number.

Kernels here see every pool as [rows, columns], all leading axes merged, and a row of 512 values as 8 groups of 64. A
warp reads and writes half a row at a time, 8 values a lane, so that every access of a warp is one contiguous stretch:
no shared memory, no bulk copies (a 448-byte row does not fit their alignment), and the fewest instructions between a
token's arrival and its last byte.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats.layouts import RowLayout, check_pools
from pallas_kernels.formats.products import product_in
from pallas_kernels.mgpu import mlir
from pallas_kernels.runtime.checks import check_rules
from pallas_kernels.runtime.launch import primitive


GROUP = 64
GROUPS = 8
ROW_DIM = GROUPS * GROUP
WARPS = 4  # of a warpgroup

# Warp w holds rows w, w + 4, ...; its lanes 4 groups x 8 stretches of 8 values, in two registers a row.
VALUES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, 4, GROUP), (8,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
PER_GROUP = VALUES.reduce(2)
PER_ROW = VALUES.reduce((1, 2))


def _layout(shape):
    return {1: PER_ROW, 2: PER_GROUP, 3: VALUES}[len(shape)]


product = product_in(_layout)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Numbers along an axis of rows, groups or values, int32, in the layout of that rank."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_layout(shape))


def check_row_pools(layout: RowLayout, nope: jax.Array, rope: jax.Array, scale: jax.Array) -> None:
    """Raises NotImplementedError unless these are pools [layers, a, b, width] of rows that the kernels take."""
    check_rules(
        {
            f"rows of {ROW_DIM} values, got {layout.nope_dim} + {layout.rope_dim}": layout.dim == ROW_DIM,
            f"a multiple of {GROUP} values without RoPE, got {layout.nope_dim}": layout.nope_dim % GROUP == 0,
            f"scale blocks of {GROUP} or a row, got {layout.scale_block}": layout.scale_block in (None, GROUP),
        }
    )
    check_pools(layout, (nope, rope, scale))


def ring_rows(token: jax.Array, slots, positions, layer, shape: tuple[int, ...]) -> jax.Array:
    """[n] int32: the rows of rings [layers, slots, ring, ..] that hold tokens, `position % ring` of their slots.

    Args:
      token: [n] int32 in layout PER_ROW.
      slots, positions: [T] int32 in global memory; tokens of one slot stand together and in order.
      layer: [1] int32 in global memory.
      shape: of the rings.

    Returns:
      -1 where nothing is written: for numbers from T on, for tokens whose slot or position is -1, and where a later
      token of the call has the same row.
    """
    _, num_slots, ring, *_ = shape
    tokens = slots.shape[0]
    at = jnp.minimum(token, tokens - 1)
    slot, position = load_rows(slots, at, token.shape), load_rows(positions, at, token.shape)
    keep = (token < tokens) & (slot >= 0) & (slot < num_slots) & (position >= 0)
    if tokens > ring:
        later = load_rows(slots, jnp.minimum(token + ring, tokens - 1), token.shape)
        keep &= (token + ring >= tokens) | (later != slot)
    row = (layer[0] * num_slots + slot) * ring + lax.rem(position, jnp.int32(ring))
    return jnp.where(keep, row, -1)


@primitive
def load_rows(ref, rows: jax.Array, shape: tuple[int, ...], *, first_group: int = 0) -> jax.Array:
    """[*shape] in the layout of its rank: rows of a pool [R, C], or [R], in global memory, by number.

    Args:
      rows: [n] int32 in layout PER_ROW, each in 0 .. R - 1.
      shape: (n,) the first value of each row; (n, C) whole rows of per-group values; (n, 8, 64) rows in groups.
      first_group: for (n, 8, 64): the pool's rows are groups first_group .. first_group + C / 64 - 1. Values of the
        other groups are unspecified.
    """
    values = ref[...].reshape(-1, _width(ref))[rows]
    if len(shape) == 3:
        groups = _width(ref) // GROUP
        which = jnp.clip(lax.iota(jnp.int32, GROUPS) - first_group, 0, groups - 1)
        return values.reshape(-1, groups, GROUP)[:, which]
    return values[:, 0] if len(shape) == 1 else values


@load_rows.mosaic
def _(ref, rows, shape, *, first_group=0):
    layout: Any = _layout(shape).to_mgpu()

    def emit(ref, rows):
        bits = mlir.vector_type(layout.vector_length, _bits_type(ref))
        kind = mlir.vector_type(layout.vector_length, ref.type.element_type)
        for _, row, group, lane in _positions(layout, shape, rows):
            if len(shape) == 3:
                # Unsigned: groups before the first lie far past the end, whose values are those of the last.
                group = arith.subi(group, mlir.index(first_group))
                group = arith.minui(group, mlir.index(_width(ref) // GROUP - 1))
            loaded = llvm.load(bits, _pointer(ref, row, group, lane), alignment=_bytes(bits))
            yield vector.bitcast(kind, loaded)

    returns = jax.ShapeDtypeStruct(shape, ref.dtype)
    return mlir.inline(emit, ref, rows, layout=_layout, returns=returns)


@primitive
def store_rows(ref, rows: jax.Array, values: jax.Array, *, first_group: int = 0) -> None:
    """Writes what `load_rows` would load, [n], [n, C] or [n, 8, 64] of the pool's dtype; bool pools take uint8 0 and 1.

    A negative row number writes nothing, and so do the groups that are not in the pool.
    """
    flat = values.reshape(values.shape[0], -1)[:, first_group * GROUP :][:, : _width(ref)].astype(ref.dtype)
    for i in range(values.shape[0]):

        @pl.when(rows[i] >= 0)
        def _(i=i):
            ref[rows[i]] = flat[i] if len(ref.shape) == 2 else flat[i, 0]


@store_rows.mosaic
def _(ref, rows, values, *, first_group=0):
    def emit(ref, rows, values):
        for at, row, group, lane in _positions(values.layout, values.shape, rows):
            inside = arith.cmpi(arith.CmpIPredicate.sge, row, mlir.index(0))
            if len(values.shape) == 3:
                # Unsigned: groups before the first lie far past the end.
                group = arith.subi(group, mlir.index(first_group))
                in_pool = arith.cmpi(arith.CmpIPredicate.ult, group, mlir.index(_width(ref) // GROUP))
                inside = arith.andi(inside, in_pool)
            with mgpu.utils.when(inside):
                bits = mlir.vector_type(values.layout.vector_length, _bits_type(ref))
                value = vector.bitcast(bits, values.registers[at])
                llvm.store(value, _pointer(ref, row, group, lane), alignment=_bytes(bits))

    mlir.inline(emit, ref, rows, values, layout=_layout)


def _positions(layout, shape, rows):
    """(register, row, group, value in the group) of what this thread holds, as MLIR index values."""
    rows = [arith.index_cast(ir.IndexType.get(), mlir.scalar(row)) for row in rows.registers.flat]
    registers = np.ndindex(layout.registers_shape(shape))
    for at, position in zip(registers, layout.thread_idxs(shape), strict=True):
        group, lane = (*position[1:], mlir.index(0), mlir.index(0))[:2]
        yield at, rows[at[0]], group, lane


def _pointer(ref, row, group, lane):
    """Address of a value: in a row of values by group and lane, in a row of per-group values by group."""
    column = group
    if _width(ref) >= GROUP:
        column = arith.addi(arith.muli(group, mlir.index(GROUP)), lane)
    offset = arith.addi(arith.muli(row, mlir.index(_width(ref))), column)
    return mlir.at(mlir.global_pointer(ref), mlir.to_i64(offset), _bits_type(ref))


def _width(ref):
    shape = ref.type.shape if isinstance(ref, ir.Value) else ref.shape
    return shape[1] if len(shape) == 2 else 1


def _bits_type(ref):
    # At least 8: a bool takes a byte.
    return mlir.int_type(max(8, mgpu.utils.bitwidth(ref.type.element_type)))


def _bytes(vector_type):
    return vector_type.shape[0] * mgpu.utils.bitwidth(vector_type.element_type) // 8
