"""DSpark, the draft layers of V4-Flash-0731 and V4-Pro-0813: a block of tokens in one pass."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.config import DSparkConfig, DSV4Config
from dsv4_jax.nn.draft_layers import DraftLayers, Draw
from dsv4_jax.nn.hyper_connection import HyperHead
from dsv4_jax.nn.layers import Embedding, Linear, RMSNorm
from dsv4_jax.ops import all_gather
from dsv4_jax.quant import round_to


class MarkovHead(nnx.Module):
    """Corrects the logits of a draft by the token before it: a matrix [vocab, vocab] of low rank.

    Attributes:
      markov_w1: Embedding, vocab to `markov_rank`, of the token before.
      markov_w2: Linear, `markov_rank` to vocab.
    """

    def __init__(self, config: DSV4Config, rank: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.markov_w1 = Embedding(config.vocab_size, rank, param_dtype=param_dtype, rngs=rngs)
        self.markov_w2 = Linear(
            rank, config.vocab_size, out_dtype=jnp.float32, param_dtype=param_dtype, axes=("vocab",), rngs=rngs
        )


class ConfidenceHead(nnx.Module):
    """Estimates how likely a draft is to be accepted, as a logit.

    Attributes:
      proj: Linear, hidden + `markov_rank` to 1.
    """

    def __init__(self, config: DSV4Config, rank: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.proj = Linear(config.hidden_size + rank, 1, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, hidden: Float[Array, "T D"], embedded: Float[Array, "T r"]) -> Float[Array, "T"]:
        """Maps hidden states [T, hidden] and embeddings [T, rank] of the tokens before the drafts to [T] float32."""
        x = jnp.concatenate([hidden, embedded], axis=1).astype(jnp.float32)
        return jnp.sum(x * self.proj.weight[...].astype(jnp.float32), axis=1)


class DSparkDrafts(DraftLayers):
    """Drafts a block of tokens in one pass over layers whose rows of earlier tokens come from the model's own layers.

    A block is each request's newest token, which the model has not run yet, and then `noise_token_id`. Each of its
    tokens sees the whole block and the window before it. Embedding and head are those of the `model` that methods take.

    Attributes:
      layers: LayerStack of DecoderLayers.
      main_proj, main_norm: Linear, the streams of the target layers to hidden, and its RMSNorm.
      norm: RMSNorm before the head.
      hc_head: HyperHead.
      markov_head: MarkovHead.
      confidence_head: ConfidenceHead.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, param_dtype=param_dtype, rngs=rngs)
        assert isinstance(config.drafts, DSparkConfig)
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        rank = config.drafts.markov_rank
        taps = len(config.drafts.target_layer_ids)
        self.main_proj = Linear(taps * hidden, hidden, param_dtype=param_dtype, rngs=rngs)
        self.main_norm = RMSNorm(hidden, eps=eps, rngs=rngs)
        self.norm = RMSNorm(hidden, eps=eps, rngs=rngs)
        self.hc_head = HyperHead(config, rngs=rngs)
        self.markov_head = MarkovHead(config, rank, param_dtype=param_dtype, rngs=rngs)
        self.confidence_head = ConfidenceHead(config, rank, param_dtype=param_dtype, rngs=rngs)

    def write(self, model: Any, streams: Float[Array, "T n D"], cache: KVCache, batch: Batch) -> KVCache:
        """Stores the rows that the layers attend to, one per token and layer; returns the updated cache.

        Args:
          model, streams, cache, batch: as in `decode.drafts.Drafts`.
        """
        x = self.main_norm(self.main_proj(streams.reshape(streams.shape[0], -1)))
        rows = {layer.layer: layer.self_attn.window_rows(x, batch.positions) for layer in self.layers.slices()}
        return cache.write_windows(rows, batch)

    def draft(
        self,
        model: Any,
        streams: Float[Array, "n t D"],
        cache: KVCache,
        batch: Batch,
        draw: Draw,
        count: int,
    ) -> tuple[Int[Array, "n {count}"], Float[Array, "n {count} V"], Float[Array, "n {count}"], KVCache]:
        """Runs a block, then corrects and draws the drafts one after another; see `decode.drafts.Drafts`.

        The block is as wide for fewer drafts.

        Args:
          model, streams, cache, batch, draw, count: as there; the streams are not used.
        """
        assert isinstance(self.config.drafts, DSparkConfig)
        size = self.config.drafts.block_size
        noise = self.config.drafts.noise_token_id
        offsets = jnp.arange(size, dtype=jnp.int32)[None, :]
        exists = batch.positions[:, None] >= 0
        ids = jnp.where(offsets == 0, batch.token_ids[:, None], noise)
        block = dataclasses.replace(
            batch,
            token_ids=jnp.where(exists, ids, 0).reshape(-1),
            positions=jnp.where(exists, batch.positions[:, None] + offsets, -1).reshape(-1),
            slots=jnp.repeat(batch.slots, size),
            draft_block=size,
        )
        # Without the barrier XLA would dequantize stored weights before a loop that calls this.
        drafts = jax.lax.optimization_barrier(self)
        x = model.embed(block)
        x = jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1]))
        residual, cache = drafts.run_layers(x, cache, block)
        hidden = drafts.hc_head(residual.merged())
        logits = model.logits(drafts.norm(hidden))

        def by_draft(x):
            return x.reshape(len(batch.positions), size, -1)[:, :count].swapaxes(0, 1)

        def draft_one(previous: Any, rows: Any) -> tuple[Any, Any]:
            hidden, logits, number = rows
            logits, confidence = self.correct(hidden, logits, previous)
            tokens = draw(logits, batch.positions + 1 + number)
            return tokens, (tokens, logits, confidence)

        rows = by_draft(hidden), by_draft(logits), jnp.arange(count, dtype=jnp.int32)
        # Unrolled: a draft is a few small kernels, beside which a loop's slices would take as long.
        _, (tokens, logits, confidence) = jax.lax.scan(draft_one, batch.token_ids, rows, unroll=True)
        return tokens.T, logits.swapaxes(0, 1), confidence.T, cache

    def correct(
        self, hidden: Float[Array, "n D"], logits: Float[Array, "n V"], previous: Int[Array, "n"]
    ) -> tuple[Float[Array, "n V"], Float[Array, "n"]]:
        """Adds to logits of a block's position what the token before the draft says.

        Args:
          hidden: [n, hidden] of the position, before the norm.
          logits: [n, vocab] float32 of the position.
          previous: [n] int32, the token before the draft.

        Returns:
          the draft's logits [n, vocab] float32, and the logit [n] float32 of the probability that it is accepted if all
          drafts before it are.
        """
        embedded = round_to(self.markov_head.markov_w1(previous), hidden.dtype)
        corrected = logits + all_gather(self.markov_head.markov_w2(embedded))
        return corrected, self.confidence_head(hidden, embedded)
