"""Sparse attention of few tokens: on quantised rows, which are dequantised on the way.

A block serves 64 heads of one query token and a part of its rows, 64 rows (a tile) at a time. One warpgroup gathers
rows and dequantises them into shared memory, one scores them, and two add up values, each half of the columns: the
scoring warpgroup is one of these, and passes a tile's weights to the other through shared memory, so that it scores the
next tile while the other still adds. Two blocks of the same token are a cluster, and each dequantises half of a tile
for both. The place of a row in the sums depends on the shapes of the arguments and on the token's own position, never
on another token.
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
from pallas_kernels.mgpu import barriers, transaction_barriers, wgmma
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.sparse_attention import kv_tiles
from pallas_kernels.sparse_attention.dense_rows import HALF, turn_back
from pallas_kernels.sparse_attention.kv_tiles import UNIT
from pallas_kernels.sparse_attention.row_addresses import TILE, UNITS, AttentionProblem, RowAddresses


HEADS = 64  # of a block: the rows of one `wgmma`
STAGES = 2
# Warpgroups: one scores and adds the first half of the columns, one adds the second half, one gathers.
SCORER, ADDER, LOADER = range(3)
# Registers of a thread. Three warpgroups start with 168 each and may not hold more together.
LOADING, MULTIPLYING = 120, 192
# Below every score, and finite: differences of two are not NaN.
LOWEST = -1e30
# Of scores, as powers of two.
SCALE = ROW_DIM**-0.5 * math.log2(math.e)

_L = plgpu.Layout.WGMMA
_PER_HEAD, _PER_COLUMN = _L.reduce(1), _L.reduce(0)


def decode_attention(
    problem: AttentionProblem,
    q: jax.Array,
    sinks: jax.Array | None,
    angles: tuple[jax.Array, jax.Array] | None,
    *,
    splits: int | None,
    interpret: bool,
) -> Any:
    """`sparse_attention` of checked arguments, or with `splits` what `attention_sums` returns.

    Args:
      problem: the rows.
      q: [T, H, 512] bfloat16.
      sinks: [H rounded up to a multiple of 64] float32; None with splits.
      angles: (cos, sin) [T, P] float32 that results are rotated back by, or None.
      splits, interpret: as in `sparse_attention`.
    """
    tokens, heads, _ = q.shape
    groups = head_groups(heads)
    out_type: Any = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if splits is not None:
        shapes = (tokens, splits, groups * HEADS, ROW_DIM), (tokens, splits, 2, groups * HEADS)
        out_type = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    parts = splits or 1
    # Interpreted blocks have no shared memory in common.
    blocks = 2 if groups % 2 == 0 and not interpret else 1
    run = kernel(
        functools.partial(_body, parts, blocks),
        out_type=out_type,
        kernel_name="sparse_attention",
        grid=(tokens, groups // blocks, parts),
        grid_names=("token", "heads", "split"),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=dict(buffers=PipelineBuffers.scratch_types(blocks)),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return run(q, sinks, problem, angles)


def head_groups(heads: int) -> int:
    """Blocks of a token: each has room for 64 heads, of which a device that shares a layer may have fewer."""
    return -(-heads // HEADS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PipelineBuffers:
    """Shared memory and barriers of a block, through which its warpgroups pass data on.

    Attributes:
      blocks: of the cluster: 1, or 2, of which each loader writes half of the keys of both.
      queries: [1, 64 heads, 512] bfloat16; the result takes their place.
      keys: [STAGES, 64, 512] bfloat16 rows; a stage is `full` or `free`, with two blocks free in both of them.
      biases: [STAGES, 64] float32, 0 for a row and -inf for none; with `keys`.
      weights: [STAGES, 64 heads, 64] bfloat16, not yet divided by their sum; a stage is `weighed` or `weights_free`.
      rescale: [STAGES, 64 heads] float32, factors of earlier sums; with `weights`.
      scale: [64 heads] float32, factors of the final sums, once `scaled`.
      queries_ready: the queries have been copied.
      stored: both warpgroups have written their half of the result.
    """

    blocks: int = dataclasses.field(metadata=dict(static=True))
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
    weights_free: Any
    scaled: Any
    stored: Any

    @classmethod
    def scratch_types(cls, blocks: int) -> "PipelineBuffers":
        """What to allocate, in place of the references, in each block of a cluster of so many."""
        full, free = plgpu.Barrier(num_barriers=STAGES), plgpu.Barrier(num_arrivals=2, num_barriers=STAGES)
        if blocks > 1:
            full = transaction_barriers.scratch_type(STAGES)
            free = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=2, num_barriers=STAGES)
        return cls(
            blocks,
            # The axis of one is for `_score`.
            queries=plgpu.SMEM((1, HEADS, ROW_DIM), jnp.bfloat16, transforms=TRANSFORMS),
            keys=plgpu.SMEM((STAGES, TILE, ROW_DIM), jnp.bfloat16, transforms=TRANSFORMS),
            biases=plgpu.SMEM((STAGES, TILE), jnp.float32),
            weights=plgpu.SMEM((STAGES, HEADS, TILE), jnp.bfloat16, transforms=TRANSFORMS),
            rescale=plgpu.SMEM((STAGES, HEADS), jnp.float32),
            scale=plgpu.SMEM((HEADS,), jnp.float32),
            queries_ready=plgpu.Barrier(),
            full=full,
            free=free,
            weighed=plgpu.Barrier(num_barriers=STAGES),
            weights_free=plgpu.Barrier(num_barriers=STAGES),
            scaled=plgpu.Barrier(),
            stored=plgpu.Barrier(num_arrivals=2),
        )

    def start(self):
        """Before all else, in every warpgroup."""
        if self.blocks > 1:
            transaction_barriers.start(self.full)

    def enter(self):
        """After `start`, once in every warpgroup, before the first use of `full`: until both blocks' are ready."""
        if self.blocks > 1:
            barriers.wait_cluster(None)

    def fill(self, stage, units):
        """This loader has stored so many units of a stage of `keys`. The other block's loader sends as many."""
        kv_tiles.fence()
        if self.blocks == 1:
            plgpu.barrier_arrive(self.full.at[stage])
        else:
            transaction_barriers.arrive(self.full.at[stage], units * kv_tiles.SENT_BYTES // THREADS)

    def wait_full(self, first, tile):
        """Waits for the keys and biases of a tile."""
        stage = _stage(first, tile)
        if self.blocks == 1:
            plgpu.barrier_wait(self.full.at[stage])
            return
        transaction_barriers.wait(self.full.at[stage], lax.div(tile - first, jnp.int32(STAGES)) & 1)
        # The other block's loader cannot show its writes to this block's `wgmma`.
        kv_tiles.fence()

    def release(self, stage):
        """This warpgroup has read a stage of `keys`."""
        if self.blocks > 1:
            barriers.sync_warpgroup()
        plgpu.barrier_arrive(self.free.at[stage])


def _body(splits, blocks, q, sinks, problem, angles, out, stats=None, *, buffers):
    """A block: its part of a token's attention, or with `splits` the sums of the part and their `stats`."""
    token, split, warpgroup = (lax.axis_index(name) for name in ("token", "split", "warpgroup"))
    block = lax.axis_index("block") if blocks > 1 else 0
    group = (lax.axis_index("heads") * blocks + block) * HEADS
    heads, there = pl.ds(group, HEADS), pl.ds(group, min(q.shape[1], HEADS))
    queries = buffers.queries.at[0, pl.ds(0, there.size)]
    buffers.start()
    first, last = problem.tile_range(token, split, splits)

    @pl.when(warpgroup == LOADER)
    def _():
        plgpu.set_max_registers(LOADING, action="decrease")
        units = UNITS // blocks
        addresses = RowAddresses(problem, token, last, block * units, units)
        _gather(problem, addresses, first, last, buffers, 1 - block)

    def store(warpgroup, acc, scale):
        """Stores half of the columns: sums, or sums times `scale` [64] or None."""
        columns = pl.ds(warpgroup * HALF, HALF)
        if scale is None:
            wgmma.store(out.at[token, split, heads, columns], acc)
            return
        acc = acc * lax.broadcast_in_dim(scale, acc.shape, [0])
        if angles is not None and warpgroup == ADDER:
            acc = turn_back(acc, angles, token)
        buffers.queries[0, :, columns] = acc.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.barrier_arrive(buffers.stored)
        plgpu.barrier_wait(buffers.stored)
        if warpgroup == SCORER:
            plgpu.copy_smem_to_gmem(queries, out.at[token, there])
            plgpu.wait_smem_to_gmem(0)

    nothing = plgpu.layout_cast(jnp.zeros((HEADS, HALF), jnp.float32), _L)

    @pl.when(warpgroup == SCORER)
    def _():
        plgpu.set_max_registers(MULTIPLYING, action="increase")
        plgpu.copy_gmem_to_smem(q.at[token, there], queries, buffers.queries_ready)
        plgpu.barrier_wait(buffers.queries_ready)
        buffers.enter()
        none = (
            nothing,
            plgpu.layout_cast(jnp.full((HEADS,), LOWEST, jnp.float32), _PER_HEAD),
            plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), _PER_HEAD),
        )
        acc, top, total = lax.fori_loop(first, last, functools.partial(_score, buffers, first), none)
        _wait_for_last(buffers.weights_free, first, last)
        if stats is not None:
            stats[token, split, 0, heads] = top
            stats[token, split, 1, heads] = total
            store(SCORER, acc, None)
            return
        sink = plgpu.load(sinks.at[heads], layout=_PER_HEAD, optimized=False) * math.log2(math.e)
        peak = jnp.maximum(top, sink)
        scale = jnp.exp2(top - peak)
        scale = scale / (total * scale + jnp.exp2(sink - peak))
        buffers.scale[...] = scale
        plgpu.barrier_arrive(buffers.scaled)
        store(SCORER, acc, scale)

    @pl.when(warpgroup == ADDER)
    def _():
        plgpu.set_max_registers(MULTIPLYING, action="increase")
        buffers.enter()
        acc = lax.fori_loop(first, last, functools.partial(_add, buffers, first), nothing)
        if stats is not None:
            store(ADDER, acc, None)
            return
        plgpu.barrier_wait(buffers.scaled)
        store(ADDER, acc, plgpu.load(buffers.scale, layout=_PER_HEAD, optimized=False))


