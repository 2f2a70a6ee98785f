"""Sparse attention of many tokens: one softmax over window rows, compressed entries and a sink, on dequantised rows.

A block serves 64 heads of one query token after the other, 64 rows (a tile) at a time. One warpgroup copies rows to
shared memory, one scores them, and two add up values, each half of the columns. Each is ahead of the next one by up to
a tile, also from token to token: the scoring warpgroup fetches the next queries as soon as it has scored the last tile.
A tile is four parts of 128 columns, in a ring that has room for nine: the first part of a tile is on its way while the
values of the tile two before it are still added up. Scores come first: one of the two that add up values waits until
the next tile is scored, and its products fill the time in which that tile's weights are worked out.

The place of a row in a token's sums depends on the token's own position alone.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.mgpu import copies, wgmma
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace
from pallas_kernels.sparse_attention import kv_tiles
from pallas_kernels.sparse_attention.decode_attention import HEADS, LOWEST, SCALE
from pallas_kernels.sparse_attention.dense_rows import HALF, DenseRows, Items, TokenRows, start_unit, turn_back
from pallas_kernels.sparse_attention.kv_tiles import UNIT
from pallas_kernels.sparse_attention.row_addresses import TILE


STAGES = 2
# Columns of one product, and of what is copied at once. The compiler wants more registers for wider products than a
# thread starts with.
PART = HALF // 2
PARTS = ROW_DIM // PART
SLOTS = 9  # of parts, in shared memory
# That results can be rotated back by: those of the last product.
MAX_PAIRS = PART // 2
# Warpgroups: one scores, two add values, each half of the columns, and one copies.
SCORER, FIRST_ADDER, SECOND_ADDER, COPIER = range(4)
# Registers of a thread. Four warpgroups start with 128 each and may not hold more together.
SCORING, ADDING, COPYING = 112, 176, 48

_L = plgpu.Layout.WGMMA
_PER_HEAD, _PER_COLUMN = _L.reduce(1), _L.reduce(0)


@cached_trace("blocks")
def prefill_attention(
    q: jax.Array,
    sinks: jax.Array,
    rows: DenseRows,
    angles: tuple[jax.Array, jax.Array] | None = None,
    *,
    blocks: int = MULTIPROCESSORS,
    interpret: bool = False,
) -> jax.Array:
    """`sparse_attention` of many tokens, on rows that were dequantised before.

    Args:
      q: [T, H, 512] bfloat16, H a multiple of 64. Scores are scaled by `512 ** -0.5`.
      sinks: [H] float32 sink logits.
      rows: what the tokens attend to.
      angles: (cos, sin) [T, P] float32: the last 2 * P channels of results, P at most `MAX_PAIRS` and a multiple of 4,
        are rotated back by them, in interleaved pairs. Rounded before and after.
      blocks: of threads, that share the work; results do not depend on them.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, H, 512] bfloat16; zeros for padding.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, heads, _ = q.shape
    check_array("q", q, jnp.bfloat16, tokens, None, ROW_DIM)
    check_array("sinks", sinks, jnp.float32, heads)
    check_array("window_rows", rows.window_rows, jnp.bfloat16, None, ROW_DIM)
    check_array("places", rows.places, jnp.int32, tokens, 4)
    check_array("counts", rows.counts, jnp.int32, tokens)
    check_rules(
        {
            f"a multiple of {HEADS} heads, got {heads}": heads % HEADS == 0,
            f"windows of a multiple of {TILE} rows, got {rows.window}": rows.window % TILE == 0,
        }
    )
    if rows.entries is not None:
        check_array("entries", rows.entries, jnp.bfloat16, None, ROW_DIM)
    if rows.indices is not None:
        check_array("indices", rows.indices, jnp.int32, tokens, None)
    if angles is not None:
        for name, x in zip(("cos", "sin"), angles, strict=True):
            check_array(name, x, jnp.float32, tokens, None)
        pairs = angles[0].shape[1]
        check_rules({f"up to {MAX_PAIRS} pairs, a multiple of 4, got {pairs}": pairs <= MAX_PAIRS and not pairs % 4})
    if tokens == 0:
        return q
    blocks = min(tokens * heads // HEADS, blocks)
    run = kernel(
        functools.partial(_body, blocks),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        kernel_name="sparse_attention_prefill",
        grid=(blocks,),
        grid_names=("block",),
        num_threads=4,
        thread_name="warpgroup",
        scratch_types=dict(buffers=ManyQueriesBuffers.scratch_types()),
        interpret=interpret,
        # Sums over rows of `wgmma`'s layout need no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    rows = dataclasses.replace(rows, places=rows.places.reshape(-1))
    return run(q, sinks, rows, angles)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ManyQueriesBuffers:
    """Shared memory and barriers of a block, through which its warpgroups pass data on.

    Attributes:
      queries: [1, 64 heads, 512] bfloat16, once `queries_ready`.
      keys: [SLOTS, 64, 128] bfloat16, parts of tiles, `full` or `free`. A token's result takes the place of its last
        tile.
      biases: [STAGES + 1, 64] float32, 0 for a row and -inf for none; with a tile's first part.
      weights: [STAGES, 64 heads, 64] bfloat16, not yet divided by their sum; a stage is `weighed`; free with the tile.
      scored: a token's tile after its first has scores.
      factors: [STAGES + 1, 64 heads] float32, of earlier sums, with `weights`; the last, of the final sums, `scaled` or
        `scale_free`.
    """

    queries: Any
    keys: Any
    biases: Any
    weights: Any
    factors: Any
    queries_ready: Any
    full: Any
    free: Any
    scored: Any
    weighed: Any
    scaled: Any
    scale_free: Any

    @classmethod
    def scratch_types(cls) -> "ManyQueriesBuffers":
        """What to allocate, in place of the references."""
        return cls(
            # The axis of one is for `_scores`.
            queries=plgpu.SMEM((1, HEADS, ROW_DIM), jnp.bfloat16, transforms=TRANSFORMS),
            keys=plgpu.SMEM((SLOTS, TILE, PART), jnp.bfloat16, transforms=TRANSFORMS),
            biases=plgpu.SMEM((STAGES + 1, TILE), jnp.float32),
            weights=plgpu.SMEM((STAGES, HEADS, TILE), jnp.bfloat16, transforms=TRANSFORMS),
            # Together, since an array takes 1024 bytes at least.
            factors=plgpu.SMEM((STAGES + 1, HEADS), jnp.float32),
            queries_ready=plgpu.Barrier(),
            full=plgpu.Barrier(num_barriers=SLOTS),
            free=plgpu.Barrier(num_barriers=SLOTS),
            scored=plgpu.Barrier(num_barriers=STAGES),
            weighed=plgpu.Barrier(num_barriers=STAGES),
            scaled=plgpu.Barrier(),
            scale_free=plgpu.Barrier(num_arrivals=2),
        )


def _body(blocks, q, sinks, rows, angles, out, *, buffers):
    warpgroup = lax.axis_index("warpgroup")
    tokens, heads, _ = q.shape
    groups = heads // HEADS
    items = Items(rows, lax.axis_index("block"), blocks, tokens * groups, groups, HEADS)

    @pl.when(warpgroup == SCORER)
    def _():
        plgpu.set_max_registers(SCORING, action="decrease")
        _score(items, q, sinks, buffers)

    for adder in (FIRST_ADDER, SECOND_ADDER):

        @pl.when(warpgroup == adder)
        def _(adder=adder):
            plgpu.set_max_registers(ADDING, action="increase")
            _add(items, adder - FIRST_ADDER, angles, out, buffers)

    @pl.when(warpgroup == COPIER)
    def _():
        plgpu.set_max_registers(COPYING, action="decrease")
        _copy(items, rows, buffers)


def _stage(n):
    return lax.rem(n, jnp.int32(STAGES))


def _slot(n, part):
    """Where a part of tile n is."""
    return lax.rem(PARTS * n + part, jnp.int32(SLOTS))


def _bias(buffers, n):
    return buffers.biases.at[lax.rem(n, jnp.int32(STAGES + 1))]


def _copy(items, rows, buffers):
    """Fills part after part. What was copied is shown when the next parts are on their way."""

    def show(n, part, pending):
        copies.wait_copies(pending)
        kv_tiles.fence()
        plgpu.barrier_arrive(buffers.full.at[_slot(n, part)])

    def item(i, n, tiles):
        token, _ = items.place(i)
        addresses = TokenRows(rows, token)

        def tile(t, here):
            in_window = (t < rows.window // TILE).astype(jnp.int32)

            def start(part):
                slot = _slot(n + t, part)

                @pl.when(PARTS * (n + t) + part >= SLOTS)
                def _():
                    plgpu.barrier_wait(buffers.free.at[slot])

                for unit, row in enumerate(here):
                    start_unit(buffers.keys.at[slot], _bias(buffers, n + t), unit * UNIT, rows, in_window, row, part)
                copies.commit_copies()

            start(0)
            # The other parts may have to wait for the tile two before, and that for the last part of the tile before.
            pl.when(t > 0)(lambda: show(n + t - 1, PARTS - 1, 1))
            for part in range(1, PARTS):
                start(part)
            coming = addresses.of(t + 1)
            for part in range(PARTS - 1):
                show(n + t, part, PARTS - 1 - part)
            return coming

        lax.fori_loop(0, tiles, tile, addresses.of(jnp.int32(0)))
        show(n + tiles - 1, PARTS - 1, 0)

    n = items.loop(item)

    # The interpreter wants every arrival waited for.
    @pl.loop(jnp.maximum(PARTS * n - SLOTS, 0), PARTS * n)
    def _(n):
        plgpu.barrier_wait(buffers.free.at[lax.rem(n, jnp.int32(SLOTS))])


def _score(items, q, sinks, buffers):
    """Weighs tile after tile; of each item also the factors of its sums."""
    none = (
        plgpu.layout_cast(jnp.full((HEADS,), LOWEST, jnp.float32), _PER_HEAD),
        plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), _PER_HEAD),
    )

    def fetch(i):
        @pl.when(i < items.count)
        def _():
            token, heads = items.place(i)
            plgpu.copy_gmem_to_smem(q.at[token, heads], buffers.queries.at[0], buffers.queries_ready)

    def item(i, n, tiles):
        _, heads = items.place(i)
        sink = plgpu.load(sinks.at[heads], layout=_PER_HEAD, optimized=False) * math.log2(math.e)
        # What is in the L2 cache comes in half the time.
        token, later = items.place(i + 1)
        for half in range(2):
            plgpu.async_prefetch(q.at[token, later, pl.ds(half * HALF, HALF)])
        plgpu.barrier_wait(buffers.queries_ready)

        def tile(t, carry):
            top, total = carry
            stage = _stage(n + t)
            scores = _scores(buffers, n + t)
            pl.when(t > 0)(lambda: plgpu.barrier_arrive(buffers.scored.at[stage]))
            pl.when(t == tiles - 1)(lambda: fetch(i + 1))
            bias = plgpu.load(_bias(buffers, n + t), layout=_PER_COLUMN, optimized=False)
            scores = scores * SCALE + lax.broadcast_in_dim(bias, scores.shape, [1])
            peak = jnp.maximum(top, scores.max(axis=1))
            alpha = jnp.exp2(top - peak)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(peak, scores.shape, [0]))
            total = total * alpha + weights.sum(axis=1)
            # Both adders are done with what was there: the tile would not be full otherwise.
            wgmma.put_shared(buffers.weights.at[stage], weights.astype(jnp.bfloat16))
            wgmma.put_shared(buffers.factors.at[stage], alpha)
            kv_tiles.fence()
            plgpu.barrier_arrive(buffers.weighed.at[stage])
            return peak, total

        top, total = lax.fori_loop(0, tiles, tile, none)
        peak = jnp.maximum(top, sink)
        scale = jnp.exp2(top - peak)
        scale = scale / (total * scale + jnp.exp2(sink - peak))
        pl.when(i > 0)(lambda: plgpu.barrier_wait(buffers.scale_free))
        buffers.factors[STAGES] = scale
        plgpu.barrier_arrive(buffers.scaled)

    fetch(jnp.int32(0))
    items.loop(item)
    plgpu.barrier_wait(buffers.scale_free)


