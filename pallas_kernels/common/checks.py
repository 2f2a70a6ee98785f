"""Refusing what a kernel does not take, before it is launched."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.layouts import KeyLayout, RowLayout


def check_array(name: str, array: jax.Array | None, dtype, *shape: int | None) -> None:
    """Raises NotImplementedError unless the array has this dtype and shape (None = any length)."""
    if array is not None and array.ndim == len(shape) and array.dtype == dtype:
        if all(want in (None, got) for want, got in zip(shape, array.shape, strict=True)):
            return
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    got = None if array is None else f"{array.dtype}{list(array.shape)}"
    raise NotImplementedError(f"the kernel takes {name} as {jnp.dtype(dtype).name}[{wanted}], got {got}")


def check_rules(rules: dict[str, bool]) -> None:
    """Raises NotImplementedError with the first rule that does not hold: what the kernel takes, and what it got."""
    for rule, holds in rules.items():
        if not holds:
            raise NotImplementedError(f"the kernel takes {rule}")


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
