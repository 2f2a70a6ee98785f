"""Engram's hashes: the rows of a table of embeddings for the n-grams that end with each token."""

import itertools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from dsv4_jax.config import EngramConfig


_MAX_INT64 = 2**63 - 1


def hash_multipliers(config: EngramConfig, layer: int) -> tuple[int, ...]:
    """Returns a layer's `max_ngram_size` odd multipliers: for a token's id, for the preceding token's id, and so on.

    A product of a compressed id and a multiplier is less than 2**63.
    """
    bound = max(1, _MAX_INT64 // config.compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer).integers(0, bound, config.max_ngram_size)
    return tuple(2 * int(number) + 1 for number in drawn)


def ngram_rows(ids: Int[Array, "T n"], multipliers: Sequence[int], primes: Sequence[int]) -> Int[Array, "T rows"]:
    """Computes the table rows of the n-grams that end with each token.

    The hash of an n-gram is the exclusive or of the products of its ids and their multipliers. An n-gram has a row for
    each head: the hash modulo the head's prime number, plus the sum of the preceding heads' primes.

    Args:
      ids: [T, n] int32 compressed ids: the id of the token itself, of the preceding token, and so on.
      multipliers: n positive numbers; the products with ids are less than 2**63.
      primes: number of rows of each head, a prime less than 2**24: the heads of 2-grams first, then those of 3-grams,
        and so on to n-grams. Each length of n-grams has equally many heads.

    Returns:
      [T, len(primes)] int32 rows.
    """
    with jax.enable_x64():  # for the 64-bit integers of the hashes
        products = ids.astype(jnp.uint64) * jnp.asarray(multipliers, jnp.uint64)[None, :]
        _, *hashes = itertools.accumulate(products.T, operator.xor)
        moduli = jnp.asarray(primes, jnp.uint64).reshape(1, len(hashes), -1)
        rows = jax.lax.rem(*jnp.broadcast_arrays(jnp.stack(hashes, axis=1)[:, :, None], moduli)).astype(jnp.int32)
    return rows.reshape(len(ids), -1) + jnp.asarray(np.cumsum([0, *primes[:-1]]), jnp.int32)[None, :]
