"""Checks of a kernel's arguments before its launch.

The checks raise NotImplementedError. `dsv4_jax.ops` catches this error and computes the reference in XLA instead.
"""

import jax
import jax.numpy as jnp


def check_array(name: str, array: jax.Array | None, dtype, *shape: int | None) -> None:
    """Raises NotImplementedError unless an array is given and has this dtype and shape.

    Args:
      name: name of the array, for the error.
      array: the array; None raises the error.
      dtype: the dtype that the kernel takes.
      shape: the length that the kernel takes for each axis; None for any length.
    """
    if array is not None and array.ndim == len(shape) and array.dtype == dtype:
        if all(want in (None, got) for want, got in zip(shape, array.shape, strict=True)):
            return
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    got = None if array is None else f"{array.dtype}{list(array.shape)}"
    raise NotImplementedError(f"the kernel takes {name} as {jnp.dtype(dtype).name}[{wanted}], got {got}")


def check_tokens(tokens: int, **arrays: jax.Array | None) -> None:
    """Raises NotImplementedError unless every array, passed by its name, is [tokens] int32."""
    for name, array in arrays.items():
        check_array(name, array, jnp.int32, tokens)


def check_rules(rules: dict[str, bool]) -> None:
    """Raises NotImplementedError if a rule does not hold. The error's message states the first such rule.

    Args:
      rules: {text of a rule: whether the rule holds}. The text completes the sentence "the kernel takes ..", such as
        "up to 8 tokens, got 9".
    """
    for rule, holds in rules.items():
        if not holds:
            raise NotImplementedError(f"the kernel takes {rule}")
