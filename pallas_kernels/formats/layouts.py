"""Layouts of rows and index keys in memory, from which kernels learn a format."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.runtime.checks import check_array, check_rules


GROUP = 64  # channels that kernels move and scale together


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """A quantized row: arrays of E4M3 codes, of RoPE values in bfloat16, and of scales."""

    nope_dim: int  # number of values stored as E4M3 codes, uint8
    rope_dim: int  # number of values stored in bfloat16, the last ones of the row
    # Number of values that share an E8M0 scale, uint8, zero-padded to a multiple of 8 scales. None: one float32
    # inverse scale for the row.
    scale_block: int | None

    @property
    def dim(self) -> int:
        """The number of values in a row."""
        return self.nope_dim + self.rope_dim

    @property
    def scale_width(self) -> int:
        """The number of scales in a row, padding included."""
        return 1 if self.scale_block is None else -(-self.nope_dim // self.scale_block // 8) * 8

    @property
    def columns(self) -> list[tuple[str, DTypeLike, int]]:
        """The name, dtype and width of each array."""
        scale = jnp.float32 if self.scale_block is None else jnp.uint8
        widths = self.nope_dim, self.rope_dim, self.scale_width
        return list(zip(("nope", "rope", "scale"), (jnp.uint8, jnp.bfloat16, scale), widths, strict=True))


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """A quantized index key: E2M1 codes, two in a byte with the even value in the low nibble, and scales."""

    dim: int  # number of values in a key
    scale_block: int  # number of values that share a scale
    scale: str  # "e8m0", a power of two (MXFP4), or "e4m3" times `global_scale` (NVFP4)
    hadamard: bool  # whether keys and queries are rotated before they are rounded
    global_scale: float = 1.0  # second-level scale of "e4m3"

    @property
    def columns(self) -> list[tuple[str, DTypeLike, int]]:
        """The name, dtype and width of each array."""
        return [("codes", jnp.uint8, self.dim // 2), ("scale", jnp.uint8, self.dim // self.scale_block)]


def quantized[L: (RowLayout, KeyLayout)](layout: L | None) -> L:
    """Returns the layout; raises NotImplementedError for None, which stands for an unquantized format."""
    if layout is None:
        raise NotImplementedError("the kernel takes quantized formats, not 'plain'")
    return layout


def check_row_layout(layout: RowLayout) -> None:
    """Raises NotImplementedError unless the kernels take rows of this layout."""
    check_rules(
        {
            f"a multiple of {GROUP} channels without RoPE, got {layout.nope_dim}": layout.nope_dim % GROUP == 0,
            f"scale blocks of {GROUP} or a row, got {layout.scale_block}": layout.scale_block in (None, GROUP),
        }
    )


def check_pools(layout: RowLayout | KeyLayout, pools: tuple[jax.Array, ...]) -> None:
    """Raises NotImplementedError unless the pools [a, b, c, width] have this layout and are not empty."""
    for (name, dtype, width), pool in zip(layout.columns, pools, strict=True):
        check_array(name, pool, dtype, *pools[0].shape[:3], width)
    check_rules({f"pools that hold a row, got {list(pools[0].shape)}": pools[0].size > 0})
