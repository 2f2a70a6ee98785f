"""Finds the dequantized rows that a token attends to in prefill attention, and copies them to shared memory.

A tile is 64 rows, and a unit is 16 rows of a tile. A token's first tiles hold its window, and its other tiles hold its
compressed entries.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.kv_rows import GROUP, ROW_DIM
from pallas_kernels.mgpu import mlir
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import primitive
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field
from pallas_kernels.sparse_attention import kv_tiles
from pallas_kernels.sparse_attention.kv_tiles import PER_ROW, UNIT, take
from pallas_kernels.sparse_attention.online_softmax import HALF, HEADS
from pallas_kernels.sparse_attention.row_addresses import TILE, UNITS


# Number of columns that are copied and multiplied at once. For wider products, the compiler needs more registers than
# a thread has at the start of the kernel.
CHUNK = HALF // 2


@pytree_dataclass
class DenseRows:
    """The rows that the tokens of a call attend to: arrays, and within the kernel references to them.

    Attributes:
      window_rows: [N, 512] bfloat16. The first T rows are those of the call's T tokens. The others are each request's
        older rows, of tokens that precede the request's first token in the call.
      entries: [E, 512] bfloat16 compressed entries, request by request, or None.
      indices: [T, K] int32, indices of each token's entries within its request; -1 = none. None: a token attends to the
        first `counts` entries of its request.
      metadata: [T, 4] int32. Column 0 is the token's position. Column 1 is the index in the call of its request's first
        token. Column 2 is the index in `window_rows` after its request's older rows. Column 3 is the index in `entries`
        of its request's first entry.
      counts: [T] int32, number of entries that a token attends to, or with `indices` the number of leading indices that
        are read; -1 = padding.
      window: number of window rows that a token sees, its own included; a multiple of 64.
    """

    window_rows: Any
    entries: Any
    indices: Any
    metadata: Any
    counts: Any
    window: int = static_field()

    @property
    def sources(self) -> tuple:
        """The arrays of rows: `window_rows`, and `entries` if there are any."""
        return (self.window_rows,) if self.entries is None else (self.window_rows, self.entries)

    def tiles(self, token: jax.Array) -> jax.Array:
        """Returns the number of a token's tiles; padding has one tile without rows."""
        count = self.counts[token]
        tiles = self.window // TILE + lax.div(jnp.maximum(count, 0) + TILE - 1, TILE)
        return jnp.where(count >= 0, tiles, 1)


class TokenRows:
    """Computes the indices of the rows of a token's tiles within a kernel, where `rows` holds references."""

    def __init__(self, rows: DenseRows, token: jax.Array):
        self.rows = rows
        self.token = token
        place = kv_tiles.splat(4 * token)  # index of the token's metadata
        self.position = take(rows.metadata, place)
        self.first_token = take(rows.metadata, place + 1)
        self.past_end = take(rows.metadata, place + 2)
        self.first_entry = take(rows.metadata, place + 3)
        self.count = take(rows.counts, kv_tiles.splat(token))

    def tile_rows(self, tile: jax.Array) -> list[jax.Array]:
        """Returns the indices of a tile's rows in `window_rows` or `entries`: [16] int32 for each unit; -1 = none."""
        return [self._unit_rows(tile * TILE + unit * UNIT + kv_tiles.iota()) for unit in range(UNITS)]

    def _unit_rows(self, item):
        rows = self.rows
        distance = (rows.window - 1) - item
        index = self.token - distance
        window_row = jnp.where(index >= self.first_token, index, self.past_end - (self.first_token - index))
        window_row = jnp.where(distance <= self.position, window_row, -1)
        if rows.entries is None:
            return window_row
        entry = item - rows.window
        exists = entry < self.count
        if rows.indices is not None:
            max_entries = rows.indices.shape[1]
            entry = take(rows.indices, self.token * max_entries + jnp.clip(entry, 0, max_entries - 1))
        entry_row = jnp.where(exists & (entry >= 0), self.first_entry + entry, -1)
        return jnp.where(item < rows.window, window_row, entry_row)


