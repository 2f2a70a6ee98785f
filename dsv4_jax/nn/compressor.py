"""The parameters of the compressor, which `LayerCacheHandle.flush` applies."""

import jax.numpy as jnp
from flax import nnx

from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import AnyRngs, RMSNorm, normal
from dsv4_jax.ops import CompressorWeights


class Compressor(nnx.Module):
    """The compressor, which pools windows of tokens to entries or to index keys (docs/dsv4.md 3).

    Its projections are in `Attention.input_projections`.

    Attributes:
      width: number of channels of a projected token: head_dim, or 2 * head_dim if windows overlap (static). For index
        keys, head_dim stands for index_head_dim.
      position_bias: [compress rate, width] float32, added to the gate by position in the window.
      kv_norm: RMSNorm of the pooled vectors, of head_dim channels.
      indexer: the Compressor of the entries' index keys, or None.
    """

    def __init__(
        self, config: DSV4Config, layer: int, head_dim: int, *, indexer: "Compressor | None" = None, rngs: AnyRngs
    ):
        self.config = config
        self.layer = layer
        spec = config.layers[layer]
        self.width = (1 + spec.overlap) * head_dim
        self.position_bias = normal(rngs, (spec.compress_rate, self.width), std=0.5)
        self.kv_norm = RMSNorm(head_dim, eps=config.rms_norm_eps, rngs=rngs)
        self.indexer = indexer

    def weights(self) -> CompressorWeights:
        """Returns the parameters that `LayerCacheHandle.flush` needs besides the projections."""
        return CompressorWeights(
            position_bias=self.position_bias.get_value(),
            norm_weight=self.kv_norm.weight.get_value(),
            inv_freq=jnp.asarray(self.config.inv_freq(self.layer)),
            eps=self.config.rms_norm_eps,
        )
