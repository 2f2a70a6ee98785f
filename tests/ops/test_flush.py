"""flush: pooling, rounding points, scatter, rotation by arithmetic."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsv4_jax import ops
from dsv4_jax.quant import PlainKeys, PlainRows
from tests.ops.pools import DIM, FORMATS, INDEX, classical_view, indexer_view, ints, same_bytes, state_view


@functools.partial(jax.jit, static_argnames="dtype")
def flush(*compressor_and_tokens, dtype):
    *compressor, slots, positions = compressor_and_tokens
    return ops.flush([ops.CompressorInputs(*compressor)], slots, positions, dtype=dtype)[0]


EPS = 1e-6
TOTAL = [41, 17, 33]
KINDS = {"csa": (4, True), "hca": (16, False), "index": (4, True)}


def setup(kind, fmt, spare=0):
    rate, overlap = KINDS[kind]
    dim = INDEX if kind == "index" else DIM
    state = state_view(rate=rate, overlap=overlap, dim=dim, spare=spare)
    pool = indexer_view(fmt) if kind == "index" else classical_view(fmt, rate=rate)
    rng = np.random.default_rng(3)
    width = state.kv.shape[-1]
    weights = ops.CompressorWeights(
        jnp.asarray(rng.standard_normal((rate, width)), jnp.float32),
        jnp.asarray(rng.uniform(0.5, 1.5, dim), jnp.float32),
        jnp.asarray(1.0 / 10000 ** (np.arange(0, 16, 2) / 16), jnp.float32),
        EPS,
    )
    inputs = rng.standard_normal((2, 3, 41, width)).astype(np.float32)
    return state, pool, weights, inputs


def feed(state, pool, weights, inputs, plan, at, size):
    # "plain" holds float32 as it is: its bytes show every last bit of the sums.
    dtype = jnp.float32 if isinstance(pool.codec, PlainRows | PlainKeys) else jnp.bfloat16
    slots = [s for s, n in enumerate(plan) for _ in range(n)]
    positions = [at[s] + i for s, n in enumerate(plan) for i in range(n)]
    pad = [-1] * (size - len(slots))
    kv, gate = np.concatenate([inputs[:, slots, positions], np.full((2, len(pad), inputs.shape[-1]), 7.0)], axis=1)
    return flush(
        state, pool, *map(jnp.asarray, (kv.astype(np.float32), gate.astype(np.float32))), weights,
        ints(slots + pad), ints(positions + pad), dtype=dtype,
    )  # fmt: skip


def one_by_one(state, pool, weights, inputs):
    for p in range(max(TOTAL)):
        plan = [int(p < n) for n in TOTAL]
        state, pool = feed(state, pool, weights, inputs, plan, [p] * 3, 3)
    return state, pool


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@given(calls=st.lists(st.tuples(*[st.sampled_from([0, 1, 3, 4, 16, 41])] * 3), max_size=8))
@settings(max_examples=6, deadline=None)
def test_bytes_do_not_depend_on_the_calls(kind, fmt, calls):
    """Requests at different phases, any split into calls: the same entries, keys and states, bit for bit."""
    state, pool, weights, inputs = setup(kind, fmt)
    expected = one_by_one(state, pool, weights, inputs)
    at = [0, 0, 0]
    for call in [*calls, TOTAL]:
        plan = [min(n, TOTAL[s] - at[s]) for s, n in enumerate(call)]
        state, pool = feed(state, pool, weights, inputs, plan, at, 96)
        at = [a + n for a, n in zip(at, plan, strict=True)]
    same_bytes(expected, (state, pool))


@pytest.mark.parametrize("kind", KINDS)
def test_spare_rows_change_no_entry(kind):
    """A longer ring (room to rewind) holds more tokens and gives the same entries."""
    state, pool, weights, inputs = setup(kind, FORMATS["v4"])
    longer = setup(kind, FORMATS["v4"], spare=3)[0]
    same_bytes(one_by_one(state, pool, weights, inputs)[1], one_by_one(longer, pool, weights, inputs)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_rotation_equals_copy_and_clear(kind):
    """The ring's rows are those of the released model's state, which copies the current window back."""
    rate, overlap = KINDS[kind]
    state, pool, weights, inputs = setup(kind, FORMATS["v4"])
    rows = 2 * rate if overlap else rate
    explicit = np.zeros((2, 3, rows, inputs.shape[-1]), np.float32)
    explicit[1] = -np.inf
    bias = np.asarray(weights.position_bias)
    for p in range(max(TOTAL)):
        state, pool = feed(state, pool, weights, inputs, [int(p < n) for n in TOTAL], [p] * 3, 3)
        for slot in range(3):
            if p < TOTAL[slot]:
                row = (rate if overlap else 0) + p % rate
                explicit[:, slot, row] = inputs[0, slot, p], inputs[1, slot, p] + bias[p % rate]
                if overlap and (p + 1) % rate == 0:
                    explicit[:, slot, :rate] = explicit[:, slot, rate:]
    ring = np.stack([np.asarray(state.kv[1]), np.asarray(state.gate[1])])
    for slot, length in enumerate(TOTAL):
        for p in range(length // rate * rate, length):
            chex.assert_trees_all_equal(ring[:, slot, p % rows], explicit[:, slot, rows - rate + p % rate])
        if overlap:
            for p in range(length // rate * rate - rate, length // rate * rate):
                chex.assert_trees_all_equal(ring[:, slot, p % rows], explicit[:, slot, p % rate])


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_entries_equal_the_formula(kind):
    """Against float64, stored as "plain" without rounding to bfloat16."""
    rate, overlap = KINDS[kind]
    state, pool, weights, inputs = setup(kind, FORMATS["plain"])
    pool = one_by_one(state, pool, weights, inputs)[1]
    parameters = weights.position_bias, weights.norm_weight, weights.inv_freq
    bias, norm, inv_freq = (np.asarray(x, np.float64) for x in parameters)
    for slot, length in enumerate(TOTAL):
        for i in range(length // rate):
            where = range(max(0, (i - overlap) * rate), (i + 1) * rate)
            kv = np.stack([inputs[0, slot, p] for p in where]).astype(np.float64)
            gate = np.stack([inputs[1, slot, p] + bias[p % rate] for p in where])
            if overlap:  # first half of the channels of the previous window, second half of this one
                own = np.arange(len(kv)) >= len(kv) - rate
                kv, gate = (np.where(own[:, None], x[:, DIM:], x[:, :DIM]) for x in (kv, gate))
            weight = np.exp(gate - gate.max(0))
            c = ((weight / weight.sum(0)) * kv).sum(0)
            e = norm * c / np.sqrt((c * c).mean() + EPS)
            angle = i * rate * inv_freq
            even = e[-16::2].copy()
            odd = e[-15::2].copy()
            cos = np.cos(angle)
            sin = np.sin(angle)
            e[-16::2] = even * cos - odd * sin
            e[-15::2] = even * sin + odd * cos
            block = int(pool.block_table[slot, i // (16 // rate)])
            row = i % (16 // rate)
            got = np.concatenate([np.asarray(x[1, block, row]) for x in (pool.rows.nope, pool.rows.rope)])
            # float32 sums and functions, each within a few units in the last place.
            chex.assert_trees_all_close(got, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_two_halves_are_flush(kind, fmt):
    """`pool_windows`, then `write_entries`: what models need that make index keys from the pooled vectors."""
    state, pool, weights, inputs = setup(kind, fmt, spare=1)
    dtype = jnp.float32 if isinstance(pool.codec, PlainRows | PlainKeys) else jnp.bfloat16
    tokens = 19
    pad = 2
    kv, gate = (jnp.asarray(np.pad(x[1, :tokens], ((0, pad), (0, 0)))) for x in inputs)
    slots = ints([1] * tokens + [-1] * pad)
    positions = ints([*range(tokens)] + [-1] * pad)
    closed, new_state = jax.jit(ops.pool_windows, static_argnames="dtype")(
        state, kv, gate, weights, slots, positions, dtype=dtype
    )
    closes = [p // pool.compress_rate for p in range(tokens) if (p + 1) % pool.compress_rate == 0]
    assert [e for e in closed.entries.tolist() if e >= 0] == closes
    new_pool = jax.jit(ops.write_entries)(pool, closed, weights.inv_freq)
    same_bytes((new_state, new_pool), flush(state, pool, kv, gate, weights, slots, positions, dtype=dtype))


def test_padding_missing_blocks_and_positions_past_the_table_write_nothing():
    state, pool, weights, inputs = setup("csa", FORMATS["v4"])
    pool_without = classical_view(FORMATS["v4"], table=[[-1] * 4] * 3)
    kv = jnp.asarray(inputs[0, 0, :8])
    gate = jnp.asarray(inputs[1, 0, :8])
    new_state, new_pool = flush(
        state, pool_without, kv, gate, weights, ints([0] * 8), ints(range(8)), dtype=jnp.bfloat16
    )
    same_bytes(pool_without, new_pool)
    far = ints(range(64, 72))  # four blocks of 16 tokens end at 63
    same_bytes(pool, flush(state, pool, kv, gate, weights, ints([0] * 8), far, dtype=jnp.bfloat16)[1])
    none = ints([-1] * 8)
    same_bytes((state, pool), flush(state, pool, kv, gate, weights, none, none, dtype=jnp.bfloat16))


def test_a_new_request_sees_nothing_of_the_slots_old_owner():
    """Poisoned states and a zeroed one give the same entries: no row is read before its request writes it."""
    state, pool, weights, inputs = setup("csa", FORMATS["v4"])
    clean = jax.tree.map(jnp.zeros_like, state)
    same_bytes(one_by_one(state, pool, weights, inputs)[1], one_by_one(clean, pool, weights, inputs)[1])
