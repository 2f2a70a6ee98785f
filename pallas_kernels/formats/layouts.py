"""Layouts of rows and index keys in memory, from which kernels learn a format."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.runtime.checks import check_array, check_rules


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """A quantized row: arrays of E4M3 codes, of RoPE values in bfloat16, and of scales.

    Attributes:
      nope_dim: number of values stored as E4M3 codes, uint8.
      rope_dim: number of values stored in bfloat16, the last ones of the row.
      scale_block: number of values that share an E8M0 scale; the scales are uint8, zero-padded to a multiple of 8. None
        means one float32 inverse scale for the row.
    """

    nope_dim: int
    rope_dim: int
    scale_block: int | None

    @property
    def dim(self) -> int:
        """The number of values in a row."""
        return self.nope_dim + self.rope_dim

    @property
    def scale_width(self) -> int:
        """The number of scales in a row, padding included."""
        return 1 if self.scale_block is None else -(-self.nope_dim // self.scale_block // 8) * 8


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """A quantized index key: E2M1 codes, two in a byte with the even value in the low nibble, and scales.

    Attributes:
      dim: number of values in a key.
      scale_block: number of values that share a scale.
      scale: "e8m0", a power of two (MXFP4), or "e4m3" times `global_scale` (NVFP4).
      hadamard: whether keys and queries are rotated before they are rounded.
      global_scale: second-level scale of "e4m3".
    """

    dim: int
    scale_block: int
    scale: str
    hadamard: bool
    global_scale: float = 1.0


def quantized[L: (RowLayout, KeyLayout)](layout: L | None) -> L:
    """Returns the layout; raises NotImplementedError for None, which stands for an unquantized format."""
    if layout is None:
        raise NotImplementedError("the kernel takes quantized formats, not 'plain'")
    return layout


def check_pools(layout: RowLayout | KeyLayout, pools: tuple[jax.Array, ...]) -> None:
    """Raises NotImplementedError unless the pools [a, b, c, width] have this layout and are not empty.

    Args:
      layout: the layout of rows or keys.
      pools: for rows, nope [.., nope_dim] uint8, rope [.., rope_dim] bfloat16 and scale [.., scale_width] uint8 or
        float32; for keys, codes [.., dim / 2] uint8 and scale [.., dim / scale_block] uint8.
    """
    if isinstance(layout, RowLayout):
        scale = jnp.float32 if layout.scale_block is None else jnp.uint8
        widths = {"nope": layout.nope_dim, "rope": layout.rope_dim, "scale": layout.scale_width}
        dtypes = jnp.uint8, jnp.bfloat16, scale
    else:
        widths, dtypes = {"codes": layout.dim // 2, "scale": layout.dim // layout.scale_block}, (jnp.uint8, jnp.uint8)
    for (name, width), dtype, pool in zip(widths.items(), dtypes, pools, strict=True):
        check_array(name, pool, dtype, *pools[0].shape[:3], width)
    check_rules({f"pools that hold a row, got {list(pools[0].shape)}": pools[0].size > 0})
