"""One small model and one geometry for all decode tests: programs compile once per process."""

import jax.numpy as jnp
import pytest

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.host import KVCacheManager
from tests.paths import TINY


@pytest.fixture(scope="session")
def model():
    return load_checkpoint(TINY, dtype=jnp.bfloat16)


@pytest.fixture
def manager(model):
    return KVCacheManager(model.config, num_blocks=12, max_requests=3, max_context=96, block_tokens=16)
