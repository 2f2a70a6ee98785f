"""Sparse attention of many tokens: one softmax over window rows, compressed entries and a sink, on dequantised rows.

A block serves 64 heads of one query token after the other, 64 rows (a tile) at a time. One warpgroup copies rows to
shared memory, one scores them, and two add up values, each half of the columns. Each is ahead of the next one by up to
a tile, also from token to token: the scoring warpgroup fetches the next queries as soon as it has scored the last tile.

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

from pallas_kernels.common import async_copies, wgmma_results
from pallas_kernels.common.checks import check_array, check_rules
from pallas_kernels.common.kv_rows import ROW_DIM
from pallas_kernels.common.primitive import kernel
from pallas_kernels.common.support import MULTIPROCESSORS, traced_once
from pallas_kernels.common.wgmma_results import TRANSFORMS
from pallas_kernels.sparse_attention import kv_tiles
from pallas_kernels.sparse_attention.dense_rows import HALF, DenseRows, TokenRows, start_unit, turn_back
from pallas_kernels.sparse_attention.few_queries import HEADS, LOWEST, SCALE
from pallas_kernels.sparse_attention.kv_tiles import UNIT
from pallas_kernels.sparse_attention.row_addresses import TILE


STAGES = 2
# Columns of one product. The compiler wants more registers for wider ones than a thread starts with.
PART = HALF // 2
# That results can be rotated back by: those of the last product.
MOST_PAIRS = PART // 2
# Warpgroups: one scores, two add values, each half of the columns, and one copies.
SCORER, FIRST_ADDER, SECOND_ADDER, COPIER = range(4)
# Registers of a thread. Four warpgroups start with 128 each and may not hold more together.
SCORING, ADDING, COPYING = 112, 176, 48

_L = plgpu.Layout.WGMMA
_PER_HEAD, _PER_COLUMN = _L.reduce(1), _L.reduce(0)


@traced_once("blocks")
def many_queries(
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
      angles: (cos, sin) [T, P] float32: the last 2 * P channels of results, P at most `MOST_PAIRS` and a multiple of 4,
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
        check_rules({f"up to {MOST_PAIRS} pairs, a multiple of 4, got {pairs}": pairs <= MOST_PAIRS and not pairs % 4})
    if tokens == 0:
        return q
    blocks = min(tokens * heads // HEADS, blocks)
    run = kernel(
        functools.partial(_body, blocks),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        kernel_name="sparse_attention_many_queries",
        grid=(blocks,),
        grid_names=("block",),
        num_threads=4,
        thread_name="warpgroup",
        scratch_types=dict(buffers=ManyQueriesBuffers.scratch_types()),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    rows = dataclasses.replace(rows, places=rows.places.reshape(-1))
    return run(q, sinks, rows, angles)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ManyQueriesBuffers:
    """Shared memory and barriers of a block, through which its warpgroups pass data on.

    Attributes:
      queries: [1, 64 heads, 512] bfloat16, once `queries_ready`.
      keys: [STAGES * 2, 64, 256] bfloat16: either half of a stage's rows is `full`, or the stage is `free`. A token's
        result takes the place of its last tile.
      biases: [STAGES, 64] float32, 0 for a row and -inf for none; with `keys`.
      weights: [STAGES, 64 heads, 64] bfloat16, not yet divided by their sum; a stage is `weighed`; free with `keys`.
      rescale: [STAGES, 64 heads] float32, factors of earlier sums; with `weights`.
      scale: [64 heads] float32, factors of the final sums; `scaled` or `scale_free`.
    """

    queries: Any
    keys: Any
    biases: Any
    weights: Any
    rescale: Any
    scale: Any
    queries_ready: Any
    full: Any
    free: Any
    weighed: Any
    scaled: Any
    scale_free: Any

    @classmethod
    def scratch_types(cls) -> "ManyQueriesBuffers":
        """What to allocate, in place of the references."""
        return cls(
            # The axis of one is for `_scores`.
            queries=plgpu.SMEM((1, HEADS, ROW_DIM), jnp.bfloat16, transforms=TRANSFORMS),
            keys=plgpu.SMEM((2 * STAGES, TILE, HALF), jnp.bfloat16, transforms=TRANSFORMS),
            biases=plgpu.SMEM((STAGES, TILE), jnp.float32),
            weights=plgpu.SMEM((STAGES, HEADS, TILE), jnp.bfloat16, transforms=TRANSFORMS),
            rescale=plgpu.SMEM((STAGES, HEADS), jnp.float32),
            scale=plgpu.SMEM((HEADS,), jnp.float32),
            queries_ready=plgpu.Barrier(),
            full=plgpu.Barrier(num_barriers=2 * STAGES),
            free=plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            weighed=plgpu.Barrier(num_barriers=STAGES),
            scaled=plgpu.Barrier(),
            scale_free=plgpu.Barrier(num_arrivals=2),
        )


@dataclasses.dataclass(frozen=True)
class Items:
    """The items of a block: 64 heads of a token each."""

    rows: DenseRows
    block: jax.Array
    blocks: int
    items: int
    groups: int

    @property
    def count(self) -> jax.Array:
        return lax.div(self.items - self.block + (self.blocks - 1), jnp.int32(self.blocks))

    def place(self, i: jax.Array) -> tuple[jax.Array, Any]:
        """(token, heads) of item i; of items after the last, those of the last token."""
        item = jnp.minimum(self.block + i * self.blocks, self.items - 1)
        token, group = lax.div(item, jnp.int32(self.groups)), lax.rem(item, jnp.int32(self.groups))
        return token, pl.ds(group * HEADS, HEADS)

    def tiles(self, i: jax.Array) -> jax.Array:
        return self.rows.tiles(self.place(i)[0])

    def loop(self, body) -> jax.Array:
        """Calls `body(i, n, tiles)` for each item: its number of tiles, and of those before it. Returns that of all.

        What the next item's number is read from is loaded an item ahead.
        """

        def step(i, carry):
            n, tiles = carry
            coming = self.tiles(i + 1)
            body(i, n, tiles)
            return n + tiles, coming

        return lax.fori_loop(0, self.count, step, (jnp.int32(0), self.tiles(jnp.int32(0))))[0]


def _body(blocks, q, sinks, rows, angles, out, *, buffers):
    warpgroup = lax.axis_index("warpgroup")
    tokens, heads, _ = q.shape
    groups = heads // HEADS
    items = Items(rows, lax.axis_index("block"), blocks, tokens * groups, groups)

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


def _copy(items, rows, buffers):
    """Fills tile after tile."""

    def item(i, n, tiles):
        token, _ = items.place(i)
        addresses = TokenRows(rows, token)

        def tile(t, here):
            stage = _stage(n + t)

            @pl.when(n + t >= STAGES)
            def _():
                plgpu.barrier_wait(buffers.free.at[stage])

            in_window = (t < rows.window // TILE).astype(jnp.int32)
            for half in range(2):
                for unit, row in enumerate(here):
                    keys = buffers.keys.at[2 * stage + half]
                    start_unit(keys, buffers.biases.at[stage], unit * UNIT, rows, in_window, row, half)
                async_copies.commit_copies()
            coming = addresses.of(t + 1)
            for half in range(2):
                async_copies.wait_copies(1 - half)
                kv_tiles.fence()
                plgpu.barrier_arrive(buffers.full.at[2 * stage + half])
            return coming

        lax.fori_loop(0, tiles, tile, addresses.of(jnp.int32(0)))

    n = items.loop(item)

    # The interpreter wants every arrival waited for.
    @pl.loop(jnp.maximum(n - STAGES, 0), n)
    def _(n):
        plgpu.barrier_wait(buffers.free.at[_stage(n)])


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
            scores = _scores(buffers, stage, t)
            pl.when(t == tiles - 1)(lambda: fetch(i + 1))
            bias = plgpu.load(buffers.biases.at[stage], layout=_PER_COLUMN, optimized=False)
            scores = scores * SCALE + lax.broadcast_in_dim(bias, scores.shape, [1])
            peak = jnp.maximum(top, scores.max(axis=1))
            alpha = jnp.exp2(top - peak)
            weights = jnp.exp2(scores - lax.broadcast_in_dim(peak, scores.shape, [0]))
            total = total * alpha + weights.sum(axis=1)
            # Both adders are done with what was there: the tile would not be full otherwise.
            wgmma_results.put_shared(buffers.weights.at[stage], weights.astype(jnp.bfloat16))
            wgmma_results.put_shared(buffers.rescale.at[stage], alpha)
            kv_tiles.fence()
            plgpu.barrier_arrive(buffers.weighed.at[stage])
            return peak, total

        top, total = lax.fori_loop(0, tiles, tile, none)
        peak = jnp.maximum(top, sink)
        scale = jnp.exp2(top - peak)
        scale = scale / (total * scale + jnp.exp2(sink - peak))
        pl.when(i > 0)(lambda: plgpu.barrier_wait(buffers.scale_free))
        buffers.scale[...] = scale
        plgpu.barrier_arrive(buffers.scaled)

    fetch(jnp.int32(0))
    items.loop(item)
    plgpu.barrier_wait(buffers.scale_free)


def _scores(buffers, stage, t):
    """[64 heads, 64] float32 products of a tile's rows."""
    # Always 0. The compiler does not know that, and so does not keep 64 registers of addresses from tile to tile.
    zero = lax.shift_right_logical(t, jnp.int32(30))

    def score(ref):
        for half in range(2):
            columns = pl.ds(half * HALF, HALF)
            plgpu.barrier_wait(buffers.full.at[2 * stage + half])
            keys = buffers.keys.at[2 * stage + half]
            plgpu.wgmma(ref, buffers.queries.at[zero, :, columns], keys.transpose((1, 0)))
        return ref[...]

    return pl.run_scoped(score, plgpu.ACC((HEADS, TILE), jnp.float32))


