"""The multi-token-prediction block: a layer that predicts the token after the next one."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.cache import Batch, StepCache
from dsv4_jax.cache.expert_counts import counts_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.attention import StepCarry
from dsv4_jax.nn.block import DecoderLayer
from dsv4_jax.nn.hyper_connection import HyperHead, ResidualStreams
from dsv4_jax.nn.layers import Linear, RMSNorm
from dsv4_jax.quant import round_to


class MTPBlock(DecoderLayer):
    """A decoder layer with a window only, fed with the model's last streams and the embedding of the next token.

    Embedding and head are the model's.

    Attributes:
      e_proj, h_proj: Linear, hidden to hidden, of the normed embedding and of each normed stream.
      enorm, hnorm: RMSNorm of the embedding and of each stream.
      norm: RMSNorm before the head.
      hc_head: HyperHead.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, param_dtype=param_dtype, rngs=rngs)
        hidden, eps = config.hidden_size, config.rms_norm_eps
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

    def write_window(self, streams: Float[Array, "T h D"], cache: StepCache, batch: Batch) -> Any:
        """Stores the tokens' window rows; returns the updated cache.

        Args:
          streams: [T, hc_mult, hidden] result of `join`.
          cache, batch: cache and inputs of the step.
        """
        x, _ = self.attn_hc.pre(ResidualStreams(streams), self.input_layernorm)
        rows = self.self_attn.window_rows(x, batch.positions)
        return cache.handle(self.layer, batch).write_swa(rows).cache

    def draft(
        self, streams: Float[Array, "T h D"], cache: StepCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], Any]:
        """Runs the layer; returns the head's input [T, hidden], the new streams and the updated cache.

        Args:
          streams, cache, batch: as in `write_window`.
        """
        carry = StepCarry(experts={} if counts_experts(cache) else None)
        residual, carry, cache = self(ResidualStreams(streams), cache, batch, carry)
        return *self.hc_head.pre(residual, self.norm), carry.count_experts(cache)
