"""Drafts made on the device, by the model's multi-token-prediction block."""

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
    """What drafts need of a model besides `Model`; `DeepseekV4ForCausalLM` says what each method does."""

    def forward_streams(
        self, cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], KVCache]: ...

    def mtp_forward(
        self, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], KVCache]: ...

    def mtp_write(self, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch) -> KVCache: ...

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]: ...


def check_drafts(schema: CacheSchema, drafts: int) -> None:
    """Raises ValueError unless a model with such a cache makes drafts, and it has room for so many, at least one."""
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


def newest_tokens(tokens: Int[Array, "slots"], positions: Int[Array, "slots"]) -> Batch:
    """What `draft` takes: for each slot the token that was drawn after the one at a position; -1 = none."""
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
    """The model's step, which its multi-token-prediction block follows: for callers that are traced already.

    Returns:
      hidden states [T, hidden] and streams [T, hc_mult, hidden] of the batch's tokens, and the cache. The block's
      window then holds a row for each token but a request's last, whose next token is not known.
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
    """Guesses how requests continue: for callers that are traced already.

    A guess is drawn from the block's logits as `sample` would draw the token from the model's, with the same random
    bits. Both are then equal as often as their distributions allow, but for a factor (Daliri, Musco and Suresh, 2024,
    arXiv:2408.07978), and the token is still the one that is drawn without drafts.

    Args:
      model: the model.
      cache: the cache after `forward_for_drafts` of these tokens.
      streams: [n, hc_mult, hidden], the model's, of each request's last token.
      batch: the positions of these tokens, and the token drawn after each as its id.
      sampling: how tokens are drawn, for all rows or as arrays [n].
      seeds: [n] one seed a request.
      count: how many tokens to guess of each request.

    Returns:
      (tokens [n, count] int32 and the logits [n, count, vocab] float32 they were drawn from, the cache). Rows of later
      steps overwrite those that guesses left in the block's window.
    """

    def guess(carry: Any, _: None) -> tuple[Any, Any]:
        streams, batch, cache = carry
        hidden, streams, cache = model.mtp_forward(streams, cache, batch)
        logits = model.logits(hidden)
        # A row predicts the token after the next.
        tokens = sample(logits, sampling, seeds, batch.positions + 2)
        positions = jnp.where(batch.positions >= 0, batch.positions + 1, -1)
        return (streams, dataclasses.replace(batch, token_ids=tokens, positions=positions), cache), (tokens, logits)

    (*_, cache), (tokens, logits) = jax.lax.scan(guess, (streams, batch, cache), length=count)
    return tokens.T, logits.swapaxes(0, 1), cache
