"""Descriptions of how quantized KV rows and indexer keys are stored in memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.runtime.checks import check_array, check_rules


GROUP = 64  # number of values in a group; the codes of a row are a whole number of groups


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The layout of a quantized KV row: codes of its first values, its last (RoPE) values in bfloat16, and scales.

    Codes, RoPE values and scales are in three arrays, the pools.
    """

    nope_dim: int  # number of values stored as codes
    rope_dim: int  # number of values stored in bfloat16; 0 = the layout has no pool of RoPE values
    # Number of codes that share a scale of one byte. If None, a row has a single float32 scale. A value is its code
    # times its scale.
    scale_block: int | None
    # Format of the codes. "e4m3": a uint8 is one code. Scales of one byte are E8M0, padded with zeros to a multiple of
    # 8 scales. "e2m1": a uint8 holds two codes, the code of the even channel in its lower 4 bits. Scales are E4M3.
    codes: str = "e4m3"

    @property
    def dim(self) -> int:
        """The number of values in a row."""
        return self.nope_dim + self.rope_dim

    @property
    def scale_width(self) -> int:
        """The number of scales of a row, including padding."""
        if self.scale_block is None:
            return 1
        scales = self.nope_dim // self.scale_block
        return -(-scales // 8) * 8 if self.codes == "e4m3" else scales

    @property
    def row_bytes(self) -> list[int]:
        """The number of bytes of a row in each pool, in the order of `columns`."""
        return [width * jnp.dtype(dtype).itemsize for _, dtype, width in self.columns]

    @property
    def columns(self) -> list[tuple[str, DTypeLike, int]]:
        """The pools, as tuples (name, dtype, number of elements per row)."""
        scale = jnp.float32 if self.scale_block is None else jnp.uint8
        code_width = self.nope_dim // (1 if self.codes == "e4m3" else 2)
        rope = "rope", jnp.bfloat16, self.rope_dim
        return [("nope", jnp.uint8, code_width), rope, ("scale", scale, self.scale_width)]


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """The layout of a quantized indexer key: E2M1 codes and their scales, in two arrays, the pools.

    A byte holds two codes, with the code of the even channel in the lower 4 bits.
    """

    dim: int  # number of channels of a key
    scale_block: int  # number of channels that share a scale
    scale: str  # format of scales: "e8m0", a power of two (MXFP4), or "e4m3", multiplied by `global_scale` (NVFP4)
    hadamard: bool  # whether keys and queries are multiplied by a Hadamard matrix before they are quantized
    global_scale: float = 1.0  # factor of all "e4m3" scales

    @property
    def columns(self) -> list[tuple[str, DTypeLike, int]]:
        """The pools, as tuples (name, dtype, number of elements per key)."""
        return [("codes", jnp.uint8, self.dim // 2), ("scale", jnp.uint8, self.dim // self.scale_block)]


def quantized[L: (RowLayout, KeyLayout)](layout: L | None) -> L:
    """Returns the layout. Raises NotImplementedError for None, the `layout` of codecs whose rows no kernel takes."""
    if layout is None:
        raise NotImplementedError("the kernel takes rows and keys of the formats 'v4', 'v41' and 'per_entry'")
    return layout


def check_row_layout(layout: RowLayout) -> None:
    """Raises NotImplementedError unless a row has a multiple of 64 codes and kernels take its `scale_block`."""
    blocks = {"e4m3": (None, GROUP, 32), "e2m1": (16,)}[layout.codes]
    check_rules(
        {
            f"a multiple of {GROUP} channels without RoPE, got {layout.nope_dim}": layout.nope_dim % GROUP == 0,
            f"a scale block in {blocks}, got {layout.scale_block}": layout.scale_block in blocks,
        }
    )


def check_pools(layout: RowLayout | KeyLayout, pools: tuple[Any, ...]) -> None:
    """Raises NotImplementedError unless the pools have this layout and are not empty.

    Pools are arrays [layers, blocks or slots, rows, width], in the order of `layout.columns`. They differ only in their
    widths and dtypes. A pool with a width of 0 is None.
    """
    for (name, dtype, width), pool in zip(layout.columns, pools, strict=True):
        if width:
            check_array(name, pool, dtype, *pools[0].shape[:3], width)
    check_rules({f"pools that hold a row, got {list(pools[0].shape)}": pools[0].size > 0})
