"""Linear maps whose weights may stay quantized as the release stores them."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.ops.dispatch import PreferXla, dispatch
from dsv4_jax.ops.norm_rope import rms_norm
from dsv4_jax.quant import LayerSlice, QuantizedWeight, layer_stacks, layer_value, round_to
from pallas_kernels import linear as kernels
from pallas_kernels.linear import LinearSpec as LinearSpec


# Options of matrix products with float32 sums. The products are exact, also those of float32 values on a GPU.
FLOAT32_SUMS: dict[str, Any] = {"precision": "highest", "preferred_element_type": jnp.float32}
Matrix = Float[Array, "_ _"] | QuantizedWeight | LayerSlice
# The kernel takes a bfloat16 weight with at least this number of rows. With fewer rows XLA is faster, because it
# multiplies an input by several weights at once.
MIN_ROWS = 1536
# `quantized_matmul` takes a layer's bfloat16 matrix of at least `MIN_STACK_ROWS` rows from a stack, if there are more
# than `MAX_QUANTIZED_TOKENS` tokens and `bfloat16_linear` does not take them. XLA would copy the matrix before the
# product.
MIN_STACK_ROWS = 1024


def linear(
    x: Float[Array, "... n"],
    weight: Matrix | tuple[Matrix, ...],
    spec: LinearSpec = LinearSpec(),
    *,
    norm: tuple[Float[Array, "k"] | LayerSlice, float] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "... _"], ...]:
    """Computes `x @ weight.T` with exact products and float32 sums, and splits it into the outputs of `spec`.

    Gradients always come from "xla", whichever implementation computes the values.

    Args:
      x: [..., num_groups * k] activations.
      weight: [m, k] matrix in the checkpoint's [out, in] order: an array, a `QuantizedWeight`, or a `LayerSlice` of
        either. A tuple of matrices stands for their concatenation along m, where no output has rows of two matrices.
      spec: how the rows of the weight are grouped, and how the product is split and rounded, see `LinearSpec`.
      norm: (weight [k] float32, epsilon) of an RMS norm, whose result is rounded to the dtype of x before the product.
        It requires `num_groups` of 1. None = no norm.
      implementation: None, "xla", "mosaic_gpu" or "interpret". The last two take x [T, k] in bfloat16, with FP8
        weights, or with bfloat16 weights if T is a multiple of 8 up to 64. With more than 32 tokens, they also take
        bfloat16 weights of 1,024 rows or more from a stack of layers.

    Returns:
      One array [..., size] for each output of the spec.

    Raises:
      ValueError: the shapes of `x`, `weight`, `spec` and `norm` do not agree.
    """
    weights = weight if isinstance(weight, tuple) else (weight,)
    _check(x, weights, spec, norm)
    if len(weights) > 1 and not _fit_one_launch(x, weights):
        # Each matrix gets a call of its own, and the calls' tuples of outputs are joined.
        return sum(
            (linear(x, *one, norm=norm, implementation=implementation) for one in _split_spec(spec, weights)), ()
        )
    norm_weight, eps = norm or (None, 0.0)
    return dispatch(
        "linear",
        implementation,
        x,
        weights,
        norm_weight,
        xla=_linear_xla,
        kernel=_linear_kernel,
        spec=spec,
        eps=eps,
    )


def linear_swiglu(
    x: Float[Array, "... k"], gate_up: Matrix, limit: float, *, implementation: str | None = None
) -> Float[Array, "... n"]:
    """Computes the SwiGLU of the two halves of `x @ gate_up.T`. Products and result are rounded to the dtype of x.

    Gradients always come from "xla", whichever implementation computes the values.

    Args:
      x: [..., k] activations.
      gate_up: [2 * n, k] matrix, of the types that `linear` takes. The first n rows are the matrix of the gate, the
        other rows are the matrix of the up projection.
      limit: bound on the values of gate and up projection, see `ops.swiglu`.
      implementation: as in `linear`.

    Returns:
      [..., n] in the dtype of x.

    Raises:
      ValueError: the weight has an odd number of rows, or its number of columns is not the number of channels of `x`.
    """
    rows = gate_up.shape[0]
    if rows % 2:
        raise ValueError(f"SwiGLU wants as many rows of the gate as of the up projection, got {rows} rows")
    spec = LinearSpec((rows // 2, rows // 2), x.dtype)
    _check(x, (gate_up,), spec, None)
    (y,) = dispatch(
        "linear_swiglu",
        implementation,
        x,
        (gate_up,),
        None,
        xla=_linear_xla,
        kernel=_linear_kernel,
        spec=spec,
        eps=0.0,
        swiglu_limit=limit,
    )
    return y


def swiglu(gate: Float[Array, "T n"], up: Float[Array, "T n"], limit: float) -> Float[Array, "T n"]:
    """Computes `silu(min(gate, limit)) * clip(up, -limit, limit)` in float32, without rounding.

    Args:
      gate, up: [T, n] products of the input with the matrices of the gate and of the up projection.
      limit: largest value of gate, and of up's absolute value.
    """
    return jax.nn.silu(jnp.minimum(gate.astype(jnp.float32), limit)) * jnp.clip(up.astype(jnp.float32), -limit, limit)


def same_dtype(x: Float[Array, "..."], weight: Float[Array, "..."]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Casts both arrays to the wider of their dtypes, for float32 weights with bfloat16 activations or vice versa."""
    dtype = max(x.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    return x.astype(dtype), weight.astype(dtype)


def _check(x, weights, spec, norm):
    depth = weights[0].shape[1]
    groups = spec.num_groups
    spec.outputs(sum(weight.shape[0] for weight in weights))
    if x.shape[-1] != groups * depth:
        raise ValueError(
            f"x must have {groups} * {depth} channels for a weight {list(weights[0].shape)}, got {x.shape[-1]}"
        )
    if norm is not None and groups > 1:
        raise ValueError(f"norm is for one group of channels, got num_groups={groups}")


def _fit_one_launch(x, weights):
    """Returns whether one kernel launch can multiply x by all weights.

    One launch takes up to `MAX_QUANTIZED_TOKENS` tokens. Each weight is in FP8 or bfloat16. At least one is in FP8, and
    all FP8 weights are of the same kind.
    """
    kinds = {getattr(weight, "kind", weight.dtype) for weight in layer_value(weights)}
    return (
        kinds - {jnp.dtype(jnp.bfloat16)} in ({"FP8"}, {"FP8_32"})
        and x.size <= kernels.MAX_QUANTIZED_TOKENS * x.shape[-1]
    )


def _split_spec(spec, weights):
    """Yields each weight with the spec of its own outputs. Raises ValueError if an output has rows of two weights."""
    remaining = list(spec.outputs(sum(weight.shape[0] for weight in weights)))
    for weight in weights:
        outputs = []
        rows = weight.shape[0]
        while sum(size for size, _ in outputs) < rows:
            outputs.append(remaining.pop(0))
        sizes, dtypes = zip(*outputs, strict=True)
        if sum(sizes) != rows:
            raise ValueError(f"output_sizes={spec.output_sizes} must not straddle two weights: one has {rows} rows")
        yield weight, LinearSpec(sizes, dtypes, spec.num_groups)


def _linear_xla(x, weights, norm_weight, *, spec, eps, swiglu_limit=None):
    x = rms_norm(x, norm_weight, eps)
    products = (_multiply(x, *weight_and_spec) for weight_and_spec in _split_spec(spec, weights))
    return _activate(sum(products, ()), swiglu_limit)


def _activate(outputs, swiglu_limit):
    """Returns the outputs, or with a limit a tuple of one array: the SwiGLU of the two outputs, in the gate's dtype."""
    if swiglu_limit is None:
        return outputs
    gate, up = outputs
    return (round_to(swiglu(gate, up, swiglu_limit), gate.dtype),)


def _multiply(x, weight, spec):
    """Returns the outputs of one weight, each rounded to its dtype."""
    outputs = spec.outputs(weight.shape[0])
    groups = spec.num_groups
    x, weight = same_dtype(x, weight[...] if isinstance(weight, QuantizedWeight) else weight)
    if groups == 1:
        product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), **FLOAT32_SUMS)
    else:
        x = x.reshape(*x.shape[:-1], groups, -1)
        weight = weight.reshape(groups, -1, weight.shape[-1])
        product = jnp.einsum("...gk,gmk->...gm", x, weight, **FLOAT32_SUMS).reshape(*x.shape[:-2], -1)
    ends = list(itertools.accumulate(size for size, _ in outputs))
    products = jnp.split(product, ends[:-1], axis=-1)
    return tuple(round_to(product, dtype) for product, (_, dtype) in zip(products, outputs, strict=True))


