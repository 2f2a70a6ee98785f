"""Bookkeeping of the KV cache on the host: slots, blocks and lengths of requests, prefix caching and offloading.

This code is plain Python and NumPy; JAX does not trace it.
"""

from dsv4_jax.host.allocator import BlockAllocator, CacheFullError
from dsv4_jax.host.canary import CacheCorruptionError
from dsv4_jax.host.manager import KVCacheManager, TokenIds
from dsv4_jax.host.offload import OffloadedRequest, capture, load_request, offload, resume, save_request
from dsv4_jax.host.prefix.prefix_cache import PrefixCache, PrefixMetrics
from dsv4_jax.host.prefix.prefix_files import PrefixFileMetrics, PrefixFiles
from dsv4_jax.host.prefix.prefix_tree import CachedBlock
from dsv4_jax.host.request_table import RequestState, RequestTable
