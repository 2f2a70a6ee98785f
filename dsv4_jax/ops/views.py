"""Typed views: the pools of one layer as the ops see them.

A view holds the stacked arrays of every layer of its kind and the layer's index on axis 0, so that an op reads and
writes one row of the stack and never slices a layer out of it (a slice would be a copy of a pool).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.quant import RowCodec, Rows
from pallas_kernels.formats.layouts import KeyLayout, RowLayout


def _static(**kwargs):
    return dataclasses.field(metadata=dict(static=True), **kwargs)


def take(tree, *index):
    """Rows of every array of `tree` at `index`; out-of-range indices read some row and must be masked by the caller."""
    return jax.tree.map(lambda pool: pool.at[tuple(jnp.maximum(i, 0) for i in index)].get(mode="clip"), tree)


def put(tree, values, keep: Bool[Array, "..."], *index):
    """Writes `values` where `keep`; every other row, and every index outside the pool, writes nothing."""

    def scatter(pool, value):
        layer, first, *rest = index
        # A negative index would wrap around to the end of the pool: send what must not be written past its end.
        first = jnp.where(keep & (first >= 0), first, pool.shape[1])
        return pool.at[(layer, first, *rest)].set(value.astype(pool.dtype), mode="drop")

    return jax.tree.map(scatter, tree, values)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SWAView:
    """The sliding-window rings of one layer: row `position % ring` of each slot.

    Attributes:
      rows: Rows [rings, slots, ring, ...].
      layer: index on axis 0.
      window: tokens a query sees, itself included.
      codec: what the bytes of a row mean.
    """

    rows: Rows
    layer: Any
    window: int = _static()
    codec: RowCodec = _static()

    @property
    def ring(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[2]

    @property
    def layout(self) -> RowLayout | None:
        """What kernels are told of the rows; None where they take none of them."""
        return self.codec.layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _PagedView:
    """Rows of one layer behind the block table.

    Attributes:
      rows: [layers, blocks, entries a block, ...].
      layer: index on axis 0.
      block_table: [slots, max_blocks] int32 block ids; -1 = none.
      compress_rate: tokens an entry stands for.
      codec: what the bytes of a row mean.
    """

    rows: Any
    layer: Any
    block_table: Any
    compress_rate: int = _static()
    codec: Any = _static()

    @property
    def layout(self) -> RowLayout | KeyLayout | None:
        """What kernels are told of the rows; None where they take none of them."""
        return self.codec.layout

    @property
    def entries_per_block(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[2]

    @property
    def max_entries(self) -> int:
        """Entries a request can ever hold: what its row of the block table can address."""
        return self.block_table.shape[1] * self.entries_per_block

    def address(self, slots: Int[Array, "*n"], entries: Int[Array, "*n"]) -> tuple[Array, Array, Array]:
        """(block, row in the block, valid) of each entry; invalid: no slot, no such entry, no block allocated."""
        logical = entries // self.entries_per_block
        in_table = (slots >= 0) & (entries >= 0) & (logical < self.block_table.shape[1])
        block = take(self.block_table, slots, logical)
        valid = in_table & (block >= 0)
        return jnp.where(valid, block, -1), entries % self.entries_per_block, valid

    def read(self, slots: Int[Array, "*n"], entries: Int[Array, "*n"]):
        """(rows, valid) of each entry; rows that are not valid hold arbitrary bytes."""
        block, row, valid = self.address(slots, entries)
        return take(self.rows, self.layer, block, row), valid

    def write(
        self, slots: Int[Array, "n"], entries: Int[Array, "n"], keep: Bool[Array, "n"], values: Float[Array, "n D"]
    ) -> Any:
        """The view after storing dense `values` as entries; -1 and unallocated blocks write nothing."""
        block, row, valid = self.address(slots, entries)
        rows = put(self.rows, self.codec.encode(values), keep & valid, self.layer, block, row)
        return dataclasses.replace(self, rows=rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClassicalView(_PagedView):
    """Compressed KV entries of one layer: `rows` are Rows, `codec` is a RowCodec."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexerView(_PagedView):
    """Indexer keys of one layer: `rows` are IndexRows, `codec` is a KeyCodec."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateView:
    """Compressor state of one layer: what each recent token brings to the windows it belongs to.

    Attributes:
      kv: [layers, slots, ring, width] float32; row `position % ring`.
      gate: the same shape, pooling logits with the position bias added; -inf where never written.
      layer: index on axis 0.
      compress_rate: tokens of a window.
      overlap: an entry pools its own window and the one before it.
    """

    kv: Any
    gate: Any
    layer: Any
    compress_rate: int = _static()
    overlap: bool = _static()

    @property
    def ring(self) -> int:
        return self.kv.shape[2]


def valid_lengths(positions: Int[Array, "*n"], compress_rate: int) -> Int[Array, "*n"]:
    """[n] entries visible to the tokens at positions [n]: `(position + 1) // rate`; 0 for padding (dsv4.md 5)."""
    return (positions + 1) // compress_rate


def run_bounds(slots: Int[Array, "T"]) -> tuple[Int[Array, "T"], Int[Array, "T"]]:
    """First and one-past-last token index of each token's run: the tokens of one request in this call."""
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    changes = slots[1:] != slots[:-1]
    edge = jnp.ones((1,), bool)
    starts = jnp.where(jnp.concatenate([edge, changes]), tokens, 0)
    ends = jnp.where(jnp.concatenate([changes, edge]), tokens + 1, slots.shape[0])
    return jax.lax.cummax(starts), jax.lax.cummin(ends, reverse=True)
