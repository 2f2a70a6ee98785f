"""The engine: whatever meets in it, every request gets the tokens it would get alone."""

import io
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dsv4_jax.cache import request_rows as moves
from dsv4_jax.decode import CompiledModel, SamplingParams, sample_step
from dsv4_jax.engine import Engine, PromptLookup, scheduler
from dsv4_jax.host import KVCacheManager, PrefixCache
from tests.decode.conftest import EVERY_MODEL, EVERY_MODEL_SLOWLY


WARM = SamplingParams(temperature=1.0)
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(160, size=n).tolist() for n in (3, 40, 1, 21, 16, 75)]
SAMPLINGS = [
    WARM,
    SamplingParams(),
    SamplingParams(0.7, top_k=20),
    SamplingParams(1.3, top_p=0.9),
    SamplingParams(),
    SamplingParams(1.0, 5, 0.5),
]
# All that an engine runs on the device.
PROGRAMS = (
    sample_step, moves.read_request, moves.write_request, moves.copy_request, moves.read_blocks, moves.write_blocks,
)  # fmt: skip
BUDGET = 20  # with drafts a token and three guesses of three requests, and eight more


class Silent:
    """Guesses nothing: plain decoding, in the programs that verify drafts."""

    def draft(self, tokens, count):
        return []


def make(small, manager, **options):
    """An engine whose programs all tests share: with a drafter, whether it guesses or not."""
    options = dict(token_budget=BUDGET, drafter=PromptLookup()) | options
    return Engine(small[0], manager, **options)


def add(engine, i, **options):
    return engine.add(
        PROMPTS[i], **dict(max_new_tokens=24 - 3 * i, sampling=SAMPLINGS[i], seed=i, id=f"request {i}") | options
    )


def drain(engine, most=400):
    """Runs all steps; they must end."""
    for _ in range(most):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def is_drained(engine, blocks=36):
    """Every slot is free, and every block that no prefix cache holds."""
    manager = engine.manager
    held = 0 if engine.prefix is None else engine.prefix.metrics.blocks
    return manager.free_slots == 3 and manager.free_blocks == blocks - held


@pytest.fixture(scope="module")
def alone(small, wide):
    """What each request gets when nothing else runs, without drafts."""
    results = []
    for i in range(len(PROMPTS)):
        engine = make(small, wide(), drafter=Silent())
        request = add(engine, i)
        drain(engine)
        results.append(request.generated)
    return results


@EVERY_MODEL
def test_two_programs_and_none_later(small, roomy):
    """Requests of all lengths and kinds come, go, wait and are cancelled: nothing compiles."""
    engine = make(small, roomy, prefix=PrefixCache(roomy, key="tiny"))
    assert engine.warm_up() == {"mixed": BUDGET, "decode": 12}
    assert is_drained(engine) and engine.metrics.compilations <= 2
    compiled = [program._cache_size() for program in PROGRAMS]
    assert all(compiled)
    with jax.transfer_guard("disallow"):
        for i in range(40):
            if i < 18 and i % 3 == 0:
                request = add(engine, i // 3)
            if i == 20:
                engine.cancel(request)
            engine.step()
            if i == 10:
                engine.fork(engine.running[0], [1, 2, 3])
        again = engine.add(PROMPTS[1], max_new_tokens=2)
    drain(engine)
    assert again.finish_reason and engine.metrics.prefix.hits
    assert [program._cache_size() for program in PROGRAMS] == compiled


@EVERY_MODEL
def test_company_waiting_and_drafts_change_nothing(small, roomy, alone):
    engine = make(small, roomy)
    requests = [add(engine, i) for i in (5, 0, 1)]
    engine.step()
    requests += [add(engine, i) for i in (2, 3, 4)]
    assert len(engine.waiting) == 3
    drain(engine)
    assert [r.generated for r in requests] == [alone[i] for i in (5, 0, 1, 2, 3, 4)]
    assert all(r.finish_reason == "length" and len(r.logprobs) == len(r.generated) for r in requests)
    assert is_drained(engine) and engine.metrics.waits > 0 and engine.metrics.finished == 6


@pytest.mark.parametrize("drafter", [Silent(), PromptLookup()])
def test_lengths_agree_without_reading_the_device(small, roomy, drafter):
    """After every step, refused drafts or not."""
    engine = make(small, roomy, drafter=drafter)
    for i in range(6):
        add(engine, i)
    while engine.busy:
        engine.step()
        for slot in (r.slot for r in engine.running):
            assert int(engine.cache.lengths[slot]) == roomy.length(slot)
            chex.assert_trees_all_equal(engine.cache.block_table[slot], roomy.block_table[slot])
    metrics = engine.metrics
    assert (metrics.drafted_tokens > metrics.accepted_tokens) == isinstance(drafter, PromptLookup)
    assert is_drained(engine)


@EVERY_MODEL
def test_the_youngest_leaves_and_comes_back_with_the_same_tokens(small, wide):
    """Three requests of 5 to 7 blocks in the end, over 9 blocks."""
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[4]]
    new = 60
    tight = wide(9)
    want = []
    for i, prompt in enumerate(prompts):
        engine = make(small, tight)
        want.append(list(engine.stream(engine.add(prompt, max_new_tokens=new, sampling=WARM, seed=i))))
    engine = make(small, tight)
    requests = [engine.add(prompt, max_new_tokens=new, sampling=WARM, seed=i) for i, prompt in enumerate(prompts)]
    left = []
    while engine.busy:
        engine.step()
        left += [r.order for r in engine.waiting if r.offloaded is not None and (not left or left[-1] != r.order)]
    assert [r.generated for r in requests] == want
    assert engine.metrics.preemptions >= 2 and left[0] == 2 and 0 not in left
    assert is_drained(engine, 9)


