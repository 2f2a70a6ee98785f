"""Requests that are cut over the "data" axis: the tokens and bytes of one device, in parts with their own slots."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from dsv4_jax.decode import SamplingParams, forward
from dsv4_jax.engine import Engine, beam_search, generate
from dsv4_jax.host import CacheFullError, PrefixCache
from dsv4_jax.nn import shardings
from dsv4_jax.parallel.mesh import make_mesh, parse_mesh
from dsv4_jax.parallel.sharded_step import sharded_step
from tests.decode.bigram import MODEL as BIGRAM, DraftingBigram
from tests.engine.grammars import END, VOCABULARY, text
from tests.host.managers import BLOCK, CONFIG as SMALL, ids, make as make_any
from tests.ops.pools import same_bytes
from tests.parallel.conftest import PROMPTS, run_engine


HALVES = {"data": 2, "model": 4}


CONFIG = dataclasses.replace(SMALL, num_attention_heads=8, o_groups=8)


def make(config=CONFIG, **changes):
    return make_any(config, **changes)


def bigram_on(mesh, model=BIGRAM):
    return jax.device_put(model, jax.NamedSharding(mesh, jax.P()))


def held(cache, slot, first_block=0):
    """What is left of a request in a cache in NumPy: its rows, and its blocks in order."""
    blocks = [first_block + block for block in cache.block_table[slot] if block >= 0]
    rows = cache.swa, cache.ngram_ids, {name: group.by_slot for name, group in cache.groups.items()}
    paged = {name: group.paged for name, group in cache.groups.items()}
    return jax.tree.map(lambda x: x[:, slot], rows), jax.tree.map(lambda x: x[:, blocks], paged), cache.lengths[slot]


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("v4", dict(data=2)),
        pytest.param("v4", HALVES, marks=pytest.mark.slow),
        pytest.param("v41", HALVES, marks=pytest.mark.slow),
    ],
    indirect=["model"],
    ids=str,
)
def test_tokens_and_bytes_are_those_of_one_device(model, alone, sizes):
    mesh = make_mesh(sizes)
    placed = jax.device_put(model, shardings(model, mesh))
    tokens, cache, programs = run_engine(placed, model.config, mesh, max_requests=8, num_blocks=24)
    assert (tokens, programs) == (alone[0], 1)
    if "model" not in sizes:  # along "model" sums have another order
        cut, one = jax.tree.map(np.asarray, (cache, alone[1]))
        for number, (slot, first_block) in enumerate(((0, 0), (4, 12), (1, 0))):
            same_bytes(held(cut, slot, first_block), held(one, number))
            assert held(one, number)[2] == len(PROMPTS[number]) + 7


def test_each_part_steps_with_its_own_requests():
    mesh = make_mesh(HALVES)
    manager = make(mesh=mesh)
    model = bigram_on(mesh)
    cache = manager.init_cache()
    slots = [manager.admit() for _ in range(3)]
    assert slots == [0, 2, 1]  # the emptiest part
    assert sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(cache)) * 2 == cache.nbytes
    batch = manager.prepare_forward({2: [5, 6], 0: [7], 1: [8]}, reserve=BLOCK)
    assert batch.token_ids.tolist() == [7, 8, 5, 6]
    assert batch.slots.tolist() == [0, 1, 0, 0] and batch.positions.tolist() == [0, 0, 0, 1]
    assert [row for row in batch.new_blocks.tolist() if row[0] >= 0] == [
        [0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3], [0, 0, 0], [0, 1, 1]
    ]  # fmt: skip
    assert batch.reset_slots.tolist() == [0, 1, 0, -1]
    old = cache
    with jax.transfer_guard("disallow"):
        logits, cache = forward(model, cache, batch)
    chex.assert_trees_all_equal(logits, BIGRAM.table[np.array([7, 8, 5, 6])])
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert jax.tree.map(lambda x: x.sharding, cache) == cache.shardings(mesh)
    assert cache.lengths.tolist() == [1, 1, 2, 0]
    chex.assert_trees_all_equal(cache.block_table, manager.block_table)
    assert [manager.requests.state(slot).blocks for slot in (0, 1, 2)] == [[0, 1], [2, 3], [6, 7]]


def test_a_step_that_is_not_under_shard_map_says_what_to_do():
    manager = make(mesh=make_mesh(HALVES))
    batch = manager.prepare_forward({manager.admit(): [7]})
    message = r"a mesh of \{'data': 2, 'model': 4\}, .* decorate your function .* `dsv4_jax.decode.sharded_step`"
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda cache, batch: cache.begin_step(batch))(manager.init_cache(), batch)
    with pytest.raises(ValueError, match=message):
        manager.init_cache().reset_slots(jax.numpy.array([0]))


def test_a_prefix_is_found_where_its_blocks_are():
    manager = make(mesh=make_mesh(HALVES), max_requests=6, num_blocks=16)
    prefix = PrefixCache(manager, key="")
    cache = manager.init_cache()

    def admit(tokens, **options):
        nonlocal cache
        slot, hit, cache = prefix.admit(cache, tokens, **options)
        return slot, hit

    def learn(slot, tokens):
        nonlocal cache
        batch = manager.prepare_forward({slot: tokens[manager.length(slot) :]}, prefill_size=64)
        (cache,) = begin((), cache, batch)
        prefix.observe(cache, slot, tokens)

    begin = jax.jit(sharded_step(lambda _, cache, batch: (cache.begin_step(batch),)), donate_argnums=1)
    slot, hit = admit(ids(33))
    assert (slot, hit) == (0, 0)
    learn(slot, ids(33))
    slot, hit = admit(ids(49))  # where two blocks of it are, though the other part is empty
    assert (slot, hit) == (1, 32)
    learn(slot, ids(49))
    slot, hit = admit(ids(40, 7))
    assert (slot, hit) == (3, 0)
    learn(slot, ids(40, 7))
    assert admit(ids(64)) == (2, 48)
    # The part is full: the prompt runs again in the other one, which then has the blocks too.
    slot, hit = admit(ids(64))
    assert (slot, hit) == (4, 0)
    learn(slot, ids(49))
    assert admit(ids(64)) == (5, 48)
    with pytest.raises(CacheFullError, match="0 of 3 are free in shard 0 of 2"):
        admit(ids(64))
    assert prefix.metrics.blocks == 3 + 2 + 3
    for slot in manager.slots:
        manager.release(slot)
    assert prefix.evictable == 8
    # A request that needs one of the first part's cached blocks gets it; the other part keeps its own.
    slot, hit = admit(ids(96, 90))
    manager.allocate(slot, 96)
    assert (slot, hit) == (0, 0) and prefix.evict(99) == 2 + 5


@pytest.mark.slow
def test_an_engine_fills_all_parts_and_preempts_within_one():
    """Of 6 requests that need more blocks than there are: the tokens of one device, which holds them all at once.

    One of them follows a grammar.
    """
    tokens = []
    grammar = VOCABULARY.compile("start: /[0-9]{40}/")
    for sizes, blocks in (({}, 40), (HALVES, 14)):
        mesh = make_mesh(sizes) if sizes else None
        manager = make(num_blocks=blocks, max_requests=6, mesh=mesh)
        prefix = PrefixCache(manager, key="")
        engine = Engine(BIGRAM if mesh is None else bigram_on(mesh), manager, token_budget=24, prefix=prefix)
        requests = [engine.add(range(n, 2 * n), max_new_tokens=30, priority=n % 2) for n in (40, 33, 40, 30)]
        requests.append(engine.add(range(17, 34), max_new_tokens=30, priority=1, grammar=grammar, stop_tokens=(END,)))
        for _ in range(8):
            engine.step()
        requests += engine.fork(engine.running[0], [1])
        while engine.busy:
            engine.step()
        assert bool(engine.metrics.preemptions) == bool(sizes)
        tokens.append([request.generated for request in requests])
        assert manager.free_blocks + prefix.metrics.blocks == blocks and manager.free_slots == 6
    assert tokens[0] == tokens[1] and text(tokens[0][4]).isdigit()


@pytest.mark.slow
def test_steps_run_ahead_of_drafts_in_each_part():
    """The tokens and drafts of a step behind one that is not read come from the device's own part."""
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    mesh = make_mesh(HALVES)
    drafting = DraftingBigram(BIGRAM.table)
    options = dict(token_budget=24, drafter="model")
    tokens = []
    for model, parts, overlap in ((drafting, None, False), (bigram_on(mesh, drafting), mesh, True)):
        engine = Engine(model, make(config, num_blocks=40, mesh=parts), overlap=overlap, **options)
        requests = [
            engine.add(range(n, 2 * n), max_new_tokens=20 + n, seed=n, sampling=SamplingParams(1.0))
            for n in (4, 13, 9, 30, 7)
        ]
        while engine.busy:
            engine.step()
        assert engine.config.overlap == overlap and engine.metrics.compilations == 2
        assert 0.1 < engine.metrics.acceptance < 0.9
        tokens.append([request.generated for request in requests])
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_generate_in_one_loop():
    mesh = make_mesh(HALVES)
    prompts = [ids(n, 3 * n) for n in (5, 17, 9)]
    options = dict(max_new_tokens=12, stop_tokens=(61,))
    wanted = generate(BIGRAM, make(), prompts, **options)
    manager = make(mesh=mesh)
    assert generate(bigram_on(mesh), manager, prompts, **options) == wanted
    with pytest.raises(CacheFullError, match=r"5 prompts do not fit at once \(4 do\)"):
        generate(bigram_on(mesh), manager, [[1]] * 5, **options)
    assert manager.free_blocks == 12
    found = beam_search(bigram_on(mesh), manager, prompts[0], beams=2, max_new_tokens=4)
    assert found == beam_search(BIGRAM, make(), prompts[0], beams=2, max_new_tokens=4)
    with pytest.raises(ValueError, match="beams=3 need a slot each, there are 2"):
        beam_search(bigram_on(mesh), manager, prompts[0], beams=3, max_new_tokens=4)


