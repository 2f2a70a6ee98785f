"""The steps of an exact top-k by radix select; a cluster of blocks shares a row.

A key is an unsigned integer of 32 bits that rises with the score; zeros of both signs have the same key. The search
for the k-th largest key takes three passes, for digits of 11, 11 and 10 bits. Each pass counts the keys of an interval
by their next digit. The keys whose digit equals that of the k-th largest key are the interval of the next pass.

After the first pass, scores are candidates if their first digit is at least the first digit of the k-th largest key.
Candidates are few unless many scores are equal. Each thread lists its candidates in shared memory. If no block has more
than `RadixPlan.max_shared` candidates, all blocks send their lists to each other, and need not wait for each other in
the later passes.

When the search has ended, entries are marked in two bitmaps. The bitmap `above` marks the entries with keys above the
last interval, which are all selected. The bitmap `ties` marks the ties, which are the entries with keys in the last
interval. After three passes, all ties have the same key. If the search ends earlier, all ties are selected. A thread
writes its selected entries after those with lower indices, which it counts in the bitmaps.
"""

import functools
import operator
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm

from pallas_kernels.indexer_topk.radix_plan import BINS, MAX_BLOCKS, SHIFTS, STEP, VECTOR, CandidateList, RadixPlan
from pallas_kernels.mgpu import mlir, thread_ops as ops
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import axis_indices
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


_SIGN = 1 << 31
_PER_THREAD = jax.ShapeDtypeStruct((128,), jnp.int32)


def _score_bits(key: Scalar) -> Scalar:
    return (key >= _SIGN).where(key ^ _SIGN, key ^ 0xFFFFFFFF)


def _for_thread(emit=None, *, returns: Any = None) -> Any:
    """Decorates a method that emits code for one thread, so that a call puts the code into the kernel.

    The code gets a memref for a reference, a `Scalar` for a scalar or for this thread's value of an array [128], and a
    list of this thread's values for another array. A bool becomes 0 or 1.

    Args:
      emit: the method. It returns None, a `Scalar`, or a list of them.
      returns: shape and dtype of the result, int32 [128] for a `Scalar`; None for no result. Or a function of `self`
        that returns them. The order of a list's values in the result is unspecified. If the result is passed to another
        of these methods, each thread gets its list back.
    """
    if emit is None:
        return functools.partial(_for_thread, returns=returns)

    def unpacked(operand):
        if not isinstance(operand, mgpu.FragmentedArray):
            return operand
        values = mlir.values(operand)
        return values[0] if len(values) == 1 else values

    @functools.wraps(emit)
    def call(self, *args):
        emit_operands, operands = mlir.on_operands(emit, self, *args)

        def run(*operands):
            result = emit_operands(*map(unpacked, operands))
            return [result] if isinstance(result, Scalar) else result

        operands = (x.astype(jnp.int32) if x.dtype == bool else x for x in operands)
        kind = returns(self) if callable(returns) else returns
        return mlir.inline(run, *operands, layout=ops.vector_layout, returns=kind)

    return call


