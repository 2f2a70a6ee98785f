"""The steps of an exact top-k by radix select, one row over the blocks of a cluster.

Scores are ordered by keys, unsigned integers that rise with them: zeros of both signs are one key, subnormals are
themselves. A search for the k-th largest key refines an interval of keys by 11, 11 and 10 bits: it counts the keys in
the interval by their next digit and goes on with the digit where the k-th lies.

A thread holds its scores in registers. Those that the first digit leaves over are candidates, few unless many scores
are equal. A thread lists its own in shared memory; if no block has many, each tells the others its own, and every block
goes on alone. What is selected is marked as a bit per entry; counting the bits before its own tells a thread where to
write, in ascending order.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels import words
from pallas_kernels.candidates import Candidates, key_of
from pallas_kernels.radix_plan import BINS, FOUND, MAX_BLOCKS, SHIFTS, STEP, VECTOR, Kept


class Steps(Candidates):
    """The steps of one row's selection, called by every warpgroup of every block of the cluster."""

    # --- the search ---

    def count_kept(self, number: int, kept: Kept, low: jax.Array, width: jax.Array) -> None:
        """Counts this block's candidates of keys low .. low + width - 1 by their next digit."""

        def emit(memory, listed, which, low, width):
            histogram = words.shared(memory, self.plan.counts(number))

            def one(bits, *_):
                offset = key_of(bits) - low
                with words.when(offset < width):
                    words.add(histogram + (offset >> SHIFTS[number] << 2), 1)

            self._each(listed, which, kept.chunk, one)

        words.inline(emit, self._words, self._listed, kept.which, low, width)

    def count_shared(self, number: int, low: jax.Array, width: jax.Array) -> None:
        """Counts the candidates of all blocks likewise."""

        def emit(memory, low, width):
            histogram = words.shared(memory, self.plan.counts(number))

            def one(key):
                offset = key - low
                with words.when(offset < width):
                    words.add(histogram + (offset >> SHIFTS[number] << 2), 1)

            self._each_shared(memory, one)

        words.inline(emit, self._words, low, width)

    def total_shared(self, low: jax.Array, width: jax.Array) -> None:
        """Counts for `write` what every block marks with `mark(.., low, width)`."""

        def emit(memory, low, width):
            def one(key, so_far):
                return [so_far + (key >= low).where((key - low < width).where(1, 1 << 16), 0)]

            block, (total,) = self._each_shared(memory, one, words.constant(0))
            total = words.warp_sum(total)
            with words.when(words.lane().equals(0) & (block < self.plan.blocks)):
                words.add(words.shared(memory, block + self.plan.totals), total)

        words.inline(emit, self._words, low, width)

    def _each_shared(self, memory, visit, *carried):
        """Runs `carried = visit(key, *carried)` over one block's candidates, each warp its own: (block, carried)."""
        warps = self.plan.warps // self.plan.blocks
        block = words.warp() // warps
        first = (words.warp() % warps << 5) + words.lane()
        told = words.load(words.shared(memory, block.minimum(self.plan.blocks - 1) + self.plan.told))
        count = (block < self.plan.blocks).where(told, 0)
        own = words.shared(memory, block * self.plan.most_shared + first + self.plan.shared)

        def one(i, *carried):
            return visit(words.load(own + i * (128 * warps)), *carried)

        left = count + (32 * warps - 1) - first.minimum(count + (32 * warps - 1))
        return block, words.loop(left // (32 * warps), one, *carried)

    def find(self, number: int, rank: jax.Array, shared: jax.Array) -> None:
        """Finds the digit of the key of this rank, 1 = the largest, among those that a pass counted.

        Leaves in shared memory, for `found`: 1 + the digit, or 0 where there are fewer; the rank among keys with this
        digit; by how many they outnumber it. In the first pass -inf is not counted.

        Args:
          shared: the block counted everything; otherwise every block counted its own.
        """
        plan, chunk_bins = self.plan, 32 * VECTOR
        chunks = BINS // chunk_bins

        def merge(memory):
            """Adds this block's counts to those of every block."""
            sums = words.shared(memory, plan.sums(number))
            peers = [words.peer(sums, block) for block in range(plan.blocks)]
            for i in range(BINS // plan.threads):
                at = words.thread() + i * plan.threads
                count = words.load(words.shared(memory, at + plan.counts(number)))
                with words.when(count > 0):
                    for address in peers:
                        words.add_peer(address + (at << 2), count)
            words.cluster_arrive()
            words.cluster_wait()

        def bin_of(digit):
            # The first pass counts by the score's first bits.
            return (digit >= BINS // 2).where(digit - BINS // 2, digit ^ (BINS - 1)) if number == 0 else digit

        def search(memory, rank, source):
            """One warp does it: the others' instructions would take longer than sharing the work saves."""
            above, chunk, before = words.constant(0), words.constant(chunks), words.constant(0)
            for i in range(chunks):  # from the largest digits on
                lowest = BINS - (i + 1) * chunk_bins
                start = lowest if number else lowest - BINS // 2 if lowest >= BINS // 2 else BINS - lowest - chunk_bins
                own = functools.reduce(operator.add, words.load_vector(source + 4 * start + (words.lane() << 4)))
                if number == 0 and i == chunks - 1:
                    own = words.lane().equals(31).where(0, own)  # -inf
                up_to = above + words.warp_sum(own)
                here = (above < rank) & (rank <= up_to)
                chunk, before, above = here.where(i, chunk), here.where(above, before), up_to
            with words.when(chunk < chunks):
                first = (chunk * chunk_bins + (words.lane() << 2)) ^ (BINS - 1)
                digits = [first - i for i in range(VECTOR)]
                counts = [words.load(source + (bin_of(digit) << 2)) for digit in digits]
                own = functools.reduce(operator.add, counts)
                above = before + words.warp_prefix_sum(own) - own
                for digit, count in zip(digits, counts, strict=True):
                    with words.when((above < rank) & (rank <= above + count)):
                        result = words.shared(memory, plan.found + FOUND * number)
                        words.store(result, digit + 1)
                        words.store(result + 4, rank - above)
                        words.store(result + 8, count - (rank - above))
                    above = above + count

        def emit(memory, rank, shared):
            words.sync()
            source = words.constant(plan.counts(number))
            if plan.blocks > 1:
                with words.when(shared.equals(0)):
                    merge(memory)
                source = shared.equals(0).where(plan.sums(number), source)
            with words.when(words.warp().equals(0)):
                search(memory, rank, words.shared(memory, source))
            words.sync()

        words.inline(emit, self._words, rank, shared)

    def found(self, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What `find` left; zeros where the pass was left out."""
        at = self.plan.found + FOUND * number
        return self._words[at], self._words[at + 1], self._words[at + 2]

    # --- the result ---

    def mark(self, kept: Kept, low: jax.Array, width: jax.Array) -> None:
        """Marks entries of keys low .. low + width - 1 as ties, those of larger keys as above."""
        plan = self.plan
        chunk = jnp.int32(0) if kept.chunk is None else kept.chunk

        def emit(memory, listed, which, low, width, chunk):
            own = words.warp() * (plan.chunks * plan.values) + (words.lane() >> 3) + plan.above
            place = (words.lane() & 7) << 2

            def one(bits, number, _):
                key = key_of(bits)
                with words.when(key >= low):
                    number = number + chunk * plan.values
                    area = (key - low < width).where(plan.marks, 0)
                    bit = words.constant(1) << place + (number & (VECTOR - 1))
                    words.set_bits(words.shared(memory, own + area + (number & -VECTOR)), bit)

            self._each(listed, which, kept.chunk, one)

        words.inline(emit, self._words, self._listed, kept.which, low, width, chunk)

    def write(self, ties: jax.Array, shared: jax.Array) -> None:
        """Writes the marked entries in ascending order, of the ties the first so many, then -1.

        Args:
          shared: `total_shared` counted what every block marked.
        """
        plan = self.plan
        each = -(-plan.marks // plan.threads)

        def exchange(memory, block, above, tied):
            """Tells every block how much this one marked."""
            totals = words.shared(memory, plan.totals)
            with words.when(words.thread() < plan.blocks):
                # Ties of 8 blocks, each cut off at k, fit 16 bits.
                address = words.peer(totals + (block << 2), words.thread())
                words.store_peer(address, (above << 16) | tied.minimum(plan.k))
            words.cluster_arrive()
            words.cluster_wait()

        def emit(memory, out, row, block, ties, shared, alone, first, steps):
            words.sync()
            mine, counts = [], words.constant(0)
            for i in range(each):
                at = words.thread() * each + i
                inside = at < plan.marks
                at = at.minimum(plan.marks - 1)
                marks = [words.load(words.shared(memory, at + plan.above + area)) for area in (0, plan.marks)]
                high, tie = (inside.where(mark, 0) for mark in marks)
                # Both in one word: no more than k lie above, fewer than 2**20 entries in a block's share.
                counts = counts + (words.count_bits(high) << 20) + words.count_bits(tie)
                warp, rest = at // (plan.chunks * plan.values), at % (plan.chunks * plan.values)
                mine.append((high, tie, first + warp * steps * STEP + (rest << 5)))
            before, total = words.block_prefix_sum(counts, words.shared(memory, plan.scratch), plan.warps)
            above, tied = before >> 20, before & 0xFFFFF
            all_above, all_tied = total >> 20, total & 0xFFFFF
            if plan.blocks > 1:
                with words.when((shared | alone).equals(0)):
                    exchange(memory, block, all_above, all_tied)
                with words.when(alone > 0):
                    with words.when(words.thread().equals(0)):
                        own = words.shared(memory, plan.totals) + (block << 2)
                        words.store(own, (all_above << 16) | all_tied.minimum(plan.k))
                    words.sync()
                told = words.load(words.shared(memory, words.lane() & (MAX_BLOCKS - 1)) + 4 * plan.totals)
                told = (words.lane() < plan.blocks).where(told, 0)
                others, told = words.warp_sum((words.lane() < block).where(told, 0)), words.warp_sum(told)
                above, tied = above + (others >> 16), tied + (others & 0xFFFF)
                all_above, all_tied = told >> 16, told & 0xFFFF

            for high, tie, entry in mine:
                position, some = above + tied.minimum(ties), (tied < ties).where(tie, 0)
                above, tied = above + words.count_bits(high), tied + words.count_bits(tie)
                surplus = words.count_bits(some).minimum(tied.saturating_sub(ties))
                (some,) = words.loop(surplus, lambda _, left: [left ^ words.highest_bit(left)], some)

                def one(i, left, position=position, entry=entry):
                    words.store_global(out, row * plan.k + position + i, entry + words.lowest_bit(left))
                    return [left & (left - 1)]

                words.loop(words.count_bits(high | some), one, high | some)

            filled = all_above + all_tied.minimum(ties) + words.thread()
            with words.when(block.equals(0)):

                def pad(i):
                    with words.when(filled + i * plan.threads < plan.k):
                        words.store_global(out, row * plan.k + filled + i * plan.threads, words.constant(-1))

                words.loop(-(-plan.k // plan.threads), pad)

        scalars = self.row, self._block, ties, shared, self.alone, self._first, self.steps
        words.inline(emit, self._words, self._out, *scalars)
