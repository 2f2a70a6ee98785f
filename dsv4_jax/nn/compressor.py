"""The parameters of the compressor; `LayerCacheHandle.flush` pools, rounds and stores."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import Linear, RMSNorm, normal
from dsv4_jax.ops import CompressorWeights


class Compressor(nnx.Module):
    """Pools windows of tokens to entries, or to index keys (dsv4.md 3).

    Attributes:
      kv_proj, gate_proj: Linear, hidden to width, in float32; None if they are fused. The width is head_dim, or
        2 * head_dim if windows overlap.
      position_bias: [compress rate, width] float32, added to the gate by position in the window.
      kv_norm: RMSNorm of the pooled vector, [head_dim].
      indexer: None, or the Compressor of the entries' index keys: CSAIndexer, if the layer also scores them.
    """

    def __init__(
        self,
        config: DSV4Config,
        layer: int,
        head_dim: int,
        *,
        indexer: "Compressor | None" = None,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.layer = layer
        spec = config.layers[layer]
        width = 2 * head_dim if spec.overlap else head_dim
        options: Any = dict(param_dtype=param_dtype, out_dtype=jnp.float32, rngs=rngs)
        self.kv_proj = Linear(config.hidden_size, width, **options)
        self.gate_proj = Linear(config.hidden_size, width, **options)
        self.position_bias = normal(rngs, (spec.compress_rate, width), std=0.5)
        self.kv_norm = RMSNorm(head_dim, eps=config.rms_norm_eps, rngs=rngs)
        self.indexer = indexer

    def weights(self) -> CompressorWeights:
        """Returns the parameters that `LayerCacheHandle.flush` needs besides the projections."""
        return CompressorWeights(
            position_bias=self.position_bias[...],
            norm_weight=self.kv_norm.weight[...],
            inv_freq=jnp.asarray(self.config.inv_freq(self.layer)),
            eps=self.config.rms_norm_eps,
        )
