"""The keys that queries are scored with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats.layouts import KeyLayout, check_pools
from pallas_kernels.indexer_scores.key_tiles import WARP_KEYS, check_layout
from pallas_kernels.runtime.checks import check_array, check_rules


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IndexerKeys:
    """The paged indexer keys of a layer, or references to them within a kernel.

    Attributes:
      layer: int32 scalar, index on axis 0 of the pools.
      block_table: [slots, max_blocks] int32 block ids; -1 = none.
      codes: [layers, blocks, keys per block, 64] uint8, pairs of E2M1 codes; a multiple of 16 keys per block.
      scales: [layers, blocks, keys per block, 4 or 8] uint8, as the layout says.
      compress_rate: number of tokens per key; token t sees the first `(positions[t] + 1) // compress_rate` keys.
      layout: format of the keys, either MXFP4 (E8M0 scales of 32 dims) or NVFP4 (E4M3 scales of 16 dims).
    """

    layer: Any
    block_table: Any
    codes: Any
    scales: Any
    compress_rate: int = dataclasses.field(metadata=dict(static=True))
    layout: KeyLayout = dataclasses.field(metadata=dict(static=True))

    @property
    def is_mxfp4(self) -> bool:
        return self.layout.scale == "e8m0"

    @property
    def per_block(self) -> int:
        """The number of keys in a block."""
        return self.codes.shape[2]

    @property
    def max_keys(self) -> int:
        """The number of keys that a row of the block table can hold."""
        return self.block_table.shape[1] * self.per_block

    def check(self) -> None:
        """Raises NotImplementedError naming the rule that a shape, dtype or layout breaks."""
        check_layout(self.layout)
        check_array("block_table", self.block_table, jnp.int32, None, None)
        check_pools(self.layout, (self.codes, self.scales))
        per_block = self.per_block
        check_rules({f"blocks of a multiple of {WARP_KEYS} keys, got {per_block}": per_block % WARP_KEYS == 0})
