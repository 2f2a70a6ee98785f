"""The lightning indexer: selects which compressed entries a token attends to."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import CacheHandle
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.compressor import Compressor
from dsv4_jax.nn.layers import Linear
from dsv4_jax.quant import round_to


class IndexerScorer(nnx.Module):
    """The heads' weights in an index score.

    Attributes:
      weights_proj: Linear, hidden to index_n_heads; None where it is fused.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.weights_proj = Linear(config.hidden_size, config.index_n_heads, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, product: Float[Array, "T H"]) -> Float[Array, "T H"]:
        """weights_proj's product [T, index_n_heads] to the heads' weights: scaled, rounded to its dtype, float32."""
        weights = product.astype(jnp.float32) * self.scale
        return round_to(weights, product.dtype).astype(jnp.float32)


class IndexerQuery(nnx.Module):
    """The query half of the lightning indexer: scores index keys and selects entries (dsv4.md 4).

    An entry's score is `sum_h w_h * relu(q_h . key)`. The query's RoPE, its rotation and its rounding to the keys'
    format happen in `LayerCacheHandle.indexer_scores`: the latter belong to the format, not to the model.

    Attributes:
      q_b_proj: Linear, q_lora_rank to index_n_heads * index_head_dim; None where it is fused.
      scorer: IndexerScorer.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.layer = layer
        width = config.index_n_heads * config.index_head_dim
        self.q_b_proj = Linear(config.q_lora_rank, width, param_dtype=param_dtype, rngs=rngs)
        self.scorer = IndexerScorer(config, param_dtype=param_dtype, rngs=rngs)

    def select(
        self, q: Float[Array, "T Q"], head_weights: Float[Array, "T H"], handle: CacheHandle
    ) -> Int[Array, "T k"]:
        """Selects the entries of the best scores for each token.

        Args:
          q: [T, index_n_heads * index_head_dim], q_b_proj's product with the normed query latent.
          head_weights: [T, index_n_heads], scorer.weights_proj's product with attention's input.
          handle: the layer's cache, with this step's keys written.

        Returns:
          [T, index_topk] int32, ascending, -1 at the end where fewer entries are visible: then all are selected.
        """
        config = self.config
        q = q.reshape(-1, config.index_n_heads, config.index_head_dim)
        inv_freq = jnp.asarray(config.inv_freq(self.layer))
        with jax.named_scope("indexer"):
            scores = handle.indexer_scores(q, self.scorer(head_weights), inv_freq)
        with jax.named_scope("topk"):
            return handle.indexer_topk(scores)


class CSAIndexer(Compressor, IndexerQuery):
    """The lightning indexer of a layer that stores the keys it scores: both halves, as the checkpoint names them.

    The keys come from a compressor of its own, over the same windows as the layer's entries.
    """

    def __init__(self, config: DSV4Config, layer: int, head_dim: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        Compressor.__init__(self, config, layer, head_dim, param_dtype=param_dtype, rngs=rngs)
        IndexerQuery.__init__(self, config, layer, param_dtype=param_dtype, rngs=rngs)
