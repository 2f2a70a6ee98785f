"""Which tokens an expert has: blocks of a few (token, expert) pairs of one expert, found by every block of threads."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.common import mlir_helpers as mlir, thread_ops as ops
from pallas_kernels.common.primitive import primitive
from pallas_kernels.common.thread_ops import U32


def most_blocks(pairs: int, experts: int, size: int) -> int:
    """The most blocks of `size` pairs of one expert that there can be."""
    return min(pairs, experts + pairs // size)


@primitive
def assign(selected, count, experts, rows, scratch) -> None:
    """Groups pairs by expert: block b holds up to N pairs of expert `experts[b]`. One warpgroup runs it.

    On a GPU the order of an expert's pairs is that of atomic additions: not the same in two blocks of threads.

    Args:
      selected: [P] int32 in global memory, the expert of each pair, 0 .. E - 1.
      count: [1] int32, receives the number of blocks. It and all that follow are in shared memory.
      experts: [blocks] int32, receives the blocks' experts, in ascending order.
      rows: [blocks * N] int32, receives the blocks' pairs; -1 where there is none.
      scratch: [2 * E + 4] int32, E a multiple of 128, at least the number of experts.
    """
    blocks, number = experts.shape[0], scratch.shape[0] // 2 - 2
    size = rows.shape[0] // blocks
    chosen = selected[...]
    pairs = lax.iota(jnp.int32, chosen.shape[0])
    rank = jnp.sum((chosen[None, :] == chosen[:, None]) & (pairs[None, :] < pairs[:, None]), axis=1)
    sizes = jnp.sum(chosen[None, :] == lax.iota(jnp.int32, number)[:, None], axis=1)
    filled = (sizes + size - 1) // size
    place = (jnp.cumsum(filled) - filled)[chosen] + rank // size
    count[0] = jnp.sum(filled).astype(jnp.int32)
    experts[...] = jnp.zeros((blocks,), jnp.int32).at[place].set(chosen)
    rows[...] = jnp.full((blocks * size,), -1, jnp.int32).at[place * size + rank % size].set(pairs)


@assign.mosaic
def _(selected, count, experts, rows, scratch):
    pairs, blocks, number = selected.shape[0], experts.shape[0], scratch.shape[0] // 2 - 2
    size, threads = rows.shape[0] // blocks, mlir.THREADS

    def emit(selected, count, experts, rows, scratch):
        thread = U32(mlir.thread())
        count, experts, rows, sizes = (ops.shared(x) for x in (count, experts, rows, scratch))
        starts = sizes + 4 * number
        sums = starts + 4 * number

        def every(total, visit):
            """Visits 0 .. total - 1, a number a thread at a time."""
            for first in range(0, total, threads):
                at = thread + first
                if first + threads <= total:
                    visit(at)
                else:
                    with ops.when(at < total):
                        visit(at)

        every(number, lambda e: ops.store(sizes + (e << 2), 0))
        every(blocks * size, lambda i: ops.store(rows + (i << 2), -1))
        mgpu.utils.warpgroup_barrier()
        found = []
        # A thread's pairs stay in its registers, also where it has none in the last turn.
        for first in range(0, pairs, threads):
            pair = (thread + first).minimum(pairs - 1)
            expert = ops.load_global(selected, pair)
            own = (thread + first < pairs).where(1, 0)
            found.append((pair, expert, ops.fetch_add(sizes + (expert << 2), own), own))
        mgpu.utils.warpgroup_barrier()
        each = number // threads
        filled = [ops.load(sizes + (thread * each + i << 2)) + (size - 1) for i in range(each)]
        filled = [x // size for x in filled]
        total = U32(0)
        for x in filled:
            total = total + x
        # The sums before this warp's, then before this thread's.
        up_to = ops.warp_prefix_sum(total)
        warp = thread >> 5
        with ops.when((thread & 31).equals(31)):
            ops.store(sums + (warp << 2), up_to)
        mgpu.utils.warpgroup_barrier()
        before = up_to - total
        all_blocks = U32(0)
        for other in range(threads // mlir.WARP):
            others = ops.load(sums + 4 * other)
            before = before + (warp > other).where(others, 0)
            all_blocks = all_blocks + others
        for i, x in enumerate(filled):
            ops.store(starts + (thread * each + i << 2), before)
            before = before + x
        with ops.when(thread.equals(0)):
            ops.store(count, all_blocks)
        mgpu.utils.warpgroup_barrier()
        for pair, expert, rank, own in found:
            with ops.when(own > 0):
                block = ops.load(starts + (expert << 2)) + rank // size
                ops.store(experts + (block << 2), expert)
                ops.store(rows + (block * size + rank % size << 2), pair)

    mlir.inline(emit, selected, count, experts, rows, scratch)
