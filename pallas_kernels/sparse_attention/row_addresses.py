"""Row addresses of decode attention: a token's window rows in a ring, and its compressed entries via a block table.

A tile is 64 rows, and a unit is 16 rows of a tile. A token's first tiles hold its window. The last tile of the window
is partly empty if the window is not a multiple of 64. Further tiles hold the token's compressed entries. The address of
an entry is found in three steps: `RowAddresses.entries` loads the indices of entries within their request, `blocks`
loads the id of each entry's block from the block table, and `rows` computes the indices of rows in the pools.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.pool_operands import Paged, Rings
from pallas_kernels.mgpu import vectors
from pallas_kernels.runtime.pytrees import pytree_dataclass
from pallas_kernels.sparse_attention import kv_tiles
from pallas_kernels.sparse_attention.kv_tiles import UNIT, take


TILE = 64
UNITS = TILE // UNIT
# This is used as the position of padding, and as the index of the first row of a ring that is left out. A sum of this
# number and the index of a row, or a position, is still negative.
NOWHERE = -(1 << 30)


@pytree_dataclass
class AttentionProblem:
    """The rows that the tokens of a call attend to: arrays, and within the kernel references to them.

    In `rings` and `compressed`, `layer` is [1] int32.
    """

    slots: Any  # [T] int32, each token's request slot; -1 = padding
    positions: Any  # [T] int32, each token's position in its request; -1 = padding
    rings: Rings  # the window rows
    compressed: Paged | None  # the compressed entries, if any

    @property
    def window_tiles(self) -> int:
        return -(-self.rings.window // TILE)

    @property
    def max_tiles(self) -> int:
        """The maximum number of tiles of a token."""
        return self.window_tiles + (0 if self.compressed is None else -(-self.compressed.count // TILE))

    def tile_range(self, token: jax.Array, split: jax.Array, splits: int) -> tuple[jax.Array, jax.Array]:
        """Returns the range [first, last) of a token's tiles that belong to a KV split, as int32 scalars.

        Every split gets the same number of tiles until none are left, so the last splits may have fewer tiles or none.
        If entries are given by `indices`, the range does not depend on the position, which then need not be loaded.

        Args:
          token: int32 scalar, index of the token.
          split: int32 scalar, index of the split.
          splits: number of splits.
        """
        tiles = jnp.int32(self.max_tiles)
        if self.compressed is not None and self.compressed.indices is None:
            position = self.positions[token]
            visible = lax.div(position + 1, self.compressed.compress_rate)
            visible = jnp.minimum(visible, self.compressed.count)
            tiles = jnp.where(position >= 0, self.window_tiles + lax.div(visible + TILE - 1, TILE), 0)
        tiles_per_split = lax.div(tiles + splits - 1, splits)
        first_tile = vectors.opaque(jnp.minimum(split * tiles_per_split, tiles))
        return first_tile, jnp.minimum(first_tile + tiles_per_split, tiles)


class RowAddresses:
    """Computes the indices of the rows of a token's tiles, in units of 16 rows.

    Methods return a list with an array [16] int32 for each unit, in the layout `kv_tiles.PER_ROW`.
    """

    def __init__(self, problem: AttentionProblem, token: jax.Array, last: jax.Array, first_unit: Any, units: int):
        """Loads the token's position and slot, and computes where its ring and the layer's entries start in the pools.

        Args:
          problem: references to the rows that the tokens attend to.
          token: int32 scalar, index of the token.
          last: int32 scalar, end of the range of tiles; rows of tiles from `last` on are -1.
          first_unit: int, or int32 scalar, index of the first unit to compute in each tile.
          units: number of units of each tile to compute.
        """
        self.problem = problem
        self.token = token
        self.last = last
        self.first_unit = first_unit
        self.units = units
        # Loads vectors of equal values, because the compiler waits for each scalar before it loads the next one.
        token_index = kv_tiles.splat(token)
        zero = kv_tiles.splat(jnp.int32(0))
        position = take(problem.positions, token_index)
        slot = take(problem.slots, token_index)
        rings = problem.rings
        _, slots, ring, _ = rings.pools[0].shape
        exists = (position >= 0) & (slot >= 0)
        if rings.own_rows is None:
            exists &= slot < slots
        self.position = jnp.where(exists, position, NOWHERE)
        self.slot = jnp.maximum(slot, 0)
        self.own_row = self.position if rings.own_rows is None else take(rings.own_rows, token_index)
        ring_slot = jnp.minimum(self.slot, slots - 1) if rings.own_rows is None else zero
        layer = take(rings.layer, zero)
        self.ring_start = jnp.where(layer >= 0, (layer * slots + ring_slot) * ring, NOWHERE)
        if problem.compressed is not None:
            self.pool_start = take(problem.compressed.layer, zero) * problem.compressed.pools[0].shape[1]

    def entries(self, tile: jax.Array) -> list[jax.Array]:
        """Returns, for each unit of a tile, the indices of the rows' entries within their request; -1 = none.

        The list is empty without compressed entries.
        """
        paged = self.problem.compressed
        if paged is None:
            return []
        units = []
        for unit in range(self.units):
            item = self._items(tile - self.problem.window_tiles, unit)
            valid = (item >= 0) & (item < paged.count) & (tile < self.last)
            if paged.indices is None:
                entry = item
                valid &= item < lax.div(self.position + 1, paged.compress_rate)
            else:
                valid &= self.position >= 0
                entry = take(paged.indices, self.token * paged.count + jnp.clip(item, 0, paged.count - 1))
            units.append(jnp.where(valid, entry, -1))
        return units

    def blocks(self, entries: list[jax.Array]) -> list[jax.Array]:
        """Returns each entry's block id from the block table; -1 = none. The block id of entry -1 is unspecified."""
        paged = self.problem.compressed
        if paged is None:
            return []
        slots, columns = paged.block_table.shape
        per_block = paged.pools[0].shape[2]
        table_row = jnp.minimum(self.slot, slots - 1) * columns
        table_columns = (jnp.clip(lax.div(entry, per_block), 0, columns - 1) for entry in entries)
        return [take(paged.block_table, table_row + column) for column in table_columns]

    def rows(self, tile: jax.Array, entries: list[jax.Array], blocks: list[jax.Array]) -> list[jax.Array]:
        """Returns the indices of the rows of each unit of a tile; -1 = none.

        The rows of a window tile are in the pools of the rings, and those of other tiles in the pools of compressed
        entries. Either way, an index counts rows over all axes of a pool but the last. `entries` and `blocks` are the
        results of the methods of these names for this tile.
        """
        window_rows = [self._window_row(tile, unit) for unit in range(self.units)]
        if self.problem.compressed is None:
            return window_rows
        in_window = jnp.broadcast_to(tile < self.problem.window_tiles, (UNIT,))
        pool_rows = self.pool_rows(entries, blocks)
        return [jnp.where(in_window, row, pool_row) for row, pool_row in zip(window_rows, pool_rows, strict=True)]

    def pool_rows(self, entries: list[jax.Array], blocks: list[jax.Array]) -> Iterator[jax.Array]:
        """Yields the indices of the rows of each unit of a tile of compressed entries, as `rows` does."""
        paged = self.problem.compressed
        return (self._pool_row(paged, entry, block) for entry, block in zip(entries, blocks, strict=True))

    def _window_row(self, tile, unit):
        rings = self.problem.rings
        distance = (rings.window - 1) - self._items(tile, unit)
        ring = rings.pools[0].shape[2]
        row = self.ring_start + lax.rem(jnp.maximum(self.own_row - distance, 0), ring)
        valid = (self.position >= distance) & (tile < self.last)
        if rings.window % TILE:
            valid &= distance >= 0
        return jnp.where(valid, row, -1)

    def _pool_row(self, paged, entry, block):
        _, num_blocks, per_block, _ = paged.pools[0].shape
        max_entries = paged.block_table.shape[1] * per_block
        valid = (entry >= 0) & (entry < max_entries) & (block >= 0) & (block < num_blocks)
        row = (self.pool_start + block) * per_block + lax.rem(jnp.maximum(entry, 0), per_block)
        return jnp.where(valid, row, -1)

    def _items(self, tile, unit):
        """Returns the indices [16] of a unit's rows, counted from the first row of tile 0."""
        return tile * TILE + (self.first_unit + unit) * UNIT + kv_tiles.iota()
