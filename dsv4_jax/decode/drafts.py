"""Draft tokens made on the device by the model's multi-token-prediction (MTP) block."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dsv4_jax.cache import Batch, CacheSchema, KVCache
from dsv4_jax.cache.streams import advance_streams
from dsv4_jax.decode.sampling import BatchedSamplingParams, SamplingParams, sample


@runtime_checkable
class DraftingModel(Protocol):
    """The methods of a model that drafts need besides `Model`; `DeepseekV4ForCausalLM` documents each."""

    def forward_streams(
        self, cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], KVCache]: ...

    def mtp_forward(
        self, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], KVCache]: ...

    def mtp_write(self, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch) -> KVCache: ...

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]: ...


def check_drafts(schema: CacheSchema, drafts: int) -> None:
    """Raises ValueError unless the model has an MTP block and the cache has room for 1 or more drafts a request."""
    if not schema.config.num_nextn_predict_layers:
        raise ValueError(
            "drafts on the device need the model's multi-token-prediction block, which this configuration leaves out "
            "(num_nextn_predict_layers=0): read it with DSV4Config.from_hf(..., mtp=True)"
        )
    if not 1 <= drafts < schema.max_query_tokens:
        raise ValueError(
            f"{drafts=} must be from 1 to {schema.max_query_tokens - 1}: the cache has "
            f"max_query_tokens={schema.max_query_tokens}"
        )


def one_token_batch(tokens: Int[Array, "slots"], positions: Int[Array, "slots"]) -> Batch:
    """Returns a batch with one token per slot, without new blocks; a slot with position -1 has no token."""
    slots, none = jnp.arange(tokens.shape[0], dtype=jnp.int32), jnp.zeros((0,), jnp.int32)
    return Batch(
        token_ids=jnp.where(positions >= 0, tokens, 0),
        positions=positions,
        slots=jnp.where(positions >= 0, slots, -1),
        new_blocks=none.reshape(0, 3),
        reset_slots=none,
        prefill=False,
    )


def forward_for_drafts(
    model: DraftingModel, cache: KVCache, batch: Batch
) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], KVCache]:
    """Runs the model, then writes the MTP block's window. Call it inside a traced function.

    The block's row of a token needs the next token, so the window ends one token before each request does.

    Returns:
      hidden states [T, hidden] and residual streams [T, hc_mult, hidden] of the batch's tokens, and the cache.
    """
    hidden, streams, cache = model.forward_streams(cache, batch)
    before, shifted, cache = advance_streams(cache, streams, batch)
    return hidden, streams, model.mtp_write(before, cache, shifted)


def draft(
    model: DraftingModel,
    cache: KVCache,
    streams: Float[Array, "n h D"],
    batch: Batch,
    sampling: SamplingParams | BatchedSamplingParams,
    seeds: UInt32[Array, "n"],
    *,
    count: int,
) -> tuple[Int[Array, "n {count}"], Float[Array, "n {count} vocab"], KVCache]:
    """Drafts the next tokens of requests. Call it inside a traced function.

    A draft is drawn from the block's logits with the random bits that `sample` uses for the token itself. The two then
    agree as often as their distributions allow, up to a constant factor (Daliri, Musco and Suresh, 2024,
    arXiv:2408.07978), and the verified token is the one that is drawn without drafts.

    Args:
      model: the model.
      cache: the cache after `forward_for_drafts` of these tokens.
      streams: [n, hc_mult, hidden] the model's residual streams at each request's last token.
      batch: positions of these tokens, with the token drawn after each as its id (`one_token_batch`).
      sampling: sampling parameters, one for all rows or arrays [n].
      seeds: [n] one seed per request.
      count: number of draft tokens per request.

    Returns:
      (draft tokens [n, count] int32, the logits [n, count, vocab] float32 they were drawn from, cache). Later steps
      overwrite the rows that drafts leave in the block's window.
    """

    def draft_one(carry: Any, _: None) -> tuple[Any, Any]:
        streams, batch, cache = carry
        hidden, streams, cache = model.mtp_forward(streams, cache, batch)
        logits = model.logits(hidden)
        # The block's row at a position predicts the token after the next.
        tokens = sample(logits, sampling, seeds, batch.positions + 2)
        positions = jnp.where(batch.positions >= 0, batch.positions + 1, -1)
        return (streams, dataclasses.replace(batch, token_ids=tokens, positions=positions), cache), (tokens, logits)

    (*_, cache), (tokens, logits) = jax.lax.scan(draft_one, (streams, batch, cache), length=count)
    return tokens.T, logits.swapaxes(0, 1), cache