def _linear_kernel(x, weights, norm_weight, *, spec, eps, interpret, swiglu_limit=None):
    """Computes `linear` or `linear_swiglu` with a kernel: one of those for FP8 weights, or the one for bfloat16."""
    if len(weights) > 1 or isinstance(layer_value(weights[0]), QuantizedWeight):
        return _quantized_kernel(
            x, weights, norm_weight, eps=eps, spec=spec, swiglu_limit=swiglu_limit, interpret=interpret
        )
    rows = weights[0].shape[0]
    tokens = x.size // x.shape[-1]
    (weight,), layer = layer_stacks(weights)
    is_few = tokens in kernels.BFLOAT16_TOKENS
    multiply = kernels.bfloat16_linear
    is_stack = layer is not None and rows >= MIN_STACK_ROWS
    if is_stack and tokens > kernels.MAX_QUANTIZED_TOKENS and not (is_few and rows >= MIN_ROWS):
        multiply = kernels.quantized_matmul
    elif not interpret and rows < MIN_ROWS:
        raise PreferXla(f"the kernel is for weights of {MIN_ROWS} rows or more, got {rows}")
    elif not interpret and not is_few:
        raise PreferXla(f"the kernel is for tokens in {kernels.BFLOAT16_TOKENS}, got {tokens}")
    x = rms_norm(x, layer_value(norm_weight), eps)
    return _activate(multiply(x, weight, layer=layer, spec=spec, interpret=interpret), swiglu_limit)


def _quantized_kernel(x, weights, norm_weight, *, eps, **options):
    """Runs `quantized_linear`, the kernel for few tokens, or `quantized_matmul`, the kernel for many."""
    if x.shape[0] > kernels.MAX_NORMED_TOKENS:
        x = rms_norm(x, layer_value(norm_weight), eps)
        norm_weight = None
    (weights, norm_weight), layer = layer_stacks((weights, norm_weight))
    blocks = {weight.kind: weight.block for weight in weights if isinstance(weight, QuantizedWeight)}
    if kinds := blocks.keys() - {"FP8", "FP8_32"}:
        raise NotImplementedError(f"the kernel takes weights stored as FP8, got {kinds.pop()}")
    ((scale_block, _),) = blocks.values()
    options["scale_block"] = scale_block
    weights = tuple((one.codes, one.scale) if isinstance(one, QuantizedWeight) else one for one in weights)
    if x.shape[0] <= kernels.MAX_QUANTIZED_TOKENS:
        return kernels.quantized_linear(x, weights, norm_weight, layer=layer, eps=eps, **options)
    return kernels.quantized_matmul(x, weights[0], layer=layer, **options)
