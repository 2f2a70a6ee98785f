"""The routed experts of a layer."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import run, with_gradient_of
from dsv4_jax.ops.linear import same_dtype
from dsv4_jax.ops.swiglu import swiglu
from dsv4_jax.quant import StoredWeight, round_to
from pallas_kernels.experts import MOST_PAIRS, experts as experts_kernel, grouped_experts


def experts(
    x: Float[Array, "T D"],
    selected: Int[Array, "T k"],
    weights: Float[Array, "T k"],
    gate_up: Float[Array, "E _ D"] | StoredWeight,
    down: Float[Array, "E D I"] | StoredWeight,
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
      limit: of SwiGLU.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret". The kernels take x in bfloat16 and
        weights stored as FP4 or in bfloat16: one takes up to 1024 pairs of a token and an expert, another one more.

    Returns:
      [T, D] float32; each linear map is rounded to x's dtype, the sum is not.
    """
    implementations = dict(
        xla=_experts_xla,
        mosaic_gpu=functools.partial(_experts_kernel, False),
        interpret=functools.partial(_experts_kernel, True),
    )
    arrays = x, selected, weights, gate_up, down
    return run("experts", implementations, implementation, limit, *arrays)


def _experts_kernel(interpret, limit, *arrays):
    def kernel(x, selected, weights, gate_up, down):
        chosen = experts_kernel if selected.size <= MOST_PAIRS else grouped_experts
        matrices = _for_kernel(gate_up), _for_kernel(down)
        y = chosen(x, selected, weights, *matrices, limit=limit, interpret=interpret)
        return _sum_of_experts(y, selected, gate_up.shape[0])

    return with_gradient_of(functools.partial(_experts_xla, limit), kernel)(*arrays)


def _for_kernel(weight):
    """Codes and scales, or bfloat16; the kernel refuses arrays of other dtypes."""
    if not isinstance(weight, StoredWeight):
        return weight
    if weight.kind != "FP4":
        raise NotImplementedError(f"the kernel takes weights stored as FP4 or in bfloat16, got {weight.kind}")
    return weight.codes, weight.scale


def _sum_of_experts(y, selected, number):
    """[T, k, D] to [T, D] float32, in routing order; as elementwise sums, which XLA fuses with what follows."""
    here = (selected >= 0) & (selected < number)
    y = jnp.where(here[..., None], y.astype(jnp.float32), 0.0)
    return functools.reduce(jnp.add, [y[:, j] for j in range(y.shape[1])])


def _experts_xla(limit, x, selected, weights, gate_up, down):
    tokens, k = selected.shape
    number = gate_up.shape[0]
    here = (selected >= 0) & (selected < number)
    by_expert = jnp.where(here, selected, number).reshape(-1)
    if by_expert.size < number:
        # Fewer (token, expert) pairs than experts, as in decoding: only the matrices of these experts are read, and
        # dequantised where they are stored so.
        order = jnp.arange(by_expert.size, dtype=jnp.int32)

        def linear(x, weight):
            return _paired_linear(x, weight[jnp.minimum(by_expert, number - 1)])

    else:
        # Sorted by expert, each expert is one group of a ragged matmul.
        order = jnp.argsort(by_expert)
        sizes = jnp.bincount(by_expert, length=number)

        def linear(x, weight):
            return _ragged_linear(x, weight[...], sizes)

    gate, up = jnp.split(linear(x[order // k], gate_up), 2, axis=1)
    inner = swiglu(gate, up, limit) * weights.reshape(-1)[order][:, None]
    y = linear(round_to(inner, x.dtype), down)
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
