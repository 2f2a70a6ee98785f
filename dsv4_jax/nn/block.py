"""A decoder layer: attention and mixture of experts, each within a hyper-connection."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from dsv4_jax.cache import Batch, StepCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.attention import Attention, StepCarry
from dsv4_jax.nn.engram import Engram
from dsv4_jax.nn.hyper_connection import HyperConnection, ResidualStreams
from dsv4_jax.nn.layers import AnyRngs, RMSNorm
from dsv4_jax.nn.moe import MoE
from dsv4_jax.ops import all_gather, all_reduce


# Each part of a step runs in a `jax.named_scope` of one of these names, which a profile shows. If scopes are nested,
# such as "shared_expert/projections", the operation belongs to the outermost one.
SCOPES = (
    "embedding", "engram", "hyper_connections", "projections", "norm", "norm_rope", "compressor", "indexer", "topk",
    "attention", "router", "experts", "shared_expert", "lm_head", "sampling",
)  # fmt: skip

# A step can record these values of a layer:
#   streams        [T, hc_mult, hidden] in the model's dtype, residual streams that enter the layer (after Engram)
#   attention_in   [T, hidden] in the model's dtype, input of the attention
#   attention_out  [T, hidden] in the model's dtype, output of the attention, summed over devices
#   selection      [T, index_topk] int32 entries that the layer's indexer selects; absent in layers without an indexer
#   experts        [T, num_experts_per_tok] int32 experts of each token; -1 for padding
RECORDED = ("streams", "attention_in", "attention_out", "selection", "experts")


class DecoderLayer(nnx.Module):
    """A layer of two blocks, attention and MoE. A hyper-connection joins each block to the residual streams.

    Attributes:
      layer: index of the layer (static). If parameters of equal layers are stacked, the index of the first such layer.
      self_attn: Attention.
      mlp: MoE.
      input_layernorm, post_attention_layernorm: RMSNorm of the collapsed streams, the inputs of attention and of MoE.
      attn_hc, ffn_hc: HyperConnection of attention and of MoE.
      engram: Engram, which adds to the residual streams that enter the layer; None in most layers.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: AnyRngs):
        self.layer = layer
        self.self_attn = Attention(config, layer, param_dtype=param_dtype, rngs=rngs)
        self.mlp = MoE(config, layer, param_dtype=param_dtype, rngs=rngs)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.attn_hc = HyperConnection(config, rngs=rngs)
        self.ffn_hc = HyperConnection(config, rngs=rngs)
        self.engram = Engram(config, layer, param_dtype=param_dtype, rngs=rngs) if config.has_engram(layer) else None

    def __call__(
        self,
        residual: ResidualStreams,
        cache: StepCache,
        batch: Batch,
        carry: StepCarry,
        *,
        number: Int[Array, ""] | None = None,
        tap_row: Int[Array, ""] | None = None,
        record: Collection[str] = (),
    ) -> tuple[ResidualStreams, StepCarry, Any]:
        """Runs the layer.

        Args:
          residual: residual streams; the output of the previous block is not merged yet.
          cache, batch: cache and inputs of the step.
          carry: values of earlier layers.
          number: [] int32 index of the layer in a loop over equal layers; None = `layer`.
          tap_row: [] int32 row of the carry's taps in which the streams that leave the previous layer are stored. The
            row is past the end if these streams are not a tap. None = no layer of the loop has a tap.
          record: names of the values to return in the carry's `recorded`: those of `RECORDED`, and "candidates" as in
            `StepCarry`.

        Returns:
          (residual streams, with the output of the MoE not merged yet; the carry; the updated cache).
        """
        if self.engram is not None:
            # The barrier makes XLA await the look-up here. Otherwise XLA awaits it right after its start.
            residual, rows = jax.lax.optimization_barrier((residual, carry.engram_rows[self.layer]))
            rows = residual.local(all_gather(rows))
            is_image = None if batch.is_image is None else residual.local(batch.is_image)
            residual = residual.add(functools.partial(self.engram, rows=rows, is_image=is_image))
        x, residual = self.attn_hc.pre(residual, self.input_layernorm)
        if tap_row is not None:
            carry = carry.with_tap(tap_row, residual.streams)  # `pre` merged the previous layer's output
        index = self.layer if number is None else number
        forced_experts, forced_selection = batch.layer_decisions(self.self_attn.config, index)
        handle = cache.handle(index, batch, like=self.layer)
        y, carry, cache = self.self_attn(x, handle, carry, forced_selection)
        values = {"streams": residual.streams, "attention_in": x, "attention_out": y}
        x, residual = self.ffn_hc.pre(residual.post(y), self.post_attention_layernorm)
        routing = self.mlp.gate(x, batch.token_ids, batch.slots, batch.is_image, forced_experts)
        residual = residual.post(self.mlp(x, routing))
        values["experts"] = routing.experts
        for name in ("selection", "candidates"):
            if self.layer in (made := getattr(carry, name)):
                values[name] = made[self.layer]
        recorded = {name: values[name] for name in record if name in values}
        if "attention_out" in recorded:
            recorded["attention_out"] = all_reduce(y)
        if "streams" in recorded:
            recorded["streams"] = residual.gather(recorded["streams"])
        return residual, dataclasses.replace(carry, recorded=recorded), cache
