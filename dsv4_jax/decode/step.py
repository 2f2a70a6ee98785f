"""Compiled steps, which run a batch of tokens and return logits or drawn tokens, and the updated cache."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from dsv4_jax.cache import Batch, Decisions, KVCache
from dsv4_jax.decode.drafts import DraftOptions, check_drafts, draft, one_token_batch
from dsv4_jax.decode.logits_processor import LogitsProcessor, SlotRows
from dsv4_jax.decode.sampling import (
    GREEDY,
    BatchedSamplingParams,
    LogprobOptions,
    SamplingParams,
    TopLogprobs,
    log_probabilities,
    sample,
    top_logprobs,
)
from dsv4_jax.decode.step_launch import compiled_step
from dsv4_jax.ops.all_reduce import mailboxes, use_mailboxes
from dsv4_jax.ops.views import DROP, int_range
from dsv4_jax.parallel.sharded_step import sharded_rows
from pallas_kernels.runtime.pytrees import pytree_dataclass


@runtime_checkable
class Model(Protocol):
    """A model that steps can run: any pytree of arrays with these methods, such as `DeepseekV4ForCausalLM`."""

    def __call__(self, cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
        """Returns ([T, hidden] hidden states of the batch's tokens, the updated cache)."""

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]:
        """Returns the float32 logits [..., vocab] of hidden states [..., hidden]."""


@compiled_step
def forward(model: Model, cache: KVCache, batch: Batch) -> tuple[Float[Array, "T vocab"], KVCache]:
    """Runs the batch's tokens and returns the logits after each of them.

    Args:
      model: the model, or a `CompiledModel` if many steps run.
      cache: the cache; donated, so use the returned cache from here on.
      batch: from `KVCacheManager.prepare_forward`.

    Returns:
      (logits [T, vocab] float32, cache). Logits after padding tokens are undefined.

    Raises:
      RuntimeError: the cache was donated to an earlier step.
      ValueError: the cache has not run all earlier batches, or it has already run this batch or a later one. The cache
        is unchanged.
    """
    hidden, cache = run_model(model, cache, batch)
    return model.logits(hidden), cache


@compiled_step
def decode_step(model: Model, cache: KVCache, batch: Batch) -> tuple[Float[Array, "slots vocab"], KVCache]:
    """Runs the batch's tokens and returns the logits after each request's last token, by slot.

    Prefill batches can run through this step too. Only the last token of each request gets logits.

    Args:
      model: the model, or a `CompiledModel` if many steps run.
      cache: the cache; donated, so use the returned cache from here on.
      batch: from `KVCacheManager.prepare_forward`.

    Returns:
      (logits [slots, vocab] float32, zeros for slots that are not in the batch; cache).

    Raises:
      RuntimeError, ValueError: as for `forward`.
    """
    hidden, cache = run_model(model, cache, batch)
    token = last_token_indices(batch, cache.lengths.shape[0])
    logits = model.logits(hidden[jnp.maximum(token, 0)])
    return jnp.where((token >= 0)[:, None], logits, 0.0), cache


@pytree_dataclass
class StepOutput:
    """The tokens that a step drew.

    Attributes:
      tokens: [n] int32, for each index in `logits_indices` the token drawn after the batch's token at this index;
        undefined where the index is -1.
      logprobs: [n] float32, log-probabilities of `tokens` under the model, before temperature and `top_p`.
      top_logprobs: TopLogprobs [n, k], the k likeliest tokens at the position of each of `tokens`; None if not asked
        for.
      draft_tokens: [slots, drafts] int32, drafts of the tokens after `last_tokens`, -1 in columns without a draft;
        undefined for slots that drew no token. None without drafts on the device.
      last_tokens: [slots] int32, each request's newest token, the one drawn after its last accepted token; undefined
        for slots that drew no token. None without drafts on the device.
      processor: the LogitsProcessor with the states of all slots after the accepted tokens; None without a processor.
      decisions: Decisions [T, ...] of the batch's tokens; None if not recorded.
    """

    tokens: Any
    logprobs: Any
    top_logprobs: TopLogprobs | None = None
    draft_tokens: Any = None
    last_tokens: Any = None
    processor: LogitsProcessor | None = None
    decisions: Decisions | None = None


