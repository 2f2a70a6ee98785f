"""Draft tokens made on the device by the model's draft layers, such as multi-token prediction (MTP) or DSpark."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dsv4_jax.cache import Batch, CacheSchema, KVCache
from dsv4_jax.common.arguments import check_whole
from dsv4_jax.config.draft_config import check_min_confidence
from dsv4_jax.decode.sampling import BatchedSamplingParams, SamplingParams, sample
from dsv4_jax.nn.draft_layers import Draw
from dsv4_jax.ops.views import int_range


class Drafts(Protocol):
    """The interface of a model's attribute `drafts`, its draft layers, such as `nn.MTPDrafts` and `nn.DSparkDrafts`.

    Methods are called inside a traced function. Their argument `model` is the model that owns the draft layers; it has
    `embed`, `logits` and `forward_streams`, see `DeepseekV4ForCausalLM`. The configuration `config.drafts`, not this
    interface, says how many drafts a step can have, and how many spare rows the draft layers' windows have.
    """

    def write(self, model: Any, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch) -> KVCache:
        """Writes the draft layers' window rows of a step's tokens, and any other state that later drafts need.

        Args:
          model: the model.
          streams: [T, h, hidden] residual streams of the batch's tokens, which `forward_streams` returned.
          cache: the cache that `forward_streams` returned.
          batch: the batch of the step, of T tokens.

        Returns:
          The updated cache.
        """

    def draft(
        self,
        model: Any,
        streams: Float[Array, "n h D"],
        cache: KVCache,
        batch: Batch,
        draw: Draw,
        count: int,
    ) -> tuple[Int[Array, "n {count}"], Float[Array, "n {count} vocab"], Float[Array, "n {count}"] | None, KVCache]:
        """Drafts the tokens that follow each request's newest token.

        Args:
          model: the model.
          streams: [n, h, hidden] residual streams that `forward_streams` returned for the token that precedes each
            request's newest token.
          cache: the cache, to which `write` has written all tokens that precede the newest ones.
          batch: the newest tokens of n requests at their positions, one token for each slot.
          draw: function (logits [n, vocab] float32, positions [n] of the tokens to draw) -> tokens [n] int32.
          count: number of drafts per request.

        Returns:
          A tuple of

          * [n, count] int32 draft tokens,
          * [n, count, vocab] float32 logits that they were drawn from,
          * [n, count] float32 confidence logits, or None if the draft layers estimate no confidence. The sigmoid of a
            confidence logit estimates the probability that the draft is accepted if all earlier drafts are accepted,
          * the cache. Drafts may leave rows in the windows, which later steps overwrite.
        """


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """Options of the drafts that the model's draft layers make for each request in a step.

    Attributes:
      count: maximum number of drafts per request; 0 = no drafts.
      min_confidence: minimum probability that a draft is accepted, as the draft layers estimate it. The first draft
        below this minimum and all later drafts are dropped; 0 = no draft is dropped.

    Raises:
      TypeError: `count` is no whole number.
      ValueError: `count` is negative, or `min_confidence` is not from 0 to 1.
    """

    count: int = 0
    min_confidence: float = 0.0

    def __post_init__(self):
        check_whole("drafts", self.count, 0)
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence={self.min_confidence} must be from 0 to 1, a probability")

    @classmethod
    def of(cls, drafts: "int | DraftOptions") -> "DraftOptions":
        """Returns a number of drafts as DraftOptions; returns DraftOptions unchanged."""
        return drafts if isinstance(drafts, DraftOptions) else cls(drafts)


def check_drafts(schema: CacheSchema, drafts: int | DraftOptions) -> None:
    """Checks that the model and the cache can make drafts.

    Args:
      schema: geometry of the cache, with the model's configuration.
      drafts: number of drafts per request, or DraftOptions.

    Raises:
      ValueError: the model has no draft layers; the number of drafts is below 1, above the layers' maximum, or not less
        than the cache's `max_query_tokens`; or `min_confidence` is set although the layers estimate no confidence.
    """
    options = DraftOptions.of(drafts)
    layers = schema.config.drafts
    if layers is None:
        raise ValueError(
            "drafts on the device need the model's draft layers (multi-token prediction or DSpark), which this "
            "configuration leaves out (num_nextn_predict_layers=0): read it with DSV4Config.from_hf(..., mtp=True)"
        )
    check_min_confidence(options.min_confidence, layers)
    if layers.max_drafts is not None and options.count > layers.max_drafts:
        raise ValueError(
            f"drafts={options.count} must be from 1 to {layers.max_drafts}, the most that this model's layers make"
        )
    if not 1 <= options.count < schema.max_query_tokens:
        raise ValueError(
            f"drafts={options.count} must be from 1 to {schema.max_query_tokens - 1}: the cache has "
            f"max_query_tokens={schema.max_query_tokens}"
        )


def one_token_batch(
    tokens: Int[Array, "slots"], positions: Int[Array, "slots"], adapters: Int[Array, "slots"] | None = None
) -> Batch:
    """Returns a decode batch with one token per slot and without new blocks. A slot with position -1 has no token."""
    slots = int_range(tokens.shape[0])
    return Batch(
        token_ids=jnp.where(positions >= 0, tokens, 0),
        positions=positions,
        slots=jnp.where(positions >= 0, slots, -1),
        adapters=adapters,
    )


def draft(
    model: Any,
    cache: KVCache,
    streams: Float[Array, "n h D"],
    batch: Batch,
    sampling: SamplingParams | BatchedSamplingParams,
    seeds: UInt32[Array, "n"],
    *,
    drafts: int | DraftOptions,
) -> tuple[Int[Array, "n count"], Float[Array, "n count vocab"], Float[Array, "n count"] | None, KVCache]:
    """Drafts the next tokens of requests. Call it inside a traced function.

    A draft is drawn from the draft layers' logits. `sample` later draws the model's own token at the same position with
    the same random bits. Draft and token agree as often as their distributions allow, up to a constant factor (Daliri,
    Musco and Suresh, 2024, arXiv:2408.07978). The request gets the same tokens as without drafts.

    Args:
      model: the model, with an attribute `drafts` (`Drafts`).
      cache, streams: as in `Drafts.draft`.
      batch: the newest token of each of n slots, a result of `one_token_batch`.
      sampling: sampling parameters, one for all rows or arrays [n].
      seeds: [n] one seed per slot.
      drafts: number of draft tokens per request, or DraftOptions.

    Returns:
      The tuple of `Drafts.draft`. The first draft below `min_confidence` and all later drafts are -1.
    """
    options = DraftOptions.of(drafts)

    def draw(logits: Float[Array, "n vocab"], positions: Int[Array, "n"]) -> Int[Array, "n"]:
        return sample(logits, sampling, seeds, positions)

    tokens, logits, confidence, cache = model.drafts.draft(model, streams, cache, batch, draw, options.count)
    if options.min_confidence:
        enough = jnp.cumprod(jax.nn.sigmoid(confidence) >= options.min_confidence, axis=1, dtype=jnp.int32)
        tokens = jnp.where(enough > 0, tokens, -1)
    return tokens, logits, confidence, cache