def _stage(first, tile):
    return lax.rem(tile - first, jnp.int32(STAGES))


def _wait_for_last(barriers, first, last):
    """Waits until every stage is free again."""

    @pl.loop(jnp.maximum(last - STAGES, first), last)
    def _(tile):
        plgpu.barrier_wait(barriers.at[_stage(first, tile)])


def _gather(problem, addresses, first, last, buffers, other_block):
    """Fills tile after tile. The rows of a tile are loaded while the tile before is dequantised.

    Where a cluster's blocks have the same rows, each dequantises half of them for both.
    """
    layout, compressed = problem.layout, problem.compressed
    others = problem.rings if compressed is None else compressed.pools

    def load(tile, row):
        from_pools = (tile >= problem.window_tiles).astype(jnp.int32)
        return kv_tiles.load_unit(problem.rings, others, from_pools, row, layout)

    def step(tile, carry):
        units, here, entries, blocks, later = carry
        stage = _stage(first, tile)

        @pl.when(tile - first >= STAGES)
        def _():
            plgpu.barrier_wait(buffers.free.at[stage])

        there = addresses.rows(tile + 1, entries, blocks)
        coming = []
        keys, biases = buffers.keys.at[stage], buffers.biases.at[stage]
        for i in range(addresses.units):
            at = (addresses.first_unit + i) * UNIT
            other = (other_block, buffers.full.at[stage]) if buffers.blocks > 1 else None
            kv_tiles.store_unit(keys, biases, at, units[i], here[i], layout, other)
            coming.append(load(tile + 1, there[i]))
        buffers.fill(stage, addresses.units)
        return coming, there, later, addresses.blocks(later), addresses.entries(tile + 3)

    entries = [addresses.entries(first + i) for i in range(3)]
    buffers.enter()

    @pl.when(first < last)
    def _():
        blocks = [addresses.blocks(e) for e in entries[:2]]
        here = addresses.rows(first, entries[0], blocks[0])
        units = [load(first, row) for row in here]
        lax.fori_loop(first, last, step, (units, here, entries[1], blocks[1], entries[2]))

        # The interpreter wants every arrival waited for. And a block must not end before the last arrival of the other.
        _wait_for_last(buffers.free, first, last)


