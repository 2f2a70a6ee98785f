"""Multi-token prediction: a layer that predicts the token after the next one, and so drafts token after token."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, KVCache, StepCache
from dsv4_jax.cache.streams import advance_streams
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.draft_layers import DraftLayers, Draw
from dsv4_jax.nn.hyper_connection import HyperHead, ResidualStreams
from dsv4_jax.nn.layers import Linear, RMSNorm
from dsv4_jax.quant import round_to


class MTPDrafts(DraftLayers):
    """Drafts with a layer that is fed with the model's last streams and the embedding of the next token.

    Embedding and head are those of the `model` that methods take.

    Attributes:
      layers: LayerStack of one DecoderLayer.
      e_proj, h_proj: Linear, hidden to hidden, of the normed embedding and of each normed stream.
      enorm, hnorm: RMSNorm of the embedding and of each stream.
      norm: RMSNorm before the head.
      hc_head: HyperHead.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, param_dtype=param_dtype, rngs=rngs)
        hidden = config.hidden_size
        eps = config.rms_norm_eps
        self.e_proj = Linear(hidden, hidden, param_dtype=param_dtype, rngs=rngs)
        self.h_proj = Linear(hidden, hidden, param_dtype=param_dtype, rngs=rngs)
        self.enorm, self.hnorm, self.norm = (RMSNorm(hidden, eps=eps, rngs=rngs) for _ in range(3))
        self.hc_head = HyperHead(config, rngs=rngs)

    def join(self, streams: Float[Array, "T h D"], embedded: Float[Array, "T D"]) -> Float[Array, "T h D"]:
        """Adds the embedding [T, hidden] of the next token to each of the streams [T, h, hidden]: the layer's input."""
        tokens, h, hidden = streams.shape
        of_streams = self.h_proj(self.hnorm(streams.reshape(-1, hidden))).reshape(tokens, h, hidden)
        of_embedding = self.e_proj(self.enorm(embedded))[:, None, :]
        return round_to(of_embedding.astype(jnp.float32) + of_streams.astype(jnp.float32), streams.dtype)

    def __call__(
        self, model: Any, streams: Float[Array, "T h D"], cache: StepCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], Any]:
        """Predicts the token after the next one.

        Args:
          model: the model, of which `embed` is called.
          streams: [T, hc_mult, hidden], the model's at the tokens of `batch.positions`, or, to predict further ahead
            from a draft, those that this method returned for the position before.
          cache: the cache; the layer's window is written where `batch` has tokens.
          batch: T tokens, each the one that *follows* the token at its position.

        Returns:
          hidden [T, hidden], for the model's `logits`; the layer's own streams [T, hc_mult, hidden]; the updated cache.
        """
        # Without the barrier XLA would dequantize stored weights before a loop that calls this.
        drafts, streams = jax.lax.optimization_barrier((self, streams))
        residual, cache = drafts.run_layers(drafts.join(streams, model.embed(batch)), cache, batch)
        return *drafts.hc_head.pre(residual, drafts.norm), cache

    def write(self, model: Any, streams: Float[Array, "T h D"], cache: KVCache, batch: Batch) -> KVCache:
        """Stores a window row of each token's predecessor, which needs the token; returns the updated cache.

        Args:
          model, streams, cache, batch: as in `decode.drafts.Drafts`.
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
        """Drafts one token after another, each from the streams of the pass before; see `decode.drafts.Drafts`.

        Args:
          model, streams, cache, batch, draw, count: as there.
        """

        def draft_one(carry: Any, _: None) -> tuple[Any, Any]:
            streams, batch, cache = carry
            hidden, streams, cache = self(model, streams, cache, batch)
            logits = model.logits(hidden)
            tokens = draw(logits, batch.positions + 2)
            positions = jnp.where(batch.positions >= 0, batch.positions + 1, -1)
            return (streams, dataclasses.replace(batch, token_ids=tokens, positions=positions), cache), (tokens, logits)

        # The row at a position predicts the token after the next one.
        before = dataclasses.replace(batch, positions=jnp.maximum(batch.positions - 1, -1))
        (*_, cache), (tokens, logits) = jax.lax.scan(draft_one, (streams, before, cache), length=count)
        return tokens.T, logits.swapaxes(0, 1), None, cache
