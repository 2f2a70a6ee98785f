"""Experts that move while an engine runs: nothing but the speed changes, and hot ones end up on the GPU."""

import contextlib
import dataclasses
import gc
import logging
import time
import types
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.checkpoint import load_checkpoint, save_release
from dsv4_jax.checkpoint.random_weights import random_model
from dsv4_jax.config import LayerSpec
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.decode import CompiledModel, decode_loop, decode_step, forward
from dsv4_jax.engine import Engine, EngineMetrics
from dsv4_jax.engine.generate import generate
from dsv4_jax.expert_pages import ExpertMemory, ExpertMetrics, ExpertMigration, ExpertStack, migration
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.serve.async_engine import AsyncEngine
from dsv4_jax.serve.server_metrics import ServerMetrics
from tests.expert_pages.cpu_memory import CpuMemory


# Two layers and the block that makes drafts.
CONFIG = read_config(packaged_checkpoint(), mtp=True).with_layers([LayerSpec()] * 2, ["hash_moe", "moe"])
LAYERS = 3
EXPERTS = 8
EACH = 32768 + 16384
PROMPTS = [list(range(start, start + length)) for start, length in ((3, 40), (100, 7), (200, 1))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    save_release(DeepseekV4ForCausalLM(CONFIG), folder)
    return folder


def load(folder, on_device, config=CONFIG, **options):
    memory = ExpertMemory(device_bytes=on_device * len(config.layers) * EACH, memory=CpuMemory(), **options)
    return CompiledModel(load_checkpoint(folder, config, weights="quantized", expert_memory=memory), memory)


@pytest.fixture(scope="module")
def plain(folder):
    return CompiledModel(load_checkpoint(folder, CONFIG, weights="quantized"))


def make_manager():
    return KVCacheManager(CONFIG, num_blocks=6, max_requests=3, max_context=128, block_tokens=64, max_query_tokens=3)


def move_always(model):
    """Lets experts move after every step, for any gain and at any cost."""
    moves = model.expert_memory.migration
    moves.interval = 1
    moves.remap_share = 1e9
    moves.policy.margin = 0.0
    return moves


def make_engine(model, **options):
    """An engine with these options, by default one that drafts."""
    options = options or dict(token_budget=16, drafter="model", draft_tokens=2)
    return Engine(model, make_manager(), **options)


def run(model, **options):
    """Returns tokens, log-probabilities and cache bytes of a run of an engine, and the engine's metrics."""
    engine = make_engine(model, **options)
    requests = [engine.add(prompt, max_new_tokens=8) for prompt in PROMPTS]
    while engine.busy:
        engine.step()
        if model.expert_memory is not None:
            model.expert_memory.migration.wait()
    results = [(request.generated, request.logprobs) for request in requests]
    cache = dataclasses.replace(engine.cache, expert_counts=None)
    metrics = engine.metrics
    engine.close()
    return (results, jax.tree.map(np.asarray, cache)), metrics


@pytest.fixture(scope="module")
def expected(plain):
    return run(plain)


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [0, 5])
def test_an_engine_computes_the_same_bits_while_experts_move(folder, expected, on_device):
    model = load(folder, on_device)
    moves = move_always(model)
    loaded = model.expert_memory.memory.copied
    got, metrics = run(model)
    wanted, before = expected
    chex.assert_trees_all_equal(got, wanted)
    assert metrics.steps == before.steps and metrics.compilations <= 2 and before.experts is None
    found = metrics.experts
    assert found.misses > 20 and (found.hits > 0) == (on_device > 0) and found.bus_bytes % EACH == 0
    assert (found.swaps > 3) == (on_device > 0)
    assert found.moved_bytes == model.expert_memory.memory.copied - loaded
    on_host = np.stack([pages[0].on_host for pages in model.expert_memory.layers.values()])
    chex.assert_trees_all_equal(on_host, moves._on_host)
    assert on_host.sum() == LAYERS * (EXPERTS - on_device)


