"""Typed views of one layer's rows in the KV cache. Ops take and return them.

The arrays of a view have all layers of a kind stacked on axis 0, and the view has the layer's index on this axis. Ops
read and write single rows of the stack, because slicing out the layer would copy a whole pool.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.quant import RowCodec, Rows
from pallas_kernels.formats.layouts import quantized
from pallas_kernels.formats.pool_operands import Paged, Rings
from pallas_kernels.indexer_scores.chunks import run_bounds as run_bounds
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


# Options of a write `x.at[index].set(values, **DROP)`, which writes nothing at indices that are -1 or past the end. By
# default JAX writes to the last row at an index of -1.
DROP: Any = {"mode": "drop", "wrap_negative_indices": False}


def int_range(*bounds: int) -> Int[Array, "n"]:
    """Returns the numbers of `range(*bounds)` as int32, also where JAX's integers have 64 bits."""
    return jnp.arange(*bounds, dtype=jnp.int32)


def tiles(x: Array, size: int, padding: int = 0) -> Array:
    """Divides x [n, ...] into tiles [ceil(n / size), size, ...]; the last one is filled up with the value `padding`."""
    widths = [(0, -x.shape[0] % size)] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, widths, constant_values=padding).reshape(-1, size, *x.shape[1:])


def take(tree, *index):
    """Reads rows of every array in a tree at `index`. Indices out of range are clipped, so mask their rows."""
    return jax.tree.map(lambda pool: pool.at[index].get(mode="clip", wrap_negative_indices=False), tree)


def take_or_none(x: Int[Array, "n"], index: Int[Array, "*k"]) -> Int[Array, "*k"]:
    """Returns the elements of x at `index`; -1 where the index is negative, which stands for none."""
    return jnp.where(index >= 0, take(x, index), -1)


def put(tree, values, keep: Bool[Array, "..."], *index):
    """Writes rows to every array in a tree and returns the new tree.

    Args:
      tree: pools, arrays [layers, slots or blocks, rows, ...].
      values: the rows to write, a tree of the same structure.
      keep: whether to write each row.
      *index: places of the rows on axes 0, 1 and 2. Rows with an index out of range are not written.
    """
    layer, row, *columns = index
    # Negative indices do not count from the end here: rows with such an index are not written.
    index = layer, jnp.where(keep, row, -1), *columns

    def scatter(pool, value):
        """Writes rows to one pool."""
        return pool.at[index].set(value.astype(pool.dtype), mode="drop", wrap_negative_indices=False)

    return jax.tree.map(scatter, tree, values)


def put_in_rings(rings, values, layer, slots: Int[Array, "T"], positions: Int[Array, "T"]):
    """Writes rows of tokens to the rings of their slots, and returns the new tree.

    In a ring of R rows, the token at position p has row `p % R`. If a request has more than R tokens, only its last R
    tokens are written.

    Args:
      rings: tree of arrays [layers, slots, ring, ...].
      values: the rows [T, ...] to write, a tree of the same structure.
      layer: index on axis 0.
      slots, positions: slot and position of each token; -1 = padding, which writes nothing.
    """
    ring = jax.tree.leaves(rings)[0].shape[2]
    _, end = run_bounds(slots)
    keep = (slots >= 0) & (positions >= 0) & (end - int_range(slots.shape[0]) <= ring)
    return put(rings, values, keep, layer, slots, jnp.maximum(positions, 0) % ring)


@pytree_dataclass
class SWAView:
    """The sliding windows of one layer, a ring buffer for each slot: a token's row is `position % ring`.

    Attributes:
      rows: Rows [layers, slots, ring, ...].
      layer: index on axis 0.
      window: number of tokens that a token sees, including itself.
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
        """Returns the operand of kernels. Raises NotImplementedError if kernels do not take the rows' format."""
        return Rings(*_layer_and_pools(self), self.window, quantized(self.codec.layout))


def _layer_and_pools(view):
    return jnp.asarray(view.layer, jnp.int32), (view.rows.nope, view.rows.rope, view.rows.scale)


