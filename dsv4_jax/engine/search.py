"""Finds several answers to one prompt, by sampling or by beam search. The answers share the prompt's cache blocks."""

import collections
import dataclasses
from typing import Any

import numpy as np

from dsv4_jax.common.arguments import check_real, check_whole
from dsv4_jax.decode import CompiledModel, LogprobOptions, Model, SamplingParams
from dsv4_jax.engine.generate import engine_for_prompts, prefill
from dsv4_jax.engine.requests import check_no_requests, check_sampling, check_stop_tokens
from dsv4_jax.host import KVCacheManager, TokenIds


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An answer to a prompt.

    Attributes:
      tokens: token ids of the answer, including a stop token at the end.
      logprob: sum of the tokens' log-probabilities under the model, at temperature 1.
    """

    tokens: list[int]
    logprob: float

    def score(self, length_penalty: float = 1.0) -> float:
        """Returns `logprob / len(tokens) ** length_penalty`. A penalty of 1 gives the mean over tokens, 0 the sum."""
        return self.logprob / len(self.tokens) ** length_penalty


def n_best(
    model: Model,
    manager: KVCacheManager,
    prompt: TokenIds,
    *,
    n: int,
    max_new_tokens: int,
    sampling: SamplingParams,
    seed: int = 0,
    chunk: int = 256,
    **params: Any,
) -> list[Candidate]:
    """Draws `n` answers to a prompt that is read once. Answer i is the one that `stream` draws with seed + i.

    Args:
      model, manager, max_new_tokens, chunk, params: as for `stream`. The manager may have fewer than `n` slots: answers
        then wait for one.
      prompt: token ids of the prompt.
      n: number of answers.
      sampling: the sampling parameters; greedy answers would all be the same.
      seed: seed of the first answer.

    Returns:
      The candidates, the one with the highest mean log-probability first.

    Raises:
      TypeError: `sampling` is not a `SamplingParams`, or as for `Engine.add`.
      ValueError: `n` or `chunk` is below 1, `sampling` is greedy though `n` is not 1, or as for `Engine.add`.
    """
    check_whole("n", n, 1)
    if n > 1 and check_sampling(sampling).temperature == 0:
        raise ValueError(f"{n=} greedy answers would all be the same: give a temperature above 0")
    with engine_for_prompts(model, manager, [prompt], max_new_tokens, chunk) as engine:
        request = engine.add(prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, **params)
        prefill(engine, [request])
        requests = [request, *(engine.fork(request, range(seed + 1, seed + n)) if n > 1 else [])]
        candidates = [Candidate([*engine.stream(request)], sum(request.logprobs)) for request in requests]
    return sorted(candidates, key=Candidate.score, reverse=True)


def beam_search(
    model: Model,
    manager: KVCacheManager,
    prompt: TokenIds,
    *,
    beams: int,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...] = (),
    length_penalty: float = 1.0,
    chunk: int = 256,
) -> list[Candidate]:
    """Finds likely answers by beam search, which keeps the `beams` likeliest unfinished answers from step to step.

    If several kept answers continue the same answer of the previous step, that answer's request is forked: full blocks
    are shared, the rest is copied. The search ends when `beams` answers have ended with a stop token, or at
    `max_new_tokens`.

    Args:
      model, manager, max_new_tokens, stop_tokens: as for `stream`. Each shard of the manager must have `beams` slots.
      prompt: [n] token ids.
      beams: number of unfinished answers to keep.
      length_penalty: answers are compared by `Candidate.score(length_penalty)`.
      chunk: maximum number of prompt tokens per step.

    Returns:
      Up to `beams` answers, the best first.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a number is below 1, the prompt is invalid, or the search needs more than the manager's
        slots, blocks or context hold.
    """
    check_whole("beams", beams, 1)
    check_whole("max_new_tokens", max_new_tokens, 1)
    check_whole("chunk", chunk, 1)
    length_penalty = check_real("length_penalty", length_penalty)
    stop_tokens = check_stop_tokens(stop_tokens)
    check_no_requests(manager)
    if beams > (slots := manager.shards.slots):
        raise ValueError(f"{beams=} need a slot each, there are {slots}: raise max_requests")
    prompt = manager.check_ids(prompt, "prompt")
    try:
        alive, ended = _search(CompiledModel.of(model), manager, prompt, beams, max_new_tokens, stop_tokens, chunk)
    finally:
        manager.release_all()
    answers = ended if len(ended) >= beams else ended + alive
    return sorted(answers, key=lambda beam: beam.score(length_penalty), reverse=True)[:beams]


def _search(model, manager, prompt, beams, max_new_tokens, stop_tokens, chunk):
    """Returns the likeliest unfinished answers, best first, and the answers that ended with a stop token."""
    cache = manager.init_cache()
    options = LogprobOptions(num_top=min(2 * beams, manager.schema.config.vocab_size))
    step_size = min(chunk, len(prompt)) + manager.shards.slots

    def run_step(tokens):
        """Runs tokens {slot: ids}, and returns the likeliest next tokens of each slot, on the device."""
        nonlocal cache
        batch = manager.prepare_forward(tokens, prefill_size=step_size)
        output, cache = model.sample_step(cache, batch, logprobs=options)
        return output.top_logprobs

    # The last token is drawn but never runs, so the cache needs no room for it.
    slots = [manager.admit(prompt, num_tokens=len(prompt) + max_new_tokens - 1)]
    chunks = np.split(prompt, range(chunk, len(prompt), chunk))
    top_logprobs = [run_step({slots[0]: tokens}) for tokens in chunks][-1]
    alive = [Candidate([], 0.0)]
    ended = []
    for length in range(1, max_new_tokens + 1):
        top_logprobs = manager.devices.get(top_logprobs)
        # Each unfinished answer is continued by each of its likeliest tokens. An item of `children` is (slot of the
        # unfinished answer, continued answer).
        children = [
            (slot, Candidate([*beam.tokens, int(token)], beam.logprob + float(logprob)))
            for slot, beam in zip(slots, alive, strict=True)
            for logprob, token in zip(top_logprobs.logprobs[slot], top_logprobs.ids[slot], strict=True)
        ]
        children = sorted(children, key=lambda child: -child[1].logprob)[: 2 * beams]
        ended += [beam for _, beam in children[:beams] if beam.tokens[-1] in stop_tokens]
        unfinished = [(slot, beam) for slot, beam in children if beam.tokens[-1] not in stop_tokens][:beams]
        alive = [beam for _, beam in unfinished]
        if len(ended) >= beams or length == max_new_tokens:
            break
        slots, cache = _follow_parents(manager, cache, slots, [slot for slot, _ in unfinished])
        top_logprobs = run_step({slot: beam.tokens[-1:] for slot, beam in zip(slots, alive, strict=True)})
    return alive, ended


def _follow_parents(manager, cache, slots, parents):
    """Gives each new answer the slot of its parent, or of a fork of its parent.

    The parent is the answer of the previous step that the new answer continues by a token. Parents without a new answer
    are released first.

    Args:
      manager: the manager.
      cache: the cache; donated.
      slots: slot of each answer of the previous step.
      parents: for each new answer the slot of its parent.

    Returns:
      (the slot of each new answer, the cache).
    """
    for slot in {*slots} - {*parents}:
        manager.release(slot)
    copies = {}
    for slot, count in collections.Counter(parents).items():
        copies[slot] = [slot]
        if count > 1:
            forks, cache = manager.fork(cache, slot, count - 1)
            copies[slot] += forks
    return [copies[slot].pop() for slot in parents], cache
