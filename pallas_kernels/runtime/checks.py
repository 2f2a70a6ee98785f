"""Checks of a kernel's arguments before its launch.

They raise NotImplementedError, with which `dsv4_jax.ops` falls back to the reference.
"""

import jax
import jax.numpy as jnp


def check_array(name: str, array: jax.Array | None, dtype, *shape: int | None) -> None:
    """Raises NotImplementedError unless the array has this dtype and shape (None = any length)."""
    if array is not None and array.ndim == len(shape) and array.dtype == dtype:
        if all(want in (None, got) for want, got in zip(shape, array.shape, strict=True)):
            return
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    got = None if array is None else f"{array.dtype}{list(array.shape)}"
    raise NotImplementedError(f"the kernel takes {name} as {jnp.dtype(dtype).name}[{wanted}], got {got}")


def check_tokens(tokens: int, **arrays: jax.Array | None) -> None:
    """Raises NotImplementedError unless every array holds an int32 for each token; they are passed by name."""
    for name, array in arrays.items():
        check_array(name, array, jnp.int32, tokens)


def check_rules(rules: dict[str, bool]) -> None:
    """Raises NotImplementedError with the first rule that does not hold.

    Args:
      rules: "what the kernel takes, got what it got" -> whether it holds.
    """
    for rule, holds in rules.items():
        if not holds:
            raise NotImplementedError(f"the kernel takes {rule}")
