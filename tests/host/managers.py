"""A small geometry and steps without a model, for tests of the host side."""

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.host import KVCacheManager
from tests.cache.test_state_machine import CSA, HCA, WINDOW, config_of


CONFIG = config_of(CSA, WINDOW, HCA)
BLOCK = 16


def make(config=CONFIG, **changes) -> KVCacheManager:
    sizes = dict(num_blocks=12, max_requests=4, max_context=96, block_tokens=BLOCK, max_query_tokens=3)
    return KVCacheManager(config, **sizes | changes)


def random_cache(manager: KVCacheManager) -> KVCache:
    """A cache of random bytes that holds no request."""
    empty = manager.init_cache()
    rng = np.random.default_rng(0)

    def fill(x):
        raw = rng.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8)
        return jnp.asarray(raw.view(x.dtype)[..., 0])

    filled = jax.tree.map(fill, empty)
    return jax.tree.map(lambda a, b: b if b.ndim < 3 else a, filled, empty)


def ids(n: int, start: int = 0) -> list[int]:
    return [(start + i) % CONFIG.vocab_size for i in range(n)]


@jax.jit
def _begin(cache, batch):
    return cache.begin_step(batch)


def step(manager: KVCacheManager, cache: KVCache, slot: int, tokens: list[int]) -> KVCache:
    """Prepares a batch and tells the device, as a step does; writes no rows."""
    return _begin(cache, manager.prepare_forward({slot: tokens}, prefill_size=max(96, len(tokens))))


def host_state(manager: KVCacheManager):
    """All the manager knows, to compare."""
    return manager.requests.states, manager.requests.allocator.state()
