"""The scores' kernel against float64 and the reference: interpreted, on a GPU, and compiled for one."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from dsv4_jax.ops.indexer_scores import scores_kernel
from dsv4_jax.quant import IndexRows, kv_format
from dsv4_jax.quant.formats import PerEntryFormat
from pallas_kernels import IndexerKeys, indexer_scores
from pallas_kernels.indexer_scores.chunks import planned_shares
from pallas_kernels.indexer_scores.key_tiles import NEAR
from tests.ops.pools import indexer_view, ints, poison
from tests.pallas_kernels.kernels import registers


DIM = 128
FORMATS = dict(v4=kv_format("v4"), v41=kv_format("v41"), per_entry=PerEntryFormat(index_global_scale=0.5))
HEADS = dict(v4=64, v41=32, per_entry=64)
RATES = dict(v4=4, v41=1, per_entry=4)
# Products of FP4 values are exact. Of bfloat16, the tensor core drops less than 2**-22 of the largest addend in each of
# 8 steps; sums of E4M3 are exact for keys and queries like these (see `key_tiles`). 16 additions, 2 more over lanes and
# 2 products round at 2**-24: below 64 * 2**-24 of the sum of sizes.
BOUND = 2.0**-18


def paged(fmt, rng, *, lengths, max_blocks, per_block=32, layers=2, missing=0.2):
    """A view of requests with `lengths` keys of very different size; unused blocks are poisoned, some are missing."""
    used = [min(-(-n // per_block), max_blocks) for n in lengths]
    blocks = sum(used) + 2
    ids = rng.permutation(blocks)
    table = np.full((len(lengths), max_blocks), -1)
    for slot, n in enumerate(used):
        table[slot, :n] = ids[sum(used[:slot]) :][:n]
    codes, scales = (
        np.array(pool) for pool in jax.tree.leaves(poison(fmt.keys(DIM).struct, layers, blocks, per_block))
    )
    named = table[table >= 0]
    codes[-1, named] = rng.integers(0, 256, codes[-1, named].shape) * (
        rng.random((*scales[-1, named].shape[:2], 1)) < 0.9
    )
    # Every E4M3 scale, and of E8M0's those that float32 products can hold.
    low, high = (0, 0x7F) if fmt.name == "per_entry" else (127 - 60, 127 + 33)
    drawn = rng.integers(low, high, scales[-1, named].shape)
    if fmt.name == "v4":
        # In half of the blocks a key's scales lie near each other, in the others all but those of one key in 16.
        near = drawn[..., :1] + rng.integers(0, NEAR + 1, drawn.shape)
        far = (rng.random((*drawn.shape[:2], 1)) < 1 / 16) & (rng.random((len(drawn), 1, 1)) < 0.5)
        drawn = np.where(far, drawn, near)
    scales[-1, named] = drawn
    table = np.where(rng.random(table.shape) < missing, -1, table)
    rows = IndexRows(jnp.asarray(codes), jnp.asarray(scales))
    return ops.IndexerView(rows, ints(layers - 1), ints(table), RATES[fmt.name], fmt.keys(DIM))


def queries(rng, tokens, heads=64):
    q = jnp.asarray(rng.standard_normal((tokens, heads, DIM)), jnp.bfloat16)
    return q, jnp.asarray(rng.standard_normal((tokens, heads)), jnp.float32)


def check(view, q, weights, slots, positions, implementation, candidates=None, **options):
    if options:
        run = functools.partial(scores_kernel, inv_freq=None, interpret=True, **options)
    else:
        run = functools.partial(ops.indexer_scores, implementation=implementation)
    lengths = np.minimum((np.asarray(positions) + 1) // view.compress_rate, view.max_entries)
    if candidates is None:
        got = np.asarray(jax.jit(run)(view, q, weights, ints(slots), ints(positions)))
        entries = np.tile(np.arange(view.max_entries), (len(slots), 1))
    else:
        candidates = ints(candidates)
        got = np.asarray(jax.jit(run)(view, q, weights, ints(slots), ints(positions), candidates=candidates))
        entries = np.asarray(ops.candidate_entries(candidates, 8))
        lengths = np.asarray(ops.candidate_lengths(ints(lengths), candidates.shape[1], 8))
    assert got.shape == entries.shape
    q = np.asarray(jax.jit(view.codec.round_query)(q), np.float64)
    weights = np.asarray(weights, np.float64)
    table = np.asarray(view.block_table)
    keys = np.asarray(jax.jit(view.codec.decode)(jax.tree.map(lambda pool: pool[-1], view.rows)), np.float64)
    exists = (table >= 0).repeat(view.entries_per_block, axis=1)
    stored = np.where(exists[..., None], keys[table].reshape(*exists.shape, DIM), 0)
    for t, slot in enumerate(slots):
        if slot < 0:
            continue
        visible = lengths[t]
        chosen = entries[t, :visible]
        keys = stored[slot, chosen]
        valid = exists[slot, chosen] & (chosen >= 0)
        want = np.maximum(keys @ q[t].T, 0) @ weights[t]
        size = (np.abs(keys) @ np.abs(q[t]).T) @ np.abs(weights[t])
        # Beyond, memory holds what an earlier program left there: signalling NaNs too, of which a cast would warn.
        mine = got[t, :visible].astype(np.float64)
        chex.assert_trees_all_equal(mine[~valid], -np.inf)
        assert (np.abs(mine - want)[valid] <= BOUND * size[valid]).all()


# slots and positions: a decode step with padding and a request without keys; a long run, in chunks of 8 tokens and a
# rest, between short ones; tokens past the first 32, of which a chunk crosses the border.
STEPS = [
    ([0, -1, 2, 1, -1], [383, -1, 2, 140, -1]),
    ([1] * 2 + [0] * 11 + [2] * 3, [254, 255, *range(90, 101), 7, 8, 9]),
    ([-1] * 31 + [2, 2, 0], [-1] * 31 + [258, 259, 190]),
]


@pytest.mark.parametrize(
    ("name", "step"), [("v4", 0), ("v41", 0), ("per_entry", 0), ("v4", 1), ("v41", 1), ("per_entry", 2)]
)
def test_interpreted(name, step):
    rng = np.random.default_rng(step)
    slots, positions = STEPS[step]
    # An odd number of blocks: the last tile reaches past the end of a row.
    view = paged(FORMATS[name], rng, lengths=[96, 64, 65], max_blocks=3, per_block=(32, 64, 16)[step])
    check(view, *queries(rng, len(slots), HEADS[name]), slots, positions, "interpret")


def test_planned_interpreted():
    """XLA computes the blocks' shares, as for many tokens."""
    rng = np.random.default_rng(3)
    view = paged(FORMATS["v4"], rng, lengths=[40, 90], max_blocks=3)
    slots = [1] * 10 + [-1, 0]
    positions = [*range(330, 340), -1, 63]
    check(view, *queries(rng, 12), slots, positions, "interpret", plan_in_xla=True)