def _add(items, half, angles, out, buffers):
    """Adds up half of the columns of each item's values, and stores them."""
    columns = range(0, HALF, PART)
    nothing = plgpu.layout_cast(jnp.zeros((HEADS, PART), jnp.float32), _L)

    def item(i, n, tiles):
        def tile(t, parts):
            stage = _stage(n + t)
            plgpu.barrier_wait(buffers.weighed.at[stage])
            alpha = plgpu.load(buffers.rescale.at[stage], layout=_PER_HEAD, optimized=False)
            parts = tuple(acc * lax.broadcast_in_dim(alpha, acc.shape, [0]) for acc in parts)
            keys = tuple(buffers.keys.at[2 * stage + half, :, pl.ds(column, PART)] for column in columns)
            parts = wgmma_results.multiply_add_all(parts, buffers.weights.at[stage], keys)

            @pl.when(t < tiles - 1)
            def _():
                plgpu.barrier_arrive(buffers.free.at[stage])

            return parts

        parts = lax.fori_loop(0, tiles, tile, (nothing,) * len(columns))
        stage = _stage(n + tiles - 1)
        plgpu.barrier_wait(buffers.scaled)
        scale = plgpu.load(buffers.scale, layout=_PER_HEAD, optimized=False)
        plgpu.barrier_arrive(buffers.scale_free)
        token, heads = items.place(i)
        for column, acc in zip(columns, parts, strict=True):
            acc = acc * lax.broadcast_in_dim(scale, acc.shape, [0])
            if angles is not None and half * HALF + column + PART == ROW_DIM:
                acc = turn_back(acc, angles, token)
            buffers.keys[2 * stage + half, :, pl.ds(column, PART)] = acc.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffers.keys.at[2 * stage + half], out.at[token, heads, pl.ds(half * HALF, HALF)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(buffers.free.at[stage])

    items.loop(item)
