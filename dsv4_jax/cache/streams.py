"""Storage in the cache for the residual streams of each request's newest tokens, from which MTP drafts start."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.pools import KVCache
from dsv4_jax.ops.views import int_range, put_in_rings, run_bounds, take


def advance_streams(
    cache: KVCache, streams: Float[Array, "T h D"], batch: Batch
) -> tuple[Float[Array, "T h D"], Batch, KVCache]:
    """Stores the streams of a step's tokens, and returns the streams of each token's predecessor in its request.

    A draft layer's row depends on a token's streams and on the token that follows it. The following token can change
    after a rewind, a fork or a prefix hit. So the row is computed when the following token arrives, from the streams in
    the cache.

    Args:
      cache: the cache; it must have `streams`.
      streams: [T, hc_mult, hidden] in the model's dtype, the model's residual streams of the batch's tokens.
      batch: inputs of the step.

    Returns:
      (streams [T, hc_mult, hidden] of the predecessors, the batch with the positions of the predecessors, the cache
      with the new streams). A token without predecessor has the position and the slot -1.
    """
    tokens = int_range(batch.slots.shape[0])
    start, _ = run_bounds(batch.slots)
    ring = cache.streams.shape[2]
    stored = take(cache.streams, 0, batch.slots, (batch.positions - 1) % ring)
    previous = jnp.where((tokens > start)[:, None, None], jnp.roll(streams, 1, axis=0), stored.reshape(streams.shape))
    # The barrier orders the read above before the write below. Otherwise XLA copies the pool.
    previous, streams = jax.lax.optimization_barrier((previous, streams))
    flat = streams.reshape(streams.shape[0], -1)
    pool = put_in_rings(cache.streams, flat, 0, batch.slots, batch.positions)
    has_predecessor = (batch.slots >= 0) & (batch.positions > 0)
    shifted = dataclasses.replace(
        batch,
        positions=jnp.where(has_predecessor, batch.positions - 1, -1),
        slots=jnp.where(has_predecessor, batch.slots, -1),
    )
    return previous, shifted, dataclasses.replace(cache, streams=pool)
