"""The flush kernel against the jnp reference, bit for bit: interpreted on the CPU, as it is on the GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

from dsv4_jax import ops
from dsv4_jax.ops.flush import flush_together
from dsv4_jax.quant import kv_format
from tests.ops.kernels import registers
from tests.ops.pools import ints, poison, same_bytes


SLOTS, MAX_BLOCKS, LAYERS, BLOCK_TOKENS = 3, 4, 2, 128
# rate, overlap, channels: as released, but HCA windows of 32 rows: two groups of rows, four blocks of channels.
KINDS = {"csa": (4, True, 512), "index": (4, True, 128), "hca": (32, False, 512)}
RELEASED = KINDS | {"hca": (128, False, 512)}
FORMATS = ["v4", "per_entry"]


def setup(kind, fmt, *, kinds=KINDS, requests=SLOTS, spare=0, seed=0):
    """Views with random states and poisoned pools; every third block of a request is missing."""
    rate, overlap, dim = kinds[kind]
    fmt, rng = kv_format(fmt), np.random.default_rng(seed)
    ring, width = rate * (1 + overlap) + spare, dim * (1 + overlap)

    def floats(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 2, jnp.float32)

    state = ops.StateView(
        floats(LAYERS, requests, ring, width), floats(LAYERS, requests, ring, width), ints(1), overlap=overlap
    )
    table = rng.permutation(requests * MAX_BLOCKS).reshape(requests, MAX_BLOCKS)
    table[:, 2] = -1
    struct = fmt.index_struct(dim) if kind == "index" else fmt.row_struct(dim - 64, 64)
    view = ops.IndexerView if kind == "index" else ops.ClassicalView
    rows = poison(struct, LAYERS, requests * MAX_BLOCKS, BLOCK_TOKENS // rate)
    inv_freq = jnp.asarray(1.0 / 10000 ** (np.arange(0, 64, 2) / 64), jnp.float32)
    weights = ops.CompressorWeights(floats(rate, width), floats(dim), inv_freq, 1e-6)
    return state, view(rows, ints(0), ints(table), rate, fmt), weights, floats


@functools.partial(jax.jit, static_argnames="implementation")
def flush(*args, implementation):
    return ops.flush(*args, implementation=implementation)


def compare(implementation, kind, fmt, slots, positions, **options):
    state, pool, weights, floats = setup(kind, fmt, **options)
    inputs = floats(2, len(slots), state.kv.shape[-1])
    args = state, pool, inputs[0], inputs[1], weights, ints(slots), ints(positions)
    same_bytes(flush(*args, implementation="xla"), flush(*args, implementation=implementation))


def compare_together(implementation, fmt, slots, positions, **options):
    compressors = []
    for kind in ("csa", "index"):
        state, pool, weights, floats = setup(kind, fmt, **options)
        compressors.append((state, pool, *floats(2, len(slots), state.kv.shape[-1]), weights))

    @functools.partial(jax.jit, static_argnames="implementation")
    def together(*args, implementation):
        return flush_together(*args, implementation=implementation)

    args = compressors, ints(slots), ints(positions)
    same_bytes(together(*args, implementation="xla"), together(*args, implementation=implementation))


def steps(rate, spare):
    """Decode steps: for each slot where its tokens start, how many there are, and padding behind them."""
    start = st.one_of(st.integers(0, 520), st.integers(1, 5).map(lambda i: i * rate - 1))
    return st.lists(
        st.tuples(st.integers(0, SLOTS - 1), start, st.integers(1, 1 + spare), st.integers(0, 1)),
        min_size=1, max_size=SLOTS, unique_by=lambda run: run[0],
    )  # fmt: skip


def flatten(runs, size):
    tokens = [t for slot, start, n, pad in runs for t in [(slot, start + i) for i in range(n)] + [(-1, -1)] * pad]
    return zip(*(tokens + [(-1, -1)] * size)[:size], strict=True)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_interpreted(kind, fmt, data):
    """Any slots, positions, paddings and ring wraps; no two threads meet in one place."""
    spare = 1
    slots, positions = flatten(data.draw(steps(KINDS[kind][0], spare)), 4)
    interpreter.reset_gpu_interpret_mode_state()
    compare("interpret", kind, fmt, slots, positions, spare=spare)
    assert not interpreter.get_races().races_found


@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_windows_close(kind):
    """Without the luck of the draw: the first window, a later one, and two tokens of which the first closes one."""
    rate = KINDS[kind][0]
    positions = [rate - 1, 3 * rate - 1, 2 * rate - 1, 2 * rate]
    interpreter.reset_gpu_interpret_mode_state()
    compare("interpret", kind, "v4", [1, 0, 2, 2], positions, spare=1)
    assert not interpreter.get_races().races_found


@pytest.mark.parametrize("fmt", FORMATS)
def test_interpreted_together(fmt):
    """Both compressors of a CSA layer in one launch."""
    interpreter.reset_gpu_interpret_mode_state()
    compare_together("interpret", fmt, [1, 0, -1, 2, 2], [3, 66, -1, 11, 12], spare=1)
    assert not interpreter.get_races().races_found


def test_refusals_name_the_rule():
    state, pool, weights, floats = setup("csa", "v4")
    kv = floats(SLOTS + 1, 1024)
    args = state, pool, kv, kv, weights, ints([0] * 4), ints(range(4))
    with pytest.raises(NotImplementedError, match="at most 1 tokens each, got 4"):
        ops.flush(*args, implementation="interpret")
    one = state, pool, kv[:1], kv[:1], weights, ints([0]), ints([0])
    with pytest.raises(NotImplementedError, match="bfloat16, not float32"):
        ops.flush(*one, dtype=jnp.float32, implementation="interpret")
    state, pool, weights, _ = setup("csa", "plain")
    with pytest.raises(NotImplementedError, match="quantised pools"):
        ops.flush(state, pool, *one[2:4], weights, *one[5:], implementation="interpret")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 256])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("kind", RELEASED)
def test_on_the_gpu(kind, fmt, tokens):
    """The released shapes: every window closes; requests at any phase; two tokens a request."""
    rate, rng = RELEASED[kind][0], np.random.default_rng(1)
    options = dict(kinds=RELEASED, requests=tokens, spare=1)
    slots = rng.permutation(tokens)
    compare("mosaic_gpu", kind, fmt, slots, rng.integers(1, 4 * 128 // rate, tokens) * rate - 1, **options)
    compare("mosaic_gpu", kind, fmt, slots, rng.integers(-1, 500, tokens), **options)
    start = rng.integers(0, 500, tokens)
    pairs = np.stack([start, start + 1], axis=1)
    compare("mosaic_gpu", kind, fmt, np.repeat(slots, 2), pairs.reshape(-1), **options)
    if kind == "csa":
        compare_together("mosaic_gpu", fmt, slots, rng.integers(1, 128, tokens) * rate - 1, **options)


@pytest.mark.aot
def test_compiles_for_h100_in_place_and_without_spills():
    used = registers("""
import jax, jax.numpy as jnp
from dsv4_jax.ops.flush import _flush_kernel
from tests.ops import test_flush_kernel as tests
S = jax.ShapeDtypeStruct
for fmt in tests.FORMATS:
    for kinds in (("csa", "index"), ("hca",)):
        compressors = []
        for kind in kinds:
            state, pool, weights, _ = tests.setup(kind, fmt, kinds=tests.RELEASED)
            x = S((3, state.kv.shape[-1]), jnp.float32)
            compressors.append((state, pool, x, x, weights))
        def flush(*args):
            return _flush_kernel(*args, jnp.bfloat16, interpret=False)
        args = jax.tree.map(lambda x: S(x.shape, x.dtype), (compressors, S((3,), jnp.int32), S((3,), jnp.int32)))
        compiled = compile_for_h100(f"{fmt}-{kinds[0]}", flush, *args, donate_argnums=0)
        assert " copy(" not in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
""")
    # Three blocks of 128 threads share a multiprocessor's 65536 registers.
    assert len(used) == 4 and max(used.values()) <= 168, used
