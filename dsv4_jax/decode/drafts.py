"""Draft tokens made on the device by the model's draft layers: a multi-token-prediction (MTP) block, or DSpark."""

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
    """The methods of a model with an MTP block that drafts need besides `Model`; see `DeepseekV4ForCausalLM`."""

    def forward_streams(
        self, cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T n D"], KVCache]: ...

    def mtp_forward(
        self, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], KVCache]: ...

    def mtp_write(self, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch) -> KVCache: ...

    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... vocab"]: ...


@runtime_checkable
class DSparkModel(Protocol):
    """The methods of a model with DSpark's layers that drafts need besides `Model`; see `DeepseekV4ForCausalLM`."""

    def forward_streams(
        self, cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T n D"], KVCache]: ...

    def dspark_write(self, taps: Float[Array, "T n D"], cache: KVCache, batch: Batch) -> KVCache: ...

    def dspark_forward(
        self, cache: KVCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T vocab"], KVCache]: ...

    def dspark_correct(
        self, hidden: Float[Array, "n D"], logits: Float[Array, "n vocab"], previous: Int[Array, "n"]
    ) -> tuple[Float[Array, "n vocab"], Float[Array, "n"]]: ...


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """The options of drafts on the device: a number of drafts, and when to make fewer.

    Attributes:
      count: number of tokens to draft per request; 0 = none.
      min_confidence: a request's drafts end before the first one whose probability of being accepted, as DSpark's
        confidence head estimates it, is below this; 0 = never.

    Raises:
      ValueError: `min_confidence` is not from 0 to 1.
    """

    count: int = 0
    min_confidence: float = 0.0

    def __post_init__(self):
        if not 0 <= self.min_confidence <= 1:
            raise ValueError(f"min_confidence={self.min_confidence} must be from 0 to 1, a probability")

    @classmethod
    def of(cls, drafts: "int | DraftOptions") -> "DraftOptions":
        """Returns a number of drafts as options."""
        return drafts if isinstance(drafts, DraftOptions) else cls(drafts)


def check_drafts(schema: CacheSchema, drafts: int) -> None:
    """Raises ValueError unless the model has draft layers and the cache has room for 1 or more drafts a request."""
    if not schema.config.num_nextn_predict_layers:
        raise ValueError(
            "drafts on the device need the model's draft layers (multi-token prediction or DSpark), which this "
            "configuration leaves out (num_nextn_predict_layers=0): read it with DSV4Config.from_hf(..., mtp=True)"
        )
    dspark = schema.config.dspark
    if dspark is not None and drafts > dspark.block_size:
        raise ValueError(f"{drafts=} must be from 1 to {dspark.block_size}, the size of DSpark's blocks")
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
    model: Any, cache: KVCache, batch: Batch
) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], KVCache]:
    """Runs the model, then writes the draft layers' windows. Call it inside a traced function.

    An MTP block's row of a token needs the next token, so its window ends one token before each request does.

    Returns:
      hidden states [T, hidden] of the batch's tokens, what drafts are made from [T, n, hidden] (see `forward_streams`),
      and the cache.
    """
    hidden, streams, cache = model.forward_streams(cache, batch)
    if cache.schema.config.dspark is not None:
        return hidden, streams, model.dspark_write(streams, cache, batch)
    before, shifted, cache = advance_streams(cache, streams, batch)
    return hidden, streams, model.mtp_write(before, cache, shifted)


