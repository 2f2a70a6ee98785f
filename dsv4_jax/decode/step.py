"""One compiled step: tokens in, logits and the updated cache out; the cache is donated."""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.drafts import DraftingModel, check_drafts, draft, forward_for_drafts, newest_tokens
from dsv4_jax.decode.sampling import (
    BatchedSamplingParams,
    LogprobRows,
    SamplingParams,
    TopLogprobs,
    sample,
    top_logprobs,
)
from dsv4_jax.ops.views import run_bounds
from dsv4_jax.parallel.sharded_step import sharded_step


@runtime_checkable
class Model(Protocol):
    """What a step needs of a model: any pytree of arrays with these methods, such as `DeepseekV4ForCausalLM`."""

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
        """Hidden states of the batch's tokens, and the updated cache."""

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]:
        """float32 logits of hidden states."""


@functools.partial(jax.jit, donate_argnames="cache")
@sharded_step
def forward(model: Model, cache: KVCache, batch: Batch) -> tuple[Float[Array, "T vocab"], KVCache]:
    """Runs the batch's tokens and returns logits after each of them.

    Args:
      model: the model, or a `CompiledModel` where many steps run.
      cache: the cache; donated: use the returned one from here on.
      batch: from `KVCacheManager.prepare_forward`.

    Returns:
      (logits [T, vocab] float32, cache). Rows of padding tokens mean nothing.
    """
    hidden, cache = run_model(model, cache, batch)
    return model.logits(hidden), cache


@functools.partial(jax.jit, donate_argnames="cache")
@sharded_step
def decode_step(model: Model, cache: KVCache, batch: Batch) -> tuple[Float[Array, "slots vocab"], KVCache]:
    """Runs the batch's tokens and returns, by slot, the logits after each request's last token.

    Serves prefill chunks as well: it computes no logits of other tokens.

    Args:
      model: the model, or a `CompiledModel` where many steps run.
      cache: the cache; donated: use the returned one from here on.
      batch: from `KVCacheManager.prepare_forward`.

    Returns:
      (logits [slots, vocab] float32, zeros for slots that are not in the batch; cache).
    """
    return last_logits(model, cache, batch)


@functools.partial(jax.jit, donate_argnames="cache")
@sharded_step
def sample_step(
    model: Model,
    cache: KVCache,
    batch: Batch,
    rows: Int[Array, "rows"],
    sampling: BatchedSamplingParams,
    seeds: UInt32[Array, "slots"],
    logprobs: LogprobRows | None = None,
) -> (
    tuple[Int[Array, "rows"], Float[Array, "rows"], KVCache]
    | tuple[Int[Array, "rows"], Float[Array, "rows"], TopLogprobs, KVCache]
):
    """Runs the batch's tokens and draws what follows some of them, in one program for every kind of sampling.

    A request's tokens that are drawn after stand side by side. All but the first of them are drafts: where the token
    drawn before one is another, it and those behind it are forgotten, and the cache's `lengths` do not count them.

    Args:
      model: the model, or a `CompiledModel` where many steps run.
      cache: the cache; donated: use the returned one from here on.
      batch: from `KVCacheManager.prepare_forward`.
      rows: [rows] indices of tokens of the batch; -1 = none.
      sampling: [slots] how each slot's tokens are drawn.
      seeds: [slots] one seed a request.
      logprobs: which log-probabilities are found besides those of the drawn tokens; None = none.

    Returns:
      (tokens [rows] int32, their log-probabilities [rows] float32 under the model, temperature and `top_p` aside; with
      `logprobs` the `TopLogprobs` [rows, k]; cache). What stands where `rows` is -1 means nothing.
    """
    *drawn, _, cache = draw(model, cache, batch, rows, sampling, seeds, logprobs)
    return *drawn, cache


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="drafts")
@sharded_step
def draft_step(
    model: DraftingModel,
    cache: KVCache,
    batch: Batch,
    rows: Int[Array, "rows"],
    sampling: BatchedSamplingParams,
    seeds: UInt32[Array, "slots"],
    logprobs: LogprobRows | None = None,
    *,
    drafts: int,
) -> (
    tuple[Int[Array, "rows"], Float[Array, "rows"], Int[Array, "slots {drafts}"], KVCache]
    | tuple[Int[Array, "rows"], Float[Array, "rows"], TopLogprobs, Int[Array, "slots {drafts}"], KVCache]
):
    """`sample_step`, then guesses what follows the newest token of each request that got one.

    The model's multi-token-prediction block guesses, see `drafts.draft`. It needs all tokens of a request: prompts run
    through this step too.

    Args:
      model: a model with that block, or a `CompiledModel` of it.
      cache: the cache; donated. Its `max_query_tokens` are more than `drafts`.
      batch, rows, sampling, seeds, logprobs: as for `sample_step`.
      drafts: how many tokens to guess (static).

    Returns:
      (tokens [rows], log-probabilities [rows] and, with `logprobs`, `TopLogprobs` as from `sample_step`; guesses
      [slots, drafts] int32, which mean nothing for slots that drew no token; cache).

    Raises:
      ValueError: the cache has no room for so many drafts, or for none.
    """
    check_drafts(cache.schema, drafts)
    return draw(model, cache, batch, rows, sampling, seeds, logprobs, drafts=drafts)


