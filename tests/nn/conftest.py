"""The packaged tiny model's configuration, and random arrays from fixed seeds."""

import numpy as np
import pytest

from dsv4_jax.config import DSV4Config
from tests.paths import TINY


@pytest.fixture(scope="session")
def config():
    return DSV4Config.from_hf(TINY)


@pytest.fixture(scope="session")
def short_config(config):
    """Its first three layers: one of each kind, one with a hash router."""
    short = config.first_layers(3)
    assert len(set(short.layer_types)) == 3
    return short


@pytest.fixture
def draw():
    """draw(*shape) -> standard normal float32 numpy array."""
    generator = np.random.default_rng(0)
    return lambda *shape: generator.normal(size=shape).astype(np.float32)
