"""The design's test: the cache of DeepSeek-V4.1 (40 layers, four of which own entries) as data and codecs, no new code.

The codecs have V4.1's widths and blocks; its rounding rules are not part of this test.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_spec import LayerSpec
from dsv4_jax.host import KVCacheManager, offload, resume
from dsv4_jax.ops import CompressorWeights
from dsv4_jax.quant import (
    IndexRows,
    KeyCodec,
    KVFormat,
    RowCodec,
    Rows,
    decode_fp8_block,
    decode_mxfp4,
    decode_nvfp4,
    encode_fp8_block,
    encode_mxfp4,
    encode_nvfp4,
    round_to,
)
from tests.ops.pools import same_bytes


@dataclasses.dataclass(frozen=True)
class MXFP8Window(RowCodec):
    """512 E4M3 codes and an E8M0 scale for each 32 of them; nothing is kept in bfloat16."""

    struct = property(lambda self: Rows(_bytes(self.dim), None, _bytes(self.dim // 32)))

    def encode(self, kv):
        codes, scale = encode_fp8_block(kv.astype(jnp.float32), 32)
        return Rows(codes, None, scale)

    def decode(self, rows, dtype):
        return round_to(decode_fp8_block(rows.nope, rows.scale), dtype)


@dataclasses.dataclass(frozen=True)
class FP4Entries(RowCodec):
    """512 E2M1 codes and an E4M3 scale for each 16 of them."""

    struct = property(lambda self: Rows(_bytes(self.dim // 2), None, _bytes(self.dim // 16)))

    def encode(self, kv):
        codes, scale = encode_nvfp4(kv.astype(jnp.float32))
        return Rows(codes, None, scale)

    def decode(self, rows, dtype):
        return round_to(decode_nvfp4(rows.nope, rows.scale), dtype)


@dataclasses.dataclass(frozen=True)
class UnrotatedMXFP4Keys(KeyCodec):
    struct = property(lambda self: IndexRows(_bytes(self.dim // 2), _bytes(self.dim // 32)))

    def encode(self, keys):
        return IndexRows(*encode_mxfp4(keys.astype(jnp.float32)))

    def decode(self, rows):
        return decode_mxfp4(rows.codes, rows.scale)


@dataclasses.dataclass(frozen=True)
class NewFormat(KVFormat):
    name = "new"

    def window(self, nope_dim, rope_dim):
        return MXFP8Window(nope_dim, rope_dim)

    def entries(self, nope_dim, rope_dim):
        return FP4Entries(nope_dim, rope_dim)

    def keys(self, index_dim):
        return UnrotatedMXFP4Keys(index_dim)


def _bytes(count):
    return jax.ShapeDtypeStruct((count,), jnp.uint8)


def layers_of_v41():
    """shared/spec/dsv41.md 2: sources 2, 8, 14 (rate 2) and 20 (rate 1); eight layers select, the others reuse."""
    sources = {2: ("r2", 0), 8: ("r2", 1), 14: ("r2", 2), 20: ("r1", 0)}
    selecting = (2, 8, 14, 20, 24, 28, 32, 36)
    layers = [LayerSpec(), LayerSpec()]
    for layer in range(2, 40):
        source = max(s for s in sources if s <= layer)
        group, index = sources[source]
        selection = max(s for s in selecting if s <= layer)
        layers.append(
            LayerSpec(
                compress_rate=2 if group == "r2" else 1, group=group, index=index,
                owner=layer == source, keys=True, selection=selection,
            )
        )  # fmt: skip
    return tuple(layers)


def config():
    return DSV4Config.v4_flash().with_layers(layers_of_v41())


SIZES = dict(num_blocks=6, max_requests=2, max_context=256, kv_format=NewFormat())


def test_bytes():
    schema = CacheSchema(config(), **SIZES)
    assert schema.bytes_per_token == 890
    assert schema.slot_bytes_by_pool()["sliding windows"] / 2 == 2_703_360
    assert schema.slot_bytes_by_pool()["r2 states"] / 2 == 24_576
    assert KVCache.abstract(schema).nbytes == schema.memory_bytes()


def test_a_source_writes_entries_and_keys_from_one_latent_and_others_read_them():
    manager = KVCacheManager(config(), **SIZES)
    slot = manager.admit()
    rng = np.random.default_rng(0)
    batch = manager.prepare_forward({slot: [0] * 131})
    cache = manager.init_cache().begin_step(batch)
    tokens = batch.slots.shape[0]

    @jax.jit
    def run(cache, x, gate):
        inv_freq = jnp.asarray(config().inv_freq(2))
        weights = CompressorWeights(None, jnp.ones(512), inv_freq, 1e-6)
        for layer in (2, 20):
            handle = cache.handle(layer, batch).write_swa(x.astype(jnp.bfloat16))
            closed, handle = handle.pool_windows(x, gate if layer == 2 else None, weights)
            keys = dataclasses.replace(closed, values=closed.values[:, -128:])  # a projection, in the model
            cache = handle.write_entries(closed, inv_freq).write_keys(keys, inv_freq).cache
        reused = cache.handle(7, batch), cache.handle(39, batch)
        return cache, [h.gather_all_compressed_kv() for h in reused], [h.read_indexer_view().layer for h in reused]

    x, gate = jnp.asarray(rng.standard_normal((2, tokens, 512)), jnp.float32)
    cache, ((pairs, seen), (single, seen_single)), rows = run(cache, x, gate)
    assert rows == [0, 0]
    assert np.asarray(seen).sum(1)[:131].tolist() == [(t + 1) // 2 for t in range(131)]
    assert np.asarray(seen_single).sum(1)[:131].tolist() == list(range(1, 132))
    normed = np.asarray(x[:131]) / np.sqrt((np.asarray(x[:131]) ** 2).mean(1, keepdims=True))
    error = np.abs(np.asarray(single[130, :131, :448], np.float32) - normed[:, :448])
    assert error.max() < np.abs(normed).max() / 6, "half a step of E2M1's coarsest, between 4 and 6"
    chex.assert_tree_all_finite(pairs[130])

    before = jax.tree.map(np.array, cache)
    saved, cache = offload(manager, cache, slot)
    assert resume(manager, manager.init_cache(), saved)[0] == slot
    same_bytes(before.groups["r1"].entries.nope[:, :1], saved.blocks["r1"].entries.nope[:, :1])
