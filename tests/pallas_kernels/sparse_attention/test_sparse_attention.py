"""The attention kernel against the reference: interpreted, on a GPU, and compiled for one."""

import dataclasses
import functools
import importlib
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.ops.dense_rows import dense_rows, max_runs
from dsv4_jax.ops.sparse_attention import PrefillConfig
from dsv4_jax.quant import kv_format
from pallas_kernels.sparse_attention import attention_sums, prefill_attention, sparse_attention
from pallas_kernels.sparse_attention.combine import combine
from tests.ops.pools import encode, ints, poison, same_bytes, swa_view
from tests.pallas_kernels.kernels import DIM, ROPE, compile_in_process
from tests.pallas_kernels.stacks import LAYERS, check_layers


# Queries and rows are normal, so scores are of size 1 and results below 4. Weights are rounded to 8 bits before the
# sum, at another maximum than the reference's, and the result is rounded to 8 bits.
TOLERANCE = dict(rtol=2**-6, atol=2**-7)


FORMATS = {name: kv_format(name) for name in ("v4", "v41", "per_entry")}
DEFAULT = PrefillConfig()
INV_FREQ = jnp.asarray(1e4 ** -(np.arange(32) / 32), jnp.float32)


def values(rng, *shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)


def call(
    fmt, rng, slots, positions, *, heads, rate, window, ring, per_block, max_blocks, count=None, layers=2, rope=ROPE
) -> tuple[Any, ...]:
    """Arguments of the op: rings and pools hold the rows that the tokens may see, every other byte is poison."""
    num_slots = max(slots) + 2
    last = layers - 1
    window_codec = fmt.window(DIM - rope, rope)
    codec = fmt.entries(DIM - rope, rope)
    rings = poison(window_codec.struct, layers, num_slots, ring)
    pools = poison(codec.struct, layers, num_slots * max_blocks, per_block)
    table = np.full((num_slots, max_blocks), -1)
    blocks = rng.permutation(num_slots * max_blocks).reshape(num_slots, max_blocks)
    ring_at = []
    pool_at = []
    for slot in {s for s in slots if s >= 0}:
        seen = [p for s, p in zip(slots, positions, strict=True) if s == slot and p >= 0]
        if not seen:
            continue
        ring_at += [(slot, p % ring) for p in range(max(0, min(seen) - window + 1), max(seen) + 1)]
        entries = np.arange(min((max(seen) + 1) // rate, per_block * max_blocks))
        table[slot, : -(-entries.size // per_block)] = blocks[slot, : -(-entries.size // per_block)]
        pool_at += list(zip(blocks[slot, entries // per_block], entries % per_block, strict=True))

    def fill(codec, rows, at):
        if not at:
            return rows
        first, second = np.asarray(at).T
        encoded = encode(codec, values(rng, len(at), DIM))

        def written(pool, row):
            pool = np.array(pool)
            pool[last, first, second] = row
            return jnp.asarray(pool)

        return jax.tree.map(written, rows, encoded)

    indices = None
    if count is not None:
        visible = [(p + 1) // rate for p in positions]
        lists = [rng.permutation(np.r_[np.arange(v), np.full(count, -1)])[:count] for v in visible]
        indices = ints(np.stack(lists))
    return (
        values(rng, len(slots), heads, DIM),
        jnp.asarray(rng.standard_normal(heads), jnp.float32),
        ops.AttentionKV(
            ops.SWAView(fill(window_codec, rings, ring_at), ints(last), window, window_codec),
            ops.ClassicalView(fill(codec, pools, pool_at), ints(last), ints(table), rate, codec),
            indices,
        ),
        ints(slots),
        ints(positions),
    )


def window_alone(args):
    """The same call without compressed entries."""
    q, sinks, kv, *tokens = args
    return q, sinks, ops.AttentionKV(kv.window), *tokens


def with_new_rows(args, new_kv):
    """The same call, whose window rows the rings do not hold yet."""
    q, sinks, kv, *tokens = args
    return q, sinks, dataclasses.replace(kv, new_kv=new_kv), *tokens


@functools.cache
def jitted(implementation, prefill=DEFAULT):
    return jax.jit(functools.partial(ops.sparse_attention, prefill=prefill, implementation=implementation))


def assert_close(got, expected):
    chex.assert_trees_all_close(*(np.asarray(x, np.float32) for x in (got, expected)), **TOLERANCE)


def check(implementation, *args, prefill=DEFAULT, inv_freq=None):
    """Compares the kernel's result with the reference's and returns it."""
    cpu = jax.devices("cpu")[0]
    expected = jitted("xla")(*jax.device_put(args, cpu), inv_freq=jax.device_put(inv_freq, cpu))
    got = jitted(implementation, prefill)(*args, inv_freq=inv_freq)
    assert got.dtype == jnp.bfloat16
    assert_close(got, expected)
    padding = (np.asarray(args[-2]) < 0) | (np.asarray(args[-1]) < 0)
    assert not np.asarray(got, np.float32)[padding].any()
    return got


def with_other_rows(args, rng, keep):
    """The same call where every token but one belongs to another request and asks something else."""
    q, sinks, kv, slots, positions = args
    kept = np.arange(slots.shape[0]) == keep
    q = jnp.where(kept[:, None, None], q, values(rng, *q.shape))
    slots = jnp.where(kept, slots, -1)
    if kv.indices is not None:
        kv = dataclasses.replace(kv, indices=jnp.where(kept[:, None], kv.indices, -1))
    return q, sinks, kv, slots, positions


SMALL = dict(heads=64, window=64, ring=67, per_block=2, max_blocks=32)


@pytest.mark.parametrize("name", ["v4", "v41"])
def test_index_lists_interpreted(name):
    """The rows split over blocks; the results rotated back."""
    args = call(FORMATS[name], np.random.default_rng(0), [2], [101], rate=4, count=40, **SMALL)
    check("interpret", *args, inv_freq=INV_FREQ)


def test_all_entries_interpreted():
    args = call(FORMATS["per_entry"], np.random.default_rng(1), [1], [250], rate=4, **SMALL)
    check("interpret", *args)


@pytest.mark.slow
def test_other_widths_interpreted():
    """And the heads of a device that has a quarter of a layer's, and a window that ends within a tile."""
    sizes = SMALL | dict(heads=16, window=69, ring=75)
    args = call(FORMATS["v4"], np.random.default_rng(5), [0], [150], rate=4, count=8, rope=128, **sizes)
    check("interpret", *args)


@pytest.mark.parametrize("name", ["v4", "v41"])
def test_one_split_interpreted(name):
    """A single KV split, as for many tokens; a token's bits do not change when its neighbors do."""
    rng = np.random.default_rng(2)
    args = call(FORMATS[name], rng, [1, 1], [100, 101], rate=4, count=70, **SMALL | {"heads": 32})

    @jax.jit
    def attend(q, sinks, kv, slots, positions):
        rows = kv.window.for_kernels(), kv.compressed.for_kernels(kv.indices)
        options = dict(splits=1, interpret=True)
        return sparse_attention(q, sinks, slots, positions, *rows, INV_FREQ, **options)

    got = attend(*args)
    assert_close(got, jitted("xla")(*args, inv_freq=INV_FREQ))
    alone = attend(*with_other_rows(args, rng, 0))
    same_bytes(alone[0], got[0])
    assert not np.asarray(alone[1], np.float32).any(), "padding gives zeros"


@pytest.mark.parametrize("name", ["v4", pytest.param("v41", marks=pytest.mark.slow)])
def test_rows_of_this_call_interpreted(name):
    """Two requests, one of them new, and padding; what the rings hold of this call's positions is not read."""
    rng = np.random.default_rng(4)
    args = call(FORMATS[name], rng, [2, 2, -1, 0], [70, 71, -1, 0], rate=4, count=8, **SMALL)
    check("interpret", *with_new_rows(args, values(rng, 4, DIM)))


@jax.jit
def prefill_interpreted(q, sinks, kv, slots, positions):
    """The prefill kernel, for any number of tokens."""
    rows = dense_rows(kv, slots, positions, implementation="interpret")
    return prefill_attention(q, sinks, rows, INV_FREQ, interpret=True)


@pytest.mark.parametrize(
    ("name", "count"),
    [("v4", 70), ("v4", 0), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("v4", None), ("v41", 70)))],
)
def test_many_tokens_interpreted(name, count):
    """Several tokens for a block; two requests, one of them new, and padding. One case has a device's 16 heads."""
    rng = np.random.default_rng(4)
    slots = [2, 2, 2, -1, 0, 0]
    positions = [300, 301, 302, -1, 0, 1]
    sizes = SMALL | {"max_blocks": 64, "heads": 16 if count == 0 else 64}
    args = call(FORMATS[name], rng, slots, positions, rate=4, count=count or None, **sizes)
    if count == 0:
        args = window_alone(args)
    args = with_new_rows(args, values(rng, 6, DIM))
    got = prefill_interpreted(*args)
    assert_close(got, jitted("xla")(*args, inv_freq=INV_FREQ))
    assert not np.asarray(got, np.float32)[3].any(), "padding gives zeros"


@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("KV splits", "one split")), "prefill"]
)
def test_sinks_of_a_stack(kind, implementation):
    """A single split is that of one tile of rows. It and the prefill have a device's quarter of a layer's heads."""
    rng = np.random.default_rng(9)
    prefill = PrefillConfig(min_tokens=2)
    sizes = SMALL | dict(heads=64 if kind == "KV splits" else 16)
    q, sinks, kv, *tokens = call(FORMATS["v4"], rng, [2, 0], [101, 0], rate=4, count=40, **sizes)
    if kind == "one split":
        kv = dataclasses.replace(kv, compressed=None, indices=None)
    if kind == "prefill":
        kv = dataclasses.replace(kv, new_kv=values(rng, 2, DIM))

    def attend(sinks, carry, implementation):
        options = dict(inv_freq=INV_FREQ, prefill=prefill, implementation=implementation)
        return carry, ops.sparse_attention(q, sinks, kv, *tokens, **options)

    check_layers(implementation, attend, [jnp.roll(sinks, layer) for layer in range(LAYERS)])


@pytest.mark.parametrize("spare", [0, -1])
def test_a_call_whose_rows_could_be_too_many_reads_the_pools(spare, monkeypatch):
    """Up to the limit a prefill dequantizes rows for all tokens, beyond it it does not; traced only."""
    attention = importlib.import_module("dsv4_jax.ops.sparse_attention")  # the package has the function by this name
    rng = np.random.default_rng(4)
    calls = []
    slots = [2, 2, 2, -1, 0, 0]
    positions = [300, 301, 302, -1, 0, 1]
    args = call(FORMATS["v4"], rng, slots, positions, rate=4, count=70, **SMALL | {"max_blocks": 64})
    kv = args[2]
    rows = max_runs(kv.window, len(slots)) * kv.compressed.max_entries
    config = PrefillConfig(min_tokens=len(slots), max_rows=rows + spare)
    kernel = attention.prefill_attention
    monkeypatch.setattr(attention, "prefill_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    args = with_new_rows(args, values(rng, len(slots), DIM))
    jax.eval_shape(jitted("interpret", config), *args, inv_freq=INV_FREQ)
    assert len(calls) == 1 + spare


@pytest.mark.parametrize("splits", [3, 17])
def test_splits_are_combined(splits):
    """Splits without rows hold NaN; a token all of whose splits are empty gives zeros."""
    rng = np.random.default_rng(splits)
    sums = rng.standard_normal((2, splits, 1, DIM), np.float32)
    top = rng.uniform(-30, 30, (2, splits, 1)).astype(np.float32)
    weight = np.where(rng.random((2, splits, 1)) < 0.5, rng.uniform(1, 64, (2, splits, 1)), 0).astype(np.float32)
    weight[0, 0] = 1
    weight[1] = 0
    sums[weight == 0] = np.nan
    sinks = np.asarray([0.5], np.float32)
    positions = np.asarray([123456, -1], np.int32)
    args = [jnp.asarray(x) for x in (sums, np.stack([top, weight], 2), sinks)]
    got = combine(*args, interpret=True)
    rotated = combine(*args, jnp.asarray(positions), INV_FREQ, interpret=True)
    want = ops.apply_rope(got, jnp.maximum(jnp.asarray(positions), 0), INV_FREQ, inverse=True)
    # Cosines differ by 2e-7, and one of the two adds products without rounding: some values round the other way.
    difference = np.abs(np.float32(rotated) - np.float32(want))
    assert np.mean(difference > 0) < 0.01 and difference.max() <= 2**-7 * np.abs(np.float32(got)).max()
    factor = np.where(weight > 0, np.exp2(top.astype(np.float64)), 0)
    total = (factor * weight).sum(1) + np.exp(sinks)
    expected = (factor[..., None] * np.nan_to_num(sums)).sum(1) / total[..., None]
    # Rounded to 8 bits.
    chex.assert_trees_all_close(np.asarray(got, np.float32), expected, rtol=2**-8, atol=1e-6)


def check_sharded(implementation, args):
    """Two devices share the entries' blocks, the first has the windows: the splits of both, combined."""
    q, sinks, kv, slots, positions = args
    interpret = implementation == "interpret"
    rings = kv.window.for_kernels()
    entries = kv.compressed.for_kernels(kv.indices)

    @jax.jit
    def attend(q, slots, positions, rings, entries, tables, layers):
        shards = []
        for table, layer in zip(tables, layers, strict=True):
            own = dataclasses.replace(rings, layer=layer), dataclasses.replace(entries, block_table=table)
            shards.append(attention_sums(q, slots, positions, *own, interpret=interpret))
        sums, stats = (jnp.concatenate(x, axis=1) for x in zip(*shards, strict=True))
        return combine(sums, stats, sinks, interpret=interpret)

    table = np.asarray(entries.block_table)
    tables = [ints(np.where(table % 2 == device, table, -1)) for device in range(2)]
    got = attend(q, slots, positions, rings, entries, tables, [rings.layer, ints(-1)])
    assert_close(got, jitted("xla")(*jax.device_put(args, jax.devices("cpu")[0])))


@pytest.mark.parametrize("count", [40, pytest.param(None, marks=pytest.mark.slow)])
def test_shards_of_two_devices_interpreted(count):
    args = call(FORMATS["v4"], np.random.default_rng(8), [2, -1], [101, -1], rate=4, count=count, **SMALL)
    check_sharded("interpret", args)


REAL = dict(window=128, ring=135, per_block=32, max_blocks=64)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("tokens", "heads", "count"),
    [
        (1, 64, 512),
        (9, 64, 512),
        (70, 64, 512),
        (3, 128, 1024),
        (70, 128, 1024),
        (2, 16, 512),
        (8, 32, 512),
        (140, 32, 64),
    ],
)
def test_index_lists_on_gpu(fmt, tokens, heads, count):
    rng = np.random.default_rng(tokens)
    # Requests of up to 8 tokens, of every length.
    slots = np.repeat(np.arange(tokens), 1 + np.arange(tokens) % 8)[:tokens]
    starts = rng.integers(0, 4 * count + 500, tokens)
    positions = [int(starts[s]) + i - int(np.flatnonzero(slots == s)[0]) for i, s in enumerate(slots)]
    slots = [int(s) if i != 5 else -1 for i, s in enumerate(slots)]
    args = call(fmt, rng, slots, positions, heads=heads, rate=4, count=count, layers=3, **REAL)
    got = check("mosaic_gpu", *args, inv_freq=INV_FREQ)
    same_bytes(jitted("mosaic_gpu")(*args, inv_freq=INV_FREQ), got)
    alone = jitted("mosaic_gpu")(*with_other_rows(args, rng, tokens - 1), inv_freq=INV_FREQ)
    same_bytes(alone[-1], got[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(
    ("tokens", "rate", "heads"), [(1, 128, 64), (6, 128, 64), (40, 4, 64), (6, 128, 128), (40, 4, 128)]
)
def test_all_entries_on_gpu(fmt, tokens, rate, heads):
    rng = np.random.default_rng(tokens)
    positions = [int(p) for p in rng.integers(-1, 1500 * rate, tokens)]
    sizes = REAL | dict(per_block=128 // rate, max_blocks=1500 * rate // 128)
    args = call(fmt, rng, list(range(tokens)), positions, heads=heads, rate=rate, layers=3, **sizes)
    check("mosaic_gpu", *args)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize(("tokens", "count"), [(1, 512), (9, 512), (140, 64), (1, None), (6, None)])
def test_shards_of_two_devices_on_gpu(tokens, count, heads, fmt):
    rng = np.random.default_rng(tokens)
    positions = [int(p) for p in rng.integers(-1, 8000, tokens)]
    slots = list(range(tokens))
    check_sharded("mosaic_gpu", call(fmt, rng, slots, positions, heads=heads, rate=4, count=count, **REAL))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_rows_of_this_call_on_gpu(fmt, heads):
    """A prefill of three requests that together bring many times what a ring holds."""
    rng = np.random.default_rng(11)
    counts = [700, 1, 300]
    starts = [0, 90, 4001]
    slots = np.repeat([4, 0, 2], counts).tolist() + [-1] * 7
    positions = np.concatenate([s + np.arange(n) for n, s in zip(counts, starts, strict=True)]).tolist() + [-1] * 7
    args = call(fmt, rng, slots, positions, heads=heads, rate=4, count=512, layers=3, **REAL)
    check("mosaic_gpu", *with_new_rows(args, values(rng, len(slots), DIM)), inv_freq=INV_FREQ)


@pytest.mark.gpu
def test_chunks_of_many_tokens_on_gpu():
    """A token's bits do not depend on where its call begins: its window lies among the call's rows, or before."""
    rng = np.random.default_rng(13)
    args = call(FORMATS["v4"], rng, [1] * 512, [*range(3000, 3512)], heads=64, rate=4, count=512, **REAL)
    q, sinks, kv, slots, positions = with_new_rows(args, values(rng, 512, DIM))
    whole = jitted("mosaic_gpu")(q, sinks, kv, slots, positions)
    later = dataclasses.replace(kv, indices=kv.indices[200:], new_kv=kv.new_kv[200:])
    part = jitted("mosaic_gpu")(q[200:], sinks, later, slots[200:], positions[200:])
    # The rings hold other rows before token 200 than the first call's.
    same_bytes(part[127:], whole[327:])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_other_widths_on_gpu(fmt, heads):
    args = call(fmt, np.random.default_rng(5), [0, 1], [150, 3000], heads=heads, rate=4, count=512, rope=192, **REAL)
    check("mosaic_gpu", *args)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("heads", [64, 128])
def test_window_alone_on_gpu(heads, fmt):
    rng = np.random.default_rng(7)
    args = call(fmt, rng, [0, 3, 1, -1], [0, 127, 4000, -1], heads=heads, rate=4, count=8, **REAL)
    check("mosaic_gpu", *window_alone(args))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 512])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
def test_draft_blocks_on_gpu(fmt, count):
    """DSpark's blocks at V4-Flash's size: 5 tokens see 128 rows before them and each other; one request is short."""
    sizes = REAL | dict(window=133, ring=143)
    slots = [2] * 5 + [0] * 5 + [-1]
    positions = [4004] * 5 + [6] * 5 + [-1]
    args = call(fmt, np.random.default_rng(14), slots, positions, heads=64, rate=4, count=count or 8, layers=3, **sizes)
    check("mosaic_gpu", *(args if count else window_alone(args)))


@pytest.mark.aot
def test_compiles_for_h100_with_hardly_a_spill():
    printed = compile_in_process("""
import jax, jax.numpy as jnp
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.formats.pool_operands import Paged, Rings
from pallas_kernels.sparse_attention import DenseRows, prefill_attention, sparse_attention
from pallas_kernels.sparse_attention.combine import combine
from tests.pallas_kernels.stacks import LAYERS, check_not_copied, looped
S = jax.ShapeDtypeStruct
def ints(*shape): return S(shape, jnp.int32)
same = {"v4": RowLayout(448, 64, 64), "per_entry": RowLayout(448, 64, None)}
both = {name: (layout, layout) for name, layout in same.items()}
both["v41"] = RowLayout(512, 0, 32), RowLayout(512, 0, 16, codes="e2m1")
for name, (window, entry) in both.items():
    def pools(layout, a, b):
        return tuple(S((3, a, b, width), dtype) if width else None for _, dtype, width in layout.columns)
    def run(label, tokens, rate, indices, heads=64):
        def attend(q, sinks, slots, positions, layer, rings, table, pools, indices, inv_freq):
            rows = Rings(layer, rings, 128, window), Paged(layer, table, pools, indices, rate, entry)
            return sparse_attention(q, sinks, slots, positions, *rows, inv_freq)
        args = S((tokens, heads, 512), jnp.bfloat16), S((heads,), jnp.float32), ints(tokens), ints(tokens), ints()
        args += pools(window, 64, 128), ints(64, 8192), pools(entry, 8192, 128 // rate), indices
        args += (S((32,), jnp.float32),)
        compile_for_h100(f"{name}-{label}", attend, *args)
        def attend_layer(q, layer, sinks, slots, positions, ring, rings, table, pools, indices, inv_freq):
            rows = Rings(ring, rings, 128, window), Paged(ring, table, pools, indices, rate, entry)
            return sparse_attention(q, sinks, slots, positions, *rows, inv_freq, layer=layer)
        stack = S((LAYERS, heads), jnp.float32)
        compiled = compile_for_h100(f"{name}-{label}-stack", looped(attend_layer), args[0], stack, *args[2:])
        check_not_copied(compiled, stack)
    fine, coarse = (1, 2) if name == "v41" else (4, 128)
    run("lists", 128, fine, ints(128, 512))
    run("lists-split", 1, fine, ints(1, 512))
    run("lists-pairs", 120, fine, ints(120, 1024), heads=128)
    run("all-split", 8, coarse, None)
    def prefill(q, sinks, slots, positions, layer, rings, own_rows):
        return sparse_attention(q, sinks, slots, positions, Rings(layer, rings, 128, window, own_rows), None)
    args = S((2048, 64, 512), jnp.bfloat16), S((64,), jnp.float32), ints(2048), ints(2048), ints()
    compile_for_h100(f"{name}-prefill", prefill, *args, pools(window, 1, 4000), ints(2048))
    def draft_block(q, sinks, slots, positions, layer, rings):
        return sparse_attention(q, sinks, slots, positions, Rings(layer, rings, 133, window), None)
    args = S((5, 64, 512), jnp.bfloat16), S((64,), jnp.float32), ints(5), ints(5), ints()
    compile_for_h100(f"{name}-draft-block", draft_block, *args, pools(window, 1, 138))
def bfloats(*shape): return S(shape, jnp.bfloat16)
rows = DenseRows(bfloats(2175, 512), bfloats(16384, 512), ints(2048, 512), ints(2048, 4), ints(2048), 128)
sums = S((1, 40, 64, 512), jnp.float32), S((1, 40, 2, 64), jnp.float32), S((64,), jnp.float32)
compile_for_h100("combine", combine, *sums, ints(1), S((32,), jnp.float32))
inv_freq = S((32,), jnp.float32)
q = bfloats(2048, 16, 512)
compile_for_h100("many", prefill_attention, q, S((16,), jnp.float32), rows, inv_freq)
def attend_layer(q, layer, sinks, rows, inv_freq):
    return prefill_attention(q, sinks, rows, inv_freq, layer=layer)
q, stack = bfloats(2048, 64, 512), S((LAYERS, 64), jnp.float32)
check_not_copied(compile_for_h100("many-stack", looped(attend_layer), q, stack, rows, inv_freq), stack)
""")
    spills = dict.fromkeys(re.findall(r"^kernel (\S+)", printed, re.MULTILINE), 0)
    name = None
    for line in printed.splitlines():
        if match := re.match(r"kernel (\S+)", line):
            name = match[1]
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills[name] = max(spills[name], *map(int, match.groups()))
    assert len(spills) == 33
    assert not any(spills[name] for name in spills if name.startswith(("many", "combine", "v41")))
    # A few addresses of the loading warpgroup, which stay in the L1 cache.
    assert max(spills.values()) <= 64, spills


def test_what_the_kernel_does_not_take_is_refused_before_launch():
    rng = np.random.default_rng(3)
    q, sinks, kv, *tokens = call(FORMATS["v4"], rng, [0], [9], rate=4, count=8, **SMALL)
    attend = functools.partial(ops.sparse_attention, implementation="interpret")
    with pytest.raises(NotImplementedError, match="q as bfloat16.*got float32"):
        attend(q.astype(jnp.float32), sinks, kv, *tokens)
    with pytest.raises(NotImplementedError, match="takes rows of 512 values, got 64 . 32"):
        attend(q, sinks, dataclasses.replace(kv, window=swa_view(FORMATS["v4"])), *tokens)
    _, _, other, *_ = call(FORMATS["per_entry"], rng, [0], [9], rate=4, count=8, **SMALL)
    with pytest.raises(NotImplementedError, match="takes one layout, .*got .*scale_block=64.* and .*scale_block=None"):
        attend(q, sinks, dataclasses.replace(kv, compressed=other.compressed), *tokens)
