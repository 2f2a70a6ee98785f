"""The configuration of Engram, DeepSeek-V4.1's embeddings of the last tokens' n-grams."""

import dataclasses
import functools
import math
from collections.abc import Sequence

from dsv4_jax.common.arguments import check, check_whole
from dsv4_jax.config.layer_spec import check_layers


# Maximum of `EngramConfig.vocab_size`. Hashes are reduced modulo primes by 32-bit arithmetic, a byte at a time, which
# needs primes below 2**24. The first 4096 primes from `MAX_SIZE` on are below 2**24, and no model may use more.
MAX_SIZE = 2**24 - 2**17


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngramConfig:
    """Engram: layers that look up embeddings by hashes of the last 2, 3, ... `max_ngram_size` tokens.

    Token ids are first mapped to compressed ids, which are equal for tokens that differ only in case, accents or
    blanks.

    Attributes:
      layer_ids: layers with Engram, ascending.
      num_embeddings: number of rows of each layer's table.
      max_ngram_size: largest number of tokens in an n-gram.
      vocab_size: minimum number of table rows for each hash. The numbers of rows are the first primes from this minimum
        on, see `primes`.
      n_heads: number of hashes, and so of rows, for each n-gram.
      head_dim: number of channels of a row.
      pad_token_id: token id that stands for the tokens before the start of a request.
      compressed_vocab_size: number of compressed ids.
    """

    layer_ids: tuple[int, ...]
    num_embeddings: tuple[int, ...]
    max_ngram_size: int
    vocab_size: int
    n_heads: int
    head_dim: int
    pad_token_id: int
    compressed_vocab_size: int

    @property
    def rows(self) -> int:
        """The number of rows that a token looks up in each table: `n_heads` for each size of n-gram."""
        return (self.max_ngram_size - 1) * self.n_heads

    @functools.cached_property
    def primes(self) -> tuple[tuple[int, ...], ...]:
        """The number of table rows for each hash: [layers][rows] prime numbers, ascending over both axes.

        The hashes of a layer are those of 2-grams for each head, then of 3-grams, and so on.
        """
        primes = []
        candidate = self.vocab_size
        while len(primes) < len(self.layer_ids) * self.rows:
            if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
                primes.append(candidate)
            candidate += 1
        return tuple(tuple(primes[i : i + self.rows]) for i in range(0, len(primes), self.rows))

    def resized(self, layer_ids: Sequence[int], vocab_size: int) -> "EngramConfig":
        """Returns the configuration with the given layers and `vocab_size`, and with the `num_embeddings` they need."""
        config = dataclasses.replace(self, layer_ids=tuple(layer_ids), vocab_size=vocab_size)
        return dataclasses.replace(config, num_embeddings=tuple(map(sum, config.primes)))

    def first_layers(self, count: int) -> "EngramConfig | None":
        """Returns the configuration of a model with only the first `count` layers; None if none of them has Engram."""
        layers = tuple(layer for layer in self.layer_ids if layer < count)
        tables = self.num_embeddings[: len(layers)]
        return dataclasses.replace(self, layer_ids=layers, num_embeddings=tables) if layers else None

    def check(self, num_hidden_layers: int, vocab_size: int) -> None:
        """Checks the values for a model with `num_hidden_layers` layers and a vocabulary of `vocab_size` tokens.

        Raises TypeError for a value that is not an integer, and ValueError for an impossible integer.
        """
        check_whole("engram_max_ngram_size", self.max_ngram_size, 2, 16)
        check_whole("engram_vocab_size", self.vocab_size, 2, MAX_SIZE)
        check_whole("engram_n_heads", self.n_heads, 1, 64)
        check_whole("engram_head_dim", self.head_dim, 1, 2**20)
        check_whole("engram_pad_token_id", self.pad_token_id, 0, vocab_size - 1)
        check_whole("engram_compressed_vocab_size", self.compressed_vocab_size, 1, vocab_size)
        num_primes = len(self.layer_ids) * self.rows
        check(
            num_primes <= 4096,
            f"engram_layer_ids and engram_n_heads ask for {num_primes} primes, they must be at most 4096",
        )
        check(bool(self.layer_ids), "engram_layer_ids=[] must ascend, and name a layer at least")
        check_layers("engram_layer_ids", self.layer_ids, num_hidden_layers)
        sizes = tuple(sum(primes) for primes in self.primes)
        check(max(sizes, default=0) < 2**31, f"engram_num_embeddings={list(sizes)} must be less than 2**31")
        check(
            tuple(self.num_embeddings) == sizes,
            f"engram_num_embeddings={list(self.num_embeddings)} must be {list(sizes)}: the sums of the primes from "
            f"engram_vocab_size={self.vocab_size} on, {self.rows} for each layer",
        )
