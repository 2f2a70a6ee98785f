"""Products with low-rank adapters (LoRA). Each token has one of several adapters, or none."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsv4_jax.common.arguments import check
from dsv4_jax.ops.dispatch import PreferXla, with_kernel
from dsv4_jax.ops.linear import FLOAT32_SUMS
from dsv4_jax.quant import LayerSlice, layer_stacks, layer_value, round_to
from pallas_kernels import linear as kernels


def _check(downs, scales):
    num_adapters = downs[0].shape[0]
    check(len(scales) == num_adapters, f"{scales=} must have a factor for each of the {num_adapters} adapters")


def _multiply(x, matrix):
    return jax.lax.dot_general(x, matrix.astype(x.dtype), (((1,), (1,)), ((), ())), **FLOAT32_SUMS)


def _add_kernel(outputs, x, downs, ups, numbers, scales, *, interpret):
    """Computes `add_adapters` with kernels. If x has many rows, XLA multiplies them by `downs`."""
    _check(downs, scales)
    tokens = len(numbers)
    if tokens not in kernels.BFLOAT16_TOKENS:
        raise PreferXla(f"the kernel is for tokens in {kernels.BFLOAT16_TOKENS}, got {tokens}")
    if any(array.dtype != jnp.bfloat16 for array in (*outputs, x, *downs, *ups)):
        raise PreferXla("the kernel is for inputs, outputs and matrices in bfloat16")
    num_adapters, rank, depth = downs[0].shape
    if num_adapters * rank not in kernels.ADAPTED_RANKS:
        raise PreferXla(f"the kernel is for adapters times rank in {kernels.ADAPTED_RANKS}, got {num_adapters * rank}")
    rows = x.reshape(-1, depth)
    if len(rows) <= max(kernels.BFLOAT16_TOKENS):
        stacks, layer = layer_stacks(downs)
        matrices = [down.reshape(*down.shape[:-3], num_adapters * rank, depth) for down in stacks]
        spec = kernels.LinearSpec((num_adapters * rank,) * len(matrices))
        down_products = kernels.bfloat16_linear(rows, *matrices, layer=layer, spec=spec, interpret=interpret)
    else:
        down_products = [_multiply(rows, down.reshape(-1, depth)) for down in layer_value(downs)]
    ups, layer = layer_stacks(ups)
    return kernels.add_adapters(
        outputs,
        [product.reshape(tokens, -1) for product in down_products],
        [up.reshape(*up.shape[:-2], num_adapters * rank) for up in ups],
        numbers,
        jnp.asarray(np.repeat(np.float32(scales), rank)),
        layer=layer,
        rank=rank,
        interpret=interpret,
    )


@with_kernel(_add_kernel)
def add_adapters(
    outputs: Sequence[Float[Array, "T _"]],
    x: Float[Array, "T k"],
    downs: Sequence[Float[Array, "n r _"] | LayerSlice],
    ups: Sequence[Float[Array, "_ n r"] | LayerSlice],
    numbers: Int[Array, "T"],
    scales: tuple[float, ...],
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T _"], ...]:
    """Adds `scales[i] * up[:, i] @ down[i] @ x` to the outputs of linear maps of x, where i is the token's adapter.

    Gradients always come from "xla", whichever implementation computes the values.

    Args:
      outputs: for each map its output [T, m].
      x: [T, groups * k] input of the maps.
      downs: for each map [n, r, k] matrices of the n adapters of rank r, an array or a `LayerSlice`. With several
        groups, the g-th slice of the map's m output channels gets the products of the g-th slice of the input channels.
      ups: for each map [m, n, r] matrices, an array or a `LayerSlice`. All matrices and the products
        `scales[i] * down[i] @ x` are rounded to the dtype of x.
      numbers: [T] int32 index of each token's adapter, 0 to n - 1. Any other value, such as -1, means no adapter.
      scales: factor of each adapter's product (static).
      implementation: None, "xla", "mosaic_gpu" or "interpret". The last two need inputs, outputs and matrices in
        bfloat16. T must be a multiple of 8 up to 64, and n * r a multiple of 64 up to 256.

    Returns:
      The outputs with the products added in float32, rounded to their dtypes.

    Raises:
      ValueError: `scales` has another number of factors than there are adapters.
    """
    _check(downs, scales)
    is_chosen = numbers[:, None] == jnp.arange(len(scales))[None]
    factors = jnp.asarray(scales, jnp.float32)[None, None, :, None]
    added = []
    for y, down, up in zip(outputs, *layer_value((downs, ups)), strict=True):
        tokens, channels = y.shape
        num_adapters, rank, depth = down.shape
        # x is multiplied by the matrices of all adapters, and only the products of the token's adapter are kept. The
        # cost of this does not depend on how the tokens are distributed over the adapters.
        inner = _multiply(x.reshape(-1, depth), down.reshape(-1, depth)).reshape(tokens, -1, num_adapters, rank)
        groups = inner.shape[1]
        # Values of other adapters are replaced by 0, not multiplied by 0, because they may be infinite.
        inner = jnp.where(is_chosen[:, None, :, None], inner * factors, 0.0)
        inner = round_to(inner, x.dtype).reshape(tokens, groups, -1)
        up = up.astype(x.dtype).reshape(groups, channels // groups, -1)
        product = jnp.einsum("tgk,gmk->tgm", inner, up, **FLOAT32_SUMS)
        added.append(round_to(y.astype(jnp.float32) + product.reshape(y.shape), y.dtype))
    return tuple(added)
