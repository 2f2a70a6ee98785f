"""DSpark, the draft layers of V4-Flash-0731, V4-Pro-0813 and V4.1-Flash, which draft a block of tokens in one pass."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.draft_layers import DraftLayers, Draw
from dsv4_jax.nn.hyper_connection import HyperHead
from dsv4_jax.nn.layers import Embedding, Linear, RMSNorm
from dsv4_jax.ops import all_gather
from dsv4_jax.ops.views import int_range
from dsv4_jax.quant import round_to


class DSparkDrafts(DraftLayers):
    """Drafts a block of tokens for each request in one pass over the draft layers.

    The input of a block is the request's newest token, which the model has not run yet, and `noise_token_id` at the
    other `block_size - 1` positions. Each token of a block sees the whole block and the window that precedes the block.
    The window rows of earlier tokens are computed from the streams of the model's target layers, see `write`. Methods
    use the embedding and the head of their argument `model`.

    Attributes:
      layers: LayerStack of DecoderLayers.
      main_proj, main_norm: Linear from the target layers' mean streams to hidden, and RMSNorm of its result.
      norm: RMSNorm before the head.
      hc_head: HyperHead, or None, as in `DeepseekV4Model`.
      markov_w1, markov_w2: Embedding of the token before a draft, vocab to `markov_rank`, and Linear from it to a bias
        of the draft's logits.
      confidence_proj: Linear from the draft's hidden state and this embedding to the logit of the probability that the
        draft is accepted.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, param_dtype=param_dtype, rngs=rngs)
        assert config.dspark is not None
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        rank = config.dspark.markov_rank
        taps = len(config.dspark.target_layer_ids)
        options: dict[str, Any] = {"param_dtype": param_dtype, "rngs": rngs}
        self.main_proj = Linear(taps * hidden, hidden, **options)
        self.main_norm = RMSNorm(hidden, eps=eps, rngs=rngs)
        self.norm = RMSNorm(hidden, eps=eps, rngs=rngs)
        self.hc_head = None if config.delays_pre else HyperHead(config, rngs=rngs)
        self.markov_w1 = Embedding(config.vocab_size, rank, **options)
        self.markov_w2 = Linear(rank, config.vocab_size, out_dtype=jnp.float32, axes=("vocab",), **options)
        self.confidence_proj = Linear(hidden + rank, 1, **options)

    def write(self, model: Any, streams: Float[Array, "T n D"], cache: KVCache, batch: Batch) -> KVCache:
        """Stores the batch's tokens in the windows of the draft layers; returns the updated cache.

        Args:
          model, cache, batch: as in `decode.drafts.Drafts.write`; the model is not used.
          streams: [T, target layers, hidden] means over the streams of the target layers, at the batch's tokens.
        """
        x = self.main_norm(self.main_proj(streams.reshape(streams.shape[0], -1)))
        return cache.write_windows(
            {layer.layer: layer.self_attn.window_rows(x, batch.positions) for layer in self.layers.slices()}, batch
        )

    def draft(
        self,
        model: Any,
        streams: Float[Array, "n t D"],
        cache: KVCache,
        batch: Batch,
        draw: Draw,
        count: int,
    ) -> tuple[Int[Array, "n {count}"], Float[Array, "n {count} V"], Float[Array, "n {count}"], KVCache]:
        """Runs the draft layers on a block for each request, then corrects logits and draws drafts one after another.

        A block has `block_size` tokens, even if `count` is smaller.

        Args:
          model, streams, cache, batch, draw, count: as in `decode.drafts.Drafts.draft`; the streams are not used.

        Returns:
          The tuple of `decode.drafts.Drafts.draft`, with confidence logits.
        """
        dspark = self.config.dspark
        assert dspark is not None
        block_size = dspark.block_size
        offsets = int_range(block_size)[None, :]
        is_real = batch.positions[:, None] >= 0
        ids = jnp.where(offsets == 0, batch.token_ids[:, None], dspark.noise_token_id)
        block = dataclasses.replace(
            batch,
            token_ids=jnp.where(is_real, ids, 0).reshape(-1),
            positions=jnp.where(is_real, batch.positions[:, None] + offsets, -1).reshape(-1),
            slots=jnp.repeat(batch.slots, block_size),
            draft_block=block_size,
        )
        # Without the barrier, XLA would dequantize weights before a loop that calls this method, and hold the values.
        drafts = jax.lax.optimization_barrier(self)
        x = model.embed(block)
        x = jnp.repeat(x[:, None, :], self.config.hc_mult, axis=1)
        residual, cache = drafts.run_layers(x, cache, block)
        hidden = residual.collapsed()[0] if drafts.hc_head is None else drafts.hc_head(residual.merged())
        hidden = residual.gather(hidden)
        logits = model.logits(drafts.norm(hidden))

        def by_draft(x):
            """Returns the first `count` rows of each block, [count, n, ...], from [n * block_size, ...]."""
            return x.reshape(len(batch.positions), block_size, -1)[:, :count].swapaxes(0, 1)

        def draft_one(previous, rows):
            """Corrects the logits of one draft by the token before it, and draws the draft."""
            hidden, logits, index = rows
            logits, confidence = self.correct(hidden, logits, previous)
            tokens = draw(logits, batch.positions + 1 + index)
            return tokens, (tokens, logits, confidence)

        rows = by_draft(hidden), by_draft(logits), int_range(count)
        # The scan is unrolled, because a draft is a few small kernels, and slicing a loop's inputs would take as long.
        _, (tokens, logits, confidence) = jax.lax.scan(draft_one, batch.token_ids, rows, unroll=True)
        return tokens.T, logits.swapaxes(0, 1), confidence.T, cache

    def correct(
        self, hidden: Float[Array, "n D"], logits: Float[Array, "n V"], previous: Int[Array, "n"]
    ) -> tuple[Float[Array, "n V"], Float[Array, "n"]]:
        """Corrects the logits at a position of the block by the previous token, and estimates the draft's confidence.

        Args:
          hidden: [n, hidden] hidden states at the position, before the norm.
          logits: [n, vocab] float32 logits at the position.
          previous: [n] int32, the previous token: the preceding draft, or the request's newest token.

        Returns:
          (corrected logits [n, vocab] float32; logits [n] float32 of the probability that the draft is accepted if all
          earlier drafts are accepted).
        """
        embedded = round_to(self.markov_w1(previous), hidden.dtype)
        corrected = logits + all_gather(self.markov_w2(embedded))
        x = jnp.concatenate([hidden, embedded], axis=1).astype(jnp.float32)
        return corrected, jnp.sum(x * self.confidence_proj.weight[...].astype(jnp.float32), axis=1)
