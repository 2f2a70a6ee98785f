"""The KV cache: its geometry, its arrays, the handle by which a layer reads and writes it, and the inputs of a step."""

from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.decisions import Decisions, decision_types, decode_ids, encode_ids
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.handle_protocol import CacheHandle, StepCache
from dsv4_jax.cache.pools import KVCache, init_cache
from dsv4_jax.cache.request_rows import (
    RequestRows,
    copy_request,
    read_blocks,
    read_request,
    write_blocks,
    write_request,
)
from dsv4_jax.cache.schema import CacheSchema, CompressorState, GroupSpec, PoolGroup, compute_block_budget
