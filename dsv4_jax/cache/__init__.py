"""The cache: geometry, pools, one layer's handle and a step's inputs."""

import dsv4_jax.cache.serialization  # Flax knows the types of a cache from here on
from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.checksums import checksum_blocks, checksum_rows
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.handle_protocol import CacheHandle, StepCache
from dsv4_jax.cache.pools import CompressorState, KVCache, PoolGroup, init_cache
from dsv4_jax.cache.request_rows import (
    RequestRows,
    copy_request,
    read_blocks,
    read_request,
    write_blocks,
    write_request,
)
from dsv4_jax.cache.schema import CacheSchema, GroupSpec, compute_block_budget
