"""The flush kernel against the jnp reference, bit for bit: interpreted on the CPU, as it is on the GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsv4_jax import ops
from dsv4_jax.ops.flush import _flush_kernel
from dsv4_jax.quant import kv_format
from dsv4_jax.quant.fp4 import unpack_fp4
from pallas_kernels.flush.long_windows import LongWindowPlan
from pallas_kernels.flush.operands import CompressorOperands, Config
from pallas_kernels.runtime.hardware import SHARED_BYTES
from tests.ops.pools import ints, poison, same_bytes
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.stacks import check_layers
from tests.quant.test_oracle import load


SLOTS = 3
MAX_BLOCKS = 4
LAYERS = 2
BLOCK_TOKENS = 128
# rate, overlap, channels. Interpreted: few channels, and HCA windows of 32 rows.
SMALL = {"csa": (4, True, 128), "index": (4, True, 128), "hca": (32, False, 128)}
RELEASED = {"csa": (4, True, 512), "index": (4, True, 128), "hca": (128, False, 512)}
LAYERS_OF = {"CSA": ("csa", "index"), "HCA": ("hca",)}
FORMATS = ["v4", "per_entry"]


def setup(kind, fmt, *, kinds=SMALL, requests=SLOTS, spare=0, seed=0):
    """Views with random states and poisoned pools; every third block of a request is missing."""
    rate, overlap, dim = kinds[kind]
    fmt = kv_format(fmt)
    rng = np.random.default_rng(seed)
    ring = rate * (1 + overlap) + spare
    width = dim * (1 + overlap)

    def floats(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 2, jnp.float32)

    arrays = floats(LAYERS, requests, ring, width), floats(LAYERS, requests, ring, width)
    state = ops.StateView(*arrays, ints(1), rate, overlap)
    table = rng.permutation(requests * MAX_BLOCKS).reshape(requests, MAX_BLOCKS)
    table[:, 2] = -1
    codec = fmt.keys(dim) if kind == "index" else fmt.entries(dim - 64, 64)
    view = ops.IndexerView if kind == "index" else ops.ClassicalView
    rows = poison(codec.struct, LAYERS, requests * MAX_BLOCKS, BLOCK_TOKENS // rate)
    inv_freq = jnp.asarray(1.0 / 10000 ** (np.arange(0, 64, 2) / 64), jnp.float32)
    weights = ops.CompressorWeights(floats(rate, width), floats(dim), inv_freq, 1e-6)
    return state, view(rows, ints(0), ints(table), rate, codec), weights, floats


@functools.partial(jax.jit, static_argnames=("max_query_tokens", "implementation", "config"))
def flush(compressors, slots, positions, *, max_query_tokens, implementation, config=None):
    args = (compressors, slots, positions)
    options = dict(max_query_tokens=max_query_tokens)
    if config is not None:
        return _flush_kernel(*args, dtype=jnp.bfloat16, interpret=True, config=config, **options)
    return ops.flush(*args, implementation=implementation, **options)


def compare(implementation, layer, fmt, slots, positions, *, max_query_tokens=None, config=None, **options):
    """All compressors of a layer in one call."""
    compressors = []
    for kind in LAYERS_OF[layer]:
        state, pool, weights, floats = setup(kind, fmt, **options)
        inputs = floats(2, len(slots), state.kv.shape[-1])
        compressors.append(ops.CompressorInputs(state, pool, *inputs, weights))
    args = compressors, ints(slots), ints(positions)
    expected = flush(*args, max_query_tokens=None, implementation="xla")
    options = dict(max_query_tokens=max_query_tokens, implementation=implementation, config=config)
    same_bytes(expected, flush(*args, **options))


write_entries = jax.jit(ops.write_entries, static_argnames="implementation")
BOTH = ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("kind", ["csa", "index"])
def test_written_entries_of_v41_are_those_of_the_release(implementation, kind):
    """They include ties that a product with the reciprocal of the scale misses, and scales at the floor."""
    golden = load("v41_key_mxfp4_68" if kind == "index" else "v41_entry_fp4_288")
    exact = np.flatnonzero(~golden["ftz_sensitive"]) if kind == "index" else np.arange(len(golden["x"]))
    _, pool, *_ = setup(kind, "v41", kinds=RELEASED, requests=3)
    pool = dataclasses.replace(pool, block_table=ints(np.arange(12).reshape(3, 4)))
    n = len(golden["x"])
    expected = np.array(unpack_fp4(jnp.asarray(golden["data"])))
    rotated = np.arange(expected.shape[1]) >= expected.shape[1] - 64
    # A sum with a zero may lose the sign of -0. Subnormal values may be flushed to zero.
    signless = (np.abs(golden["x"]) < 2.0**-126) & rotated
    closed = ops.ClosedWindows(jnp.asarray(golden["x"], jnp.bfloat16), ints(np.arange(n) % 3), ints(np.arange(n) // 3))
    # A frequency of 0 rotates by no angle.
    got = write_entries(pool, closed, jnp.zeros(32), implementation=implementation)
    codes, scale = jax.tree.leaves(got.rows)
    places = [(0, r % 3 * 4 + r // 3 // 32, r // 3 % 32) for r in exact]
    got = np.stack([unpack_fp4(codes[p]) for p in places])
    np.testing.assert_array_equal(*(np.where(signless[exact], x & 7, x) for x in (got, expected[exact])))
    same_bytes([scale[p] for p in places], list(golden["scale"][exact]))


def check_written(implementation, kind, fmt, n, kinds):
    """Vectors in no order, some of no window, no slot, no block or past the table; the other rows of the pools stay."""
    rng = np.random.default_rng(n)
    _, pool, weights, _ = setup(kind, fmt, kinds=kinds, requests=max(n, SLOTS))
    dim = kinds[kind][2]
    size = 10.0 ** rng.integers(-6, 6, (n, dim // 16, 1))
    values = jnp.asarray((rng.standard_normal((n, dim // 16, 16)) * size).reshape(n, dim), jnp.bfloat16)
    entries = rng.integers(-1, 5 * BLOCK_TOKENS // kinds[kind][0], n)
    closed = ops.ClosedWindows(values, ints(rng.permutation(n + 1)[:n] - 1), ints(entries))
    expected = write_entries(
        *jax.device_put((pool, closed, weights.inv_freq), jax.devices("cpu")[0]), implementation="xla"
    )
    same_bytes(expected, write_entries(pool, closed, weights.inv_freq, implementation=implementation))


@pytest.mark.parametrize(("kind", "fmt"), [("csa", "v4"), ("csa", "v41"), ("csa", "per_entry"), ("index", "v41")])
def test_written_entries_interpreted(kind, fmt):
    check_written("interpret", kind, fmt, 7, SMALL)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["csa", "index", "one"])
@pytest.mark.parametrize("fmt", [*FORMATS, "v41"])
@pytest.mark.parametrize("n", [1, 64, 4500])
def test_written_entries_on_the_gpu(kind, fmt, n):
    check_written("mosaic_gpu", kind, fmt, n, RELEASED | dict(csa=(2, False, 512), one=(1, False, 512)))


pool_windows = jax.jit(ops.pool_windows, static_argnames=("max_query_tokens", "implementation"))
# rate, overlap, channels; "pairs" and "single" are those of DeepSeek-V4.1.
HALVES = {"csa": (4, True, 512), "pairs": (2, False, 512), "single": (1, False, 512)}


def check_pooled(implementation, kind, slots, positions, *, kinds=HALVES, requests=SLOTS, most=None, spare=0):
    """The vectors of windows, and the states, bit for bit; vectors of no window are not looked at."""
    state, _, weights, floats = setup(kind, "v41", kinds=kinds, requests=requests, spare=spare)
    kv, gate = floats(2, len(slots), state.kv.shape[-1])
    if kind != "csa":
        weights = dataclasses.replace(weights, position_bias=None, eps=1e-20)
    if kind == "single":
        state = dataclasses.replace(state, kv=None, gate=None)
        gate = None
    args = state, kv, gate, weights, ints(slots), ints(positions)
    cpu = jax.device_put(args, jax.devices("cpu")[0])
    expected, expected_state = pool_windows(*cpu, max_query_tokens=None, implementation="xla")
    got, got_state = pool_windows(*args, max_query_tokens=most, implementation=implementation)
    same_bytes((expected.slots, expected.entries, expected_state), (got.slots, got.entries, got_state))
    closes = expected.entries >= 0
    assert closes.any()
    same_bytes(expected.values[closes], np.asarray(got.values)[closes])


@pytest.mark.parametrize("kind", [pytest.param("csa", marks=pytest.mark.slow), "pairs", "single"])
@pytest.mark.parametrize("prefill", [False, True])
def test_pooled_windows_interpreted(kind, prefill):
    """One launch, and for windows of several tokens two: their rows lie in the ring, in the call, or in both."""
    rate, overlap, _ = HALVES[kind]
    kinds = {kind: (rate, overlap, 128)}
    if prefill:
        # 25 tokens of 3 requests complete at most 25 // rate + 3 windows, so windows of several tokens are compacted.
        runs = (2, 5, 11, 1), (0, 7, 8, 0), (1, rate - 1, 3, 1)
        check_pooled("interpret", kind, *flatten(runs, 25), kinds=kinds, spare=1)
    else:
        for start in range(2 * rate):
            runs = (1, start + rate, 2, 1), (0, 2 * rate - 1, 1, 0), (2, 0, 1, 0)
            check_pooled("interpret", kind, *flatten(runs, 5), kinds=kinds, most=2, spare=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HALVES)
@pytest.mark.parametrize("tokens", [1, 20, 256, 600])
def test_pooled_windows_of_a_decode_on_the_gpu(kind, tokens):
    rng = np.random.default_rng(3)
    slots = rng.permutation(tokens)
    positions = rng.integers(-1, 500, tokens)
    positions[0] = 7
    check = functools.partial(check_pooled, "mosaic_gpu", kind, requests=tokens)
    check(slots, positions, most=1)
    start = rng.integers(0, 500, tokens)
    check(np.repeat(slots, 2), np.stack([start, start + 1], axis=1).reshape(-1), most=2, spare=1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", HALVES)
def test_pooled_windows_of_a_prefill_on_the_gpu(kind):
    rng = np.random.default_rng(4)
    runs = [(slot, rng.integers(0, 99), rng.choice([1, 2, 3, 60, 257]), rng.integers(0, 3)) for slot in range(64)]
    check_pooled("mosaic_gpu", kind, *flatten(runs, 8192), requests=64)
    check_pooled("mosaic_gpu", kind, *flatten([(5, 3, 8000, 0)], 8192), requests=64)


def runs(rate, longest):
    """For each slot where its tokens start, how many there are, and padding behind them; slot 0 closes a window."""
    start = st.one_of(st.just(0), st.integers(0, 520), st.integers(1, 5).map(lambda i: i * rate - 1))
    tokens = st.one_of(st.integers(1, longest), st.just(longest))
    closing = st.tuples(st.just(0), st.integers(1, 5).map(lambda i: i * rate - 1), tokens, st.integers(0, 1))
    others = [st.tuples(st.just(slot), start, tokens, st.integers(0, 1)) for slot in range(1, SLOTS)]
    return st.tuples(closing, *others).flatmap(st.permutations)


def flatten(runs, size):
    """slots and positions of `size` tokens, those that do not fit left out."""
    tokens = [t for slot, start, n, pad in runs for t in [(slot, start + i) for i in range(n)] + [(-1, -1)] * pad]
    return zip(*(tokens + [(-1, -1)] * size)[:size], strict=True)


@pytest.mark.parametrize(("layer", "spare"), [("CSA", 1), ("HCA", 0)])
@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_interpreted_decode(layer, spare, data):
    """One launch. Any slots, positions, paddings and ring wraps; no two threads meet in one place."""
    drawn = data.draw(runs(SMALL[LAYERS_OF[layer][0]][0], 1 + spare))
    # Four blocks share a window, and pool two chunks each; two clusters take three tokens each.
    config = Config(cluster_sizes=((6, 4),), long_blocks=8)
    compare("interpret", layer, "v4", *flatten(drawn, 6), max_query_tokens=1 + spare, spare=spare, config=config)


@pytest.mark.parametrize("layer", LAYERS_OF)
@given(data=st.data())
@settings(max_examples=2, deadline=None)
def test_interpreted_prefill(layer, data):
    """Two launches, few workers: runs of any length, which reach into the ring, lie in the call, and overwrite it."""
    rate = SMALL[LAYERS_OF[layer][0]][0]
    drawn = data.draw(runs(rate, 2 * rate + 3))
    # Whole windows in one block, at most two of them in each of two. HCA: four warpgroups, with a quarter of the
    # channels each.
    config = Config(cluster_sizes=(), long_blocks=2, short_workers=5, state_workers=7)
    kinds = SMALL | dict(hca=(32, False, 512))
    slots, positions = flatten(drawn, 3 * rate + 2)
    compare("interpret", layer, "per_entry", slots, positions, spare=1, kinds=kinds, config=config)


@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("layer", "most"), [("CSA", 2), *(pytest.param(*x, marks=pytest.mark.slow) for x in (("CSA", None), ("HCA", 2)))]
)
def test_layers_of_a_stack(layer, most, implementation):
    """One launch, and two: each layer adds its position biases to rows of the call, and stores them with its norm."""
    kinds = RELEASED if implementation == "mosaic_gpu" else SMALL
    start = kinds[LAYERS_OF[layer][0]][0] - 2
    slots = ints([0, 0, 1, -1])
    positions = ints([start, start + 1, start + 1, -1])
    given = []
    weights = []
    for kind in LAYERS_OF[layer]:
        state, pool, own, floats = setup(kind, "v4", kinds=kinds, spare=1)
        given.append((state, pool, *floats(2, 4, state.kv.shape[-1]), own))
        weights.append((own.position_bias, own.norm_weight))

    def draw(layer):
        return jax.tree.map(lambda weight: jnp.roll(weight, layer, axis=-1), weights)

    def call(weights, views, implementation):
        inputs = []
        for view, (_, _, kv, gate, own), (position_bias, norm_weight) in zip(views, given, weights, strict=True):
            own = dataclasses.replace(own, position_bias=position_bias, norm_weight=norm_weight)
            inputs.append(ops.CompressorInputs(*view, kv, gate, own))
        return ops.flush(inputs, slots, positions, max_query_tokens=most, implementation=implementation), None

    check_layers(implementation, call, [draw(layer) for layer in range(3)], [tuple(arrays[:2]) for arrays in given])


def test_refusals_name_the_rule():
    state, pool, weights, floats = setup("csa", "v4")
    kv = floats(1, 256)
    call = functools.partial(ops.flush, slots=ints([0]), positions=ints([0]), implementation="interpret")
    with pytest.raises(NotImplementedError, match="bfloat16, not dtype=float32"):
        call([ops.CompressorInputs(state, pool, kv, kv, weights)], dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match=r"gate as float32\[1, 256\], got bfloat16\[1, 256\]"):
        call([ops.CompressorInputs(state, pool, kv, kv.astype(jnp.bfloat16), weights)])
    halves = dataclasses.replace(state, gate=state.gate.astype(jnp.bfloat16))
    with pytest.raises(NotImplementedError, match=r"state gates as float32"):
        call([ops.CompressorInputs(halves, pool, kv, kv, weights)])
    state, pool, weights, _ = setup("csa", "plain")
    with pytest.raises(NotImplementedError, match="formats 'v4', 'v41' and 'per_entry'"):
        call([ops.CompressorInputs(state, pool, kv, kv, weights)])


@pytest.mark.parametrize("dim", [128, 256])
def test_a_gpu_leaves_short_rows_to_the_reference(dim):
    """Mosaic GPU does not compile their stores; keys of 128 channels it does."""
    state, pool, weights, floats = setup("csa", "v4", kinds=dict(csa=(4, True, dim)))
    kv = floats(1, 2 * dim)
    args = [ops.CompressorInputs(state, pool, kv, kv, weights)], ints([0]), ints([3])
    with pytest.raises(NotImplementedError, match=f"takes rows of 512 values on a GPU, got {dim - 64} . 64"):
        _flush_kernel(*args, dtype=jnp.bfloat16, max_query_tokens=1, interpret=False)
    with ops.use_implementation("mosaic_gpu"):
        left = jax.jit(ops.flush)(*args)
    same_bytes(left, flush(*args, max_query_tokens=None, implementation="xla"))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 20, 256, 300])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layer", LAYERS_OF)
def test_decode_on_the_gpu(layer, fmt, tokens):
    """The released shapes: every window closes; requests at any phase; two tokens a request. HCA: 8, 4, 2, 1 blocks."""
    rate = RELEASED[LAYERS_OF[layer][0]][0]
    rng = np.random.default_rng(1)
    check = functools.partial(compare, "mosaic_gpu", layer, fmt, kinds=RELEASED, requests=tokens)
    slots = rng.permutation(tokens)
    check(slots, rng.integers(1, 4 * 128 // rate, tokens) * rate - 1, max_query_tokens=1)
    check(slots, rng.integers(-1, 500, tokens), max_query_tokens=1)
    start = rng.integers(0, 500, tokens)
    pairs = np.stack([start, start + 1], axis=1)
    check(np.repeat(slots, 2), pairs.reshape(-1), max_query_tokens=2, spare=1)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("layer", LAYERS_OF)
def test_prefill_on_the_gpu(layer, fmt):
    """8192 tokens: long runs, runs shorter than a window at any phase, single tokens, padding between them."""
    rng = np.random.default_rng(2)
    runs = []
    for slot in rng.permutation(64):
        length = rng.choice([1, 2, 3, 7, 60, 130, 257, 500])
        runs.append((slot, rng.integers(0, 512 - length), length, rng.integers(0, 3)))
    compare("mosaic_gpu", layer, fmt, *flatten(runs, 8192), kinds=RELEASED, requests=64)
    eight = [(slot, 0, 512, 0) for slot in rng.permutation(16)]
    compare("mosaic_gpu", layer, fmt, *flatten(eight, 8192), kinds=RELEASED, requests=16)


@pytest.mark.aot
def test_compiles_for_h100_in_place_and_without_spills():
    used = registers("""