@pytree_dataclass
class EarlierTokens:
    """Tokens that an earlier step drew and this step runs, without a copy to the host between the steps.

    Attributes:
      tokens: [m] int32, `StepOutput.tokens` of the earlier step. If the earlier step made K drafts: the pair of its
        `last_tokens` [slots] and `draft_tokens` [slots, K]. `indices` then refer to one array [slots * (1 + K)], in
        which each slot's entry of `last_tokens` is followed by the slot's drafts.
      indices: [T] int32, for each of the batch's T tokens the index in `tokens` of the token that replaces it; -1 = the
        batch's own token stays.
    """

    tokens: Any
    indices: Any

    def fill(self, batch: Batch, lengths: Int[Array, "slots"]) -> Batch:
        """Returns the batch with the earlier step's tokens filled in.

        If the earlier step made drafts, the positions of the filled-in tokens are set, too: they continue from the
        request's length in `lengths`. The host could not set these positions, because it did not know how many drafts
        the earlier step accepts.

        Args:
          batch: the batch as the host prepared it.
          lengths: `lengths` of the cache before the step.
        """
        tokens = self.tokens
        positions = batch.positions
        is_earlier = self.indices >= 0
        if isinstance(tokens, tuple):
            last, drafts = tokens
            tokens = jnp.concatenate([last[:, None], drafts], axis=1)
            first_positions = lengths[jnp.maximum(batch.slots, 0)]
            positions = jnp.where(is_earlier, first_positions + self.indices % tokens.shape[1], positions)
        drawn = tokens.reshape(-1)[jnp.maximum(self.indices, 0)]
        ids = jnp.where(is_earlier, drawn, batch.token_ids)
        return dataclasses.replace(batch, token_ids=ids, positions=positions)


@compiled_step
def logits_step(
    model: Model,
    cache: KVCache,
    batch: Batch,
    logits_indices: Int[Array, "n"],
    earlier: EarlierTokens | None = None,
    *,
    record: tuple[str, ...] = (),
) -> tuple[Float[Array, "n vocab"], Decisions | None, KVCache]:
    """Runs the batch's tokens and returns the logits after some of them, for `draw_step` to draw from.

    Args:
      model, cache, batch, earlier, record: as for `sample_step`.
      logits_indices: [n] indices of the batch's tokens to return logits after; -1 = none.

    Returns:
      (logits [n, vocab] float32, undefined where the index is -1; `StepOutput.decisions`; the cache, whose `lengths`
      count all tokens).

    Raises:
      RuntimeError, ValueError: as for `decode_step`.
    """
    batch = batch if earlier is None else earlier.fill(batch, cache.lengths)
    hidden, _, decisions, cache = _run(model, cache, batch, DraftOptions(), record)
    return model.logits(hidden[jnp.maximum(logits_indices, 0)]), decisions, cache


@compiled_step
def sample_step(
    model: Model,
    cache: KVCache,
    batch: Batch,
    logits_indices: Int[Array, "n"] | None = None,
    sampling: SamplingParams | BatchedSamplingParams = GREEDY,
    seeds: UInt32[Array, "slots"] | None = None,
    logprobs: LogprobOptions | None = None,
    earlier: EarlierTokens | None = None,
    token_mask: UInt32[Array, "n words"] | None = None,
    processor: LogitsProcessor | None = None,
    *,
    drafts: int | DraftOptions = 0,
    record: tuple[str, ...] = (),
) -> tuple[StepOutput, KVCache]:
    """Runs the batch's tokens and draws the tokens that follow some of them.

    A step can verify drafts, guesses of a request's next tokens, which follow the request's newest token in the batch.
    The entries of `logits_indices` of one request stand side by side: its newest token first, then its drafts. If a
    draft differs from the token drawn at the preceding entry, this draft and the later ones are rejected, and the
    cache's `lengths` do not count them.

    With `drafts`, the model's draft layers also draft the next tokens of each request, see `decode.drafts.draft`. The
    draft layers need rows of all tokens of a request, so prompts have to run with `drafts` too.

    Args:
      model: the model, or a `CompiledModel` if many steps run. With `drafts`, it has draft layers, see `Drafts`.
      cache: the cache; donated, so use the returned cache from here on.
      batch: from `KVCacheManager.prepare_forward`.
      logits_indices: [n] indices of the batch's tokens to draw after; -1 = draw nothing. None = draw after each slot's
        last token; n is then the number of slots.
      sampling: sampling parameters, one for all requests (static) or arrays [slots].
      seeds: [slots] one seed per slot; None = zeros.
      logprobs: which log-probabilities to compute besides those of the drawn tokens; None = no further ones.
      earlier: tokens of the batch that only the device knows; None = the batch holds all tokens.
      token_mask: [n, ceil(vocab / 32)] uint32 bits, the tokens that may be drawn, as in `sample`; None = all.
      processor: changes the logits before `token_mask` and `sampling` apply; it holds the states of all slots. With a
        processor, at most `max_query_tokens` tokens are drawn for a slot. None = no changes.
      drafts: number of tokens to draft per request, less than the cache's `max_query_tokens`, or DraftOptions (static).
      record: names of the fields of `Decisions` to return, which the model's `forward_decisions` records (static).

    Returns:
      (StepOutput, cache).

    Raises:
      RuntimeError, ValueError: as for `forward`, or as for `check_drafts` with `drafts`. ValueError also if the
        processor does not have a state for each slot.
    """
    batch = batch if earlier is None else earlier.fill(batch, cache.lengths)
    num_slots = cache.lengths.shape[0]
    indices = last_token_indices(batch, num_slots) if logits_indices is None else logits_indices
    seeds = jnp.zeros((num_slots,), jnp.uint32) if seeds is None else seeds
    options = DraftOptions.of(drafts)
    hidden, streams, decisions, cache = _run(model, cache, batch, options, record)
    logits = model.logits(hidden[jnp.maximum(indices, 0)])
    output = draw_tokens(logits, batch, indices, sampling, seeds, logprobs, token_mask, processor)
    output = dataclasses.replace(output, decisions=decisions)
    cache = dataclasses.replace(cache, lengths=accepted_lengths(cache.lengths, batch, indices, output.tokens))
    if not options.count:
        return output, cache
    last = last_accepted(batch, indices, output.tokens, num_slots)
    row = jnp.maximum(last, 0)
    last_tokens = output.tokens[row]
    token = jnp.maximum(indices[row], 0)
    newest = one_token_batch(last_tokens, jnp.where(last >= 0, cache.lengths, -1))
    draft_tokens, _, _, cache = draft(model, cache, streams[token], newest, sampling, seeds, drafts=options)
    return dataclasses.replace(output, draft_tokens=draft_tokens, last_tokens=last_tokens), cache


