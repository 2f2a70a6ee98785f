"""Candidate blocks, against their definition token by token, and selections within them."""

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops


ENTRIES = 45
COUNT = 4
TOPK = 7


def expected_blocks(scores, length, size):
    """The newest block and the best others, of equal ones the first, by one token's scores."""
    number = -(-length // size)
    best = [max(scores[block * size : min((block + 1) * size, length)]) for block in range(number)]
    others = sorted(range(number - 1), key=lambda block: (-best[block], block))
    return sorted([*others[: COUNT - 1], *([number - 1] if number else [])])


@pytest.mark.parametrize("size", [1, 4, 8])
def test_blocks_and_selections_within_them(size):
    rng = np.random.default_rng(size)
    # Few different scores, so that many blocks and entries are equal.
    scores = rng.integers(-3, 4, (60, ENTRIES)).astype(np.float32)
    lengths = np.concatenate([[0, 1, size, ENTRIES], rng.integers(0, ENTRIES + 1, 56)]).astype(np.int32)
    blocks = ops.candidate_blocks(jnp.asarray(scores), jnp.asarray(lengths), COUNT, size, ops.indexer_topk)
    own = jnp.asarray(rng.integers(-3, 4, scores.shape).astype(np.float32))
    is_chosen = np.zeros((len(scores), -(-ENTRIES // size) + 1), bool)
    np.put_along_axis(is_chosen, np.asarray(blocks), True, axis=1)  # -1 sets the last column, which is left out below
    masked = jnp.where(np.repeat(is_chosen, size, axis=1)[:, :ENTRIES], own, -jnp.inf)
    selected = np.asarray(ops.indexer_topk(masked, jnp.asarray(lengths), TOPK))
    entries = np.asarray(ops.candidate_entries(blocks, size))
    counts = ops.candidate_lengths(jnp.asarray(lengths), COUNT, size)
    gathered = jnp.take_along_axis(own, jnp.maximum(entries, 0), axis=1)
    by_gathering = ops.entries_at(ops.indexer_topk(gathered, counts, TOPK), blocks, size)
    chex.assert_trees_all_equal(by_gathering, selected)
    for t, length in enumerate(lengths):
        wanted = expected_blocks(scores[t], length, size)
        chex.assert_trees_all_equal(np.asarray(blocks[t]), np.array(wanted + [-1] * (COUNT - len(wanted)), np.int32))
        inside = [entry for block in wanted for entry in range(block * size, (block + 1) * size)]
        assert entries[t][entries[t] >= 0].tolist() == inside
        assert np.flatnonzero((entries[t] >= 0) & (entries[t] < length)).tolist() == [*range(counts[t])]
        visible = sorted((-float(own[t, e]), e) for e in inside if e < length)[:TOPK]
        assert selected[t][selected[t] >= 0].tolist() == sorted(e for _, e in visible)


def test_the_newest_block_is_one_of_the_device_that_holds_it():
    """Another device, on which all its entries score -inf, must not offer it, too."""
    scores = jnp.full((1, 8), -jnp.inf).at[0, :4].set(1.0)
    blocks = ops.candidate_blocks(scores, jnp.array([8]), 2, 4, ops.indexer_topk)
    chex.assert_trees_all_equal(blocks, jnp.array([[0, -1]], jnp.int32))
