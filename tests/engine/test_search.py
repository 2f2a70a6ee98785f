"""Forked requests: each goes on as if it were alone; n-best and beam search against their definitions."""

import dataclasses
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.decode import LogprobOptions, SamplingParams, sample_step
from dsv4_jax.engine import Engine, beam_search, n_best
from dsv4_jax.engine.generate import prefill
from dsv4_jax.host import CacheCorruptionError, CacheFullError, KVCacheManager, PrefixCache
from tests.decode.conftest import EVERY_MODEL_SLOWLY


WARM = SamplingParams(temperature=1.0)
PROMPT = np.random.default_rng(7).integers(160, size=37).tolist()
CHUNK = 18  # so that engines of 20 tokens a step share their programs with other tests


def alone(small, manager, prompt, seed, **options):
    """What one request draws in an engine of its own."""
    engine = Engine(small[0], manager, token_budget=CHUNK + 2)
    request = engine.add(prompt, **dict(max_new_tokens=20, sampling=WARM, seed=seed) | options)
    return list(engine.stream(request)), request.logprobs


@EVERY_MODEL_SLOWLY
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:32], [5]], ids=["open block", "full blocks", "one token"])
def test_n_best_are_the_answers_that_streams_draw(small, wide, prompt):
    """Five over three slots: two wait, with a copy of the prompt's bytes in host memory."""
    manager = wide()
    found = n_best(small[0], manager, prompt, n=5, max_new_tokens=20, sampling=WARM, seed=3, chunk=CHUNK)
    want = {
        tuple(tokens): sum(logprobs) for tokens, logprobs in (alone(small, wide(), prompt, 3 + i) for i in range(5))
    }
    # A fork runs the prompt's last token in a decode step, and a request alone runs it in a chunk: sums of programs
    # with other numbers of rows may round differently, and a quantized row with them.
    assert {tuple(c.tokens): c.logprob for c in found} == pytest.approx(want, abs=0.02) and len(want) == 5
    assert [c.score() for c in found] == sorted((c.logprob / 20 for c in found), reverse=True)
    assert manager.free_slots == 3 and manager.free_blocks == 36


def test_a_prompt_that_running_requests_leave_no_slot_is_refused(small, wide):
    """Running requests draw nothing while a prompt is read, so their slots would never become free."""
    engine = Engine(small[0], wide(), token_budget=CHUNK + 2)
    running = [engine.add(PROMPT, max_new_tokens=3) for _ in range(3)]
    prefill(engine, running)
    late = engine.add([5], max_new_tokens=2)
    with pytest.raises(CacheFullError, match=f"request {late.id!r} waits for a slot or blocks that running requests"):
        prefill(engine, [late])
    while engine.busy:
        engine.step()
    assert [len(request.generated) for request in (*running, late)] == [3, 3, 3, 2]


def test_the_error_of_a_prompt_that_fails_is_raised(small, wide):
    manager = wide()
    prefix = PrefixCache(manager, key="", debug=True)
    engine = Engine(small[0], manager, token_budget=CHUNK + 2, prefix=prefix)
    engine.add(PROMPT, max_new_tokens=2)
    while engine.busy:
        engine.step()
    for node in prefix._tree.nodes.values():
        node.sums = [crc + 1 for crc in node.sums]
    with pytest.raises(CacheCorruptionError):
        prefill(engine, [engine.add(PROMPT, max_new_tokens=2)])


@EVERY_MODEL_SLOWLY
def test_forks_go_on_from_where_the_request_is(small, wide):
    """In the middle of generation, three generations deep; with room for some children only, and for none."""
    engine = Engine(small[0], wide(14), token_budget=CHUNK + 2)
    parent = engine.add(PROMPT, max_new_tokens=30, sampling=WARM, seed=1)
    while len(parent.generated) < 9:
        engine.step()
    made = engine.fork(parent, [2, 3, 4])
    assert [r.slot >= 0 for r in made] == [True, True, False]
    for _ in range(5):
        engine.step()
    made += engine.fork(made[0], [5])
    before = made[0].generated
    while engine.busy:
        engine.step()
    assert parent.generated == alone(small, wide(), PROMPT, 1, max_new_tokens=30)[0]
    for child, seed in zip(made[:3], (2, 3, 4), strict=True):
        text = PROMPT + parent.generated[:9]
        assert child.generated == parent.generated[:9] + alone(small, wide(), text, seed, max_new_tokens=21)[0]
    text = PROMPT + before
    assert made[3].generated == before + alone(small, wide(), text, 5, max_new_tokens=30 - len(before))[0]
    assert engine.manager.free_slots == 3 and engine.manager.free_blocks == 14 and engine.metrics.added == 5
    with pytest.raises(ValueError, match=r"request 0 has finished \(length\)"):
        engine.fork(parent, [1])


def test_waiting_requests_fork_too(small, wide):
    engine = Engine(small[0], wide(), token_budget=CHUNK + 2)
    parent = engine.add(PROMPT, max_new_tokens=3, sampling=WARM, seed=1)
    with pytest.raises(ValueError, match="seeds is empty"):
        engine.fork(parent, [])
    (child,) = engine.fork(parent, [1])
    while engine.busy:
        engine.step()
    assert child.generated == parent.generated == alone(small, wide(), PROMPT, 1, max_new_tokens=3)[0]


