"""Linear maps with exact products and float32 sums."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.ops.dispatch import PreferXla, dispatch
from dsv4_jax.ops.norm_rope import rms_normalize
from dsv4_jax.ops.swiglu import swiglu
from dsv4_jax.quant import QuantizedWeight, round_to
from pallas_kernels.linear import (
    MAX_NORMED_TOKENS,
    MAX_STORED_TOKENS,
    MAX_TOKENS,
    linear as linear_kernel,
    quantized_linear,
    quantized_matmul,
)


Part = tuple[int, bool]
Matrix = Float[Array, "_ _"] | QuantizedWeight
# With fewer rows XLA is faster: it multiplies several weights at once where they have one input.
MIN_ROWS = 1536


def linear(
    x: Float[Array, "... n"],
    weight: Matrix | tuple[Matrix, ...],
    *,
    parts: tuple[Part, ...] | None = None,
    groups: int = 1,
    swiglu_limit: float | None = None,
    norm: tuple[Float[Array, "k"], float] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "... p"], ...]:
    """`x @ weight.T`, or that of groups of channels, as an array for each part of the weight's rows; or SwiGLU of two.

    The gradient is that of "xla", whatever computes the values.

    Args:
      x: [..., groups * k].
      weight: [m, k], [out, in] as in the checkpoint: `groups` matrices one below the other, each for its k channels.
        Or such a matrix in the release's storage. Or a tuple of several of either, one below the other: for them no
        groups and no SwiGLU, and each part has rows of one.
      parts: (rows, whether sums are rounded to x's dtype or stay float32), which make up all m rows; None: one part,
        float32.
      groups: a divisor of m.
      swiglu_limit: if given, the weight's first half of rows is a gate's, the second that of up. Both products are
        rounded, and the result is one part, [..., m / 2] in x's dtype: `swiglu(gate, up, swiglu_limit)`, rounded.
      norm: if given, (weight [k] float32, eps): x is RMS-normed over its k channels and rounded first; one group.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret". The kernel takes [T, groups * k]
        bfloat16 of 8, 16, .. or 64 tokens and bfloat16 weights of at least 1536 rows, and reads these at 65 to 94% of
        the rate of a copy (H100). Of weights stored as FP8 it takes any number of tokens; "xla" writes them out
        dequantised. Up to 32 tokens it takes
        these together with bfloat16 ones, in one launch.

    Returns:
      [..., rows] of each part.

    Raises:
      ValueError: x, parts, groups, swiglu_limit or norm do not fit the weight.
    """
    weights = weight if isinstance(weight, tuple) else (weight,)
    rows, depth = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
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
            f"x must have {groups} * {depth} channels for a weight {list(weights[0].shape)}, got {x.shape[-1]}"
        )
    if rows % groups:
        raise ValueError(f"groups={groups} must divide the weight's {rows} rows")
    if sum(size for size, _ in parts) != rows:
        raise ValueError(f"parts={parts} must have {rows} rows together, as many as the weight")
    if norm is not None and groups > 1:
        raise ValueError(f"norm is for one group of channels, got groups={groups}")
    if len(weights) > 1 and not _take_one_launch(x, weights):
        options = dict(groups=groups, swiglu_limit=swiglu_limit, norm=norm, implementation=implementation)
        shares = zip(weights, _parts_of(parts, weights), strict=True)
        return tuple(part for weight, own in shares for part in linear(x, weight, parts=own, **options))
    arrays, eps = ((x, *weights), None) if norm is None else ((x, *weights, norm[0]), norm[1])
    static = _Static(parts, groups, swiglu_limit, eps)
    return dispatch("linear", implementation, *arrays, xla=_linear_xla, kernel=_linear_kernel, static=static)


def same_dtype(x: Float[Array, "..."], weight: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Both in the wider of their dtypes: weights may be float32 beside bfloat16 activations, or the other way."""
    dtype = max(x.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    return x.astype(dtype), weight.astype(dtype)


class _Static(NamedTuple):
    """What is no array. `eps`: None, or of a norm, whose weight is the last array."""

    parts: tuple[Part, ...]
    groups: int
    swiglu_limit: float | None
    eps: float | None

    def split(self, arrays):
        """(weights, the norm's)."""
        return (arrays, ()) if self.eps is None else (arrays[:-1], arrays[-1:])


def _take_one_launch(x, weights):
    """Whether a kernel reads the weights together."""
    kinds = {weight.kind if isinstance(weight, QuantizedWeight) else weight.dtype for weight in weights}
    return kinds <= {"FP8", jnp.dtype(jnp.bfloat16)} and "FP8" in kinds and x.size <= MAX_STORED_TOKENS * x.shape[-1]


def _parts_of(parts, weights):
    """Those of each weight."""
    left = list(parts)
    for weight in weights:
        own, rows = [], weight.shape[0]
        while sum(size for size, _ in own) < rows:
            own.append(left.pop(0))
        if sum(size for size, _ in own) != rows:
            raise ValueError(f"parts={parts} must not cross from one weight to the next: one has {rows} rows")
        yield tuple(own)


def _linear_xla(x, *arrays, static):
    weights, norm = static.split(arrays)
    x, groups = _normed(x, *norm, eps=static.eps), static.groups
    if len(weights) > 1:
        shares = zip(weights, _parts_of(static.parts, weights), strict=True)
        plain = static._replace(eps=None)
        return tuple(
            part for weight, own in shares for part in _linear_xla(x, weight, static=plain._replace(parts=own))
        )
    (weight,), dtype = weights, x.dtype
    weight = weight[...] if isinstance(weight, QuantizedWeight) else weight
    x, weight = same_dtype(x, weight)
    options = dict(precision="highest", preferred_element_type=jnp.float32)
    if groups == 1:
        product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), **options)
    else:
        x, weight = x.reshape(*x.shape[:-1], groups, -1), weight.reshape(groups, -1, weight.shape[-1])
        product = jnp.einsum("...gk,gmk->...gm", x, weight, **options).reshape(*x.shape[:-2], -1)
    found, start = [], 0
    for size, rounded in static.parts:
        part = jax.lax.slice_in_dim(product, start, start + size, axis=-1)
        found.append(round_to(part, dtype) if rounded else part)
        start += size
    return _finished(tuple(found), static.swiglu_limit, dtype)


