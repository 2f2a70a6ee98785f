"""Generating tokens: a stream driven by the host, and many steps inside one program on the device."""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.packed import PackedModel, pack
from dsv4_jax.decode.sampling import GREEDY, Sampling, sample
from dsv4_jax.decode.step import decode_step, last_logits, last_tokens
from dsv4_jax.host import CacheFullError, KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="sampling")
def sample_step(
    model: DeepseekV4ForCausalLM | PackedModel,
    cache: KVCache,
    batch: Batch,
    seeds: UInt32[Array, "slots"],
    sampling: Sampling,
) -> tuple[Int[Array, "slots"], KVCache]:
    """`decode_step` and the choice of the next token in one program.

    Args:
      model: the model; `pack` it where many steps run.
      cache: the cache; donated.
      batch: from `KVCacheManager.prepare_forward`.
      seeds: [slots] one seed a request.
      sampling: how to draw (static).

    Returns:
      (tokens [slots] int32, -1 for slots that are not in the batch; cache).
    """
    return _sample_step(model, cache, batch, seeds, sampling)


def _sample_step(model, cache, batch, seeds, sampling):
    logits, cache = last_logits(model, cache, batch)
    token = last_tokens(batch, cache.lengths.shape[0])
    present = token >= 0
    positions = jnp.where(present, batch.positions[jnp.maximum(token, 0)] + 1, 0)
    return jnp.where(present, sample(logits, sampling, seeds, positions), -1), cache


@functools.partial(jax.jit, donate_argnames="cache", static_argnames=("steps", "sampling", "stop_tokens"))
def decode_loop(
    model: DeepseekV4ForCausalLM | PackedModel,
    cache: KVCache,
    batch: Batch,
    seeds: UInt32[Array, "slots"],
    *,
    steps: int,
    sampling: Sampling = GREEDY,
    stop_tokens: tuple[int, ...] = (),
) -> tuple[Int[Array, "slots steps"], KVCache]:
    """Up to `steps` decode steps in one `lax.while_loop`: the host is not asked between tokens.

    Args:
      model: the model; `pack` it where many steps run.
      cache: the cache; donated.
      batch: one token for each request, prepared with `reserve=steps - 1` so that their blocks exist.
      seeds: [slots] one seed a request.
      steps: most tokens a request gets (static).
      sampling: how to draw (static).
      stop_tokens: a request ends after one of these (static).

    Returns:
      (tokens [slots, steps] int32: what each request got, its stop token included, then -1; cache).
    """
    slots = cache.lengths.shape[0]
    cache = cache.begin_step(batch)
    # The host's decisions are applied once, before the loop: resetting again would lose the blocks.
    batch = dataclasses.replace(batch, new_blocks=batch.new_blocks[:0], reset_slots=batch.reset_slots[:0])
    stops = jnp.asarray(stop_tokens, jnp.int32)

    def unfinished(carry):
        step, _, batch, _ = carry
        return (step < steps) & jnp.any(batch.slots >= 0)

    def advance(carry):
        step, cache, batch, tokens = carry
        token, cache = _sample_step(model, cache, batch, seeds, sampling)
        tokens = tokens.at[:, step].set(token)
        mine = token[jnp.maximum(batch.slots, 0)]
        goes_on = (batch.slots >= 0) & jnp.all(mine[:, None] != stops[None, :], axis=1)
        batch = dataclasses.replace(
            batch,
            token_ids=jnp.where(goes_on, mine, 0),
            positions=jnp.where(goes_on, batch.positions + 1, -1),
            slots=jnp.where(goes_on, batch.slots, -1),
        )
        return step + 1, cache, batch, tokens

    empty = jnp.full((slots, steps), -1, jnp.int32)
    _, cache, _, tokens = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), cache, batch, empty))
    return tokens, cache


@dataclasses.dataclass
class _Request:
    index: int
    prompt: list[int]
    cursor: int = 0  # prompt tokens that are in the cache
    generated: list[int] = dataclasses.field(default_factory=list)

    @property
    def prefilled(self) -> bool:
        return self.cursor == len(self.prompt)


def stream(
    model: DeepseekV4ForCausalLM | PackedModel,
    manager: KVCacheManager,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop_tokens: tuple[int, ...] = (),
    chunk: int = 256,
) -> Iterator[tuple[int, int]]:
    """Generates for many prompts, yielding each token as soon as it is known.

    Requests are admitted as slots and blocks come free and released as they end, while others run. Prompts go through
    the cache at most `chunk` tokens a step, beside the running requests' single tokens. A request's tokens do not
    depend on which others run.

    Args:
      model: the model.
      manager: owns the slots and blocks; must hold no other request.
      prompts: token ids [n] of each request.
      max_new_tokens: most tokens a request gets.
      sampling: how to draw.
      seed: request i draws with seed + i.
      stop_tokens: a request ends after one of these (the token is yielded).
      chunk: prompt tokens a step.

    Yields:
      (index of the prompt, token id).

    Raises:
      ValueError: bad prompts or sizes, or a request that could never fit the cache.
    """
    _check(manager, prompts, max_new_tokens, chunk)
    model, cache = pack(model), manager.init_cache()
    waiting = collections.deque(_Request(i, [int(t) for t in prompt]) for i, prompt in enumerate(prompts))
    running: dict[int, _Request] = {}
    seeds = np.zeros((manager.schema.max_requests,), np.uint32)
    prefill_size = _prefill_size(manager, prompts, chunk)
    try:
        while waiting or running:
            _admit(manager, waiting, running, seeds, seed, max_new_tokens)
            tokens = _next_tokens(running, chunk)
            batch = manager.prepare_forward(tokens, prefill_size=prefill_size)
            drawn, cache = sample_step(model, cache, batch, jax.device_put(seeds.copy()), sampling)
            drawn = jax.device_get(drawn)
            for slot in tokens:
                request = running[slot]
                if not request.prefilled:
                    request.cursor += len(tokens[slot])
                if not request.prefilled:
                    continue
                token = int(drawn[slot])
                request.generated.append(token)
                if token in stop_tokens or len(request.generated) == max_new_tokens:
                    manager.release(slot)
                    del running[slot]
                yield request.index, token
    finally:
        # Also when the caller stops listening, or a step fails: the manager stays usable.
        for slot in running:
            manager.release(slot)


