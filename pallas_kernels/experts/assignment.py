"""Which tokens an expert has: blocks of up to 8 (token, expert) pairs of one expert."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.common import mlir_helpers as mlir, thread_ops as ops
from pallas_kernels.common.primitive import kernel, primitive
from pallas_kernels.common.thread_ops import U32


SIZE = 8  # pairs of a block
WORDS = 16  # of a block in the table: its expert, then, from FIRST_PAIR on, its pairs
FIRST_PAIR = 8
_WARPS = mlir.THREADS // mlir.WARP


def most_blocks(pairs: int, experts: int) -> int:
    """The most blocks of pairs of one expert that there can be."""
    return min(pairs, experts + pairs // SIZE)


def assign(selected: jax.Array, experts: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Groups pairs by expert, in ascending order of experts and pairs. One block of threads runs it.

    Args:
      selected: [P] int32, the expert of each pair; pairs with none in 0 .. E - 1 are left out.
      experts: E.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      table [blocks, 16] int32: the block's expert, and its pairs from word 8 on, -1 where there is none; unspecified
      after the last block. And [1 + blocks] int32: the number of blocks, then zeros.
    """
    blocks = most_blocks(selected.size, experts)
    numbers = -(-experts // mlir.THREADS) * mlir.THREADS
    run = kernel(
        functools.partial(_body, experts),
        out_type=(
            jax.ShapeDtypeStruct((blocks * WORDS,), jnp.int32),
            jax.ShapeDtypeStruct((1 + blocks,), jnp.int32),
        ),
        kernel_name="experts_assign",
        grid=(1,),
        grid_names=("worker",),
        scratch_types=dict(scratch=plgpu.SMEM(((_WARPS + 1) * numbers + _WARPS,), jnp.int32)),
        interpret=interpret,
    )
    table, counts = run(selected)
    return table.reshape(blocks, WORDS), counts


def _body(experts, selected, table, counts, *, scratch):
    group_pairs(selected, table, counts, experts, scratch)


@primitive
def group_pairs(selected, table, counts, experts: int, scratch) -> None:
    """`assign` of [P] to [blocks * 16] and [1 + blocks], all in global memory.

    `scratch`: [5 * N + 4] int32 in shared memory, N a multiple of 128, at least the number of experts.
    """
    blocks, chosen = counts.shape[0] - 1, selected[...]
    here = (chosen >= 0) & (chosen < experts)
    pairs = lax.iota(jnp.int32, chosen.shape[0])
    rank = jnp.sum((chosen[None, :] == chosen[:, None]) & (pairs[None, :] < pairs[:, None]), axis=1)
    sizes = jnp.sum(chosen[None, :] == lax.iota(jnp.int32, experts)[:, None], axis=1)
    filled = (sizes + SIZE - 1) // SIZE
    place = jnp.where(here, (jnp.cumsum(filled) - filled)[jnp.where(here, chosen, 0)] + rank // SIZE, blocks)
    rows = jnp.full((blocks, WORDS), -1, jnp.int32).at[place, 0].set(chosen, mode="drop")
    table[...] = rows.at[place, FIRST_PAIR + rank % SIZE].set(pairs, mode="drop").reshape(-1)
    counts[...] = jnp.zeros((1 + blocks,), jnp.int32).at[0].set(jnp.sum(filled).astype(jnp.int32))


@group_pairs.mosaic
def _(selected, table, counts, experts, scratch):
    pairs, blocks = selected.shape[0], counts.shape[0] - 1
    number = (scratch.shape[0] - _WARPS) // (_WARPS + 1)
    threads = mlir.THREADS
    # Consecutive pairs of a warp, and a turn's 32 of these.
    turns = -(-pairs // threads)

    def emit(selected, table, counts, scratch):
        thread, lane, warp = ops.thread(), ops.lane(), ops.thread() >> 5
        sizes = ops.shared(scratch)  # of each warp's experts, then: pairs before these
        starts = sizes + 4 * _WARPS * number  # each expert's first block
        sums = starts + 4 * number
        own_sizes = sizes + (warp * number << 2)

        def every(total, visit):
            """Visits 0 .. total - 1, a number a thread at a time."""
            for first in range(0, total, threads):
                at = thread + first
                if first + threads <= total:
                    visit(at)
                else:
                    with ops.when(at < total):
                        visit(at)

        every(_WARPS * number, lambda i: ops.store(sizes + (i << 2), 0))
        every(1 + blocks, lambda i: ops.store_global(counts, i, U32(0)))
        every(blocks * WORDS, lambda i: ops.store_global(table, i, U32(0xFFFFFFFF)))
        mgpu.utils.warpgroup_barrier()
        found = []
        # A thread's pairs stay in its registers, also where it has none in the last turns.
        for turn in range(turns):
            pair = warp * (turns * mlir.WARP) + lane + turn * mlir.WARP
            expert = ops.load_global(selected, pair.minimum(pairs - 1))
            inside = (pair < pairs) & (expert < experts)
            same = ops.ptx("match.any.sync.b32 $0, $1, 0xffffffff;", inside.where(expert, 0xFFFFFFFF))
            below = ops.count_bits(same & ((U32(1) << lane) - 1))
            there = own_sizes + (expert.minimum(experts - 1) << 2)
            before = ops.load(there)
            mgpu.utils.warp_barrier()
            with ops.when(inside & below.equals(0)):
                ops.store(there, before + ops.count_bits(same))
            mgpu.utils.warp_barrier()
            found.append((pair, expert, before + below, inside))
        mgpu.utils.warpgroup_barrier()
        each = number // threads
        filled = []
        for i in range(each):
            at = sizes + (thread * each + i << 2)
            before = U32(0)
            for other in range(_WARPS):
                size = ops.load(at + 4 * other * number)
                ops.store(at + 4 * other * number, before)
                before = before + size
            filled.append((before + (SIZE - 1)) // SIZE)
        total = U32(0)
        for x in filled:
            total = total + x
        # The blocks before this warp's experts, then before this thread's.
        up_to = ops.warp_prefix_sum(total)
        with ops.when(lane.equals(31)):
            ops.store(sums + (warp << 2), up_to)
        mgpu.utils.warpgroup_barrier()
        before = up_to - total
        all_blocks = U32(0)
        for other in range(_WARPS):
            others = ops.load(sums + 4 * other)
            before = before + (warp > other).where(others, 0)
            all_blocks = all_blocks + others
        for i, x in enumerate(filled):
            ops.store(starts + (thread * each + i << 2), before)
            before = before + x
        with ops.when(thread.equals(0)):
            ops.store_global(counts, U32(0), all_blocks)
        mgpu.utils.warpgroup_barrier()
        for pair, expert, rank, inside in found:
            with ops.when(inside):
                rank = rank + ops.load(own_sizes + (expert << 2))
                block = ops.load(starts + (expert << 2)) + rank // SIZE
                ops.store_global(table, block * WORDS, expert)
                ops.store_global(table, block * WORDS + rank % SIZE + FIRST_PAIR, pair)

    mlir.inline(emit, selected, table, counts, scratch)


@primitive
def load_blocks(table, first: jax.Array, target) -> None:
    """Copies blocks `first ..` of the table to `target` [16 * blocks] int32 in shared memory, by one warpgroup."""
    rows = jnp.minimum(first * WORDS + lax.iota(jnp.int32, target.shape[0]), table.shape[0] - 1)
    target[...] = table[...][rows]


@load_blocks.mosaic
def _(table, first, target):
    size, last = target.shape[0], table.shape[0] - 1

    def emit(table, first, target):
        thread, first, there = ops.thread() % mlir.THREADS, U32(mlir.scalar(first)) * WORDS, ops.shared(target)
        for start in range(0, size, mlir.THREADS):
            at = thread + start
            with ops.when(at < size):
                ops.store(there + (at << 2), ops.load_global(table, (first + at).minimum(last)))

    mlir.inline(emit, table, first, target)


@primitive
def load_weights(weights, blocks, target) -> None:
    """Copies the routing weights of blocks that `load_blocks` left to `target` [8 * blocks] float32 in shared memory.

    By the same warpgroup.

    Args:
      weights: [P] float32 in global memory.
      blocks: [16 * blocks] int32 in shared memory.
      target: unspecified where there is no pair.
    """
    pairs = blocks[...].reshape(-1, WORDS)[:, FIRST_PAIR:].reshape(-1)
    inside = (pairs >= 0) & (pairs < weights.shape[0])
    target[...] = jnp.where(inside, weights[...][jnp.where(inside, pairs, 0)], 0.0)


@load_weights.mosaic
def _(weights, blocks, target):
    size, last = target.shape[0], weights.shape[0] - 1

    def emit(weights, blocks, target):
        thread, source, there = ops.thread() % mlir.THREADS, ops.shared(blocks), ops.shared(target)
        mgpu.utils.warpgroup_barrier()
        for start in range(0, size, mlir.THREADS):
            at = thread + start
            with ops.when(at < size):
                word = (at >> 3) * WORDS + (at & SIZE - 1) + FIRST_PAIR
                pair = ops.load(source + (word << 2)).minimum(last)
                ops.store(there + (at << 2), ops.load_global(weights, pair))
        mgpu.utils.warpgroup_barrier()

    mlir.inline(emit, weights, blocks, target)


# --- blocks of threads that wait for each other ---


@primitive
def announce(counts, block: jax.Array) -> None:
    """Counts one more tile of a block of pairs, once this warpgroup has written it to global memory."""


@announce.mosaic
def _(counts, block):
    def emit(counts, block):
        mgpu.utils.warpgroup_barrier()
        with ops.when(U32(mlir.thread()).equals(0)):
            place = _count(counts, block)
            mlir.ptx("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$0], 1;", place)

    mlir.inline(emit, counts, block)


@primitive
def await_tiles(counts, block: jax.Array, tiles: int) -> None:
    """Waits until so many tiles of a block of pairs are written; what follows reads them."""


@await_tiles.mosaic
def _(counts, block, tiles):
    def emit(counts, block):
        place = _count(counts, block)
        with ops.when(ops.lane().equals(0)):
            code = """{ .reg .pred p; .reg .b32 r; waiting: ld.acquire.gpu.global.u32 r, [$0];
                setp.lt.u32 p, r, $1; @p bra waiting; }"""
            mlir.ptx(code, place, mlir.i32(tiles))
        mgpu.utils.warp_barrier()

    mlir.inline(emit, counts, block)


def _count(counts, block):
    offset = mlir.to_i64((U32(mlir.scalar(block)) * 4 + 4).value)
    return mlir.at(mlir.global_pointer(counts), offset)
