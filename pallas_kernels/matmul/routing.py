"""Pairs of a token and an expert, few of them, grouped by expert: blocks of up to 8 pairs of one expert."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.matmul.quantized_weights import ROWS
from pallas_kernels.mgpu import mlir, thread_ops as ops
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.launch import primitive


SIZE = 8  # pairs of a block
WORDS = 16  # of a block in the table: its expert, then, from FIRST_PAIR on, its pairs
FIRST_PAIR = 8
_WARPS = mlir.THREADS // mlir.WARP


def most_blocks(pairs: int, experts: int) -> int:
    """The most blocks of pairs of one expert that there can be."""
    return min(pairs, experts + pairs // SIZE)


def counts_size(blocks: int, channels: int) -> int:
    """Of the counts that `experts` keeps: their number, one of each block and of the shared expert, of each tile."""
    return 2 + blocks + channels // ROWS


def scratch_words(experts: int) -> int:
    """32-bit words of shared memory that `group_pairs` needs."""
    return (_WARPS + 1) * -(-experts // mlir.THREADS) * mlir.THREADS + _WARPS


@primitive
def group_pairs(selected, table, counts, experts: int, scratch) -> None:
    """Groups pairs by expert, in ascending order of experts and pairs; one warpgroup runs it, of threads 0 .. 127.

    Args:
      selected: [P] int32 in global memory, the expert of each pair; pairs with none in 0 .. E - 1 are left out.
      table: [blocks * 16] int32 in global memory, receives of each block its expert, and its pairs from word 8 on, -1
        where there is none; unspecified after the last block.
      counts: [N] int32 in global memory, receives the number of blocks, then zeros; N at least 1.
      experts: E.
      scratch: [`scratch_words(E)`] int32 in shared memory.
    """
    blocks, chosen = table.shape[0] // WORDS, selected[...]
    here = (chosen >= 0) & (chosen < experts)
    pairs = lax.iota(jnp.int32, chosen.shape[0])
    rank = jnp.sum((chosen[None, :] == chosen[:, None]) & (pairs[None, :] < pairs[:, None]), axis=1)
    sizes = jnp.sum(chosen[None, :] == lax.iota(jnp.int32, experts)[:, None], axis=1)
    filled = (sizes + SIZE - 1) // SIZE
    place = jnp.where(here, (jnp.cumsum(filled) - filled)[jnp.where(here, chosen, 0)] + rank // SIZE, blocks)
    rows = jnp.full((blocks, WORDS), -1, jnp.int32).at[place, 0].set(chosen, mode="drop")
    table[...] = rows.at[place, FIRST_PAIR + rank % SIZE].set(pairs, mode="drop").reshape(-1)
    counts[...] = jnp.zeros(counts.shape, jnp.int32).at[0].set(jnp.sum(filled).astype(jnp.int32))


@group_pairs.mosaic
def _(selected, table, counts, experts, scratch):
    pairs, blocks, cleared = selected.shape[0], table.shape[0] // WORDS, counts.shape[0]
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
        every(cleared, lambda i: ops.store_global(counts, i, U32(0)))
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
