"""Loads and stores of quantized pools' rows, by row number, with one warp for each row.

Every pool is [rows, columns] here, with all leading axes merged, and a row of 512 values is 8 groups of 64. A warp
accesses half a row at a time, 8 values in each lane, so that the bytes of an access are contiguous. Rows go from global
memory to registers directly: bulk copies do not take 448-byte rows, and every further step costs latency.
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

from pallas_kernels.formats.exact_math import product_in
from pallas_kernels.formats.layouts import GROUP as GROUP
from pallas_kernels.mgpu import mlir
from pallas_kernels.runtime.launch import primitive


GROUPS = 8
ROW_DIM = GROUPS * GROUP
WARPS = 4  # warps of a warpgroup

# Warp w holds rows w, w + 4, ... A row is two registers; the lanes of a register hold 4 groups x 8 runs of 8 values.
VALUES = plgpu.Layout.TILED(plgpu.Tiling(((WARPS, 4, GROUP), (8,))), warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
PER_GROUP = VALUES.reduce(2)
PER_ROW = VALUES.reduce((1, 2))


def _layout(shape):
    return {1: PER_ROW, 2: PER_GROUP, 3: VALUES}[len(shape)]


product = product_in(_layout)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns the numbers along an axis of rows, groups or values, int32, in the layout of the shape's rank."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_layout(shape))


def ring_rows(token: jax.Array, slots, positions, layer, shape: tuple[int, ...]) -> jax.Array:
    """Returns the row of each token [n], `position % ring` of its slot, in rings of a shape [layers, slots, ring, ..].

    The row is -1 for tokens from T on, for padding (slot or position -1), and for tokens whose row a later token of the
    call overwrites. `slots`, `positions` [T] and `layer` [1] are int32 in global memory.
    """
    _, num_slots, ring, *_ = shape
    tokens = slots.shape[0]
    clipped = jnp.minimum(token, tokens - 1)
    slot = load_rows(slots, clipped, token.shape)
    position = load_rows(positions, clipped, token.shape)
    keep = (token < tokens) & (slot >= 0) & (slot < num_slots) & (position >= 0)
    if tokens > ring:
        later = load_rows(slots, jnp.minimum(token + ring, tokens - 1), token.shape)
        keep &= (token + ring >= tokens) | (later != slot)
    row = (layer[0] * num_slots + slot) * ring + lax.rem(position, ring)
    return jnp.where(keep, row, -1)


@primitive
def load_rows(ref, rows: jax.Array, shape: tuple[int, ...], *, first_group: int = 0) -> jax.Array:
    """Loads rows of a pool by number, in the layout of the shape's rank.

    Args:
      ref: [R, C] or [R] in global memory.
      rows: [n] int32 in layout PER_ROW, each in 0 .. R - 1.
      shape: (n,) for the first value of each row; (n, C) for rows of per-group values; (n, 8, 64) for rows in groups.
      first_group: the group at which the pool's C / 64 groups begin; values of other groups are unspecified.
    """
    values = ref[...].reshape(-1, _width(ref))[rows]
    if len(shape) == 3:
        groups = _width(ref) // GROUP
        which = jnp.clip(lax.iota(jnp.int32, GROUPS) - first_group, 0, groups - 1)
        return values.reshape(-1, groups, GROUP)[:, which]
    return values[:, 0] if len(shape) == 1 else values


@mlir.emits(
    load_rows, layout=_layout, returns=lambda ref, rows, shape, **options: jax.ShapeDtypeStruct(shape, ref.dtype)
)
def _emit_load_rows(ref, rows, shape, *, first_group=0):
    layout: Any = _layout(shape).to_mgpu()
    bits = mlir.vector_type(layout.vector_length, _bits_type(ref))
    kind = mlir.vector_type(layout.vector_length, ref.type.element_type)
    for _, row, group, lane in _positions(layout, shape, rows):
        if len(shape) == 3:
            # Clips unsigned numbers: groups before the first count as groups past the end.
            group = arith.subi(group, mlir.index(first_group))
            group = arith.minui(group, mlir.index(_width(ref) // GROUP - 1))
        loaded = llvm.load(bits, _pointer(ref, row, group, lane), alignment=_bytes(bits))
        yield vector.bitcast(kind, loaded)


@primitive
def store_rows(ref, rows: jax.Array, values: jax.Array, *, first_group: int = 0) -> None:
    """Stores rows of a pool by number, as `load_rows` loads them; a bool pool takes uint8 0 and 1.

    Skips negative row numbers, and groups that the pool lacks.
    """
    flat = values.reshape(values.shape[0], -1)[:, first_group * GROUP :][:, : _width(ref)].astype(ref.dtype)
    for i in range(values.shape[0]):

        @pl.when(rows[i] >= 0)
        def _(i=i):
            ref[rows[i]] = flat[i] if len(ref.shape) == 2 else flat[i, 0]


@mlir.emits(store_rows, layout=_layout)
def _emit_store_rows(ref, rows, values, *, first_group=0):
    for register, row, group, lane in _positions(values.layout, values.shape, rows):
        inside = arith.cmpi(arith.CmpIPredicate.sge, row, mlir.index(0))
        if len(values.shape) == 3:
            # Compares unsigned numbers: groups before the first lie past the end.
            group = arith.subi(group, mlir.index(first_group))
            in_pool = arith.cmpi(arith.CmpIPredicate.ult, group, mlir.index(_width(ref) // GROUP))
            inside = arith.andi(inside, in_pool)
        with mgpu.utils.when(inside):
            bits = mlir.vector_type(values.layout.vector_length, _bits_type(ref))
            value = vector.bitcast(bits, values.registers[register])
            llvm.store(value, _pointer(ref, row, group, lane), alignment=_bytes(bits))


def _positions(layout, shape, rows):
    """Yields (register, row, group, value in the group) of this thread's registers, as MLIR index values."""
    rows = [arith.index_cast(ir.IndexType.get(), mlir.scalar(row)) for row in rows.registers.flat]
    registers = np.ndindex(layout.registers_shape(shape))
    for at, position in zip(registers, layout.thread_idxs(shape), strict=True):
        group, lane = (*position[1:], mlir.index(0), mlir.index(0))[:2]
        yield at, rows[at[0]], group, lane


def _pointer(ref, row, group, lane):
    """Returns the address of a value: column `64 * group + lane`, or `group` in rows of per-group values."""
    column = group
    if _width(ref) >= GROUP:
        column = mlir.multiply_add(group, GROUP, lane)
    offset = mlir.multiply_add(row, _width(ref), column)
    return mlir.at(mlir.global_pointer(ref), mlir.to_i64(offset), _bits_type(ref))


def _width(ref):
    shape = ref.type.shape if isinstance(ref, ir.Value) else ref.shape
    return shape[1] if len(shape) == 2 else 1


def _bits_type(ref):
    # A bool takes a byte.
    return mlir.int_type(max(8, mgpu.utils.bitwidth(ref.type.element_type)))


def _bytes(vector_type):
    return vector_type.shape[0] * mgpu.utils.bitwidth(vector_type.element_type) // 8
