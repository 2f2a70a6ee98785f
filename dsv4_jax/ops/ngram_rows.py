"""Engram's hashes: the rows of a table of embeddings for the n-grams that end with each token."""

from collections.abc import Sequence

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
    tokens, n = ids.shape
    words = _products(ids.astype(jnp.uint32), multipliers)
    hashes = [words[:, 0]]  # `hashes[i]` becomes the hash of the n-gram of i + 1 tokens
    for i in range(1, n):
        hashes.append(hashes[-1] ^ words[:, i])
    hash_words = jnp.stack(hashes[1:], axis=1)[:, :, None, :]  # [T, n - 1, 1, 4]
    moduli = jnp.asarray(primes, jnp.uint32).reshape(1, n - 1, -1)
    rows = jnp.zeros((), jnp.uint32)
    for word in reversed(range(4)):
        # Long division, from the highest byte to the lowest. `rows` is the remainder so far, less than 2**24, so that
        # with another byte it still fits into 32 bits.
        for byte in (hash_words[..., word] >> 8, hash_words[..., word] & 0xFF):
            rows = ((rows << 8) + byte) % moduli
    offsets = np.cumsum([0, *primes[:-1]])
    return rows.reshape(tokens, -1).astype(jnp.int32) + jnp.asarray(offsets, jnp.int32)[None, :]


def _products(ids, multipliers):
    """Multiplies ids [T, n] uint32 by n numbers below 2**63; the products are below 2**63, too.

    Returns the four 16-bit words of each product, the low word first: [T, n, 4] uint32.
    """
    factors = np.array([[number >> 16 * i & 0xFFFF for number in multipliers] for i in range(4)], np.uint32)[:, None, :]
    # `columns[k]` adds up the terms that belong to word k of a product. The sums fit into 32 bits.
    columns = [jnp.zeros_like(ids) for _ in range(5)]
    for i, part in enumerate((ids & 0xFFFF, ids >> 16)):
        for j in range(4 - i):
            product = part * factors[j]
            columns[i + j] += product & 0xFFFF
            columns[i + j + 1] += product >> 16
    words = []
    carry = jnp.zeros_like(ids)
    for column in columns[:4]:
        total = column + carry
        words.append(total & 0xFFFF)
        carry = total >> 16
    return jnp.stack(words, axis=-1)
