"""What both kernels of experts take."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.checks import check_array


def check_operands(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: tuple[jax.Array, jax.Array],
    down: tuple[jax.Array, jax.Array],
) -> tuple[dict[str, bool], int, int]:
    """Refuses arrays of other dtypes and shapes than `experts` documents.

    Returns:
      rules for `check_rules`, the number of experts, and the width between an expert's maps.
    """
    tokens, depth = x.shape
    check_array("x", x, jnp.bfloat16, None, None)
    check_array("selected", selected, jnp.int32, tokens, None)
    check_array("weights", weights, jnp.float32, *selected.shape)
    number, inner = gate_up[0].shape[0], 2 * down[0].shape[-1]
    for name, (codes, scales), rows, columns in (("gate_up", gate_up, 2 * inner, depth), ("down", down, depth, inner)):
        check_array(f"{name}'s codes", codes, jnp.uint8, number, rows, columns // 2)
        check_array(f"{name}'s scales", scales, jnp.uint8, number, rows, columns // 32)
    rules = {f"channels in multiples of 512, got {depth} and {inner}": not (depth % 512 or inner % 512)}
    return rules, number, inner