def test_sizes_that_parts_do_not_divide():
    mesh = make_mesh({"data": 3})
    with pytest.raises(ValueError, match="data=3 does not divide max_requests=4, num_blocks=10: give multiples of 3"):
        make(mesh=mesh, num_blocks=10)
    manager = make(mesh=mesh, max_requests=3, num_blocks=6)
    with pytest.raises(ValueError, match="needs 33 tokens, each of the cache's 3 shards holds 32"):
        manager.admit(ids(33))
    with pytest.raises(ValueError, match="need room for 33 tokens, each of the cache's 3 shards holds 32"):
        Engine(bigram_on(mesh), manager, token_budget=8).add(ids(30), max_new_tokens=4)
    with pytest.raises(CacheFullError, match="3 blocks are needed, 2 of 2 are free in shard 0 of 3"):
        manager.allocate(manager.admit(), 33)
    with pytest.raises(ValueError, match="prefill_size=4 is less than the step's 5 tokens in shard 0 of 3"):
        manager.prepare_forward({0: ids(5)}, prefill_size=4)
    # The budget is that of a device: each has a part's slots, and as many blocks as fit beside them.
    one, three = (make(num_blocks=None, memory="100KiB", mesh=m, max_requests=n) for m, n in ((None, 1), (mesh, 3)))
    assert three.schema.num_blocks == 3 * one.schema.num_blocks
    assert parse_mesh("model=2,data=4") == dict(data=4, model=2)
