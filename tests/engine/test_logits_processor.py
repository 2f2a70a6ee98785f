"""A user's own functions of the logits: the same tokens by every road, and those that a loop in NumPy draws."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import LogitsProcessor
from dsv4_jax.decode import SamplingParams, decode_loop, decode_step, sample, sample_step
from dsv4_jax.decode.logits_processor import begin_slot
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import PrefixCache
from tests.decode.bigram import MODEL, TABLE, DraftingBigram, check
from tests.engine.grammars import END, VOCABULARY, text
from tests.host.managers import CONFIG, ids, make
from tests.parallel.test_data_axis import bigram_on, make_mesh


WARM = SamplingParams(temperature=1.0)
GREEDY = SamplingParams()
VOCAB = CONFIG.vocab_size
DRAFTING = dict(model=DraftingBigram(MODEL.table), config=dataclasses.replace(CONFIG, num_nextn_predict_layers=1))


def penalize(logits, state):
    """A penalty for each earlier use of a token, and a ban of the newest one."""
    return jnp.where(jnp.arange(VOCAB) == state["newest"], -jnp.inf, logits - state["penalty"] * state["counts"])


def count(state, token):
    return state | dict(counts=state["counts"].at[token].add(1), newest=token)


def state_of(penalty, prompt=()):
    """Penalties are powers of two: their products are exact, so tokens do not depend on fused multiply-adds."""
    counts = np.bincount(np.array(prompt, int), minlength=VOCAB).astype(np.float32)
    return dict(counts=counts, penalty=np.float32(penalty), newest=np.int32(-1))


PROCESSOR = LogitsProcessor(penalize, state_of(1), count)
REQUESTS = [
    # prompt, state, sampling
    (ids(5), None, GREEDY),
    (ids(30, 7), state_of(0), WARM),
    (ids(16, 40), state_of(4, ids(16, 40)), WARM),
    ([7], state_of(0.5), GREEDY),
    (ids(60, 3), state_of(8), WARM),
    (ids(9), None, SamplingParams(0.7, top_k=12, top_p=0.9)),
]


def reference(i, n):
    """The n tokens that a loop in NumPy draws for a request."""
    prompt, state, sampling = REQUESTS[i]
    tokens = list(prompt)
    state = dict(PROCESSOR.state if state is None else state)
    counts = state["counts"].copy()
    newest = -1
    for _ in range(n):
        logits = TABLE[tokens[-1]] - state["penalty"] * counts
        if newest >= 0:
            logits[newest] = -np.inf
        where = jnp.array([i], jnp.uint32), jnp.array([len(tokens)], jnp.int32)
        newest = int(draw(jnp.asarray(logits[None]), sampling, *where)[0])
        counts[newest] += 1
        tokens.append(newest)
    return tokens[len(prompt) :]


draw = jax.jit(sample)


@pytest.fixture(scope="module")
def expected():
    """What each request gets, which is not what it gets without a processor."""
    tokens = [reference(i, 30) for i in range(len(REQUESTS))]
    assert all(len(set(t)) > 12 for t in tokens) and all(a != b for t in tokens for a, b in zip(t, t[1:], strict=False))
    return tokens


def engine_of(model=MODEL, config=CONFIG, *, mesh=None, num_blocks=8, cached=False, **options):
    manager = make(config, num_blocks=num_blocks, mesh=mesh)
    prefix = PrefixCache(manager, key="") if cached else None
    return Engine(model, manager, prefix=prefix, **dict(token_budget=20, logits_processor=PROCESSOR) | options)


def add(engine, i, n=30, **options):
    prompt, state, sampling = REQUESTS[i]
    return engine.add(prompt, max_new_tokens=n, logits_state=state, sampling=sampling, seed=i, **options)


def drain(engine):
    while engine.busy:
        engine.step()


ROADS = {
    "overlap": {},
    "no overlap": dict(overlap=False),
    "drafts": dict(drafter=PromptLookup(), cached=True),
    "drafts of the device": dict(drafter="model", **DRAFTING),
    "one program": dict(batch_invariant=True, drafter=PromptLookup(), max_logprobs=2),
}


@pytest.mark.parametrize("road", ROADS)
def test_every_road_draws_the_tokens_of_a_loop_in_numpy(expected, road):
    """Six requests in four slots: chunks, waiting, preemption and forks; and nothing compiles after the start."""
    engine = engine_of(**ROADS[road])
    engine.warm_up()
    compiled = engine.metrics.compilations, begin_slot._cache_size(), sample_step._cache_size()
    with jax.transfer_guard("disallow"):
        requests = [add(engine, i) for i in range(len(REQUESTS))]
        while requests[3].num_generated < 8:
            engine.step()
        known = requests[3].generated
        (child,) = engine.fork(requests[3], [3])  # of the same seed: it draws the same
        drain(engine)
    assert [request.generated for request in requests] == expected
    assert child.generated == expected[3] and child.generated[: len(known)] == known
    assert engine.metrics.preemptions > 0 and (engine.metrics.accepted_tokens > 0) == ("drafter" in ROADS[road])
    assert (engine.metrics.compilations, begin_slot._cache_size(), sample_step._cache_size()) == compiled
    again = add(engine, 4)
    drain(engine)
    assert again.generated == expected[4] and (again.cached_tokens > 0) == ("cached" in ROADS[road])


def test_log_probabilities_are_those_of_the_model(expected):
    engine = engine_of(max_logprobs=3)
    request = add(engine, 4, top_logprobs=3, prompt_logprobs=True)
    drain(engine)
    assert request.generated == expected[4]
    check(request.tokens[len(request.prompt) - 1 :].tolist(), request.logprobs, request.top_logprobs)
    check(request.prompt, request.prompt_logprobs, request.prompt_top_logprobs)


def test_a_state_may_be_changed_after_its_request_was_added(expected):
    engine = engine_of()
    state = state_of(4, ids(16, 40))
    request = engine.add(REQUESTS[2][0], max_new_tokens=30, logits_state=state, sampling=REQUESTS[2][2], seed=2)
    state["counts"][:] = 1
    drain(engine)
    assert request.generated == expected[2]


def test_states_survive_errors_and_new_weights(expected, monkeypatch):
    engine = engine_of()
    calls = []
    launch = Engine._launch

    def failing(self, *args):
        calls.append(args)
        launched = launch(self, *args)
        if len(calls) in (5, 14):
            raise RuntimeError("once")
        return launched

    monkeypatch.setattr(Engine, "_launch", failing)
    requests = [add(engine, i) for i in range(len(REQUESTS))]
    while engine.busy:
        if engine.metrics.steps in (9, 20):
            engine.update_weights(MODEL)
        try:
            engine.step()
        except RuntimeError as error:
            assert str(error) == "once"
    assert [request.generated for request in requests] == expected and engine.metrics.restarts == 2


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_loop_on_the_device_and_the_next_one(expected, drafts):
    """The second loop goes on with the states that the first returned; one request has fewer tokens."""
    model, config = (DRAFTING["model"], DRAFTING["config"]) if drafts else (MODEL, CONFIG)
    manager = make(config)
    slots = 4
    states = [PROCESSOR.state if state is None else state for _, state, _ in REQUESTS[:slots]]
    prompts = [[prompt[-1]] for prompt, _, _ in REQUESTS[:slots]]
    chosen = dict(steps=8, drafts=drafts)
    cache = manager.init_cache()
    processor = PROCESSOR.stacked(states)
    assert [manager.admit() for _ in range(slots)] == list(range(slots))
    tokens: list = [[] for _ in range(slots)]
    for _ in range(2):
        batch = manager.prepare_forward({k: (tokens[k] or prompts[k])[-1:] for k in range(slots)}, reserve=7)
        output, cache = decode_loop(model, cache, batch, jnp.zeros(slots, jnp.uint32), GREEDY, processor, **chosen)
        processor = output.processor
        for k, row in enumerate(np.asarray(output.tokens).tolist()):
            tokens[k] += row
            manager.advance(k, 7)
    assert tokens[0] == expected[0][:16] and tokens[3] == expected[3][:16]
    assert not drafts or np.asarray(output.accepted).max() > 0
    counted = [np.bincount(row, minlength=VOCAB) for row in tokens]
    np.testing.assert_array_equal(processor.state["counts"], np.stack([s["counts"] for s in states]) + counted)


def test_a_loop_returns_the_states_after_its_tokens():
    """Not those after drafts that were right, but follow a stop token."""
    manager = make(DRAFTING["config"])
    slot = manager.admit()
    batch = manager.prepare_forward({slot: [3]}, reserve=19)
    chosen = dict(steps=20, drafts=2, stop_tokens=tuple(range(0, VOCAB, 4)))
    counting = PROCESSOR.stacked([state_of(0)] * 4)
    seeds = jnp.zeros(4, jnp.uint32)
    output, _ = decode_loop(DRAFTING["model"], manager.init_cache(), batch, seeds, GREEDY, counting, **chosen)
    tokens = np.asarray(output.tokens)[slot]
    np.testing.assert_array_equal(
        np.asarray(output.processor.state["counts"])[slot], np.bincount(tokens[tokens >= 0], minlength=VOCAB)
    )


@pytest.mark.slow
def test_on_a_mesh(expected):
    """Each shard keeps the states of its own slots."""
    mesh = make_mesh({"data": 2, "model": 2})
    for options in ({}, dict(drafter="model")):
        model, config = (DRAFTING["model"], DRAFTING["config"]) if options else (MODEL, CONFIG)
        engine = engine_of(bigram_on(mesh, model), config, mesh=mesh, num_blocks=24, **options)
        requests = [add(engine, i) for i in range(len(REQUESTS))]
        drain(engine)
        assert [request.generated for request in requests] == expected


def test_grammars_hold_whatever_the_processor_does(expected):
    """With steps that run ahead, whose tokens are drawn later, and without; others beside them get their tokens."""
    digits = VOCABULARY.compile("start: /[0-9]{6}/")
    texts = []
    for overlap in (True, False):
        engine = engine_of(overlap=overlap)
        options = dict(grammar=digits, stop_tokens=(END,), sampling=WARM, logits_state=state_of(64))
        limited = [engine.add([i], max_new_tokens=20, seed=i, **options) for i in range(3)]
        other = add(engine, 3)
        drain(engine)
        assert other.generated == expected[3]
        texts.append([text(request.generated) for request in limited])
    assert texts[0] == texts[1]
    assert all(t.isdigit() and all(a != b for a, b in zip(t, t[1:], strict=False)) for t in texts[0])


class Wrong:
    """Guesses the token 0."""

    def draft(self, tokens, count):
        return [0] * count


def test_a_request_goes_on_after_a_draft_that_allows_no_token():
    """The logits after a refused draft are those of no token of the request."""

    def only_next(logits, state):
        return jnp.where(jnp.arange(VOCAB) == state, logits, -jnp.inf)

    def follow(state, token):
        return jnp.where(token == state, token + 1, -1)

    engine = engine_of(logits_processor=LogitsProcessor(only_next, np.int32(20), follow), drafter=Wrong())
    request = engine.add([3], max_new_tokens=5)
    drain(engine)
    assert request.generated == [20, 21, 22, 23, 24] and request.drafted_tokens > 0


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_a_request_without_an_allowed_token_ends_alone(value):
    processor = LogitsProcessor(lambda logits, state: logits + state, np.float32(0))
    engine = engine_of(logits_processor=processor)
    bad = engine.add([3], max_new_tokens=5, logits_state=np.float32(value))
    good = engine.add([3], max_new_tokens=5)
    drain(engine)
    assert bad.finish_reason == "error" and "request 0: logits after its token 0 are not finite" in str(bad.error)
    assert good.generated == TABLE[[3, *good.generated[:-1]]].argmax(axis=1).tolist()


def test_a_processor_without_a_state_and_one_that_forces_a_token():
    def force(logits, state):
        return jnp.full_like(logits, -jnp.inf).at[9].set(0.0)

    engine = engine_of(logits_processor=LogitsProcessor(force))
    request = engine.add([3], max_new_tokens=4)
    drain(engine)
    assert request.generated == [9] * 4


def test_refusals(untyped):
    for processor, error, message in (
        (penalize, TypeError, "logits_processor=<function penalize.* must be a LogitsProcessor"),
        (LogitsProcessor(lambda x, s: x[1:]), ValueError, r"process must return float32\[160\], the logits, not"),
        (LogitsProcessor(lambda x, s: x.astype(jnp.bfloat16)), ValueError, r"not \['bfloat16\[160\]'\]"),
        (LogitsProcessor(lambda x, s: (x, s)), ValueError, "process must return"),
        (LogitsProcessor(penalize, state_of(1), lambda s, t: s["counts"]), ValueError, "update returned"),
        (LogitsProcessor(penalize, state_of(1), lambda s, t: s | dict(newest=1.0)), ValueError, "update returned"),
    ):
        with pytest.raises(error, match=message):
            engine_of(logits_processor=processor)
    engine = engine_of()
    for state in (state_of(1) | dict(more=np.zeros(1)), state_of(1) | dict(counts=np.zeros(3, np.float32)), 5):
        with pytest.raises(ValueError, match=r"logits_state has .*, the processor's state has .*float32\[160\]"):
            engine.add([1], max_new_tokens=1, logits_state=state)
    with pytest.raises(ValueError, match=r"states\[1\] has .*, the processor's state has"):
        PROCESSOR.stacked([state_of(1), 5])
    with pytest.raises(ValueError, match="logits_state: the engine has no logits_processor"):
        engine_of(logits_processor=None).add([1], max_new_tokens=1, logits_state=state_of(1))
    assert not engine.busy
    manager = make()
    batch = manager.prepare_forward({manager.admit(): [1]})
    with pytest.raises(ValueError, match=r"processor.state\['counts'\] has shape \(160,\), it must be \[4, ...\]"):
        sample_step(MODEL, manager.init_cache(), batch, processor=PROCESSOR)
    decode_step(MODEL, manager.init_cache(), batch)  # it has not run
