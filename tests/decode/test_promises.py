"""The architecture's promises for the whole decode step: one program, in place, nothing lost, nothing leaked."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.cache import KVCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import (
    BatchedSamplingParams,
    SamplingParams,
    decode_loop,
    decode_step,
    forward,
    sample_step,
)
from dsv4_jax.decode.sampling import GREEDY
from dsv4_jax.host import CacheFullError, KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.decode.conftest import EVERY_MODEL
from tests.paths import DATA, TINY
from tests.v41 import v41_config


def snapshot(tree):
    return [np.asarray(x).reshape(-1).view(np.uint8).copy() for x in jax.tree.leaves(tree)]


def v41_with_a_large_table():
    config = v41_config()
    engram = dataclasses.replace(config.engram, vocab_size=4_000_000)
    return dataclasses.replace(config, engram=dataclasses.replace(engram, num_embeddings=(sum(engram.primes[0]),)))


V41 = v41_with_a_large_table()


def poisoned(cache):
    """Every byte of rings, states and pools 0xFF (NaN where it is a float); no blocks, as in a new cache."""

    def fill(x):
        raw = np.full((*x.shape, x.dtype.itemsize), 0xFF, np.uint8)
        return jnp.asarray(raw.view(x.dtype)[..., 0])

    bad = jax.tree.map(fill, cache)
    return dataclasses.replace(bad, block_table=cache.block_table, lengths=cache.lengths)


def run(model, manager, cache, slot, ids):
    """Feeds ids one by one; the logits after each."""
    logits = []
    for token in ids:
        out, cache = decode_step(model, cache, manager.prepare_forward({slot: [token]}))
        logits.append(np.asarray(out[slot]))
    return np.stack(logits), cache


@EVERY_MODEL
def test_one_trace_while_requests_come_grow_and_go(model, manager):
    """50 steps: admissions, growth over block borders, releases, re-admissions, and no host transfer inside."""
    cache = manager.init_cache()
    chex.clear_trace_counter()  # it counts by function, whatever the model
    step = jax.jit(chex.assert_max_traces(decode_step.body, n=1), donate_argnums=1)
    rng = np.random.default_rng(0)
    slots = []
    crossed = 0
    for i in range(50):
        if len(slots) < 3 and i % 4 == 0:
            slots.append(manager.admit(num_tokens=40))
        if i % 17 == 16:
            manager.release(slots.pop(0))
        if not slots:
            continue
        before = manager.free_blocks
        batch = manager.prepare_forward({slot: [int(rng.integers(160))] for slot in slots})
        crossed += before - manager.free_blocks
        with jax.transfer_guard("disallow"):
            logits, cache = step(model, cache, batch)
        chex.assert_trees_all_equal(cache.block_table[jnp.asarray(slots)], manager.block_table[slots])
        chex.assert_trees_all_equal(cache.lengths[jnp.asarray(slots)], np.array([manager.length(s) for s in slots]))
    assert crossed > 5


@dataclasses.dataclass
class Forgetful:
    """A model that does not begin the step, or begins it and returns the cache it got."""

    begins: bool

    def __call__(self, cache, batch):
        if self.begins:
            cache.begin_step(batch)
        return jnp.zeros((len(batch.slots), 4)), cache

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize("begins", [False, True])
def test_a_step_that_was_not_begun_is_refused_while_it_is_traced(manager, begins):
    batch = manager.prepare_forward({manager.admit(): [1]})
    cache = KVCache.abstract(manager.schema)
    rows = jnp.zeros(1, jnp.int32)
    seeds = jnp.zeros(3, jnp.uint32)
    rest = rows, BatchedSamplingParams.of([SamplingParams()] * 3), seeds
    for step in (
        lambda cache: forward.__wrapped__(Forgetful(begins), cache, batch),
        lambda cache: decode_step.__wrapped__(Forgetful(begins), cache, batch),
        lambda cache: sample_step.__wrapped__(Forgetful(begins), cache, batch, *rest),
        lambda cache: sample_step.__wrapped__(Forgetful(begins), cache, batch),
        lambda cache: decode_loop.__wrapped__(Forgetful(begins), cache, batch, seeds, steps=2),
    ):
        with pytest.raises(ValueError, match=r"must begin with `cache = cache.begin_step\(batch\)`"):
            jax.eval_shape(step, cache)


@EVERY_MODEL
def test_the_donated_cache_is_consumed(model, manager):
    cache = manager.init_cache()
    slot = manager.admit(num_tokens=4)
    _, new = decode_step(model, cache, manager.prepare_forward({slot: [1]}))
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))


def check_in_place(compiled, cache):
    """Scratch bytes of a program that updates every cache array where it lies."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    shapes = {f"[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(cache) if x.ndim > 2}
    copies = [
        line.strip()
        for line in compiled.as_text().splitlines()
        if re.search(r"= \S+ (copy|copy-start|dynamic-update-slice)\(", line)
        and any(shape in line.split("=", 1)[1].split("(")[0] for shape in shapes)
    ]
    assert not copies, "\n".join(copies)
    return memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (DSV4Config.from_hf(TINY), 1),
        (DSV4Config.from_hf(TINY), 40),
        (V41, 1),
        pytest.param(V41, 40, marks=pytest.mark.slow),
    ],
    ids=["decode", "prefill", "decode V4.1", "prefill V4.1"],
)
def test_no_copy_of_a_pool_in_the_compiled_step(config, tokens):
    """Every cache array is updated where it lies, and scratch memory has no room for any layer of any pool.

    Nor is there room for Engram's table.
    """
    model = nnx.eval_shape(lambda: DeepseekV4ForCausalLM(config))
    manager = KVCacheManager(config, num_blocks=300_000, max_requests=3, max_context=96, block_tokens=16)
    batch = manager.prepare_forward({manager.admit(): [1] * tokens})
    cache = KVCache.abstract(manager.schema)
    temp = check_in_place(decode_step.lower(model, cache, batch).compile(), cache)
    assert temp < min(
        x.size * x.dtype.itemsize / len(x) for group in cache.groups.values() for x in jax.tree.leaves(group.paged)
    )
    if config.engram is not None:
        assert temp < config.engram.num_embeddings[0] * config.engram.head_dim


