"""append_swa and gather_swa_kv."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsv4_jax import ops
from tests.ops.pools import DIM, FORMATS, ints, same_bytes, swa_view


append = jax.jit(ops.append_swa)
gather = jax.jit(ops.gather_swa_kv, static_argnames="dtype")


def tokens(plan, starts):
    """(slots, positions) of one call with `plan[slot]` tokens a request."""
    slots = [s for s, n in enumerate(plan) for _ in range(n)]
    positions = [starts[s] + i for s, n in enumerate(plan) for i in range(n)]
    return slots, positions


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@given(calls=st.lists(st.tuples(*[st.sampled_from([0, 1, 2, 5, 20])] * 3), max_size=8))
@settings(max_examples=15, deadline=None)
def test_bytes_do_not_depend_on_the_calls(fmt, calls):
    """Any split into calls, with padding between, leaves the bytes that single tokens leave."""
    total = [20, 3, 11]
    values = np.random.default_rng(7).standard_normal((3, 20, DIM)).astype(jnp.bfloat16)
    one = swa_view(fmt)
    split = swa_view(fmt)
    for p in range(20):
        live = [s for s in range(3) if p < total[s]]
        pad = [-1] * (3 - len(live))
        one = append(one, jnp.asarray(values[live + [0] * len(pad), p]), ints(live + pad), ints([p] * len(live) + pad))
    at = [0, 0, 0]
    for call in [*calls, total]:
        plan = [min(n, total[s] - at[s]) for s, n in enumerate(call)]
        slots, positions = tokens(plan, at)
        pad = [-1] * (34 - len(slots))
        kv = np.concatenate([values[slots, positions], np.ones((len(pad), DIM), jnp.bfloat16)])
        split = append(split, jnp.asarray(kv), ints(slots + pad), ints(positions + pad))
        at = [a + n for a, n in zip(at, plan, strict=True)]
    same_bytes(one, split)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_rows_stand_at_position_modulo_ring_and_nothing_else_changes(fmt):
    view = swa_view(fmt, ring=5)
    kv = jnp.asarray(np.random.default_rng(0).standard_normal((7, DIM)), jnp.bfloat16)
    new = append(view, kv, ints([2, 2, 2, 2, 2, 2, -1]), ints([11, 12, 13, 14, 15, 16, -1]))
    expected = view.codec.encode(kv)
    for before, after, rows in zip(*map(jax.tree.leaves, (view.rows, new.rows, expected)), strict=True):
        want = np.array(before)
        for token, position in enumerate(range(11, 17)):
            if position >= 12:  # a ring of 5 keeps the last 5
                want[1, 2, position % 5] = np.asarray(rows)[token]
        same_bytes(want, after)


def test_padding_writes_nothing():
    for fmt in FORMATS.values():
        view = swa_view(fmt)
        kv = jnp.ones((4, DIM), jnp.bfloat16)
        same_bytes(view, append(view, kv, ints([-1, -1, 0, 1]), ints([-1, 3, -1, -1])))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("position", [0, 2, 7, 8, 30])
def test_window_is_the_last_tokens_oldest_first(fmt, position):
    kv = jnp.asarray(np.random.default_rng(1).standard_normal((31, DIM)), jnp.bfloat16)
    view = swa_view(fmt, ring=10)
    for p in range(position + 1):
        view = append(view, kv[p : p + 1], ints([1]), ints([p]))
    got, valid = gather(view, ints([1, -1]), ints([position, -1]), dtype=jnp.bfloat16)
    stored = np.asarray(view.codec.decode(view.codec.encode(kv), jnp.bfloat16))
    count = min(position + 1, 8)
    chex.assert_trees_all_equal(valid[0], np.arange(8) >= 8 - count)
    chex.assert_trees_all_equal(got[0, 8 - count :], stored[position + 1 - count : position + 1])
    assert not np.asarray(got[0, : 8 - count]).any()
    assert not np.asarray(valid[1]).any() and not np.asarray(got[1]).any()


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_windows_of_a_prefill_call_equal_those_read_back_one_by_one(fmt):
    """[ring | this call's rows] shows every token what a ring written token by token would show it."""
    kv = jnp.asarray(np.random.default_rng(2).standard_normal((25, DIM)), jnp.bfloat16)
    view = swa_view(fmt)
    windows = []
    for p in range(25):
        if p == 5:
            at_five = view
        view = append(view, kv[p : p + 1], ints([0]), ints([p]))
        windows.append(gather(view, ints([0]), ints([p]), dtype=jnp.bfloat16))
    slots = ints([0] * 20 + [-1])
    positions = ints([*range(5, 25), -1])
    new_kv = jnp.concatenate([kv[5:], kv[:1]])
    got, valid = gather(at_five, slots, positions, new_kv=new_kv, dtype=jnp.bfloat16)
    chex.assert_trees_all_equal(got[:20], np.concatenate([w[0] for w in windows[5:]]))
    chex.assert_trees_all_equal(valid[:20], np.concatenate([w[1] for w in windows[5:]]))
    assert not np.asarray(valid[20]).any()


def test_unknown_and_missing_implementations_are_refused():
    view = swa_view(FORMATS["v4"])
    call = functools.partial(ops.append_swa, view, jnp.ones((1, DIM), jnp.bfloat16), ints([0]), ints([0]))
    with pytest.raises(ValueError, match="fastest.*is not known"):
        call(implementation="fastest")
    with pytest.raises(NotImplementedError, match="append_swa cannot run as 'mosaic_gpu'"):
        call(implementation="mosaic_gpu")
    same_bytes(call(), call(implementation="xla"))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float16])
@pytest.mark.usefixtures("untyped")
def test_rows_that_no_codec_takes_are_refused(dtype):
    args = jnp.zeros((1, DIM), dtype), ints([0]), ints([0])
    with pytest.raises(TypeError, match=f"kv has dtype {jnp.dtype(dtype)}, it must be bfloat16 or float32"):
        ops.append_swa(swa_view(FORMATS["v4"]), *args)
