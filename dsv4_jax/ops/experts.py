"""The routed experts of a layer."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.linear import LinearSpec, Matrix, linear, linear_swiglu, same_dtype, swiglu
from dsv4_jax.quant import LayerSlice, QuantizedWeight, layer_stacks, layer_value, round_to
from pallas_kernels.experts import (
    MAX_PAIRS,
    MAX_SHARED_TOKENS,
    experts as experts_kernel,
    grouped_experts,
    sum_of_experts,
)


def experts(
    x: Float[Array, "T D"],
    selected: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E _ D"] | QuantizedWeight | LayerSlice,
    down: Float[Array, "E D I"] | QuantizedWeight | LayerSlice,
    permutation: tuple[Int[Array, "_"], Int[Array, "_"]] | None = None,
    shared: tuple[Matrix, Matrix] | None = None,
    *,
    limit: float,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Returns the sum of `down_e(w * swiglu(gate_up_e(x)))` over each token's experts e, with routing weights w.

    As in the release, the routing weight enters before the last linear map, which decides where bfloat16 rounds. The
    sum over a token's experts runs in routing order, whatever else is in the batch. The gradient is that of "xla".

    Args:
      x: [T, D] activations.
      selected: [T, k] int32 experts; those outside of [0, E), as on another device, add nothing.
      weights: [T, k] float32 routing weights.
      gate_up: [E, 2 * I, D] matrices, the gate's rows first; may be quantized, and a `LayerSlice`.
      down: [E, D, I] matrices; may be quantized, and a `LayerSlice`.
      permutation: `Routing.permutation` of these experts, or None.
      shared: matrices [2 * S, D] and [D, S] of an expert that all tokens have, without a weight; or None.
      limit: clipping limit of SwiGLU.
      implementation: None, "xla", "mosaic_gpu" or "interpret" (x in bfloat16, weights in FP4 or bfloat16).

    Returns:
      [T, D] float32 sum of terms that are rounded to x's dtype. With a shared expert, whose term comes last, the sum
      is rounded to x's dtype, too.
    """
    if shared is not None and not _take_one_launch(x, gate_up, down, *shared):
        arrays = x, selected, weights, gate_up, down, permutation
        routed = experts(*arrays, limit=limit, implementation=implementation)
        return round_to(routed + _shared_expert(limit, x, *shared, implementation=implementation), x.dtype)
    args = x, selected, weights, gate_up, down, permutation, *(shared or ())
    return dispatch("experts", implementation, *args, xla=_experts_xla, kernel=_experts_kernel, limit=limit)


def _experts_kernel(x, selected, weights, gate_up, down, permutation, *shared, limit, interpret):
    number = gate_up.shape[0]
    (gate_up, down, shared), layer = layer_stacks((gate_up, down, shared))
    matrices = _for_kernel(gate_up), _for_kernel(down)
    kernel = functools.partial(grouped_experts, x, selected, weights, *matrices)
    if selected.size <= MAX_PAIRS:
        codes = tuple((weight.codes, weight.scale) for weight in shared) or None
        kernel = functools.partial(experts_kernel, x, selected, weights, *matrices, permutation, codes)
    y = kernel(layer=layer, limit=limit, interpret=interpret)
    return y if shared else sum_of_experts(y, selected, number)


def _for_kernel(weight):
    """Returns (codes, scales) of FP4, or the array itself; the kernel refuses other dtypes than bfloat16."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    if weight.kind != "FP4":
        raise NotImplementedError(f"the kernel takes weights stored as FP4 or in bfloat16, got {weight.kind}")
    return weight.codes, weight.scale


def _take_one_launch(x, *matrices):
    """Returns whether one launch takes the shared expert, the last two matrices: for few tokens, stored as released."""
    kinds = [weight.kind if isinstance(weight, QuantizedWeight) else None for weight in layer_value(matrices)]
    inner = matrices[1].shape[2]
    shared = matrices[3].shape[1]
    few = x.shape[0] <= MAX_SHARED_TOKENS and inner % 512 == 0 and shared % 256 == 0
    return few and kinds == ["FP4", "FP4", "FP8", "FP8"]


@jax.named_scope("shared_expert")
def _shared_expert(limit, x, gate_up, down, *, implementation):
    inner = linear_swiglu(x, gate_up, limit, implementation=implementation)
    (y,) = linear(inner, down, LinearSpec(output_dtype=x.dtype), implementation=implementation)
    return y.astype(jnp.float32)


def _experts_xla(x, selected, weights, gate_up, down, permutation, *shared, limit):
    tokens, k = selected.shape
    number = gate_up.shape[0]
    has_expert = (selected >= 0) & (selected < number)
    by_expert = jnp.where(has_expert, selected, number).reshape(-1)
    if by_expert.size < number:
        # Decoding: fewer pairs than experts. Only the matrices of the selected experts are read and dequantized.
        order = jnp.arange(by_expert.size, dtype=jnp.int32)

        def multiply(x, weight):
            return _paired_linear(x, weight[jnp.minimum(by_expert, number - 1)])

    else:
        # Pairs are sorted by expert: each expert is a group of a ragged matmul.
        order = jnp.argsort(by_expert)
        sizes = jnp.bincount(by_expert, length=number)

        def multiply(x, weight):
            return _ragged_linear(x, weight[...], sizes)

    gate, up = jnp.split(multiply(x[order // k], gate_up), 2, axis=1)
    inner = swiglu(gate, up, limit) * weights.reshape(-1)[order][:, None]
    y = multiply(round_to(inner, x.dtype), down)
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(tokens, k, -1)
    y = sum_of_experts(y, selected, number)
    if not shared:
        return y
    return round_to(y + _shared_expert(limit, x, *shared, implementation="xla"), x.dtype)


def _paired_linear(x, weight):
    """Multiplies each row of x [rows, n] with its own matrix of [rows, m, n]: [rows, m] in x's dtype."""
    y = jnp.einsum("pn,pmn->pm", *same_dtype(x, weight), precision="highest", preferred_element_type=jnp.float32)
    return round_to(y, x.dtype)


def _ragged_linear(x, weight, sizes):
    """Multiplies consecutive groups of rows of x [rows, n] with a matrix each of [groups, m, n]: [rows, m]."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    y = jax.lax.ragged_dot_general(
        *same_dtype(x, weight), sizes, numbers, precision="highest", preferred_element_type=jnp.float32
    )
    return round_to(y, x.dtype)
