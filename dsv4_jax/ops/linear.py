"""Linear maps with exact products and float32 sums."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.ops.dispatch import LeftToXla, run, with_gradient_of
from dsv4_jax.ops.swiglu import swiglu
from dsv4_jax.quant import StoredWeight, round_to
from pallas_kernels.linear import (
    MOST_STORED_TOKENS,
    MOST_TOKENS,
    linear as linear_kernel,
    stored_linear,
    stored_matmul,
)


Part = tuple[int, bool]
# With fewer rows XLA is faster: it multiplies several weights at once where they have one input.
LEAST_ROWS = 1536


def linear(
    x: Float[Array, "... n"],
    weight: Float[Array, "m k"] | StoredWeight,
    *,
    parts: tuple[Part, ...] | None = None,
    groups: int = 1,
    swiglu_limit: float | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "... p"], ...]:
    """`x @ weight.T`, or that of groups of channels, as an array for each part of the weight's rows; or SwiGLU of two.

    The gradient is that of "xla", whatever computes the values.

    Args:
      x: [..., groups * k].
      weight: [m, k], [out, in] as in the checkpoint: `groups` matrices one below the other, each for its k channels.
        Or such a matrix in the release's storage.
      parts: (rows, whether sums are rounded to x's dtype or stay float32), which make up all m rows; None: one part,
        float32.
      groups: a divisor of m.
      swiglu_limit: if given, the weight's first half of rows is a gate's, the second that of up. Both products are
        rounded, and the result is one part, [..., m / 2] in x's dtype: `swiglu(gate, up, swiglu_limit)`, rounded.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret". The kernel takes [T, groups * k]
        bfloat16 of 8, 16, .. or 64 tokens and bfloat16 weights of at least 1536 rows, and reads these at 65 to 94% of
        the rate of a copy (H100). Of weights stored as FP8 it takes any number of tokens; "xla" writes them out
        dequantised.

    Returns:
      [..., rows] of each part.

    Raises:
      ValueError: x, parts or groups do not fit the weight.
    """
    rows, depth = weight.shape
    if swiglu_limit is not None:
        if parts or groups > 1 or rows % 2:
            raise ValueError(
                f"swiglu_limit={swiglu_limit} wants one weight of gate and up, an even number of rows, without parts "
                f"and groups; got {rows} rows, parts={parts}, groups={groups}"
            )
        parts = ((rows // 2, True),) * 2
    parts = parts or ((rows, False),)
    if x.shape[-1] != groups * depth:
        raise ValueError(
            f"x must have {groups} * {depth} channels for a weight {list(weight.shape)}, got {x.shape[-1]}"
        )
    if rows % groups:
        raise ValueError(f"groups={groups} must divide the weight's {rows} rows")
    if sum(size for size, _ in parts) != rows:
        raise ValueError(f"parts={parts} must have {rows} rows together, as many as the weight")
    implementations = dict(
        xla=_linear_xla,
        mosaic_gpu=_linear_kernel_or_xla,
        interpret=functools.partial(_linear_kernel, True),
    )
    return run("linear", implementations, implementation, parts, groups, swiglu_limit, x, weight)


def same_dtype(x: Float[Array, "..."], weight: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Both in the wider of their dtypes: weights may be float32 beside bfloat16 activations, or the other way."""
    dtype = max(x.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    return x.astype(dtype), weight.astype(dtype)


def _linear_xla(parts, groups, swiglu_limit, x, weight):
    dtype = x.dtype
    weight = weight[...] if isinstance(weight, StoredWeight) else weight
    x, weight = same_dtype(x, weight)
    options = dict(precision="highest", preferred_element_type=jnp.float32)
    if groups == 1:
        product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), **options)
    else:
        x, weight = x.reshape(*x.shape[:-1], groups, -1), weight.reshape(groups, -1, weight.shape[-1])
        product = jnp.einsum("...gk,gmk->...gm", x, weight, **options).reshape(*x.shape[:-2], -1)
    found, start = [], 0
    for size, rounded in parts:
        part = jax.lax.slice_in_dim(product, start, start + size, axis=-1)
        found.append(round_to(part, dtype) if rounded else part)
        start += size
    return _finished(tuple(found), swiglu_limit, dtype)


def _finished(products, swiglu_limit, dtype):
    if swiglu_limit is None:
        return products
    gate, up = products
    return (round_to(swiglu(gate, up, swiglu_limit), dtype),)


def _linear_kernel_or_xla(parts, groups, swiglu_limit, x, weight):
    if not isinstance(weight, StoredWeight):
        if weight.shape[0] < LEAST_ROWS:
            raise LeftToXla(f"the kernel is for weights of {LEAST_ROWS} rows or more, got {weight.shape[0]}")
        if x.size > MOST_TOKENS * x.shape[-1]:
            raise LeftToXla(f"the kernel is for up to {MOST_TOKENS} tokens, got {x.size // x.shape[-1]}")
    return _linear_kernel(False, parts, groups, swiglu_limit, x, weight)


def _linear_kernel(interpret, parts, groups, swiglu_limit, x, weight):
    options = dict(parts=parts, groups=groups, interpret=interpret)

    def kernel(x, weight):
        if not isinstance(weight, StoredWeight):
            products = linear_kernel(x, weight, **options)
            return _finished(products, swiglu_limit, x.dtype)
        if weight.kind != "FP8":
            raise NotImplementedError(f"the kernel takes weights stored as FP8, got {weight.kind}")
        chosen = stored_linear if x.shape[0] <= MOST_STORED_TOKENS else stored_matmul
        return chosen(x, weight.codes, weight.scale, limit=swiglu_limit, **options)

    return with_gradient_of(functools.partial(_linear_xla, parts, groups, swiglu_limit), kernel)(x, weight)
