"""Which rows a token attends to, and where they lie: its window in a ring, its entries behind a block table."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.sparse_attention import kv_tiles
from pallas_kernels.sparse_attention.kv_tiles import UNIT, take


TILE = 64
UNITS = TILE // UNIT
# The position of padding, from which nothing is visible, and where rings begin that are left out.
NOWHERE = -(1 << 30)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Compressed entries of requests: arrays, and within the kernel references to them.

    Attributes:
      layer: int32 scalar, index on axis 0 of the pools.
      block_table: [slots, max_blocks] int32 block ids; -1 = none.
      pools: (nope [layers, blocks, entries a block, N] uint8, rope [.., R] bfloat16, scale [.., 8] uint8, an E8M0 scale
        for each 64 values of nope and zeros, or [.., 1] float32).
      indices: [T, K] int32 entries of each token; -1 = none. None: all visible ones.
      compress_rate: tokens an entry stands for; entry e is visible from position (e + 1) * rate - 1 on.
      layout: of the pools' rows.
    """

    layer: Any
    block_table: Any
    pools: tuple[Any, Any, Any]
    indices: Any
    compress_rate: int = dataclasses.field(metadata=dict(static=True))
    layout: RowLayout = dataclasses.field(metadata=dict(static=True))

    @property
    def count(self) -> int:
        """The most entries that a token may attend to."""
        if self.indices is None:
            return self.block_table.shape[1] * self.pools[0].shape[2]
        return self.indices.shape[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionProblem:
    """The rows that the tokens of a call attend to: arrays, and within the kernel references to them.

    Attributes:
      slots, positions, places, rings, window, layout: see `sparse_attention`.
      layer: [1] int32.
      compressed: entries, their layer [1] int32; or None.
    """

    slots: Any
    positions: Any
    layer: Any
    places: Any
    compressed: Paged | None
    rings: tuple[Any, Any, Any]
    window: int = dataclasses.field(metadata=dict(static=True))
    layout: RowLayout = dataclasses.field(metadata=dict(static=True))

    @property
    def window_tiles(self) -> int:
        return self.window // TILE

    @property
    def tiles(self) -> int:
        """The most tiles that a token has: those of the window, then those of the entries."""
        return self.window_tiles + (0 if self.compressed is None else -(-self.compressed.count // TILE))

    def tile_range(self, token: jax.Array, split: jax.Array, splits: int) -> tuple[jax.Array, jax.Array]:
        """(first, last + 1) of the tiles of a split: equal parts of the token's tiles, later ones may be shorter.

        With an index list they do not depend on the position, so that nothing has to be loaded first.
        """
        tiles = jnp.int32(self.tiles)
        if self.compressed is not None and self.compressed.indices is None:
            position = self.positions[token]
            visible = lax.div(position + 1, jnp.int32(self.compressed.compress_rate))
            visible = jnp.minimum(visible, self.compressed.count)
            tiles = jnp.where(position >= 0, self.window_tiles + lax.div(visible + TILE - 1, jnp.int32(TILE)), 0)
        each = lax.div(tiles + splits - 1, jnp.int32(splits))
        first = kv_tiles.opaque(jnp.minimum(split * each, tiles))
        return first, jnp.minimum(first + each, tiles)


class RowAddresses:
    """Where the rows of a token's tiles lie, found in three steps, each of which waits for loads of the one before.

    Of each tile `units` units from `first_unit` on.
    """

    def __init__(
        self, problem: AttentionProblem, token: jax.Array, last: jax.Array, first_unit: Any = 0, units: int = UNITS
    ):
        """Loads what is the same for all tiles. Tiles from `last` on have no rows."""
        self.problem, self.token, self.last = problem, token, last
        self.first_unit, self.units = first_unit, units
        # Vectors, not scalars: the compiler waits for a scalar before it loads the next.
        here, zero = kv_tiles.splat(token), kv_tiles.splat(jnp.int32(0))
        position, slot = take(problem.positions, here), take(problem.slots, here)
        _, slots, ring, _ = problem.rings[0].shape
        exists = (position >= 0) & (slot >= 0)
        if problem.places is None:
            exists &= slot < slots
        self.position = jnp.where(exists, position, NOWHERE)
        self.slot = jnp.maximum(slot, 0)
        self.place = self.position if problem.places is None else take(problem.places, here)
        ring_slot = jnp.minimum(self.slot, slots - 1) if problem.places is None else zero
        layer = take(problem.layer, zero)
        # What is added to it stays negative, which is no row.
        self.ring_start = jnp.where(layer >= 0, (layer * slots + ring_slot) * ring, NOWHERE)
        if problem.compressed is not None:
            self.pool_start = take(problem.compressed.layer, zero) * problem.compressed.pools[0].shape[1]

    def entries(self, tile: jax.Array) -> list[jax.Array]:
        """The entry numbers of each unit of a tile, [16] int32; -1 = none."""
        c = self.problem.compressed
        if c is None:
            return []
        found = []
        for unit in range(self.units):
            item = self._items(tile - self.problem.window_tiles, unit)
            wanted = (item >= 0) & (item < c.count) & (tile < self.last)
            if c.indices is None:
                entry = item
                wanted &= item < lax.div(self.position + 1, jnp.int32(c.compress_rate))
            else:
                wanted &= self.position >= 0
                entry = take(c.indices, self.token * c.count + jnp.clip(item, 0, c.count - 1))
            found.append(jnp.where(wanted, entry, -1))
        return found

    def blocks(self, entries: list[jax.Array]) -> list[jax.Array]:
        """The blocks of each unit's entries, [16] int32."""
        c = self.problem.compressed
        if c is None:
            return []
        (slots, columns), per_block = c.block_table.shape, c.pools[0].shape[2]
        start = jnp.minimum(self.slot, slots - 1) * columns
        logical = (jnp.clip(lax.div(entry, jnp.int32(per_block)), 0, columns - 1) for entry in entries)
        return [take(c.block_table, start + column) for column in logical]

    def rows(self, tile: jax.Array, entries: list[jax.Array], blocks: list[jax.Array]) -> list[jax.Array]:
        """The row numbers of each unit of a tile, [16] int32, in the rings or the pools; -1 = none."""
        found = [self._window_row(tile, unit) for unit in range(self.units)]
        c = self.problem.compressed
        if c is None:
            return found
        in_window = jnp.broadcast_to(tile < self.problem.window_tiles, (UNIT,))
        others = (self._pool_row(c, entry, block) for entry, block in zip(entries, blocks, strict=True))
        return [jnp.where(in_window, row, other) for row, other in zip(found, others, strict=True)]

    def _window_row(self, tile, unit):
        back = (self.problem.window - 1) - self._items(tile, unit)
        ring = self.problem.rings[0].shape[2]
        row = self.ring_start + lax.rem(jnp.maximum(self.place - back, 0), jnp.int32(ring))
        return jnp.where((self.position >= back) & (tile < self.last), row, -1)

    def _pool_row(self, compressed, entry, block):
        _, count, per_block, _ = compressed.pools[0].shape
        most = compressed.block_table.shape[1] * per_block
        valid = (entry >= 0) & (entry < most) & (block >= 0) & (block < count)
        row = (self.pool_start + block) * per_block + lax.rem(jnp.maximum(entry, 0), jnp.int32(per_block))
        return jnp.where(valid, row, -1)

    def _items(self, tile, unit):
        """The numbers of a unit's rows among all rows of the token's window, or among its entries."""
        return tile * TILE + (self.first_unit + unit) * UNIT + kv_tiles.iota()
