"""Loads and stores of the rows of quantized pools, by row index. One warp accesses a row.

Pools are [rows, columns], with all leading axes merged. A row has 512 values. In registers, a row is [groups, 512 /
groups]. A row with several scales has a group for each scale, and a row with one scale has 8 groups. A warp accesses
half a row at a time, 8 values in each lane, so that the bytes of an access are contiguous. Rows are loaded from global
memory to registers directly, because bulk copies do not take rows of 448 bytes, and a step through shared memory adds
latency.
"""

import functools
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
from pallas_kernels.mgpu.bfloat16_words import decode_e2m1, e2m1_pairs, multiply, unpack
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import primitive


GROUPS = 8  # number of groups of values in a row
ROW_DIM = GROUPS * GROUP  # number of values in a row
WARPS = 4  # number of warps in a warpgroup


@functools.cache
def _layout(shape):
    """Returns the register layout of an array [n], [n, groups] or [n, groups, values] for n rows, n a multiple of 4.

    Warp w holds rows w, w + 4, ... Of each row, a lane holds two vectors of 8 values, or of 4 bytes if a byte holds the
    codes of two values. The first vectors of the 32 lanes form the first half of the row's groups, and the second
    vectors form the second half.
    """
    if len(shape) == 1:
        return VALUES.reduce((1, 2))
    groups = shape[1]
    size = shape[2] if len(shape) == 3 else ROW_DIM // groups
    tiling = plgpu.Tiling(((WARPS, groups // 2, size), (groups * size // (2 * mlir.WARP),)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
    return layout if len(shape) == 3 else layout.reduce(2)


VALUES = _layout((WARPS, GROUPS, GROUP))
PER_ROW = _layout((WARPS,))
product = product_in(_layout)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    """Returns int32 indices along an axis of a shape (rows,), (rows, groups) or (rows, groups, values)."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_layout(shape))


def ring_rows(token: jax.Array, slots, positions, layer, shape: tuple[int, ...]) -> jax.Array:
    """Returns the index of each token's row in the pools: row `position % ring` in the ring of the token's slot.

    The index counts the rows of all layers and slots: the leading axes of the pools are merged.

    Args:
      token: [n] int32 in layout PER_ROW, indices of tokens, at least 0.
      slots, positions: [T] int32 in global memory; -1 = padding.
      layer: [1] int32 in global memory, index of the layer.
      shape: shape of a pool of the rings, [layers, slots, ring, ..].

    Returns:
      [n] int32 in layout PER_ROW; -1 for indices from T on, for padding, for slots that the pools do not have, and for
      tokens whose row a later token of the call overwrites.
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
    """Loads rows of a pool by index.

    Args:
      ref: [R, C] or [R] in global memory, R rows of C values or of one value.
      rows: [n] int32, indices of rows, each in 0 .. R - 1. If each group is a row of the pool: [n, groups] int32, for a
        result [n, groups, C].
      shape: shape of the result.

          * (n,): the first value of each row.
          * (n, C): rows with one value for each group.
          * (n, groups, size), such as (n, 8, 64): rows of values in groups.

      first_group: for a result of three axes, index of the group of the result that receives the pool's first group.
        Groups of the result that the pool does not hold are unspecified.

    Returns:
      Array of this shape in the layout of `_layout`.
    """
    values = ref[...].reshape(-1, _width(ref))[rows]
    if len(shape) == 3 and rows.ndim == 1:
        _, all_groups, size = shape
        groups = _width(ref) // size
        group = jnp.clip(lax.iota(jnp.int32, all_groups) - first_group, 0, groups - 1)
        return values.reshape(-1, groups, size)[:, group]
    return values[:, 0] if len(shape) == 1 else values


@mlir.emits(
    load_rows, layout=_layout, returns=lambda ref, rows, shape, **options: jax.ShapeDtypeStruct(shape, ref.dtype)
)
def _emit_load_rows(ref, rows, shape, *, first_group=0):
    layout: Any = _layout(shape).to_mgpu()
    bits = mlir.vector_type(layout.vector_length, _bits_type(ref))
    kind = mlir.vector_type(layout.vector_length, ref.type.element_type)
    for _, row, group, column in _positions(layout, shape, rows):
        if len(shape) == 3:
            # A negative index of a group is large as an unsigned integer, so the minimum replaces it by the index of
            # the pool's last group.
            group = (group - first_group).minimum(_width(ref) // shape[2] - 1)
        loaded = llvm.load(bits, _pointer(ref, shape, row, group, column), alignment=_bytes(bits))
        yield vector.bitcast(kind, loaded)


@primitive
def store_rows(ref, rows: jax.Array, values: jax.Array, *, first_group: int = 0) -> None:
    """Stores rows of a pool by index.

    Args:
      ref: [R, C] or [R] in global memory, R rows of C values or of one value.
      rows: as in `load_rows`; rows with a negative index are not stored.
      values: array of a shape and layout as `load_rows` returns, with the pool's dtype; uint8 0 and 1 for a bool pool.
      first_group: as in `load_rows`; groups that the pool does not hold are not stored.
    """
    if rows.ndim == 2:
        rows = rows.reshape(-1)
        values = values.reshape(-1, values.shape[2])
    skipped = first_group * values.shape[2] if first_group else 0
    flat = values.reshape(values.shape[0], -1)[:, skipped:][:, : _width(ref)].astype(ref.dtype)
    for i in range(values.shape[0]):

        @pl.when(rows[i] >= 0)
        def _(i=i):
            ref[rows[i]] = flat[i] if len(ref.shape) == 2 else flat[i, 0]


@mlir.emits(store_rows, layout=_layout)
def _emit_store_rows(ref, rows, values, *, first_group=0):
    for register, row, group, column in _positions(values.layout, values.shape, rows):
        inside = row.is_at_least(0)
        if len(values.shape) == 3:
            # A negative index of a group is large as an unsigned integer, so one comparison finds all groups to skip.
            group = group - first_group
            inside = inside & (group < _width(ref) // values.shape[2])
        with mgpu.utils.when(inside):
            bits = mlir.vector_type(values.layout.vector_length, _bits_type(ref))
            value = vector.bitcast(bits, values.registers[register])
            llvm.store(value, _pointer(ref, values.shape, row, group, column), alignment=_bytes(bits))


@primitive
def regroup(x: jax.Array, groups: int) -> jax.Array:
    """Reshapes rows of 512 values, [n, .., ..], to [n, groups, 512 / groups]. No value moves to another lane.

    Rows in different numbers of groups have different register layouts, even after a reduction to one value per row.
    `PER_ROW` is the layout of such values for rows of 8 groups.
    """
    return x.reshape(x.shape[0], groups, -1)


@mlir.emits(
    regroup,
    layout=_layout,
    returns=lambda x, groups: jax.ShapeDtypeStruct((x.shape[0], groups, ROW_DIM // groups), x.dtype),
)
def _emit_regroup(x, groups):
    return list(x.registers.flat)


@primitive
def e2m1_values(codes: jax.Array) -> jax.Array:
    """Returns the float32 values [n, groups, 2 * size] of pairs of E2M1 codes, [n, groups, size] uint8."""
    return decode_e2m1(codes)


@mlir.emits(
    e2m1_values,
    layout=_layout,
    returns=lambda codes: jax.ShapeDtypeStruct((*codes.shape[:2], 2 * codes.shape[2]), jnp.float32),
)
def _emit_e2m1_values(codes):
    for register in codes.registers.flat:
        word = mlir.scalar(vector.bitcast(mlir.vector_type(1, mlir.int_type()), register))
        # Pair i from `e2m1_pairs` consists of the values of codes i and i + 4, times 2**-126. The constant holds 2**126
        # in both halves, so the product is the pair of values. `pack` below puts the values in the order of the codes.
        pairs = [unpack(multiply(pair, (127 + 126) * 0x00800080)) for pair in e2m1_pairs(word)]
        yield mlir.pack(pair[half] for half in range(2) for pair in pairs)


def _positions(layout, shape, rows):
    """Yields (register, row, group, column) for each of this thread's registers.

    Args:
      layout, shape: register layout and shape of the array in registers.
      rows: indices of rows of the pool, as in `load_rows`.

    Yields:
      The index of a register, and three MLIR index values for the register's first value: its row in the pool, its
      group in the row, and its column in the group. `group` and `column` are 0 if `shape` has no such axis. `group` is
      also 0 if each group is a row of the pool.
    """
    numbers = [Scalar(arith.index_cast(ir.IndexType.get(), mlir.scalar(row))) for row in rows.registers.flat]
    zero = Scalar(arith.constant(ir.IndexType.get(), 0))
    registers = np.ndindex(layout.registers_shape(shape))
    for register, position in zip(registers, layout.thread_idxs(shape), strict=True):
        group, column = (*map(Scalar, position[1:]), zero, zero)[:2]
        if len(rows.shape) == 2:
            yield register, numbers[register[0] * 2 + register[1]], zero, column
        else:
            yield register, numbers[register[0]], group, column


def _pointer(ref, shape, row, group, column):
    """Returns the address in `ref` of the value at (row, group, column). `shape` is that of the array in registers."""
    value = group * shape[2] + column if len(shape) == 3 else group
    offset = row * _width(ref) + value
    return mlir.at(mlir.global_pointer(ref), mlir.to_i64(offset), _bits_type(ref))


def _width(ref):
    shape = ref.type.shape if isinstance(ref, ir.Value) else ref.shape
    return shape[1] if len(shape) == 2 else 1


def _bits_type(ref):
    # An element of a bool pool takes a byte.
    return mlir.int_type(max(8, mgpu.utils.bitwidth(ref.type.element_type)))


def _bytes(vector_type):
    return vector_type.shape[0] * mgpu.utils.bitwidth(vector_type.element_type) // 8
