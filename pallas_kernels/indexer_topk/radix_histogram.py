"""The first half of `radix_select`: counts scores by first digits and lists the candidates for the k-th largest key."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.indexer_topk.radix_plan import STEP, VECTOR, CandidateList, RadixPlan
from pallas_kernels.mgpu import mlir, thread_ops as ops
from pallas_kernels.mgpu.thread_ops import U32


_SIGN = 1 << 31
_PER_THREAD = jax.ShapeDtypeStruct((128,), jnp.int32)


def key_of(bits: U32) -> U32:
    """Returns the key of the score that has these bits."""
    return bits ^ ((U32(0) - (bits >> 31)) | _SIGN)


def _score_bits(key: U32) -> U32:
    return (key >= _SIGN).where(key ^ _SIGN, key ^ 0xFFFFFFFF)


class RadixHistogram:
    """The steps of one row's selection up to its candidates; every warpgroup of the cluster calls them.

    Attributes:
      plan: division of the row.
      length: int32 scalar, number of scores that count.
      alone: bool scalar, whether the first block of the cluster holds the whole row. Then no block waits for another.
      steps: int32 scalar, number of loads that cover a warp's stretch.
    """

    def __init__(self, plan: RadixPlan, scores, lengths, out, *, memory, candidates):
        """Takes the kernel's references.

        Args:
          plan: division of the row.
          scores: [T, E] float32 in global memory.
          lengths: [T] int32 in global memory.
          out: [T, k] int32 in global memory.
          memory: [plan.offsets.end] int32 in shared memory, the areas of the plan.
          candidates: [plan.values * plan.threads] int32 in shared memory, the threads' lists.
        """
        self.plan, self._scores, self._out = plan, scores, out
        self._memory, self._candidates = memory, candidates
        self.row, self._block, self._warpgroup = (lax.axis_index(name) for name in ("row", "block", "warpgroup"))
        self.length = jnp.clip(lengths[self.row], 0, scores.shape[1])
        self.alone = self.length <= (plan.warps * 32 * plan.values if plan.blocks > 1 else 0)
        per_step = jnp.where(self.alone, 1, plan.blocks) * (plan.warps * STEP)
        self.steps = lax.div(self.length + (per_step - 1), per_step)
        self._first = self._block * (self.steps * (plan.warps * STEP))

    def zero(self) -> None:
        """Clears this block's counts and marks; call `wait` before counting."""
        plan = self.plan

        def emit(memory, alone):
            def clear(i):
                at = (ops.thread() + i * plan.threads) * 4
                with ops.when(at < plan.offsets.zeroed):
                    ops.ptx_effect("st.shared.v4.u32 [$0], {$1, $1, $1, $1};", ops.shared(memory, at), 0)

            ops.loop(-(-plan.offsets.zeroed // (4 * plan.threads)), clear)
            if plan.blocks > 1:
                with ops.when(alone.equals(0)):
                    ops.cluster_arrive()

        ops.inline(emit, self._memory, self.alone)

    def wait(self) -> None:
        """Waits until every block that counts this row has called `zero`."""

        def emit(alone):
            with ops.when(alone > 0):
                ops.sync()
            with ops.when(alone.equals(0)):
                ops.cluster_wait()

        if self.plan.blocks == 1:
            ops.inline(ops.sync)
        else:
            ops.inline(emit, self.alone)

    # --- scores ---

    def load(self, chunk: jax.Array) -> jax.Array:
        """Loads this thread's scores of a chunk, with -inf for missing scores and 0 for -0."""
        plan = self.plan

        def emit(scores, row, chunk, *stretch):
            first, limit = self._chunk_range(chunk, *stretch)
            base = llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(scores))
            width = mlir.i32(4 * self._scores.shape[1])
            code = """{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $6, $7; mul.wide.u32 a, $4, $8; add.u64 a, a, $5;
                mad.wide.u32 a, $6, 4, a; mov.b32 $0, 0fFF800000; mov.b32 $1, 0fFF800000; mov.b32 $2, 0fFF800000;
                mov.b32 $3, 0fFF800000; @p ld.global.nc.L1::no_allocate.v4.f32 {$0, $1, $2, $3}, [a]; }"""
            held = []
            for r in range(plan.values // VECTOR):
                index = first + (r * STEP) + (ops.lane() << 2)
                operands = row.value, base, index.value, limit.value, width
                held += mlir.ptx(code, *operands, results=[mlir.f32_type()] * VECTOR)
            zero, nothing = mlir.f32(0.0), mlir.f32(float("-inf"))
            held = [arith.addf(x, zero) for x in held]

            def mask_tail():
                entry = first + (ops.lane() << 2)
                inside = [entry + ((i // VECTOR) * STEP + i % VECTOR) < limit for i in range(plan.values)]
                return [arith.select(is_in.value, x, nothing) for is_in, x in zip(inside, held, strict=True)]

            return ops.replace_if((limit & (VECTOR - 1)) > 0, held, mask_tail)

        where = jax.ShapeDtypeStruct((128 * plan.values,), jnp.float32)
        return ops.inline(emit, self._scores, self.row, chunk, *self._stretch(), returns=where)

    def _stretch(self):
        """Returns the scalars that `_chunk_range` takes after the chunk."""
        return self._first, self.steps, self.length

    def _chunk_range(self, chunk, first, steps, length):
        """Returns the first entry of this warp's chunk and the end of the warp's stretch."""
        begin = first + ops.warp() * steps * STEP
        end = (begin + steps * STEP).minimum(length)
        return begin + chunk * (self.plan.values * 32), end

    def count(self, scores: jax.Array, chunk: jax.Array) -> None:
        """Counts scores by the first digit of their keys."""

        def emit(memory, scores, chunk, *stretch):
            first, limit = self._chunk_range(chunk, *stretch)
            histogram = ops.shared(memory, self.plan.counts(0))
            # The bins are the first bits of the scores, not of the keys; `find` ranks them.
            code = "shr.u32 a, $0, 19; and.b32 a, a, 8188; add.u32 a, a, $1; red.shared.add.u32 [a], 1;"
            code = "{ .reg .b32 a; " + code + " }"
            for r in range(self.plan.values // VECTOR):
                with ops.when(first + r * STEP < limit):
                    for x in scores[r * VECTOR : (r + 1) * VECTOR]:
                        ops.ptx_effect(code, ops.bits(x), histogram)

        ops.inline(emit, self._memory, scores, chunk, *self._stretch())

    # --- candidates ---

    def collect(self, scores: jax.Array, low: jax.Array, chunk: jax.Array) -> CandidateList:
        """Lists the scores of one chunk whose keys are at least `low`; a score's number is its slot."""

        def emit(candidates, scores, low, chunk, *stretch):
            first, limit = self._chunk_range(chunk, *stretch)
            least, slots = ops.as_float(_score_bits(low)), ops.shared(candidates, ops.thread())
            code = "{{ .reg .pred p; setp.ge.f32 p, $1, $2; @p st.shared.f32 [$3+{}], $1; @p or.b32 $0, $0, {}; }}"
            mask = U32(0).value
            for r in range(self.plan.values // VECTOR):

                def compare(r=r, mask=mask):
                    for i in range(r * VECTOR, (r + 1) * VECTOR):
                        one = code.format(4 * self.plan.threads * i, 1 << i)
                        operands = scores[i], least, slots.value
                        mask = mlir.ptx(one, *operands, results=mlir.int_type(), in_out=[mask])
                    return [mask]

                (mask,) = ops.replace_if(first + r * STEP < limit, [mask], compare)
            return U32(mask)

        arrays = scores, low, chunk, *self._stretch()
        return CandidateList(ops.inline(emit, self._candidates, *arrays, returns=_PER_THREAD), chunk)

    def append(self, count: jax.Array, scores: jax.Array, low: jax.Array, chunk: jax.Array) -> jax.Array:
        """Appends the scores of one more chunk to the `count` that a thread has listed; returns the new count.

        If there are too few slots, it sets the word that `overflowed` reads.
        """
        plan = self.plan
        stride = 4 * plan.threads

        def emit(memory, candidates, count, scores, low, chunk, *stretch):
            first, limit = self._chunk_range(chunk, *stretch)
            least = ops.as_float(_score_bits(low))
            slots = ops.shared(candidates, ops.thread())
            full = slots + (plan.slots - VECTOR) * stride
            code = """{{ .reg .pred p; setp.ge.f32 p, $1, $2; @p st.shared.f32 [$0], $1; @p st.shared.u32 [$0+{}], $3;
                @p add.u32 $0, $0, {}; }}"""
            code = code.format(stride * plan.slots, stride)
            at = slots + count * stride
            for r in range(plan.values // VECTOR):

                def compare(r=r, at=at.value):
                    for i in range(r * VECTOR, (r + 1) * VECTOR):
                        operands = scores[i], least, (chunk * plan.values + i).value
                        at = mlir.ptx(code, *operands, results=mlir.int_type(), in_out=[at])
                    return [at]

                has_room = at <= full
                with ops.when(at > full):
                    ops.set_bits(ops.shared(memory, plan.offsets.overflow), U32(1))
                at = U32(*ops.replace_if((first + r * STEP < limit) & has_room, [at.value], compare))
            return (at - slots) // stride

        arrays = count, scores, low, chunk, *self._stretch()
        return ops.inline(emit, self._memory, self._candidates, *arrays, returns=_PER_THREAD)

    def overflowed(self) -> jax.Array:
        """Returns whether some thread had more candidates than slots; synchronizes the block."""
        ops.inline(ops.sync)
        return self._memory[self.plan.offsets.overflow] > 0

    def no_candidates(self) -> jax.Array:
        """Returns the count of an empty list, for `append`."""
        return ops.inline(lambda: U32(0), returns=_PER_THREAD)

    def _each_candidate(self, candidates, mask_or_count, chunk, visit):
        """Calls `visit(score bits, number of the score in the thread, number of candidates before it)` for each."""
        own, stride = ops.shared(candidates, ops.thread()), 4 * self.plan.threads
        if chunk is None:

            def one_listed(nth):
                at = own + nth * stride
                visit(ops.load(at), ops.load(at + stride * self.plan.slots), nth)

            ops.loop(mask_or_count, one_listed)
            return

        def one_bit(nth, left):
            i = ops.lowest_bit(left)
            visit(ops.load(own + i * stride), i, nth)
            return [left & (left - 1)]

        ops.loop(ops.count_bits(mask_or_count), one_bit, mask_or_count)

    def share_candidates(self, kept: CandidateList, overflowed: jax.Array) -> None:
        """Sends this block's candidates, or the news that there are too many, to all blocks of the cluster."""
        plan = self.plan

        def emit(memory, candidates, mask_or_count, overflowed, block):
            count = mask_or_count if kept.chunk is None else ops.count_bits(mask_or_count)
            before, total = ops.block_prefix_sum(count, ops.shared(memory, plan.offsets.scratch), plan.warps)
            total = (overflowed > 0).where(plan.max_shared + 1, total)
            own = ops.shared(memory, plan.offsets.shared_candidates) + block * (4 * plan.max_shared)
            fits = total <= plan.max_shared

            def store_key(bits, _, nth):
                ops.store(own + (before + nth << 2), key_of(bits))

            with ops.when(fits):
                self._each_candidate(candidates, mask_or_count, kept.chunk, store_key)
            ops.sync()
            peers = [ops.peer(own, other) for other in range(plan.blocks)]
            with ops.when(fits & (ops.thread() < total)):
                key = ops.load(own + (ops.thread() << 2))
                for address in peers:
                    ops.store_peer(address + (ops.thread() << 2), key)
            with ops.when(ops.thread() < plan.blocks):
                counts = ops.shared(memory, plan.offsets.candidate_counts) + (block << 2)
                ops.store_peer(ops.peer(counts, ops.thread()), total)
            ops.cluster_arrive()
            ops.cluster_wait()

        ops.inline(emit, self._memory, self._candidates, kept.mask_or_count, overflowed, self._block)

    def all_shared(self) -> jax.Array:
        """Returns whether `share_candidates` sent the candidates of every block."""
        plan = self.plan
        fits = [self._memory[plan.offsets.candidate_counts + block] <= plan.max_shared for block in range(plan.blocks)]
        return functools.reduce(jnp.logical_and, fits)