@functools.partial(jax.jit, donate_argnames="cache", static_argnames="k")
@sharded_step
def topk_step(
    model: Model, cache: KVCache, batch: Batch, *, k: int
) -> tuple[Float[Array, "slots k"], Int[Array, "slots k"], KVCache]:
    """Runs the batch's tokens and returns, by slot, the likeliest tokens after each request's last one.

    Args:
      model: the model, or a `CompiledModel` where many steps run.
      cache: the cache; donated: use the returned one from here on.
      batch: from `KVCacheManager.prepare_forward`.
      k: how many (static).

    Returns:
      (log-probabilities [slots, k] float32, best first, token ids [slots, k] int32, cache).
    """
    logits, cache = last_logits(model, cache, batch)
    best, ids = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), k)
    return best, ids.astype(jnp.int32), cache


def accepted_lengths(
    lengths: Int[Array, "slots"], batch: Batch, rows: Int[Array, "rows"], tokens: Int[Array, "rows"]
) -> Int[Array, "slots"]:
    """[slots] int32 lengths without refused drafts: what the host finds with `accept`, found on the device.

    Args:
      lengths: [slots] with all tokens of the batch.
      batch: the batch.
      rows: [rows] indices of its tokens that are drawn after, those of a request side by side; -1 = none.
      tokens: [rows] what was drawn.
    """
    last = last_accepted(batch, rows, tokens, lengths.shape[0])
    return jnp.where(last >= 0, batch.positions[jnp.maximum(rows[jnp.maximum(last, 0)], 0)] + 1, lengths)


def last_accepted(
    batch: Batch, rows: Int[Array, "rows"], tokens: Int[Array, "rows"], num_slots: int
) -> Int[Array, "slots"]:
    """[num_slots] which of `rows` is a slot's last token that is no refused draft, -1 = none; see
    `accepted_lengths`.
    """
    at, index = jnp.maximum(rows, 0), jnp.arange(rows.shape[0], dtype=jnp.int32)
    slots = jnp.where(rows >= 0, batch.slots[at], -1)
    draft = (slots == jnp.roll(slots, 1)) & (index > 0)
    refused = draft & (batch.token_ids[at] != jnp.roll(tokens, 1))
    # A row is kept if the last refusal up to it lies before its request's first row.
    kept = jax.lax.cummax(jnp.where(refused, index, -1)) < jax.lax.cummax(jnp.where(draft, 0, index))
    to = jnp.where(kept & (slots >= 0), slots, num_slots)
    return jnp.full((num_slots,), -1, jnp.int32).at[to].max(index, mode="drop")


def draw(model, cache, batch, rows, sampling, seeds, logprobs=None, drafts=0):
    """`draft_step` for callers that are traced already; without drafts its guesses are [slots, 0]."""
    at = jnp.maximum(rows, 0)
    streams: Any = None
    if drafts:
        hidden, streams, cache = forward_for_drafts(model, cache, batch)
    else:
        hidden, cache = run_model(model, cache, batch)
    logits, slots = model.logits(hidden[at]), jnp.maximum(batch.slots[at], 0)
    of_rows = sampling if isinstance(sampling, SamplingParams) else sampling[slots]
    tokens = sample(logits, of_rows, seeds[slots], batch.positions[at] + 1)
    if logprobs is not None and logprobs.given is not None:
        tokens = jnp.where(logprobs.given >= 0, logprobs.given, tokens)
    chosen, norm = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0], jax.nn.logsumexp(logits, axis=1)
    drawn: Any = tokens, chosen - norm, *(() if logprobs is None else (top_logprobs(logits, norm, logprobs),))
    cache = dataclasses.replace(cache, lengths=accepted_lengths(cache.lengths, batch, rows, tokens))
    if not drafts:
        return *drawn, jnp.zeros((cache.lengths.shape[0], 0), jnp.int32), cache
    last = last_accepted(batch, rows, tokens, cache.lengths.shape[0])
    row = jnp.maximum(last, 0)
    newest = newest_tokens(tokens[row], jnp.where(last >= 0, batch.positions[at[row]], -1))
    guesses, _, cache = draft(model, cache, streams[at[row]], newest, sampling, seeds, count=drafts)
    return *drawn, guesses, cache


def run_model(model, cache, batch):
    """The model's call, while it is traced. Raises ValueError if it did not begin the step, or lost the cache of it."""
    hidden, new = model(cache, batch)
    if new.lengths is cache.lengths:
        raise ValueError(
            "the model returned the cache without this step's blocks and lengths: it must begin with "
            "`cache = cache.begin_step(batch)` and return the cache of its last handle"
        )
    return hidden, new


def last_logits(model, cache, batch):
    """`decode_step` for callers that are traced already."""
    hidden, cache = run_model(model, cache, batch)
    token = last_tokens(batch, cache.lengths.shape[0])
    logits = model.logits(hidden[jnp.maximum(token, 0)])
    return jnp.where((token >= 0)[:, None], logits, 0.0), cache


def last_tokens(batch: Batch, slots: int) -> Int[Array, "slots"]:
    """Where each request's last token is in a batch: the one after which its next token is drawn.

    Args:
      batch: the batch.
      slots: how many slots the cache has: `cache.lengths.shape[0]`.

    Returns:
      [slots] int32 indices of tokens; -1 = the slot is not in the batch. As an index -1 reads the last token.
    """
    tokens = jnp.arange(batch.slots.shape[0], dtype=jnp.int32)
    last = (run_bounds(batch.slots)[1] == tokens + 1) & (batch.slots >= 0)
    return jnp.full((slots,), -1, jnp.int32).at[jnp.where(last, batch.slots, slots)].set(tokens, mode="drop")
