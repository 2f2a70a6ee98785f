"""Gathers of quantized KV rows: dequantizes rows of the pools to dense bfloat16 arrays, with a mask of valid rows.

Three public functions gather compressed entries by index, all visible compressed entries, and window rows. All three
launch the kernel of `_gather`. Its grid has a block of one warpgroup for every eight rows of the result. Each warp
loads, dequantizes and stores two rows.
"""

from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.pool_operands import Paged, Rings
from pallas_kernels.formats.row_encoder import scale_values
from pallas_kernels.mgpu.bfloat16_words import decode_e4m3
from pallas_kernels.runtime.checks import check_tokens
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


ROWS_PER_WARP = 2  # loading more rows at once takes more registers, but saves no time on an H100
BLOCK_ROWS = kv_rows.WARPS * ROWS_PER_WARP


@cached_trace()
def gather_compressed_kv(slots: jax.Array, entries: Paged, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Gathers the compressed entries that `entries.indices` lists for each token.

    Args:
      slots: [T] int32, each token's request slot, the index of a row of the block table; -1 = padding.
      entries: the compressed entries, with `indices` [T, K].
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      (kv, valid). `kv` [T, K, 512] has the bfloat16 values of the entries, zeros for entries that are not valid.
      `valid` is [T, K] bool. An entry is valid if the token is not padding, the index is not -1, and the block table
      has a block for the entry.

    Raises:
      NotImplementedError: a layout, a shape or a dtype is not supported.
    """
    tokens, count = entries.indices.shape
    check_tokens(tokens, slots=slots)
    entries.check(tokens)

    def address(item, layer, indices_gmem, slots_gmem, table_gmem):
        slot = kv_rows.load_rows(slots_gmem, lax.div(item, count), item.shape)
        entry = kv_rows.load_rows(indices_gmem, item, item.shape)
        return _through_table(slot, entry, layer, table_gmem, entries)

    operands = [entries.indices.reshape(-1), slots, entries.block_table.reshape(-1)]
    return _gather((tokens, count), address, operands, entries, interpret)


@cached_trace("only_visible")
def gather_all_compressed_kv(
    slots: jax.Array, positions: jax.Array, entries: Paged, *, only_visible: bool = False, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Gathers the compressed entries visible to each token, 0 .. (position + 1) // compress_rate - 1 of the request.

    Args:
      slots: [T] int32, each token's request slot, the index of a row of the block table; -1 = padding.
      positions: [T] int32, each token's position in its request; -1 = padding.
      entries: the compressed entries; `indices` is None.
      only_visible: whether a thread block may write nothing if all of its eight rows are invisible. These rows of `kv`
        and `valid` are then unspecified.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      (kv, valid). `kv` [T, E, 512] has the bfloat16 values of the entries, zeros for entries that are not valid. E is
      the maximum number of entries of a request, max_blocks * entries per block. `valid` is [T, E] bool. An entry is
      valid if it is visible and the block table has a block for it.

    Raises:
      NotImplementedError: a layout, a shape or a dtype is not supported.
    """
    tokens = slots.shape[0]
    count = entries.count
    rate = entries.compress_rate
    check_tokens(tokens, slots=slots, positions=positions)
    entries.check(tokens)

    def address(item, layer, slots_gmem, positions_gmem, table_gmem):
        token = lax.div(item, count)
        entry = lax.rem(item, count)
        slot = kv_rows.load_rows(slots_gmem, token, item.shape)
        position = kv_rows.load_rows(positions_gmem, token, item.shape)
        entry = jnp.where(entry < lax.div(position + 1, rate), entry, -1)
        return _through_table(slot, entry, layer, table_gmem, entries)

    def any_visible(first_item, slots_gmem, positions_gmem, _):
        token = lax.div(first_item, count)
        entry = lax.rem(first_item, count)
        visible = (slots_gmem[token] >= 0) & (entry < lax.div(positions_gmem[token] + 1, rate))
        return visible | (entry + BLOCK_ROWS > count)  # a block that also has rows of the next token always writes them

    operands = [slots, positions, entries.block_table.reshape(-1)]
    is_wanted = any_visible if only_visible else None
    return _gather((tokens, count), address, operands, entries, interpret, is_wanted)


@cached_trace()
def gather_swa_kv(
    slots: jax.Array, positions: jax.Array, rings: Rings, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Gathers the window rows of each token, in order of positions up to the token's own row.

    Args:
      slots: [T] int32, each token's request slot; -1 = padding.
      positions: [T] int32, each token's position in its request; -1 = padding.
      rings: the window rows.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      (kv, valid). `kv` [T, window, 512] has the bfloat16 values of the rows, zeros for rows that are not valid. `valid`
      is [T, window] bool. Rows of negative positions and rows of padding are not valid.

    Raises:
      NotImplementedError: a layout, a shape or a dtype is not supported.
    """
    tokens = slots.shape[0]
    window = rings.window
    num_slots, ring = rings.pools[0].shape[1:3]
    check_tokens(tokens, slots=slots, positions=positions)
    rings.check()

    def address(item, layer, slots_gmem, positions_gmem):
        token = lax.div(item, window)
        distance = window - 1 - lax.rem(item, window)
        slot = kv_rows.load_rows(slots_gmem, token, item.shape)
        token_position = kv_rows.load_rows(positions_gmem, token, item.shape)
        position = token_position - distance
        valid = (slot >= 0) & (token_position >= 0) & (position >= 0)
        slot = jnp.clip(slot, 0, num_slots - 1)
        position = jnp.maximum(position, 0)
        return (layer * num_slots + slot) * ring + lax.rem(position, ring), valid

    return _gather((tokens, window), address, [slots, positions], rings, interpret)


def _through_table(slot, entry, layer, table_gmem, entries):
    """Looks up in the block table, within a kernel, which rows of the pools hold n compressed entries.

    Args:
      slot: [n] int32 in layout `kv_rows.PER_ROW`, request slot of each entry; negative = no entry.
      entry: [n] int32 in the same layout, index of each entry within its request; negative = no entry.
      layer: int32 scalar, index of the layer in the pools.
      table_gmem: [slots * max_blocks] int32, the block table, flattened.
      entries: the compressed entries; only the shapes of their arrays are read.

    Returns:
      row: [n] int32 index of each entry's row in the pools with leading axes merged; 0 or more even without an entry.
      exists: [n] bool, whether slot and entry are not negative and the block table has a block for the entry.
    """
    num_slots, max_blocks = entries.block_table.shape
    blocks, per_block = entries.pools[0].shape[1:3]
    clipped = jnp.maximum(entry, 0)
    logical = lax.div(clipped, per_block)
    valid = (slot >= 0) & (entry >= 0) & (logical < max_blocks)
    index = jnp.clip(slot, 0, num_slots - 1) * max_blocks + jnp.minimum(logical, max_blocks - 1)
    block = kv_rows.load_rows(table_gmem, index, slot.shape)
    row = (layer * blocks + jnp.clip(block, 0, blocks - 1)) * per_block + lax.rem(clipped, per_block)
    return row, valid & (block >= 0)


def _gather(
    shape: tuple[int, int],
    address: Callable,
    operands: list[jax.Array],
    rows: Rings | Paged,
    interpret: bool,
    is_wanted: Callable | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Launches the gather kernel. An item is one row of the result.

    Args:
      shape: (T, number of items of each token). The index of an item counts items in row-major order of this shape.
      address: function (item, layer, *operands) that returns (row, valid). `item` [8] int32 are indices of items. `row`
        [8] int32 are the indices of the items' rows in the pools with leading axes merged, and `valid` is [8] bool. The
        function is called in the kernel, where operands are references in global memory.
      operands: arrays that `address` and `is_wanted` need.
      rows: the quantized rows.
      interpret: whether to run on the CPU, interpreted, with race detection.
      is_wanted: function (index of a block's first item, *operands) that returns whether the block writes its rows;
        None if all blocks do.

    Returns:
      (kv [*shape, 512] bfloat16, valid [*shape] bool).
    """
    items = shape[0] * shape[1]
    if items == 0:
        return jnp.zeros((*shape, kv_rows.ROW_DIM), jnp.bfloat16), jnp.zeros(shape, bool)

    def gather_block(operands_gmem, layer_gmem, pools_gmem, kv_gmem, valid_gmem):
        first_item = lax.axis_index("block") * BLOCK_ROWS

        def gather_rows():
            item = first_item + kv_rows.iota((BLOCK_ROWS,), 0)
            row, valid = address(jnp.minimum(item, items - 1), layer_gmem[0], *operands_gmem)
            kv = _load_dense(pools_gmem, rows.layout, row, valid)
            target = jnp.where(item < items, item, -1)
            kv_rows.store_rows(kv_gmem, target, kv)
            kv_rows.store_rows(valid_gmem, target, valid.astype(jnp.uint8))

        if is_wanted is None:
            gather_rows()
        else:
            pl.when(is_wanted(first_item, *operands_gmem))(gather_rows)

    dense_type = jax.ShapeDtypeStruct((items, kv_rows.ROW_DIM), jnp.bfloat16)
    launch = kernel(
        gather_block,
        out_type=(dense_type, jax.ShapeDtypeStruct((items,), jnp.bool_)),
        kernel_name="gather",
        grid={"block": -(-items // BLOCK_ROWS)},
        interpret=interpret,
    )
    pools = jax.tree.map(lambda pool: pool.reshape(-1, pool.shape[-1]), rows.pools)
    kv, valid = launch(operands, rows.layer.reshape(1), pools)
    return kv.reshape(*shape, kv_rows.ROW_DIM), valid.reshape(shape)


def _load_dense(pools_gmem, layout, row: jax.Array, valid: jax.Array) -> jax.Array:
    """Loads and dequantizes rows of the pools to [8 rows, 8 groups, 64] bfloat16, zeros where not valid.

    `row` is [8] int32, indices of rows, and `valid` [8] bool.
    """
    nope_gmem, rope_gmem, scale_gmem = pools_gmem
    size = layout.scale_block or kv_rows.GROUP  # number of values in a group
    groups = kv_rows.ROW_DIM // size
    nope_groups = layout.nope_dim // size
    # Row 0 is loaded in place of invalid rows, because it stays in L1 or L2.
    row = jnp.where(valid, row, 0)
    dense = (BLOCK_ROWS, groups, size)
    if layout.codes == "e2m1":
        codes = kv_rows.load_rows(nope_gmem, row, (BLOCK_ROWS, groups, size // 2))
    else:
        codes = kv_rows.load_rows(nope_gmem, row, dense)
    if layout.scale_block is None:
        factor = lax.broadcast_in_dim(kv_rows.load_rows(scale_gmem, row, dense[:1]), dense, (0,))
    else:
        factor = scale_values(kv_rows.load_rows(scale_gmem, row, dense[:2]), layout)
        factor = lax.broadcast_in_dim(factor, dense, (0, 1))
    if layout.codes == "e2m1":
        values = kv_rows.e2m1_values(codes) * factor
    else:
        values = decode_e4m3(codes) * factor
    if rope_gmem is None:
        kv = kv_rows.regroup(values.astype(jnp.bfloat16), kv_rows.GROUPS)
    else:
        rope = kv_rows.load_rows(rope_gmem, row, dense, first_group=nope_groups)
        kv = jnp.where(kv_rows.iota(dense, 1) < nope_groups, values.astype(jnp.bfloat16), rope)
    # Rows that were never written may hold NaN. So a select replaces invalid rows; a product with 0 would keep the NaN.
    return jnp.where(lax.broadcast_in_dim(valid, kv.shape, (0,)), kv, jnp.zeros((), jnp.bfloat16))
