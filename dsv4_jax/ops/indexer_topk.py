"""Exact top-k selection of indexer scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import with_kernel
from dsv4_jax.ops.views import int_range
from pallas_kernels.indexer_topk import indexer_topk as kernel


@with_kernel(kernel)
def indexer_topk(
    scores: Float[Array, "T E"], lengths: Int[Array, "T"], k: int, *, implementation: str | None = None
) -> Int[Array, "T k"]:
    """Selects the k largest of the first `lengths[t]` scores of each row t.

    Scores are compared as numbers: 0 and -0 are equal, and subnormal numbers are not flushed to 0 on any device. Of
    equal scores, those with the lowest indices are selected.

    Args:
      scores: [T, E] float32 scores without NaN. A score of -inf is never selected. Scores from `lengths[t]` on are
        ignored.
      lengths: [T] int32 number of scores that count in each row, 0 to E; 0 for padding.
      k: number of entries to select, at least 1.
      implementation: None, "xla" or "mosaic_gpu", which takes k up to 2048 and E a multiple of 4. The kernel is written
        in PTX, so there is no "interpret".

    Returns:
      [T, k] int32 indices in ascending order, so that gathers read memory in order. A row with fewer than k scores to
      select ends with -1.
    """
    entries = scores.shape[1]
    scores = jnp.where(int_range(entries)[None, :] < lengths[:, None], scores, -jnp.inf)
    count = min(k, entries)
    best_scores, indices = jax.lax.top_k(_order(scores), count)
    # Until the sort, the index `entries` means "no entry", so that missing entries come last.
    indices = jnp.where(best_scores > _order(jnp.float32(-jnp.inf)), indices, entries)
    indices = jnp.sort(indices, axis=1)
    indices = jnp.where(indices < entries, indices, -1)
    return jnp.pad(indices, ((0, 0), (0, k - count)), constant_values=-1)


def _order(scores):
    """Returns int32 keys that sort like float32 scores. Some devices compare subnormal floats as if they were 0."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(bits == jnp.iinfo(jnp.int32).min, 0, bits)  # -0 becomes 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
