"""An exception at any line of the engine, its scheduler and all they call: requests still get their tokens, each once.

A formula stands in for the model, so that a step takes milliseconds; the cache and what moves its bytes are real.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.decode import CompiledModel, StepOutput
from dsv4_jax.decode.step import accepted_lengths, last_accepted, sample_step
from dsv4_jax.engine import Engine
from dsv4_jax.host import PrefixCache
from dsv4_jax.host.step_order import record_step
from tests.host.faults import ENGINE, HOST, Fault, Inject, consistent
from tests.host.managers import CONFIG, ids, make


def token_after(position, seed):
    return (7 * position * position + position + 31 * seed) % CONFIG.vocab_size


def formula_step(model, cache, batch, rows, sampling, seeds, options, earlier, masks, processor, *, drafts):
    rows, slots, positions, seeds = map(np.asarray, (rows, batch.slots, batch.positions, seeds))
    at = np.maximum(rows, 0)
    taken = np.flatnonzero(np.asarray(earlier.indices) >= 0)
    # The tokens that come from the step before are those of their requests.
    ran = np.asarray(earlier.tokens)[np.asarray(earlier.indices)[taken]]
    assert ran.tolist() == token_after(positions[taken] - 1, seeds[slots[taken]].astype(int)).tolist()
    tokens = token_after(positions[at], seeds[slots[at]].astype(int))
    record_step(cache, batch, cache)
    return StepOutput(tokens, np.zeros(len(rows), np.float32)), cache


@jax.jit
def drafting_step(cache, batch, rows, seeds, earlier):
    """What a step does to lengths and drafts. Drafts are right for requests with seed 0, wrong for the others."""
    batch = earlier.fill(batch, cache.lengths)
    cache = cache.begin_step(batch)
    at = jnp.maximum(rows, 0)
    seeds = seeds.astype(jnp.int32)
    tokens = token_after(batch.positions[at], seeds[jnp.maximum(batch.slots[at], 0)])
    last = jnp.maximum(last_accepted(batch, rows, tokens, len(seeds)), 0)
    cache = dataclasses.replace(cache, lengths=accepted_lengths(cache.lengths, batch, rows, tokens))
    drafts = token_after(batch.positions[at[last]][:, None] + jnp.arange(1, 3)[None, :], 0)
    output = StepOutput(tokens, jnp.zeros(len(rows)), None, drafts, tokens[last])
    is_newest = (earlier.indices >= 0) & (earlier.indices % 3 == 0)
    right = batch.token_ids == token_after(batch.positions - 1, seeds[jnp.maximum(batch.slots, 0)])
    return output, cache, jnp.all(right | ~is_newest)


def formula_step_with_drafts(model, cache, batch, rows, sampling, seeds, options, earlier, masks, processor, *, drafts):
    assert drafts.count == 2
    output, new, is_right = drafting_step(cache, batch, rows, seeds, earlier)
    assert is_right
    record_step(cache, batch, new)
    return output, new


class Guess:
    """Right for requests with seed 0, wrong for the others."""

    def draft(self, tokens, count):
        return [token_after(len(tokens) - 1 + i, 0) for i in range(count)]


class Life:
    """An engine, its requests and what it told of them; with drafts, or with a step that runs ahead, or both."""

    def __init__(self, drafter=None):
        config = dataclasses.replace(CONFIG, num_nextn_predict_layers=int(drafter == "model"))
        self.manager = make(config, num_blocks=6, max_requests=3)
        self.prefix = PrefixCache(self.manager, key="")
        nothing = CompiledModel({})
        self.engine = Engine(nothing, self.manager, token_budget=30, drafter=drafter, prefix=self.prefix)
        self.told = {}
        self.requests = []

    def add(self, n, start, new, seed=0, **options):
        self.requests.append(self.engine.add(ids(n, start), max_new_tokens=new, seed=seed, **options))

    def step(self):
        for output in self.engine.step():
            self.told.setdefault(output.request.order, []).extend(output.tokens)

    def fork(self):
        children = self.engine.fork(self.requests[0], [0, 0, 0])
        self.told |= {child.order: child.generated for child in children}
        self.requests += children

    def cancel(self):
        if self.requests[1].finish_reason is None:
            self.engine.cancel(self.requests[1])

    def check(self):
        """What holds at any time."""
        consistent(self.manager, self.prefix)
        assert set(self.manager.slots) == {request.slot for request in self.engine.running}
        queue = [*self.engine.running, *self.engine.waiting]
        for request in self.requests:
            assert (request in queue) == (request.finish_reason is None)
            assert request.slot == -1 or request.finish_reason is None
            told = self.told.get(request.order, [])
            assert request.generated[: len(told)] == told and len(request.logprobs) == len(request.generated)

    def drain(self):
        """All requests get what they were to get, and every slot and block comes back."""
        while self.engine.busy:
            self.step()
        self.check()
        for request in self.requests:
            assert self.told.get(request.order, []) == request.generated
            known = request.tokens.tolist()
            start = len(request.prompt)
            assert known[start:] == [token_after(at, request.params.seed) for at in range(start - 1, len(known) - 1)]
            assert request.remaining == 0 or request.finish_reason in ("cancelled", "stop")
        self.prefix.evict(6)
        consistent(self.manager, self.prefix)
        assert (self.manager.free_slots, self.manager.free_blocks) == (3, 6)


def situations(drafter=None):
    """(name, a life that is about to do it, how it does it): each kind of thing that an engine does."""
    life = Life(drafter)
    life.add(30, 0, 24)
    life.add(30, 90, 24, seed=1)
    life.add(20, 0, 7, stop_tokens=[token_after(22, 0)])  # the fourth: a step ahead runs it in vain
    yield "admit and chunk", copy.deepcopy(life), Life.step
    while not all(request.generated for request in life.requests[:2]):
        life.step()
    yield "decode", copy.deepcopy(life), Life.step
    yield "fork", copy.deepcopy(life), Life.fork
    yield "cancel", copy.deepcopy(life), Life.cancel
    metrics = life.engine.metrics
    seen = {}
    while life.engine.busy:
        before = copy.deepcopy(life)
        saved = {request.order for request in life.requests if request.offloaded}
        life.step()
        after = life.engine.metrics
        happened = {
            "preempt": after.preemptions > metrics.preemptions,
            "resume": any(request.order in saved and not request.offloaded for request in life.requests),
            "hit": after.prefix.hits > metrics.prefix.hits,
            "finish": after.finished > metrics.finished,
        }
        seen |= {name: before for name, now in happened.items() if now and name not in seen}
        metrics = after
    assert len(seen) == 4, seen.keys()
    for name, before in seen.items():
        yield name, before, Life.step


@pytest.fixture(scope="module")
def lives():
    with pytest.MonkeyPatch.context() as patch:

        def run(model, function, *args, drafts, record):
            assert function is sample_step
            return (formula_step_with_drafts if drafts.count else formula_step)(model, *args, drafts=drafts)

        patch.setattr(CompiledModel, "run", run)
        kinds = {"drafts": Guess(), "ahead": None, "drafts ahead": "model"}
        yield {kind: {name: (life, act) for name, life, act in situations(kinds[kind])} for kind in kinds}


# Copying an engine copies its counter of requests.
pytestmark = pytest.mark.filterwarnings("ignore:Pickle, copy:DeprecationWarning")
NAMES = ("admit and chunk", "decode", "fork", "cancel", "preempt", "resume", "hit", "finish")


# That every line of the host undoes what it began is tested there: here a few of them show that the engine bears it.
@pytest.mark.parametrize(
    ("kind", "files", "every", "opcodes"),
    [
        ("ahead", ENGINE, 13, False),
        ("ahead", HOST, 47, False),
        ("drafts", ENGINE, 17, False),
        ("drafts ahead", ENGINE, 19, False),
        pytest.param("ahead", ENGINE, 1, False, marks=pytest.mark.slow),
        pytest.param("drafts", ENGINE, 23, True, marks=pytest.mark.slow),
        pytest.param("drafts ahead", ENGINE, 2, False, marks=pytest.mark.slow),
        pytest.param("drafts ahead", HOST, 53, False, marks=pytest.mark.slow),
        pytest.param("drafts", HOST, 11, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: {ENGINE: "engine", HOST: "host"}.get(value, str(value)) if isinstance(value, tuple) else None,
)
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_anywhere_leaves_a_whole_engine(lives, name, kind, files, every, opcodes):
    before, act = lives[kind][name]
    n = 0
    cut = True
    while cut:
        life = copy.deepcopy(before)
        cut = False
        drain = n // every % 24 == 0
        try:
            with Inject(n, files, opcodes):
                act(life)
        except Fault as fault:
            cut = True
            drain |= fault.function == "step"  # where what was told may get lost
            if opcodes and fault.function == "step" and not life.engine._scheduler.pending_outputs:
                # Between the last two opcodes, where nothing real comes: what was told is already out of hand.
                life.told = {request.order: request.generated for request in life.requests}
        life.check()
        if act is Life.cancel:
            act(life)
        if drain:
            life.drain()
        n += every
    assert n > every