def _run(model, cache, batch, drafts, record):
    """Runs the model for a step.

    Args:
      model, cache, batch, record: as for `sample_step`.
      drafts: DraftOptions.

    Returns:
      ([T, hidden] hidden states; [T, h, hidden] inputs of the draft layers, None without drafts; Decisions, None if
      none are recorded; the updated cache, to which the draft layers have written).

    Raises:
      ValueError: as for `check_drafts`.
    """
    if drafts.count:
        check_drafts(cache.schema, drafts)
    streams: Any = None
    decisions = None
    if record:
        hidden, streams, decisions, cache = model.forward_decisions(cache, batch, record)
    elif drafts.count:
        hidden, streams, cache = model.forward_streams(cache, batch)
    else:
        hidden, cache = run_model(model, cache, batch)
    if drafts.count:
        cache = model.drafts.write(model, streams, cache, batch)
    return hidden, streams, decisions, cache


@jax.named_scope("sampling")
def draw_tokens(
    logits: Float[Array, "n vocab"],
    batch: Batch,
    logits_indices: Int[Array, "n"],
    sampling: SamplingParams | BatchedSamplingParams,
    seeds: UInt32[Array, "slots"],
    logprobs: LogprobOptions | None = None,
    token_mask: UInt32[Array, "n words"] | None = None,
    processor: LogitsProcessor | None = None,
) -> StepOutput:
    """Draws the tokens of a step from their logits. Call it inside a traced function.

    Log-probabilities are computed from `logits`, before the processor changes them. If the processor gives the drawn
    token the logit -inf or NaN, the token's log-probability is NaN. This happens if the processor forbids all tokens or
    returns NaN.

    Args:
      logits: [n, vocab] float32, the model's logits after the tokens of `logits_indices`.
      batch, logits_indices, sampling, seeds, logprobs, token_mask, processor: as for `sample_step`.

    Returns:
      StepOutput without `draft_tokens`, `last_tokens` and `decisions`.
    """
    token_indices = jnp.maximum(logits_indices, 0)
    num_slots = seeds.shape[0]
    slots = jnp.maximum(batch.slots[token_indices], 0)
    row_sampling = sampling if isinstance(sampling, SamplingParams) else sampling[slots]
    forced = None if logprobs is None else logprobs.forced_tokens
    rows = None
    processed = logits
    if processor is not None:
        drawn_indices = logits_indices if forced is None else jnp.where(forced < 0, logits_indices, -1)
        rows = SlotRows.of(processor, batch, drawn_indices, num_slots)
        processed = rows.process(logits)
    tokens = sample(processed, row_sampling, seeds[slots], batch.positions[token_indices] + 1, token_mask)
    if forced is not None:
        tokens = jnp.where(forced >= 0, forced, tokens)
    token_logprobs, norm = log_probabilities(logits, tokens)
    top = None if logprobs is None else top_logprobs(logits, norm, logprobs)
    if rows is not None:
        is_allowed = jnp.take_along_axis(processed, tokens[:, None], axis=1)[:, 0] > -jnp.inf
        token_logprobs = jnp.where(is_allowed, token_logprobs, jnp.nan)
        processor = rows.update(tokens, last_accepted(batch, logits_indices, tokens, num_slots))
    return StepOutput(tokens, token_logprobs, top, processor=processor)


