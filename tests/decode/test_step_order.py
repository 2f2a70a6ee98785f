"""A batch runs on the cache that it was prepared for, or is refused before anything is launched."""

import gc
import re
import weakref

import chex
import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.decode import CompiledModel, decode_loop, decode_step, forward, program_store, sample_step
from dsv4_jax.decode.program_store import FOLDER
from dsv4_jax.host import PrefixCache, offload, resume, step_order
from tests.decode.bigram import MODEL
from tests.host.managers import BLOCK, make


SEEDS = jnp.zeros(4, jnp.uint32)


def loop(model, cache, batch):
    return decode_loop(model, cache, batch, SEEDS, steps=1)


def run(cache, *batches):
    for batch in batches:
        _, cache = decode_step(MODEL, cache, batch)
    return cache


def refused(match, cache, batch, step=decode_step):
    """Checks that a batch is refused and the cache stays; returns the error's text."""
    with pytest.raises(ValueError, match=match) as error:
        step(MODEL, cache, batch)
    assert not any(x.is_deleted() for x in jax.tree.leaves(cache))
    return str(error.value)


def same(cache, manager, other, other_manager):
    """Checks that two caches hold the same requests."""
    chex.assert_trees_all_equal((cache.lengths, cache.block_table), (other.lengths, other.block_table))
    chex.assert_trees_all_equal(manager.block_table, other_manager.block_table)
    assert [manager.length(s) for s in manager.slots] == [other_manager.length(s) for s in other_manager.slots]


@pytest.mark.parametrize(
    ("step", "max_query_tokens", "earlier"), ((forward, 1, 0), (decode_step, 1, 5), (sample_step, 3, 5), (loop, 3, 0))
)
def test_a_dropped_batch_is_missed_and_taken_back(step, max_query_tokens, earlier):
    """The dropped batch opens a block, and is the request's first one if there were no earlier tokens."""
    manager, other = (make(max_query_tokens=max_query_tokens) for _ in range(2))
    caches = []
    for m in (manager, other):
        slots = [m.admit(), m.admit()]
        cache = m.init_cache()
        caches.append(run(cache, m.prepare_forward({s: [1] * earlier for s in slots})) if earlier else cache)
    cache = caches[0]
    tokens = {0: [4] * (BLOCK + 2), 1: [4]}
    manager.prepare_forward(tokens)  # dropped
    batch = manager.prepare_forward({0: [4], 1: [4]})
    advice = refused("has not run on this cache", cache, batch, step)
    for slot, n in re.findall(r"manager\.rewind\((\d), (\d+)\)", advice):
        manager.rewind(int(slot), int(n))
    assert manager.length(0) == manager.length(1) == earlier
    refused("taken back", cache, batch, step)
    prefill = decode_step if step is loop else step  # the loop takes no prompts
    (_, cache), (_, expected) = (
        prefill(MODEL, c, m.prepare_forward(tokens)) for c, m in ((cache, manager), (caches[1], other))
    )
    same(cache, manager, expected, other)


def test_a_batch_runs_once_and_in_its_turn():
    manager = make()
    slot = manager.admit()
    cache = manager.init_cache()
    first, second, third = (manager.prepare_forward({slot: [4]}) for _ in range(3))
    refused("has not run", cache, second)
    copy = jax.tree.map(jnp.copy, cache)
    cache = run(cache, first)
    refused("already run this batch", cache, first)
    refused("has not run", cache, third)
    cache = run(cache, second, third)
    refused("prepared after it", cache, second)
    # Copies are unknown, so that a benchmark can run one batch many times; an empty cache is known.
    copy = run(copy, second)
    assert copy.lengths[slot] == run(manager.init_cache(), first).lengths[slot] + 1
    refused("already run this batch", copy, second)  # from then on, what it ran is known
    refused("has not run", manager.init_cache(), third)


def test_a_batch_of_another_manager():
    manager = make()
    other = make()
    batch = other.prepare_forward({other.admit(): [4]})
    refused("two managers", manager.init_cache(), batch)
    with pytest.raises(ValueError, match="another manager"):
        manager.fork(other.init_cache(), manager.admit(), 1)


def test_batches_of_released_requests():
    manager = make()
    slot = manager.admit()
    cache = manager.init_cache()
    batch = manager.prepare_forward({slot: [4]})
    manager.release(slot)
    refused("was released", cache, batch)
    assert manager.admit() == slot
    refused("was released", cache, batch)
    assert run(cache, manager.prepare_forward({slot: [4, 5]})).lengths[slot] == 2


def test_only_all_tokens_that_did_not_run_come_back():
    manager = make(max_query_tokens=1)
    slot = manager.admit()
    cache = run(manager.init_cache(), manager.prepare_forward({slot: [4, 5, 6]}))
    manager.prepare_forward({slot: [7, 8]})
    with pytest.raises(ValueError, match="cannot rewind num_tokens=1.*tokens of batches that did not run, here 2,"):
        manager.rewind(slot, 1)
    with pytest.raises(ValueError, match="it holds 5, its rings reach back to 3"):
        manager.rewind(slot, 3)
    with pytest.raises(ValueError, match=r"slot 0 has not run.*manager\.rewind\(0, 2\)"):
        manager.truncate(cache, slot, 5)
    manager.rewind(slot, 2)
    assert manager.truncate(cache, slot, 3)[0] == 3
    # The newest cache is donated: whether the batch ran is unknown.
    batch = manager.prepare_forward({slot: [7]})
    cache = manager.init_cache()
    jax.jit(decode_step.body, donate_argnums=1)(MODEL, cache, batch)
    with pytest.raises(ValueError, match="it holds 4, its rings reach back to 4"):
        manager.rewind(slot, 1)


