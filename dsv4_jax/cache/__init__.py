"""The cache: geometry, pools, one layer's handle and a step's inputs."""

from dsv4_jax.cache.batch import Batch as Batch
from dsv4_jax.cache.handle import LayerCacheHandle as LayerCacheHandle
from dsv4_jax.cache.pools import (
    CompressorState as CompressorState,
    KVCache as KVCache,
    PagedKVPool as PagedKVPool,
    SWAPool as SWAPool,
    init_cache as init_cache,
)
from dsv4_jax.cache.schema import (
    CacheSchema as CacheSchema,
    LayerCacheSchema as LayerCacheSchema,
    compute_block_budget as compute_block_budget,
)
