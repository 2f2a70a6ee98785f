"""The quantized KV rows of a layer as operands of kernels: window rows in rings, and compressed entries in blocks.

A pool is an array that holds one part of all rows, such as their codes. The fields of the dataclasses are arrays, or
within a kernel references to arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.formats.layouts import RowLayout, check_pools, check_row_layout
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@pytree_dataclass
class Rings:
    """Window rows of requests. Every slot has a ring of n rows, in which row `p % n` holds position p of the request.

    Attributes:
      layer: int32 scalar, index on axis 0 of the pools.
      pools: (nope, rope, scale), each [layers, slots, ring, ..]: codes, RoPE values and scales, see `RowLayout`. The
        pool of RoPE values is None if the layout has no RoPE values.
      window: number of rows that a token sees, including the token's row; at most the number of rows in a ring.
      layout: layout of a row of 512 values, such as 448 codes and 64 RoPE values.
      own_rows: None, or [T] int32, index in the ring of each token's own row. If None, the index follows from the
        token's position. If given, the pools have a single slot, whose ring holds the window rows of all tokens of the
        call, and the window of token t ends with row `own_rows[t]`. Only `sparse_attention` reads `own_rows`. It serves
        for calls whose window rows are not in the cache's rings yet, such as a prefill.
    """

    layer: Any
    pools: tuple[Any, Any, Any]
    window: int = static_field()
    layout: RowLayout = static_field()
    own_rows: Any = None

    def check(self) -> None:
        """Raises NotImplementedError if kernels do not take the layout, or if the pools do not have this layout."""
        check_rules({f"window rows of E4M3 codes, got {self.layout.codes!r}": self.layout.codes == "e4m3"})
        _check_pools(self)

    def mutable_pools(self) -> tuple[Any, Any, Any]:
        """Returns references to copies of the pools, [rows, width] each, to which a kernel can write.

        XLA leaves out the copy of a donated pool.
        """
        return jax.tree.map(lambda pool: jax.new_ref(pool.reshape(-1, pool.shape[-1])), self.pools)

    def freeze(self, refs: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Returns the pools with the contents of `refs`, which `mutable_pools` made and a kernel has written to."""
        return jax.tree.map(lambda pool, ref: jax.freeze(ref).reshape(pool.shape), self.pools, refs)


@pytree_dataclass
class Paged:
    """Compressed entries of requests, in blocks that are found through a block table.

    Attributes:
      layer: int32 scalar, index on axis 0 of the pools.
      block_table: [slots, max_blocks] int32, ids of each request's blocks; -1 = none.
      pools: (nope, rope, scale), each [layers, blocks, entries per block, ..], as in `Rings`.
      indices: [T, K] int32, indices of the entries that each token sees, among the entries of the token's request;
        -1 = none. If None, a token sees all visible entries.
      compress_rate: number of tokens per entry; entry e is visible from position `(e + 1) * compress_rate - 1` on.
      layout: layout of a row, as in `Rings`.
    """

    layer: Any
    block_table: Any
    pools: tuple[Any, Any, Any]
    indices: Any
    compress_rate: int = static_field()
    layout: RowLayout = static_field()

    @property
    def count(self) -> int:
        """The maximum number of entries that a token sees."""
        if self.indices is None:
            return self.block_table.shape[1] * self.pools[0].shape[2]
        return self.indices.shape[1]

    def check(self, tokens: int) -> None:
        """Raises NotImplementedError if kernels do not take the pools, the block table or the indices.

        Args:
          tokens: number of tokens of the call, which is also the number of rows of `indices`.
        """
        _check_pools(self)
        check_array("block_table", self.block_table, jnp.int32, None, None)
        if self.indices is not None:
            check_array("indices", self.indices, jnp.int32, tokens, None)


def _check_pools(rows):
    layout = rows.layout
    check_rules({f"rows of {ROW_DIM} values, got {layout.nope_dim} + {layout.rope_dim}": layout.dim == ROW_DIM})
    check_row_layout(layout)
    check_pools(layout, rows.pools)
