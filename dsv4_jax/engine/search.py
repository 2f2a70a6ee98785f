"""Finds several answers to one prompt, by sampling or by beam search. Both fork the prompt's cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4_jax.common.arguments import check_whole
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import LogprobOptions, SamplingParams
from dsv4_jax.decode.step import Model
from dsv4_jax.engine.generate import engine_for_prompts, prefill
from dsv4_jax.engine.requests import check_no_requests, check_sampling, check_stop_tokens
from dsv4_jax.host import KVCacheManager


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An answer to a prompt.

    Attributes:
      tokens: its token ids, including a stop token at the end.
      logprob: sum of their log-probabilities under the model, at temperature 1.
    """

    tokens: list[int]
    logprob: float

    def score(self, length_penalty: float = 1.0) -> float:
        """Returns `logprob / len(tokens) ** length_penalty`: the mean over tokens for 1, the sum for 0."""
        return self.logprob / len(self.tokens) ** length_penalty


def n_best(
    model: Model,
    manager: KVCacheManager,
    prompt: Sequence[int] | np.ndarray,
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
      model, manager, max_new_tokens, chunk, params: as for `stream`. Candidates without a slot wait for one.
      prompt: [n] token ids.
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
        while engine.busy:
            engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    candidates = [Candidate(request.generated, sum(request.logprobs)) for request in requests]
    return sorted(candidates, key=Candidate.score, reverse=True)


def beam_search(
    model: Model,
    manager: KVCacheManager,
    prompt: Sequence[int] | np.ndarray,
    *,
    beams: int,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...] = (),
    length_penalty: float = 1.0,
    chunk: int = 256,
) -> list[Candidate]:
    """Finds likely answers by beam search, which keeps the `beams` likeliest beginnings from step to step.

    A beginning that continues in several ways is forked: full blocks are shared, the rest is copied. The search ends
    when `beams` answers have ended with a stop token, or at `max_new_tokens`.

    Args:
      model, manager, max_new_tokens, stop_tokens, chunk: as for `stream`. The manager must have `beams` slots.
      prompt: [n] token ids.
      beams: number of beginnings to keep.
      length_penalty: answers are compared by `Candidate.score(length_penalty)`.

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
    stop_tokens = check_stop_tokens(stop_tokens)
    check_no_requests(manager)
    if beams > (slots := manager.shards.slots):
        raise ValueError(f"{beams=} need a slot each, there are {slots}: raise max_requests")
    search = _BeamSearch(CompiledModel.of(model), manager, manager.check_ids(prompt, "prompt"), beams, chunk)
    try:
        search.prefill(max_new_tokens)
        while len(search.ended) < beams and search.length < max_new_tokens:
            search.step(stop_tokens)
    finally:
        manager.release_all()
    answers = search.ended if len(search.ended) >= beams else search.ended + search.alive
    return sorted(answers, key=lambda beam: beam.score(length_penalty), reverse=True)[:beams]


class _BeamSearch:
    """The state of a beam search.

    Attributes:
      alive: the likeliest unfinished answers, best first.
      ended: answers that ended with a stop token.
      length: number of tokens of the unfinished answers.
    """

    def __init__(self, model, manager, prompt, beams, chunk):
        self.alive = [Candidate([], 0.0)]
        self.ended = []
        self.length = 0
        self._model = model
        self._manager = manager
        self._prompt = prompt
        self._beams = beams
        self._chunk = chunk
        self._cache = manager.init_cache()
        self._slots = []
        self._parents = [0]
        self._options = LogprobOptions(num_top=min(2 * beams, manager.schema.config.vocab_size))
        self._step_size = min(chunk, len(prompt)) + manager.shards.slots

    def prefill(self, max_new_tokens):
        """Admits the prompt and runs it in chunks."""
        # The last token is drawn, never stored.
        self._slots = [self._manager.admit(self._prompt, num_tokens=len(self._prompt) + max_new_tokens - 1)]
        for tokens in np.split(self._prompt, range(self._chunk, len(self._prompt), self._chunk)):
            self._run({self._slots[0]: tokens})

    def step(self, stop_tokens):
        """Extends the unfinished answers by one token each: keeps the best that go on, and collects those that end."""
        if self.length:
            self._follow_parents()
            self._run({slot: beam.tokens[-1:] for slot, beam in zip(self._slots, self.alive, strict=True)})
        top = self._manager.devices.get(self._top)
        children = [
            (parent, Candidate([*beam.tokens, int(token)], beam.logprob + float(logprob)))
            for parent, (slot, beam) in enumerate(zip(self._slots, self.alive, strict=True))
            for logprob, token in zip(top.logprobs[slot], top.ids[slot], strict=True)
        ]
        children = sorted(children, key=lambda child: -child[1].logprob)[: 2 * self._beams]
        self.ended += [beam for _, beam in children[: self._beams] if beam.tokens[-1] in stop_tokens]
        alive = [child for child in children if child[1].tokens[-1] not in stop_tokens][: self._beams]
        self._parents = [parent for parent, _ in alive]
        self.alive = [beam for _, beam in alive]
        self.length += 1

    def _run(self, tokens):
        batch = self._manager.prepare_forward(tokens, prefill_size=self._step_size)
        output, self._cache = self._model.sample_step(self._cache, batch, logprobs=self._options)
        self._top = output.top_logprobs

    def _follow_parents(self):
        """Gives each answer a slot: releases parents without children, and forks those with several."""
        slots = self._slots
        parents = self._parents
        for i, slot in enumerate(slots):
            if i not in parents:
                self._manager.release(slot)
        self._slots = [slots[parent] for parent in parents]
        for parent in sorted(set(parents)):
            children = [i for i, p in enumerate(parents) if p == parent]
            if len(children) > 1:
                forks, self._cache = self._manager.fork(self._cache, slots[parent], len(children) - 1)
                for i, slot in zip(children[1:], forks, strict=True):
                    self._slots[i] = slot
