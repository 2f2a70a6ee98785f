"""Counts of experts: the layers of a step may come stacked, in any order, and padding counts nowhere."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache.pools import count_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_spec import LayerSpec
from dsv4_jax.host import KVCacheManager


EXPERTS = 8
LAYERS = 5
TOKENS = 6
TOP_K = 3


@pytest.fixture(scope="module")
def cache():
    config = DSV4Config.small([LayerSpec()] * LAYERS, n_routed_experts=EXPERTS)
    manager = KVCacheManager(config, num_blocks=2, max_requests=1, max_context=128)
    return manager.init_cache().with_expert_counts()


def selected(layers, seed):
    """Experts of each token without repetition, [layers, T, k]; the last two tokens are padding."""
    rng = np.random.default_rng(seed)
    experts = rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.int32), (layers, TOKENS, 1)), axis=2)[:, :, :TOP_K]
    experts[:, -2:] = -1
    return experts


def naive(counts, experts, layers):
    counts = counts.copy()
    for layer, rows in zip(layers, experts, strict=True):
        for expert in range(EXPERTS):
            hits = (rows == expert).sum()
            counts[0, layer, expert] += hits
            counts[1, layer, expert] += hits > 0
    return counts


@pytest.mark.parametrize("layers", [(0, 1, 2, 3, 4), (1, 3), (4,), (3, 0, 2)])
def test_steps_add_to_the_layers_that_were_stacked(cache, layers):
    step = jax.jit(count_experts, static_argnums=2)
    counts = np.asarray(cache.expert_counts)
    for seed in range(2):
        experts = selected(len(layers), seed)
        cache = step(cache, jnp.asarray(experts), layers)
        counts = naive(counts, experts, layers)
    assert counts[0].sum() == 2 * len(layers) * (TOKENS - 2) * TOP_K
    chex.assert_trees_all_equal(np.asarray(cache.expert_counts), counts)