@pytree_dataclass
class _PagedView:
    """Rows of one layer that are stored in blocks. The block table lists the blocks of each request.

    Attributes:
      rows: Rows or IndexRows [layers, blocks, entries per block, ...].
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
    def entries_per_block(self) -> int:
        return jax.tree.leaves(self.rows)[0].shape[2]

    @property
    def max_entries(self) -> int:
        """The number of entries that a request's row of the block table can address."""
        return self.block_table.shape[1] * self.entries_per_block

    def address(self, slots: Int[Array, "*n"], entries: Int[Array, "*n"]) -> tuple[Array, Array, Array]:
        """Looks up entries in the block table.

        Args:
          slots: slot of each entry; -1 = none.
          entries: index of each entry within its request; -1 = none.

        Returns:
          block: id of each entry's block; -1 for entries that are not valid.
          row: index of each entry in its block.
          valid: bool, whether the slot and the entry are not -1 and the block is allocated.
        """
        logical = entries // self.entries_per_block
        in_table = (slots >= 0) & (entries >= 0) & (logical < self.block_table.shape[1])
        block = take(self.block_table, slots, logical)
        valid = in_table & (block >= 0)
        return jnp.where(valid, block, -1), entries % self.entries_per_block, valid

    def read(self, slots: Int[Array, "*n"], entries: Int[Array, "*n"]):
        """Returns (rows, valid) of entries, see `address`. Rows that are not valid hold arbitrary bytes."""
        block, row, valid = self.address(slots, entries)
        return take(self.rows, self.layer, block, row), valid

    def write(
        self, slots: Int[Array, "n"], entries: Int[Array, "n"], keep: Bool[Array, "n"], values: Float[Array, "n D"]
    ) -> Any:
        """Encodes `values` and stores them as entries where `keep` is True and the address is valid.

        Returns the updated view.
        """
        block, row, valid = self.address(slots, entries)
        rows = put(self.rows, self.codec.encode(values), keep & valid, self.layer, block, row)
        return dataclasses.replace(self, rows=rows)


@pytree_dataclass
class ClassicalView(_PagedView):
    """The compressed KV entries of one layer: `rows` are Rows, and `codec` is a RowCodec."""

    def for_kernels(self, indices: Int[Array, "T K"] | None = None) -> Paged:
        """Returns the operand of kernels that read the entries `indices` of each token; None = all visible entries.

        Raises NotImplementedError if kernels do not take the entries' format.
        """
        layer, pools = _layer_and_pools(self)
        return Paged(layer, self.block_table, pools, indices, self.compress_rate, quantized(self.codec.layout))


@pytree_dataclass
class AttentionKV:
    """The rows that the T tokens of a call attend to. A row is both the key and the value of all heads.

    Attributes:
      window: the sliding windows of the layer.
      compressed: the layer's compressed entries; None for a layer that has a sliding window only.
      indices: [T, K] int32 entries that each token attends to, -1 = none; None = every visible entry.
      new_kv: [T, D] window rows of the call's tokens, if the rings do not hold them yet, as in a prefill; else None.
    """

    window: SWAView
    compressed: ClassicalView | None = None
    indices: Int[Array, "T K"] | None = None
    new_kv: Float[Array, "T D"] | None = None


@pytree_dataclass
class IndexerView(_PagedView):
    """The indexer keys of one layer, one for each entry: `rows` are IndexRows, and `codec` is a KeyCodec."""


@pytree_dataclass
class StateView:
    """The compressor state of one layer: projections of recent tokens, for entries that are not complete yet.

    The state is a ring buffer for each slot: a token's row is `position % ring`.

    Attributes:
      kv: [layers, slots, ring, width] float32 values to pool; None if a window is a single token.
      gate: [layers, slots, ring, width] float32 pooling logits with the position bias; -inf where never written.
      layer: index on axis 0.
      compress_rate: number of tokens in a compression window.
      overlap: whether an entry pools its own window and the preceding one.
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
    """Returns the number of entries that a token at each position sees, `(position + 1) // rate`; 0 for padding."""
    return (positions + 1) // compress_rate
