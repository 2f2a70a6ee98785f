"""The top-k kernel against the reference: its protocol in the interpreter, the kernel on a GPU and compiled for one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from dsv4_jax import ops
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.indexer_topk.indexer_topk import select
from pallas_kernels.indexer_topk.radix_plan import RadixPlan
from tests.ops.pools import ints, same_bytes
from tests.pallas_kernels.indexer_topk.interpreted_radix_select import InterpretedRadixSelect
from tests.pallas_kernels.kernels import check, registers


# Rows that are hard on a search by digits: what tells the best scores apart lies in the first bits, the last or none.
ROWS = dict(
    normal=lambda rng, n: rng.standard_normal(n),
    equal=lambda rng, n: np.full(n, -0.75),
    zeros=lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    subnormal=lambda rng, n: rng.integers(-20, 20, n) * 2.0**-149,
    one_hot=lambda rng, n: np.arange(n) == n // 3,
    holes=lambda rng, n: np.where(rng.random(n) < 0.7, -np.inf, rng.standard_normal(n)),
    few=lambda rng, n: np.where(rng.random(n) < 5 / n, rng.standard_normal(n), -np.inf),
    none=lambda rng, n: np.full(n, -np.inf),
    up=lambda rng, n: np.arange(n),
    down=lambda rng, n: -np.arange(n),
    shared=lambda rng, n: np.round(2 * rng.standard_normal(n)),
    close=lambda rng, n: 1 + rng.integers(0, 99, n) * 2.0**-23,
    infinite=lambda rng, n: np.where(rng.random(n) < 0.5, np.inf, rng.standard_normal(n)),
    bits=lambda rng, n: np.nan_to_num(rng.integers(-(1 << 31), 1 << 31, n).astype(np.int32).view(np.float32)),
)


def draw(rng, kinds, entries):
    """[rows, entries] of these kinds."""
    return jnp.asarray(np.stack([ROWS[kind](rng, entries).astype(np.float32) for kind in kinds]))


def unwritten(scores, lengths):
    """The rows with NaN, as bytes that nobody wrote, behind their lengths."""
    return jnp.where(jnp.arange(scores.shape[1])[None, :] < ints(lengths)[:, None], scores, jnp.nan)


@functools.cache
def _select(plan, interpret):
    options = dict(algorithm=InterpretedRadixSelect, interpret=True) if interpret else {}
    return jax.jit(functools.partial(select, plan=plan, **options))


def check_plan(plan, scores, lengths, *, interpret=False):
    """Compares `select` with the reference; the interpreter runs the steps in jnp and also looks for races."""
    expected = jax.jit(functools.partial(ops.indexer_topk, k=plan.k, implementation="xla"))(scores, lengths)
    same_bytes(expected, _select(plan, interpret)(scores, lengths))


ROW = st.tuples(st.sampled_from(sorted(ROWS)), st.sampled_from([0, 1, 16, 17, 18, 511, 640, 1021, 1024]))


@given(rows=st.lists(ROW, min_size=4, max_size=4), seed=st.integers(0, 999))
@settings(max_examples=6, deadline=None)
def test_interpreted(rows, seed):
    kinds, lengths = zip(*rows, strict=True)
    scores = unwritten(draw(np.random.default_rng(seed), kinds, 1024), lengths)
    check_plan(RadixPlan(17, 2, 1, 4), scores, ints(lengths), interpret=True)


# Two blocks that load twice; two warpgroups.
@pytest.mark.parametrize("plan", [RadixPlan(33, 2, 1, 4, 2), RadixPlan(9, 1, 2, 4, 2)])
def test_other_plans_interpreted(plan):
    kinds = ("normal", "equal", "up", "holes")
    lengths = [2000, 2000, 1999, 20]
    check_plan(plan, unwritten(draw(np.random.default_rng(0), kinds, 2000), lengths), ints(lengths), interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "entries", "k"),
    [(1, 16384, 512), (33, 16384, 512), (3, 65536, 2048), (64, 65536, 512), (14, 262144, 512), (64, 262144, 512),
     (67, 65536, 512), (150, 133120, 512), (5, 1 << 20, 2048), (4, 65516, 1), (200, 2052, 100), (14, 300, 512),
     (32, 131072, 2048)],
)  # fmt: skip
def test_on_gpu(tokens, entries, k):
    rng = np.random.default_rng(tokens)
    names = sorted(ROWS)
    for turn in range(-(-len(names) // tokens)):
        kinds = [names[(turn * tokens + t) % len(names)] for t in range(tokens)]
        lengths = rng.integers(0, entries + 1, tokens)
        lengths[::3] = entries
        lengths[2::4] = rng.integers(0, 33000, lengths[2::4].size)  # some that one block of a cluster takes alone
        lengths[1::5] = rng.choice([0, 1, k - 1, k, k + 1, entries - 1], lengths[1::5].size)
        lengths = np.minimum(lengths, entries)
        check(ops.indexer_topk, "mosaic_gpu", unwritten(draw(rng, kinds, entries), lengths), ints(lengths), k=k)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "plan", [RadixPlan(17, 1, 1, 8), RadixPlan(64, 3, 4, 32, 2), RadixPlan(512, 8, 8, 8), RadixPlan(512, 2, 8, 32, 4)]
)
def test_other_plans_on_gpu(plan):
    entries = plan.blocks * plan.threads * plan.values * plan.chunks - 4
    lengths = [entries - 3 * (i % 2) for i in range(len(ROWS))]
    scores = draw(np.random.default_rng(0), sorted(ROWS), entries)
    check_plan(plan, unwritten(scores, lengths), ints(lengths))


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import indexer_topk
shapes = [(1, 16384), (64, 16384), (1, 65536), (64, 65536), (1, 262144), (64, 262144), (70, 262144), (1, 1 << 20)]
blocks = [(1, 131072), (32, 131072)]
for tokens, entries, k in [*((*shape, 512) for shape in shapes), *((*shape, 2048) for shape in blocks)]:
    args = jax.ShapeDtypeStruct((tokens, entries), jnp.float32), jax.ShapeDtypeStruct((tokens,), jnp.int32)
    compiled = compile_for_h100(f"{tokens}x{entries}", functools.partial(indexer_topk, k=k), *args)
    assert compiled.memory_analysis().temp_size_in_bytes < 1024
""")
    # What a block of 1024 threads, or here once of 512, has for each.
    wide = ("1x65536", "1x131072")
    assert len(used) == 10 and all(n <= (128 if name in wide else 64) for name, n in used.items()), used


