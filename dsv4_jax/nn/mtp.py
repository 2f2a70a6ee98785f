"""Multi-token prediction (MTP): a draft layer that predicts the token after the next one."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, KVCache, StepCache
from dsv4_jax.cache.newest_tokens import advance_streams
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.draft_layers import DraftLayers, Draw
from dsv4_jax.nn.hyper_connection import HyperHead, ResidualStreams
from dsv4_jax.nn.layers import Linear, RMSNorm
from dsv4_jax.quant import round_to


class MTPDrafts(DraftLayers):
    """Drafts token after token with one layer, from the model's final streams and the next token's embedding.

    Methods use the embedding and the head of their argument `model`.

    Attributes:
      layers: LayerStack of one DecoderLayer.
      e_proj, h_proj: Linear, hidden to hidden, for the normed embedding and for each normed stream.
      enorm, hnorm: RMSNorm of the embedding and of each stream.
      norm: RMSNorm before the head.
      hc_head: HyperHead.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, param_dtype=param_dtype, rngs=rngs)
        hidden = config.hidden_size
        self.e_proj, self.h_proj = (Linear(hidden, hidden, param_dtype=param_dtype, rngs=rngs) for _ in range(2))
        self.enorm, self.hnorm, self.norm = (RMSNorm(hidden, eps=config.rms_norm_eps, rngs=rngs) for _ in range(3))
        self.hc_head = HyperHead(config, rngs=rngs)

    def join(self, streams: Float[Array, "T h D"], embedded: Float[Array, "T D"]) -> Float[Array, "T h D"]:
        """Computes the layer's input: the sum of each projected stream and the next token's projected embedding.

        Args:
          streams: [T, h, hidden] residual streams of the model, or of this layer.
          embedded: [T, hidden] embeddings of the next tokens.

        Returns:
          [T, h, hidden] in the streams' dtype.
        """
        tokens, h, hidden = streams.shape
        of_streams = self.h_proj(self.hnorm(streams.reshape(-1, hidden))).reshape(tokens, h, hidden)
        of_embedding = self.e_proj(self.enorm(embedded))[:, None, :]
        return round_to(of_embedding.astype(jnp.float32) + of_streams.astype(jnp.float32), streams.dtype)

    def __call__(
        self, model: Any, streams: Float[Array, "T h D"], cache: StepCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], Any]:
        """Predicts the token after the next one.

        Args:
          model: the model; its `embed` is called.
          streams: [T, hc_mult, hidden] residual streams at the positions of the batch. For the first draft, these are
            the streams of the model; for later drafts, those that this method returned for the preceding position.
          cache: the cache; the layer's window rows at the positions of the batch are written.
          batch: T tokens. `token_ids[i]` is the token *after* position `positions[i]`.

        Returns:
          (hidden states [T, hidden], for the model's `logits`; streams [T, hc_mult, hidden] after the layer; the
          updated cache).
        """
        # Without the barrier, XLA would dequantize weights before a loop that calls this method, and hold the values.
        drafts, streams = jax.lax.optimization_barrier((self, streams))
        residual, cache = drafts.run_layers(drafts.join(streams, model.embed(batch)), cache, batch)
        hidden, streams = drafts.hc_head.pre(residual, drafts.norm)
        return residual.gather(hidden), residual.gather(streams), cache

    def write(self, model: Any, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch) -> KVCache:
        """Stores the window row of each token's predecessor; returns the updated cache.

        The row depends on the token, because the layer's input at a position includes the next token's embedding.

        Args:
          model, streams, cache, batch: as in `decode.drafts.Drafts.write`.
        """
        streams, shifted, cache = advance_streams(cache, streams, batch)
        (layer,) = self.layers.slices()
        joined = self.join(streams, model.embed(shifted))
        x, _ = layer.attn_hc.pre(ResidualStreams(joined), layer.input_layernorm)
        rows = layer.self_attn.window_rows(x, shifted.positions)
        return cache.handle(layer.layer, shifted).write_swa(rows).cache

    def draft(
        self,
        model: Any,
        streams: Float[Array, "n h D"],
        cache: KVCache,
        batch: Batch,
        draw: Draw,
        count: int,
    ) -> tuple[Int[Array, "n {count}"], Float[Array, "n {count} V"], None, KVCache]:
        """Drafts one token after another, each from the streams of the preceding pass.

        Args:
          model, streams, cache, batch, draw, count: as in `decode.drafts.Drafts.draft`.

        Returns:
          The tuple of `decode.drafts.Drafts.draft`, with None in place of confidence logits.
        """

        def draft_one(carry, _):
            """Makes one draft, and moves the batch to the position after it."""
            streams, batch, cache = carry
            hidden, streams, cache = self(model, streams, cache, batch)
            logits = model.logits(hidden)
            tokens = draw(logits, batch.positions + 2)
            positions = jnp.where(batch.positions >= 0, batch.positions + 1, -1)
            return (streams, dataclasses.replace(batch, token_ids=tokens, positions=positions), cache), (tokens, logits)

        # At position p the layer reads the streams of p and the token at p + 1. `batch` lists this token at position
        # p + 1, so the positions are lowered by one.
        shifted = dataclasses.replace(batch, positions=jnp.maximum(batch.positions - 1, -1))
        (*_, cache), (tokens, logits) = jax.lax.scan(draft_one, (streams, shifted, cache), length=count)
        return tokens.T, logits.swapaxes(0, 1), None, cache
