"""The lightning indexer: selects which compressed entries a token attends to."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import CacheHandle, LayerCacheHandle
from dsv4_jax.config import DSV4Config
from dsv4_jax.quant import round_to


class CSAIndexer(nnx.Module):
    """Scores the index keys of entries, and selects the entries with the highest scores (docs/dsv4.md 4).

    An entry's score is `sum_h w_h * relu(q_h . key)` over the indexer's heads h. The projections to q and w are in
    `Attention`, and a `Compressor` makes the keys. `LayerCacheHandle.indexer_scores` applies RoPE to the queries, and
    rotates and rounds them as the format of the cache does with keys.
    """

    def __init__(self, config: DSV4Config, layer: int):
        self.config = config
        self.layer = layer

    def __call__(
        self,
        q: Float[Array, "T Q"],
        head_weights: Float[Array, "T H"],
        handle: CacheHandle,
        candidates: Int[Array, "T B"] | None = None,
    ) -> tuple[Int[Array, "T k"], Int[Array, "T B"] | None]:
        """Selects the entries with the highest scores for each token.

        Args:
          q: [T, index_n_heads * index_head_dim] queries, a projection of the normed query latent.
          head_weights: [T, index_n_heads] weights of the heads, a projection of attention's input.
          handle: the layer's cache, in which this step's keys are written already.
          candidates: [T, B] int32 blocks of entries within which entries are selected; None = no restriction.

        Returns:
          (selection, candidates). `selection` is [T, index_topk] int32, indices of entries in ascending order. If a
          token sees fewer entries, all of them are selected, and the row ends with -1. `candidates` is [T, B] int32,
          the blocks to which this layer restricts later layers; None if it restricts no layer.
        """
        config = self.config
        spec = config.layers[self.layer]
        q = q.reshape(-1, config.index_n_heads, config.index_head_dim)
        scaled_weights = head_weights.astype(jnp.float32) * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        scaled_weights = round_to(scaled_weights, head_weights.dtype).astype(jnp.float32)
        inv_freq = jnp.asarray(config.inv_freq(self.layer))

        def select(handle, q, weights, candidates):
            """Selects entries for the tokens of a handle's batch, all or a tile of them."""
            with jax.named_scope("indexer"):
                scores = handle.indexer_scores(q, weights, inv_freq, candidates)
            with jax.named_scope("topk"):
                own_candidates = handle.candidate_blocks(scores) if spec.makes_candidates else None
                return handle.indexer_topk(scores, candidates), own_candidates

        if isinstance(handle, LayerCacheHandle):
            return handle.by_tiles(select, q, scaled_weights, candidates=candidates)
        return select(handle, q, scaled_weights, candidates)