@pytest.mark.slow
def test_experts_of_dspark_layers_are_counted_and_moved():
    config = CONFIG.with_layers([LayerSpec()]).with_dspark(markov_rank=32)
    config = dataclasses.replace(config, dspark=dataclasses.replace(config.dspark, num_layers=1))
    memory = ExpertMemory(device_bytes=4 * len(config.layers) * EACH, memory=CpuMemory())
    model = CompiledModel(random_model(config, expert_memory=memory), memory)
    pages = memory.layers["drafts.layers.0.mlp.experts"]
    moves = move_always(model)
    before = pages[0].on_host.copy()
    sizes = dict(num_blocks=1, max_requests=1, max_context=64, block_tokens=64, max_query_tokens=6)
    options = dict(token_budget=6, batch_invariant=True, drafter="model")
    engine = Engine(model, KVCacheManager(config, **sizes), **options)
    request = engine.add(PROMPTS[1][:6], max_new_tokens=6)
    while engine.busy:
        engine.step()
        moves.wait()
    # Each step drafts a block of 5 tokens, which select 2 experts each.
    assert np.asarray(engine.cache.expert_counts)[0, 1].sum() == 10 * len(request.accepted)
    assert (pages[0].on_host != before).any()
    engine.close()


@pytest.mark.slow
def test_a_loop_on_the_device_generates_the_same_tokens(folder, expected):
    (results, _), _ = expected
    options = dict(max_new_tokens=8, drafts=2, chunk=8)
    wanted = [tokens for tokens, _ in results]
    model = load(folder, 5)
    moves = move_always(model)
    assert generate(model, make_manager(), PROMPTS, **options) == wanted
    before = moves.metrics.hits + moves.metrics.misses
    assert generate(model, make_manager(), PROMPTS, **options) == wanted  # experts lie elsewhere now
    assert moves.metrics.swaps > 0 and moves.metrics.hits + moves.metrics.misses == 2 * before


def table(model):
    return np.asarray(model.module.model.layers[0].mlp.gate.tid2eid[...])


def selections(model, tokens):
    return np.bincount(table(model)[np.asarray(tokens)].ravel(), minlength=EXPERTS)


def by_hand(model, between_steps):
    """Yields (logits or tokens, cache) after a prompt step with padding, three decode steps and a loop of five."""
    manager = make_manager()
    cache = manager.init_cache().with_expert_counts()
    slot = manager.admit()
    other = manager.admit()
    batch = manager.prepare_forward({slot: PROMPTS[0][:20], other: PROMPTS[1]}, prefill_size=64)
    assert (batch.slots < 0).sum() == 64 - 27
    logits, cache = forward(model, cache, batch)
    yield logits[batch.slots >= 0], jax.tree.map(np.asarray, cache)
    for token in (7, 8, 9):
        between_steps(cache)
        logits, cache = decode_step(model, cache, manager.prepare_forward({slot: [token]}))
        yield logits, jax.tree.map(np.asarray, cache)
    between_steps(cache)
    batch = manager.prepare_forward({slot: [10]}, reserve=4)
    output, cache = decode_loop(model, cache, batch, np.zeros(3, np.uint32), steps=5)
    yield output.tokens[slot], jax.tree.map(np.asarray, cache)


def test_steps_by_hand_count_and_move_experts(folder, plain):
    steps = list(by_hand(plain, lambda cache: None))
    counts = [cache.expert_counts for _, cache in steps]
    added = np.diff(counts, axis=0)
    # The first layer's experts are known from the token ids. Padding counts nowhere.
    chex.assert_trees_all_equal(counts[0][0, 0], selections(plain, PROMPTS[0][:20] + PROMPTS[1]))
    chex.assert_trees_all_equal(counts[0][1], (counts[0][0] > 0).astype(np.int32))
    assert counts[0][0].sum(1).tolist() == [27 * 2, 27 * 2, 0]
    for token, hits in zip((7, 8, 9), added[:3], strict=True):
        chex.assert_trees_all_equal(hits[:, 0], np.stack([selections(plain, [token])] * 2))
    chex.assert_trees_all_equal(added[3][0, 0], selections(plain, [10, *steps[-1][0][:-1].tolist()]))
    assert added[3][0].sum(1).tolist() == [10, 10, 0]

    model = load(folder, 5)
    moves = move_always(model)
    moves.start(make_manager().init_cache().with_expert_counts().expert_counts, CONFIG.num_experts_per_tok)

    def between_steps(cache):
        moves.between_steps(cache.expert_counts)
        moves.wait()

    chex.assert_trees_all_equal(list(by_hand(model, between_steps)), steps)
    assert moves.metrics.swaps > 0


