"""Rings in the cache with values of each request's newest tokens: residual streams for MTP drafts, ids for n-grams."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.pools import KVCache
from dsv4_jax.ops.views import int_range, put_in_rings, run_bounds, take


_IMAGE = -1  # stored in place of a compressed id for a part of an image


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
    previous, pool = _advance(cache.streams, streams.reshape(streams.shape[0], -1), batch, (1,))
    has_predecessor = (batch.slots >= 0) & (batch.positions > 0)
    shifted = dataclasses.replace(
        batch,
        positions=jnp.where(has_predecessor, batch.positions - 1, -1),
        slots=jnp.where(has_predecessor, batch.slots, -1),
    )
    return previous.reshape(streams.shape), shifted, dataclasses.replace(cache, streams=pool)


def advance_ngrams(cache: KVCache, batch: Batch, token_map: Int[Array, "vocab"]) -> tuple[Int[Array, "T n"], KVCache]:
    """Stores the ids of a step's tokens, and returns the longest n-gram that ends with each token.

    Args:
      cache: the cache; it must have `ngram_ids`.
      batch: inputs of the step.
      token_map: [vocab] int32 compressed id of each token id, see `EngramConfig`.

    Returns:
      ([T, max_ngram_size] int32 compressed ids: the id of the token itself, of the preceding token, and so on; the
      cache with the new ids). The compressed id of `EngramConfig.pad_token_id` stands for tokens before the start of
      the request. It also stands for a part of an image and for all tokens that precede this part in the n-gram. The
      n-gram of a padding token holds only this id.
    """
    engram = cache.schema.config.engram
    assert engram is not None
    ids = take(token_map, batch.token_ids)
    if batch.is_image is not None:
        ids = jnp.where(batch.is_image, _IMAGE, ids)
    ngrams, pool = _advance(cache.ngram_ids, ids[:, None], batch, range(engram.max_ngram_size))
    ngrams = ngrams[..., 0]
    # Seen from its last token backwards, an n-gram stops at the start of the request or at an image: the ids from there
    # on become the padding's.
    position = batch.positions[:, None] - int_range(engram.max_ngram_size)[None, :]
    is_outside = jax.lax.cummax(((position < 0) | (ngrams == _IMAGE)).astype(jnp.int32), axis=1)
    ngrams = jnp.where(is_outside > 0, token_map[engram.pad_token_id], ngrams)
    return ngrams, dataclasses.replace(cache, ngram_ids=pool)


def _advance(pool, rows, batch, distances):
    """Reads the rows of tokens that precede a step's tokens in their requests, then stores the step's rows.

    Args:
      pool: [1, slots, ring, width], the rings.
      rows: [T, width] rows of the step's tokens.
      batch: inputs of the step.
      distances: n distances in tokens; 0 = the token itself.

    Returns:
      ([T, n, width] rows of the tokens at these distances before each token, arbitrary ones before the start of the
      request; the updated pool).
    """
    start, _ = run_bounds(batch.slots)
    distance = jnp.array(distances, jnp.int32)[None, :]
    position = batch.positions[:, None] - distance
    stored = take(pool, 0, batch.slots[:, None], position % pool.shape[2])
    is_new = int_range(rows.shape[0])[:, None] - distance >= start[:, None]
    new = jnp.stack([jnp.roll(rows, n, axis=0) for n in distances], axis=1)
    earlier = jnp.where(is_new[..., None], new, stored)
    # The barrier orders the read above before the write below. Otherwise XLA copies the pool.
    earlier, rows = jax.lax.optimization_barrier((earlier, rows))
    return earlier, put_in_rings(pool, rows, 0, batch.slots, batch.positions)