import dataclasses, jax, jax.numpy as jnp
from dsv4_jax.ops.flush import _flush_kernel
from dsv4_jax.quant import LayerSlice
from tests.pallas_kernels import test_flush as tests
from tests.pallas_kernels.stacks import LAYERS, check_not_copied, looped
S = jax.ShapeDtypeStruct
for layer, kinds in tests.LAYERS_OF.items():
    for fmt, tokens, most in (("v4", 3, 1), ("v4", 256, 1), ("per_entry", 256, 2), ("v4", 8192, None)):
        compressors = []
        for kind in kinds:
            state, pool, weights, _ = tests.setup(kind, fmt, kinds=tests.RELEASED, spare=1)
            x = S((tokens, state.kv.shape[-1]), jnp.float32)
            compressors.append((state, pool, x, x, weights))
        def flush(*args):
            return _flush_kernel(*args, dtype=jnp.bfloat16, max_query_tokens=most, interpret=False)
        args = compressors, S((tokens,), jnp.int32), S((tokens,), jnp.int32)
        args = jax.tree.map(lambda x: S(x.shape, x.dtype), args)
        compiled = compile_for_h100(f"{layer}-{fmt}-{tokens}", flush, *args, donate_argnums=0)
        assert " copy(" not in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
        def flush_layer(views, layer, stacks, inputs, *tokens):
            compressors = []
            for view, (x, own), (position_bias, norm_weight) in zip(views, inputs, stacks):
                bias, norm = LayerSlice(None, position_bias, layer), LayerSlice(None, norm_weight, layer)
                own = dataclasses.replace(own, position_bias=bias, norm_weight=norm)
                compressors.append((*view, x, x, own))
            return flush(compressors, *tokens)
        compressors, *tokens = args
        views, inputs, stacks = [], [], []
        for state, pool, x, _, own in compressors:
            views.append((state, pool))
            inputs.append((x, own))
            stacks.append([S((LAYERS, *x.shape), x.dtype) for x in (own.position_bias, own.norm_weight)])
        name = f"{layer}-{fmt}-{tokens[0].size}-stack"
        compiled = compile_for_h100(name, looped(flush_layer), views, stacks, inputs, *tokens, donate_argnums=0)
        check_not_copied(compiled, *jax.tree.leaves(stacks))
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 12, "copies a pool"
""")
    # Two blocks of 256 threads share a multiprocessor's 65536 registers; one that splits long windows has it alone.
    csa = [registers for name, registers in used.items() if "CSA" in name]
    assert len(used) == 16 and max(csa) <= 128 and max(used.values()) <= 192, used


@pytest.mark.aot
def test_the_halves_compile_for_h100_in_place_and_without_spills():
    used = registers("""
