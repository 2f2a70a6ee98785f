"""sparse_attention against a float64 softmax over what the cache holds."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from tests.ops.pools import DIM, FORMATS, classical_view, ints, swa_view
from tests.ops.test_gather_and_indexer import filled


attention = jax.jit(ops.sparse_attention)
append = jax.jit(ops.append_swa)
HEADS = 4


def softmax_attention(q, rows, sinks):
    q, rows, sinks = (np.asarray(x, np.float64) for x in (q, rows, sinks))
    scores = q @ rows.T * q.shape[-1] ** -0.5
    top = np.maximum(scores.max(1, initial=-np.inf), sinks)[:, None]
    weights = np.exp(scores - top)
    return weights @ rows / (weights.sum(1, keepdims=True) + np.exp(sinks[:, None] - top))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("case", ["sliding", "indices", "all"])
def test_one_softmax_over_window_entries_and_sink(name, case):
    fmt = FORMATS[name]
    rng = np.random.default_rng(5)
    kv = jnp.asarray(rng.standard_normal((40, DIM)), jnp.bfloat16)
    window = swa_view(fmt)
    for p in range(40):
        window = append(window, kv[p : p + 1], ints([2]), ints([p]))
    entries = rng.standard_normal((3, 10, DIM)).astype(jnp.bfloat16)
    compressed = None if case == "sliding" else filled(classical_view(fmt), entries)
    # Entry 9's tokens also stand in the window: both count.
    indices = ints([[9, 0, 4, -1], [-1] * 4, [-1] * 4]) if case == "indices" else None
    dtype = jnp.float32 if name == "plain" else jnp.bfloat16
    q = jnp.asarray(rng.standard_normal((3, HEADS, DIM)), dtype)
    sinks = jnp.asarray([0.5, -1.0, 3.0, 200.0], jnp.float32)
    slots = ints([2, -1, 1])
    positions = ints([39, -1, 0])
    window = dataclasses.replace(window, rows=jax.tree.map(lambda x: x.at[1, 1, 0].set(0), window.rows))
    out = np.asarray(attention(q, sinks, ops.AttentionKV(window, compressed, indices), slots, positions))

    rows, valid = ops.gather_swa_kv(window, slots, positions, dtype=dtype)
    rows = np.asarray(rows)[0]
    if case == "indices":
        more = ops.gather_compressed_kv(compressed, indices, slots, dtype=dtype)[0]
        rows = np.concatenate([rows, np.asarray(more)[0, :3]])
    if case == "all":
        more = ops.gather_all_compressed_kv(compressed, slots, positions, dtype=dtype)[0]
        rows = np.concatenate([rows, np.asarray(more)[0, :10]])
    # float32: rounding of sums; bfloat16: probabilities and the result are rounded to 8 bits.
    tolerance = dict(rtol=1e-5, atol=1e-5) if name == "plain" else dict(rtol=2**-6, atol=2**-7)
    np.testing.assert_allclose(out[0], softmax_attention(q[0], rows, sinks), **tolerance)
    assert not out[1].any(), "padding gives zeros"
    assert not np.isnan(out).any(), "poisoned rows are never read"


def test_a_sink_far_below_does_not_divide_by_zero():
    fmt = FORMATS["v4"]
    q = jnp.ones((1, HEADS, DIM), jnp.bfloat16)
    sinks = jnp.full((HEADS,), -500.0)
    kv = ops.AttentionKV(swa_view(fmt), classical_view(fmt), ints([[-1] * 4]))
    out = attention(q, sinks, kv, ints([-1]), ints([-1]))
    assert not np.asarray(out).any()


def test_many_queries_equal_the_same_queries_alone():
    """Query blocks change nothing: rows of another request never enter."""
    fmt = FORMATS["v4"]
    rng = np.random.default_rng(6)
    compressed = filled(classical_view(fmt), rng.standard_normal((3, 10, DIM)).astype(jnp.bfloat16))
    new_kv = jnp.asarray(rng.standard_normal((70, DIM)), jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((70, HEADS, DIM)), jnp.bfloat16)
    sinks = jnp.zeros((HEADS,))
    slots = ints([0] * 35 + [1] * 35)
    positions = ints([*range(35), *range(35)])
    kv = ops.AttentionKV(swa_view(fmt), compressed, new_kv=new_kv)
    both = attention(q, sinks, kv, slots, positions)
    for half in (slice(0, 35), slice(35, 70)):
        own = dataclasses.replace(kv, new_kv=new_kv[half])
        alone = attention(q[half], sinks, own, slots[half], positions[half])
        # The same sums over the same rows; a block of another size may be summed in another order (float32, then
        # rounded to bfloat16: at most one step of values below 4).
        chex.assert_trees_all_close(
            np.asarray(both[half], np.float32), np.asarray(alone, np.float32), rtol=1e-7, atol=2**-7
        )