@EVERY_MODEL
def test_a_reused_slot_and_its_blocks_show_nothing_of_their_old_owner(model, manager):
    """The same request in a new cache, in poisoned bytes, and after another owner: the same bits."""
    ids = [5, 9, 100, 2, 77, 31, 31, 8, 90, 4, 4, 12, 150, 3, 61, 17, 18, 19, 20, 21]
    slot = manager.admit(ids)
    want, cache = run(model, manager, manager.init_cache(), slot, ids)
    manager.release(slot)
    other = manager.admit(num_tokens=30)
    assert other == slot
    _, cache = run(model, manager, cache, other, range(100, 130))
    manager.release(other)
    again, _ = run(model, manager, cache, manager.admit(ids), ids)
    chex.assert_trees_all_equal(again, want)
    manager.release(slot)
    bad, _ = run(model, manager, poisoned(manager.init_cache()), manager.admit(ids), ids)
    chex.assert_trees_all_equal(bad, want)


@EVERY_MODEL
def test_padding_writes_nothing(model, manager):
    """A step of padding alone leaves poisoned bytes as they are."""
    cache = poisoned(manager.init_cache())
    before = snapshot(cache)
    slot = manager.admit(num_tokens=1)
    batch = manager.prepare_forward({slot: [1]})
    nothing = jax.tree.map(lambda x: jnp.full_like(x, -1), batch)
    logits, cache = decode_step(model, cache, nothing)
    for a, b in zip(before, snapshot(cache), strict=True):
        chex.assert_trees_all_equal(a, b)
    assert not np.asarray(logits).any()