def some_blocks(rng, visible, count):
    """Returns blocks [count] of 8 entries as `ops.candidate_blocks` chooses them, the last ones -1 if there are few."""
    number = -(-visible // 8)
    blocks = np.arange(number)
    if number > count:
        blocks = np.sort([*rng.permutation(number - 1)[: count - 1], number - 1])
    return np.pad(blocks, (0, count - len(blocks)), constant_values=-1)


@pytest.mark.parametrize("blocks", [1, 3])
def test_candidates_interpreted(blocks):
    """Tokens that see more blocks than there are candidates, fewer, and one whose last candidates are missing."""
    rng = np.random.default_rng(blocks)
    view = paged(FORMATS["v41"], rng, lengths=[700, 300, 500], max_blocks=22)
    slots = [0, -1, 1, 2, 2]
    positions = [699, -1, 150, 399, 400]
    candidates = np.stack([some_blocks(rng, position + 1, 42) for position in positions])
    candidates[4, -9:] = -1
    check(view, *queries(rng, 5, HEADS["v41"]), slots, positions, "interpret", candidates, blocks=blocks)


@pytest.mark.parametrize("costs", [[3, 0, 5, 0, 0, 7, 1], [0, 0], [0, 100, 0], [1] * 300], ids=str)
def test_planned_shares(costs):
    """Every unit is in one share, and begins in the item that the share names."""
    shares = np.asarray(planned_shares(ints(costs), 5)).reshape(5, 4)
    ends = np.cumsum(costs)
    assert shares[0, 0] == 0
    assert shares[-1, 1] == ends[-1]
    chex.assert_trees_all_equal(shares[1:, 0], shares[:-1, 1])
    assert np.ptp(shares[:, 1] - shares[:, 0]) <= 1
    for begin, end, item, before in shares:
        if end > begin:
            assert before <= begin < ends[item]
            assert before == ends[item] - costs[item]


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("per_block", [32, 64])
@pytest.mark.parametrize("counts", [[1] * 5, [8] * 5, [1, 9, 3, 0, 30], [300, 1, 0, 2, 5]], ids=str)
def test_on_gpu(name, per_block, counts):
    rng = np.random.default_rng(sum(counts))
    lengths = [9000, 70, 1, 2500, 640]
    view = paged(FORMATS[name], rng, lengths=lengths, max_blocks=301, per_block=per_block, missing=0.05)
    slots = []
    positions = []
    for slot in rng.permutation(5):
        slots += [-1, *[slot] * counts[slot]]
        end = RATES[name] * (lengths[slot] + 1) - 1
        positions += [-1, *range(end - counts[slot], end)]
    check(view, *queries(rng, len(slots), HEADS[name]), slots, np.maximum(positions, -1), "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("heads", [32, 64])
def test_one_token_on_gpu(name, heads):
    """It has a configuration of its own; every block has tiles."""
    rng = np.random.default_rng(heads)
    view = paged(FORMATS[name], rng, lengths=[100001], max_blocks=1600, per_block=64)
    check(view, *queries(rng, 1, heads), [0], [RATES[name] * 100001 - 1], "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["v41", "per_entry"])
@pytest.mark.parametrize(("tokens", "per_block", "count"), [(1, 128, 2048), (8, 16, 2048), (300, 64, 210)])
def test_candidates_on_gpu(name, tokens, per_block, count):
    rng = np.random.default_rng(tokens)
    view = paged(FORMATS[name], rng, lengths=[70000, 3000], max_blocks=70400 // per_block, per_block=per_block)
    slots = [0] * tokens + [-1, 1]
    positions = [*range(RATES[name] * 70000 - tokens, RATES[name] * 70000), -1, RATES[name] * 3000]
    candidates = np.stack([some_blocks(rng, (position + 1) // RATES[name], count) for position in positions])
    check(view, *queries(rng, len(slots), HEADS[name]), slots, positions, "mosaic_gpu", candidates=candidates)


@pytest.mark.gpu
@pytest.mark.parametrize(("large", "small"), [(0, 1), (0, 33), (33, 0), (0, 127)])
def test_how_many_bits_fp8_sums_keep_on_gpu(large, small):
    """What `key_tiles` and `docs/numerics.md` say: the tensor core keeps 2**-13 of the largest product, in any step."""
    key = kv_format("v4").keys(DIM)
    rows = jnp.full((1, 1, 64, DIM // 2), 0x22, jnp.uint8), jnp.full((1, 1, 64, 4), 127, jnp.uint8)  # 1.0
    weights = jnp.zeros((1, 64)).at[0, 0].set(1.0)

    @jax.jit
    def score(q):
        keys = IndexerKeys(ints(0), ints([[0]]), *rows, 4, key.layout)
        return indexer_scores(q.astype(jnp.float8_e4m3fn), weights, ints([0]), ints([255]), keys)

    q = jnp.zeros((1, 64, DIM))
    one = score(q.at[0, 0, large].set(1.0))[0, 0]
    for exponent, kept in (-13, True), (-14, False):
        both = score(q.at[0, 0, large].set(256.0).at[0, 0, small].set(256 * 2.0**exponent))[0, 0]
        assert both == one * 256 * (1 + kept * 2.0**exponent)


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import jax, jax.numpy as jnp
from pallas_kernels import IndexerKeys, indexer_scores
from pallas_kernels.formats.layouts import KeyLayout
S = jax.ShapeDtypeStruct
def ints(*shape): return S(shape, jnp.int32)
v4, per_entry = KeyLayout(128, 32, "e8m0", hadamard=True), KeyLayout(128, 16, "e4m3", hadamard=False)
v41 = KeyLayout(128, 32, "e8m0", hadamard=False)
for name, heads, layout in ("v4", 64, v4), ("v41", 32, v41), ("per_entry", 64, per_entry):
    for tokens in (1, 32, 2048):
        pools = S((3, 8192, 32, 64), jnp.uint8), S((3, 8192, 32, 128 // layout.scale_block), jnp.uint8)
        keys = IndexerKeys(ints(), ints(64, 2048), *pools, 4, layout)
        q = S((tokens, heads, 128), keys.dtype)
        weights = S((tokens, heads), jnp.float32)
        args = q, weights, ints(tokens), ints(tokens), keys
        compile_for_h100(f"{name}-{tokens}", indexer_scores, *args)
        if name != "v4":
            compile_for_h100(f"{name}-{tokens}-candidates", indexer_scores, *args, ints(tokens, 2048))
""")
    # 4 warpgroups on a multiprocessor; of 32 heads 5 for candidates, and 6 for one token.
    assert len(used) == 15 and max(used.values()) <= 128, used
    assert max(used["v41-1"], *(used[f"v41-{tokens}-candidates"] - 16 for tokens in (1, 32, 2048))) <= 80


def test_what_the_kernel_does_not_take_is_refused_before_launch():
    rng = np.random.default_rng(0)
    view = paged(FORMATS["v4"], rng, lengths=[32], max_blocks=1)
    q, weights = queries(rng, 1)
    one = functools.partial(ops.indexer_scores, slots=ints([0]), positions=ints([7]), implementation="interpret")
    call = functools.partial(jax.eval_shape, one)
    with pytest.raises(NotImplementedError, match="takes q as bfloat16.any, any, 128., got float32"):
        call(view, q.astype(jnp.float32), weights)
    with pytest.raises(NotImplementedError, match="queries of 32 or 64 heads, got 96"):
        call(view, *queries(rng, 1, 96))
    plain = indexer_view(kv_format("plain", jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="formats 'v4', 'v41' and 'per_entry'"):
        call(plain, q, weights)
    few = paged(FORMATS["v4"], rng, lengths=[32], max_blocks=4, per_block=8)
    blocks = ints([[0, 1]])
    with pytest.raises(NotImplementedError, match="an even number of candidate blocks, and keys without a Hadamard"):
        call(view, q, weights, candidates=blocks)
    with pytest.raises(NotImplementedError, match="blocks of 8 candidates, got 4"):
        jax.eval_shape(functools.partial(one, block_size=4), view, q, weights, candidates=blocks)
    with pytest.raises(NotImplementedError, match="blocks of a multiple of 16 keys"):
        call(few, q, weights)
