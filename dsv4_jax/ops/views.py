"""Typed views: the pools of one layer as the ops see them.

A view holds the stacked arrays of all layers of its kind and the layer's index on axis 0. An op reads and writes rows
of the stack; slicing a layer out of it would copy a pool.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.quant import RowCodec, Rows
from pallas_kernels.formats.layouts import KeyLayout, RowLayout, quantized
from pallas_kernels.formats.pool_operands import Paged, Rings
from pallas_kernels.indexer_scores.chunks import run_bounds as run_bounds
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


def take(tree, *index):
    """Reads rows of every array of `tree`. Indices out of range read some row: mask the result."""
    return jax.tree.map(lambda pool: pool.at[tuple(jnp.maximum(i, 0) for i in index)].get(mode="clip"), tree)


def put(tree, values, keep: Bool[Array, "..."], *index):
    """Writes `values` where `keep`, in every array of `tree`. Indices outside the pool write nothing."""

    def scatter(pool, value):
        layer, row, *columns = index
        # A negative index would wrap around: send rows that must not be written past the end of the pool.
        row = jnp.where(keep & (row >= 0), row, pool.shape[1])
        return pool.at[(layer, row, *columns)].set(value.astype(pool.dtype), mode="drop")

    return jax.tree.map(scatter, tree, values)


@pytree_dataclass
class SWAView:
    """The sliding-window rings of one layer: row `position % ring` of each slot.

    Attributes:
      rows: Rows [rings, slots, ring, ...].
      layer: index on axis 0.
      window: number of tokens that a query sees, itself included.
      codec: format of a row.
    """

    rows: Rows
    layer: Any
    window: int = static_field()
    codec: RowCodec = static_field()

    @property
    def ring(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[2]

    def for_kernels(self) -> Rings:
        """The view as kernels take it; raises NotImplementedError for formats that they do not take."""
        return Rings(*_layer_and_pools(self), self.window, quantized(self.codec.layout))


def _layer_and_pools(view):
    return jnp.asarray(view.layer, jnp.int32), (view.rows.nope, view.rows.rope, view.rows.scale)


@pytree_dataclass
class _PagedView:
    """Rows of one layer behind the block table.

    Attributes:
      rows: [layers, blocks, entries per block, ...].
      layer: index on axis 0.
      block_table: [slots, max_blocks] int32 block ids; -1 = none.
      compress_rate: number of tokens per entry.
      codec: format of a row.
    """

    rows: Any
    layer: Any
    block_table: Any
    compress_rate: int = static_field()
    codec: Any = static_field()

    @property
    def layout(self) -> RowLayout | KeyLayout | None:
        """The byte layout of a row for kernels; None for formats that kernels do not take."""
        return self.codec.layout

    @property
    def entries_per_block(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[2]

    @property
    def max_entries(self) -> int:
        """The number of entries that a request's row of the block table can address."""
        return self.block_table.shape[1] * self.entries_per_block

    def address(self, slots: Int[Array, "*n"], entries: Int[Array, "*n"]) -> tuple[Array, Array, Array]:
        """Returns (block, row in the block, valid); an entry without a slot or an allocated block is not valid."""
        logical = entries // self.entries_per_block
        in_table = (slots >= 0) & (entries >= 0) & (logical < self.block_table.shape[1])
        block = take(self.block_table, slots, logical)
        valid = in_table & (block >= 0)
        return jnp.where(valid, block, -1), entries % self.entries_per_block, valid

    def read(self, slots: Int[Array, "*n"], entries: Int[Array, "*n"]):
        """Returns (rows, valid) of entries; rows that are not valid hold arbitrary bytes."""
        block, row, valid = self.address(slots, entries)
        return take(self.rows, self.layer, block, row), valid

    def write(
        self, slots: Int[Array, "n"], entries: Int[Array, "n"], keep: Bool[Array, "n"], values: Float[Array, "n D"]
    ) -> Any:
        """Stores dense `values` as entries and returns the updated view. Invalid entries write nothing."""
        block, row, valid = self.address(slots, entries)
        rows = put(self.rows, self.codec.encode(values), keep & valid, self.layer, block, row)
        return dataclasses.replace(self, rows=rows)


@pytree_dataclass
class ClassicalView(_PagedView):
    """Compressed KV entries of one layer: `rows` are Rows, `codec` is a RowCodec."""

    def for_kernels(self, indices: Int[Array, "T K"] | None = None) -> Paged:
        """The view as kernels take it, with the entries of each token; None for all visible ones."""
        layer, pools = _layer_and_pools(self)
        return Paged(layer, self.block_table, pools, indices, self.compress_rate, quantized(self.codec.layout))


@pytree_dataclass
class AttentionKV:
    """The rows that a call attends to. A row is both key and value of all heads.

    Attributes:
      window: the layer's rings.
      compressed: the layer's entries, or None for a layer with a sliding window only.
      indices: [T, K] int32 entries of each token, -1 = none; None for every visible entry.
      new_kv: [T, D] the call's own window rows, if the rings do not hold them yet (prefill).
    """

    window: SWAView
    compressed: ClassicalView | None = None
    indices: Int[Array, "T K"] | None = None
    new_kv: Float[Array, "T D"] | None = None


@pytree_dataclass
class IndexerView(_PagedView):
    """Indexer keys of one layer: `rows` are IndexRows, `codec` is a KeyCodec."""


@pytree_dataclass
class StateView:
    """Compressor state of one layer: the contribution of each recent token to the windows that it belongs to.

    Attributes:
      kv: [layers, slots, ring, width] float32; row `position % ring`.
      gate: [layers, slots, ring, width] float32 pooling logits with the position bias; -inf where never written.
      layer: index on axis 0.
      compress_rate: number of tokens in a window.
      overlap: whether an entry pools its own window and the one before it.
    """

    kv: Any
    gate: Any
    layer: Any
    compress_rate: int = static_field()
    overlap: bool = static_field()

    @property
    def ring(self) -> int:
        return self.kv.shape[2]


def valid_lengths(positions: Int[Array, "*n"], compress_rate: int) -> Int[Array, "*n"]:
    """The number of entries visible at each position: `(position + 1) // rate`, 0 for padding (dsv4.md 5)."""
    return (positions + 1) // compress_rate
