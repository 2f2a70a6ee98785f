"""An engine that tells the likeliest tokens and scores prompts: the same numbers whatever happens to a request."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dsv4_jax.decode import CompiledModel, SamplingParams, decode_loop
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import PrefixCache
from dsv4_jax.parallel.mesh import make_mesh
from tests.decode.bigram import MODEL, DraftingBigram, check
from tests.host.managers import BLOCK, CONFIG, ids, make


WARM = SamplingParams(1.0, top_k=2)  # repeats itself, so that some drafts are right
LONG = [*ids(40), *ids(9)]


def engine_of(manager=None, *, model=MODEL, cache=None, **options):
    """With drafts, prefix hits and, in four slots of twelve blocks, preemption."""
    manager = manager or make()
    options = (
        dict(token_budget=20, drafter=PromptLookup(), prefix=PrefixCache(manager, key=""), max_logprobs=6) | options
    )
    return Engine(model, manager, cache, **options)


def drain(engine):
    while engine.busy:
        engine.step()


def check_request(request):
    start = len(request.prompt) - 1
    check(request.tokens[start:].tolist(), request.logprobs, request.top_logprobs)
    if request.prompt_logprobs:
        check(request.prompt, request.prompt_logprobs, request.prompt_top_logprobs)


def test_every_number_whatever_happens(monkeypatch):
    """Chunks, drafts, company, preemption, prefixes that are cached, forks, and a step that raises midway."""
    engine = engine_of()
    plain = engine_of(max_logprobs=0)
    programs = engine.warm_up()
    total = []
    compilations = engine.metrics.compilations
    for i in range(6):
        options = dict(max_new_tokens=40, sampling=WARM, seed=i)
        total.append(
            (plain.add(LONG, **options), engine.add(LONG, top_logprobs=i, prompt_logprobs=i % 2 == 1, **options))
        )
    launch = engine._launch
    steps = itertools.count()

    def failing(scheduled, *after):
        if next(steps) == 3:
            raise RuntimeError("once")
        return launch(scheduled, *after)

    monkeypatch.setattr(engine, "_launch", failing)
    engine.step()
    for _ in range(2):
        engine.step()
    with pytest.raises(RuntimeError, match="once"):
        engine.step()
    while not total[1][1].generated:
        engine.step()
    (child,) = engine.fork(total[1][1], [77])
    drain(plain)
    drain(engine)
    metrics = engine.metrics
    assert metrics.preemptions and metrics.accepted_tokens and metrics.restarts == 1 and metrics.prefix.hits
    assert metrics.compilations == compilations <= len(programs) == 2
    for i, (want, request) in enumerate(total):
        assert request.generated == want.generated and request.top_logprobs.ids.shape == (40, i)
        assert len(request.prompt_logprobs) == (i % 2 and len(LONG) - 1)
        assert not want.top_logprobs.ids.size and want.prompt_logprobs == []
        check_request(request)
    assert child.generated != total[1][1].generated and len(child.prompt_logprobs) == len(LONG) - 1
    check_request(child)


@pytest.mark.slow
def test_with_drafts_of_the_device():
    """Some of them right: in the engine, and in the loop on the device."""
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    engine = engine_of(make(config), model=DraftingBigram(MODEL.table), drafter="model")
    requests = [engine.add(LONG, max_new_tokens=40, seed=i, top_logprobs=6, prompt_logprobs=True) for i in range(3)]
    drain(engine)
    assert 0.2 < engine.metrics.acceptance < 0.8 and engine.metrics.compilations <= 2
    for request in requests:
        check_request(request)

    manager = make(config)
    slot = manager.admit()
    batch = manager.prepare_forward({slot: LONG[-1:]}, reserve=39)
    output, _ = decode_loop(
        DraftingBigram(MODEL.table),
        manager.init_cache(),
        batch,
        jnp.zeros(4, jnp.uint32),
        steps=40,
        drafts=2,
        top_logprobs=3,
    )
    mine = jax.tree.map(lambda x: x[slot], output)
    tokens = mine.tokens
    assert tokens.tolist() == requests[0].generated and mine.accepted.max() > 0
    check([LONG[-1], *tokens.tolist()], mine.logprobs, mine.top_logprobs)


@pytest.mark.parametrize("tokens", [1, 2, BLOCK, BLOCK + 1])
def test_prompts_of_any_length_are_scored(tokens):
    """Though the cache has them, and where a step may draw one token only."""
    engine = engine_of(make(max_requests=1, max_query_tokens=1), drafter=None)
    for _ in range(2):
        request = engine.add(LONG[:tokens], max_new_tokens=2, top_logprobs=6, prompt_logprobs=True)
        engine.step(decode=False)
        assert request.prompt_logprobs == []  # not all are known
        drain(engine)
        assert len(request.prompt_logprobs) == tokens - 1 and request.cached_tokens == 0
        check_request(request)


@pytest.mark.parametrize("tokens", range(4, 9))
def test_prompts_share_the_places_of_a_step(tokens):
    """A step finds four tokens: those of two requests that have read their prompts, and of others that score theirs."""
    engine = engine_of(make(max_query_tokens=1), drafter=None)
    requests = [engine.add([5], max_new_tokens=40) for _ in range(2)]
    engine.step()
    requests += [engine.add(LONG[:tokens], max_new_tokens=2, prompt_logprobs=True) for _ in range(3)]
    drain(engine)
    requests += [engine.add(LONG[:tokens], max_new_tokens=2, prompt_logprobs=True) for _ in range(2)]
    drain(engine)
    for request in requests:
        check_request(request)


def test_what_the_engine_does_not_find_is_refused():
    with pytest.raises(ValueError, match="max_logprobs=161 must be at most 160"):
        engine_of(max_logprobs=161)
    engine = engine_of(max_logprobs=0)
    with pytest.raises(ValueError, match="top_logprobs=2, prompt_logprobs=False: the engine has max_logprobs=0"):
        engine.add([1], max_new_tokens=1, top_logprobs=2)
    with pytest.raises(ValueError, match="top_logprobs=0, prompt_logprobs=True: the engine has max_logprobs=0"):
        engine.add([1], max_new_tokens=1, prompt_logprobs=True)
    assert not engine.busy


def test_the_engine_says_which_requests_a_step_ran(monkeypatch):
    engine = engine_of(token_budget=12, prefix=None)
    first, second, third = (engine.add(ids(40, 40 * i), max_new_tokens=4) for i in range(3))
    assert engine.last_scheduled == ()
    engine.step()
    assert engine.last_scheduled == (first,) and engine.running == (first, second, third)  # the budget is spent
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_runner", None)
        with pytest.raises(AttributeError):
            engine.step()
    assert engine.last_scheduled == (first,) and engine.waiting == (first, second, third)
    admit = engine.manager.admit
    fails = [False, True]

    def failing(*args, **options):
        if fails.pop(0):
            raise MemoryError
        return admit(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "admit", failing)
        with pytest.raises(MemoryError):
            engine.step()
    assert engine.last_scheduled == (second,)
    drain(engine)
    assert all(len(request.generated) == 4 for request in (first, second, third))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_new_cache_lies_where_the_lost_one_did(monkeypatch, devices):
    """A step that raises after its launch has taken the cache with it. The new one is the same programs' argument."""
    manager = make()
    model = MODEL
    if devices == 2:
        mesh = make_mesh({"model": 2})
        manager = make(mesh=mesh)
        model = jax.device_put(MODEL, NamedSharding(mesh, PartitionSpec()))
    engine = engine_of(manager, model=model)
    request = engine.add(LONG, max_new_tokens=8)
    engine.warm_up()
    before = jax.tree.leaves(engine.cache)
    programs = engine.metrics.compilations
    run = CompiledModel.run

    def failing(*args, **options):
        run(*args, **options)
        raise RuntimeError("after the launch")

    with monkeypatch.context() as patch:
        patch.setattr(CompiledModel, "run", failing)
        with pytest.raises(RuntimeError, match="after the launch"):
            engine.step()
    for old, new in zip(before, jax.tree.leaves(engine.cache), strict=True):
        assert old is not new and new.committed == old.committed == (devices == 2)
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim) and new.sharding.num_devices == devices
    drain(engine)
    assert len(request.generated) == 8 and engine.metrics.compilations == programs
