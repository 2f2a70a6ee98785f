"""The host side: slots, blocks and lengths of requests. Plain Python and NumPy, never traced."""

from dsv4_jax.common.sizes import parse_bytes
from dsv4_jax.host.allocator import BlockAllocator
from dsv4_jax.host.cache_errors import CacheCorruptionError, CacheFullError
from dsv4_jax.host.manager import KVCacheManager
from dsv4_jax.host.offload import OffloadedRequest, offload, resume
from dsv4_jax.host.prefix_cache import PrefixCache, PrefixMetrics
from dsv4_jax.host.prefix_files import PrefixFileMetrics, PrefixFiles
from dsv4_jax.host.prefix_tree import CachedBlock
from dsv4_jax.host.request_files import load_request, save_request
from dsv4_jax.host.request_table import RequestState, RequestTable
