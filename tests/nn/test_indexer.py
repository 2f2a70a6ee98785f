"""The indexer of a long chunk: scores are computed for tiles of tokens, and selections are the same."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.cache import KVCache, handle
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.nn.layers import ABSTRACT
from tests.v41 import v41_config


TOKENS = 45  # some tiles of every size below have padding


def select(model, manager):
    """Returns what layers select for the tokens of a prompt: {"selection": {layer: [T, k]}}."""
    prompt = np.random.default_rng(0).integers(0, 150, TOKENS).tolist()
    batch = manager.prepare_forward({manager.admit(): prompt})

    @jax.jit
    def run(model, cache, batch):
        return model.record(cache, batch, ("selection",))[1]

    return run(model, manager.init_cache(), batch)


@pytest.mark.parametrize("rows", [1, 7, 44])
def test_tiles_select_the_same_entries(monkeypatch, rows):
    model = DeepseekV4ForCausalLM(v41_config(), jnp.float32, rngs=nnx.Rngs(0))
    options = {"dtype": jnp.float32, "num_blocks": 16, "max_requests": 1, "max_context": 64, "block_tokens": 8}
    whole = select(model, KVCacheManager(model.config, **options))
    assert (np.asarray(whole["selection"][3]) != np.asarray(whole["selection"][2])).any()
    monkeypatch.setattr(handle, "MAX_SCORES", rows * 64)  # the layers have up to 64 entries
    chex.assert_trees_all_equal(select(model, KVCacheManager(model.config, **options)), whole)


def test_tiles_are_larger_where_only_candidates_are_scored(monkeypatch):
    """3 candidate blocks of 4 of 64 entries: 16 tokens have as many scores as 3 tokens have of all entries."""
    tiles = []
    scores = handle.LayerCacheHandle.indexer_scores

    def record_tile(handle, q, weights, inv_freq, candidates):
        tiles.append((q.shape[0], None if candidates is None else candidates.shape))
        return scores(handle, q, weights, inv_freq, candidates)

    monkeypatch.setattr(handle.LayerCacheHandle, "indexer_scores", record_tile)
    monkeypatch.setattr(handle, "MAX_SCORES", 3 * 64)
    model = DeepseekV4ForCausalLM(v41_config(), jnp.float32, rngs=nnx.Rngs(0))
    options = {"dtype": jnp.float32, "num_blocks": 16, "max_requests": 1, "max_context": 64, "block_tokens": 8}
    select(model, KVCacheManager(model.config, **options))
    # Layer 1 has an entry for two tokens, layer 2 makes the candidates, and layer 3 selects among them.
    assert set(tiles) == {(6, None), (3, None), (16, (16, 3))}


def test_memory_does_not_grow_with_tokens_times_entries(monkeypatch):
    """Without tiles, a program takes 18 times the size of all scores on a CPU."""
    context = 1 << 16
    monkeypatch.setattr(handle, "MAX_SCORES", context)
    model = DeepseekV4ForCausalLM(dataclasses.replace(v41_config(), max_position_embeddings=context), rngs=ABSTRACT)
    manager = KVCacheManager(model.config, num_blocks=8, max_requests=1, max_context=context, block_tokens=128)
    batch = manager.prepare_forward({manager.admit(): list(range(64))})
    run = jax.jit(lambda model, cache, batch: model(cache, batch), donate_argnums=1)
    compiled = run.lower(model, KVCache.abstract(manager.schema), batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * (64 * context * 4)