def _scores(buffers, n):
    """[64 heads, 64] float32 products of tile n's rows."""
    # Always 0. The compiler does not know that, and so does not keep 64 registers of addresses from tile to tile.
    zero = lax.shift_right_logical(n, jnp.int32(30))

    def score(ref):
        for part in range(PARTS):
            slot = _slot(n, part)
            plgpu.barrier_wait(buffers.full.at[slot])
            columns = pl.ds(part * PART, PART)
            plgpu.wgmma(ref, buffers.queries.at[zero, :, columns], buffers.keys.at[slot].transpose((1, 0)))
        return ref[...]

    return pl.run_scoped(score, plgpu.ACC((HEADS, TILE), jnp.float32))


def _add(items, half, angles, out, buffers):
    """Adds up half of the columns of each item's values, and stores them."""
    own = range(half * PARTS // 2, (half + 1) * PARTS // 2)
    nothing = plgpu.layout_cast(jnp.zeros((HEADS, PART), jnp.float32), _L)

    def free(n):
        for part in own:
            plgpu.barrier_arrive(buffers.free.at[_slot(n, part)])

    def item(i, n, tiles):
        def tile(t, sums):
            stage = _stage(n + t)
            plgpu.barrier_wait(buffers.weighed.at[stage])
            alpha = plgpu.load(buffers.factors.at[stage], layout=_PER_HEAD, optimized=False)
            sums = tuple(acc * lax.broadcast_in_dim(alpha, acc.shape, [0]) for acc in sums)
            if half == 1:
                pl.when(t < tiles - 1)(lambda: plgpu.barrier_wait(buffers.scored.at[_stage(n + t + 1)]))
            keys = tuple(buffers.keys.at[_slot(n + t, part)] for part in own)
            # From registers: shared memory is read at its full rate, and both products want them.
            weights = plgpu.load(buffers.weights.at[stage], layout=_L)
            sums = wgmma.multiply_add_all(sums, weights, keys)
            pl.when(t < tiles - 1)(lambda: free(n + t))
            return sums

        sums = lax.fori_loop(0, tiles, tile, (nothing,) * len(own))
        plgpu.barrier_wait(buffers.scaled)
        scale = plgpu.load(buffers.factors.at[STAGES], layout=_PER_HEAD, optimized=False)
        plgpu.barrier_arrive(buffers.scale_free)
        token, heads = items.place(i)
        last = n + tiles - 1
        for part, acc in zip(own, sums, strict=True):
            acc = acc * lax.broadcast_in_dim(scale, acc.shape, [0])
            if angles is not None and part == PARTS - 1:
                acc = turn_back(acc, angles, token)
            buffers.keys[_slot(last, part)] = acc.astype(jnp.bfloat16)
        plgpu.commit_smem()
        for part in own:
            source, columns = buffers.keys.at[_slot(last, part)], pl.ds(part * PART, PART)
            plgpu.copy_smem_to_gmem(source, out.at[token, heads, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        free(last)

    items.loop(item)
