"""Exact top-k of each row's first scores, in one launch that reads the scores once."""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_topk.radix_plan import FIRST_KEY, SHARED_BYTES, SHIFTS, VECTOR, CandidateList, RadixPlan
from pallas_kernels.indexer_topk.radix_select import RadixSelect
from pallas_kernels.indexer_topk.radix_select_interpreted import InterpretedRadixSelect
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_K = 2048


@cached_trace("k")
def indexer_topk(scores: jax.Array, lengths: jax.Array, k: int, *, interpret: bool = False) -> jax.Array:
    """The k largest of the first lengths[t] scores of each row.

    A cluster of blocks shares a row. Of equal scores the lower index is selected first; 0 and -0 are equal. NaN is not
    allowed.

    Args:
      scores: [T, E] float32, E a multiple of 4. -inf is never selected. Scores from lengths[t] on are neither
        selected nor read.
      lengths: [T] int32, 0 .. E.
      k: entries to select, 1 .. 2048.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, k] int32, ascending; -1 at the end where fewer than k are selectable.

    Raises:
      NotImplementedError: a shape or dtype is not one of these, or rows are longer than fit the marks in shared
        memory (about 1.4 million).
    """
    tokens, entries = scores.shape
    check_array("scores", scores, jnp.float32, None, None)
    check_array("lengths", lengths, jnp.int32, tokens)
    check_rules(
        {
            f"k of 1 to {MAX_K}, got {k}": 1 <= k <= MAX_K,
            f"rows of a multiple of 4 scores, got {entries}": entries % 4 == 0,
        }
    )
    if scores.size == 0:
        return jnp.full((tokens, k), -1, jnp.int32)
    # Interpreted: the smallest plan in which blocks exchange data.
    plan = RadixPlan(k, 2, 1, 4, -(-entries // (2 * 128 * 4))) if interpret else _plan(tokens, entries, k)
    return select(scores, lengths, plan, interpret=interpret)


def _plan(tokens, entries, k):
    """How many blocks share a row, and how much of it a thread holds; measured on an H100 and an H200."""
    # As many blocks as run at once: one row more would wait for all others. With more rows than that, blocks that
    # share one only wait for each other.
    most = next((blocks for blocks, at_once in _AT_ONCE.items() if tokens <= at_once), 1)
    if entries <= 32768:
        # One block keeps up: a cluster costs more to start and to wait for than it saves.
        blocks, warpgroups = 1, 8
    elif most == 8 and entries <= 8 * 16384:
        blocks, warpgroups = 8, 4
    else:
        blocks, warpgroups = min(most, -(-entries // 32768)), 8
    while True:
        share = -(-entries // (blocks * warpgroups * 128))
        plan = RadixPlan(k, blocks, warpgroups, -(-share // 4) * 4)
        if share > 32:
            plan = RadixPlan(k, blocks, warpgroups, 24, -(-share // 24))
        if plan.shared_bytes <= SHARED_BYTES or blocks == 8:
            return plan
        blocks += 1


# Blocks of a cluster -> rows that run at once. A block fills a multiprocessor. Fewer clusters fit than 132 / blocks,
# since none spans two groups of up to 18 multiprocessors: of 8 blocks 16 did not fit, of 4 blocks 32 did not.
_AT_ONCE = {8: 14, 4: 30, 3: 40, 2: 66}


def select(scores: jax.Array, lengths: jax.Array, plan: RadixPlan, *, interpret: bool = False) -> jax.Array:
    """`indexer_topk` with rows divided as `plan` says."""
    tokens = scores.shape[0]
    rule = f"rows whose marks fit shared memory, got rows of {scores.shape[1]}"
    check_rules({rule: plan.shared_bytes <= SHARED_BYTES})
    algorithm = InterpretedRadixSelect if interpret else RadixSelect

    def body(*refs, **scratch):
        _select_row(algorithm(plan, *refs, **scratch))

    run = kernel(
        body,
        out_type=algorithm.out_types(plan, tokens),
        scratch_types=algorithm.scratch_types(plan),
        kernel_name="indexer_topk",
        grid=(tokens,),
        grid_names=("row",),
        cluster=(plan.blocks,),
        cluster_names=("block",),
        num_threads=plan.warpgroups,
        thread_name="warpgroup",
        interpret=interpret,
    )
    return run(scores, lengths)[0]


def _select_row(radix: RadixSelect) -> None:
    """Runs the steps for one row."""
    plan = radix.plan
    one_chunk, first = plan.chunks == 1, jnp.int32(0)
    per_chunk = plan.values // VECTOR
    chunks = lax.div(radix.steps + (per_chunk - 1), jnp.int32(per_chunk))
    radix.zero()
    if one_chunk:
        held = radix.load(first)
        radix.wait()
    else:
        radix.wait()
        # Down to the first chunk, which stays in registers, and up again: what was read last may still be in a cache.
        pl.loop(1, chunks)(lambda i: radix.count(radix.load(chunks - i), chunks - i))
        held = radix.load(first)
    is_long = radix.length > plan.k

    @pl.when(is_long)
    def _():
        radix.count(held, first)
        radix.find(0, jnp.int32(plan.k), radix.alone)

    # Keys low .. low + width - 1 contain the k-th largest key as their rank-th largest. Larger keys are selected.
    digit, rank, spare = radix.found(0)
    first_low = low = jnp.where(digit > 0, (digit - 1) << SHIFTS[0], FIRST_KEY)
    width = jnp.where(digit > 0, 1 << SHIFTS[0], 0)

    if one_chunk:
        kept, overflowed = radix.collect(held, low, first), jnp.bool(False)
    else:
        counts = lax.fori_loop(
            1,
            chunks,
            lambda chunk, counts: radix.append(counts, radix.load(chunk), first_low, chunk),
            radix.append(radix.no_candidates(), held, low, first),
        )
        kept, overflowed = CandidateList(counts, None), radix.overflowed()

    def each_list(visit):
        """Visits the list of all chunks or, where it overflowed, a new list for each chunk."""
        pl.when(~overflowed)(lambda: visit(kept))
        if not one_chunk:
            again = pl.loop(0, chunks)
            pl.when(overflowed)(lambda: again(lambda chunk: visit(radix.collect(radix.load(chunk), first_low, chunk))))

    shared = jnp.bool(False)
    if plan.blocks > 1:
        exchanges = is_long & ~radix.alone
        pl.when(exchanges)(lambda: radix.share_candidates(kept, overflowed))
        shared = exchanges & radix.all_shared()

    for number in (1, 2):

        @pl.when(spare > 0)
        def _(number=number, low=low, width=width, rank=rank):
            pl.when(shared)(lambda: radix.count_shared_candidates(number, low, width))
            pl.when(~shared)(lambda: each_list(lambda kept: radix.count_candidates(number, kept, low, width)))
            radix.find(number, rank, shared | radix.alone)

        # All zero where the pass was skipped.
        digit, *found = radix.found(number)
        low = jnp.where(digit > 0, low + ((digit - 1) << SHIFTS[number]), low)
        width = jnp.where(digit > 0, 1 << SHIFTS[number], width)
        rank, spare = jnp.where(digit > 0, found[0], rank), found[1]

    each_list(lambda kept: radix.mark(kept, low, width))
    pl.when(shared)(lambda: radix.total_shared_marks(low, width))
    radix.write(rank, shared)
