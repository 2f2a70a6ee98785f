"""Quantised rows back to dense bfloat16 with a valid mask: one body, three ways to find the rows."""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.runtime.checks import check_array
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


ROWS_PER_WARP = 2  # more in flight at once gain nothing on an H100 and cost registers
BLOCK_ROWS = kv_rows.WARPS * ROWS_PER_WARP


@cached_trace("layout")
def gather_compressed_kv(
    indices: jax.Array,
    slots: jax.Array,
    layer: jax.Array,
    block_table: jax.Array,
    nope: jax.Array,
    rope: jax.Array,
    scale: jax.Array,
    *,
    layout: RowLayout,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Entries by index list, through the block table.

    Args:
      indices: [T, K] int32 entry numbers of each token's own request; -1 = none.
      slots: [T] int32, each token's row of the block table; -1 = padding.
      layer: int32 scalar, index on axis 0 of the pools.
      block_table: [slots, max_blocks] int32 block ids; -1 = none.
      nope, rope, scale: [layers, blocks, entries a block, ..] as in `append_swa`.
      layout: of the entries, as in `append_swa`.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (kv, valid): kv [T, K, 512] bfloat16, zeros where not valid; valid [T, K] bool: slot, index and block all there.

    Raises:
      NotImplementedError: a layout, shape or dtype is not one of these.
    """
    tokens, count = indices.shape
    check_array("indices", indices, jnp.int32, tokens, count)
    check_array("slots", slots, jnp.int32, tokens)
    check_array("block_table", block_table, jnp.int32, None, None)

    def address(item, layer, indices_ref, slots_ref, table_ref):
        slot = kv_rows.load_rows(slots_ref, lax.div(item, jnp.int32(count)), item.shape)
        entry = kv_rows.load_rows(indices_ref, item, item.shape)
        return _through_table(slot, entry, layer, table_ref, block_table.shape, nope.shape)

    operands = [indices.reshape(-1), slots, block_table.reshape(-1)]
    return _gather((tokens, count), address, operands, layer, (nope, rope, scale), layout, interpret)


@cached_trace("compress_rate", "layout", "only_visible")
def gather_all_compressed_kv(
    slots: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    block_table: jax.Array,
    nope: jax.Array,
    rope: jax.Array,
    scale: jax.Array,
    *,
    compress_rate: int,
    layout: RowLayout,
    only_visible: bool = False,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Every entry visible to each token: entries `0 .. (position + 1) // compress_rate - 1` of its request.

    Args:
      slots, positions: [T] int32; -1 = padding.
      layer, block_table, nope, rope, scale, layout, interpret: as in `gather_compressed_kv`.
      compress_rate: tokens an entry stands for.
      only_visible: what is not visible is left unwritten for the most part, in kv and in valid.

    Returns:
      (kv [T, E, 512] bfloat16, valid [T, E] bool) with E = max_blocks * entries a block; as `gather_compressed_kv`.

    Raises:
      NotImplementedError: a layout, shape or dtype is not one of these.
    """
    tokens, count = slots.shape[0], block_table.shape[1] * nope.shape[2]
    check_array("slots", slots, jnp.int32, tokens)
    check_array("positions", positions, jnp.int32, tokens)
    check_array("block_table", block_table, jnp.int32, None, None)

    def address(item, layer, slots_ref, positions_ref, table_ref):
        token, entry = lax.div(item, jnp.int32(count)), lax.rem(item, jnp.int32(count))
        slot = kv_rows.load_rows(slots_ref, token, item.shape)
        position = kv_rows.load_rows(positions_ref, token, item.shape)
        visible = entry < lax.div(position + 1, jnp.int32(compress_rate))
        entry = jnp.where(visible, entry, -1)
        return _through_table(slot, entry, layer, table_ref, block_table.shape, nope.shape)

    def any_visible(first, slots_ref, positions_ref, table_ref):
        token, entry = lax.div(first, jnp.int32(count)), lax.rem(first, jnp.int32(count))
        sees = (slots_ref[token] >= 0) & (entry < lax.div(positions_ref[token] + 1, jnp.int32(compress_rate)))
        return sees | (entry + BLOCK_ROWS > count)  # or the next token's are in the block too

    operands, wanted = [slots, positions, block_table.reshape(-1)], any_visible if only_visible else None
    return _gather((tokens, count), address, operands, layer, (nope, rope, scale), layout, interpret, wanted)


@cached_trace("window", "layout")
def gather_swa_kv(
    slots: jax.Array,
    positions: jax.Array,
    layer: jax.Array,
    nope: jax.Array,
    rope: jax.Array,
    scale: jax.Array,
    *,
    window: int,
    layout: RowLayout,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The last `window` rows of each token's ring, oldest first, the token itself last.

    Args:
      slots, positions: [T] int32; -1 = padding.
      layer, layout, interpret: as in `gather_compressed_kv`.
      nope, rope, scale: [layers, slots, ring, ..] as in `append_swa`; row `position % ring`.
      window: rows a token sees, itself included.

    Returns:
      (kv [T, window, 512] bfloat16, valid [T, window] bool); zeros and False before position 0 and for padding.

    Raises:
      NotImplementedError: a layout, shape or dtype is not one of these.
    """
    tokens, (num_slots, ring) = slots.shape[0], nope.shape[1:3]
    check_array("slots", slots, jnp.int32, tokens)
    check_array("positions", positions, jnp.int32, tokens)

    def address(item, layer, slots_ref, positions_ref):
        token, back = lax.div(item, jnp.int32(window)), window - 1 - lax.rem(item, jnp.int32(window))
        slot = kv_rows.load_rows(slots_ref, token, item.shape)
        last = kv_rows.load_rows(positions_ref, token, item.shape)
        position = last - back
        valid = (slot >= 0) & (last >= 0) & (position >= 0)
        slot, position = jnp.clip(slot, 0, num_slots - 1), jnp.maximum(position, 0)
        return (layer * num_slots + slot) * ring + lax.rem(position, jnp.int32(ring)), valid

    return _gather((tokens, window), address, [slots, positions], layer, (nope, rope, scale), layout, interpret)


def _through_table(slot, entry, layer, table_ref, table_shape, pool_shape):
    """(row number in the pool, valid) of entries of requests."""
    num_slots, max_blocks = table_shape
    blocks, entries = pool_shape[1:3]
    at = jnp.maximum(entry, 0)
    logical = lax.div(at, jnp.int32(entries))
    valid = (slot >= 0) & (entry >= 0) & (logical < max_blocks)
    at_table = jnp.clip(slot, 0, num_slots - 1) * max_blocks + jnp.minimum(logical, max_blocks - 1)
    block = kv_rows.load_rows(table_ref, at_table, slot.shape)
    row = (layer * blocks + jnp.clip(block, 0, blocks - 1)) * entries + lax.rem(at, jnp.int32(entries))
    return row, valid & (block >= 0)


def _gather(
    shape: tuple[int, int],
    address: Callable,
    operands: list[jax.Array],
    layer: jax.Array,
    pools: tuple[jax.Array, ...],
    layout: RowLayout,
    interpret: bool,
    wanted: Callable | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Dense rows [*shape, 512] and valid [*shape]; `address(item, layer, *operand refs)` finds each item's row.

    `wanted(first item, *operand refs)`: whether a block of threads writes its rows; by default all do.
    """
    kv_rows.check_row_pools(layout, *pools)
    items, nope_groups = shape[0] * shape[1], layout.nope_dim // kv_rows.GROUP
    if items == 0:
        return jnp.zeros((*shape, kv_rows.ROW_DIM), jnp.bfloat16), jnp.zeros(shape, bool)

    def body(operands, layer, pools, kv_out, valid_out):
        first = lax.axis_index("block") * BLOCK_ROWS
        rows = functools.partial(write, first, operands, layer, pools, kv_out, valid_out)
        if wanted is None:
            rows()
        else:
            pl.when(wanted(first, *operands))(rows)

    def write(first, operands, layer, pools, kv_out, valid_out):
        nope, rope, scale = pools
        item = first + kv_rows.iota((BLOCK_ROWS,), 0)
        row, valid = address(jnp.minimum(item, items - 1), layer[0], *operands)
        # Rows that are not valid read row 0, which stays in the cache.
        row = jnp.where(valid, row, 0)
        dense = (BLOCK_ROWS, kv_rows.GROUPS, kv_rows.GROUP)
        codes = kv_rows.load_rows(nope, row, dense)
        if layout.scale_block is None:
            factor = lax.broadcast_in_dim(kv_rows.load_rows(scale, row, dense[:1]), dense, (0,))
        else:
            exponent = kv_rows.load_rows(scale, row, dense[:2]).astype(jnp.int32)
            factor = lax.broadcast_in_dim(lax.bitcast_convert_type(exponent << 23, jnp.float32), dense, (0, 1))
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32) * factor
        group = kv_rows.iota(dense, 1)
        rotary = kv_rows.load_rows(rope, row, dense, first_group=nope_groups)
        kv = jnp.where(group < nope_groups, values.astype(jnp.bfloat16), rotary)
        # `where`, not a product: rows that were never written may hold NaN.
        kv = jnp.where(lax.broadcast_in_dim(valid, dense, (0,)), kv, jnp.zeros((), jnp.bfloat16))
        target = jnp.where(item < items, item, -1)
        kv_rows.store_rows(kv_out, target, kv)
        kv_rows.store_rows(valid_out, target, valid.astype(jnp.uint8))

    dense_type = jax.ShapeDtypeStruct((items, kv_rows.ROW_DIM), jnp.bfloat16)
    run = kernel(
        body,
        out_type=(dense_type, jax.ShapeDtypeStruct((items,), jnp.bool_)),
        kernel_name="gather",
        grid=(-(-items // BLOCK_ROWS),),
        grid_names=("block",),
        interpret=interpret,
    )
    kv, valid = run(operands, layer.reshape(1), tuple(pool.reshape(-1, pool.shape[-1]) for pool in pools))
    return kv.reshape(*shape, kv_rows.ROW_DIM), valid.reshape(shape)
