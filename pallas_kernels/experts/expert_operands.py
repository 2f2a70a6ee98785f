"""Checks of the arguments that the kernels of experts have in common."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.quantized_weights import BF16, FP4, SCALE_BYTES, SCALED, WeightLayout
from pallas_kernels.matmul.skinny_mma import COLUMNS
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.layer_operands import check_weight


def check_operands(
    x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up, down, layer: jax.Array | None
) -> tuple[WeightLayout, int, int, list[tuple[Any, Any]]]:
    """Refuses arrays of other dtypes and shapes than `experts` documents.

    Returns:
      (layout, number of experts of a layer, channels between the two maps, matrices). The matrices are gate_up, codes
      or weights [layers * 2 * number, inner, ..] and scales [layers * 2 * number, .., at least 16] or None, and down,
      [layers * number, D, ..] and scales or None.
    """
    tokens, depth = x.shape
    check_array("x", x, jnp.bfloat16, None, None)
    check_array("selected", selected, jnp.int32, tokens, None)
    check_array("weights", weights, jnp.float32, *selected.shape)
    layout = FP4 if isinstance(gate_up, tuple) else BF16
    pairs: list[tuple[Any, Any]] = [w if isinstance(w, tuple) else (w, None) for w in (gate_up, down)]
    number, _, columns = pairs[1][0].shape[-3:]
    inner = layout.columns(columns * layout.dtype.itemsize)
    matrices = []
    shapes = (2 * inner, depth), (depth, inner)
    for name, (codes, scales), parts, (rows, columns) in zip(("gate_up", "down"), pairs, (2, 1), shapes, strict=True):
        check_weight(name, codes, layer, layout.dtype, number, rows, layout.elements(columns))
        total = parts * math.prod(codes.shape[:-2])
        if layout == FP4:
            check_weight(f"{name}'s scales", scales, layer, jnp.uint8, number, rows, columns // 32)
            # A bulk copy takes at least 16 bytes: two rows of scales if a row has fewer.
            scales = scales.reshape(total, -1, max(columns // 32, SCALE_BYTES))
        matrices.append((codes.reshape(total, -1, codes.shape[-1]), scales))
    multiple = 512 if layout == FP4 else 256
    rule = f"256 channels of an expert, or multiples of {multiple}, got {inner}"
    valid_inner = inner == 256 or inner % multiple == 0
    check_rules({f"channels in multiples of {multiple}, got {depth}": depth % multiple == 0, rule: valid_inner})
    return layout, number, inner, matrices


def check_shared(
    tokens: int, depth: int, inner: int, layout: WeightLayout, gate_up, down, layer: jax.Array | None
) -> None:
    """Refuses a shared expert of other dtypes and shapes than `experts` documents."""
    shared = down[0].shape[-1]
    shapes = (2 * shared, depth), (depth, shared)
    for name, (codes, scales), (rows, columns) in zip(("gate_up", "down"), (gate_up, down), shapes, strict=True):
        check_weight(f"the shared {name}", codes, layer, jnp.uint8, rows, columns)
        check_weight(f"the shared {name}'s scales", scales, layer, jnp.uint8, rows // SCALED, columns // SCALED)
    check_rules(
        {
            f"a shared expert of up to {COLUMNS} tokens, got {tokens}": tokens <= COLUMNS,
            f"a shared expert beside FP4, got {layout.bits} bits": layout == FP4,
            f"256, 512, .. channels of the shared expert, got {shared}": shared % 256 == 0,
            # A warpgroup keeps its stages from product to product only if all tiles have four steps or more.
            f"512, 1024, .. channels of experts beside it, got {inner}": inner % 512 == 0,
        }
    )
