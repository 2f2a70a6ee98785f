"""Storage in the cache for the compressed ids of each request's newest tokens, of which Engram's n-grams are made."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.pools import KVCache
from dsv4_jax.ops.views import int_range, put_in_rings, run_bounds, take


_IMAGE = -1  # stored in place of a compressed id for a part of an image


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
    pad_id = token_map[engram.pad_token_id]
    tokens = int_range(ids.shape[0])
    start, _ = run_bounds(batch.slots)
    ring = cache.ngram_ids.shape[2]
    distance = int_range(engram.max_ngram_size)[None, :]
    position = batch.positions[:, None] - distance
    index = tokens[:, None] - distance
    stored = take(cache.ngram_ids, 0, batch.slots[:, None], position % ring)[..., 0]
    ngrams = jnp.where(index >= start[:, None], take(ids, index), stored)
    # Seen from its last token backwards, an n-gram stops at the start of the request or at an image: the ids from there
    # on become `pad_id`.
    is_outside = (position < 0) | (ngrams == _IMAGE)
    ngrams = jnp.where(jax.lax.cummax(is_outside.astype(jnp.int32), axis=1) > 0, pad_id, ngrams)
    # The barrier orders the read above before the write below. Otherwise XLA copies the ring.
    ngrams, ids = jax.lax.optimization_barrier((ngrams, ids))
    pool = put_in_rings(cache.ngram_ids, ids[:, None], 0, batch.slots, batch.positions)
    return ngrams, dataclasses.replace(cache, ngram_ids=pool)