def test_a_request_that_holds_no_tokens_yet_leaves_as_well(small, tight):
    """Its blocks are reserved, but an earlier prompt takes the steps' tokens when a decoding request needs a block."""
    engine = make(small, tight, drafter=Silent())
    decoding = engine.add(PROMPTS[4], max_new_tokens=40)
    for _ in range(15):
        engine.step()
    reading, later = (engine.add(prompt, max_new_tokens=12) for prompt in (PROMPTS[5] + PROMPTS[3], PROMPTS[1]))
    while engine.metrics.preemptions == 0:
        engine.step()
        assert later.slot < 0 or tight.length(later.slot) == 0
    assert (later.slot, later.offloaded) == (-1, None) and reading.slot >= 0
    drain(engine)
    assert [r.finish_reason for r in (decoding, reading, later)] == ["length"] * 3 and is_drained(engine, 13)
    alone = engine.add(PROMPTS[1], max_new_tokens=12)
    drain(engine)
    assert alone.generated == later.generated


def test_priority_decides_who_is_served_first_and_who_leaves(small, wide):
    engine = make(small, wide(9))
    slow = [engine.add(PROMPTS[3], max_new_tokens=50) for _ in range(4)]
    first = engine.add(PROMPTS[3], max_new_tokens=50, priority=1)
    assert engine.waiting == (first, *slow)
    while engine.busy:
        engine.step()
        assert first.offloaded is None  # it never leaves
        if first.finish_reason is None:
            assert first.slot >= 0
    assert engine.metrics.preemptions > 0
    assert all(r.generated == first.generated for r in slow)


@EVERY_MODEL_SLOWLY
def test_a_uniform_engine_has_one_program(small, roomy, wide):
    """Then not even the last bit of a logit depends on drafts, nor on reading a text again that was generated."""
    options = dict(max_new_tokens=30, sampling=WARM, seed=6)
    texts = []
    for manager, drafter in ((roomy, Silent()), (wide(), PromptLookup())):
        engine = make(small, manager, drafter=drafter, batch_invariant=True)
        assert engine.warm_up() == {"mixed": BUDGET}
        texts.append(engine.add(PROMPTS[1], **options))
        drain(engine)
        assert engine.metrics.mixed_steps == engine.metrics.steps
    again = engine.add(texts[0].tokens[:-10], **options | dict(max_new_tokens=10))
    drain(engine)
    assert texts[0].generated == texts[1].generated and texts[0].logprobs == texts[1].logprobs
    assert again.generated == texts[0].generated[-10:] and again.logprobs == texts[0].logprobs[-10:]


def test_stop_tokens_and_limits(small, roomy, alone):
    engine = make(small, roomy)
    stop = alone[0][5]
    stopped = add(engine, 0, stop_tokens=(stop, 159))
    single = add(engine, 1, max_new_tokens=1)
    drain(engine)
    assert stopped.generated == alone[0][: alone[0].index(stop) + 1] and stopped.finish_reason == "stop"
    assert single.generated == alone[1][:1] and single.finish_reason == "length"
    assert is_drained(engine)


