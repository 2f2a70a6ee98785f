"""Exact top-k of the scores of each row by radix select, in one launch.

    selected(row) = indices of the k largest of scores[row, : lengths[row]], in ascending order

The grid has one cluster of `plan.blocks` blocks for each row. Every warpgroup runs all of these steps of `RadixSelect`
on its part of the row. A key is an unsigned integer of 32 bits that rises with the score. The digits of a key are its
first 11, its next 11 and its last 10 bits.

    step                      does                                                         waits for
    zero, wait, load, count   counts scores by the first digit of their keys               zeroed counts of all blocks
    find                      finds the first digit of the k-th largest key                counts of all blocks
    collect, append           lists the scores that have this digit or a larger one
    share_candidates          sends the lists to all blocks, if they are short             lists of all blocks
    count_candidates, find    repeats the search with the second and the third digit       counts unless lists were sent
    mark                      sets a bit for each entry in or above the interval that the search ended with
    write                     writes the selected entries in ascending order               marks unless lists were sent
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_topk.radix_plan import FIRST_KEY, MAX_K, SHIFTS, VECTOR, CandidateList, RadixPlan
from pallas_kernels.indexer_topk.radix_select import RadixSelect
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import SHARED_BYTES
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


@cached_trace("k")
def indexer_topk(scores: jax.Array, lengths: jax.Array, k: int, *, interpret: bool = False) -> jax.Array:
    """Selects the k largest of the first lengths[t] scores of each row.

    Among equal scores, the scores with the lowest indices are selected; 0 and -0 are equal. NaN is not allowed.

    Args:
      scores: [T, E] float32 scores, E a multiple of 4. Scores of -inf are never selected. Scores from index lengths[t]
        on are ignored and may have any value.
      lengths: [T] int32, number of scores to select from in each row, 0 .. E.
      k: number of entries to select, 1 .. 2048.
      interpret: must be False, because the steps are PTX, which the interpreter cannot run.

    Returns:
      [T, k] int32 indices in ascending order. If a row has fewer than k scores to select, the rest of its result is -1.

    Raises:
      NotImplementedError: `interpret` is set, a shape or dtype is not supported, or a row has more than about 1.57
        million scores.
    """
    if interpret:
        raise NotImplementedError("the top-k kernel is written in PTX, which the interpreter cannot run")
    tokens, entries = scores.shape
    check_array("scores", scores, jnp.float32, None, None)
    check_array("lengths", lengths, jnp.int32, tokens)
    check_rules({f"k of 1 to {MAX_K}, got {k}": 1 <= k <= MAX_K})
    check_rules({f"rows of a multiple of 4 scores, got {entries}": entries % 4 == 0})
    if scores.size == 0:
        return jnp.full((tokens, k), -1, jnp.int32)
    return select(scores, lengths, RadixPlan.for_rows(tokens, entries, k))


def select(scores, lengths, plan: RadixPlan, *, algorithm=RadixSelect, interpret: bool = False) -> jax.Array:
    """Computes `indexer_topk` of checked arguments with a given plan.

    Args:
      scores, lengths: as in `indexer_topk`.
      plan: division of a row among blocks and warps.
      algorithm: class with the interface of `RadixSelect`. Tests pass a class that is written in jax.numpy.
      interpret: whether to run on the CPU, interpreted; only for an `algorithm` in jax.numpy.

    Returns:
      [T, plan.k] int32 indices.

    Raises:
      NotImplementedError: a block's data does not fit into shared memory, because the rows are too long.
    """
    tokens = scores.shape[0]
    rule = f"rows whose marks fit shared memory, got rows of {scores.shape[1]}"
    check_rules({rule: plan.shared_bytes <= SHARED_BYTES})
    launch = kernel(
        lambda *refs, **scratch: _select_row(algorithm.of_row(plan, *refs, **scratch)),
        out_type=algorithm.out_types(plan, tokens),
        scratch_types=algorithm.scratch_types(plan),
        kernel_name="indexer_topk",
        grid={"row": tokens},
        cluster={"block": plan.blocks},
        num_threads=plan.warpgroups,
        interpret=interpret,
    )
    return launch(scores, lengths)[0]


class _Search(NamedTuple):
    """State of the search for the k-th largest key, as int32 scalars.

    The k-th largest key is in the interval low .. low + width - 1, and all scores with keys above it are selected.
    """

    low: Any  # smallest key of the interval
    width: Any  # number of possible keys in the interval; 0 if all scores are selected
    rank: Any  # rank of the k-th largest key among the keys in the interval; 1 for the largest
    spare: Any  # number of scores that have keys in the interval, but are not selected


def _select_row(radix: RadixSelect) -> None:
    """Runs all steps of the selection for the row of `radix`."""
    per_chunk = radix.plan.values // VECTOR
    chunks = lax.div(radix.steps + (per_chunk - 1), per_chunk)
    with jax.named_scope("count_scores"):
        scores, is_long = _count_scores(radix, chunks)
    digit, rank, spare = radix.found(0)
    low = jnp.where(digit > 0, (digit - 1) << SHIFTS[0], FIRST_KEY)
    search = _Search(low, jnp.where(digit > 0, 1 << SHIFTS[0], 0), rank, spare)
    with jax.named_scope("list_candidates"):
        listed, overflowed = _list_candidates(radix, scores, low, chunks)

    def for_each_list(visit):
        """Calls `visit` on each list of this warpgroup's candidates.

        Usually this is one list, `listed`. If that list is incomplete, because a thread's candidates did not fit into
        its shared memory, every chunk's scores are loaded again, and `visit` is called on a list for each chunk.
        """
        pl.when(~overflowed)(lambda: visit(listed))
        if radix.plan.chunks > 1:
            for_each_chunk = pl.loop(0, chunks)

            def visit_chunk(chunk):
                visit(radix.collect(radix.load(chunk), low, chunk))

            pl.when(overflowed)(lambda: for_each_chunk(visit_chunk))

    shared = jnp.bool(False)
    if radix.plan.blocks > 1:
        exchanges = is_long & ~radix.alone
        pl.when(exchanges)(lambda: radix.share_candidates(listed, overflowed))
        shared = exchanges & radix.all_shared()
    with jax.named_scope("refine"):
        for number in (1, 2):
            search = _refine(radix, number, search, shared, for_each_list)
    with jax.named_scope("write"):
        for_each_list(lambda listed: radix.mark(listed, search.low, search.width))
        pl.when(shared)(lambda: radix.total_shared_marks(search.low, search.width))
        radix.write(search.rank, shared)


def _count_scores(radix, chunks):
    """Counts the row's scores by the first digit of their keys, and finds the first digit of the k-th largest key.

    A row of at most k scores needs no search. `radix.found(0)` then returns zeros.

    Args:
      radix: the `RadixSelect` of the row.
      chunks: int32 scalar, number of chunks of scores that a thread loads.

    Returns:
      (scores, is_long). `scores` are the scores of chunk 0, from `radix.load`. `is_long` is a bool scalar: whether the
      row has more than k scores.
    """
    plan = radix.plan
    first_chunk = jnp.int32(0)
    radix.zero()
    if plan.chunks == 1:
        # The loads are in flight during the wait.
        scores = radix.load(first_chunk)
        radix.wait()
    else:
        radix.wait()
        # Counts chunks in descending order. `_list_candidates` reads them in ascending order, and so begins with the
        # chunks that were just read and may still be in the L2 cache.
        pl.loop(1, chunks)(lambda i: radix.count(radix.load(chunks - i), chunks - i))
        scores = radix.load(first_chunk)
    is_long = radix.length > plan.k

    @pl.when(is_long)
    def _():
        radix.count(scores, first_chunk)
        radix.find(0, jnp.int32(plan.k), radix.alone)

    return scores, is_long


def _list_candidates(radix, scores, low, chunks):
    """Lists the scores of the row whose keys are at least `low`, as candidates.

    Args:
      radix: the `RadixSelect` of the row.
      scores: scores of chunk 0, from `radix.load`.
      low: int32 scalar, smallest key to list.
      chunks: int32 scalar, number of chunks.

    Returns:
      (candidates, overflowed). `candidates` is the `CandidateList`. `overflowed` is a bool scalar: whether the list is
      incomplete, because a thread's candidates did not fit into its shared memory.
    """
    first_chunk = jnp.int32(0)
    if radix.plan.chunks == 1:
        return radix.collect(scores, low, first_chunk), jnp.bool(False)
    counts = radix.append(radix.no_candidates(), scores, low, first_chunk)
    counts = lax.fori_loop(1, chunks, lambda i, counts: radix.append(counts, radix.load(i), low, i), counts)
    return CandidateList(counts, None), radix.overflowed()


def _refine(radix, number, search, shared, for_each_list):
    """Narrows the interval of the search by the next digit of the k-th largest key.

    If all scores in the interval are selected, the search is over, and the state does not change.

    Args:
      radix: the `RadixSelect` of the row.
      number: index of the pass and of the digit that the pass finds, 1 or 2.
      search: state of the search.
      shared: bool scalar, whether all blocks have sent their candidates to each other.
      for_each_list: function that calls a function on each list of this warpgroup's candidates.

    Returns:
      The new state of the search.
    """
    low, width, rank, spare = search

    @pl.when(spare > 0)
    def _():
        pl.when(shared)(lambda: radix.count_shared_candidates(number, low, width))
        pl.when(~shared)(lambda: for_each_list(lambda kept: radix.count_candidates(number, kept, low, width)))
        radix.find(number, rank, shared | radix.alone)

    # `digit` is 1 + the digit that was found, or 0 if the pass was skipped.
    digit, found_rank, spare = radix.found(number)
    low = jnp.where(digit > 0, low + ((digit - 1) << SHIFTS[number]), low)
    width = jnp.where(digit > 0, 1 << SHIFTS[number], width)
    return _Search(low, width, jnp.where(digit > 0, found_rank, rank), spare)