# Draws the tokens of a step from the logits of `logits_step`. A step is launched in these two parts if its token masks
# are computed only after the first launch.
draw_step: Any = jax.jit(sharded_rows(draw_tokens))


def accepted_lengths(
    lengths: Int[Array, "slots"], batch: Batch, logits_indices: Int[Array, "n"], tokens: Int[Array, "n"]
) -> Int[Array, "slots"]:
    """Returns the [slots] int32 lengths of requests without their rejected drafts.

    The host computes the number of accepted drafts by the same rule in `engine.drafters.accept`.

    Args:
      lengths: [slots] lengths that count all tokens of the batch.
      batch: the batch of the step.
      logits_indices: [n] indices of the batch's tokens after which a token is drawn; -1 = none. The indices of one
        request stand side by side: its newest token first, then its drafts.
      tokens: [n] the drawn tokens.
    """
    last = last_accepted(batch, logits_indices, tokens, lengths.shape[0])
    index = jnp.maximum(logits_indices[jnp.maximum(last, 0)], 0)
    return jnp.where(last >= 0, batch.positions[index] + 1, lengths)


def last_accepted(
    batch: Batch, logits_indices: Int[Array, "n"], tokens: Int[Array, "n"], num_slots: int
) -> Int[Array, "slots"]:
    """Finds the last accepted token of each slot. Arguments are as for `accepted_lengths`.

    A token that is not a draft is accepted. A draft is accepted if it equals the token drawn at the entry before it,
    and all earlier drafts of its request are accepted.

    Returns:
      [num_slots] int32, the index in [0, n) of this token's entry of `logits_indices`; -1 = the slot has no entry.
    """
    token_indices = jnp.maximum(logits_indices, 0)
    entries = int_range(logits_indices.shape[0])
    slots = jnp.where(logits_indices >= 0, batch.slots[token_indices], -1)
    is_draft = (slots == jnp.roll(slots, 1)) & (entries > 0)
    is_rejected = is_draft & (batch.token_ids[token_indices] != jnp.roll(tokens, 1))
    last_rejected = jax.lax.cummax(jnp.where(is_rejected, entries, -1))
    first_of_request = jax.lax.cummax(jnp.where(is_draft, 0, entries))
    # An entry is accepted if neither it nor an earlier entry of its request is rejected.
    is_accepted = last_rejected < first_of_request
    accepted_slots = jnp.where(is_accepted, slots, -1)
    return jnp.full((num_slots,), -1, jnp.int32).at[accepted_slots].max(entries, **DROP)


def run_model(model: Any, cache: KVCache, batch: Batch) -> tuple[Float[Array, "T D"], KVCache]:
    """Calls the model on a batch. Call it inside a traced function.

    Tracing a model takes seconds. If the model is a pytree of arrays, all steps of equal shapes share one trace.

    Returns:
      ([T, hidden] hidden states, the updated cache).

    Raises:
      ValueError: the model did not call `cache.begin_step(batch)`, or returned the cache from before this call.
    """
    is_tree_of_arrays = all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(model))
    call = _call_traced_once if is_tree_of_arrays else _call
    return call(model, cache, batch, mailboxes())


def _call(model, cache, batch, table):
    with use_mailboxes(table):
        hidden, new = model(cache, batch)
    if new.lengths is cache.lengths:
        raise ValueError(
            "the model returned the cache without this step's blocks and lengths: it must begin with "
            "`cache = cache.begin_step(batch)` and return the cache of its last handle"
        )
    return hidden, new


_call_traced_once = jax.jit(_call, inline=True)


def last_token_indices(batch: Batch, slots: int) -> Int[Array, "slots"]:
    """Finds the index of each request's last token in a batch.

    Args:
      batch: the batch.
      slots: number of slots of the cache, `cache.lengths.shape[0]`.

    Returns:
      [slots] int32 indices in [0, T); -1 = the slot is not in the batch. Replace -1 before you index an array with
      them: JAX takes -1 for the last row.
    """
    tokens = int_range(batch.slots.shape[0])
    return jnp.full((slots,), -1, jnp.int32).at[batch.slots].max(tokens, **DROP)
