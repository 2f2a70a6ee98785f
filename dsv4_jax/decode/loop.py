"""Many decode steps in one program on the device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.drafts import check_drafts, newest_tokens
from dsv4_jax.decode.sampling import GREEDY, BatchedSamplingParams, LogprobRows, SamplingParams, TopLogprobs
from dsv4_jax.decode.step import Model, draw, last_tokens
from dsv4_jax.parallel.sharded_step import sharded_step


@functools.partial(
    jax.jit, donate_argnames="cache", static_argnames=("steps", "sampling", "stop_tokens", "drafts", "top_logprobs")
)
@sharded_step
def decode_loop(
    model: Model,
    cache: KVCache,
    batch: Batch,
    seeds: UInt32[Array, "slots"],
    *,
    steps: int,
    sampling: SamplingParams = GREEDY,
    stop_tokens: tuple[int, ...] = (),
    drafts: int = 0,
    top_logprobs: int = 0,
) -> tuple[Any, ...]:
    """Decode steps in one `lax.while_loop` until all requests have their tokens: the host is not asked between them.

    With `drafts`, each step also verifies that many tokens of each request that the model's multi-token-prediction
    block guessed in the step before. The tokens are those of a loop without drafts.

    Args:
      model: the model, or a `CompiledModel` where many steps run.
      cache: the cache; donated.
      batch: one token for each request, prepared with `reserve=steps - 1` so that their blocks exist.
      seeds: [slots] one seed a request.
      steps: most tokens a request gets (static).
      sampling: how to draw (static).
      stop_tokens: a request ends after one of these (static).
      drafts: how many tokens to guess of each request; less than the cache's `max_query_tokens` (static). The requests'
        earlier tokens must have run through `draft_step`.
      top_logprobs: how many of the likeliest tokens to find at each step (static).

    Returns:
      (tokens [slots, steps] int32: what each request got, its stop token included, then -1; with `drafts` also
      accepted [slots, steps] int32: how many drafts each of its steps kept, then -1; with `top_logprobs` also the
      tokens' log-probabilities [slots, steps] float32 and `TopLogprobs` [slots, steps, k], zeros where there is no
      token; cache).

    Raises:
      ValueError: the cache has no room for so many drafts, or the model no block that makes them.
    """
    if drafts:
        check_drafts(cache.schema, drafts)
    slots = jnp.arange(cache.lengths.shape[0], dtype=jnp.int32)
    # The host's decisions are applied once, before the loop: resetting again would lose the blocks.
    cache = cache.begin_step(batch)
    last = last_tokens(batch, len(slots))
    newest = newest_tokens(
        batch.token_ids[jnp.maximum(last, 0)], jnp.where(last >= 0, batch.positions[jnp.maximum(last, 0)], -1)
    )
    ahead = jnp.arange(1 + drafts, dtype=jnp.int32)[None, :]
    asked = LogprobRows(top=top_logprobs) if top_logprobs else None

    def unfinished(carry: Any) -> Any:
        return jnp.any(carry["newest"].slots >= 0)

    def advance(carry: Any) -> Any:
        newest, guesses, made, cache = (carry[name] for name in ("newest", "guesses", "made", "cache"))
        active = newest.slots >= 0
        # No more drafts than tokens that may still come; none before the first were made.
        count = jnp.where(active & (made > 0), jnp.minimum(drafts, steps - made - 1), 0)
        live = active[:, None] & (ahead <= count[:, None])
        positions = newest.positions[:, None] + ahead
        ids = jnp.concatenate([newest.token_ids[:, None], guesses], axis=1)
        batch = dataclasses.replace(
            newest,
            token_ids=jnp.where(live, ids, 0).reshape(-1),
            positions=jnp.where(live, positions, -1).reshape(-1),
            slots=jnp.where(live, slots[:, None], -1).reshape(-1),
        )
        rows = jnp.where(live, jnp.arange(live.size, dtype=jnp.int32).reshape(live.shape), -1).reshape(-1)
        *drawn, guesses, cache = draw(model, cache, batch, rows, sampling, seeds, asked, drafts)
        drawn = jax.tree.map(lambda x: x.reshape(*live.shape, *x.shape[1:]), drawn if asked else drawn[:1])
        tokens = drawn[0]
        kept = jnp.where(active, cache.lengths - newest.positions - 1, 0)
        # One by one: under shard_map XLA crashes on a reduction over an empty axis in a loop (jax 0.11.2).
        is_stop = functools.reduce(jnp.logical_or, (tokens == stop for stop in stop_tokens), jnp.zeros_like(live))
        stopped = jnp.cumsum(is_stop, axis=1, dtype=jnp.int32) > is_stop.astype(jnp.int32)
        new = live & (ahead <= kept[:, None]) & ~stopped
        got = jnp.sum(new, axis=1, dtype=jnp.int32)
        to = jnp.where(new, made[:, None] + ahead, steps)
        step = jnp.where(active, carry["steps"], steps)
        goes_on = active & ~jnp.any(new & is_stop, axis=1) & (made + got < steps)

        held = newest.positions + got
        token = jnp.take_along_axis(tokens, kept[:, None], axis=1)[:, 0]
        return dict(
            newest=newest_tokens(token, jnp.where(goes_on, held, -1)),
            guesses=guesses,
            made=made + got,
            steps=carry["steps"] + active.astype(jnp.int32),
            drawn=jax.tree.map(lambda all, x: all.at[slots[:, None], to].set(x, mode="drop"), carry["drawn"], drawn),
            accepted=carry["accepted"].at[slots, step].set(got - 1, mode="drop"),
            cache=dataclasses.replace(cache, lengths=jnp.where(active, held, cache.lengths)),
        )

    none, zeros = jnp.full((len(slots), steps), -1, jnp.int32), jnp.zeros_like(slots)
    start = dict(newest=newest, guesses=jnp.zeros((len(slots), drafts), jnp.int32), cache=cache)
    logprobs = jnp.zeros((*none.shape, top_logprobs))
    found = [logprobs[..., 0], TopLogprobs(logprobs.astype(jnp.int32), logprobs)] if asked else []
    start |= dict(made=zeros, steps=zeros, drawn=[none, *found], accepted=none)
    end: Any = jax.lax.while_loop(unfinished, advance, start)
    tokens, *logprobs = end["drawn"]
    return tokens, *([end["accepted"]] if drafts else []), *logprobs, end["cache"]


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="steps")
@sharded_step
def sample_loop(
    model: Model,
    cache: KVCache,
    batch: Batch,
    counts: Int[Array, "slots"],
    sampling: BatchedSamplingParams,
    seeds: UInt32[Array, "slots"],
    *,
    steps: int,
) -> tuple[Int[Array, "slots {steps}"], Float[Array, "slots {steps}"], KVCache]:
    """Several `sample_step` of one token a request, without the host between them; any kind of sampling.

    Args:
      model: the model, or a `CompiledModel` where many steps run.
      cache: the cache; donated.
      batch: one token for each request, prepared with `reserve=steps - 1` so that their blocks exist.
      counts: [slots] how many tokens each slot gets, up to `steps`; 0 for slots that are not in the batch.
      sampling: [slots] how each slot's tokens are drawn.
      seeds: [slots] one seed a request.
      steps: the most steps (static).

    Returns:
      (tokens [slots, steps] int32, their log-probabilities [slots, steps] float32 as from `sample_step`; cache). What
      stands behind a slot's count means nothing.
    """
    slots = jnp.arange(cache.lengths.shape[0], dtype=jnp.int32)
    cache = cache.begin_step(batch)  # once, as in `decode_loop`
    last = last_tokens(batch, len(slots))
    at = jnp.maximum(last, 0)
    newest = newest_tokens(batch.token_ids[at], jnp.where(last >= 0, batch.positions[at], -1))

    def advance(i: Any, carry: Any) -> Any:
        newest, tokens, logprobs, cache = carry
        rows = jnp.where(newest.slots >= 0, slots, -1)
        ids, found, _, cache = draw(model, cache, newest, rows, sampling, seeds)
        goes_on = (newest.slots >= 0) & (i + 1 < counts)
        newest = newest_tokens(ids, jnp.where(goes_on, newest.positions + 1, -1))
        return newest, tokens.at[:, i].set(ids), logprobs.at[:, i].set(found), cache

    none = jnp.zeros((len(slots), steps), jnp.int32)
    start = newest, none, none.astype(jnp.float32), cache
    _, tokens, logprobs, cache = jax.lax.fori_loop(0, jnp.max(counts), advance, start)
    return tokens, logprobs, cache