@dataclasses.dataclass(frozen=True)
class WorkItems:
    """The work items of a persistent block. An item is a token and a group of up to 64 heads.

    The items of all blocks are ordered by token, then by group. Item i of block b has the index `b + i * blocks` in
    this order.
    """

    rows: DenseRows  # references to the rows that the tokens attend to
    block: jax.Array  # int32 scalar, index of this block
    blocks: int  # number of blocks
    tokens: int  # number of tokens
    heads: int  # number of heads, a multiple of 64 or fewer than 64

    @property
    def groups(self) -> int:
        """The number of groups of heads."""
        return pl.cdiv(self.heads, HEADS)

    @property
    def count(self) -> jax.Array:
        return lax.div(self.tokens * self.groups - self.block + (self.blocks - 1), self.blocks)

    def locate(self, i: jax.Array) -> tuple[jax.Array, Any]:
        """Returns (token, slice of heads) of this block's item i; of the last item of all blocks if i is too large."""
        item = jnp.minimum(self.block + i * self.blocks, self.tokens * self.groups - 1)
        token = lax.div(item, self.groups)
        group = lax.rem(item, self.groups)
        return token, pl.ds(group * HEADS, min(self.heads, HEADS))

    def tiles(self, i: jax.Array) -> jax.Array:
        return self.rows.tiles(self.locate(i)[0])

    def loop(self, body) -> jax.Array:
        """Calls `body(i, first_tile, tiles)` for each item i, and returns the total number of tiles.

        `tiles` is the item's number of tiles. `first_tile` is the index of the item's first tile among all tiles of the
        block. Both are int32 scalars. The next item's number of tiles is loaded before the call of `body`.
        """

        def step(i, carry):
            first_tile, tiles = carry
            next_tiles = self.tiles(i + 1)
            body(i, first_tile, tiles)
            return first_tile + tiles, next_tiles

        return lax.fori_loop(0, self.count, step, (jnp.int32(0), self.tiles(jnp.int32(0))))[0]


@primitive
def start_unit(chunk_smem, bias_smem, in_window: jax.Array, row: jax.Array, sources: tuple, *, first: int, chunk: int):
    """Starts to copy a chunk of columns of a unit's 16 rows to shared memory, as a part of a `cp.async` group.

    Args:
      chunk_smem: [64, CHUNK] bfloat16 with `TRANSFORMS`; rows first .. first + 15 are written.
      bias_smem: [64] float32, written only with chunk 0: elements first .. first + 15 become 0, or -inf for a row with
        index -1.
      in_window: int32 scalar; 0 if the rows are in `entries`, otherwise they are in `window_rows`. Ignored if there are
        no entries.
      row: [16] int32 indices of rows in the layout `PER_ROW`; a row with -1 becomes zeros.
      sources: `DenseRows.sources` in global memory.
      first: index of the unit's first row in the tile.
      chunk: index of the chunk; its columns begin at `chunk * CHUNK`.
    """

    def load_rows(source):
        return source[...][jnp.maximum(row, 0) % source.shape[0]]

    values = jnp.where(in_window != 0, load_rows(sources[0]), load_rows(sources[-1]))
    values = jnp.where((row >= 0)[:, None], values, jnp.zeros((), jnp.bfloat16))
    chunk_smem[pl.ds(first, UNIT)] = values[:, chunk * CHUNK : (chunk + 1) * CHUNK]
    if chunk == 0:
        bias_smem[pl.ds(first, UNIT)] = jnp.where(row >= 0, 0.0, -jnp.inf).astype(jnp.float32)


@mlir.emits(start_unit, plgpu.RefType(TRANSFORMS), None, None, PER_ROW)
def _emit_start_unit(chunk_smem, bias_smem, in_window, row, sources, *, first, chunk):
    row = mlir.scalar(row)
    lane, target, own_row = kv_tiles.unit_offsets(chunk_smem, CHUNK)
    base = mlir.global_pointer(sources[0])
    if len(sources) > 1:
        base = (in_window > 0).where(base, mlir.global_pointer(sources[1]))
    exists = row.is_at_least(0)
    clamped_row = mlir.to_i64(row.signed_maximum(0))
    source = mlir.at(base, mlir.to_u64(lane * 16) + clamped_row * (2 * ROW_DIM))
    size = exists.where(16, 0)  # number of bytes to read; the instruction adds zeros up to 16 bytes
    for group in range(CHUNK // GROUP):
        target_offset = 2 * (first * CHUNK + 8 * GROUP * group)
        source_offset = 2 * (chunk * CHUNK + GROUP * group)
        copy = f"cp.async.cg.shared.global [$0 + {target_offset}], [$1 + {source_offset}], 16, $2;"
        mlir.ptx(copy, target, source, size)
    if chunk == 0:
        bias = mlir.at(mlir.at(mlir.shared_pointer(bias_smem), own_row * 4), 4 * first)
        kv_tiles.store_bias(bias, lane, exists)
