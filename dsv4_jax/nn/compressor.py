"""The parameters of the compressor, which `LayerCacheHandle.flush` applies."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import AnyRngs, Linear, RMSNorm, normal
from dsv4_jax.ops import CompressorWeights


class Compressor(nnx.Module):
    """The compressor, which pools windows of tokens to entries or to index keys (docs/dsv4.md 3).

    The compressor's projections are in `Attention.input_projections`.

    Attributes:
      width: number of channels of a projected token: head_dim, or 2 * head_dim if windows overlap (static). For index
        keys, head_dim stands for index_head_dim.
      position_bias: [compress rate, width] float32, added to the gate by position in the window; None in V4.1.
      kv_norm: RMSNorm of the pooled vectors, of head_dim channels.
      indexer: the Compressor of the entries' index keys, or None.
      key_proj, key_norm: Linear map and RMSNorm that make index keys from pooled vectors, in V4.1; otherwise None.
    """

    def __init__(
        self,
        config: DSV4Config,
        layer: int,
        head_dim: int,
        *,
        indexer: "Compressor | None" = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: AnyRngs,
    ):
        self.config = config
        self.layer = layer
        spec = config.layers[layer]
        self.width = (1 + spec.overlap) * head_dim
        bias_shape = spec.compress_rate, self.width
        self.position_bias = normal(rngs, bias_shape, std=0.5) if spec.position_bias else None
        self.kv_norm = RMSNorm(head_dim, eps=config.rms_norm_eps, rngs=rngs)
        self.indexer = indexer
        makes_keys = spec.keys and not spec.key_compressor
        key_dim = config.index_head_dim
        self.key_proj = Linear(head_dim, key_dim, param_dtype=param_dtype, rngs=rngs) if makes_keys else None
        self.key_norm = RMSNorm(key_dim, eps=config.rms_norm_eps, rngs=rngs) if makes_keys else None

    def weights(self) -> CompressorWeights:
        """Returns the parameters that `LayerCacheHandle.flush` needs besides the projections."""
        return CompressorWeights(
            position_bias=None if self.position_bias is None else self.position_bias.get_value(),
            norm_weight=self.kv_norm.weight.get_value(),
            inv_freq=jnp.asarray(self.config.inv_freq(self.layer)),
            eps=self.config.rms_norm_eps,
        )

    def store(self, handle: Any, kv: Float[Array, "T D"], gate: Float[Array, "T D"] | None) -> Any:
        """Stores an entry, and an index key made from its pooled vector, for each completed window (V4.1).

        Args:
          handle: LayerCacheHandle of the layer.
          kv: [T, head_dim] float32 projections of the tokens.
          gate: [T, head_dim] float32 pooling logits; None if a window is a single token.

        Returns:
          The updated handle.
        """
        assert self.key_proj is not None and self.key_norm is not None
        weights = self.weights()
        closed, handle = handle.pool_windows(kv, gate, weights)
        keys = dataclasses.replace(closed, values=self.key_norm(self.key_proj(closed.values)))
        return handle.write_entries(closed, weights.inv_freq).write_keys(keys, weights.inv_freq)
