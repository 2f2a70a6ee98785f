"""Checks of the arguments that the kernels `experts` and `grouped_experts` have in common."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.quantized_weights import BF16, FP4, ROWS, SCALED, WeightLayout
from pallas_kernels.matmul.skinny_mma import COLUMNS
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.layer_operands import check_weight


def check_operands(
    x: jax.Array, selected: jax.Array, weights: jax.Array, gate_up, down, layer: jax.Array | None
) -> tuple[WeightLayout, int, int, list[tuple[Any, Any]]]:
    """Checks the arguments of `experts` and brings the weights into the kernels' shapes.

    Args:
      x, selected, weights, gate_up, down, layer: as in `experts`.

    Returns:
      layout: storage of the weights, FP4 or bfloat16.
      number: number of experts of a layer.
      inner: number of hidden channels, between the two maps of an expert.
      matrices: (codes or weights, scales or None) of gate_up and of down. Codes of gate_up are [layers * 2 * number,
        inner, ..], and codes of down [layers * number, D, ..]. Scales have the same first axis, and are reshaped to
        lines of `WeightLayout.scale_line` bytes: [.., lines, bytes].

    Raises:
      NotImplementedError: a shape or dtype is not one that `experts` documents.
    """
    tokens, depth = x.shape
    check_array("x", x, jnp.bfloat16, None, None)
    check_array("selected", selected, jnp.int32, tokens, None)
    check_array("weights", weights, jnp.float32, *selected.shape)
    layout = FP4 if isinstance(gate_up, tuple) else BF16
    down_codes = down[0] if isinstance(down, tuple) else down
    number, _, columns = down_codes.shape[-3:]
    inner = layout.columns(columns * layout.dtype.itemsize)

    def check_map(name, weight, parts, rows, columns) -> tuple[Any, Any]:
        """Checks a map's weight. Returns (codes, scales), with each expert's rows divided into `parts` matrices."""
        pair: tuple[Any, Any] = weight if isinstance(weight, tuple) else (weight, None)
        codes, scales = pair
        check_weight(name, codes, layer, layout.dtype, number, rows, layout.elements(columns))
        total = parts * math.prod(codes.shape[:-2])
        if layout == FP4:
            check_weight(f"{name}'s scales", scales, layer, jnp.uint8, number, rows, columns // 32)
            scales = scales.reshape(total, -1, layout.scale_line(columns))
        return codes.reshape(total, -1, codes.shape[-1]), scales

    multiple = 512 if layout == FP4 else 256
    rule = f"channels of an expert in multiples of {ROWS}, got {inner}"
    check_rules({f"channels in multiples of {multiple}, got {depth}": depth % multiple == 0})
    check_rules({rule: inner > 0 and inner % ROWS == 0})
    matrices = [check_map("gate_up", gate_up, 2, 2 * inner, depth), check_map("down", down, 1, depth, inner)]
    return layout, number, inner, matrices


def check_shared(
    tokens: int, depth: int, inner: int, layout: WeightLayout, gate_up, down, layer: jax.Array | None, scale_block: int
) -> None:
    """Raises NotImplementedError unless `experts` takes this shared expert.

    Args:
      tokens: number of tokens.
      depth: number of channels of a token.
      inner: number of hidden channels of the routed experts.
      layout: storage of the routed experts' weights.
      gate_up, down: (codes, scales) of the shared expert.
      layer, scale_block: as in `experts`.
    """
    shared = down[0].shape[-1]
    shapes = (2 * shared, depth), (depth, shared)
    for name, (codes, scales), (rows, columns) in zip(("gate_up", "down"), (gate_up, down), shapes, strict=True):
        check_weight(f"the shared {name}", codes, layer, jnp.uint8, rows, columns)
        blocks = rows // scale_block, columns // scale_block
        check_weight(f"the shared {name}'s scales", scales, layer, jnp.uint8, *blocks)
    multiples = (256, 512) if scale_block == SCALED else (ROWS, ROWS)
    check_rules(
        {
            f"a shared expert of up to {COLUMNS} tokens, got {tokens}": tokens <= COLUMNS,
            f"a shared expert beside FP4, got {layout.bits} bits": layout == FP4,
            f"{multiples[0]}, .. channels of the shared expert, got {shared}": shared % multiples[0] == 0,
            f"{multiples[1]}, .. channels of experts beside it, got {inner}": inner % multiples[1] == 0,
        }
    )
