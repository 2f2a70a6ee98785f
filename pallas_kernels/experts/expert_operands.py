"""What both kernels of experts take."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.quantized_weights import BF16, FP4, SCALE_BYTES, SCALED, WeightLayout
from pallas_kernels.matmul.skinny_mma import COLUMNS
from pallas_kernels.runtime.checks import check_array, check_rules


class ExpertOperands(NamedTuple):
    """The weights of `number` experts, whose maps have `inner` channels between them.

    Attributes:
      gate_up: weights or codes [2 * number, inner, ..], and scales, or None: [2 * number, .., at least 16].
      down: [number, D, ..] and scales, likewise.
    """

    layout: WeightLayout
    number: int
    inner: int
    gate_up: tuple[Any, Any]
    down: tuple[Any, Any]


def check_operands(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | tuple[jax.Array, jax.Array],
    down: jax.Array | tuple[jax.Array, jax.Array],
) -> ExpertOperands:
    """Refuses arrays of other dtypes and shapes than `experts` documents."""
    tokens, depth = x.shape
    check_array("x", x, jnp.bfloat16, None, None)
    check_array("selected", selected, jnp.int32, tokens, None)
    check_array("weights", weights, jnp.float32, *selected.shape)
    layout = FP4 if isinstance(gate_up, tuple) else BF16
    pairs: list[tuple[Any, Any]] = [w if isinstance(w, tuple) else (w, None) for w in (gate_up, down)]
    number, _, columns = pairs[1][0].shape
    inner, found = layout.columns(columns * layout.dtype.itemsize), []
    for name, (codes, scales), parts, shape in zip(
        ("gate_up", "down"), pairs, (2, 1), ((2 * inner, depth), (depth, inner)), strict=True
    ):
        rows, columns = shape
        check_array(name, codes, layout.dtype, number, rows, layout.elements(columns))
        if layout == FP4:
            check_array(f"{name}'s scales", scales, jnp.uint8, number, rows, columns // 32)
            # Bulk copies take 16 bytes: of two rows where these have fewer.
            scales = scales.reshape(number * parts, -1, max(columns // 32, SCALE_BYTES))
        found.append((codes.reshape(number * parts, -1, codes.shape[-1]), scales))
    whole = 512 if layout == FP4 else 256
    check_rules(
        {
            f"channels in multiples of {whole}, got {depth}": depth % whole == 0,
            f"256 channels of an expert, or multiples of {whole}, got {inner}": inner == 256 or inner % whole == 0,
        }
    )
    return ExpertOperands(layout, number, inner, *found)


def check_shared(
    tokens: int,
    depth: int,
    inner: int,
    layout: WeightLayout,
    gate_up: tuple[jax.Array, jax.Array],
    down: tuple[jax.Array, jax.Array],
) -> None:
    """Refuses an expert that all tokens share of other dtypes and shapes than `experts` documents."""
    shared = down[0].shape[1]
    for name, (codes, scales), (rows, columns) in zip(
        ("gate_up", "down"), (gate_up, down), ((2 * shared, depth), (depth, shared)), strict=True
    ):
        check_array(f"the shared {name}", codes, jnp.uint8, rows, columns)
        check_array(f"the shared {name}'s scales", scales, jnp.uint8, rows // SCALED, columns // SCALED)
    check_rules(
        {
            f"a shared expert of up to {COLUMNS} tokens, got {tokens}": tokens <= COLUMNS,
            f"a shared expert beside FP4, got {layout.bits} bits": layout == FP4,
            f"256, 512, .. channels of the shared expert, got {shared}": shared % 256 == 0,
            # With a tile of fewer than four steps the next product's would not lie in its warpgroups' stages.
            f"512, 1024, .. channels of experts beside it, got {inner}": inner % 512 == 0,
        }
    )
