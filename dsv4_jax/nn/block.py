"""A decoder layer: attention and experts between hyper-connections."""

from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from dsv4_jax.cache import Batch, StepCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.attention import Attention, StepCarry
from dsv4_jax.nn.hyper_connection import HyperConnection, ResidualStreams
from dsv4_jax.nn.layers import RMSNorm
from dsv4_jax.nn.moe import MoE


# The names of `jax.named_scope` around the parts of a step, by which a profile is read. Where scopes are nested, such
# as "shared_expert/projections", the outermost says which part an operation belongs to.
SCOPES = (
    "embedding", "hyper_connections", "projections", "norm", "norm_rope", "compressor", "indexer", "topk", "attention",
    "router", "experts", "shared_expert", "lm_head", "sampling",
)  # fmt: skip


class DecoderLayer(nnx.Module):
    """Applies attention and MoE, each between a collapse and an expansion of the residual streams.

    Attributes:
      self_attn: Attention.
      mlp: MoE.
      input_layernorm, post_attention_layernorm: RMSNorm of the collapsed streams.
      attn_hc, ffn_hc: HyperConnection of either block.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.layer = layer
        self.self_attn = Attention(config, layer, param_dtype=param_dtype, rngs=rngs)
        self.mlp = MoE(config, layer, param_dtype=param_dtype, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.attn_hc = HyperConnection(config, rngs=rngs)
        self.ffn_hc = HyperConnection(config, rngs=rngs)

    def __call__(
        self, residual: ResidualStreams, cache: StepCache, batch: Batch, carry: StepCarry
    ) -> tuple[ResidualStreams, StepCarry, Any]:
        """Runs the layer; returns the residual, whose last output the next op merges, the carry and the updated cache.

        Args:
          residual: residual streams, with the output of the previous block unmerged.
          cache, batch: cache and inputs of the step.
          carry: values from earlier layers.
        """
        x, residual = self.attn_hc.pre(residual, self.input_layernorm)
        carry = carry.with_tap(self.layer - 1, residual.streams)  # merged only now
        y, carry, cache = self.self_attn(x, cache.handle(self.layer, batch), carry)
        carry = carry.with_attention(self.layer, x, y)
        x, residual = self.ffn_hc.pre(residual.post(y), self.post_attention_layernorm)
        routing = self.mlp.gate(x, batch.token_ids, batch.slots)
        return residual.post(self.mlp(x, routing)), carry.with_experts(self.layer, routing.experts), cache