def _normed(x, *norm, eps):
    for weight in norm:
        weight = weight.reshape(*(1,) * (x.ndim - 1), -1)
        x = round_to(weight * rms_normalize(x.astype(jnp.float32), eps), x.dtype)
    return x


def _finished(products, swiglu_limit, dtype):
    if swiglu_limit is None:
        return products
    gate, up = products
    return (round_to(swiglu(gate, up, swiglu_limit), dtype),)


def _linear_kernel(x, *arrays, static, interpret):
    weights, norm = static.split(arrays)
    options = dict(parts=static.parts, groups=static.groups, interpret=interpret)
    if len(weights) == 1 and not isinstance(weights[0], QuantizedWeight):
        if not interpret and weights[0].shape[0] < MIN_ROWS:
            raise PreferXla(f"the kernel is for weights of {MIN_ROWS} rows or more, got {weights[0].shape[0]}")
        if not interpret and x.size > MAX_TOKENS * x.shape[-1]:
            raise PreferXla(f"the kernel is for up to {MAX_TOKENS} tokens, got {x.size // x.shape[-1]}")
        products = linear_kernel(_normed(x, *norm, eps=static.eps), weights[0], **options)
        return _finished(products, static.swiglu_limit, x.dtype)
    pairs = tuple((x.codes, x.scale) if isinstance(x, QuantizedWeight) else x for x in weights)
    if kinds := {weight.kind for weight in weights if isinstance(weight, QuantizedWeight)} - {"FP8"}:
        raise NotImplementedError(f"the kernel takes weights stored as FP8, got {kinds.pop()}")
    options["limit"] = static.swiglu_limit
    if x.shape[0] <= MAX_NORMED_TOKENS:
        return quantized_linear(x, pairs, *norm, eps=static.eps or 0.0, **options)
    x = _normed(x, *norm, eps=static.eps)
    if x.shape[0] <= MAX_STORED_TOKENS:
        return quantized_linear(x, pairs, **options)
    return quantized_matmul(x, *pairs[0], **options)