def _score(buffers, first, tile, carry):
    """Weighs a tile and adds it to (weighted sum [64, 256], largest score so far, sum of weights)."""
    acc, top, total = carry
    stage = _stage(first, tile)
    buffers.wait_full(first, tile)
    # Always 0. The compiler does not know that, and so does not keep 64 registers of addresses from tile to tile.
    zero = lax.shift_right_logical(tile, jnp.int32(30))

    def score(ref):
        plgpu.wgmma(ref, buffers.queries.at[zero], buffers.keys.at[stage].transpose((1, 0)))
        return ref[...]

    scores = pl.run_scoped(score, plgpu.ACC((HEADS, TILE), jnp.float32))
    bias = plgpu.load(buffers.biases.at[stage], layout=_PER_COLUMN, optimized=False)
    scores = scores * SCALE + lax.broadcast_in_dim(bias, scores.shape, [1])
    peak = jnp.maximum(top, scores.max(axis=1))
    alpha = jnp.exp2(top - peak)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(peak, scores.shape, [0]))
    total = total * alpha + weights.sum(axis=1)
    weights = weights.astype(jnp.bfloat16)

    @pl.when(tile - first >= STAGES)
    def _():
        plgpu.barrier_wait(buffers.weights_free.at[stage])

    buffers.weights[stage] = weights
    buffers.rescale[stage] = alpha
    plgpu.commit_smem()
    plgpu.barrier_arrive(buffers.weighed.at[stage])
    acc = _add_values(buffers, SCORER, acc, alpha, weights, stage)
    return acc, peak, total


def _add(buffers, first, tile, acc):
    """Adds a tile to the weighted sum [64, 256] of the second half of the columns."""
    stage = _stage(first, tile)
    buffers.wait_full(first, tile)
    plgpu.barrier_wait(buffers.weighed.at[stage])
    alpha = plgpu.load(buffers.rescale.at[stage], layout=_PER_HEAD, optimized=False)
    acc = _add_values(buffers, ADDER, acc, alpha, buffers.weights.at[stage], stage)
    plgpu.barrier_arrive(buffers.weights_free.at[stage])
    return acc


def _add_values(buffers, warpgroup, acc, alpha, weights, stage):
    """`acc * alpha` and the tile's values, weighed."""
    acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
    acc = wgmma.multiply_add(acc, weights, buffers.keys.at[stage, :, pl.ds(warpgroup * HALF, HALF)])
    buffers.release(stage)
    return acc
