"""The gathers' kernel against the reference: interpreted, on a GPU, and compiled for one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsv4_jax import ops
from dsv4_jax.quant import Rows, kv_format
from tests.ops.pools import classical_view, ints, poison, swa_view
from tests.pallas_kernels.kernels import FORMATS, NOPE, ROPE, ROW_FORMATS, check, registers


def bytes_of(codec, rng, *leading):
    """A pool of every kind of stored row, poisoned ones included; scales lie in the range that formats write."""
    struct = codec.struct
    codes = rng.integers(0, 256, (*leading, *struct.nope.shape), np.uint8)
    if codec.layout.codes == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0x7E  # NaN is never stored
    rope = struct.rope and jnp.asarray(rng.standard_normal((*leading, *struct.rope.shape)), jnp.bfloat16)
    width = struct.scale.shape[0]
    if codec.layout.codes == "e2m1":
        scales = rng.integers(1, 0x7F, (*leading, width), np.uint8)
    elif struct.scale.dtype == jnp.uint8:
        scales = rng.integers(105, 145, (*leading, width), np.uint8)
        scales[..., codec.layout.nope_dim // codec.layout.scale_block :] = 0
    else:
        scales = np.float32(10) ** rng.uniform(-6, 6, (*leading, 1)).astype(np.float32)
    rows = Rows(jnp.asarray(codes), rope, jnp.asarray(scales))
    poisoned = jnp.asarray(rng.random(leading) < 0.1)[..., None]
    rows = jax.tree.map(lambda good, bad: jnp.where(poisoned, bad, good), rows, poison(struct, *leading))
    return rows, np.asarray(poisoned)[..., 0]


def paged(fmt, rng, *, layers, blocks, entries, slots, max_blocks, rate=4):
    """A view whose requests own random blocks, some none; the block table never names a poisoned block."""
    codec = fmt.entries(NOPE, ROPE)
    rows, poisoned = bytes_of(codec, rng, layers, blocks, entries)
    clean = np.flatnonzero(~poisoned.any((0, 2)))
    table = np.full((slots, max_blocks), -1)
    if clean.size:
        table = np.where(rng.random(table.shape) < 0.8, rng.choice(clean, table.shape), -1)
    return ops.ClassicalView(rows, ints(layers - 1), ints(table), rate, codec)


def rings(fmt, rng, *, layers, slots, ring, window):
    codec = fmt.window(NOPE, ROPE)
    rows, poisoned = bytes_of(codec, rng, layers, slots, ring)
    view = ops.SWAView(rows, ints(layers - 1), window, codec)
    return view, np.flatnonzero(~poisoned.any((0, 2)))


CASES = dict(tokens=st.sampled_from([1, 5]), count=st.sampled_from([1, 7, 19]), seed=st.integers(0, 999))
SMALL = dict(layers=2, blocks=40, entries=2, slots=3, max_blocks=3)
EXAMPLES = settings(max_examples=5, deadline=None)


@pytest.mark.parametrize("fmt", ROW_FORMATS.values(), ids=ROW_FORMATS)
@given(**CASES)
@EXAMPLES
def test_by_index_interpreted(fmt, tokens, count, seed):
    rng = np.random.default_rng(seed)
    slots = ints(rng.integers(-1, 3, tokens))
    indices = ints(rng.integers(-1, 8, (tokens, count)))
    check(ops.gather_compressed_kv, "interpret", paged(fmt, rng, **SMALL), indices, slots)


@pytest.mark.parametrize("fmt", ROW_FORMATS.values(), ids=ROW_FORMATS)
@given(tokens=CASES["tokens"], rate=st.sampled_from([4, 16]), seed=CASES["seed"])
@EXAMPLES
def test_all_interpreted(fmt, tokens, rate, seed):
    rng = np.random.default_rng(seed)
    slots = ints(rng.integers(-1, 3, tokens))
    positions = ints(rng.integers(-1, 7 * rate, tokens))
    check(ops.gather_all_compressed_kv, "interpret", paged(fmt, rng, rate=rate, **SMALL), slots, positions)


def visible(view, slots, positions, *, implementation):
    """What is visible of `gather_all_compressed_kv` when it need not write the rest."""
    got = ops.gather_all_compressed_kv(view, slots, positions, only_visible=True, implementation=implementation)
    lengths = jnp.where(slots >= 0, ops.valid_lengths(positions, view.compress_rate), 0)
    seen = jnp.arange(view.max_entries)[None, :] < lengths[:, None]
    return jnp.where(seen[..., None], got[0], 0), got[1] & seen


def test_only_visible_interpreted():
    """38 rows of a token: blocks of 8 that two tokens share are written, others that nobody sees are left as they are.

    In the interpreter that is NaN.
    """
    view = paged(FORMATS["v4"], np.random.default_rng(0), **SMALL | dict(max_blocks=19))
    slots = ints([1, -1, 0])
    positions = ints([11, 50, 23])
    check(visible, "interpret", view, slots, positions)
    gather = functools.partial(ops.gather_all_compressed_kv, only_visible=True, implementation="interpret")
    kv, _ = jax.jit(gather)(view, slots, positions)
    assert np.isnan(np.asarray(kv[:, 18:24], np.float32)).all()


@pytest.mark.parametrize("fmt", ROW_FORMATS.values(), ids=ROW_FORMATS)
@given(tokens=CASES["tokens"], spare=st.sampled_from([0, 2]), seed=CASES["seed"])
@EXAMPLES
def test_window_interpreted(fmt, tokens, spare, seed):
    rng = np.random.default_rng(seed)
    view, clean = rings(fmt, rng, layers=2, slots=9, ring=5 + spare, window=5)
    slots = ints(rng.choice([-1, *clean], tokens))
    positions = ints(rng.integers(-1, 20, tokens))
    check(ops.gather_swa_kv, "interpret", view, slots, positions)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ROW_FORMATS.values(), ids=ROW_FORMATS)
@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (3, 5), (8, 512), (64, 512)])
def test_on_gpu(fmt, tokens, count):
    rng = np.random.default_rng(tokens)
    view = paged(fmt, rng, layers=3, blocks=1024, entries=4, slots=70, max_blocks=150)
    slots = rng.integers(-1, 70, tokens)
    indices = ints(rng.integers(-1, 610, (tokens, count)))
    check(ops.gather_compressed_kv, "mosaic_gpu", view, indices, ints(slots))
    for op in (ops.gather_all_compressed_kv, visible):
        check(op, "mosaic_gpu", view, ints(slots), ints(rng.integers(-1, 2500, tokens)))
    swa, clean = rings(fmt, rng, layers=3, slots=900, ring=3, window=3)
    slots = rng.choice([-1, *clean], tokens)
    check(ops.gather_swa_kv, "mosaic_gpu", swa, ints(slots), ints(rng.integers(-1, 1 << 20, tokens)))


def by_request(implementation, view):
    def one(indices, slots):
        return ops.gather_compressed_kv(view, indices, slots, implementation=implementation)

    return jax.vmap(one)


def test_under_vmap_calls_run_one_after_another():
    """A kernel that is batched gives wrong rows on a GPU."""
    view = paged(FORMATS["v4"], np.random.default_rng(0), **SMALL)
    args = ints([[[0, 1]], [[2, -1]]]), ints([[2], [0]])
    text = str(jax.make_jaxpr(by_request("interpret", view))(*args))
    assert "length=2" in text
    jax.tree.map(np.testing.assert_array_equal, by_request("interpret", view)(*args), by_request("xla", view)(*args))


@pytest.mark.gpu
def test_under_vmap_on_gpu():
    rng = np.random.default_rng(1)
    view = paged(FORMATS["v4"], rng, layers=3, blocks=1024, entries=4, slots=70, max_blocks=150)
    args = ints(rng.integers(-1, 610, (32, 1, 512))), ints(rng.integers(-1, 70, (32, 1)))
    jax.tree.map(np.testing.assert_array_equal, by_request("mosaic_gpu", view)(*args), by_request("xla", view)(*args))


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import Paged, Rings, gather as g
from tests.pallas_kernels.kernels import NOPE, ROPE, ROW_FORMATS, row_pools, window_pools
S = jax.ShapeDtypeStruct
def ints(*shape): return S(shape, jnp.int32)
for name, fmt in ROW_FORMATS.items():
    codec = fmt.entries(NOPE, ROPE)
    ring_layout, rings = window_pools(fmt, 3, 256, 128)
    def run(f, *args, **options):
        compiled = compile_for_h100(f"{name}-{f.__name__}", functools.partial(f, **options), *args)
        assert compiled.memory_analysis().temp_size_in_bytes < 1024
    paged, layout = (ints(), ints(64, 256), row_pools(codec, 3, 8192, 32)), codec.layout
    run(g.gather_compressed_kv, ints(64), Paged(*paged, ints(64, 512), 4, layout))
    run(g.gather_all_compressed_kv, ints(32), ints(32), Paged(*paged, None, 4, layout), only_visible=True)
    run(g.gather_swa_kv, ints(256), ints(256), Rings(ints(), rings, 128, ring_layout))
""")
    assert len(used) == 9 and max(used.values()) <= 128, used


def test_what_the_kernel_does_not_take_is_refused_before_launch():
    fmt = FORMATS["v4"]
    codec = fmt.window(NOPE, ROPE)
    view = ops.SWAView(poison(codec.struct, 1, 1, 4), ints(0), 4, codec)
    call = jax.tree_util.Partial(ops.gather_swa_kv, implementation="interpret")
    with pytest.raises(NotImplementedError, match="writes bfloat16, not dtype=float32"):
        call(view, ints([0]), ints([0]), dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="new_kv must be None"):
        call(view, ints([0]), ints([0]), new_kv=jnp.ones((1, 512), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="takes rows of 512 values, got 64 . 32"):
        call(swa_view(fmt), ints([0]), ints([0]))
    plain = classical_view(kv_format("plain", jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="formats 'v4', 'v41' and 'per_entry'"):
        ops.gather_compressed_kv(plain, ints([[0]]), ints([0]), implementation="interpret")