@pytree_dataclass
class RadixSelect:
    """The steps that select the entries of one row. Every warpgroup of the cluster calls each step.

    A method with the decorator `_for_thread` is code for one thread. In such a method, the object's fields and the
    arguments are values of this thread.
    """

    plan: RadixPlan = static_field()  # division of the row
    scores: Any  # reference to the scores [T, E] float32 in global memory
    out: Any  # reference to the result [T, k] int32 in global memory
    memory: Any  # reference to the plan's areas in shared memory, see `scratch_types`
    candidates: Any  # reference to the threads' lists of candidates in shared memory, see `scratch_types`
    row: Any  # int32 scalar, index of the row
    block: Any  # int32 scalar, index of the block in the cluster
    warpgroup: Any  # int32 scalar, index of the warpgroup in the block
    length: Any  # int32 scalar, number of scores of the row to select from
    alone: Any  # bool scalar, whether block 0 of several blocks processes the row alone, because the row is short
    steps: Any  # int32 scalar, number of loads, of 128 scores each, that a warp needs for its part of the row
    first: Any  # int32 scalar, index of the block's first entry in the row

    @classmethod
    def of_row(cls, plan: RadixPlan, scores, lengths, out, *, memory, candidates) -> "RadixSelect":
        """Returns the `RadixSelect` for the row that this block works on.

        `scores`, `lengths` ([T] int32) and `out` are references in global memory, `memory` and `candidates` in shared
        memory.
        """
        row, block, warpgroup = axis_indices("row", "block", "warpgroup")
        length = jnp.clip(lengths[row], 0, scores.shape[1])
        alone = length <= (plan.warps * 32 * plan.values if plan.blocks > 1 else 0)
        per_step = jnp.where(alone, 1, plan.blocks) * (plan.warps * STEP)
        steps = lax.div(length + (per_step - 1), per_step)
        first = block * (steps * (plan.warps * STEP))
        return cls(plan, scores, out, memory, candidates, row, block, warpgroup, length, alone, steps, first)

    @staticmethod
    def scratch_types(plan: RadixPlan) -> dict[str, Any]:
        """Returns the types of a block's shared memory: the areas of the plan, and the threads' lists of candidates."""
        return {
            "memory": plgpu.SMEM((plan.offsets.end,), jnp.int32),
            "candidates": plgpu.SMEM((plan.values * plan.threads,), jnp.int32),
        }

    @staticmethod
    def out_types(plan: RadixPlan, tokens: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the kernel's outputs. The first output is the selection."""
        return [jax.ShapeDtypeStruct((tokens, plan.k), jnp.int32)]

    def _word(self, number):
        """Returns the address of the word with index `number` in the plan's areas."""
        return ops.shared(self.memory, number)

    @_for_thread
    def zero(self):
        """Clears this block's counts and marks. `wait` has to be called between `zero` and `count`."""
        plan = self.plan

        def clear(i):
            word = (ops.thread() + i * plan.threads) * 4
            with ops.when(word < plan.offsets.zeroed):
                mlir.ptx("st.shared.v4.u32 [$0], {$1, $1, $1, $1};", self._word(word), 0)

        ops.loop(-(-plan.offsets.zeroed // (4 * plan.threads)), clear)
        if plan.blocks > 1:
            with ops.when(self.alone.equals(0)):
                ops.cluster_arrive()

    @_for_thread
    def wait(self):
        """Waits until every block that counts this row has called `zero`."""
        if self.plan.blocks == 1:
            ops.sync()
            return
        with ops.when(self.alone > 0):
            ops.sync()
        with ops.when(self.alone.equals(0)):
            ops.cluster_wait()

    # --- scores ---

    @_for_thread(returns=lambda self: jax.ShapeDtypeStruct((128 * self.plan.values,), jnp.float32))
    def load(self, chunk):
        """Loads this thread's scores of a chunk: [128 * values] float32 over the warpgroup.

        Scores past the end of the warp's part of the row are -inf, and -0 becomes 0.
        """
        plan = self.plan
        begin, limit = self._chunk_range(chunk)
        base = llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(self.scores))
        width = 4 * self.scores.type.shape[1]
        # Loads four scores, $0 .. $3, from index $6 of row $4, or sets them to -inf if the index is $7 or more. $5 is
        # the address of the scores, and $8 the number of bytes in a row.
        code = """{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $6, $7; mul.wide.u32 a, $4, $8; add.u64 a, a, $5;
            mad.wide.u32 a, $6, 4, a; mov.b32 $0, 0fFF800000; mov.b32 $1, 0fFF800000; mov.b32 $2, 0fFF800000;
            mov.b32 $3, 0fFF800000; @p ld.global.nc.L1::no_allocate.v4.f32 {$0, $1, $2, $3}, [a]; }"""
        values = []
        for r in range(plan.values // VECTOR):
            index = begin + (r * STEP) + (ops.lane() << 2)
            values += mlir.ptx(code, self.row, base, index, limit, width, results=[mlir.f32_type()] * VECTOR)
        values = [x + 0.0 for x in values]

        def mask_tail():
            entry = begin + (ops.lane() << 2)
            inside = [entry + ((i // VECTOR) * STEP + i % VECTOR) < limit for i in range(plan.values)]
            return [is_in.where(x, -jnp.inf) for is_in, x in zip(inside, values, strict=True)]

        return ops.replace_if((limit & (VECTOR - 1)) > 0, values, mask_tail)

    def _chunk_range(self, chunk):
        """Returns (index of the first entry of this warp's chunk, end of the entries in the warp's part of the row)."""
        begin = self.first + ops.warp() * self.steps * STEP
        end = (begin + self.steps * STEP).minimum(self.length)
        return begin + chunk * (self.plan.values * 32), end

    @_for_thread
    def count(self, scores, chunk):
        """Adds the scores of a chunk, from `load`, to this block's histogram of the first digits of keys."""
        begin, limit = self._chunk_range(chunk)
        histogram = self._word(self.plan.counts(0))
        # The index of a score's bin is the first 11 bits of the score, so that its key need not be computed here.
        # `_search` reads bins in the order of keys. Register `a` is the offset of the bin in bytes, 4 * (score >> 21),
        # then the bin's address.
        code = "shr.u32 a, $0, 19; and.b32 a, a, 8188; add.u32 a, a, $1; red.shared.add.u32 [a], 1;"
        code = "{ .reg .b32 a; " + code + " }"
        for r in range(self.plan.values // VECTOR):
            with ops.when(begin + r * STEP < limit):
                for x in scores[r * VECTOR : (r + 1) * VECTOR]:
                    mlir.ptx(code, x.bits(), histogram)

    # --- candidates ---

    def collect(self, scores: jax.Array, low: jax.Array, chunk: jax.Array) -> CandidateList:
        """Lists each score of one chunk, from `load`, whose key is at least `low`.

        Score i of a thread is stored in the thread's slot i.
        """
        return CandidateList(self._collect(scores, low, chunk), chunk)

    @_for_thread(returns=_PER_THREAD)
    def _collect(self, scores, low, chunk):
        begin, limit = self._chunk_range(chunk)
        lowest_score = _score_bits(low).as_float()
        slots = ops.shared(self.candidates, ops.thread())
        # If score $1 is at least $2, stores it in its slot and sets its bit in mask $0. $3 is the address of slot 0.
        template = "{{ .reg .pred p; setp.ge.f32 p, $1, $2; @p st.shared.f32 [$3+{}], $1; @p or.b32 $0, $0, {}; }}"
        mask = Scalar(0)
        for r in range(self.plan.values // VECTOR):

            def compare(r=r, mask=mask):
                for i in range(r * VECTOR, (r + 1) * VECTOR):
                    code = template.format(4 * self.plan.threads * i, 1 << i)
                    mask = ops.ptx(code, scores[i], lowest_score, slots, in_out=[mask])
                return [mask]

            (mask,) = ops.replace_if(begin + r * STEP < limit, [mask], compare)
        return mask

    @_for_thread(returns=_PER_THREAD)
    def append(self, count, scores, low, chunk):
        """Appends each score of one more chunk whose key is at least `low` to the list of the thread that holds it.

        The list holds scores and their indices, `chunk * values + i` for score i of a chunk. A thread with fewer than
        four free slots lists no further scores, and sets the word that `overflowed` reads.

        Args:
          count: [128] int32, number of candidates that each thread has listed so far.
          scores: scores of the chunk, from `load`.
          low: int32 scalar, smallest key to list.
          chunk: int32 scalar, index of the chunk.

        Returns:
          [128] int32, the new number of candidates that each thread has listed.
        """
        plan = self.plan
        stride = 4 * self.plan.threads
        begin, limit = self._chunk_range(chunk)
        lowest_score = _score_bits(low).as_float()
        slots = ops.shared(self.candidates, ops.thread())
        last_with_room = slots + (plan.slots - VECTOR) * stride
        # If score $1 is at least $2, stores it and its index $3 in slot $0, and moves $0 on to the next slot.
        code = """{{ .reg .pred p; setp.ge.f32 p, $1, $2; @p st.shared.f32 [$0], $1; @p st.shared.u32 [$0+{}], $3;
            @p add.u32 $0, $0, {}; }}"""
        code = code.format(stride * plan.slots, stride)
        slot = slots + count * stride
        for r in range(plan.values // VECTOR):

            def compare(r=r, slot=slot):
                for i in range(r * VECTOR, (r + 1) * VECTOR):
                    slot = ops.ptx(code, scores[i], lowest_score, chunk * plan.values + i, in_out=[slot])
                return [slot]

            has_room = slot <= last_with_room
            with ops.when(slot > last_with_room):
                ops.set_bits(self._word(plan.offsets.overflow), 1)
            (slot,) = ops.replace_if((begin + r * STEP < limit) & has_room, [slot], compare)
        return (slot - slots) // stride

    def overflowed(self) -> jax.Array:
        """Returns whether some thread of the block had too few slots for its candidates. Synchronizes the block."""
        mlir.inline(ops.sync)
        return self.memory[self.plan.offsets.overflow] > 0

    def no_candidates(self) -> jax.Array:
        """Returns [128] int32 zeros, the argument `count` of the first `append`: no thread has listed a candidate."""
        return mlir.inline(lambda: [Scalar(0)], layout=ops.vector_layout, returns=_PER_THREAD)

    def _each_candidate(self, kept, visit):
        """Calls `visit(bits, number, nth)` for each candidate in this thread's list.

        `bits` are the bits of the score. `number` is the index of the score among the scores that the thread has
        loaded: of the chunk that `kept` lists, or of all chunks. `nth` is the index of the candidate in the list.
        """
        slots = ops.shared(self.candidates, ops.thread())
        stride = 4 * self.plan.threads
        if kept.chunk is None:

            def visit_slot(nth):
                slot = slots + nth * stride
                visit(ops.load(slot), ops.load(slot + stride * self.plan.slots), nth)

            ops.loop(kept.mask_or_count, visit_slot)
            return

        def visit_lowest_bit(nth, mask):
            i = ops.lowest_bit(mask)
            visit(ops.load(slots + i * stride), i, nth)
            return [mask & (mask - 1)]

        ops.loop(ops.count_bits(kept.mask_or_count), visit_lowest_bit, kept.mask_or_count)

    @_for_thread
    def share_candidates(self, kept: CandidateList, overflowed):
        """Sends the number and the keys of this block's candidates to all blocks of the cluster.

        If the block has more candidates than `max_shared`, or if `overflowed`, the block sends a number above
        `max_shared` and no keys.
        """
        plan = self.plan
        count = kept.mask_or_count if kept.chunk is None else ops.count_bits(kept.mask_or_count)
        before, total = ops.block_prefix_sum(count, self._word(plan.offsets.scratch), plan.warps)
        total = (overflowed > 0).where(plan.max_shared + 1, total)
        keys = self._word(plan.offsets.shared_candidates) + self.block * (4 * plan.max_shared)
        fits = total <= plan.max_shared

        def store_key(bits, _, nth):
            ops.store(keys + ((before + nth) << 2), ops.ordered_key(bits))

        with ops.when(fits):
            self._each_candidate(kept, store_key)
        ops.sync()
        peers = [ops.peer(keys, other) for other in range(plan.blocks)]
        with ops.when(fits & (ops.thread() < total)):
            key = ops.load(keys + (ops.thread() << 2))
            for address in peers:
                ops.store_peer(address + (ops.thread() << 2), key)
        with ops.when(ops.thread() < plan.blocks):
            counts = self._word(plan.offsets.candidate_counts) + (self.block << 2)
            ops.store_peer(ops.peer(counts, ops.thread()), total)
        ops.cluster_arrive()
        ops.cluster_wait()

    def all_shared(self) -> jax.Array:
        """Returns whether every block has sent its candidates in `share_candidates`."""
        plan = self.plan
        fits = [self.memory[plan.offsets.candidate_counts + block] <= plan.max_shared for block in range(plan.blocks)]
        return functools.reduce(jnp.logical_and, fits)

    # --- the search ---

    @_for_thread
    def count_candidates(self, number: int, kept: CandidateList, low, width):
        """Adds this thread's candidates with keys low .. low + width - 1 to the histogram of pass `number`."""
        count_key = self._key_counter(number, low, width)
        self._each_candidate(kept, lambda bits, *_: count_key(ops.ordered_key(bits)))

    @_for_thread
    def count_shared_candidates(self, number: int, low, width):
        """Adds all blocks' candidates with keys low .. low + width - 1 to this block's histogram of pass `number`."""
        self._each_shared_candidate(self._key_counter(number, low, width))

    def _key_counter(self, number, low, width):
        """Returns a function that adds a key to this block's histogram of pass `number`.

        The function ignores keys outside of low .. low + width - 1.
        """
        histogram = self._word(self.plan.counts(number))

        def count_key(key):
            offset = key - low
            with ops.when(offset < width):
                ops.add(histogram + ((offset >> SHIFTS[number]) << 2), 1)

        return count_key

    @_for_thread
    def total_shared_marks(self, low, width):
        """Counts the entries that each block marks when it calls `mark(.., low, width)`. `write` reads the counts.

        The blocks have sent their candidates to each other. So this block counts the marks of all blocks without
        waiting for the other blocks.
        """

        def add_mark(key, so_far):
            is_marked = key >= low
            mark = (key - low < width).where(1, 1 << 16)  # a tie counts in the lower half of the word
            return [so_far + is_marked.where(mark, 0)]

        block, (total,) = self._each_shared_candidate(add_mark, Scalar(0))
        total = ops.warp_sum(total)
        with ops.when(ops.lane().equals(0) & (block < self.plan.blocks)):
            ops.add(self._word(block + self.plan.offsets.totals), total)

    def _each_shared_candidate(self, visit, *carried):
        """Runs `carried = visit(key, *carried)` over candidates that the blocks have sent to each other.

        The warps of this block share the work: each group of warps visits the list of one block of the cluster.

        Returns:
          (block, carried). `block` is the index of the block whose list this warp visits; `plan.blocks` or more if the
          warp visits none. `carried` are the values after the last key that this thread visits.
        """
        plan = self.plan
        warps = plan.warps // plan.blocks
        block = ops.warp() // warps
        number = ((ops.warp() % warps) << 5) + ops.lane()  # index of the first key that this thread visits
        count = ops.load(self._word(block.minimum(plan.blocks - 1) + plan.offsets.candidate_counts))
        count = (block < plan.blocks).where(count, 0)
        keys = self._word(block * plan.max_shared + number + plan.offsets.shared_candidates)

        def visit_key(i, *carried):
            return visit(ops.load(keys + i * (128 * warps)), *carried)

        # The thread visits the keys with indices `number`, `number + stride`, .. below `count`. There are
        # `remaining // stride` such keys.
        stride = 32 * warps
        remaining = count + (stride - 1) - number.minimum(count + (stride - 1))
        return block, ops.loop(remaining // stride, visit_key, *carried)

    @_for_thread
    def find(self, number: int, rank, shared):
        """Finds the digit of the `rank`-th largest key among the keys that a pass has counted.

        `found` returns the result. In the first pass, scores of -inf are left out.

        Args:
          number: index of the pass, 0 .. 2.
          rank: int32 scalar, rank of the key to find, 1 for the largest key.
          shared: bool scalar. True if this block's histogram counts keys of the whole row. False if it counts keys of
            the block's part; then the histograms of all blocks are added up first.
        """
        plan = self.plan
        ops.sync()
        source = Scalar(plan.counts(number))
        if plan.blocks > 1:
            with ops.when(shared.equals(0)):
                self._add_up_counts(number)
            source = shared.equals(0).where(plan.cluster_counts(number), source)
        with ops.when(ops.warp().equals(0)):
            self._search(number, rank, self._word(source))
        ops.sync()

    def _add_up_counts(self, number):
        """Adds this block's counts to every block's copy of the cluster's histogram, and waits for all blocks."""
        plan = self.plan
        sums = self._word(plan.cluster_counts(number))
        peers = [ops.peer(sums, block) for block in range(plan.blocks)]
        for i in range(BINS // plan.threads):
            bin_number = ops.thread() + i * plan.threads
            count = ops.load(self._word(bin_number + plan.counts(number)))
            with ops.when(count > 0):
                for address in peers:
                    ops.add_peer(address + (bin_number << 2), count)
        ops.cluster_arrive()
        ops.cluster_wait()

    def _search(self, number, rank, source):
        """Searches a histogram for the digit of the `rank`-th largest key and stores the result of `find`.

        One warp searches, because sharing the work among warps takes more time than it saves. The warp first finds a
        chunk of 128 bins, four for each lane, then the bin. `source` is the address of the histogram.
        """
        chunk_bins = 32 * VECTOR
        chunks = BINS // chunk_bins
        above = Scalar(0)  # number of keys in the chunks searched so far
        chunk = Scalar(chunks)  # index of the chunk with the key of this rank, or `chunks` if no chunk has it
        before = Scalar(0)  # number of keys in the chunks before `chunk`, whose bins count larger digits
        for i in range(chunks):  # chunk 0 counts the largest digits
            first_bin = lowest_digit = BINS - (i + 1) * chunk_bins
            if number == 0:  # converts a digit to its bin, as `_bin` does
                is_positive = lowest_digit >= BINS // 2
                first_bin = lowest_digit - BINS // 2 if is_positive else BINS - lowest_digit - chunk_bins
            count_here = functools.reduce(operator.add, ops.load_vector(source + 4 * first_bin + (ops.lane() << 4)))
            if number == 0 and i == chunks - 1:
                count_here = ops.lane().equals(31).where(0, count_here)  # lane 31 reads the bins of -inf
            up_to = above + ops.warp_sum(count_here)
            contains_rank = (above < rank) & (rank <= up_to)
            chunk = contains_rank.where(i, chunk)
            before = contains_rank.where(above, before)
            above = up_to
        with ops.when(chunk < chunks):
            first_digit = (chunk * chunk_bins + (ops.lane() << 2)) ^ (BINS - 1)
            digits = [first_digit - i for i in range(VECTOR)]
            counts = [ops.load(source + (self._bin(number, digit) << 2)) for digit in digits]
            count_here = functools.reduce(operator.add, counts)
            above = before + ops.warp_prefix_sum(count_here) - count_here
            for digit, count in zip(digits, counts, strict=True):
                with ops.when((above < rank) & (rank <= above + count)):
                    result = self._word(self.plan.results(number))
                    ops.store(result, digit + 1)
                    ops.store(result + 4, rank - above)
                    ops.store(result + 8, count - (rank - above))
                above = above + count

    @staticmethod
    def _bin(number, digit):
        """Returns the index of the bin that counts a digit.

        In the first pass, keys are counted by the first 11 bits of their float32 scores. So a digit, the first 11 bits
        of a key, is converted back to these bits. In later passes the index is the digit.
        """
        return (digit >= BINS // 2).where(digit - BINS // 2, digit ^ (BINS - 1)) if number == 0 else digit

    def found(self, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the result of `find` in a pass, as int32 scalars.

        Returns:
          (digit_plus_1, rank, spare). The digit is that of the key that `find` searched for. Among the keys with this
          digit, `rank` is the rank of the key, and `spare` the number of keys with a larger rank. All three results are
          0 if the pass was skipped, or if fewer keys were counted than the rank that was searched for.
        """
        result = self.plan.results(number)
        return self.memory[result], self.memory[result + 1], self.memory[result + 2]

    # --- the result ---

    @_for_thread
    def mark(self, kept: CandidateList, low, width):
        """Marks the entries of this thread's candidates in two bitmaps, the plan's areas `ties` and `above`.

        Entries with keys low .. low + width - 1 are marked in `ties`, and entries with larger keys in `above`.
        """
        plan = self.plan
        chunk = Scalar(0) if kept.chunk is None else kept.chunk

        # A warp loads 128 scores at a time, `VECTOR` = 4 for each lane. Four words of a bitmap have a bit for each of
        # them, and the scores of a lane have adjacent bits. So load number n begins at word 4 * n of the warp's words.
        first_word = ops.warp() * (plan.chunks * plan.values) + (ops.lane() >> 3) + plan.offsets.above
        first_bit = (ops.lane() & 7) << 2

        def mark_candidate(bits, number, _):
            key = ops.ordered_key(bits)
            with ops.when(key >= low):
                score_number = number + chunk * plan.values  # index of the score among all scores of the thread
                # Each bitmap is `plan.marks` words long, and `ties` follows `above`.
                bitmap_offset = (key - low < width).where(plan.marks, 0)
                mark = Scalar(1) << (first_bit + (score_number & (VECTOR - 1)))
                load_word = score_number & -VECTOR  # 4 * n for load number n
                ops.set_bits(self._word(first_word + bitmap_offset + load_word), mark)

        self._each_candidate(kept, mark_candidate)

    @_for_thread
    def write(self, ties, shared):
        """Writes the indices of the selected entries in ascending order, and pads the row with -1.

        Args:
          ties: int32 scalar, number of ties to select; the ties with the lowest indices are selected.
          shared: bool scalar, whether `total_shared_marks` has counted every block's marks.
        """
        plan = self.plan
        ops.sync()
        marks, counts = self._load_marks()
        before, total = ops.block_prefix_sum(counts, self._word(plan.offsets.scratch), plan.warps)
        # A word of counts holds the number of marks in `above` in its upper bits, and the number of marks in `ties` in
        # its lower bits. The lower bits are 20 bits in `before` and `total`, and 16 bits in `totals`.
        above = before >> 20
        tied = before & 0xFFFFF
        all_above = total >> 20
        all_tied = total & 0xFFFFF
        if plan.blocks > 1:
            self._exchange_totals(all_above, all_tied, shared)
            totals = ops.load(self._word(ops.lane() & (MAX_BLOCKS - 1)) + 4 * plan.offsets.totals)
            totals = (ops.lane() < plan.blocks).where(totals, 0)
            before_block = ops.warp_sum((ops.lane() < self.block).where(totals, 0))
            totals = ops.warp_sum(totals)
            above = above + (before_block >> 16)
            tied = tied + (before_block & 0xFFFF)
            all_above = totals >> 16
            all_tied = totals & 0xFFFF
        self._write_marked(marks, ties, above, tied)
        first_unfilled = all_above + all_tied.minimum(ties) + ops.thread()
        with ops.when(self.block.equals(0)):
            self._pad(first_unfilled)

    def _load_marks(self):
        """Loads this thread's words of the bitmaps.

        Returns:
          (marks, counts). `marks` is a list of (word of the bitmap `above`, word of the bitmap `ties`, first_entry).
          Bit i of both words stands for entry `first_entry + i` of the row. `counts` is a word: its upper 12 bits are
          the number of this thread's marks in `above`, and its lower 20 bits the number of its marks in `ties`.
        """
        plan = self.plan
        words_per_thread = -(-plan.marks // plan.threads)
        words_per_warp = plan.chunks * plan.values
        marks = []
        counts = Scalar(0)
        for i in range(words_per_thread):
            number = ops.thread() * words_per_thread + i
            exists = number < plan.marks
            number = number.minimum(plan.marks - 1)
            above = ops.load(self._word(number + plan.offsets.above))
            ties = ops.load(self._word(number + plan.offsets.ties))
            above = exists.where(above, 0)
            ties = exists.where(ties, 0)
            # Both counts fit into a word: `above` marks at most k entries, and `ties` fewer than 2**20 in a block.
            counts = counts + (ops.count_bits(above) << 20) + ops.count_bits(ties)
            warp = number // words_per_warp
            word_in_warp = number % words_per_warp
            first_entry = self.first + warp * self.steps * STEP + (word_in_warp << 5)
            marks.append((above, ties, first_entry))
        return marks, counts

    def _exchange_totals(self, above, tied, shared):
        """Sends the numbers of this block's marks in the bitmaps `above` and `ties` to all blocks of the cluster.

        Sends nothing if `shared`, because all blocks then know the numbers already. If block 0 processes the row alone,
        it only stores its own numbers.
        """
        plan = self.plan
        with ops.when((shared | self.alone).equals(0)):
            totals = self._word(plan.offsets.totals)
            with ops.when(ops.thread() < plan.blocks):
                # Both counts are in one word, so that `write` adds up one word per block. At most k ties are selected,
                # so a block's count of ties is limited to k. Then the sum of 8 blocks fits into the lower 16 bits.
                address = ops.peer(totals + (self.block << 2), ops.thread())
                ops.store_peer(address, (above << 16) | tied.minimum(plan.k))
            ops.cluster_arrive()
            ops.cluster_wait()
        with ops.when(self.alone > 0):
            with ops.when(ops.thread().equals(0)):
                own_total = self._word(plan.offsets.totals) + (self.block << 2)
                ops.store(own_total, (above << 16) | tied.minimum(plan.k))
            ops.sync()

    def _write_marked(self, marks, ties, above, tied):
        """Writes the indices of this thread's selected entries to the result.

        Args:
          marks: list of words of both bitmaps, from `_load_marks`.
          ties: number of ties that are selected in the row, not the bitmap of this name.
          above: number of marks in the bitmap `above` before this thread's first entry, counted over the whole row.
          tied: the same number for the bitmap of ties.
        """
        k = self.plan.k
        for above_bits, tie_bits, entry in marks:
            position = above + tied.minimum(ties)
            selected_ties = (tied < ties).where(tie_bits, 0)
            above = above + ops.count_bits(above_bits)
            tied = tied + ops.count_bits(tie_bits)
            # Only the row's first `ties` ties are selected, so the last `surplus` ties of this word are left out.
            surplus = ops.count_bits(selected_ties).minimum(tied - tied.minimum(ties))
            (selected_ties,) = ops.loop(surplus, lambda _, bits: [bits ^ ops.highest_bit(bits)], selected_ties)

            def write_lowest_bit(i, bits, position=position, entry=entry):
                ops.store_global(self.out, self.row * k + position + i, entry + ops.lowest_bit(bits))
                return [bits & (bits - 1)]

            ops.loop(ops.count_bits(above_bits | selected_ties), write_lowest_bit, above_bits | selected_ties)

    def _pad(self, first):
        """Fills the rest of the result's row with -1. `first` is the index of the first element for this thread."""
        plan = self.plan

        def pad(i):
            with ops.when(first + i * plan.threads < plan.k):
                ops.store_global(self.out, self.row * plan.k + first + i * plan.threads, -1)

        ops.loop(-(-plan.k // plan.threads), pad)