import dataclasses, re, jax, jax.numpy as jnp
from dsv4_jax import ops
from dsv4_jax.ops.flush import _pool_windows_kernel, _write_entries_kernel
from tests.pallas_kernels import test_flush as tests
S = jax.ShapeDtypeStruct
def compile(name, function, *args, donate):
    args = jax.tree.map(lambda x: S(x.shape, x.dtype), args)
    compiled = compile_for_h100(name, function, *args, donate_argnums=donate)
    assert not re.findall("= (?:f32|u8).* copy[(]", compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
for n, most in ((3, 1), (256, 1), (8192, None)):
    tokens = S((n,), jnp.int32), S((n,), jnp.int32)
    for kind in ("pairs", "single"):
        state, _, weights, _ = tests.setup(kind, "v41", kinds=tests.HALVES)
        if kind == "single":
            state = dataclasses.replace(state, kv=None, gate=None)
        weights = dataclasses.replace(weights, position_bias=None)
        x = S((n, 512), jnp.float32)
        def pool(*args):
            return _pool_windows_kernel(*args, dtype=jnp.bfloat16, max_query_tokens=most, interpret=False)
        compile(f"{kind}-{n}", pool, state, x, None if kind == "single" else x, weights, *tokens, donate=0)
    for kind in ("csa", "index"):
        _, pool, weights, _ = tests.setup(kind, "v41", kinds=tests.RELEASED)
        def write(*args):
            return _write_entries_kernel(*args, interpret=False)
        closed = ops.ClosedWindows(S((n, pool.codec.dim), jnp.bfloat16), *tokens)
        compile(f"{kind}-{n}", write, pool, closed, weights.inv_freq, donate=0)
""")
    assert len(used) == 12 and max(used.values()) <= 128, used


@pytest.mark.parametrize("most", [1, 4, 12, None])
def test_long_windows_find_room(most):
    """Whatever the call: the tokens are shared out among blocks that all run at once."""
    state, pool, weights, floats = setup("hca", "v4", kinds=RELEASED, requests=1)
    for tokens in (1, 8, 64, 256, 1000, 4000):
        kv = jnp.zeros((tokens, 512), jnp.float32)
        c = CompressorOperands(kv, kv, weights.position_bias, weights.norm_weight, state_kv=state.kv, rate=128)
        plan = LongWindowPlan.for_call(Config(), c, tokens, tokens if most is None else most)
        assert plan.workers * plan.share >= tokens > (plan.workers - 1) * plan.share
        assert plan.blocks * plan.workers <= 132 and plan.chunks % plan.stages == 0
        assert 4 * sum(plan.shared.values()) <= SHARED_BYTES


@pytest.mark.parametrize("blocks", [0, 6])
def test_a_config_divides_the_chunks_of_a_window(blocks):
    """Otherwise a block would leave chunks out."""
    with pytest.raises(ValueError, match=r"cluster_sizes\[1\]\[1\]=. must divide 8, the chunks of a long window"):
        Config(cluster_sizes=((14, 8), (30, blocks)))
