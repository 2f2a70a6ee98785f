"""A step that is launched before the one ahead of it is read changes no token."""

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import BlockAllocator, KVCacheManager, PrefixCache
from tests.decode.bigram import MODEL as BIGRAM
from tests.engine.test_engine import PROMPTS, add
from tests.host.managers import make as make_bigram_manager
from tests.paths import DATA
from tests.stress.overlap_tokens import Load, compare, serve


TEXT = bytes(range(256)) * 3


@pytest.mark.parametrize("prefix", [False, True], ids=["", "prefix"])
def test_tokens_are_those_of_an_engine_that_waits(small, wide, prefix):
    """With forks, cancels, stop tokens, prefix hits, and fewer blocks than the requests need."""
    load = Load(1, (1, 60), (1, 60), 160).make(300, TEXT)
    results = []
    for overlap in (True, False):
        manager = wide(13)
        cached = PrefixCache(manager, key="tiny") if prefix else None
        engine = Engine(small[0], manager, token_budget=20, prefix=cached, overlap=overlap, batch_invariant=True)
        results.append(serve(engine, load, most=6))
        metrics = engine.metrics
        assert engine.config.overlap == overlap and metrics.cancelled
        assert metrics.prefix.hits if prefix else metrics.preemptions
        assert manager.free_slots == 3 and manager.free_blocks == 13 - (metrics.prefix.blocks if prefix else 0)
    found = compare(*results)
    assert found["differing_texts"] == [] and found["tokens"] > 150


def test_the_next_step_runs_when_a_call_returns(small, roomy):
    engine = Engine(small[0], roomy, token_budget=20, batch_invariant=True)
    request = add(engine, 1, max_new_tokens=4)
    while not request.generated:
        engine.step()
    # The cache has the newest token already; a copy starts before it, and draws with its own seed.
    assert roomy.length(request.slot) == len(request.tokens) and engine.last_scheduled == (request,)
    (child,) = engine.fork(request, [9])
    assert roomy.length(child.slot) == len(child.tokens) - 1
    told = 0
    while engine.busy:
        told += sum(output.request is request for output in engine.step())
    assert told == 3 and len(child.generated) == 4 and request.generated[:1] == child.generated[:1]
    steps = engine.metrics.steps
    engine.step()
    assert engine.metrics.steps == steps  # the last tokens came by length: no step ran in vain


def test_a_copy_starts_before_a_token_of_a_step_ahead_only(small, roomy):
    slot = roomy.admit(PROMPTS[0])
    roomy.prepare_forward({slot: PROMPTS[0]})
    with pytest.raises(ValueError, match="length=1 must be the 3 tokens that slot 0 holds, or one less"):
        roomy.requests.state(slot).shortened(1, slot)


def test_drafts_on_the_host_do_not_overlap():
    assert not Engine(BIGRAM, make_bigram_manager(), token_budget=24, drafter=PromptLookup()).config.overlap


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [False, True], ids=["", "prefix"])
@pytest.mark.parametrize("name", ["official_mtp", "official_dspark"])
def test_drafts_of_the_device_change_no_token(name, prefix):
    """A step runs drafts that the host has not seen, behind tokens whose positions it does not know."""
    config = DSV4Config.from_hf(DATA / name, mtp=True)
    model = CompiledModel(load_checkpoint(DATA / name, config, dtype=jnp.float32))

    def engine_of(free, **options):
        sizes = dict(num_blocks=24, max_context=96, max_requests=4, block_tokens=16, max_query_tokens=4)
        manager = KVCacheManager(config, kv_format="plain", dtype=jnp.float32, **sizes)
        manager.requests.allocator = BlockAllocator(free)  # of equal geometries, so that both engines share programs
        cached = PrefixCache(manager, key="") if prefix else None
        options |= dict(prefix=cached, batch_invariant=True, token_budget=20)
        return Engine(model, manager, drafter="model", **options)

    ahead = engine_of(8)
    waits = engine_of(24, overlap=False)
    assert ahead.config.overlap and not waits.config.overlap
    found = serve(ahead, Load(2, (1, 40), (1, 40), config.vocab_size).make(400, TEXT), most=6)
    wanted = [waits.add(**one.alone, draft_tokens=0) for one in found]
    while waits.busy:
        waits.step()
    tokens = 0
    for (_, request, alone), want in zip(found, wanted, strict=True):
        generated = request.tokens[len(alone["prompt"]) :].tolist()
        assert generated == want.generated[: len(generated) if request.finish_reason == "cancelled" else None]
        tokens += len(generated)
    metrics = ahead.metrics
    manager = ahead.manager
    assert tokens > 200 and metrics.cancelled
    assert 0 < metrics.acceptance < 1 and metrics.drafted_tokens > 200
    assert metrics.prefix.hits if prefix else metrics.preemptions
    assert manager.free_slots == 4 and manager.free_blocks == 8 - (metrics.prefix.blocks if prefix else 0)


def test_a_decode_step_moves_its_positions_only(monkeypatch):
    """Other arrays of the step are on the device already, as long as no request comes, ends or opens a block."""
    manager = make_bigram_manager()
    engine = Engine(BIGRAM, manager, token_budget=20)
    for prompt in ([4], [5, 6]):
        engine.add(prompt, max_new_tokens=12, seed=len(prompt))
    engine.step()
    engine.step()
    put = manager.devices.put
    shapes = []

    def counted(tree, axis=None):
        shapes.append(jax.tree.map(jnp.shape, tree))
        return put(tree, axis)

    monkeypatch.setattr(manager.devices, "put", counted)
    for _ in range(5):
        engine.step()
    assert shapes == [(4,)] * 5
