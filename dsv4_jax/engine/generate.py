"""Generates tokens for a list of prompts, either streamed by an engine's steps or in one loop on the device."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dsv4_jax.common.arguments import check_whole
from dsv4_jax.decode import CompiledModel, DraftOptions, Model, SamplingParams
from dsv4_jax.decode.sampling import GREEDY
from dsv4_jax.engine.engine import Engine
from dsv4_jax.engine.requests import Request, check_request, check_stop_tokens
from dsv4_jax.host import CacheFullError, KVCacheManager


def stream(
    model: Model,
    manager: KVCacheManager,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    seed: int = 0,
    chunk: int = 256,
    drafts: int | DraftOptions = 0,
    **params: Any,
) -> Iterator[tuple[int, int]]:
    """Generates for many prompts with an `Engine`, and yields each token as soon as it is known.

    A request waits until a slot and enough blocks are free. A request's tokens do not depend on which other requests
    run.

    Args:
      model: the model.
      manager: the manager of slots and blocks; must hold no requests.
      prompts: for each request [n] token ids.
      max_new_tokens: maximum number of tokens that a request gets.
      seed: seed of the first request; request i draws with seed + i.
      chunk: number of prompt tokens for which a step has room while all other slots decode. With idle slots, a step
        runs more prompt tokens.
      drafts: number of tokens per request that the model's draft layers guess in each step and the next step verifies;
        or DraftOptions. It must be less than the manager's `max_query_tokens`. Drafts change no token.
      params: further fields of `RequestParams`, such as `sampling` and `stop_tokens`. Stop tokens are yielded too.

    Yields:
      (index of the prompt, token id).

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: a prompt or size is invalid, or a request does not fit an empty cache.
      Exception: the `error` of a request that failed.
    """
    # The engine is closed even if the caller stops iterating or a step fails, so that the manager holds no requests.
    with engine_for_prompts(model, manager, prompts, max_new_tokens, chunk, drafts) as engine:
        seed = check_whole("seed", seed)
        for i, prompt in enumerate(prompts):
            engine.add(prompt, max_new_tokens=max_new_tokens, seed=seed + i, **params)
        while engine.busy:
            for request, tokens in engine.step():
                if request.error is not None:
                    raise request.error
                for token in tokens:
                    yield request.order, token


def generate(
    model: Model,
    manager: KVCacheManager,
    prompts: Sequence[Sequence[int]] | np.ndarray,
    *,
    max_new_tokens: int,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
    stop_tokens: Sequence[int] = (),
    chunk: int = 256,
    drafts: int | DraftOptions = 0,
    adapter: str | None = None,
) -> list[list[int]]:
    """Generates the tokens that `stream` yields. After the prompts have run, all steps run in one loop on the device.

    Args:
      model, manager, max_new_tokens, sampling, seed, stop_tokens, chunk, drafts: as for `stream`.
      adapter: name of the model's adapter to use; None = no adapter.
      prompts: as for `stream`; all prompts must fit the manager's slots and blocks at once.

    Returns:
      The new tokens of each prompt.

    Raises:
      TypeError, ValueError: as for `stream`.
      CacheFullError: the slots and blocks do not suffice for all prompts at once.
    """
    stop_tokens = check_stop_tokens(stop_tokens)
    seed = check_whole("seed", seed)
    model = CompiledModel.of(model)
    with engine_for_prompts(model, manager, prompts, max_new_tokens, chunk, drafts) as engine:
        num_fitting = manager.count_fitting([len(prompt) + max_new_tokens - 1 for prompt in prompts])
        if num_fitting < len(prompts):
            message = f"{len(prompts)} prompts do not fit at once ({num_fitting} do); use stream, or a larger cache"
            raise CacheFullError(message)
        requests = [
            engine.add(
                prompt,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                seed=seed + i,
                stop_tokens=stop_tokens,
                adapter=adapter,
            )
            for i, prompt in enumerate(prompts)
        ]
        prefill(engine, requests)
        seeds = np.zeros((manager.schema.max_requests,), np.uint32)
        for request in requests:
            seeds[request.slot] = request.params.seed
        # The last token of each prompt is the loop's first input.
        batch = manager.prepare_forward({r.slot: r.tokens[-1:] for r in requests}, reserve=max_new_tokens - 1)
        if adapter is not None:
            batch = batch.with_adapter(model.module, adapter)
        output, cache = model.decode_loop(
            engine.cache,
            batch,
            manager.devices.put(seeds, "slots"),
            steps=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop_tokens,
            drafts=drafts,
        )
        tokens = manager.devices.get(output.tokens)
        if model.expert_memory is not None and (migration := model.expert_memory.migration) is not None:
            migration.finish(cache.expert_counts)
        rows = [tokens[request.slot] for request in requests]
        return [ids[ids >= 0].tolist() for ids in rows]


def engine_for_prompts(model, manager: KVCacheManager, prompts, max_new_tokens: int, chunk: int, drafts: Any = 0):
    """Makes an engine for prompts, in a context manager that closes it.

    The engine's steps have room for `chunk` prompt tokens of one request, and for a token and its drafts of each other
    slot. Arguments are as for `stream`.

    Raises:
      TypeError, ValueError: as for `stream`.
    """
    check_whole("chunk", chunk, 1)
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer)):
        raise TypeError(f"{prompts=} must be a list of prompts, each a list of token ids, such as [[1, 2, 3]]")
    if len(prompts) == 0:
        raise ValueError("prompts is empty: give at least one prompt")
    total = sum(len(check_request(manager, prompt, max_new_tokens)) for prompt in prompts)
    options = DraftOptions.of(drafts)
    budget = min(chunk, total) - 1 + manager.shards.slots * (1 + options.count)
    engine = Engine(
        model,
        manager,
        drafter="model" if options.count else None,
        token_budget=budget,
        draft_tokens=options.count,
        min_confidence=options.min_confidence,
    )
    return contextlib.closing(engine)


def prefill(engine: Engine, requests: Sequence[Request]) -> None:
    """Runs steps until each request has a slot and all of its tokens but the last have run.

    Meanwhile no request draws tokens, so the running requests keep their slots and blocks.

    Raises:
      CacheFullError: a request waits for a slot or for blocks that running requests hold.
      Exception: the `error` of a request that failed.
    """
    while any(r.slot < 0 or engine.manager.length(r.slot) < r.num_tokens - 1 for r in requests):
        num_steps = engine.metrics.steps
        engine.step(decode=False)
        for request in requests:
            if request.error is not None:
                raise request.error
        # The step first admitted waiting requests, as many as fit, and then had nothing to run. Further steps would do
        # the same, so a request that still has no slot would never get one.
        if engine.metrics.steps == num_steps and (waiting := [request for request in requests if request.slot < 0]):
            raise CacheFullError(
                f"request {waiting[0].id!r} waits for a slot or blocks that running requests hold, and these draw no "
                "tokens meanwhile: finish them with step() first, or make the cache larger (max_requests, memory or "
                "num_blocks)"
            )