def test_streams_run_side_by_side(small, roomy, alone):
    engine = make(small, roomy)
    a = add(engine, 0)
    b = add(engine, 3)
    pairs = list(zip(engine.stream(a), engine.stream(b), strict=False))
    assert [x for x, _ in pairs] == alone[0][: len(pairs)] and [y for _, y in pairs] == alone[3][: len(pairs)]
    # Steps belong to nobody: their outputs are still there, except those of b, which was iterated to its end.
    outputs = {output.request: output.tokens for output in engine.step()}
    assert [*outputs] == [a] and outputs[a] == a.generated[: len(outputs[a])] and len(outputs[a]) >= len(pairs)
    drain(engine)
    assert list(engine.stream(b)) == alone[3]


def test_streams_that_ended_leave_nothing_behind(small, roomy, alone):
    engine = make(small, roomy)
    requests = [add(engine, i) for i in (0, 3)]
    assert [list(engine.stream(request)) for request in requests] == [alone[0], alone[3]]
    assert not engine.busy and engine.step() == []


def test_cancelled_requests_keep_their_tokens(small, roomy, alone):
    engine = make(small, roomy)
    requests = [add(engine, i) for i in range(4)]
    while not requests[0].generated:
        engine.step()
    engine.cancel(requests[0])
    engine.cancel(requests[3])  # it waits
    drain(engine)
    assert requests[0].finish_reason == requests[3].finish_reason == "cancelled" and requests[3].generated == []
    assert requests[0].generated == alone[0][: len(requests[0].generated)]
    assert [r.generated for r in requests[1:3]] == alone[1:3]
    assert engine.metrics.cancelled == 2 and is_drained(engine)


class Moody(PromptLookup):
    """Fails, or guesses badly formed tokens, for one prompt."""

    def __init__(self, prompt, result):
        super().__init__()
        self.prompt = prompt
        self.result = result

    def draft(self, tokens, count):
        if tokens[: len(self.prompt)].tolist() != self.prompt:
            return super().draft(tokens, count)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (RuntimeError("no idea"), "no idea"),
        ([1, 2, 3, 4], "the drafter guessed 4 tokens, at most 3 were asked for"),
        ([5, 160], r"drafts\[1\]=160 is outside the vocabulary"),
        ([0.5], "drafts must hold whole numbers"),
    ],
)
def test_a_drafter_that_fails_fails_one_request(small, roomy, alone, result, message):
    engine = make(small, roomy, drafter=Moody(PROMPTS[1], result))
    requests = [add(engine, i) for i in range(4)]
    drain(engine)
    assert requests[1].finish_reason == "error" and requests[1].generated == alone[1][:1]
    assert [requests[i].generated for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]
    with pytest.raises(Exception, match=message):
        list(engine.stream(requests[1]))
    assert engine.metrics.failed == 1 and engine.metrics.restarts == 0 and is_drained(engine)


def test_bytes_gone_bad_fail_one_request(small, roomy, alone):
    """NaN in a ring: its request fails, the others read other rows."""
    engine = make(small, roomy)
    requests = [add(engine, i) for i in range(3)]
    while not all(r.generated for r in requests):
        engine.step()
    rows = engine.cache.swa
    bad = rows.rope.at[:, requests[1].slot].set(jnp.asarray(jnp.nan, rows.rope.dtype))
    rows.__dict__["rope"] = bad
    drain(engine)
    assert requests[1].finish_reason == "error" and "not finite" in str(requests[1].error)
    assert [r.generated for r in (requests[0], requests[2])] == [alone[0], alone[2]]
    assert is_drained(engine)


class Fault(Exception):
    """An error nobody expects."""


def test_copies_of_a_prompt_that_is_being_read_have_blocks_for_it_or_wait(small, wide, alone):
    """Blocks for one and a half of them: no step runs out of blocks."""
    engine = make(small, wide(9))
    request = add(engine, 5)
    engine.step()
    children = engine.fork(request, [5, 5])
    drain(engine)
    assert [r.generated for r in (request, *children)] == [alone[5]] * 3 and engine.metrics.restarts == 0


