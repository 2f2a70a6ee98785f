"""The routed experts of a mixture-of-experts layer, with the shared expert if one launch can do both."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.common.arguments import check
from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.linear import FLOAT32_SUMS, LinearSpec, Matrix, linear, linear_swiglu, same_dtype, swiglu
from dsv4_jax.ops.views import int_range
from dsv4_jax.quant import LayerSlice, QuantizedWeight, layer_stacks, layer_value, round_to
from pallas_kernels.experts import (
    MAX_PAIRS,
    MAX_SHARED_TOKENS,
    experts as experts_kernel,
    grouped_experts,
    sum_of_experts,
)


# The dimensions of a product of rows [rows, n] and matrices [groups, m, n], where each group of rows has a matrix.
_BY_GROUP = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
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
    total_experts: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """Returns the sum of `down_e(w * swiglu(gate_up_e(x)))` over each token's experts e, with routing weights w.

    The routing weight is applied before the last linear map, where the product is rounded to the dtype of x, as in the
    release. The outputs of a token's experts are added up in the order of `selected`, so that a token's bits do not
    depend on other tokens. Gradients come from "xla".

    Args:
      x: [T, D] activations.
      selected: [T, k] int32 ids of each token's experts. Ids outside of [0, E) add nothing, for instance those of
        experts on other devices.
      weights: [T, k] float32 routing weights.
      gate_up: [E, 2 * I, D] matrices, each with the gate's rows first; an array, a `QuantizedWeight`, or a `LayerSlice`
        of either.
      down: [E, D, I] matrices, of the same types.
      permutation: `Routing.permutation` of these experts, or None.
      shared: (gate and up [2 * S, D], down [D, S]) matrices of the shared expert, which every token passes with weight
        1; None = no shared expert.
      limit: clipping limit of SwiGLU, see `ops.swiglu`.
      total_experts: number of experts on all devices, among which `selected` was chosen; None = E. It tunes the kernel
        for many tokens, and does not change results.
      implementation: None, "xla", "mosaic_gpu" or "interpret". The last two take x in bfloat16, and weights in FP4 or
        bfloat16.

    Returns:
      Without a shared expert, [T, D] float32: the sum of the experts' outputs, each of which is rounded to x's dtype.
      With a shared expert, [T, D] in x's dtype: the shared expert's output is added last, and the sum is rounded.

    Raises:
      ValueError: `selected` and `weights` differ in shape, or have another number of tokens than x.
    """
    check(
        selected.shape == weights.shape and len(selected) == len(x),
        f"selected {selected.shape} and weights {weights.shape} must have a row for each of the {len(x)} tokens of x",
    )
    if shared is not None and not _fit_one_launch(x, gate_up, down, *shared):
        routed = experts(
            x,
            selected,
            weights,
            gate_up,
            down,
            permutation,
            limit=limit,
            total_experts=total_experts,
            implementation=implementation,
        )
        return round_to(routed + _shared_expert(limit, x, *shared, implementation=implementation), x.dtype)
    return dispatch(
        "experts",
        implementation,
        x,
        selected,
        weights,
        gate_up,
        down,
        permutation,
        *(shared or ()),
        xla=_experts_xla,
        kernel=_experts_kernel,
        limit=limit,
        total_experts=total_experts,
    )


def _experts_kernel(x, selected, weights, gate_up, down, permutation, *shared, limit, total_experts, interpret):
    """Computes `experts` with a kernel: one is for up to `MAX_PAIRS` pairs of a token and an expert, one for more."""
    num_experts = gate_up.shape[0]
    (gate_up, down, shared), layer = layer_stacks((gate_up, down, shared))
    matrices = _for_kernel(gate_up), _for_kernel(down)
    kernel = functools.partial(grouped_experts, x, selected, weights, *matrices, total_experts=total_experts)
    if selected.size <= MAX_PAIRS:
        codes = tuple((weight.codes, weight.scale) for weight in shared) or None
        kernel = functools.partial(experts_kernel, x, selected, weights, *matrices, permutation, codes)
        if shared:
            kernel = functools.partial(kernel, scale_block=shared[0].block[0])
    y = kernel(layer=layer, limit=limit, interpret=interpret)
    return y if shared else sum_of_experts(y, selected, num_experts)


def _for_kernel(weight):
    """Returns (codes, scales) of an FP4 weight, or an array as it is. Raises NotImplementedError for an FP8 weight."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    if weight.kind != "FP4":
        raise NotImplementedError(f"the kernel takes weights stored as FP4 or in bfloat16, got {weight.kind}")
    return weight.codes, weight.scale


