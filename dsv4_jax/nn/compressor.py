"""The compressor, whose parameters `LayerCacheHandle.flush` applies."""

import dataclasses
from collections.abc import Mapping
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
        self.position_bias = normal(rngs, (spec.compress_rate, self.width), std=0.5) if spec.position_bias else None
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

    def store(self, projections: Mapping[str, Float[Array, "T _"]], handle: Any) -> Any:
        """Stores an entry, and an index key if the layer stores keys, for each window that the tokens complete.

        Args:
          projections: results of `Attention.input_projections`, by the names of the maps.
          handle: the cache of the layer. In V4.1, it must be a `LayerCacheHandle`.

        Returns:
          The updated handle.
        """

        def inputs(name):
            """Returns (kv, gate) of the compressor `name`; the gate is None if an entry is a single token."""
            return projections[f"{name}_kv_proj"].astype(jnp.float32), projections.get(f"{name}_gate_proj")

        weights = self.weights()
        if self.key_proj is None or self.key_norm is None:
            keys = self.indexer
            index = None if keys is None else (*inputs("indexer"), keys.weights())
            return handle.flush(*inputs("compressor"), weights, index=index)
        # In V4.1, the keys are made from the pooled vectors of the entries.
        closed, handle = handle.pool_windows(*inputs("compressor"), weights)
        keys = dataclasses.replace(closed, values=self.key_norm(self.key_proj(closed.values)))
        return handle.write_entries(closed, weights.inv_freq).write_keys(keys, weights.inv_freq)
