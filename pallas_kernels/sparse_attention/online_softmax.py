"""Online softmax over tiles of 64 rows for 64 heads, in the layout of `wgmma` accumulators.

Weights are `2 ** (score - running_max)`, where scores are scaled to powers of two. When the maximum grows, earlier sums
are multiplied by `rescale = 2 ** (old_max - new_max)`.
"""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.kv_rows import ROW_DIM


HEADS = 64  # heads of a block: the M dimension of one `wgmma`
HALF = ROW_DIM // 2  # columns of the result that one warpgroup adds up
# Finite and below every score, so that differences of two maxima are not NaN.
LOWEST = -1e30
SCALE = ROW_DIM**-0.5 * math.log2(math.e)

LAYOUT = plgpu.Layout.WGMMA
PER_HEAD = LAYOUT.reduce(1)
PER_COLUMN = LAYOUT.reduce(0)


def initial_stats() -> tuple[jax.Array, jax.Array]:
    """(running maximum, running sum of weights) [64 heads] before the first tile."""
    lowest, zero = (plgpu.layout_cast(jnp.full((HEADS,), x, jnp.float32), PER_HEAD) for x in (LOWEST, 0.0))
    return lowest, zero


def load_per_head(ref) -> jax.Array:
    """Reads [64] float32 from global or shared memory."""
    return plgpu.load(ref, layout=PER_HEAD, optimized=False)


def per_row(factor: jax.Array, x: jax.Array) -> jax.Array:
    """`x` [64 heads, columns] times a factor [64] of each head."""
    return x * lax.broadcast_in_dim(factor, x.shape, [0])


def weigh(products: jax.Array, bias_smem, running_max: jax.Array, running_sum: jax.Array) -> tuple[jax.Array, ...]:
    """Returns (weights [64, 64], rescale [64], new maximum, new sum) of a tile.

    `products` are the [64 heads, 64 rows] dot products of queries and rows, and `bias_smem` [64] is 0 for a row and
    -inf for none. The maximum and the sum are [64 heads] float32 statistics of earlier tiles.
    """
    bias = plgpu.load(bias_smem, layout=PER_COLUMN, optimized=False)
    scores = products * SCALE + lax.broadcast_in_dim(bias, products.shape, [1])
    new_max = jnp.maximum(running_max, scores.max(axis=1))
    rescale = jnp.exp2(running_max - new_max)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
    return weights, rescale, new_max, running_sum * rescale + weights.sum(axis=1)


def load_sink(sinks_gmem) -> jax.Array:
    """Reads the sink logits [64] as powers of two."""
    return load_per_head(sinks_gmem) * math.log2(math.e)


def final_scale(sink: jax.Array, running_max: jax.Array, running_sum: jax.Array) -> jax.Array:
    """The factor [64] that turns weighted sums into attention, with the sink in the denominator."""
    peak = jnp.maximum(running_max, sink)
    scale = jnp.exp2(running_max - peak)
    return scale / (running_sum * scale + jnp.exp2(sink - peak))
