"""The steps of an exact top-k by radix select; a cluster of blocks shares a row.

Keys are unsigned integers that rise with the scores; zeros of both signs have the same key. The search for the k-th
largest key refines an interval of keys by digits of 11, 11 and 10 bits. Each pass counts the keys of the interval by
their next digit and goes on with the digit that the k-th largest key has.

Scores whose first digit is that digit or a larger one are candidates; they are few unless many scores are equal. Each
thread lists its candidates in shared memory. If no block has many, all blocks send their lists to each other, and no
block waits for another in the later passes. A bitmap marks the selected entries. The number of marks before its own
tells a thread where to write.
"""

import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.indexer_topk.radix_histogram import RadixHistogram, key_of
from pallas_kernels.indexer_topk.radix_plan import BINS, MAX_BLOCKS, SHIFTS, STEP, VECTOR, CandidateList, RadixPlan
from pallas_kernels.mgpu import thread_ops as ops
from pallas_kernels.mgpu.thread_ops import U32


class RadixSelect(RadixHistogram):
    """The steps of one row's selection; every warpgroup of the cluster calls them."""

    @staticmethod
    def scratch_types(plan: RadixPlan) -> dict[str, Any]:
        """Returns the scratch memory of a block by the names that `__init__` takes."""
        return dict(
            memory=plgpu.SMEM((plan.offsets.end,), jnp.int32),
            candidates=plgpu.SMEM((plan.values * plan.threads,), jnp.int32),
        )

    @staticmethod
    def out_types(plan: RadixPlan, tokens: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the kernel's outputs, of which the first is the selection."""
        return [jax.ShapeDtypeStruct((tokens, plan.k), jnp.int32)]

    # --- the search ---

    def count_candidates(self, number: int, kept: CandidateList, low: jax.Array, width: jax.Array) -> None:
        """Counts this block's candidates with keys low .. low + width - 1 by their digit of pass `number`."""

        def emit(memory, candidates, mask_or_count, low, width):
            count_key = self._key_counter(memory, number, low, width)
            self._each_candidate(candidates, mask_or_count, kept.chunk, lambda bits, *_: count_key(key_of(bits)))

        ops.inline(emit, self._memory, self._candidates, kept.mask_or_count, low, width)

    def count_shared_candidates(self, number: int, low: jax.Array, width: jax.Array) -> None:
        """Counts the candidates of all blocks as `count_candidates` does those of one."""

        def emit(memory, low, width):
            self._each_shared_candidate(memory, self._key_counter(memory, number, low, width))

        ops.inline(emit, self._memory, low, width)

    def _key_counter(self, memory, number, low, width):
        """Returns a function that counts one key."""
        histogram = ops.shared(memory, self.plan.counts(number))

        def count_key(key):
            offset = key - low
            with ops.when(offset < width):
                ops.add(histogram + (offset >> SHIFTS[number] << 2), 1)

        return count_key

    def total_shared_marks(self, low: jax.Array, width: jax.Array) -> None:
        """Adds up for `write` the number of entries that each block marks in `mark(.., low, width)`."""

        def emit(memory, low, width):
            def one(key, so_far):
                return [so_far + (key >= low).where((key - low < width).where(1, 1 << 16), 0)]

            block, (total,) = self._each_shared_candidate(memory, one, U32(0))
            total = ops.warp_sum(total)
            with ops.when(ops.lane().equals(0) & (block < self.plan.blocks)):
                ops.add(ops.shared(memory, block + self.plan.offsets.totals), total)

        ops.inline(emit, self._memory, low, width)

    def _each_shared_candidate(self, memory, visit, *carried):
        """Runs `carried = visit(key, *carried)` over the shared candidates; returns (block, carried).

        The block's warps divide among them the candidates of all blocks; `block` is the one whose list this warp has.
        """
        plan = self.plan
        warps = plan.warps // plan.blocks
        block = ops.warp() // warps
        first = (ops.warp() % warps << 5) + ops.lane()
        count = ops.load(ops.shared(memory, block.minimum(plan.blocks - 1) + plan.offsets.candidate_counts))
        count = (block < plan.blocks).where(count, 0)
        own = ops.shared(memory, block * plan.max_shared + first + plan.offsets.shared_candidates)

        def one(i, *carried):
            return visit(ops.load(own + i * (128 * warps)), *carried)

        left = count + (32 * warps - 1) - first.minimum(count + (32 * warps - 1))
        return block, ops.loop(left // (32 * warps), one, *carried)

    def find(self, number: int, rank: jax.Array, shared: jax.Array) -> None:
        """Finds the digit of the key of a rank among the keys that pass `number` counted.

        The result lies in shared memory, where `found` reads it. In the first pass -inf does not count.

        Args:
          number: pass.
          rank: int32 scalar, 1 for the largest key.
          shared: bool scalar, whether this block counted all keys; otherwise each block counted its own.
        """
        plan = self.plan

        def emit(memory, rank, shared):
            ops.sync()
            source = U32(plan.counts(number))
            if plan.blocks > 1:
                with ops.when(shared.equals(0)):
                    self._add_up_counts(memory, number)
                source = shared.equals(0).where(plan.cluster_counts(number), source)
            with ops.when(ops.warp().equals(0)):
                self._search(memory, number, rank, ops.shared(memory, source))
            ops.sync()

        ops.inline(emit, self._memory, rank, shared)

    def _add_up_counts(self, memory, number):
        """Adds this block's counts to the cluster's histogram in every block, and waits for the other blocks."""
        plan = self.plan
        sums = ops.shared(memory, plan.cluster_counts(number))
        peers = [ops.peer(sums, block) for block in range(plan.blocks)]
        for i in range(BINS // plan.threads):
            at = ops.thread() + i * plan.threads
            count = ops.load(ops.shared(memory, at + plan.counts(number)))
            with ops.when(count > 0):
                for address in peers:
                    ops.add_peer(address + (at << 2), count)
        ops.cluster_arrive()
        ops.cluster_wait()

    def _search(self, memory, number, rank, source):
        """Stores the result of `find`, by one warp: sharing the work would cost more than it saves."""
        chunk_bins = 32 * VECTOR
        chunks = BINS // chunk_bins
        above, chunk, before = U32(0), U32(chunks), U32(0)
        for i in range(chunks):  # from the largest digits on
            lowest = BINS - (i + 1) * chunk_bins
            start = lowest if number else lowest - BINS // 2 if lowest >= BINS // 2 else BINS - lowest - chunk_bins
            own = functools.reduce(operator.add, ops.load_vector(source + 4 * start + (ops.lane() << 4)))
            if number == 0 and i == chunks - 1:
                own = ops.lane().equals(31).where(0, own)  # -inf
            up_to = above + ops.warp_sum(own)
            here = (above < rank) & (rank <= up_to)
            chunk, before, above = here.where(i, chunk), here.where(above, before), up_to
        with ops.when(chunk < chunks):
            first = (chunk * chunk_bins + (ops.lane() << 2)) ^ (BINS - 1)
            digits = [first - i for i in range(VECTOR)]
            counts = [ops.load(source + (self._bin(number, digit) << 2)) for digit in digits]
            own = functools.reduce(operator.add, counts)
            above = before + ops.warp_prefix_sum(own) - own
            for digit, count in zip(digits, counts, strict=True):
                with ops.when((above < rank) & (rank <= above + count)):
                    result = ops.shared(memory, self.plan.results(number))
                    ops.store(result, digit + 1)
                    ops.store(result + 4, rank - above)
                    ops.store(result + 8, count - (rank - above))
                above = above + count

    @staticmethod
    def _bin(number, digit):
        """Returns the bin that counts a digit; the first pass counts the first bits of scores, not of keys."""
        return (digit >= BINS // 2).where(digit - BINS // 2, digit ^ (BINS - 1)) if number == 0 else digit

    def found(self, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the result of `find` in pass `number`, or zeros if the pass was skipped.

        Returns:
          1 + the digit, or 0 if there are fewer keys than the rank; the rank among the keys with this digit; and the
          number of keys with this digit that rank lower.
        """
        at = self.plan.results(number)
        return self._memory[at], self._memory[at + 1], self._memory[at + 2]

    # --- the result ---

    def mark(self, kept: CandidateList, low: jax.Array, width: jax.Array) -> None:
        """Marks entries with keys low .. low + width - 1 as ties, and entries with larger keys as above."""
        plan = self.plan
        chunk = jnp.int32(0) if kept.chunk is None else kept.chunk

        def emit(memory, candidates, mask_or_count, low, width, chunk):
            own = ops.warp() * (plan.chunks * plan.values) + (ops.lane() >> 3) + plan.offsets.above
            place = (ops.lane() & 7) << 2

            def one(bits, number, _):
                key = key_of(bits)
                with ops.when(key >= low):
                    number = number + chunk * plan.values
                    area = (key - low < width).where(plan.marks, 0)
                    bit = U32(1) << place + (number & (VECTOR - 1))
                    ops.set_bits(ops.shared(memory, own + area + (number & -VECTOR)), bit)

            self._each_candidate(candidates, mask_or_count, kept.chunk, one)

        ops.inline(emit, self._memory, self._candidates, kept.mask_or_count, low, width, chunk)

    def write(self, ties: jax.Array, shared: jax.Array) -> None:
        """Writes the marked entries in ascending order and pads the row with -1.

        Args:
          ties: int32 scalar, number of ties to write, the first ones.
          shared: bool scalar, whether `total_shared_marks` has the number of marks of every block.
        """
        plan = self.plan

        def emit(memory, out, row, block, ties, shared, alone, first, steps):
            ops.sync()
            marks, counts = self._load_marks(memory, first, steps)
            before, total = ops.block_prefix_sum(counts, ops.shared(memory, plan.offsets.scratch), plan.warps)
            above, tied = before >> 20, before & 0xFFFFF
            all_above, all_tied = total >> 20, total & 0xFFFFF
            if plan.blocks > 1:
                self._exchange_totals(memory, block, all_above, all_tied, shared, alone)
                totals = ops.load(ops.shared(memory, ops.lane() & (MAX_BLOCKS - 1)) + 4 * plan.offsets.totals)
                totals = (ops.lane() < plan.blocks).where(totals, 0)
                others = ops.warp_sum((ops.lane() < block).where(totals, 0))
                totals = ops.warp_sum(totals)
                above, tied = above + (others >> 16), tied + (others & 0xFFFF)
                all_above, all_tied = totals >> 16, totals & 0xFFFF
            self._write_marked(out, row, marks, ties, above, tied)
            first_unfilled = all_above + all_tied.minimum(ties) + ops.thread()
            with ops.when(block.equals(0)):
                self._pad(out, row, first_unfilled)

        scalars = self.row, self._block, ties, shared, self.alone, self._first, self.steps
        ops.inline(emit, self._memory, self._out, *scalars)

    def _load_marks(self, memory, first, steps):
        """Loads a thread's marks; returns [(marks above, marks of ties, first entry)] and the numbers of both marks."""
        plan = self.plan
        each = -(-plan.marks // plan.threads)
        loaded, counts = [], U32(0)
        for i in range(each):
            at = ops.thread() * each + i
            inside = at < plan.marks
            at = at.minimum(plan.marks - 1)
            marks = [ops.load(ops.shared(memory, at + plan.offsets.above + area)) for area in (0, plan.marks)]
            high, tie = (inside.where(mark, 0) for mark in marks)
            # Both in one word: at most k entries lie above, and a block has fewer than 2**20 entries.
            counts = counts + (ops.count_bits(high) << 20) + ops.count_bits(tie)
            warp, rest = at // (plan.chunks * plan.values), at % (plan.chunks * plan.values)
            loaded.append((high, tie, first + warp * steps * STEP + (rest << 5)))
        return loaded, counts

    def _exchange_totals(self, memory, block, above, tied, shared, alone):
        """Tells the blocks that need it how many entries this block marked."""
        plan = self.plan
        with ops.when((shared | alone).equals(0)):
            totals = ops.shared(memory, plan.offsets.totals)
            with ops.when(ops.thread() < plan.blocks):
                # The ties of 8 blocks, at most k of each, fit 16 bits.
                address = ops.peer(totals + (block << 2), ops.thread())
                ops.store_peer(address, (above << 16) | tied.minimum(plan.k))
            ops.cluster_arrive()
            ops.cluster_wait()
        with ops.when(alone > 0):
            with ops.when(ops.thread().equals(0)):
                own = ops.shared(memory, plan.offsets.totals) + (block << 2)
                ops.store(own, (above << 16) | tied.minimum(plan.k))
            ops.sync()

    def _write_marked(self, out, row, marks, ties, above, tied):
        """Writes the entries of a thread's marks, before which `above` and `tied` entries are marked."""
        k = self.plan.k
        for high, tie, entry in marks:
            position, some = above + tied.minimum(ties), (tied < ties).where(tie, 0)
            above, tied = above + ops.count_bits(high), tied + ops.count_bits(tie)
            surplus = ops.count_bits(some).minimum(tied - tied.minimum(ties))
            (some,) = ops.loop(surplus, lambda _, left: [left ^ ops.highest_bit(left)], some)

            def write_one(i, left, position=position, entry=entry):
                ops.store_global(out, row * k + position + i, entry + ops.lowest_bit(left))
                return [left & (left - 1)]

            ops.loop(ops.count_bits(high | some), write_one, high | some)

    def _pad(self, out, row, first):
        """Fills the row with -1; `first` is the thread's first place to fill."""
        plan = self.plan

        def pad(i):
            with ops.when(first + i * plan.threads < plan.k):
                ops.store_global(out, row * plan.k + first + i * plan.threads, U32(-1))

        ops.loop(-(-plan.k // plan.threads), pad)
