"""Chunks: adjacent tokens of one request whose queries share the tiles of its keys."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_scores.key_tiles import KEYS, load_words
from pallas_kernels.indexer_scores.work_partition import LANES, latest_start


def run_bounds(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the first and one-past-last token of each token's run, the consecutive tokens of one request."""
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    changes = slots[1:] != slots[:-1]
    edge = jnp.ones((1,), bool)
    starts = jnp.where(jnp.concatenate([edge, changes]), tokens, 0)
    ends = jnp.where(jnp.concatenate([changes, edge]), tokens + 1, slots.shape[0])
    return lax.cummax(starts), lax.cummin(ends, reverse=True)


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The division of a call's tokens into chunks.

    A chunk has consecutive tokens of one request, in groups of `size` from the request's first token on. Its cost is
    the number of tiles that it sees times the number of its tokens.
    """

    slots: Any  # [T] int32 array, or within a kernel a reference to it
    positions: Any  # [T] int32 array, or within a kernel a reference to it
    size: int  # maximum number of tokens in a chunk
    compress_rate: int  # number of tokens per key
    max_keys: int  # maximum number of keys of a request

    def num_tiles(self, position: jax.Array) -> jax.Array:
        """Returns the number of tiles that hold the keys visible at a position."""
        keys = jnp.clip(lax.div(position + 1, self.compress_rate), 0, self.max_keys)
        return lax.div(keys + (KEYS - 1), KEYS)

    def costs(self) -> jax.Array:
        """Returns [T] int32, the cost of the chunk that starts at each token, or 0. For arrays, outside of kernels."""
        token = jnp.arange(self.slots.shape[0], dtype=jnp.int32)
        start, end = run_bounds(self.slots)
        count = jnp.where((token - start) % self.size == 0, jnp.minimum(end - token, self.size), 0)
        last = self.positions[jnp.maximum(token + count - 1, 0)]
        return jnp.where(self.slots >= 0, count * self.num_tiles(last), 0)

    def costs_of_lanes(self, first: jax.Array, run: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `costs` of the tokens first .. first + 31, one for each lane, [32] int32 in layout LANES.

        A run is the adjacent tokens of a request. `run` is the first token of the run that token `first - 1` is in;
        the second result is that of the run that token `first + 31` is in, for the next call.
        """
        tokens = self.slots.shape[0]

        def load(ref, token):
            return load_words(ref, jnp.clip(token, 0, tokens - 1), LANES)

        token = first + plgpu.broadcasted_iota(jnp.int32, (32,), 0, layout=LANES)
        slot = load(self.slots, token)
        is_first = (token == 0) | (slot != load(self.slots, token - 1))
        start, run = latest_start(jnp.where(is_first, token, -1), run)
        starts = (token < tokens) & (slot >= 0) & (lax.rem(token - start, self.size) == 0)
        count = jnp.ones_like(token)
        same = starts
        for i in range(1, self.size):
            same = same & (token + i < tokens) & (load(self.slots, token + i) == slot)
            count = jnp.where(same, i + 1, count)
        return jnp.where(starts, count * self.num_tiles(load(self.positions, token + count - 1)), 0), run

    def at(self, token: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the slot, the number of tokens and the number of tiles of the chunk that starts at a token."""
        tokens = self.slots.shape[0]
        slot = self.slots[token]
        count = jnp.int32(1)
        same = True
        for i in range(1, self.size):
            same &= (token + i < tokens) & (self.slots[jnp.minimum(token + i, tokens - 1)] == slot)
            count = jnp.where(same, i + 1, count)
        return slot, count, jnp.where(slot >= 0, self.num_tiles(self.positions[token + count - 1]), 0)
