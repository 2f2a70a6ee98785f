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
      selected: [T, k] int32 in [0, E).
      weights: [T, k] float32.
      gate_up: [E, 2 * I, D], the gate's rows first, or these matrices in the release's storage.
      down: [E, D, I], likewise.
      limit: of SwiGLU.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret". The kernels take x in bfloat16 and
        weights stored as FP4: one takes up to 1024 pairs of a token and an expert, another one more.

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
    if not all(isinstance(weight, StoredWeight) and weight.kind == "FP4" for weight in arrays[3:]):
        raise NotImplementedError("the kernel takes weights stored as FP4")

    def kernel(x, selected, weights, gate_up, down):
        pairs = (gate_up.codes, gate_up.scale), (down.codes, down.scale)
        chosen = experts_kernel if selected.size <= MOST_PAIRS else grouped_experts
        y = chosen(x, selected, weights, *pairs, limit=limit, interpret=interpret)
        return jnp.sum(y.astype(jnp.float32), axis=1)

    return with_gradient_of(functools.partial(_experts_xla, limit), kernel)(*arrays)


def _experts_xla(limit, x, selected, weights, gate_up, down):
    tokens, k = selected.shape
    by_expert = selected.reshape(-1)
    if by_expert.size < gate_up.shape[0]:
        # Fewer (token, expert) pairs than experts, as in decoding: only the matrices of these experts are read, and
        # dequantised where they are stored so.
        order = jnp.arange(by_expert.size, dtype=jnp.int32)

        def linear(x, weight):
            return _paired_linear(x, weight[by_expert])

    else:
        # Sorted by expert, each expert is one group of a ragged matmul.
        order = jnp.argsort(by_expert)
        sizes = jnp.bincount(by_expert, length=gate_up.shape[0])

        def linear(x, weight):
            return _ragged_linear(x, weight[...], sizes)

    gate, up = jnp.split(linear(x[order // k], gate_up), 2, axis=1)
    inner = swiglu(gate, up, limit) * weights.reshape(-1)[order][:, None]
    y = linear(round_to(inner, x.dtype), down)
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(tokens, k, -1)
    return jnp.sum(y.astype(jnp.float32), axis=1)


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
