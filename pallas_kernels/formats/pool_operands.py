"""The quantized rows of one layer, as kernels take them: arrays, and within a kernel references to them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.formats.layouts import RowLayout, check_pools, check_row_layout
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@pytree_dataclass
class Rings:
    """Window rows of requests: position p of a request is row `p % ring` of its slot's ring.

    Attributes:
      layer: int32 scalar, index on axis 0 of the pools.
      pools: (nope, rope, scale), [layers, slots, ring, ..] each, see `RowLayout`.
      window: number of rows that a token sees, itself included; at most the ring.
      layout: byte layout of a row of 448 + 64 or as many values, with a scale for 64 values or one for the row.
      own_rows: [T] int32, for attention to more tokens than a ring has room for: row of each token in the ring of slot
        0, behind the rows of its window. None: the row of its position in its own slot's ring.
    """

    layer: Any
    pools: tuple[Any, Any, Any]
    window: int = static_field()
    layout: RowLayout = static_field()
    own_rows: Any = None

    def check(self) -> None:
        """Raises NotImplementedError unless kernels take the pools."""
        _check_pools(self)

    def mutable_pools(self) -> list[jax.Ref]:
        """Copies of the pools [rows, width] for a kernel to write to; XLA drops the copies of donated pools."""
        return [jax.new_ref(pool.reshape(-1, pool.shape[-1])) for pool in self.pools]

    def freeze(self, refs: Sequence[jax.Ref]) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The pools after a kernel wrote to `mutable_pools`."""
        nope, rope, scale = (jax.freeze(ref).reshape(pool.shape) for ref, pool in zip(refs, self.pools, strict=True))
        return nope, rope, scale


@pytree_dataclass
class Paged:
    """Compressed entries of requests, behind a block table.

    Attributes:
      layer: int32 scalar, index on axis 0 of the pools.
      block_table: [slots, max_blocks] int32 block ids; -1 = none.
      pools: (nope [layers, blocks, entries per block, N], rope [.., R], scale), as in `Rings`.
      indices: [T, K] int32 entries of each token; -1 = none. None: all visible entries.
      compress_rate: tokens per entry; entry e is visible from position (e + 1) * rate - 1 on.
      layout: byte layout of a row, as in `Rings`.
    """

    layer: Any
    block_table: Any
    pools: tuple[Any, Any, Any]
    indices: Any
    compress_rate: int = static_field()
    layout: RowLayout = static_field()

    @property
    def count(self) -> int:
        """The maximum number of entries of a token."""
        if self.indices is None:
            return self.block_table.shape[1] * self.pools[0].shape[2]
        return self.indices.shape[1]

    def check(self, tokens: int) -> None:
        """Raises NotImplementedError unless kernels take the arrays."""
        _check_pools(self)
        check_array("block_table", self.block_table, jnp.int32, None, None)
        if self.indices is not None:
            check_array("indices", self.indices, jnp.int32, tokens, None)


def _check_pools(rows):
    layout = rows.layout
    check_rules({f"rows of {ROW_DIM} values, got {layout.nope_dim} + {layout.rope_dim}": layout.dim == ROW_DIM})
    check_row_layout(layout)
    check_pools(layout, rows.pools)
