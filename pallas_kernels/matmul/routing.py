"""Token-expert routing of few tokens: splits the (token, expert) pairs into groups of up to 8 pairs of one expert.

Pair t * k + j is token t with the j-th of its k experts. One warpgroup does the work in three steps: each warp counts
its pairs of each expert; prefix sums over experts give each expert's first group; each pair is written to its group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.matmul.quantized_weights import ROWS
from pallas_kernels.mgpu import mlir, thread_ops as ops
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import primitive


GROUP_SIZE = 8  # largest number of pairs of a group
# Number of 32-bit words of a group in the table. Word 0 is the expert, and the words from FIRST_PAIR on are the pairs.
GROUP_WORDS = 16
FIRST_PAIR = 8
_WARPS = mlir.THREADS // mlir.WARP


def max_groups(pairs: int, experts: int) -> int:
    """Returns the largest number of groups that `pairs` pairs can have."""
    return min(pairs, experts + pairs // GROUP_SIZE)


def counts_size(groups: int, channels: int) -> int:
    """Returns the length of the array of counters of the kernel `experts`, see `experts.tile_counters`.

    Entry 0 is the number of groups. Then come one counter for each of up to `groups` groups, one for the shared expert,
    and one for each 64 of the `channels` output channels.
    """
    return 2 + groups + channels // ROWS


def scratch_words(experts: int) -> int:
    """Returns the number of 32-bit words of shared memory that `group_pairs` needs."""
    return (_WARPS + 1) * -(-experts // mlir.THREADS) * mlir.THREADS + _WARPS


def rank_pairs(chosen: jax.Array, experts: int) -> tuple[jax.Array, ...]:
    """Ranks each pair among the pairs of the same expert; for interpreted kernels.

    Args:
      chosen: [P] int32, the expert of each pair. A value outside of 0 .. experts - 1 stands for no expert.
      experts: number of experts.

    Returns:
      (pairs, has_expert, rank, sizes). `pairs` [P] int32 are the indices 0 .. P - 1 of the pairs. `has_expert` [P] bool
      says whether a pair has an expert. `rank` [P] int32 is the number of earlier pairs of the pair's expert. `sizes`
      [experts] int32 is the number of pairs of each expert.
    """
    pairs = lax.iota(jnp.int32, chosen.shape[0])
    rank = jnp.sum((chosen[None, :] == chosen[:, None]) & (pairs[None, :] < pairs[:, None]), axis=1)
    sizes = jnp.sum(chosen[None, :] == lax.iota(jnp.int32, experts)[:, None], axis=1).astype(jnp.int32)
    return pairs, (chosen >= 0) & (chosen < experts), rank, sizes


@primitive
def group_pairs(selected_gmem, table_gmem, counts_gmem, experts: int, scratch_smem) -> None:
    """Groups pairs by expert, in ascending order of experts and pairs. Threads 0 .. 127 of a block call this function.

    Args:
      selected_gmem: [P] int32, the expert of each pair. A pair whose expert is not in 0 .. experts - 1 gets no group.
      table_gmem: [groups * 16] int32 to write. Word 0 of a group is its expert. Words 8 .. 15 are the indices of its
        pairs, filled up with -1. The words of unused groups are unspecified.
      counts_gmem: [N] int32 to write: the number of groups, then zeros.
      experts: number of experts.
      scratch_smem: [`scratch_words(experts)`] int32.
    """
    groups = table_gmem.shape[0] // GROUP_WORDS
    chosen = selected_gmem[...]
    pairs, has_expert, rank, sizes = rank_pairs(chosen, experts)
    group_counts = (sizes + GROUP_SIZE - 1) // GROUP_SIZE
    first_group = jnp.cumsum(group_counts) - group_counts
    group = jnp.where(has_expert, first_group[jnp.where(has_expert, chosen, 0)] + rank // GROUP_SIZE, groups)
    table = jnp.full((groups, GROUP_WORDS), -1, jnp.int32).at[group, 0].set(chosen, mode="drop")
    table_gmem[...] = table.at[group, FIRST_PAIR + rank % GROUP_SIZE].set(pairs, mode="drop").reshape(-1)
    counts_gmem[...] = jnp.zeros(counts_gmem.shape, jnp.int32).at[0].set(jnp.sum(group_counts))


@mlir.emits(group_pairs)
def _emit_group_pairs(selected_gmem, table_gmem, counts_gmem, experts, scratch_smem):
    pairs = selected_gmem.type.shape[0]
    table_words = table_gmem.type.shape[0]
    num_counts = counts_gmem.type.shape[0]
    padded = (scratch_smem.type.shape[0] - _WARPS) // (_WARPS + 1)
    ids = _Ids(ops.thread(), ops.lane(), ops.thread() >> 5)
    # [warps, padded] number of each warp's pairs of each expert; `padded` is the number of experts, rounded up.
    # `_fill_groups` replaces each number by the number of the expert's pairs in warps with lower indices.
    sizes = ops.shared(scratch_smem)
    first_groups = sizes + 4 * _WARPS * padded  # [padded] index of each expert's first group
    sums = first_groups + 4 * padded  # [warps] scratch memory of `_start_groups`
    own_sizes = sizes + ((ids.warp * padded) << 2)
    ops.for_each(_WARPS * padded, lambda i: ops.store(sizes + (i << 2), 0), ids.thread)
    ops.for_each(num_counts, lambda i: ops.store_global(counts_gmem, i, 0), ids.thread)
    ops.for_each(table_words, lambda i: ops.store_global(table_gmem, i, 0xFFFFFFFF), ids.thread)
    mgpu.utils.warpgroup_barrier()
    # A thread ranks `turns` pairs, one after the other, and keeps the ranks in registers. Past the last pair, there is
    # nothing to rank.
    turns = -(-pairs // mlir.THREADS)
    ranked = [_rank_pair(ids, selected_gmem, own_sizes, turn, turns, pairs, experts) for turn in range(turns)]
    mgpu.utils.warpgroup_barrier()
    group_counts = [_fill_groups(ids, sizes, padded, i) for i in range(padded // mlir.THREADS)]
    total = _start_groups(ids, group_counts, first_groups, sums)
    with ops.when(ids.thread.equals(0)):
        ops.store_global(counts_gmem, 0, total)
    mgpu.utils.warpgroup_barrier()
    for pair, expert, rank, inside in ranked:
        with ops.when(inside):
            rank = rank + ops.load(own_sizes + (expert << 2))
            group = ops.load(first_groups + (expert << 2)) + rank // GROUP_SIZE
            ops.store_global(table_gmem, group * GROUP_WORDS, expert)
            ops.store_global(table_gmem, group * GROUP_WORDS + rank % GROUP_SIZE + FIRST_PAIR, pair)


class _Ids(NamedTuple):
    """The indices of a thread."""

    thread: Scalar  # index of the thread in the block
    lane: Scalar  # index of the thread in its warp
    warp: Scalar  # index of the warp in the block


def _rank_pair(ids, selected, own_sizes, turn, turns, pairs, experts):
    """Ranks this thread's `turn`-th pair among the warp's pairs of the same expert, and counts the pair.

    A warp ranks `turns * 32` consecutive pairs, 32 of them at a time.

    Args:
      ids: indices of the thread.
      selected: reference [P] int32 in global memory, the expert of each pair.
      own_sizes: address of the warp's counts, a word for each expert: the number of pairs that the warp has ranked.
      turn: index of the pair among those of this thread, 0 .. turns - 1.
      turns: number of pairs of a thread.
      pairs: number of all pairs.
      experts: number of experts.

    Returns:
      (pair, expert, rank, inside). `pair` is the index of the pair. `rank` is the number of the warp's earlier pairs of
      the same expert. `inside` says whether the pair exists and has a valid expert.
    """
    pair = ids.warp * (turns * mlir.WARP) + ids.lane + turn * mlir.WARP
    expert = ops.load_global(selected, pair.minimum(pairs - 1))
    inside = (pair < pairs) & (expert < experts)
    same = ops.ptx("match.any.sync.b32 $0, $1, 0xffffffff;", inside.where(expert, 0xFFFFFFFF))
    below = ops.count_bits(same & ((Scalar(1) << ids.lane) - 1))
    size_address = own_sizes + (expert.minimum(experts - 1) << 2)
    before = ops.load(size_address)
    mgpu.utils.warp_barrier()
    with ops.when(inside & below.equals(0)):
        ops.store(size_address, before + ops.count_bits(same))
    mgpu.utils.warp_barrier()
    return pair, expert, before + below, inside


def _fill_groups(ids, sizes, padded, i):
    """Replaces the warps' counts of an expert's pairs by exclusive prefix sums, and returns the expert's group count.

    The prefix sum of a warp is the number of the expert's pairs in the warps with lower indices.

    Args:
      ids: indices of the thread.
      sizes: address of the counts [warps, padded].
      padded: number of experts, rounded up to a multiple of 128.
      i: index of the expert among the `padded / 128` consecutive experts of the thread.

    Returns:
      The number of groups of the expert.
    """
    expert = ids.thread * (padded // mlir.THREADS) + i
    address = sizes + (expert << 2)
    before = Scalar(0)
    for warp in range(_WARPS):
        size = ops.load(address + 4 * warp * padded)
        ops.store(address + 4 * warp * padded, before)
        before = before + size
    return (before + (GROUP_SIZE - 1)) // GROUP_SIZE


def _start_groups(ids, group_counts, first_groups, sums):
    """Stores the index of the first group of each of this thread's experts at address `first_groups`.

    `group_counts` lists the number of groups of each of these experts. `sums` is the address of scratch memory, a word
    for each warp. Returns the number of groups of all experts.
    """
    total = Scalar(0)
    for count in group_counts:
        total = total + count
    up_to = ops.warp_prefix_sum(total)
    with ops.when(ids.lane.equals(31)):
        ops.store(sums + (ids.warp << 2), up_to)
    mgpu.utils.warpgroup_barrier()
    before = up_to - total
    groups = Scalar(0)
    for warp in range(_WARPS):
        warp_groups = ops.load(sums + 4 * warp)
        before = before + (ids.warp > warp).where(warp_groups, 0)
        groups = groups + warp_groups
    for i, count in enumerate(group_counts):
        expert = ids.thread * len(group_counts) + i
        ops.store(first_groups + (expert << 2), before)
        before = before + count
    return groups