def test_what_the_kernel_does_not_take_is_refused_before_launch():
    with pytest.raises(NotImplementedError, match="k of 1 to 2048, got 2049"):
        indexer_topk(jnp.ones((1, 4096)), ints([4096]), 2049)
    with pytest.raises(NotImplementedError, match="multiple of 4 scores, got 30"):
        indexer_topk(jnp.ones((1, 30)), ints([30]), 4)
    with pytest.raises(NotImplementedError, match=r"scores as float32.*got bfloat16"):
        indexer_topk(jnp.ones((1, 32), jnp.bfloat16), ints([32]), 4)
    with pytest.raises(NotImplementedError, match="marks fit shared memory"):
        indexer_topk(jnp.ones((1, 1 << 22)), ints([32]), 4)
    assert indexer_topk(jnp.ones((0, 32)), ints([]), 4).shape == (0, 4)


def test_the_interpreter_is_refused():
    scores = jnp.asarray([[0.5, 2.0, 1.0, -1.0]])
    lengths = ints([3])
    with pytest.raises(NotImplementedError, match="cannot run as 'interpret': .*PTX, which the interpreter cannot run"):
        ops.indexer_topk(scores, lengths, 2, implementation="interpret")
    with ops.use_implementation("interpret"):
        assert ops.indexer_topk(scores, lengths, 2).tolist() == [[1, 2]]
