"""Candidate blocks: one layer chooses blocks of entries, and later layers select entries within these blocks (V4.1)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.views import int_range


def candidate_blocks(
    scores: Float[Array, "T E"],
    lengths: Int[Array, "T"],
    count: int,
    block_size: int,
    topk: Callable[[Float[Array, "T N"], Int[Array, "T"], int], Int[Array, "T count"]],
) -> Int[Array, "T count"]:
    """Chooses the blocks of consecutive entries with the highest scores, and always the newest block.

    The score of a block is the largest score of its visible entries (docs/dsv41.md 4).

    Args:
      scores: [T, E] float32 scores of entries; -inf for entries that lie on other devices.
      lengths: [T] int32 number of visible entries of each token.
      count: number of blocks to choose.
      block_size: number of entries in a block.
      topk: `indexer_topk`, or `topk_of_shards` if entries lie on several devices.

    Returns:
      [T, count] int32 indices of blocks in ascending order, then -1 if fewer blocks have visible entries.
    """
    tokens, entries = scores.shape
    num_blocks = (lengths + block_size - 1) // block_size
    entry = int_range(entries)[None, :]
    # The newest block's score becomes inf, but only on devices that hold entries of it. XLA fuses all these operations
    # into the loop of the maximum, so that scores are read once.
    is_newest = (entry >= (num_blocks[:, None] - 1) * block_size) & (scores > -jnp.inf)
    scores = jnp.where(is_newest, jnp.inf, scores)
    scores = jnp.where(entry < lengths[:, None], scores, -jnp.inf)
    padded = jnp.pad(scores, ((0, 0), (0, -entries % block_size)), constant_values=-jnp.inf)
    return topk(jnp.max(padded.reshape(tokens, -1, block_size), axis=2), num_blocks, count)


def candidate_lengths(lengths: Int[Array, "T"], count: int, block_size: int) -> Int[Array, "T"]:
    """Returns the number of visible entries in the blocks that `candidate_blocks` returns, [T] int32.

    Visible entries come first among the entries of these blocks: all entries of a block are visible, except in the
    newest block, which is the last one. This requires that the block table has blocks for all visible entries.

    Args:
      lengths: [T] int32 number of visible entries of each token.
      count: number of blocks.
      block_size: number of entries in a block.
    """
    return jnp.minimum(lengths, (count - 1) * block_size + (lengths - 1) % block_size + 1)


def entries_at(indices: Int[Array, "T k"], blocks: Int[Array, "T count"], block_size: int) -> Int[Array, "T k"]:
    """Converts indices of entries within the chosen blocks to indices within the token's request; -1 stays -1.

    Args:
      indices: [T, k] int32 indices on the last axis of `candidate_entries(blocks, block_size)`.
      blocks: [T, count] int32 indices of blocks.
      block_size: number of entries in a block.
    """
    block = jnp.take_along_axis(blocks, jnp.maximum(indices, 0) // block_size, axis=1)
    return jnp.where(indices >= 0, block * block_size + indices % block_size, -1)


def candidate_entries(blocks: Int[Array, "*T count"], block_size: int) -> Int[Array, "*T n"]:
    """Returns the indices of the entries in blocks: [..., count * block_size] int32; -1 for entries of the block -1.

    `blocks` is [..., count] int32, indices of blocks; -1 = no block.
    """
    offsets = jax.lax.broadcasted_iota(jnp.int32, (*blocks.shape, block_size), blocks.ndim)
    entries = jnp.where(blocks[..., None] >= 0, blocks[..., None] * block_size + offsets, -1)
    return entries.reshape(*blocks.shape[:-1], -1)
