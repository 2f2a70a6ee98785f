"""The packaged tiny model's configuration, and random arrays from fixed seeds."""

import dataclasses

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
    kinds = dict(layer_types=config.layer_types[:3], mlp_layer_types=config.mlp_layer_types[:3])
    assert len(set(kinds["layer_types"])) == 3
    return dataclasses.replace(config, num_hidden_layers=3, **kinds)


@pytest.fixture
def draw():
    """draw(*shape) -> standard normal float32 numpy array."""
    generator = np.random.default_rng(0)
    return lambda *shape: generator.normal(size=shape).astype(np.float32)
