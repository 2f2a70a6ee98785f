"""Exact top-k of each row's first scores by radix select, in one launch that reads the scores once.

    selected(row) = the k largest of scores[row, : lengths[row]], in ascending order of their indices

Grid: one cluster of `plan.blocks` blocks for each row. Warpgroups have no special roles: all of them run these steps of
`RadixSelect`, each on its own stretch of the row.

    step                      does                                                         waits for
    zero, load, count         counts scores by the first 11 bits of their keys             zeroed counts of all blocks
    find                      finds the first digit of the k-th largest key                counts of all blocks
    collect, append           lists the scores that have this digit or a larger one
    share_candidates          sends the lists to all blocks, if they are short             lists of all blocks
    count_candidates, find    repeats the search with the next 11 and the last 10 bits     counts unless lists were sent
    mark                      sets one bit for each selected entry
    write                     writes the marked entries in ascending order                 marks unless lists were sent
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

    Of equal scores the lower index is selected first; 0 and -0 are equal. NaN is not allowed.

    Args:
      scores: [T, E] float32 scores, E a multiple of 4. -inf is never selected. Scores from lengths[t] on are neither
        selected nor read.
      lengths: [T] int32 number of scores that count in each row, 0 .. E.
      k: number of entries to select, 1 .. 2048.
      interpret: not supported: the steps are PTX, which the interpreter cannot run.

    Returns:
      [T, k] int32 indices, ascending; -1 at the end where fewer than k are selectable.

    Raises:
      NotImplementedError: `interpret` is set, a shape or dtype is not supported, or a row has more than about 1.4
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
    """Runs `indexer_topk` with a given plan.

    Tests pass an implementation of `RadixSelect` in jnp as `algorithm`, the only kind that the interpreter takes.
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
    """State of the search for the k-th largest key, int32 scalars.

    The k-th largest key is the `rank`-th largest of the keys low .. low + width - 1, which all larger keys exceed.
    """

    low: Any  # the smallest key of the interval
    width: Any  # number of keys in the interval; 0 if all scores are selected
    rank: Any  # rank of the k-th largest key in the interval, from 1 on
    spare: Any  # number of scores in the interval that are not selected


def _select_row(radix: RadixSelect) -> None:
    """Runs all steps for one row."""
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
        """Visits the list of all chunks or, if it overflowed, a new list for each chunk."""
        pl.when(~overflowed)(lambda: visit(listed))
        if radix.plan.chunks > 1:
            again = pl.loop(0, chunks)
            pl.when(overflowed)(lambda: again(lambda chunk: visit(radix.collect(radix.load(chunk), low, chunk))))

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
    """Counts the row's scores by first digits; returns the scores of chunk 0 and whether there are more than k."""
    plan = radix.plan
    first_chunk = jnp.int32(0)
    radix.zero()
    if plan.chunks == 1:
        # Loading overlaps the wait.
        scores = radix.load(first_chunk)
        radix.wait()
    else:
        radix.wait()
        # The last chunk comes first: `_list_candidates` goes back up, and the latest reads may still be in a cache.
        pl.loop(1, chunks)(lambda i: radix.count(radix.load(chunks - i), chunks - i))
        scores = radix.load(first_chunk)
    is_long = radix.length > plan.k

    @pl.when(is_long)
    def _():
        radix.count(scores, first_chunk)
        radix.find(0, jnp.int32(plan.k), radix.alone)

    return scores, is_long


def _list_candidates(radix, scores, low, chunks):
    """Lists the row's scores with keys from `low` on; returns the list and whether a thread had too few slots."""
    first_chunk = jnp.int32(0)
    if radix.plan.chunks == 1:
        return radix.collect(scores, low, first_chunk), jnp.bool(False)
    counts = radix.append(radix.no_candidates(), scores, low, first_chunk)
    counts = lax.fori_loop(1, chunks, lambda i, counts: radix.append(counts, radix.load(i), low, i), counts)
    return CandidateList(counts, None), radix.overflowed()


def _refine(radix, number, search, shared, for_each_list):
    """Narrows the interval to the next digit of the k-th largest key, unless all of its scores are selected."""
    low, width, rank, spare = search

    @pl.when(spare > 0)
    def _():
        pl.when(shared)(lambda: radix.count_shared_candidates(number, low, width))
        pl.when(~shared)(lambda: for_each_list(lambda kept: radix.count_candidates(number, kept, low, width)))
        radix.find(number, rank, shared | radix.alone)

    # The digit is 0 if the pass was skipped.
    digit, found_rank, spare = radix.found(number)
    low = jnp.where(digit > 0, low + ((digit - 1) << SHIFTS[number]), low)
    width = jnp.where(digit > 0, 1 << SHIFTS[number], width)
    return _Search(low, width, jnp.where(digit > 0, found_rank, rank), spare)
