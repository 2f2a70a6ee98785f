"""Descriptions of how quantized KV rows and indexer keys are stored in memory."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.runtime.checks import check_array, check_rules


GROUP = 64  # number of channels of a row that kernels copy and scale together


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """The layout of a quantized KV row: codes, then RoPE values in bfloat16, and scales of the codes."""

    nope_dim: int  # number of values stored as codes
    rope_dim: int  # number of values stored in bfloat16, the last ones of the row; 0 = there is no pool of them
    # Number of codes that share a scale, a uint8. None: a row has one float32 by which its codes are multiplied.
    scale_block: int | None
    # "e4m3": a code is a uint8, with E8M0 scales that are padded with zeros to a multiple of 8. "e2m1": a uint8 has the
    # codes of two dims, the even dim in the lower 4 bits, with E4M3 scales.
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
        """The number of bytes of a row in each array."""
        return [width * jnp.dtype(dtype).itemsize for _, dtype, width in self.columns]

    @property
    def columns(self) -> list[tuple[str, DTypeLike, int]]:
        """(name, dtype, number of elements per row) of each array."""
        scale = jnp.float32 if self.scale_block is None else jnp.uint8
        code_width = self.nope_dim // (1 if self.codes == "e4m3" else 2)
        widths = code_width, self.rope_dim, self.scale_width
        return list(zip(("nope", "rope", "scale"), (jnp.uint8, jnp.bfloat16, scale), widths, strict=True))


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """The layout of a quantized indexer key: E2M1 codes and their scales.

    A byte has the codes of two dims, with the even dim in the lower 4 bits.
    """

    dim: int  # number of dims of a key
    scale_block: int  # number of dims that share a scale
    scale: str  # dtype of scales: "e8m0", a power of two (MXFP4), or "e4m3", multiplied by `global_scale` (NVFP4)
    hadamard: bool  # whether keys and queries are multiplied by a Hadamard matrix before they are quantized
    global_scale: float = 1.0  # factor of all "e4m3" scales

    @property
    def columns(self) -> list[tuple[str, DTypeLike, int]]:
        """(name, dtype, number of elements per key) of each array."""
        return [("codes", jnp.uint8, self.dim // 2), ("scale", jnp.uint8, self.dim // self.scale_block)]


def quantized[L: (RowLayout, KeyLayout)](layout: L | None) -> L:
    """Returns the layout. Raises NotImplementedError for None, which stands for a format that no kernel takes."""
    if layout is None:
        raise NotImplementedError("the kernel takes rows and keys of the formats 'v4', 'v41' and 'per_entry'")
    return layout


def check_row_layout(layout: RowLayout) -> None:
    """Raises NotImplementedError unless codes come in groups of 64, with scales of a size that kernels take."""
    blocks = {"e4m3": (None, GROUP, 32), "e2m1": (16,)}[layout.codes]
    check_rules(
        {
            f"a multiple of {GROUP} channels without RoPE, got {layout.nope_dim}": layout.nope_dim % GROUP == 0,
            f"scale blocks of {GROUP}, 32 or a row, got {layout.scale_block}": layout.scale_block in blocks,
        }
    )


def check_pools(layout: RowLayout | KeyLayout, pools: tuple[Any, ...]) -> None:
    """Raises NotImplementedError unless the pools have this layout and are not empty.

    Pools are arrays [layers, blocks or slots, rows, width] with the same first three axes; None for a width of 0.
    """
    for (name, dtype, width), pool in zip(layout.columns, pools, strict=True):
        if width:
            check_array(name, pool, dtype, *pools[0].shape[:3], width)
    check_rules({f"pools that hold a row, got {list(pools[0].shape)}": pools[0].size > 0})
