"""Exact top-k selection of indexer scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import dispatch
from pallas_kernels.indexer_topk import indexer_topk as kernel


def indexer_topk(
    scores: Float[Array, "T E"], lengths: Int[Array, "T"], k: int, *, implementation: str | None = None
) -> Int[Array, "T k"]:
    """Indices of the k largest of the first lengths[t] scores of each row, ascending.

    Ascending, not best first: attention sums over the selection in any order, neighbours in the list are neighbours in
    memory when it gathers them, and the order is a property of the selected set, not of how it was found.

    Scores are ordered as numbers, 0 and -0 equal, subnormals as they are on every device. Of equal scores the lower
    index is taken first.

    Args:
      scores: [T, E] float32, no NaN; -inf is never selected. What lies at or behind lengths[t] can be anything.
      lengths: [T] int32, 0 .. E; 0 for padding.
      k: entries to select, at least 1.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret". The kernel takes k up to 2048 and E a
        multiple of 4.

    Returns:
      [T, k] int32; all selectable entries where there are no more than k, then -1 at the end.
    """
    return dispatch("indexer_topk", implementation, scores, lengths, xla=_indexer_topk_xla, kernel=kernel, k=k)


def _indexer_topk_xla(scores, lengths, k):
    entries = scores.shape[1]
    inside = jnp.arange(entries, dtype=jnp.int32)[None, :] < lengths[:, None]
    scores = jnp.where(inside, scores, -jnp.inf)
    found = min(k, entries)
    best, indices = jax.lax.top_k(_order(scores), found)
    indices = jnp.where(best > _order(jnp.float32(-jnp.inf)), indices, entries)
    indices = jnp.sort(indices, axis=1)
    indices = jnp.where(indices < entries, indices, -1)
    return jnp.pad(indices, ((0, 0), (0, k - found)), constant_values=-1)


def _order(scores):
    """int32 that rise with the scores: comparing floats, some devices take subnormals for zeros."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    bits = jnp.where(bits == jnp.iinfo(jnp.int32).min, 0, bits)  # -0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
