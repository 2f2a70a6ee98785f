"""The routed experts of a layer."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.linear import LinearSpec, Matrix, linear, linear_swiglu, same_dtype
from dsv4_jax.ops.swiglu import swiglu
from dsv4_jax.quant import QuantizedWeight, round_to
from pallas_kernels.experts import MAX_PAIRS, MAX_SHARED_TOKENS, experts as experts_kernel, grouped_experts


def experts(
    x: Float[Array, "T D"],
    selected: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E _ D"] | QuantizedWeight,
    down: Float[Array, "E D I"] | QuantizedWeight,
    grouped: tuple[Int[Array, "_"], Int[Array, "_"]] | None = None,
    shared: tuple[Matrix, Matrix] | None = None,
    *,
    limit: float,
    implementation: str | None = None,
) -> Float[Array, "T D"]:
    """`sum_j down_j(weights[t, j] * swiglu_j(x[t]))` over the experts j of each token.

    As in the release the routing weight enters before the last linear map, which decides where bfloat16 rounds. The sum
    over a token's experts runs in routing order, whatever else is in the batch. The gradient is that of "xla".

    Args:
      x: [T, D].
      selected: [T, k] int32; those outside of [0, E) add nothing, as of experts that another device has.
      weights: [T, k] float32.
      gate_up: [E, 2 * I, D], the gate's rows first, or these matrices in the release's storage.
      down: [E, D, I], likewise.
      grouped: what `ops.router` returned with `selected`, if its experts are these; or None.
      shared: None, or of an expert that all tokens have, without a weight, [2 * S, D] and [D, S]. In the release's
        storage, as the others, up to 8 tokens pass it in the same launch.
      limit: of SwiGLU.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret". The kernels take x in bfloat16 and
        weights stored as FP4 or in bfloat16: one takes up to 1024 pairs of a token and an expert, another one more.

    Returns:
      [T, D] float32; each linear map is rounded to x's dtype, the sum is not. With a shared expert, whose is the last
      term, the sum is rounded to x's dtype too.
    """
    if shared is not None and not _take_one_launch(x, gate_up, down, *shared):
        options = dict(limit=limit, implementation=implementation)
        routed = experts(x, selected, weights, gate_up, down, grouped, **options)
        return round_to(routed + _shared_expert(limit, x, *shared, implementation=implementation), x.dtype)
    args = x, selected, weights, gate_up, down, grouped, *(shared or ())
    return dispatch("experts", implementation, *args, xla=_experts_xla, kernel=_experts_kernel, limit=limit)


def _experts_kernel(x, selected, weights, gate_up, down, grouped, *shared, limit, interpret):
    matrices = _for_kernel(gate_up), _for_kernel(down)
    options = dict(limit=limit, interpret=interpret)
    if selected.size <= MAX_PAIRS:
        codes = tuple((weight.codes, weight.scale) for weight in shared) or None
        y = experts_kernel(x, selected, weights, *matrices, grouped, codes, **options)
    else:
        y = grouped_experts(x, selected, weights, *matrices, **options)
    return y if shared else _sum_of_experts(y, selected, gate_up.shape[0])


def _for_kernel(weight):
    """Codes and scales, or bfloat16; the kernel refuses arrays of other dtypes."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    if weight.kind != "FP4":
        raise NotImplementedError(f"the kernel takes weights stored as FP4 or in bfloat16, got {weight.kind}")
    return weight.codes, weight.scale


def _sum_of_experts(y, selected, number):
    """[T, k, D] to [T, D] float32, in routing order; as elementwise sums, which XLA fuses with what follows."""
    here = (selected >= 0) & (selected < number)
    y = jnp.where(here[..., None], y.astype(jnp.float32), 0.0)
    return functools.reduce(jnp.add, [y[:, j] for j in range(y.shape[1])])


def _take_one_launch(x, *matrices):
    """Whether a kernel passes tokens through the shared expert, the last two matrices, beside the others."""
    kinds = [weight.kind if isinstance(weight, QuantizedWeight) else None for weight in matrices]
    inner, shared = matrices[1].shape[2], matrices[3].shape[1]
    few = x.shape[0] <= MAX_SHARED_TOKENS and inner % 512 == 0 and shared % 256 == 0
    return few and kinds == ["FP4", "FP4", "FP8", "FP8"]


def _shared_expert(limit, x, gate_up, down, *, implementation):
    """[T, D] float32."""
    inner = linear_swiglu(x, gate_up, limit, implementation=implementation)
    (y,) = linear(inner, down, LinearSpec(output_dtype=x.dtype), implementation=implementation)
    return y.astype(jnp.float32)


def _experts_xla(x, selected, weights, gate_up, down, grouped, *shared, limit):
    y = _routed_xla(limit, x, selected, weights, gate_up, down)
    if not shared:
        return y
    return round_to(y + _shared_expert(limit, x, *shared, implementation="xla"), x.dtype)


def _routed_xla(limit, x, selected, weights, gate_up, down):
    tokens, k = selected.shape
    number = gate_up.shape[0]
    here = (selected >= 0) & (selected < number)
    by_expert = jnp.where(here, selected, number).reshape(-1)
    if by_expert.size < number:
        # Fewer (token, expert) pairs than experts, as in decoding: only the matrices of these experts are read, and
        # dequantised where they are stored so.
        order = jnp.arange(by_expert.size, dtype=jnp.int32)

        def multiply(x, weight):
            return _paired_linear(x, weight[jnp.minimum(by_expert, number - 1)])

    else:
        # Sorted by expert, each expert is one group of a ragged matmul.
        order = jnp.argsort(by_expert)
        sizes = jnp.bincount(by_expert, length=number)

        def multiply(x, weight):
            return _ragged_linear(x, weight[...], sizes)

    gate, up = jnp.split(multiply(x[order // k], gate_up), 2, axis=1)
    inner = swiglu(gate, up, limit) * weights.reshape(-1)[order][:, None]
    y = multiply(round_to(inner, x.dtype), down)
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(tokens, k, -1)
    return _sum_of_experts(y, selected, number)


def _paired_linear(x, weight):
    """[rows, n] x [rows, m, n] -> [rows, m] in x's dtype: a matrix for each row."""
    y = jnp.einsum("pn,pmn->pm", *same_dtype(x, weight), precision="highest", preferred_element_type=jnp.float32)
    return round_to(y, x.dtype)


def _ragged_linear(x, weight, sizes):
    """[rows, n] x [groups, m, n] -> [rows, m] in x's dtype: the rows fall into consecutive groups, one matrix each."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    y = jax.lax.ragged_dot_general(
        *same_dtype(x, weight), sizes, numbers, precision="highest", preferred_element_type=jnp.float32
    )
    return round_to(y, x.dtype)
