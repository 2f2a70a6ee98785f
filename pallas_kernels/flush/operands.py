"""The operands of a flush and its tuning choices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.formats.exact_math import CHUNKS, MAX_SHORT
from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.formats.layouts import RowLayout, check_pools, check_row_layout
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.layer_operands import check_weight, weights_of_layer
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


NO_SLOTS = 2**31 - 1  # value of `num_slots` if there is neither a state nor a block table, so that every slot is valid


@pytree_dataclass
class CompressorOperands:
    """The operands of a compressor, or references to them within a kernel.

    An entry has D = 128, 256 or 512 channels. On a GPU, D is 512 for entries with a `RowLayout`. `pool_windows` does
    not read `inv_freq`, `block_table`, `pool_layer`, `pools` and `layout`. `write_entries` reads only these five
    fields, `kv` and `rate`.

    Attributes:
      kv: [T, width] float32 projections of this call's tokens. The width is D, or 2 * D with overlap: D channels for
        the next entry, then D channels for the token's own entry. For `write_entries`: [n, D] bfloat16 pooled vectors.
      gate: [T, width] float32 pooling logits, without position bias; None if a window is a single token.
      position_bias: [rate, width] float32, or a stack [layers, rate, width]. Row `p % rate` is added to the logits of
        position p. None = no bias.
      norm_weight: [D] float32, weight of the RMS norm, or a stack [layers, D].
      inv_freq: [P] float32, radians per token; the last 2 * P channels are rotated.
      block_table: [slots, max_blocks] int32, ids of each request's blocks of entries; -1 = none.
      state_layer: int32 scalar, index on axis 0 of `state_kv` and `state_gate`.
      pool_layer: int32 scalar, index on axis 0 of `pools`.
      state_kv: [layers, slots, ring, width] float32, `kv` of earlier tokens; position p of a request is row `p % ring`
        of the request's slot. A ring has at least `rate` rows, or `2 * rate` with overlap. None if a window is a single
        token.
      state_gate: [layers, slots, ring, width] float32, `gate` plus position bias of earlier tokens; None if
        `state_kv` is None.
      pools: arrays [layers, blocks, entries per block, ..], as the layout describes them: (nope, rope or None, scale)
        or (codes, scale).
      layout: format in which entries are stored, a `RowLayout` for KV rows or a `KeyLayout` for indexer keys.
      rate: number of tokens after which a window closes.
      eps: epsilon of the RMS norm.
      overlap: whether windows overlap. If they do, a window has `2 * rate` rows, and its first `rate` rows are also the
        last `rate` rows of the preceding window.
      num_slots: number of request slots.
      ring: number of rows in a ring. `in_place` sets `num_slots` and `ring`, because it merges their axes.
    """

    kv: Any
    gate: Any = None
    position_bias: Any = None
    norm_weight: Any = None
    inv_freq: Any = None
    block_table: Any = None
    state_layer: Any = None
    pool_layer: Any = None
    state_kv: Any = None
    state_gate: Any = None
    pools: tuple[Any, ...] = ()
    layout: Any = static_field(default=None)
    rate: int = static_field(default=1)
    eps: float = static_field(default=0.0)
    overlap: bool = static_field(default=False)
    num_slots: int = static_field(default=NO_SLOTS)
    ring: int = static_field(default=0)

    @property
    def dim(self) -> int:
        return self.kv.shape[-1] // (2 if self.overlap else 1)

    @property
    def rows(self) -> int:
        """The number of rows in a window, which an entry pools: `rate`, or `2 * rate` with overlap."""
        return self.rate * (2 if self.overlap else 1)

    @property
    def is_long(self) -> bool:
        """Whether a window has more than `MAX_SHORT` rows and is pooled in chunks."""
        return self.rows > MAX_SHORT

    def in_place(self) -> "CompressorOperands":
        """Returns the operands with references to copies of states and pools, which a kernel updates.

        The states become [layers * slots * ring, width], and the layer indices [1] int32. XLA leaves out the copy of a
        donated array.
        """
        num_slots = NO_SLOTS if self.block_table is None else self.block_table.shape[0]
        ring = 0
        if self.state_kv is not None:
            _, num_slots, ring, _ = self.state_kv.shape
        layers = self.state_layer, self.pool_layer
        state_layer, pool_layer = jax.tree.map(lambda layer: layer.reshape(1), layers)
        states = self.state_kv, self.state_gate
        state_kv, state_gate = jax.tree.map(lambda state: jax.new_ref(state.reshape(-1, state.shape[-1])), states)
        return dataclasses.replace(
            self,
            state_layer=state_layer,
            pool_layer=pool_layer,
            state_kv=state_kv,
            state_gate=state_gate,
            pools=jax.tree.map(jax.new_ref, self.pools),
            num_slots=num_slots,
            ring=ring,
        )

    def freeze(self, refs: "CompressorOperands") -> tuple[Any, Any, tuple[Any, ...]]:
        """Returns (state_kv, state_gate, pools) with the contents of `refs`, the result of `in_place`."""
        arrays = self.state_kv, self.state_gate, self.pools
        written = refs.state_kv, refs.state_gate, refs.pools
        return jax.tree.map(lambda array, ref: jax.freeze(ref).reshape(array.shape), arrays, written)

    def of_layer(self, layer_gmem: Any) -> "CompressorOperands":
        """Returns the references with `position_bias` and `norm_weight` of one layer, see `weights_of_layer`."""
        position_bias, norm_weight = weights_of_layer((self.position_bias, self.norm_weight), layer_gmem)
        return dataclasses.replace(self, position_bias=position_bias, norm_weight=norm_weight)

    def check_windows(self, layer: jax.Array | None) -> None:
        """Raises NotImplementedError if kernels cannot pool windows from operands of these shapes and dtypes.

        Args:
          layer: index of this layer if `position_bias` and `norm_weight` are stacks; None if they are not.
        """
        dim = self.dim
        width = self.kv.shape[-1]
        sizes = (1, 2, 4, 8, 16, 32, 64, 128)
        check_rules(
            {
                f"entries of 128, 256 or 512 channels, got {dim}": dim in (128, 256, 512),
                f"windows of 1, 2, 4, ... or 128 rows, got {self.rows}": self.rows in sizes,
                f"overlapping windows of at most {MAX_SHORT} rows, got {self.rows}": not (
                    self.overlap and self.is_long
                ),
            }
        )
        check_array("kv", self.kv, jnp.float32, None, width)
        check_weight("norm_weight", self.norm_weight, layer, jnp.float32, dim)
        if self.rows == 1:
            return
        check_array("gate", self.gate, jnp.float32, *self.kv.shape)
        if self.position_bias is not None:
            check_weight("position_bias", self.position_bias, layer, jnp.float32, self.rate, width)
        check_array("states", self.state_kv, jnp.float32, None, None, None, width)
        check_array("state gates", self.state_gate, jnp.float32, *self.state_kv.shape)
        ring = self.state_kv.shape[2]
        check_rules({f"states of at least {self.rows} rows, got {ring}": ring >= self.rows})

    def check_entries(self, interpret: bool) -> None:
        """Raises NotImplementedError if a shape, a dtype or the layout of entries is not supported.

        With a `RowLayout`, only the interpreter takes entries of fewer than 512 channels, because Mosaic GPU does not
        compile their stores.
        """
        layout = self.layout
        dim = self.dim
        check_array("block_table", self.block_table, jnp.int32, None, None)
        check_rules(
            {
                f"entries of {dim} channels, got a layout of {layout.dim}": layout.dim == dim,
                f"a block table with columns, got {list(self.block_table.shape)}": self.block_table.shape[1] > 0,
            }
        )
        if isinstance(layout, RowLayout):
            check_row_layout(layout)
            rows = f"rows of {ROW_DIM} values on a GPU, got {layout.nope_dim} + {layout.rope_dim}"
            check_rules({rows: interpret or dim == ROW_DIM})
        else:
            check_rules({f"a scale for 16 or 32 channels, got {layout.scale_block}": layout.scale_block in (16, 32)})
        check_pools(layout, self.pools)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning choices of the flush kernels.

    Raises:
      ValueError: a number of blocks in `cluster_sizes` does not divide the chunks of a long window.
    """

    # Pairs (n, number of blocks that share a window if at most n long windows can close in the call), with n ascending.
    # The first pair that applies is used. If more windows can close, blocks do not share windows.
    cluster_sizes: tuple[tuple[int, int], ...] = ((14, 8), (30, 4), (130, 2))
    long_blocks: int = MULTIPROCESSORS  # maximum number of blocks for long windows: all run at once, one per SM
    # Maximum number of warpgroups for short windows: a little less than the number that runs at once, and odd, see
    # `short_windows._workers`.
    short_workers: int = 513
    state_workers: int = 8 * MULTIPROCESSORS  # maximum number of warpgroups for state rows; this many run at once

    def __post_init__(self):
        for i, (_, blocks) in enumerate(self.cluster_sizes):
            if blocks < 1 or CHUNKS % blocks:
                raise ValueError(f"cluster_sizes[{i}][1]={blocks} must divide {CHUNKS}, the chunks of a long window")


@dataclasses.dataclass(frozen=True)
class FlushCall:
    """The arguments of `flush`, `pool_windows` or `write_entries`, in the form that the kernel launches take."""

    compressors: list[CompressorOperands]  # results of `CompressorOperands.in_place`
    slots: jax.Array  # [T] int32, each token's request slot; -1 = padding
    positions: jax.Array  # [T] int32, each token's position; for `write_entries`, each entry's index
    layer: jax.Array | None  # [1] int32 index of the layer, from `layer_operand`
    max_tokens: int  # maximum number of tokens of a slot in the call
    config: Config
    interpret: bool
    results: jax.ShapeDtypeStruct | None = None  # [n, D] bfloat16, pooled vectors to return; None to store entries
    # [T] int32, the row of the results for the window that token t closes. If None, this is row t.
    result_rows: jax.Array | None = None

    @property
    def with_states(self) -> bool:
        """Whether the launch that stores entries also stores the state rows.

        This requires that there are states, and that no token of the call overwrites a row of a ring that the launch
        reads.
        """
        return all(c.state_kv is not None and self.max_tokens <= c.ring - c.rows + 1 for c in self.compressors)
