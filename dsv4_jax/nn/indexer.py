"""The lightning indexer: selects which compressed entries a token attends to."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import CacheHandle
from dsv4_jax.config import DSV4Config
from dsv4_jax.quant import round_to


class CSAIndexer(nnx.Module):
    """Scores index keys and selects entries (dsv4.md 4). `Attention` has its projections, `Compressor` makes the keys.

    An entry's score is `sum_h w_h * relu(q_h . key)`. The query's RoPE, its rotation and its rounding to the keys'
    format happen in `LayerCacheHandle.indexer_scores`: the latter belong to the format, not to the model.
    """

    def __init__(self, config: DSV4Config, layer: int):
        self.config = config
        self.layer = layer

    def __call__(
        self, q: Float[Array, "T Q"], head_weights: Float[Array, "T H"], handle: CacheHandle
    ) -> Int[Array, "T k"]:
        """Selects the entries of the best scores for each token.

        Args:
          q: [T, index_n_heads * index_head_dim], projection of the normed query latent.
          head_weights: [T, index_n_heads], projection of attention's input.
          handle: the layer's cache, with this step's keys written.

        Returns:
          [T, index_topk] int32, ascending, -1 at the end where fewer entries are visible: then all are selected.
        """
        config = self.config
        q = q.reshape(-1, config.index_n_heads, config.index_head_dim)
        scaled = head_weights.astype(jnp.float32) * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        scaled = round_to(scaled, head_weights.dtype).astype(jnp.float32)
        with jax.named_scope("indexer"):
            scores = handle.indexer_scores(q, scaled, jnp.asarray(config.inv_freq(self.layer)))
        with jax.named_scope("topk"):
            return handle.indexer_topk(scores)