def _check(manager, prompts, max_new_tokens, chunk):
    for name, value in dict(max_new_tokens=max_new_tokens, chunk=chunk).items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: give at least one prompt")
    limit = manager.schema.max_context
    for i, prompt in enumerate(prompts):
        manager.check_ids(prompt)
        # The last token is drawn, never stored.
        if (need := len(prompt) + max_new_tokens - 1) > limit:
            raise ValueError(f"prompts[{i}] of {len(prompt)} tokens and {max_new_tokens=} need {need} > {limit=}")


def _admit(manager, waiting, running, seeds, seed, max_new_tokens):
    """Moves waiting requests to free slots, with the blocks for all their tokens, in order."""
    while waiting:
        request = waiting[0]
        slot = None
        try:
            slot = manager.admit(request.prompt)
            manager.allocate(slot, len(request.prompt) + max_new_tokens - 1)
        except CacheFullError:
            if slot is not None:
                manager.release(slot)
            if not running:
                raise
            return
        seeds[slot] = (seed + request.index) % 2**32
        running[slot] = waiting.popleft()


def _next_tokens(running, budget):
    """{slot: tokens} of the next step: every running request's newest token and up to `budget` prompt tokens."""
    tokens = {}
    for slot, request in running.items():
        if request.prefilled:
            tokens[slot] = request.generated[-1:]
        elif budget:
            tokens[slot] = request.prompt[request.cursor : request.cursor + budget]
            budget -= len(tokens[slot])
    return tokens


def generate(
    model: DeepseekV4ForCausalLM | PackedModel,
    manager: KVCacheManager,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop_tokens: tuple[int, ...] = (),
    chunk: int = 256,
) -> list[list[int]]:
    """What `stream` yields, decoded on the device in one loop: prompts first, then all tokens without the host.

    Args:
      model, manager, prompts, max_new_tokens, sampling, seed, stop_tokens, chunk: as for `stream`; all prompts [n] must
        fit the manager's slots and blocks at once.

    Returns:
      The new tokens of each prompt.

    Raises:
      ValueError: as for `stream`, or the prompts do not fit at once.
    """
    _check(manager, prompts, max_new_tokens, chunk)
    model = pack(model)
    waiting = collections.deque(_Request(i, [int(t) for t in prompt]) for i, prompt in enumerate(prompts))
    running: dict[int, _Request] = {}
    seeds = np.zeros((manager.schema.max_requests,), np.uint32)
    try:
        _admit(manager, waiting, running, seeds, seed, max_new_tokens)
        if waiting:
            fit = f"{len(prompts)} prompts do not fit at once ({len(running)} do)"
            raise CacheFullError(f"{fit}; use stream, or a larger cache")
        cache = _prefill_all_but_last(model, manager, running, chunk, _prefill_size(manager, prompts, chunk))
        batch = manager.prepare_forward({s: r.prompt[-1:] for s, r in running.items()}, reserve=max_new_tokens - 1)
        drawn, _ = decode_loop(
            model,
            cache,
            batch,
            jax.device_put(seeds),
            steps=max_new_tokens,
            sampling=sampling,
            stop_tokens=tuple(stop_tokens),
        )
        drawn = jax.device_get(drawn)
        results: list[list[int]] = [[] for _ in prompts]
        for slot, request in running.items():
            results[request.index] = [int(t) for t in drawn[slot] if t >= 0]
        return results
    finally:
        for slot in running:
            manager.release(slot)


def _prefill_size(manager, prompts, chunk):
    """Tokens that no step exceeds: prompts' and, beside them, one of each other request."""
    return min(chunk, sum(map(len, prompts))) + manager.schema.max_requests - 1


def _prefill_all_but_last(model, manager, running, chunk, prefill_size):
    """A cache that holds every prompt but its last token, which is the loop's first input."""
    cache = manager.init_cache()
    while unread := {s: r for s, r in running.items() if r.cursor < len(r.prompt) - 1}:
        tokens = _next_tokens({s: dataclasses.replace(r, prompt=r.prompt[:-1]) for s, r in unread.items()}, chunk)
        _, cache = decode_step(model, cache, manager.prepare_forward(tokens, prefill_size=prefill_size))
        for slot, ids in tokens.items():
            running[slot].cursor += len(ids)
    return cache
