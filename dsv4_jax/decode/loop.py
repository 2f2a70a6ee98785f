"""Runs many decode steps in one program on the device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.drafts import DraftOptions, one_token_batch
from dsv4_jax.decode.logits_processor import LogitsProcessor
from dsv4_jax.decode.sampling import GREEDY, BatchedSamplingParams, LogprobOptions, SamplingParams, TopLogprobs
from dsv4_jax.decode.step import Model, last_token_indices, sample_step
from dsv4_jax.decode.step_launch import compiled_step
from dsv4_jax.ops.views import int_range
from pallas_kernels.runtime.pytrees import pytree_dataclass


@pytree_dataclass
class LoopOutput:
    """The tokens that a loop of decode steps drew.

    Attributes:
      tokens: [slots, steps] int32, each request's new tokens, its stop token included; -1 in columns without a token.
      logprobs: [slots, steps] float32, log-probabilities of `tokens`, 0 where there is no token; None if not asked for.
      top_logprobs: TopLogprobs [slots, steps, k], the k likeliest tokens at the position of each of `tokens`; None if
        not asked for.
      accepted: [slots, steps] int32, number of drafts that each step of a request accepted; -1 for steps that the
        request did not run. None without drafts.
      processor: the LogitsProcessor with the states of all slots after `tokens`; None without a processor.
    """

    tokens: Any
    logprobs: Any = None
    top_logprobs: TopLogprobs | None = None
    accepted: Any = None
    processor: LogitsProcessor | None = None


@compiled_step
def decode_loop(
    model: Model,
    cache: KVCache,
    batch: Batch,
    seeds: UInt32[Array, "slots"],
    sampling: SamplingParams | BatchedSamplingParams = GREEDY,
    processor: LogitsProcessor | None = None,
    *,
    steps: int,
    stop_tokens: tuple[int, ...] = (),
    drafts: int | DraftOptions = 0,
    top_logprobs: int | None = None,
) -> tuple[LoopOutput, KVCache]:
    """Runs decode steps in one `lax.while_loop` until each request has `steps` new tokens or a stop token.

    With `drafts`, each step also verifies the tokens that the model's draft layers drafted in the preceding step.
    Requests get the same tokens as without drafts. Report the new tokens to the manager with `KVCacheManager.advance`.

    Args:
      model: the model, or a `CompiledModel` if many steps run.
      cache: the cache; donated.
      batch: one token for each request, prepared with `reserve=steps - 1` so that all blocks of the loop are reserved.
      seeds: [slots] one seed per slot.
      sampling: sampling parameters, one for all requests (static) or arrays [slots].
      processor: changes the logits before tokens are drawn; it holds the states of all slots. None = no changes.
      steps: maximum number of tokens that a request gets (static).
      stop_tokens: token ids that end a request (static).
      drafts: number of tokens to draft per request and step, less than the cache's `max_query_tokens`, or DraftOptions
        (static). The requests' earlier tokens must have run through `sample_step(..., drafts=drafts)`.
      top_logprobs: number of likeliest tokens to find at each step, 0 = only log-probabilities of the drawn tokens,
        None = no log-probabilities (static).

    Returns:
      (LoopOutput, cache).

    Raises:
      RuntimeError, ValueError: as for `decode_step`, or as for `check_drafts` with `drafts`. ValueError also if the
        batch has `is_image` or `decisions`, or is a prefill.
    """
    if given := [name for name in ("is_image", "decisions") if getattr(batch, name) is not None]:
        raise ValueError(f"batch.{given[0]} must be None: the loop draws text, and its layers make all decisions")
    if batch.prefill:
        raise ValueError("the batch is a prefill: run it with sample_step, and give the loop each request's next token")
    options = DraftOptions.of(drafts)
    # The batch's new blocks and reset slots are applied once, before the loop. The batches of the loop have neither,
    # because resetting a slot again would lose its blocks.
    cache = cache.begin_step(batch)
    num_slots = cache.lengths.shape[0]
    last = last_token_indices(batch, num_slots)
    index = jnp.maximum(last, 0)
    no_tokens = jnp.full((num_slots, steps), -1, jnp.int32)
    logprobs = None if top_logprobs is None else jnp.zeros(no_tokens.shape, jnp.float32)
    top = None
    if top_logprobs:
        top = TopLogprobs(*(jnp.zeros((*no_tokens.shape, top_logprobs), dtype) for dtype in (jnp.int32, jnp.float32)))
    start = _LoopState(
        last_tokens=one_token_batch(
            batch.token_ids[index], jnp.where(last >= 0, batch.positions[index], -1), batch.adapters
        ),
        draft_tokens=jnp.full((num_slots, options.count), -1, jnp.int32),
        num_tokens=jnp.zeros((num_slots,), jnp.int32),
        num_steps=jnp.int32(0),
        output=LoopOutput(no_tokens, logprobs, top, no_tokens if options.count else None, processor),
        cache=cache,
    )
    advance = functools.partial(_advance, model, sampling, seeds, stop_tokens, options)
    end = jax.lax.while_loop(lambda state: jnp.any(state.last_tokens.slots >= 0), advance, start)
    return end.output, end.cache


@pytree_dataclass
class _LoopState:
    """The carry of `decode_loop`.

    Attributes:
      last_tokens: Batch with the newest token of each unfinished request, by slot; this token has not run yet.
      draft_tokens: [slots, drafts] int32, drafts of the tokens after the newest one; -1 in columns without a draft.
      num_tokens: [slots] int32, number of new tokens that each request got.
      num_steps: scalar int32, number of steps so far. Each unfinished request ran in all of them.
      output: LoopOutput so far.
      cache: the cache after the newest step.
    """

    last_tokens: Batch
    draft_tokens: Any
    num_tokens: Any
    num_steps: Any
    output: LoopOutput
    cache: KVCache


def _advance(model, sampling, seeds, stop_tokens, draft_options, state):
    """Runs each request's newest token and drafts, draws tokens, and keeps the accepted ones. Returns a _LoopState."""
    slots = int_range(seeds.shape[0])
    steps = state.output.tokens.shape[1]
    is_active = state.last_tokens.slots >= 0
    drafts = draft_options.count
    offsets = int_range(1 + drafts)[None, :]
    # A request gets at most `steps` tokens. A step gives it the accepted drafts and one token more, so it can use at
    # most `steps - num_tokens - 1` drafts.
    num_made = jnp.sum(state.draft_tokens >= 0, axis=1, dtype=jnp.int32) if drafts else 0
    num_drafts = jnp.minimum(num_made, steps - state.num_tokens - 1)
    is_live = is_active[:, None] & (offsets <= num_drafts[:, None])  # [slots, 1 + drafts], the tokens that run
    indices = jnp.where(is_live, int_range(is_live.size).reshape(is_live.shape), -1).reshape(-1)
    batch = _with_drafts(state.last_tokens, state.draft_tokens, is_live)
    top = state.output.top_logprobs
    options = top and LogprobOptions(num_top=top.ids.shape[-1])
    result, cache = sample_step.body(
        model,
        state.cache,
        batch,
        indices,
        sampling,
        seeds,
        options,
        processor=state.output.processor,
        drafts=draft_options,
    )
    logprobs = None if state.output.logprobs is None else result.logprobs
    drawn = LoopOutput(result.tokens, logprobs, result.top_logprobs)
    drawn = jax.tree.map(lambda x: x.reshape(*is_live.shape, *x.shape[1:]), drawn)

    # The new lengths count the newest tokens that ran, and their accepted drafts.
    accepted = cache.lengths - state.last_tokens.positions - 1
    # Compares with one stop token at a time. A reduction over an axis of stop tokens would crash XLA under shard_map
    # in a loop if the axis is empty (jax 0.11.2).
    is_stop = functools.reduce(jnp.logical_or, (drawn.tokens == stop for stop in stop_tokens), jnp.zeros_like(is_live))
    follows_stop = jnp.cumsum(is_stop, axis=1, dtype=jnp.int32) > is_stop.astype(jnp.int32)
    is_new = is_live & (offsets <= accepted[:, None]) & ~follows_stop
    num_new = jnp.sum(is_new, axis=1, dtype=jnp.int32)
    num_tokens = state.num_tokens + num_new
    goes_on = is_active & ~jnp.any(is_new & is_stop, axis=1) & (num_tokens < steps)

    # New tokens go to these columns of the output. Other tokens get the column `steps`, which is dropped.
    columns = jnp.where(is_new, state.num_tokens[:, None] + offsets, steps)
    output = dataclasses.replace(state.output, accepted=None, processor=None)
    output = jax.tree.map(lambda all, new: all.at[slots[:, None], columns].set(new, mode="drop"), output, drawn)
    counts = state.output.accepted
    if drafts:
        step_index = jnp.where(is_active, state.num_steps, steps)
        counts = counts.at[slots, step_index].set(num_new - 1, mode="drop")
    # The step also returns a processor, but its states count accepted drafts that follow a stop token.
    processor = state.output.processor and state.output.processor.updated(drawn.tokens, is_new)
    output = dataclasses.replace(output, accepted=counts, processor=processor)
    length = state.last_tokens.positions + num_new
    last_token = jnp.take_along_axis(drawn.tokens, accepted[:, None], axis=1)[:, 0]
    return _LoopState(
        last_tokens=one_token_batch(last_token, jnp.where(goes_on, length, -1), state.last_tokens.adapters),
        draft_tokens=result.draft_tokens if drafts else state.draft_tokens,
        num_tokens=num_tokens,
        num_steps=state.num_steps + 1,
        output=output,
        cache=dataclasses.replace(cache, lengths=jnp.where(is_active, length, cache.lengths)),
    )


def _with_drafts(last_tokens, draft_tokens, is_live):
    """Returns a batch of the tokens [slots, 1 + drafts], each request's newest token and its drafts, flattened.

    A token is padding where `is_live` [slots, 1 + drafts] is False.
    """
    ids = jnp.concatenate([last_tokens.token_ids[:, None], draft_tokens], axis=1)
    positions = last_tokens.positions[:, None] + int_range(is_live.shape[1])[None, :]
    slots = int_range(len(ids))[:, None]

    def flat(values, padding):
        """Returns the values [slots, 1 + drafts], with padding where no token is live, as one axis."""
        return jnp.where(is_live, values, padding).reshape(-1)

    return dataclasses.replace(
        last_tokens, token_ids=flat(ids, 0), positions=flat(positions, -1), slots=flat(slots, -1)
    )
