"""How rows and index keys lie in memory: what a kernel must know of a format beside the arrays' shapes."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.runtime.checks import check_array, check_rules


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """A quantised row: E4M3 codes, then RoPE values in bfloat16, each in an array of its own, and scales.

    Attributes:
      nope_dim: values stored as E4M3 codes, uint8.
      rope_dim: values stored in bfloat16, the last ones of the row.
      scale_block: values that share one E8M0 scale, stored as uint8 and zero-padded to a multiple of 8; None: one
        float32 inverse scale for the row.
    """

    nope_dim: int
    rope_dim: int
    scale_block: int | None

    @property
    def dim(self) -> int:
        """Values of a row."""
        return self.nope_dim + self.rope_dim

    @property
    def scale_width(self) -> int:
        """Scales of a row, with the padding."""
        return 1 if self.scale_block is None else -(-self.nope_dim // self.scale_block // 8) * 8


@dataclasses.dataclass(frozen=True)
class KeyLayout:
    """A quantised index key: E2M1 codes, two in a byte, the even value's the low nibble, and scales.

    Attributes:
      dim: values of a key.
      scale_block: values that share a scale.
      scale: "e8m0", a power of two (MXFP4), or "e4m3" under `global_scale` (NVFP4).
      hadamard: whether keys and queries are rotated before they are rounded.
      global_scale: the second-level scale of "e4m3".
    """

    dim: int
    scale_block: int
    scale: str
    hadamard: bool
    global_scale: float = 1.0


def quantised[L: (RowLayout, KeyLayout)](layout: L | None) -> L:
    """The layout; raises NotImplementedError for None, of a format that stores values as they are."""
    if layout is None:
        raise NotImplementedError("the kernel takes quantised formats, not 'plain'")
    return layout


def check_pools(layout: RowLayout | KeyLayout, pools: tuple[jax.Array, ...]) -> None:
    """Raises NotImplementedError unless these are pools [a, b, c, width] of this layout that hold a row.

    Of rows, (nope [.., nope_dim] uint8, rope [.., rope_dim] bfloat16, scale [.., scale_width] uint8 or float32); of
    keys, (codes [.., dim / 2] uint8, scale [.., dim / scale_block] uint8).
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