def _fit_one_launch(x, *matrices):
    """Returns whether one kernel launch can compute routed and shared experts.

    One launch takes up to `MAX_SHARED_TOKENS` tokens, routed experts in FP4, and a shared expert in FP8. The numbers of
    inner channels must be multiples of 512 (routed) and 256 (shared) if FP8 blocks are 128 x 128, or both of 64 if
    they are 32 x 32.

    Args:
      x: [T, D] activations.
      matrices: gate_up and down of the routed experts, then gate_up and down of the shared expert.
    """
    kinds = [getattr(weight, "kind", None) for weight in layer_value(matrices)]
    inner = matrices[1].shape[2]
    shared = matrices[3].shape[1]
    if x.shape[0] > MAX_SHARED_TOKENS or kinds[:2] != ["FP4", "FP4"]:
        return False
    if kinds[2:] == ["FP8_32", "FP8_32"]:
        return inner % 64 == 0 and shared % 64 == 0
    return kinds[2:] == ["FP8", "FP8"] and inner % 512 == 0 and shared % 256 == 0


@jax.named_scope("shared_expert")
def _shared_expert(limit, x, gate_up, down, *, implementation):
    inner = linear_swiglu(x, gate_up, limit, implementation=implementation)
    (y,) = linear(inner, down, LinearSpec(output_dtype=x.dtype), implementation=implementation)
    return y.astype(jnp.float32)


def _experts_xla(x, selected, weights, gate_up, down, permutation, *shared, limit, total_experts):
    """Computes `experts` with XLA."""
    tokens, k = selected.shape
    num_experts = gate_up.shape[0]
    expert_of_pair = jnp.where((selected >= 0) & (selected < num_experts), selected, num_experts).reshape(-1)
    if expert_of_pair.size < num_experts:
        # There are fewer pairs of a token and an expert than experts, as in decoding. Each pair gathers its own matrix,
        # so that only matrices of selected experts are read and dequantized.
        order = int_range(expert_of_pair.size)

        def multiply(x, weight):
            """Multiplies row i of x by the matrix of the i-th pair's expert."""
            weight = weight[jnp.minimum(expert_of_pair, num_experts - 1)]
            return jnp.einsum("pn,pmn->pm", *same_dtype(x, weight), **FLOAT32_SUMS)

    else:
        # Pairs of a token and an expert are sorted by expert, so that each expert is a group of a ragged matmul.
        order = jnp.argsort(expert_of_pair)
        sizes = jnp.bincount(expert_of_pair, length=num_experts)

        def multiply(x, weight):
            """Multiplies the rows of each expert by its matrix."""
            return jax.lax.ragged_dot_general(*same_dtype(x, weight[...]), sizes, _BY_GROUP, **FLOAT32_SUMS)

    # Row i of the arrays below belongs to pair `order[i]`, and so to token `order[i] // k`. The assignment to
    # `at[order]` returns the rows to the order of the pairs.
    gate, up = jnp.split(round_to(multiply(x[order // k], gate_up), x.dtype), 2, axis=1)
    inner = round_to(swiglu(gate, up, limit) * weights.reshape(-1)[order][:, None], x.dtype)
    y = round_to(multiply(inner, down), x.dtype)
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(tokens, k, -1)
    y = sum_of_experts(y, selected, num_experts)
    if not shared:
        return y
    return round_to(y + _shared_expert(limit, x, *shared, implementation="xla"), x.dtype)