def test_a_model_without_pages_compiles_to_the_program_that_it_had(plain):
    manager = make_manager()
    cache = manager.init_cache()
    batch = manager.prepare_forward({manager.admit(): [1]})

    text, counting = (decode_step.lower(plain, x, batch).as_text() for x in (cache, cache.with_expert_counts()))
    assert "2x3x8xi32" not in text and "3x8xi32" not in text and "2x3x8xi32" in counting
    assert counting.count('"stablehlo.scatter"(') - text.count('"stablehlo.scatter"(') == 1


def test_a_mesh_is_refused():
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    manager = KVCacheManager(CONFIG, num_blocks=2, max_requests=1, max_context=128, mesh=mesh)
    with pytest.raises(ValueError, match="counted on one device; the cache lies on a mesh"):
        manager.init_cache().with_expert_counts()


# --- without a model ---


class Small:
    """Two layers of six experts, of which three lie on the GPU, and counts that a test adds to."""

    def __init__(self, monkeypatch=None, file=None, interval=8, **options):
        self.memory = CpuMemory()
        self.now = 100.0
        if monkeypatch is not None:
            monkeypatch.setattr(migration, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        stack = ExpertStack(self.memory, (2, 6, 4096), np.tile(np.arange(6) >= 3, (2, 1)), jax.devices()[0])
        self.layers = {name: [pages] for name, pages in zip(("first", "second"), stack.layers, strict=True)}
        self.moves = ExpertMigration(self.memory, self.layers, {}, file, **options)
        self.moves.interval = interval
        self.counts = jnp.zeros((2, 2, 6), jnp.int32)
        self.moves.start(self.counts, experts_per_token=2)

    def step(self, layer, experts, times=1, seconds=0.0):
        self.now += seconds
        for count in (0, 1):
            self.counts = self.counts.at[count, layer, jnp.array(experts)].add(times)
        self.moves.between_steps(self.counts)
        self.moves.wait()

    @property
    def on_host(self):
        return [np.flatnonzero(pages[0].on_host).tolist() for pages in self.layers.values()]


def test_hot_experts_move_to_the_gpu():
    small = Small(interval=2)
    small.step(1, [3, 4], 20)
    assert small.moves.metrics.moved_bytes == 0  # not yet
    small.step(1, [3, 4], 20)
    assert small.moves.metrics.moved_bytes == 4 * 4096 and small.on_host == [[3, 4, 5]] * 2
    small.step(1, [3, 4], 20)
    assert small.on_host == [[3, 4, 5], [0, 1, 5]]
    metrics = small.moves.metrics
    assert (metrics.hits, metrics.misses, metrics.swaps, metrics.bus_bytes) == (0, 120, 2, 120 * 4096)
    small.step(1, [3, 4], 20)
    small.moves.finish(small.counts)
    assert (metrics.hits, metrics.misses, metrics.hit_rate) == (40, 120, 0.25)


def test_memory_is_freed_with_the_model():
    small = Small(interval=1)
    small.step(1, [3, 4], 20)  # a swap is copied, but not mapped
    memory = small.memory
    del small
    for _ in range(100):
        gc.collect()
        if memory.is_empty():
            break
        time.sleep(0.02)
    assert memory.is_empty()


def test_a_cache_that_begins_again_is_understood():
    small = Small(interval=1)
    small.step(0, [0, 1], 50)
    small.counts = jnp.zeros_like(small.counts)
    small.step(0, [0, 1], 3)
    assert small.moves.metrics.hits == 106


def test_remapping_takes_a_hundredth_of_the_time(monkeypatch):
    small = Small(monkeypatch, batch=1, interval=1)
    rng = np.random.default_rng(0)
    small.moves.policy.margin = 0.0
    remap = small.moves._mover.remap

    def slow():
        small.now += 0.002
        return remap()

    monkeypatch.setattr(small.moves._mover, "remap", slow)
    for _ in range(400):
        small.step(0, rng.choice(6, 2, replace=False), 50, seconds=0.01)
    metrics = small.moves.metrics
    assert 0.5 * 0.04 < metrics.remap_seconds <= 0.01 * metrics.seconds + 0.002
    small.step(0, [0, 1], seconds=3600.0)
    assert metrics.seconds < 400 * 0.013 + 1.01  # a pause earns no more than a second does


def test_a_failure_of_a_copy_ends_the_moves_and_nothing_else(caplog):
    small = Small(interval=1)
    with mock.patch.object(small.memory, "copy", side_effect=RuntimeError("cuMemcpyAsync: CUDA_ERROR_UNKNOWN")):
        small.step(1, [3, 4], 20)
    for _ in range(3):
        small.step(1, [3, 4], 20)
    assert "experts do not move any longer: cuMemcpyAsync" in caplog.text
    assert small.on_host == [[3, 4, 5]] * 2 and small.moves.metrics.misses == 160


def test_counts_of_another_model_are_refused():
    with pytest.raises(ValueError, match=r"the cache counts \[layers, experts\] \[3, 6\], but \[2, 6\] were placed"):
        Small().moves.start(jnp.zeros((2, 3, 6), jnp.int32), 2)


def test_without_memory_to_move_experts_they_stay(folder, caplog):
    model = load(folder, 5)
    model.expert_memory.memory.room[False] = 0
    assert model.expert_memory.migration is None and "experts stay where they are" in caplog.text


def test_placement_survives_a_restart(folder, tmp_path):
    file = tmp_path / "placement.npz"
    model = load(folder, 5, placement_file=file)
    with contextlib.closing(make_engine(model)) as engine:
        engine.add(PROMPTS[0], max_new_tokens=2)
        while engine.busy:
            engine.step()
        counts = np.asarray(engine.cache.expert_counts)[0]
    memory = load(folder, 5, placement_file=file).expert_memory
    for hits, pages in zip(counts[:2], list(memory.layers.values())[:2], strict=True):
        assert hits[~pages[0].on_host].min() >= hits[pages[0].on_host].max()
    assert [x.name for x in tmp_path.iterdir()] == ["placement.npz"]
    # The counts of this process add to those of the last one, and its first moves respect them.
    again = memory.migration
    chex.assert_trees_all_close(again.history.frequencies[:2].sum(1), counts[:2].sum(1).astype(float), rtol=1e-2)
    again.start(jnp.zeros((2, LAYERS, EXPERTS), jnp.int32), 2)
    assert (again.policy.frequencies[:2].argmax(1) == again.history.frequencies[:2].argmax(1)).all()


@pytest.mark.parametrize("kind", ["torn", "foreign", "array", "other", "negative", "text"])
def test_a_file_that_is_not_of_this_model_is_ignored(tmp_path, caplog, kind):
    file = tmp_path / "placement.npz"
    Small(file=file).moves.finish()
    content = file.read_bytes()
    with file.open("wb") as new:
        if kind in ("torn", "foreign"):
            new.write(content[: len(content) // 2] if kind == "torn" else b"not a placement")
        elif kind == "array":
            np.save(new, np.zeros(6))
        else:
            rows = dict(other=np.zeros(7), negative=np.full(6, -1.0), text=np.array(["a"] * 6))
            np.savez(new, first=rows[kind])
    memory = ExpertMemory(device_bytes=3 * 4096, memory=CpuMemory(), placement_file=file)
    with caplog.at_level(logging.WARNING):
        memory.plan(["first"], [(6, 4096)])
    assert f"the placement of experts in {file} is ignored" in caplog.text and not memory.frequencies


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    Small(file=tmp_path / "missing" / "placement.npz").moves.finish()
    assert "the placement of experts is not kept in" in caplog.text


def test_metrics_of_experts_are_told():
    metrics = EngineMetrics(experts=ExpertMetrics(3, 1, int(9e10), 5 * 10**9, 7, 0.5, 10.0))
    engine = mock.Mock(spec=AsyncEngine, metrics=metrics, engine=mock.Mock())
    engine.engine.manager.schema.max_requests = 1
    text = ServerMetrics(engine).text().decode()
    for line in ("hits_total 3.0", "misses_total 1.0", "bus_bytes_total 9e+10", "remap_seconds_total 0.5"):
        assert f"dsv4_jax_expert_{line}" in text
    assert "dsv4_jax_expert_bus_seconds_total 2.0" in text
    rows = dict(zip(*(column.cells for column in metrics.table().columns), strict=True))
    counters = {"hit rate": "0.75", "swaps": "7", "bus bytes": "90,000,000,000", "bus seconds": "2.0"}
    assert {name: rows[f"expert {name}"] for name in counters} == counters