def test_what_serves_requests_is_in_order():
    """Batches ahead, in any order across requests, and around everything that copies or frees requests."""
    manager = make(max_query_tokens=3)
    a = manager.admit()
    b = manager.admit()
    cache = manager.init_cache()
    batches = [manager.prepare_forward({slot: [4] * BLOCK}) for slot in (a, b)]
    manager.admit()
    cache = run(cache, *reversed(batches))
    drafts = manager.prepare_forward({a: [4, 5, 6], b: [7]})
    cache = run(cache, drafts)
    manager.rewind(a, 2)
    ahead = manager.prepare_forward({b: [4]})
    (child,), cache = manager.fork(cache, a, 1)
    cache = run(cache, ahead, manager.prepare_forward({child: [4], a: [5]}))
    manager.prepare_forward({a: [6, 7]})  # dropped after rejected drafts
    manager.rewind(a, 2)
    _, cache = manager.truncate(cache, a, 17)
    offloaded, cache = offload(manager, cache, b)
    slot, cache = resume(manager, cache, offloaded)
    cache = run(cache, manager.prepare_forward({slot: [5], a: [6], child: [7]}))
    assert cache.lengths.tolist() == [manager.length(s) for s in range(4)]


def test_what_a_loop_decoded_counts_as_run():
    manager = make(max_query_tokens=1)
    slot = manager.admit()
    cache = run(manager.init_cache(), manager.prepare_forward({slot: [4]}))
    _, cache = decode_loop(MODEL, cache, manager.prepare_forward({slot: [5]}, reserve=3), SEEDS, steps=4)
    manager.advance(slot, 3)
    manager.prepare_forward({slot: [6]})
    manager.rewind(slot, 1)
    assert run(cache, manager.prepare_forward({slot: [7]})).lengths[slot] == manager.length(slot) == 6


def test_prefixes_are_cached_after_their_step():
    manager = make()
    prefix = PrefixCache(manager, key="")
    slot, hit, cache = prefix.admit(manager.init_cache(), prompt := list(range(BLOCK + 1)))
    batch = manager.prepare_forward({slot: prompt[:BLOCK]})
    with pytest.raises(ValueError, match="slot 0 has not run"):
        prefix.observe(cache, slot, prompt)
    cache = run(cache, batch)
    prefix.observe(cache, slot, prompt)
    second, hit, cache = prefix.admit(cache, prompt)
    assert hit == BLOCK
    assert run(cache, manager.prepare_forward({second: [4], slot: [4]})).lengths[second] == BLOCK + 1


def test_programs_stay_as_they_are():
    """Records are no part of the pytrees: one trace, the same program text, nothing kept when the arrays are gone."""
    manager = make()
    slot = manager.admit()
    cache = manager.init_cache()
    batch = manager.prepare_forward({slot: [4]})
    copies = jax.tree.map(jnp.copy, (cache, batch))
    assert decode_step.lower(MODEL, cache, batch).as_text() == decode_step.lower(MODEL, *copies).as_text()
    step = jax.jit(chex.assert_max_traces(lambda *args: decode_step(*args), n=1), donate_argnums=1)
    _, cache = step(MODEL, cache, batch)  # nothing is known of what an own program returns
    cache = run(cache, manager.prepare_forward({slot: [4]}))
    _, cache = step(MODEL, cache, manager.prepare_forward({slot: [4]}))
    programs = decode_step._cache_size()
    for _ in range(3):
        cache = run(cache, manager.prepare_forward({slot: [4]}))
    assert decode_step._cache_size() == programs
    record = weakref.ref(step_order._record_of(batch.positions))
    assert record().table is manager.requests and step_order._record_of(copies[1].positions) is None
    del batch
    gc.collect()
    assert record() is None


def test_kept_programs_are_checked_too(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path / "programs"))
    monkeypatch.setattr(program_store, "_KNOWN", program_store._KNOWN | {"tests"})
    manager = make()
    model = CompiledModel(MODEL)
    slot = manager.admit()
    cache = manager.init_cache()
    dropped, batch = (manager.prepare_forward({slot: [4]}) for _ in range(2))
    with pytest.raises(ValueError, match="has not run"):
        model.decode_step(cache, batch)
    _, cache = model.decode_step(cache, dropped)
    assert model.decode_step(cache, batch)[1].lengths[slot] == 2


def test_arguments_in_another_order_and_a_donated_cache():
    manager = make()
    slot = manager.admit()
    cache = manager.init_cache()
    batch = manager.prepare_forward({slot: [4]})
    for args in ((cache, MODEL, batch), (MODEL, batch, cache), (MODEL, cache, cache)):
        with pytest.raises(TypeError, match=r"takes \(model, cache, batch\) in this order, got \("):
            decode_step(*args)
    run(cache, batch)
    batch = manager.prepare_forward({slot: [4]})
    for use in (lambda: run(cache, batch), lambda: manager.fork(cache, slot, 1)):
        with pytest.raises(RuntimeError, match="donated to an earlier step.*use the cache that this step returned"):
            use()
