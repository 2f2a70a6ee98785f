"""A model whose next token depends on the newest one only: log-probabilities are known, and programs compile fast."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tests.host.managers import CONFIG


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bigram:
    """The logits after a token are its row of a table [vocab, vocab]."""

    table: Any

    def __call__(self, cache, batch):
        return self.table[batch.token_ids], cache.begin_step(batch)

    def logits(self, hidden):
        return hidden


TABLE = (2 * np.random.default_rng(0).standard_normal((CONFIG.vocab_size,) * 2)).astype(np.float32)
TABLE[7, 20] = TABLE[7, 90] = 9  # of equals the lowest comes first
MODEL = Bigram(jnp.asarray(TABLE))
LOGPROBS = TABLE - np.log(np.exp(TABLE.astype(np.float64)).sum(axis=1, keepdims=True))


def check(tokens, logprobs, top):
    """Compares what was found for all tokens [n + 1] but the first with the table."""
    before = np.asarray(tokens[:-1])
    rows = np.arange(len(tokens) - 1)
    # Sums of 160 exponentials in float32.
    chex.assert_trees_all_close(np.asarray(logprobs), LOGPROBS[before, tokens[1:]], rtol=0, atol=1e-5)
    best = np.argsort(-TABLE[before], axis=1, kind="stable")[:, : top.ids.shape[1]]
    chex.assert_trees_all_equal(np.asarray(top.ids), best)
    chex.assert_trees_all_close(np.asarray(top.logprobs), LOGPROBS[before[:, None], best], rtol=0, atol=1e-5)
    # To the bit: the drawn token's own number is the one that stands in the list.
    if top.ids.shape[1]:
        mine = top.ids == np.asarray(tokens[1:])[:, None]
        chex.assert_trees_all_equal(np.asarray(top.logprobs)[mine], np.asarray(logprobs)[rows[mine.any(axis=1)]])


class BigramDrafts:
    """The drafts of a `DraftingBigram`: its own choices after even tokens, and wrong ones after odd tokens."""

    def write(self, model, streams, cache, batch):
        return cache

    def draft(self, model, streams, cache, batch, draw, count):
        tokens = [batch.token_ids]
        logits = []
        for i in range(count):
            odd = tokens[-1] % 2 == 1
            logits.append(model.logits(model.hidden(jnp.where(odd, -1, 1) * (tokens[-1] + 1))))
            tokens.append(draw(logits[-1], batch.positions + 1 + i))
        return jnp.stack(tokens[1:], axis=1), jnp.stack(logits, axis=1), None, cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftingBigram(Bigram):
    """A model of one's own with the attribute `drafts`."""

    @property
    def drafts(self):
        return BigramDrafts()

    def forward_streams(self, cache, batch):
        hidden = self.hidden(batch.token_ids + 1)
        streams = jnp.zeros((len(hidden), cache.streams.shape[-1] // CONFIG.hidden_size, CONFIG.hidden_size))
        return hidden, streams.astype(cache.streams.dtype), cache.begin_step(batch)

    def hidden(self, rows):
        return jnp.zeros((len(rows), CONFIG.hidden_size)).at[:, 0].set(rows.astype(jnp.float32))

    def logits(self, hidden):
        row = hidden[:, 0].astype(jnp.int32)
        return jnp.sign(hidden[:, :1]) * self.table[jnp.abs(row) - 1]