def draft(
    model: Any,
    cache: KVCache,
    streams: Float[Array, "n h D"],
    batch: Batch,
    sampling: SamplingParams | BatchedSamplingParams,
    seeds: UInt32[Array, "n"],
    *,
    drafts: int | DraftOptions,
) -> tuple[Int[Array, "n count"], Float[Array, "n count vocab"], KVCache]:
    """Drafts the next tokens of requests. Call it inside a traced function.

    A draft is drawn from the draft layers' logits with the random bits that `sample` uses for the token itself. The two
    then agree as often as their distributions allow, up to a constant factor (Daliri, Musco and Suresh, 2024,
    arXiv:2408.07978), and the verified token is the one that is drawn without drafts.

    Args:
      model: a `DraftingModel` or a `DSparkModel`.
      cache: the cache after `forward_for_drafts` of these tokens.
      streams: [n, hc_mult, hidden] the model's residual streams at each request's last token; unused by DSpark.
      batch: positions of these tokens, with the token drawn after each as its id (`one_token_batch`).
      sampling: sampling parameters, one for all rows or arrays [n].
      seeds: [n] one seed per request.
      drafts: number of draft tokens per request, or DraftOptions.

    Returns:
      (draft tokens [n, count] int32, -1 from the first one without enough confidence on; the logits [n, count, vocab]
      float32 they were drawn from; cache). Later steps overwrite the rows that drafts leave in the draft layers'
      windows.
    """
    options = DraftOptions.of(drafts)
    if cache.schema.config.dspark is not None:
        anchors = dataclasses.replace(batch, positions=jnp.where(batch.positions >= 0, batch.positions + 1, -1))
        tokens, logits, confidence, cache = draft_block(model, cache, anchors, sampling, seeds, count=options.count)
        if options.min_confidence:
            enough = jnp.cumprod(jax.nn.sigmoid(confidence) >= options.min_confidence, axis=1, dtype=jnp.int32)
            tokens = jnp.where(enough > 0, tokens, -1)
        return tokens, logits, cache

    def draft_one(carry: Any, _: None) -> tuple[Any, Any]:
        streams, batch, cache = carry
        hidden, streams, cache = model.mtp_forward(streams, cache, batch)
        logits = model.logits(hidden)
        # The block's row at a position predicts the token after the next.
        tokens = sample(logits, sampling, seeds, batch.positions + 2)
        positions = jnp.where(batch.positions >= 0, batch.positions + 1, -1)
        return (streams, dataclasses.replace(batch, token_ids=tokens, positions=positions), cache), (tokens, logits)

    (*_, cache), (tokens, logits) = jax.lax.scan(draft_one, (streams, batch, cache), length=options.count)
    return tokens.T, logits.swapaxes(0, 1), cache


def draft_block(
    model: Any,
    cache: KVCache,
    anchors: Batch,
    sampling: SamplingParams | BatchedSamplingParams,
    seeds: UInt32[Array, "n"],
    *,
    count: int,
) -> tuple[Int[Array, "n {count}"], Float[Array, "n {count} vocab"], Float[Array, "n {count}"], KVCache]:
    """Drafts with DSpark's layers: one pass over a block, then the drafts one after another, see `draft`.

    Args:
      model: a `DSparkModel`, of which `dspark_forward` and `dspark_correct` are called.
      cache: the cache, with the rows of all tokens before the anchors (`dspark_write`).
      anchors: each request's newest token at its position, by slot (`one_token_batch`).
      sampling, seeds: as in `draft`.
      count: number of drafts per request, at most the block's size. The block is as wide for fewer.

    Returns:
      (draft tokens [n, count] int32, their logits [n, count, vocab] float32, the logits [n, count] float32 of their
      probabilities to be accepted, cache).
    """
    dspark, requests = cache.schema.config.dspark, anchors.positions.shape[0]
    assert dspark is not None
    offsets = jnp.arange(dspark.block_size, dtype=jnp.int32)[None, :]
    ids = jnp.where(offsets == 0, anchors.token_ids[:, None], dspark.noise_token_id)
    exists = anchors.positions[:, None] >= 0
    block = dataclasses.replace(
        anchors,
        token_ids=jnp.where(exists, ids, 0).reshape(-1),
        positions=jnp.where(exists, anchors.positions[:, None] + offsets, -1).reshape(-1),
        slots=jnp.repeat(anchors.slots, dspark.block_size),
        draft_block=dspark.block_size,
    )
    hidden, base, cache = model.dspark_forward(cache, block)

    def by_draft(x):
        return x.reshape(requests, dspark.block_size, -1)[:, :count].swapaxes(0, 1)

    def draft_one(previous: Any, rows: Any) -> tuple[Any, Any]:
        hidden, base, number = rows
        logits, confidence = model.dspark_correct(hidden, base, previous)
        tokens = sample(logits, sampling, seeds, anchors.positions + 1 + number)
        return tokens, (tokens, logits, confidence)

    rows = by_draft(hidden), by_draft(base), jnp.arange(count, dtype=jnp.int32)
    # Unrolled: a draft is a few small kernels, beside which a loop's slices would take as long.
    _, (tokens, logits, confidence) = jax.lax.scan(draft_one, anchors.token_ids, rows, unroll=True)
    return tokens.T, logits.swapaxes(0, 1), confidence.T, cache
