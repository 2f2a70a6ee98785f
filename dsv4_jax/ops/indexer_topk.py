"""Exact top-k selection of indexer scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import with_kernel
from pallas_kernels.indexer_topk import indexer_topk as kernel


@with_kernel(kernel)
def indexer_topk(
    scores: Float[Array, "T E"], lengths: Int[Array, "T"], k: int, *, implementation: str | None = None
) -> Int[Array, "T k"]:
    """Selects the k largest of the first lengths[t] scores of each row; returns their indices in ascending order.

    Ascending order does not depend on how the set was found, and gathers read neighboring entries one after another.

    Scores are ordered as numbers: 0 and -0 are equal, and subnormal numbers differ from them on every device. Of equal
    scores the lower index is selected first.

    Args:
      scores: [T, E] float32 scores without NaN. -inf is never selected. Scores from lengths[t] on are not read.
      lengths: [T] int32 number of scores that count in each row, 0 .. E; 0 for padding.
      k: number of entries to select, at least 1.
      implementation: None, "xla" or "mosaic_gpu" (k up to 2048, E a multiple of 4; PTX, so there is no "interpret").

    Returns:
      [T, k] int32 indices; -1 at the end of rows with fewer than k selectable scores.
    """
    entries = scores.shape[1]
    inside = jnp.arange(entries, dtype=jnp.int32)[None, :] < lengths[:, None]
    scores = jnp.where(inside, scores, -jnp.inf)
    count = min(k, entries)
    best, indices = jax.lax.top_k(_order(scores), count)
    indices = jnp.where(best > _order(jnp.float32(-jnp.inf)), indices, entries)
    indices = jnp.sort(indices, axis=1)
    indices = jnp.where(indices < entries, indices, -1)
    return jnp.pad(indices, ((0, 0), (0, k - count)), constant_values=-1)


def _order(scores):
    """Returns int32 keys in the order of the scores; some devices compare subnormal floats as zeros."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(bits == jnp.iinfo(jnp.int32).min, 0, bits)  # -0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
