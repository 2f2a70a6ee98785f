"""The cache of DeepSeek-V4.1 (40 layers, four of which own entries) with its row formats, on the XLA paths."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.config import DSV4Config
from dsv4_jax.host import KVCacheManager, offload, resume
from dsv4_jax.ops import CompressorWeights
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.quant import V41Format
from tests.ops.pools import ints, same_bytes
from tests.pallas_kernels.kernels import compile_in_process


CONFIG = DSV4Config.v41_flash()
FORMAT = V41Format()
SIZES = dict(num_blocks=6, max_requests=2, max_context=256)
TOKENS = 131
LAST = TOKENS - 1


class Run:
    """A cache after a prefill of `TOKENS` tokens, and the rows that were written to it."""

    def __init__(self):
        self.manager = KVCacheManager(CONFIG, **SIZES)
        self.slot = self.manager.admit()
        self.batch = self.manager.prepare_forward({self.slot: [0] * TOKENS})
        x, gate = np.random.default_rng(0).standard_normal((2, self.batch.slots.shape[0], 512)).astype(np.float32)
        self.window = jnp.asarray(x, jnp.bfloat16)
        self.cache, self.latents = self.step(self.manager.init_cache(), self.batch, x, gate)

    @staticmethod
    @jax.jit
    def step(cache, batch, x, gate):
        cache = cache.begin_step(batch)
        weights = CompressorWeights(None, jnp.ones(512), jnp.asarray(CONFIG.inv_freq(2)), 1e-6)
        latents = {}
        for layer in (2, 20):
            handle = cache.handle(layer, batch).write_swa(x.astype(jnp.bfloat16))
            latents[layer], handle = handle.pool_windows(x, gate if layer == 2 else None, weights)
            cache = handle.write_entries(latents[layer], weights.inv_freq).cache
            handle = cache.handle(layer, batch).write_keys(keys_of(latents[layer]), weights.inv_freq)
            cache = handle.cache
        return cache, latents


@pytest.fixture(scope="module")
def run():
    return Run()


def keys_of(latents):
    return dataclasses.replace(latents, values=latents.values[:, -128:])  # in the model, a projection


def rotated(closed, rate):
    return apply_rope(closed.values, closed.entries * rate, jnp.asarray(CONFIG.inv_freq(2)), deterministic=True)


def test_the_last_token_reads_the_rows_that_were_written(run):
    window = FORMAT.window(448, 64)
    entry = FORMAT.entries(448, 64)
    key = FORMAT.keys(128)
    arrays = {name: getattr(run.batch, name)[LAST:TOKENS] for name in ("token_ids", "positions", "slots")}
    batch = dataclasses.replace(run.batch, **arrays, prefill=False)
    for source, reader, rate in ((2, 7, 2), (20, 39, 1)):
        handle = run.cache.handle(reader, batch)
        assert handle.read_indexer_view().layer == 0
        count = TOKENS // rate
        entries, seen = handle.gather_all_compressed_kv()
        assert np.flatnonzero(seen[0]).tolist() == [*range(count)]
        values = rotated(run.latents[source], rate)
        entries = entries[0, :count]
        chex.assert_trees_all_equal(entries, entry.fake_quantize(values, jnp.bfloat16)[:count])

        picked, valid = handle.gather_compressed_kv(ints([[count - 1, 3, -1, 0]]))
        assert valid.tolist() == [[True, True, False, True]]
        chex.assert_trees_all_equal(picked[0, :2], entries[ints([count - 1, 3])])

        q = jax.random.normal(jax.random.key(1), (1, 32, 128), jnp.bfloat16)
        scores = handle.indexer_scores(q, jnp.ones((1, 32)))[0, :count]
        keys = key.fake_quantize(rotated(keys_of(run.latents[source]), rate))[:count]
        dots = np.maximum(np.asarray(key.round_query(q)[0], np.float64) @ np.asarray(keys, np.float64).T, 0)
        np.testing.assert_allclose(scores, dots.sum(axis=0), rtol=1e-5)  # float32 sums over 128 dims and 32 heads

    handle = run.cache.handle(20, batch)
    rows, valid = handle.gather_swa_kv()
    assert valid.all()
    chex.assert_trees_all_equal(rows[0], window.fake_quantize(run.window, jnp.bfloat16)[TOKENS - 128 : TOKENS])

    attended = np.concatenate([rows[0], entries]).astype(np.float64)
    q = jax.random.normal(jax.random.key(0), (1, 4, 512), jnp.bfloat16)
    out, _ = handle.attend(q, jnp.zeros(4))
    weights = np.exp(np.asarray(q[0], np.float64) @ attended.T * 512**-0.5)
    want = weights @ attended / (weights.sum(axis=1, keepdims=True) + 1)  # the sink's logit is 0
    # Weights of the softmax and the result are rounded to bfloat16.
    np.testing.assert_allclose(out[0].astype(np.float32), want, rtol=2**-6, atol=2**-8)


@pytest.mark.aot
def test_writes_of_a_decode_step_for_h100():
    """A launch for the window rows, and three for each layer that stores entries; no copy of a pool or a state."""
    compile_in_process("""
import re, jax, jax.numpy as jnp
from dsv4_jax import ops
from dsv4_jax.host import KVCacheManager
from tests.cache.test_new_formats import CONFIG, SIZES, keys_of
S = jax.ShapeDtypeStruct
manager = KVCacheManager(CONFIG, **SIZES)
def step(cache, batch, q, kv, x, norm):
    cache = cache.begin_step(batch)
    weights = ops.CompressorWeights(None, norm, jnp.asarray(CONFIG.inv_freq(2)), 1e-20)
    q, handle = cache.handle(2, batch).norm_rope_append(q, kv, norm, weights.inv_freq, eps=1e-20, norms_queries=False)
    for layer, gate in (2, x), (20, None):
        closed, handle = handle.cache.handle(layer, batch).pool_windows(x, gate, weights)
        handle = handle.write_entries(closed, weights.inv_freq).write_keys(keys_of(closed), weights.inv_freq)
    return handle.cache, q
cache = jax.eval_shape(manager.init_cache)
batch = manager.prepare_forward({manager.admit(): [0]})
assert not batch.prefill and len(batch.slots) == 2
args = batch, S((2, 64, 512), jnp.bfloat16), S((2, 512), jnp.bfloat16), S((2, 512), jnp.float32), S((512,), jnp.float32)
args = jax.tree.map(lambda x: S(x.shape, x.dtype), (cache, *args))
with ops.use_implementation("mosaic_gpu"):
    text = compile_for_h100("step", step, *args, donate_argnums=(0, 2)).as_text()
assert text.count('custom_call_target="mosaic_gpu') == 7, text
assert " copy(" not in text
""")


def test_offloaded_requests_come_back(run):
    before = jax.tree.map(np.array, run.cache)
    saved, cache = offload(run.manager, run.cache, run.slot)
    assert resume(run.manager, run.manager.init_cache(), saved)[0] == run.slot
    same_bytes(before.groups["full1"].entries.nope[:, :1], saved.blocks["full1"].entries.nope[:, :1])
