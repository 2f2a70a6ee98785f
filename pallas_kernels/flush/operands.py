"""The operands of a flush."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats.exact_math import MAX_SHORT
from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.formats.layouts import KeyLayout, RowLayout, check_pools, check_row_layout
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.layer_operands import check_weight, weights_of_layer
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@pytree_dataclass
class CompressorOperands:
    """The operands of a compressor, or references to them within a kernel; D = 128, 256 or 512, for rows on a GPU 512.

    Attributes:
      kv: [T, width] float32 projections of this call's tokens, width = D, or 2 * D with overlap.
      gate: [T, width] float32 pooling logits, without position bias.
      position_bias: [rate, width] float32, or a stack [layers, rate, width]; a window closes every `rate` tokens.
      norm_weight: [D] float32, or a stack [layers, D].
      inv_freq: [P] float32, radians per token; the last 2 * P channels are rotated.
      block_table: [slots, blocks of a request] int32, -1 = none.
      state_layer: int32 scalar, index on axis 0 of states.
      pool_layer: int32 scalar, index on axis 0 of pools.
      state_kv: [layers, slots, ring, width] float32 values; ring >= rate, or 2 * rate with overlap.
      state_gate: [layers, slots, ring, width] float32 logits with position bias.
      pools: [layers, blocks, entries, ..] each, as the layout describes them: (nope, rope, scale) or (codes, scale).
      layout: format of the rows or indexer keys that entries are stored as.
      eps: epsilon of the RMS norm.
      overlap: whether an entry also pools the `rate` rows before its own.
    """

    kv: Any
    gate: Any
    position_bias: Any
    norm_weight: Any
    inv_freq: Any
    block_table: Any
    state_layer: Any
    pool_layer: Any
    state_kv: Any
    state_gate: Any
    pools: tuple[Any, ...]
    layout: RowLayout | KeyLayout = static_field()
    eps: float = static_field()
    overlap: bool = static_field()

    @property
    def dim(self) -> int:
        return self.norm_weight.shape[-1]

    @property
    def rate(self) -> int:
        return self.position_bias.shape[-2]

    @property
    def rows(self) -> int:
        """The number of rows that an entry pools: a window."""
        return self.rate * (2 if self.overlap else 1)

    @property
    def is_long(self) -> bool:
        """Whether a window is pooled in chunks."""
        return self.rows > MAX_SHORT

    def in_place(self) -> "CompressorOperands":
        """Returns the operands with references to states [layers * slots * ring, width] and pools, to be updated."""
        width = self.state_kv.shape[-1]
        return dataclasses.replace(
            self,
            state_layer=self.state_layer.reshape(1),
            pool_layer=self.pool_layer.reshape(1),
            state_kv=jax.new_ref(self.state_kv.reshape(-1, width)),
            state_gate=jax.new_ref(self.state_gate.reshape(-1, width)),
            pools=tuple(jax.new_ref(pool) for pool in self.pools),
        )

    def of_layer(self, layer_gmem: Any) -> "CompressorOperands":
        """Returns references with those to the weights of one layer, see `weights_of_layer`."""
        weights = self.position_bias, self.norm_weight
        position_bias, norm_weight = weights_of_layer(weights, layer_gmem)
        return dataclasses.replace(self, position_bias=position_bias, norm_weight=norm_weight)

    def check(self, layer: jax.Array | None, interpret: bool) -> None:
        """Raises NotImplementedError naming the rule that a shape, dtype or layout breaks.

        `layer` is the index of position_bias and norm_weight in stacks, or None if they are not stacked. Only the
        interpreter takes rows of fewer than 512 channels: Mosaic GPU does not compile their stores.
        """
        layout = self.layout
        dim = self.dim
        ring = self.state_kv.shape[2]
        width = dim * (2 if self.overlap else 1)
        check_rules(
            {
                f"entries of 128, 256 or 512 channels, got {dim}": dim in (128, 256, 512),
                f"entries of {dim} channels, got a layout of {layout.dim}": layout.dim == dim,
                f"windows of 4, 8, ... or 128 rows, got {self.rows}": self.rows in (4, 8, 16, 32, 64, 128),
                f"overlapping windows of at most {MAX_SHORT} rows, got {self.rows}": not (
                    self.overlap and self.is_long
                ),
                f"states of at least {self.rows} rows, got {ring}": ring >= self.rows,
                f"a block table with columns, got {list(self.block_table.shape)}": self.block_table.shape[1] > 0,
            }
        )
        check_array("kv", self.kv, jnp.float32, None, width)
        check_weight("position_bias", self.position_bias, layer, jnp.float32, None, width)
        check_weight("norm_weight", self.norm_weight, layer, jnp.float32, None)
        check_array("states", self.state_kv, jnp.float32, None, None, None, width)
        if isinstance(layout, RowLayout):
            check_row_layout(layout)
            rows = f"rows of {ROW_DIM} values on a GPU, got {layout.nope_dim} + {layout.rope_dim}"
            check_rules({rows: interpret or dim == ROW_DIM})
        else:
            check_rules({f"a scale for 16 or 32 channels, got {layout.scale_block}": layout.scale_block in (16, 32)})
        check_pools(layout, self.pools)
