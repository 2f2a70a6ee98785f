"""Online softmax of 64 heads over tiles of 64 rows, in the layout of `wgmma` accumulators.

A weight is `2 ** (score - running_max)`, where the score is the scaled dot product times `log2(e)`. When the maximum
grows, the sums of earlier tiles are multiplied by `rescale = 2 ** (old_max - new_max)`.
"""

import math

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.runtime.checks import check_rules


HEADS = 64  # number of heads of a block: the M dimension of one `wgmma`
HALF = ROW_DIM // 2  # number of columns of the result that one warpgroup adds up
# The running maximum of no rows. It is below every score, but finite, so that the difference of two such maxima is 0,
# not NaN.
LOWEST = -1e30
SCALE = ROW_DIM**-0.5 * math.log2(math.e)  # factor of a dot product in its score

LAYOUT = plgpu.Layout.WGMMA
PER_HEAD = LAYOUT.reduce(1)
PER_COLUMN = LAYOUT.reduce(0)


def check_heads(heads: int) -> None:
    """Raises NotImplementedError unless `heads`, the number of heads of a token, is one that the kernels take."""
    multiple = 8 if heads < HEADS else HEADS  # copies take whole tiles of `TRANSFORMS`, which have 8 rows: 8 heads
    check_rules({f"a multiple of {HEADS} heads, or of 8 below that, got {heads}": heads % multiple == 0})


def pad_sinks(sinks: jax.Array) -> jax.Array:
    """Pads the last axis of sinks [.., heads] with zeros to a multiple of 64 heads."""
    return jnp.pad(sinks, [(0, 0)] * (sinks.ndim - 1) + [(0, -sinks.shape[-1] % HEADS)])


def initial_stats() -> tuple[jax.Array, jax.Array]:
    """Returns (running maximum, running sum of weights) before the first tile, each [64 heads] float32."""

    def splat(x):
        return plgpu.layout_cast(jnp.full((HEADS,), x, jnp.float32), PER_HEAD)

    return splat(LOWEST), splat(0.0)


def load_per_head(ref) -> jax.Array:
    """Reads [64] float32, a value for each head, from global or shared memory."""
    return plgpu.load(ref, layout=PER_HEAD, optimized=False)


def per_row(factor: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x` [64 heads, columns] times a factor [64] for each head."""
    return x * lax.broadcast_in_dim(factor, x.shape, [0])


def weigh(products: jax.Array, bias_smem, running_max: jax.Array, running_sum: jax.Array) -> tuple[jax.Array, ...]:
    """Computes the softmax weights of a tile of 64 rows. All arrays are float32.

    Args:
      products: [64 heads, 64 rows] dot products of queries and rows.
      bias_smem: [64 rows], 0 for a row that exists, otherwise -inf.
      running_max: [64 heads], maximum score of the tiles so far, see `initial_stats`.
      running_sum: [64 heads], sum of weights of the tiles so far.

    Returns:
      (weights, rescale, running_max, running_sum). `weights` are [64 heads, 64 rows]. `rescale` [64 heads] is the
      factor for the sums of earlier tiles. `running_max` and `running_sum` include this tile.
    """
    bias = plgpu.load(bias_smem, layout=PER_COLUMN, optimized=False)
    scores = products * SCALE + lax.broadcast_in_dim(bias, products.shape, [1])
    new_max = jnp.maximum(running_max, scores.max(axis=1))
    rescale = jnp.exp2(running_max - new_max)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
    return weights, rescale, new_max, running_sum * rescale + weights.sum(axis=1)


def load_sink(sinks_gmem) -> jax.Array:
    """Reads the sink logits [64] float32 and multiplies them by `log2(e)`, like scores."""
    return load_per_head(sinks_gmem) * math.log2(math.e)


def final_scale(sink: jax.Array, running_max: jax.Array, running_sum: jax.Array) -> jax.Array:
    """Returns the factor [64 heads] that turns the sums of weighted rows into attention.

    The factor is 1 divided by the sum of all weights, among them the sink's weight `2 ** (sink - running_max)`.
    """
    peak = jnp.maximum(running_max, sink)
    scale = jnp.exp2(running_max - peak)
    return scale / (running_sum * scale + jnp.exp2(sink - peak))
