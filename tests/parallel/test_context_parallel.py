"""Devices of the "model" axis that hold entries between them select, attend and write as one device does."""

import dataclasses
import importlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax.host import BlockAllocator
from dsv4_jax.nn import shardings
from dsv4_jax.ops import indexer_topk, sparse_attention
from dsv4_jax.ops.context_parallel import topk_of_shards
from dsv4_jax.ops.sparse_attention import PrefillConfig
from dsv4_jax.ops.views import AttentionKV, ClassicalView, SWAView
from dsv4_jax.parallel.local_ids import to_local_ids
from dsv4_jax.parallel.mesh import make_mesh
from dsv4_jax.quant import kv_format
from tests.host.managers import CONFIG, make
from tests.pallas_kernels.kernels import FORMATS
from tests.pallas_kernels.sparse_attention.test_sparse_attention import (
    INV_FREQ,
    SMALL,
    assert_close,
    call,
    with_new_rows,
)
from tests.parallel.conftest import run_engine


FOUR = {"model": 4}


def sharded_step(sizes, local, specs, out_spec, *args):
    mesh = make_mesh(sizes)
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_spec, check_vma=False))(*placed)


@pytest.mark.parametrize("k", [16, *(pytest.param(k, marks=pytest.mark.slow) for k in (3, 40))])
def test_the_selection_is_that_of_one_device(k):
    """Many equal scores, entries without a block, fewer entries than are asked for, none at all."""
    rng = np.random.default_rng(k)
    scores = rng.integers(-2, 3, (9, 40)).astype(np.float32)
    scores[2] = 0
    scores[3, ::2] = -0.0
    scores[4, :7] = -np.inf
    lengths = np.array([40, 33, 40, 40, 40, 12, 2, 1, 0], np.int32)
    owner = rng.integers(0, 4, 40)
    parts = jnp.where(np.arange(4)[:, None, None] == owner, scores, -jnp.inf)

    def local(part, lengths):
        return topk_of_shards(part[0], lengths, k)[None]

    found = sharded_step(FOUR, local, (jax.P("model"), jax.P()), jax.P("model"), parts, jnp.asarray(lengths))
    want = np.asarray(indexer_topk(jnp.asarray(scores), jnp.asarray(lengths), k))
    for device in np.asarray(found):
        chex.assert_trees_all_equal(device, want)


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("selected", [False, True])
def test_attention_is_that_of_one_device(selected, prefill):
    rng = np.random.default_rng(0)
    fmt = kv_format("plain", jnp.float32)
    codec = fmt.window(96, 32)
    T = 6
    H = 8
    D = 128

    def rows(*shape):
        return codec.encode(jnp.asarray(rng.normal(size=(*shape, D)), jnp.float32))

    # Eight blocks of four entries, two on each device; the third request has no entries, the padding no slot.
    table = jnp.asarray([[0, 5, 2, -1], [7, 3, 1, 4], [-1, -1, -1, -1]], jnp.int32)
    window = SWAView(rows(1, 3, 16), 0, 16, codec)
    slots, positions = (jnp.asarray(x, jnp.int32) for x in ([0, 0, 1, 1, 2, -1], [46, 47, 62, 63, 2, -1]))
    compressed = ClassicalView(rows(1, 8, 4), 0, table, 4, codec)
    q, sinks, new_kv = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((T, H, D), (H,), (T, D)))
    new_kv = new_kv if prefill else None
    indices = jnp.asarray(np.sort(rng.permuted(np.tile(np.arange(11), (T, 1)), axis=1)[:, :5]), jnp.int32)
    indices = indices.at[:, -1].set(-1) if selected else None
    want = sparse_attention(q, sinks, AttentionKV(window, compressed, indices, new_kv), slots, positions)

    def local(q, sinks, pool):
        own = ClassicalView(pool, 0, to_local_ids(table, "context", 2), 4, codec)
        kv = AttentionKV(window, own, indices, new_kv)
        return sparse_attention(q, sinks, kv, slots, positions, context_parallel=True)

    specs = jax.P(None, "model"), jax.P("model"), jax.P(None, "model")
    out = sharded_step(FOUR, local, specs, specs[0], q, sinks, compressed.rows)
    # float32 sums of up to 32 products of values near 1, in another order.
    chex.assert_trees_all_close(out, want, rtol=0, atol=1e-5)
    assert np.abs(np.asarray(want)[:5]).max(axis=(1, 2)).min() > 0.1 and not np.asarray(out)[5].any()


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_by_the_kernels_is_that_of_one_device(many, implementation, monkeypatch):
    """Few tokens exchange sums, many entries. Interpreted on one device: the interpreter is one for all of them."""
    devices = 1 if implementation == "interpret" else min(len(jax.devices()), 2)
    attention = importlib.import_module("dsv4_jax.ops.sparse_attention")  # the package has the function by this name
    rng = np.random.default_rng(3)
    tokens = 3
    sizes = SMALL | dict(heads=16)
    args = call(FORMATS["v4"], rng, [2, 2, 0], [100, 101, 33], rate=4, count=None if many else 20, **sizes)
    if many:
        args = with_new_rows(args, jnp.asarray(rng.standard_normal((tokens, 512)), jnp.bfloat16))
    q, sinks, kv, slots, positions = args
    prefill = PrefillConfig(min_tokens=tokens, max_rows_per_token=1 << 10)
    want = sparse_attention(*args, inv_freq=INV_FREQ, implementation="xla")
    calls = []
    kernel = attention.prefill_attention
    monkeypatch.setattr(attention, "prefill_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k))

    def local(q, sinks, pool):
        table = to_local_ids(kv.compressed.block_table, "context", pool.nope.shape[1])
        own = dataclasses.replace(kv.compressed, rows=pool, block_table=table)
        options = dict(inv_freq=INV_FREQ, context_parallel=True, prefill=prefill, implementation=implementation)
        return sparse_attention(q, sinks, dataclasses.replace(kv, compressed=own), slots, positions, **options)

    specs = jax.P(None, "model"), jax.P("model"), jax.P(None, "model")
    out = sharded_step({"model": devices}, local, specs, specs[0], q, sinks, kv.compressed.rows)
    assert_close(out, want)
    assert calls == [1] * many


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("v4", dict(model=8)),
        ("v41", dict(data=2, model=4)),
    ],
    indirect=["model"],
    ids=str,
)
def test_tokens_are_those_of_one_device(model, alone, sizes):
    mesh = make_mesh(sizes)
    parts = sizes.get("data", 1)
    placed = jax.device_put(model, shardings(model, mesh))
    each = 24 // mesh.size  # blocks of a device
    options = dict(context_parallel=True, num_blocks=24, max_requests=4 * parts)
    tokens, cache, programs = run_engine(placed, model.config, mesh, **options)
    assert (tokens, programs) == (alone[0], 1)
    for group in cache.groups.values():
        for x in jax.tree.leaves(group.paged):
            assert x.addressable_shards[0].data.shape[1] == each
    # The second prompt's three blocks lie on three devices.
    blocks = np.asarray(cache.block_table)[4 if parts == 2 else 1, :3]
    assert len(set(blocks // each)) == 3 and min(blocks) >= 0


def test_memory_of_a_device_holds_a_share_of_the_blocks():
    mesh = make_mesh({"data": 2, "model": 4})
    config = dataclasses.replace(CONFIG, num_attention_heads=8, o_groups=8)
    sizes = dict(config=config, num_blocks=None, memory="100KiB", mesh=mesh, max_context=4096)
    whole, split = (make(**sizes, context_parallel=split) for split in (False, True))
    assert split.schema.num_blocks == 4 * whole.schema.num_blocks
    for manager in (whole, split):
        held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(manager.init_cache()))
        assert 0 <= 100 * 1024 - held < manager.schema.block_bytes
    with pytest.raises(ValueError, match="context_parallel=True needs a mesh with more than one device"):
        make(context_parallel=True, mesh=make_mesh({"data": 2}))
    with pytest.raises(ValueError, match="context_parallel=True: the mesh's 8 devices do not divide num_blocks=10"):
        make(config, context_parallel=True, mesh=mesh, num_blocks=10)


def test_devices_give_blocks_in_turn():
    allocator = BlockAllocator(12, num_shards=2, devices=3)
    assert allocator.acquire(6, 1) == [6, 8, 10, 7, 9, 11] and allocator.acquire(2) == [0, 2]
    with pytest.raises(ValueError, match="a multiple of 6"):
        BlockAllocator(9, num_shards=2, devices=3)
