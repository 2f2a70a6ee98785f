"""Several answers to one prompt: the best of n drawn ones, and beam search. Both fork the prompt's cache."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.decode.sampling import SamplingParams
from dsv4_jax.decode.step import Model
from dsv4_jax.engine.generate import engine_for_prompts, prefill
from dsv4_jax.engine.requests import check_no_requests, check_positive, check_sampling, check_stop_tokens
from dsv4_jax.host import KVCacheManager


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One answer.

    Attributes:
      tokens: its token ids, including a stop token at the end.
      logprob: sum of their log-probabilities under the model, at temperature 1.
    """

    tokens: list[int]
    logprob: float

    def score(self, length_penalty: float = 1.0) -> float:
        """`logprob / len(tokens) ** length_penalty`: 1 gives the mean over tokens, 0 the sum."""
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
    stop_tokens: tuple[int, ...] = (),
    chunk: int = 256,
) -> list[Candidate]:
    """Draws `n` answers to a prompt that is read once; candidate i is the one that `stream` draws with seed + i.

    Args:
      model, manager, max_new_tokens, stop_tokens, chunk: as for `stream`. Candidates without a slot wait for one.
      prompt: [n] token ids.
      n: how many to draw.
      sampling: how they are drawn; greedy answers would all be the same.
      seed: of the first.

    Returns:
      The candidates, the one with the highest mean log-probability first.

    Raises:
      TypeError: `sampling` is no `SamplingParams`, or as for `Engine.add`.
      ValueError: `n` or `chunk` is below 1, `sampling` is greedy though `n` is not 1, or as for `Engine.add`.
    """
    check_positive(n=n)
    if n > 1 and check_sampling(sampling).temperature == 0:
        raise ValueError(f"{n=} greedy answers would all be the same: give a temperature above 0")
    with engine_for_prompts(model, manager, [prompt], max_new_tokens, chunk) as engine:
        first = engine.add(prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, stop_tokens=stop_tokens)
        prefill(engine, [first])
        requests = [first, *(engine.fork(first, range(seed + 1, seed + n)) if n > 1 else [])]
        while engine.busy:
            engine.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    found = [Candidate(request.generated, sum(request.logprobs)) for request in requests]
    return sorted(found, key=Candidate.score, reverse=True)


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
    """Finds likely answers by beam search: keeps the `beams` likeliest beginnings from step to step.

    A beginning that continues in several ways is forked: full blocks are shared, the rest is copied. The search ends
    when `beams` answers have ended with a stop token, or at `max_new_tokens`.

    Args:
      model, manager, max_new_tokens, stop_tokens, chunk: as for `stream`. The manager must have `beams` slots.
      prompt: [n] token ids.
      beams: how many beginnings to keep.
      length_penalty: answers are compared by `Candidate.score(length_penalty)`.

    Returns:
      Up to `beams` answers, the best first.

    Raises:
      TypeError: an argument of another kind.
      ValueError: a number is below 1, a bad prompt, or more than the manager's slots, blocks or context hold.
    """
    check_positive(beams=beams, max_new_tokens=max_new_tokens, chunk=chunk)
    stop_tokens = check_stop_tokens(stop_tokens)
    check_no_requests(manager)
    if beams > (slots_per_shard := manager.requests.slots_per_shard):
        raise ValueError(f"{beams=} need a slot each, there are {slots_per_shard}: raise max_requests")
    prompt = manager.check_ids(prompt, "prompt")
    model, cache = CompiledModel.of(model), manager.init_cache()
    k = min(2 * beams, manager.schema.config.vocab_size)
    slots: list[int] = []
    try:
        # The last token is drawn, never stored.
        slots.append(manager.admit(prompt, num_tokens=len(prompt) + max_new_tokens - 1))
        size = min(chunk, len(prompt)) + slots_per_shard
        *parts, last = np.split(prompt, range(chunk, len(prompt), chunk))
        for part in parts:
            *_, cache = model.topk_step(cache, manager.prepare_forward({slots[0]: part}, prefill_size=size), k=k)
        best, ids, cache = model.topk_step(cache, manager.prepare_forward({slots[0]: last}, prefill_size=size), k=k)
        alive, ended = [Candidate([], 0.0)], []
        for length in range(1, max_new_tokens + 1):
            best_of, ids_of = manager.requests.get((best, ids))
            ways = [
                (parent, Candidate([*beam.tokens, int(token)], beam.logprob + float(logprob)))
                for parent, (slot, beam) in enumerate(zip(slots, alive, strict=True))
                for logprob, token in zip(best_of[slot], ids_of[slot], strict=True)
            ]
            ways = sorted(ways, key=lambda way: -way[1].logprob)[: 2 * beams]
            ended += [beam for _, beam in ways[:beams] if beam.tokens[-1] in stop_tokens]
            kept = [(parent, beam) for parent, beam in ways if beam.tokens[-1] not in stop_tokens][:beams]
            alive = [beam for _, beam in kept]
            if len(ended) >= beams or length == max_new_tokens:
                break
            slots, cache = _follow(manager, cache, slots, [parent for parent, _ in kept])
            tokens = {slot: beam.tokens[-1:] for slot, beam in zip(slots, alive, strict=True)}
            best, ids, cache = model.topk_step(cache, manager.prepare_forward(tokens, prefill_size=size), k=k)
    finally:
        manager.release_all()
    found = ended if len(ended) >= beams else ended + alive
    return sorted(found, key=lambda beam: beam.score(length_penalty), reverse=True)[:beams]


def _follow(manager, cache, slots, parents):
    """The slots of the new beams: parents without children are released, those with several are forked."""
    for i, slot in enumerate(slots):
        if i not in parents:
            manager.release(slot)
    new = [slots[parent] for parent in parents]
    for parent in sorted(set(parents)):
        mine = [i for i, p in enumerate(parents) if p == parent]
        if len(mine) > 1:
            forks, cache = manager.fork(cache, slots[parent], len(mine) - 1)
            for i, slot in zip(mine[1:], forks, strict=True):
                new[i] = slot
    return new, cache
