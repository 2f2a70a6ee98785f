"""Layer kinds are data: rates 2, 8 and 64, pools read by layers that do not own them, through every cache operation."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.host import KVCacheManager
from tests.cache.life import Life, random_operations
from tests.cache.reference import ReferenceCache, poisoned_cache, random_token, random_weights
from tests.cache.test_state_machine import pad, run_step
from tests.ops.pools import same_bytes
from tests.rates import SPECS, rates_config


CONFIG = rates_config()
SIZES = dict(num_blocks=9, max_requests=2, max_context=320, block_tokens=64, max_query_tokens=3)


def test_groups_follow_from_the_layers():
    schema = CacheSchema(CONFIG, **SIZES)
    assert {name: (g.compress_rate, g.layers) for name, g in schema.groups.items()} == {
        "r2": (2, (1, 7)), "r8": (8, (2,)), "r64": (64, (3,))
    }  # fmt: skip
    assert schema.slot_structs()["swa"].rope.shape[0] == len(SPECS)
    assert schema.memory_bytes() == KVCache.abstract(schema).nbytes
    assert schema.group_structs("r2").state.kv.shape == (2, 2, 6, 2 * CONFIG.head_dim)
    assert schema.group_structs("r64").key_state is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(owner=False), r"layers\[2\] reads row 0 of group 'r8', which no layer before it stores"),
        (dict(compress_rate=4), r"layers\[6\] has compress_rate=8, but group 'r8' has compress_rate=4 in layers\[2\]"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(changes, message):
    specs = tuple(dataclasses.replace(s, **changes) if s.layer == 2 else s for s in SPECS)
    with pytest.raises(ValueError, match=message):
        CacheSchema(dataclasses.replace(CONFIG, specs=specs), **SIZES)


def test_windows_of_one_token_need_no_state():
    """Rate 1, no gate: what DeepSeek-V4.1's last compressor does, in two halves."""
    specs = (
        dataclasses.replace(SPECS[2], layer=0, compress_rate=1, group="r1", keys=True, selection=0),
        dataclasses.replace(SPECS[6], layer=1, compress_rate=1, group="r1", keys=True),
    )
    config = CONFIG.with_layers(specs)
    schema = CacheSchema(config, **SIZES, kv_format="plain", dtype=jnp.float32)
    assert schema.group_structs("r1").state is schema.group_structs("r1").key_state is None
    manager = KVCacheManager(config, **SIZES, kv_format="plain", dtype=jnp.float32)
    slot = manager.admit()
    rng = np.random.default_rng(0)
    batch = manager.prepare_forward({slot: [0] * 5})
    cache = manager.init_cache().begin_step(batch)
    weights = random_weights(CacheSchema(CONFIG, **SIZES), rng)[2][0]
    weights = jax.tree.map(jnp.asarray, dataclasses.replace(weights, position_bias=None))
    kv = jnp.asarray(rng.standard_normal((batch.slots.shape[0], config.head_dim)), jnp.float32)
    closed, handle = cache.handle(0, batch).pool_windows(kv, None, weights)
    keys = dataclasses.replace(closed, values=closed.values[:, : config.index_head_dim])
    handle = handle.write_entries(closed, weights.inv_freq).write_keys(keys, weights.inv_freq)
    entries, valid = handle.cache.handle(1, batch).gather_all_compressed_kv()  # the other layer reads them
    assert np.asarray(valid).sum(1)[:5].tolist() == [1, 2, 3, 4, 5]
    normed = np.asarray(kv, np.float64)
    normed *= np.asarray(weights.norm_weight) / np.sqrt((normed**2).mean(1, keepdims=True) + weights.eps)
    nope = config.nope_head_dim  # what RoPE leaves alone; float32 sums
    chex.assert_trees_all_close(np.asarray(entries)[4, :5, :nope], normed[:5, :nope], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kv_format", "dtype"), [("plain", jnp.float32), ("v4", jnp.bfloat16)])
def test_every_byte_is_the_naive_models(kv_format, dtype):
    manager = KVCacheManager(CONFIG, **SIZES, kv_format=kv_format, dtype=dtype)
    rng = np.random.default_rng(3)
    weights = random_weights(manager.schema, rng)
    cache = poisoned_cache(manager.schema)
    reference = ReferenceCache(cache, weights)
    for slot in range(2):
        assert manager.admit() == slot
        reference.admit(slot)
    # Chunks that close windows of 64 in the middle and at the end, single tokens across one, refused drafts.
    for counts in [{0: 130, 1: 61}, *[{0: 1, 1: 1}] * 4, {1: 3}, {0: 58, 1: 60}, {0: 2, 1: 1}]:
        batch = manager.prepare_forward({slot: [0] * n for slot, n in counts.items()}, prefill_size=192)
        tokens = {slot: [random_token(manager.schema, rng) for _ in range(n)] for slot, n in counts.items()}
        expected = reference.step(tokens, [row for row in batch.new_blocks.tolist() if row[0] >= 0])
        flat = [token for new in tokens.values() for token in new]
        real = len(flat)
        size = len(batch.slots)
        inputs = jax.tree.map(lambda *rows, size=size: pad(np.stack(rows), size, np.nan), *flat)
        cache, reads = run_step(cache, batch, inputs, weights)
        same_bytes(reference.pools, cache)
        expected = jax.tree.map(lambda *rows: np.stack(rows), *expected)
        same_bytes(expected, jax.tree.map(lambda x, real=real: x[:real], reads))
        if counts == {1: 3}:
            manager.rewind(1, 2)
            reference.rewind(1, 2)


@pytest.mark.slow
def test_a_life_of_every_operation():
    """Forks, rewinds, prefix hits, offload, files and snapshots."""
    sizes = SIZES | dict(num_blocks=14, max_requests=4, max_context=256, kv_format="plain", dtype=jnp.float32)
    life = Life(KVCacheManager(CONFIG, **sizes))
    for name, a, b in random_operations(7, 120):
        life.apply(name, a, b)
    life.drain()