def naive_beams(model, make, prompt, beams, steps, stops):
    """Beam search by its definition: every beginning is read from its first token on, in a cache of its own."""

    def continuations(tokens):
        manager = make()
        cache = manager.init_cache()
        slot = manager.admit()
        for start in range(0, len(tokens), CHUNK):
            batch = manager.prepare_forward({slot: tokens[start : start + CHUNK]}, prefill_size=CHUNK + 3)
            output, cache = sample_step(model, cache, batch, logprobs=LogprobOptions(num_top=2 * beams))
        top = jax.device_get(output.top_logprobs[slot])
        return zip(top.logprobs, top.ids, strict=True)

    alive = [([], 0.0)]
    ended = []
    for _ in range(steps):
        ways = [([*a, int(t)], s + float(p)) for a, s in alive for p, t in continuations([*prompt, *a])]
        ways.sort(key=lambda way: -way[1])
        ended += [way for way in ways[:beams] if way[0][-1] in stops]
        alive = [way for way in ways if way[0][-1] not in stops][:beams]
        if len(ended) >= beams:
            return sorted(ended, key=lambda way: -way[1] / len(way[0]))[:beams]
    return sorted(ended + alive, key=lambda way: -way[1] / len(way[0]))[:beams]


STOPS = tuple(range(0, 160, 5))


@EVERY_MODEL_SLOWLY
@pytest.mark.parametrize("stops", [pytest.param((), marks=pytest.mark.slow), STOPS], ids=["none", "stop tokens"])
def test_beam_search_is_that_of_the_definition(small, wide, stops):
    """Over two borders of blocks; each beginning is read by itself there, and forked here."""
    manager = wide()
    steps = 24 if not stops else 12
    options = dict(beams=3, max_new_tokens=steps, stop_tokens=stops, chunk=CHUNK)
    found = beam_search(small[0], manager, PROMPT[:29], **options)
    want = naive_beams(small[0], wide, PROMPT[:29], 3, steps, stops)
    assert [c.tokens for c in found] == [tokens for tokens, _ in want]
    # Read in chunks there, one by one here: sums of programs with other numbers of rows may round differently, and a
    # quantized row with them.
    chex.assert_trees_all_close(
        np.array([c.logprob for c in found]), np.array([logprob for _, logprob in want]), rtol=0, atol=0.02
    )
    assert manager.free_slots == 3 and manager.free_blocks == 36
    if stops:
        assert any(c.tokens[-1] in stops for c in found)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Bigrams:
    """A model whose logits after a token are that token's row of a table [vocab, vocab]."""

    table: Any

    def __call__(self, cache, batch):
        return jax.nn.one_hot(batch.token_ids, len(self.table)), cache.begin_step(batch)

    def logits(self, hidden):
        return hidden @ self.table


def test_more_beams_than_the_vocabulary_has_tokens(small):
    """25 beams of 5 tokens hold every beginning of two: the search is complete."""
    table = jnp.asarray(np.random.default_rng(1).normal(size=(5, 5)), jnp.float32)
    config = dataclasses.replace(small[1], vocab_size=5)
    manager = KVCacheManager(config, num_blocks=25, max_requests=25, max_context=16, block_tokens=16)
    found = beam_search(Bigrams(table), manager, [2], beams=25, max_new_tokens=3)
    logprobs = np.asarray(jax.nn.log_softmax(table), np.float64)
    answers = [(2, *tokens) for tokens in itertools.product(range(5), repeat=3)]
    score = {answer[1:]: sum(logprobs[a, b] for a, b in itertools.pairwise(answer)) for answer in answers}
    best = sorted(score, key=score.get, reverse=True)[:25]
    assert [tuple(answer.tokens) for answer in found] == best
    # Sums of three float32 logarithms.
    chex.assert_trees_all_close(
        np.array([answer.logprob for answer in found]), np.array([score[t] for t in best]), rtol=1e-5
    )


@pytest.mark.slow
def test_one_beam_is_greedy(small, wide):
    (best,) = beam_search(small[0], wide(), PROMPT, beams=1, max_new_tokens=6, chunk=CHUNK)
    assert best.tokens == alone(small, wide(), PROMPT, 0, max_new_tokens=6, sampling=SamplingParams())[0]


@pytest.mark.usefixtures("untyped")
def test_bad_searches_are_refused(small, wide):
    manager = wide(3)
    options = dict(max_new_tokens=4, sampling=WARM)
    for change, message in (
        (dict(n=0), "n=0 must be at least 1"),
        (dict(n=2, sampling=SamplingParams()), "n=2 greedy answers would all be the same"),
    ):
        with pytest.raises(ValueError, match=message):
            n_best(small[0], manager, PROMPT, **options | change)
    for change, message in (
        (dict(beams=0), "beams=0 must be at least 1"),
        (dict(beams=4), "beams=4 need a slot each, there are 3"),
        (dict(beams=2, max_new_tokens=0), "max_new_tokens=0 must be"),
        (dict(beams=2, max_new_tokens=200), "needs 236 tokens, max_context=192"),
    ):
        with pytest.raises(ValueError, match=message):
            beam_search(small[0], manager, PROMPT, **dict(max_new_tokens=4) | change)
    with pytest.raises(TypeError, match="length_penalty='a' must be a number"):
        beam_search(small[0], manager, PROMPT, beams=2, max_new_tokens=4, length_penalty="a")
    # Three beams of 40 tokens have no room for three open blocks.
    with pytest.raises(CacheFullError):
        beam_search(small[0], manager, PROMPT, beams=3, max_new_tokens=4, chunk=CHUNK)
    assert manager.free_slots == 3 and manager.free_blocks == 3
    manager.admit()
    with pytest.raises(ValueError, match="must hold no requests"):
        beam_search(small[0], manager, PROMPT, beams=2, max_new_tokens=4)
