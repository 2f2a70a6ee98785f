"""Exact top-k selection of indexer scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import run


def indexer_topk(scores: Float[Array, "T E"], k: int, *, implementation: str | None = None) -> Int[Array, "T k"]:
    """Indices of the k best scores of each row, best first; equal scores: the lower index first.

    Args:
      scores: [T, E] float32; -inf = not selectable.
      k: entries to select, at least 1.
      implementation: None (best available) or "xla".

    Returns:
      [T, k] int32; -1 at the end where fewer than k entries are selectable.
    """
    return run("indexer_topk", {"xla": _indexer_topk_xla}, implementation, scores, k)


def _indexer_topk_xla(scores, k):
    found = min(k, scores.shape[1])
    values, indices = jax.lax.top_k(scores, found)
    indices = jnp.where(values > -jnp.inf, indices, -1)
    return jnp.pad(indices, ((0, 0), (0, k - found)), constant_values=-1)
