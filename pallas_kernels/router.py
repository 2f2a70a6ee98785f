"""Which experts a token goes to, for few tokens: products with a slice of channels, then scores and selection.

Where tokens are so few that the blocks which select are one cluster, one of them sorts pairs of a token and an expert
for `experts`.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.matmul.routing import GROUP_WORDS, counts_size, group_pairs, max_groups, scratch_words
from pallas_kernels.mgpu import barriers, bfloat16_words as words, mlir, thread_ops, vectors
from pallas_kernels.mgpu.mlir import THREADS, WARP
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.launch import kernel, primitive
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_TOKENS = 256
MAX_GROUPED_TOKENS = 8  # blocks of a cluster that every device runs
CHANNELS = 4 * WARP  # of a slice
STEP = 16  # channels of `mma`
ROWS = 8  # experts of a warp
TOKENS = 32  # of a tile
EXPERTS = ROWS * THREADS // WARP  # of a block
ADDERS = 4  # warpgroups that add slices up


@cached_trace("chosen", "factor")
def router(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    table: jax.Array | None = None,
    token_ids: jax.Array | None = None,
    *,
    chosen: int,
    factor: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Scores `sqrt(softplus(x @ weight.T))`, and the experts that they or a table select.

    Args:
      x: [T, D] bfloat16, T up to 256, D a multiple of 512.
      weight: [E, D] float32, E a multiple of 128 up to 1024.
      bias: [E] float32: the `chosen` best of score + bias are selected, of equals the first. Or None, with
      table: [V, chosen] int32, the experts of each token id, and
      token_ids: [T] int32, clipped to 0 .. V - 1.
      chosen: experts of a token, at most 32.
      factor: what a token's weights add up to.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      experts [T, chosen] int32, and their weights [T, chosen] float32: the scores over their sum, times `factor`. And
      for `experts` (table, counts) of the pairs of a token and an expert, see `group_pairs`, or None of more than 8
      tokens.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    check_array("x", x, jnp.bfloat16, None, None)
    tokens, depth = x.shape
    check_array("weight", weight, jnp.float32, None, depth)
    experts = weight.shape[0]
    if bias is not None:
        check_array("bias", bias, jnp.float32, experts)
    else:
        check_array("table", table, jnp.int32, None, chosen)
        check_array("token_ids", token_ids, jnp.int32, tokens)
    check_rules(
        {
            f"1 to {MAX_TOKENS} tokens, got {tokens}": 0 < tokens <= MAX_TOKENS,
            f"channels in multiples of {ADDERS * CHANNELS}, got {depth}": depth > 0
            and depth % (ADDERS * CHANNELS) == 0,
            f"128, 256, .. or 1024 experts, got {experts}": 0 < experts <= 1024 and experts % THREADS == 0,
            f"up to {WARP} experts of a token, got {chosen}": 0 < chosen <= min(WARP, experts),
        }
    )
    slices = depth // CHANNELS
    products = kernel(
        lambda *arrays: add_products(*map(lax.axis_index, ("slice", "rows", "tile")), *arrays),
        out_type=jax.ShapeDtypeStruct((slices, tokens, experts), jnp.float32),
        kernel_name="router_products",
        grid=(slices, experts // EXPERTS, -(-tokens // TOKENS)),
        grid_names=("slice", "rows", "tile"),
        interpret=interpret,
    )
    given = (table, token_ids) if bias is None else (bias,)
    found = [jax.ShapeDtypeStruct((tokens * chosen,), dtype) for dtype in (jnp.int32, jnp.float32)]
    scratch: dict[str, Any] = dict(
        inbox=plgpu.SMEM((ADDERS, experts), jnp.float32),
        scores=plgpu.SMEM((experts,), jnp.float32),
        biased=plgpu.SMEM((experts,), jnp.float32),
        summed=plgpu.Barrier(num_arrivals=ADDERS),
    )
    together = tokens <= MAX_GROUPED_TOKENS
    if together:
        groups = max_groups(tokens * chosen, experts)
        table_sizes = groups * GROUP_WORDS, counts_size(groups, depth)
        found += [jax.ShapeDtypeStruct((size,), jnp.int32) for size in table_sizes]
        scratch |= dict(
            sizes=plgpu.SMEM((scratch_words(experts),), jnp.int32),
            selected=plgpu.ClusterBarrier(collective_axes=("token",), num_arrivals=1) if interpret else None,
        )
    select = kernel(
        functools.partial(_select, factor, chosen),
        out_type=found,
        kernel_name="router_select",
        grid=(1 if together else tokens,),
        grid_names=("group",),
        # As many blocks as tokens, but a power of two: three of a cluster take longer to start than two.
        cluster=(1 << (tokens - 1).bit_length() if together else 1,),
        cluster_names=("token",),
        num_threads=ADDERS,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
    )
    selected, weights, *grouped = select(products(x, weight), *given)
    selected, weights = (found.reshape(tokens, chosen) for found in (selected, weights))
    return selected, weights, tuple(grouped) or None


@primitive
def add_products(part: jax.Array, group: jax.Array, tile: jax.Array, x, weight, out) -> None:
    """Writes `out[part, t, e]`, sums over a slice of channels, of a group of experts and a tile of tokens.

    A warp has 8 experts, a lane 32 channels of one of them, as sums of three bfloat16; `out`: [slices, T, E] float32.
    """
    columns, rows = pl.ds(part * CHANNELS, CHANNELS), pl.ds(group * EXPERTS, EXPERTS)

    @pl.when(tile == 0)
    def _():  # those of all tiles: their tokens are few
        out[part, :, rows] = jnp.dot(x[:, columns].astype(jnp.float32), weight[rows, columns].T, precision="highest")


@add_products.mosaic
def _(part, group, tile, x, weight, out):
    (tokens, depth), experts = x.shape, weight.shape[0]
    halves, steps = (1 if tokens <= 16 else 2), CHANNELS // STEP

    def emit(part, group, tile, x, weight, out):
        thread, part = U32(mlir.thread()), U32(mlir.scalar(part))
        lane, tile = thread & 31, U32(mlir.scalar(tile)) * TOKENS
        row, column = lane >> 2, part * CHANNELS + ((lane & 3) << 2)
        first = U32(mlir.scalar(group)) * EXPERTS + (thread >> 5) * ROWS

        def at(ref, index, size):
            return mlir.at(mlir.global_pointer(ref), arith.muli(mlir.to_i64(index.value), mlir.i64(size)))

        start = at(weight, (first + row) * depth + column, 4)
        weights = [words.load_four(mlir.at(start, 4 * STEP * step)) for step in range(steps)]
        # Clamped: what stands for tokens beyond the last is not stored.
        numbers = [(tile + row + 8 * i).minimum(tokens - 1) for i in range(2 * halves)]
        starts = [at(x, token * depth + column, 2) for token in numbers]
        inputs = [[words.load_pair(mlir.at(start, 2 * STEP * step)) for start in starts] for step in range(steps)]
        # Chains of products that do not wait for each other.
        sums = [[[mlir.f32(0.0)] * 4 for _ in range(words.PARTS)] for _ in range(halves)]
        for four, pairs in zip(weights, inputs, strict=True):
            for i, piece in enumerate(words.split(four)):
                for half, chains in enumerate(sums):
                    low, high = pairs[2 * half : 2 * half + 2]
                    chains[i] = words.multiply_add(chains[i], [low[0], high[0], low[1], high[1]], piece)
        for half, (high, middle, low) in enumerate(sums):
            totals = [arith.addf(arith.addf(c, b), a) for a, b, c in zip(high, middle, low, strict=True)]
            for i in range(2):
                token = tile + row + (16 * half + 8 * i)
                with thread_ops.when(token < tokens):
                    place = at(out, (part * tokens + token) * experts + first + ((lane & 3) << 1), 4)
                    llvm.store(mlir.pack(totals[2 * i : 2 * i + 2]), place, alignment=8)

    mlir.inline(emit, part, group, tile, x, weight, out)


def _select(factor, chosen, products, *refs, inbox, scores, biased, summed, sizes=None, selected=None):
    *given, experts, weights = refs[: len(refs) - 2 * (sizes is not None)]
    token = lax.axis_index("group") * lax.axis_size("token") + lax.axis_index("token")
    warpgroup, tokens = lax.axis_index("warpgroup"), products.shape[1]
    share = products.shape[0] // ADDERS
    parts = range(0, scores.shape[0], THREADS)

    # A cluster may have more blocks than there are tokens.
    @pl.when(token < tokens)
    def _():
        places = [[(warpgroup * share + i, token, pl.ds(first, THREADS)) for i in range(share)] for first in parts]
        loaded = [[vectors.load(products.at[place]) for place in slices] for slices in places]
        for first, terms in zip(parts, loaded, strict=True):
            inbox[warpgroup, pl.ds(first, THREADS)] = functools.reduce(jnp.add, terms)
        plgpu.barrier_arrive(summed)

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_wait(summed)
            for first in parts:
                mine = pl.ds(first, THREADS)
                logits = functools.reduce(jnp.add, [vectors.load(inbox.at[i, mine]) for i in range(ADDERS)])
                score = jnp.sqrt(_softplus(logits))
                scores[mine] = score
                if len(given) == 1:
                    biased[mine] = score + vectors.load(given[0].at[mine])
            select(experts, weights, token, scores, biased, given, chosen, factor)

    if sizes is None:
        return

    @pl.when(warpgroup > 0)
    def _():
        barriers.arrive_cluster(None)
        barriers.wait_cluster(None)

    @pl.when(warpgroup == 0)
    def _():
        barriers.arrive_cluster(selected)
        barriers.wait_cluster(selected)

        @pl.when(token == 0)
        def _():
            table, counts = refs[-2:]
            group_pairs(experts, table, counts, scores.shape[0], sizes)


def _softplus(x):
    """log(1 + exp(x)) as accurate as float32 has it: no logarithm near 1."""
    small = jnp.exp(-jnp.abs(x))
    ratio = small / (2.0 + small)
    square = ratio * ratio
    series = jnp.full_like(x, 1 / 17)
    for n in range(15, 0, -2):
        series = series * square + 1 / n
    return jnp.maximum(x, 0.0) + 2.0 * ratio * series


@primitive
def select(experts, weights, token: jax.Array, scores, biased, given, chosen: int, factor: float) -> None:
    """Writes a token's experts and weights, see `router`, to [T * chosen] arrays; one warpgroup runs it.

    `scores`, `biased`: [E] float32 in shared memory; the latter counts if `given` is (bias,), not (table, token_ids).
    """
    if len(given) == 1:
        found = lax.top_k(biased[...], chosen)[1]
    else:
        table, token_ids = given
        found = table[jnp.clip(token_ids[token], 0, table.shape[0] - 1), :]
    found_scores = scores[...][found]
    mine = pl.ds(token * chosen, chosen)
    experts[mine] = found
    weights[mine] = found_scores / (jnp.sum(found_scores) + 1e-20) * factor


@select.mosaic
def _(experts, weights, token, scores, biased, given, chosen, factor):
    number = scores.shape[0]

    def emit(experts, weights, token, scores, biased, *given):
        token = U32(mlir.scalar(token))
        thread = U32(mlir.thread())
        lane = thread & 31
        # Other threads wrote what this warp reads.
        mgpu.utils.warpgroup_barrier()
        with thread_ops.when(thread < WARP):
            if len(given) == 1:
                found = _best(thread_ops.shared(biased), lane, number, chosen)
            else:
                table, token_ids = given
                size = ir.MemRefType(table.type).shape[0]
                own = thread_ops.load_global(token_ids, token)
                own = U32(arith.minsi(arith.maxsi(own.value, mlir.i32(0)), mlir.i32(size - 1)))
                found = thread_ops.load_global(table, own * chosen + lane.minimum(chosen - 1))
            score = thread_ops.as_float(thread_ops.load(thread_ops.shared(scores) + (found << 2)))
            inside = lane < chosen
            total = arith.select(inside.value, score, mlir.f32(0.0))
            for distance in (16, 8, 4, 2, 1):
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            share = arith.divf(score, arith.addf(total, mlir.f32(1e-20)))
            with thread_ops.when(inside):
                place = token * chosen + lane
                thread_ops.store_global(experts, place, found)
                thread_ops.store_global(weights, place, thread_ops.bits(arith.mulf(share, mlir.f32(factor))))

    mlir.inline(emit, experts, weights, token, scores, biased, *given)


def _best(values, lane, number, chosen):
    """In lane i of the warp the number of the i-th largest float32, of equals the first."""
    numbers = [lane + first for first in range(0, number, WARP)]
    keys = []
    for one in numbers:
        # As unsigned integers in the order of the floats.
        value = thread_ops.load(values + (one << 2))
        negative = U32(arith.shrsi(value.value, mlir.i32(31)))
        keys.append(value ^ (negative | 0x80000000))
    found = U32(0)
    for i in range(chosen):
        top = thread_ops.warp_max(functools.reduce(U32.maximum, keys))
        own = [key.equals(top).where(one, number - 1) for key, one in zip(keys, numbers, strict=True)]
        best = thread_ops.warp_min(functools.reduce(U32.minimum, own))
        found = lane.equals(i).where(best, found)
        keys = [one.equals(best).where(0, key) for key, one in zip(keys, numbers, strict=True)]
    return found