@EVERY_MODEL
def test_other_requests_do_not_change_a_requests_bytes(model, manager):
    """A request alone and beside two others at other phases of compression: the same rings, entries and states.

    Per-token inputs are the same because a token's hidden state is computed from its own row; the rows of the cache
    that belong to the request are compared bit for bit.
    """
    ids = list(range(40, 75))
    slot = manager.admit(ids)
    _, alone = run(model, manager, manager.init_cache(), slot, ids)
    mine = owned(alone, manager, slot)
    manager.release(slot)

    cache = manager.init_cache()
    slot, second, third = (manager.admit(num_tokens=40) for _ in range(3))
    for token in range(5):
        _, cache = decode_step(model, cache, manager.prepare_forward({second: [token]}))
    for i, token in enumerate(ids):
        tokens = {slot: [token], second: [100 + i]} | ({third: [i]} if i % 2 else {})
        _, cache = decode_step(model, cache, manager.prepare_forward(tokens))
    for a, b in zip(mine, owned(cache, manager, slot), strict=True):
        chex.assert_trees_all_equal(a, b)


def owned(cache, manager, slot):
    """Bytes of a slot's rings, states and blocks, blocks in logical order."""
    blocks = manager.block_table[slot]
    blocks = blocks[blocks >= 0]
    per_slot = cache.swa, cache.ngram_ids, {name: group.by_slot for name, group in cache.groups.items()}
    return snapshot(jax.tree.map(lambda x: x[:, slot], per_slot)) + snapshot(
        jax.tree.map(lambda x: x[:, blocks], {name: group.paged for name, group in cache.groups.items()})
    )


@EVERY_MODEL
def test_running_out_raises_before_launch_and_changes_nothing(model, manager):
    cache = manager.init_cache()
    slots = [manager.admit(num_tokens=90) for _ in range(3)]
    _, cache = decode_step(model, cache, manager.prepare_forward({s: [7] for s in slots}))
    manager.allocate(slots[0], 90)
    before = snapshot(cache)
    table = manager.block_table
    lengths = [manager.length(s) for s in slots]
    free = manager.free_blocks
    with pytest.raises(CacheFullError, match="block"):
        manager.prepare_forward({slots[1]: [1] * 60, slots[2]: [1] * 60})
    with pytest.raises(CacheFullError, match="slot"):
        manager.admit([1])
    with pytest.raises(ValueError, match="max_context=96"):
        manager.prepare_forward({slots[0]: [1] * 96})
    for a, b in zip(before, snapshot(cache), strict=True):
        chex.assert_trees_all_equal(a, b)
    chex.assert_trees_all_equal(manager.block_table, table)
    assert free == manager.free_blocks and lengths == [manager.length(s) for s in slots]
    # Everything still runs.
    _, cache = decode_step(model, cache, manager.prepare_forward({s: [7] for s in slots}))


@EVERY_MODEL
def test_the_device_loop_makes_no_transfer(model, manager):
    slot = manager.admit(num_tokens=20)
    batch = manager.prepare_forward({slot: [3]}, reserve=7)
    cache = manager.init_cache()
    seeds = jnp.zeros((3,), jnp.uint32)
    with jax.transfer_guard("disallow"):
        output, cache = decode_loop(model, cache, batch, seeds, steps=8)
    manager.advance(slot, 7)
    tokens = output.tokens
    assert int(cache.lengths[slot]) == manager.length(slot) == 8
    assert (np.asarray(tokens[slot]) >= 0).all() and (np.asarray(tokens)[[1, 2]] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 20], ids=["decode", "prefill"])
def test_no_copy_of_a_pool_in_a_step_that_drafts(tokens):
    config = DSV4Config.from_hf(DATA / "official_mtp", mtp=True)
    model = nnx.eval_shape(lambda: DeepseekV4ForCausalLM(config))
    sizes = dict(num_blocks=30_000, max_requests=3, max_context=96, block_tokens=16, max_query_tokens=4)
    host = KVCacheManager(config, **sizes)
    batch = host.prepare_forward({host.admit(): [1] * tokens}, prefill_size=40, decode_size=12)
    cache = KVCache.abstract(host.schema)
    rows = jnp.zeros((12,), jnp.int32)
    seeds = jnp.zeros((3,), jnp.uint32)
    sampling = jax.device_put(BatchedSamplingParams.of([GREEDY] * 3))
    compiled = sample_step.lower(model, cache, batch, rows, sampling, seeds, drafts=3).compile()
    scratch = check_in_place(compiled, cache)
    pools = host.schema.block_bytes_by_pool()
    # Of the largest pool, at least; the other pools share a name in the program with smaller arrays.
    assert scratch < max(pools.values()), (scratch, pools)