def faulty(monkeypatch, targets, at, late):
    """Makes call number `at` to any of the (owner, name) raise, before or after it did its work; counts calls."""
    calls = [0]
    for owner, name in targets:
        real = getattr(owner, name)

        def call(*args, _real=real, _name=name, **kwargs):
            mine = calls[0]
            calls[0] = calls[0] + 1
            if mine == at and not late:
                raise Fault(_name)
            try:
                return _real(*args, **kwargs)
            finally:
                if mine == at:
                    raise Fault(_name)

        monkeypatch.setattr(owner, name, call)
    return calls


def live_through(small, manager, blocks, monkeypatch, at, late):
    """Waiting, chunks, drafts, hits and preemption with one fault; (results, calls, faults seen)."""
    prefix = PrefixCache(manager, key="tiny")
    engine = make(small, manager, prefix=prefix)
    targets = [(manager, name) for name in ("admit", "allocate", "prepare_arrays", "rewind", "release")]
    targets += [(manager.requests.allocator, name) for name in ("acquire", "release", "share")]
    targets += [(prefix, name) for name in ("admit", "observe")]
    targets += [(scheduler, "offload"), (scheduler, "resume"), (CompiledModel, "run")]
    with monkeypatch.context() as patch:
        prompts = [PROMPTS[4] + PROMPTS[i] for i in (1, 3, 0)]
        requests = [engine.add(prompt, max_new_tokens=40, sampling=WARM, seed=i) for i, prompt in enumerate(prompts)]
        requests.append(engine.add(prompts[0], max_new_tokens=9, sampling=WARM))
        calls = faulty(patch, targets, at, late)
        faults = 0
        for _ in range(400):
            if not engine.busy:
                break
            try:
                engine.step()
            except Fault:
                faults += 1
        assert not engine.busy and engine.metrics.restarts == faults and is_drained(engine, blocks)
        for slot in range(3):
            assert slot not in manager.slots
    prefix.evict(36)
    assert manager.free_blocks == blocks
    return [r.generated for r in requests], calls[0], engine.metrics


@pytest.mark.slow
def test_a_fault_at_any_host_step_leaves_a_whole_engine(small, wide, monkeypatch):
    def run(at, late):
        return live_through(small, wide(9), 9, monkeypatch, at, late)

    want, calls, metrics = run(-1, False)
    assert metrics.preemptions > 0 and metrics.prefix.hits > 0 and metrics.drafted_tokens > 0
    assert want[3] == want[0][:9]
    for n, at in enumerate(np.random.default_rng(3).permutation(calls)[:6]):
        got, _, metrics = run(at, late=bool(n % 2))
        assert got == want and metrics.restarts == 1


def test_requests_that_cannot_fit_and_strangers_are_refused(small, roomy, tight):
    few = KVCacheManager(small[1], num_blocks=2, max_requests=3, max_context=96, max_query_tokens=4, block_tokens=16)
    with pytest.raises(ValueError, match="need room for 33 tokens, the whole cache holds 32"):
        make(small, few).add([1] * 30, max_new_tokens=4)
    other = make(small, roomy)
    engine = make(small, tight)
    request = other.add([1], max_new_tokens=1)
    for call in (engine.cancel, lambda request: next(engine.stream(request))):
        with pytest.raises(ValueError, match="belongs to another engine"):
            call(request)
    drain(other)
    with pytest.raises(ValueError, match=r"request 0 has finished \(length\)"):
        other.cancel(request)


def test_metrics_as_a_table(small, roomy):
    engine = make(small, roomy, prefix=PrefixCache(roomy, key="tiny"))
    for _ in range(2):
        list(engine.stream(engine.add(PROMPTS[5], max_new_tokens=8)))
    metrics = engine.metrics
    assert metrics.prompt_tokens == 75 + 11 and metrics.generated_tokens == 16 and metrics.prefix.hit_tokens == 64
    assert metrics.pools["csa4 entries"].used == 5 / 36 * metrics.pools["csa4 entries"].total
    assert metrics.pools["sliding windows"].used == 0
    console = Console(width=100, file=io.StringIO())
    console.print(metrics.table())
    rows = dict(re.findall(r"│ (\S.*?) +│ (\S.*?) +│", console.file.getvalue()))
    counters = {"prompt tokens": 86, "generated tokens": 16, "prefix hits": 1, "prefix requests": 2, "acceptance": 0.0}
    assert {name: rows[name] for name in counters} == {name: str(value) for name, value in counters.items()}
    assert re.fullmatch(r"0 of [\d,]+ bytes", rows["sliding windows"])
