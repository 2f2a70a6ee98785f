"""Gathers of compressed entries, indexer scores, top-k."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from dsv4_jax import ops
from tests.ops.pools import DIM, FORMATS, INDEX, classical_view, decode, encode, indexer_view, ints, same_bytes


topk = jax.jit(ops.indexer_topk, static_argnums=2)


def filled(view, values):
    """The view after entries 0.. of every request were written."""
    slots = np.repeat(np.arange(values.shape[0]), values.shape[1])
    entries = np.tile(np.arange(values.shape[1]), values.shape[0])
    flat = jnp.asarray(values.reshape(-1, values.shape[-1]), jnp.bfloat16)
    write = jax.jit(lambda view, *args: view.write(*args))
    return write(view, ints(slots), ints(entries), jnp.ones(len(slots), bool), flat)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_gathers_return_what_was_written(fmt):
    values = np.random.default_rng(0).standard_normal((3, 13, DIM)).astype(jnp.bfloat16)
    view = filled(classical_view(fmt), values)
    stored = np.asarray(decode(view.codec, encode(view.codec, jnp.asarray(values)), jnp.bfloat16))
    indices = np.array([[0, 12, -1, 5], [3, 3, 1, -1], [-1, -1, -1, -1], [2, 0, 1, 4]])
    slots = [2, 0, 1, -1]
    got, valid = jax.jit(ops.gather_compressed_kv)(view, ints(indices), ints(slots))
    want_valid = (indices >= 0) & (np.array(slots) >= 0)[:, None]
    chex.assert_trees_all_equal(valid, want_valid)
    want = np.where(want_valid[..., None], stored[np.array(slots)[:, None], indices], 0)
    chex.assert_trees_all_equal(np.asarray(got), want)

    # The token at position 52 closes window 12: it sees 13 entries; position 2 sees none.
    gather_all = jax.jit(ops.gather_all_compressed_kv)
    got, valid = gather_all(view, ints([1, 0, 2, -1]), ints([52 - 1, 51 - 8, 2, -1]))
    chex.assert_trees_all_equal(np.asarray(valid).sum(1), np.array([13, 11, 0, 0]))
    chex.assert_trees_all_equal(np.asarray(got[0, :13]), stored[1])
    assert not np.asarray(got[0, 13:]).any() and not np.asarray(got[2:]).any()


def test_valid_lengths():
    chex.assert_trees_all_equal(ops.valid_lengths(ints([-1, 0, 2, 3, 4, 127]), 4), np.array([0, 0, 0, 1, 1, 32]))


@pytest.mark.parametrize("name", FORMATS)
def test_scores_equal_the_formula(name):
    fmt = FORMATS[name]
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((3, 12, INDEX)).astype(jnp.bfloat16)
    view = filled(indexer_view(fmt), keys)
    q = jnp.asarray(rng.standard_normal((5, 8, INDEX)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((5, 8)), jnp.float32)
    slots = [0, 2, 2, 1, -1]
    positions = [47, 2, 3, 30, -1]
    got = np.asarray(jax.jit(ops.indexer_scores)(view, q, weights, ints(slots), ints(positions)))
    stored = np.asarray(decode(view.codec, encode(view.codec, jnp.asarray(keys))), np.float64)
    rounded = np.asarray(jax.jit(view.codec.round_query)(q), np.float64)
    assert got.shape == (5, view.max_entries)
    for t, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        visible = (position + 1) // 4
        dots = np.maximum(np.einsum("hd,sd->hs", rounded[t], stored[slot, :visible]), 0)
        # float32 sums of 8 heads and 32 dims.
        chex.assert_trees_all_close(got[t, :visible], np.asarray(weights[t], np.float64) @ dots, rtol=1e-5, atol=1e-4)
        assert (got[t, visible:] == -np.inf).all()


def naive_topk(scores, lengths, k):
    out = np.full((len(scores), k), -1)
    for t, row in enumerate(scores):
        best = sorted((i for i in range(lengths[t]) if row[i] > -np.inf), key=lambda i: (-row[i], i))[:k]
        out[t, : len(best)] = sorted(best)
    return out


SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.0, np.inf, -np.inf]


@given(
    hnp.arrays(np.float32, st.tuples(st.just(3), st.integers(1, 40)), elements=st.sampled_from(SPECIAL)),
    st.lists(st.integers(0, 40), min_size=3, max_size=3),
    st.sampled_from([1, 4, 17]),
)
@settings(max_examples=40, deadline=None)
def test_topk_breaks_ties_by_index(scores, lengths, k):
    """Zeros of both signs are equal, subnormals differ from them, also where a CPU's comparisons flush them."""
    lengths = np.minimum(lengths, scores.shape[1])
    behind = np.arange(scores.shape[1])[None, :] >= lengths[:, None]
    unwritten = np.where(behind, np.float32("nan"), scores)
    chex.assert_trees_all_equal(topk(jnp.asarray(unwritten), ints(lengths), k), naive_topk(scores, lengths, k))


@pytest.mark.parametrize("row", [np.zeros(300), np.ones(300), np.arange(300.0), -np.arange(300.0), np.eye(300)[77]])
def test_topk_of_adversarial_rows(row):
    scores = row.astype(np.float32)[None]
    chex.assert_trees_all_equal(topk(jnp.asarray(scores), ints([300]), 64), naive_topk(scores, [300], 64))


def test_topk_pads_with_minus_one_when_the_row_is_short():
    got = topk(jnp.asarray([[1.0, 2.0, 9.0]], jnp.float32), ints([2]), 4)
    chex.assert_trees_all_equal(got, np.array([[0, 1, -1, -1]]))


def test_writes_to_other_layers_are_not_seen():
    fmt = FORMATS["v4"]
    view = classical_view(fmt, layer=0)
    new = filled(view, np.ones((3, 2, DIM), jnp.bfloat16))
    same_bytes(jax.tree.map(lambda x: x[1], view.rows), jax.tree.map(lambda x: x[1], new.rows))
