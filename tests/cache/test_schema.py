"""Bytes: what the schema says, what is allocated, and the published table (dsv4.md 6.9)."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.cache import CacheSchema, KVCache, compute_block_budget
from dsv4_jax.config import DSV4Config
from dsv4_jax.host import KVCacheManager
from tests.paths import DATA, TINY
from tests.v41 import v41_config


SIZES = dict(num_blocks=24, max_requests=3, max_context=500)
CONFIGS = {"tiny": DSV4Config.from_hf(TINY), "flash": DSV4Config.v4_flash(), "pro": DSV4Config.v4_pro()}
CONFIGS["v41"] = DSV4Config.v41_flash()
MIB = 2**20


@pytest.mark.parametrize(
    ("name", "per_token", "rings", "states"), [("flash", 3514.25, 3.07, 11.64), ("pro", 5031.4375, 4.35, 17.84)]
)
@pytest.mark.parametrize("block_tokens", [128, 256])
def test_bytes_equal_the_published_table(name, per_token, rings, states, block_tokens):
    schema = CacheSchema(CONFIGS[name], **SIZES, block_tokens=block_tokens)
    assert schema.bytes_per_token == per_token
    assert schema.block_bytes == per_token * block_tokens
    parts = schema.pool_bytes()
    assert round(parts["sliding windows"] / 3 / MIB, 2) == rings
    assert round(sum(v for k, v in parts.items() if k.endswith("states")) / 3 / MIB, 2) == states
    assert schema.bytes_per_request == sum(v for k, v in parts.items() if k.endswith(("states", "windows"))) // 3


def test_bytes_of_v41():
    """DeepSeek's numbers: 2.5 entries and keys a token, 40 windows, a pending row in three layers."""
    schema = CacheSchema(CONFIGS["v41"], **SIZES)
    assert (schema.bytes_per_token, schema.block_bytes) == (890, 113_920)
    assert {name: size / 24 / 128 for name, size in schema.block_bytes_by_pool().items()} == {
        "full1 entries": 288, "full2 entries": 432, "full1 indexer keys": 68, "full2 indexer keys": 102,
    }  # fmt: skip
    parts = {name: size / 3 for name, size in schema.slot_bytes_by_pool().items()}
    assert (parts["sliding windows"], parts["full2 states"]) == (2_703_360, 24_576)
    # Windows, states, and four ids for n-grams.
    assert schema.bytes_per_request == 2_703_360 + 24_576 + 4 * 4
    assert KVCache.abstract(schema).nbytes == schema.memory_bytes()


@pytest.mark.parametrize(
    ("config", "kv_format", "name"),
    [
        ("flash", None, "v4"),
        ("v41", None, "v41"),
        ("v41", "v4", "v4"),
        ("flash", "v41", "v41"),
        ("v41", "plain", "plain"),
    ],
)
def test_the_format_is_that_of_the_release_unless_another_is_named(config, kv_format, name):
    assert CacheSchema(CONFIGS[config], **SIZES, kv_format=kv_format).kv_format.name == name
    assert KVCacheManager(CONFIGS[config], **SIZES, kv_format=kv_format).schema.kv_format.name == name


@pytest.mark.parametrize(
    ("name", "fmt"), [("tiny", f) for f in ("v4", "v41", "per_entry", "plain")] + [("flash", "v4")]
)
@pytest.mark.parametrize("max_query_tokens", [1, 4])
def test_memory_bytes_are_those_of_the_arrays(name, fmt, max_query_tokens):
    schema = CacheSchema(CONFIGS[name], **SIZES, kv_format=fmt, max_query_tokens=max_query_tokens)
    assert KVCache.abstract(schema).nbytes == schema.memory_bytes()
    if name == "tiny":
        cache = KVCache.zeros(schema)
        assert cache.nbytes == sum(x.nbytes for x in jax.tree.leaves(cache)) == schema.memory_bytes()
        shapes = jax.tree.map(lambda x: (x.shape, x.dtype), cache)
        assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), KVCache.abstract(schema))


def test_few_leaves():
    """Stacked layers keep dispatch cheap: the number of arrays does not grow with the layers."""
    assert len(jax.tree.leaves(KVCache.abstract(CacheSchema(CONFIGS["pro"], **SIZES)))) == 19


@pytest.mark.parametrize("memory", [2**30, 5 * 10**9 + 1])
def test_block_budget_is_the_most_that_fits(memory):
    sizes = dict(max_requests=8, max_context=1 << 20, block_tokens=128)
    blocks = compute_block_budget(CONFIGS["flash"], memory, **sizes)
    assert CacheSchema(CONFIGS["flash"], num_blocks=blocks, **sizes).memory_bytes() <= memory
    assert CacheSchema(CONFIGS["flash"], num_blocks=blocks + 1, **sizes).memory_bytes() > memory


def test_budget_without_room_for_a_block_is_refused():
    with pytest.raises(ValueError, match=r"memory=1000 holds no block: 8 slots take \d+ bytes"):
        compute_block_budget(CONFIGS["flash"], 1000, max_requests=8, max_context=1024)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_blocks=-1), "num_blocks=-1 must be at least 0"),
        (dict(max_requests=0), "max_requests=0 must be at least 1"),
        (dict(max_context=-5), "max_context=-5 must be at least 1"),
        (dict(max_query_tokens=0), "max_query_tokens=0 must be at least 1"),
        (dict(block_tokens=24), "block_tokens=24 must be a multiple of the compression rate 16"),
        (dict(max_context=5000), "max_context=5000 exceeds the model's max_position_embeddings=4096"),
        (dict(kv_format="fp7"), "fp7"),
    ],
)
def test_bad_sizes_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        CacheSchema(CONFIGS["tiny"], **(SIZES | change))


def test_a_format_that_does_not_fit_the_heads_is_refused():
    """hf_tiny has 24 dims without RoPE: no whole block of 64."""
    config = DSV4Config.from_hf(DATA / "hf_tiny")
    with pytest.raises(ValueError, match="24"):
        CacheSchema(config, **SIZES, kv_format="v4")
    CacheSchema(config, **SIZES, kv_format="plain", dtype=jnp.float32)


def test_layers_know_their_place_in_the_stacks():
    layers = CacheSchema(CONFIGS["flash"], **SIZES).layers
    assert [layer.index for layer in layers if layer.group == "csa4"] == list(range(21))
    assert [layer.index for layer in layers if layer.group == "hca128"] == list(range(20))
    assert [layer.compress_rate for layer in layers[:5]] == [0, 0, 4, 128, 4]


def test_candidate_blocks_lie_within_pages_that_devices_share():
    sizes = dict(num_blocks=8, max_requests=1, max_context=64, kv_format="plain")
    CacheSchema(v41_config(), block_tokens=2, **sizes)
    CacheSchema(v41_config(), block_tokens=4, context_parallel=True, **sizes)
    with pytest.raises(ValueError, match="block_tokens=2 must hold whole candidate blocks of 4 entries of 1 tokens"):
        CacheSchema(v41_config(), block_tokens=2, context_parallel=True, **sizes)


def test_a_model_with_other_candidates_is_refused():
    schema = CacheSchema(v41_config(), num_blocks=8, max_requests=1, max_context=64, block_tokens=8)
    with pytest.raises(ValueError, match="candidate_topk_blocks is 4 in the model, 3 in the cache"):
        schema.check_config(dataclasses.replace(v41_config(), candidate_topk_blocks=4))
