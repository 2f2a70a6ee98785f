"""The steps of `RadixSelect` in jnp, which the interpreter can run."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_topk.radix_plan import BINS, FIRST_KEY, RESULT, SHIFTS, STEP, CandidateList, RadixPlan
from pallas_kernels.indexer_topk.radix_select import RadixSelect
from pallas_kernels.runtime.pytrees import pytree_dataclass


# Messages between blocks: the histogram of each pass, totals of marks, the number of candidates, candidates.
TOTALS, CANDIDATE_COUNT, CANDIDATES = range(len(SHIFTS), len(SHIFTS) + 3)
EXCHANGED = CANDIDATES + 1


@pytree_dataclass
class InterpretedRadixSelect(RadixSelect):
    """`RadixSelect` in jnp, to test the protocol with race detection.

    The interpreted tests check the order of the steps, the messages between blocks and the waits. The tests marked
    `gpu` check the PTX of `RadixSelect`. Here each warpgroup has its own histogram, the first one does the work of the
    block, and blocks exchange data through global memory.
    """

    exchange: Any = None
    histograms: Any = None
    block_barrier: Any = None
    cluster_barrier: Any = None

    @classmethod
    def of_row(cls, plan, scores, lengths, out, exchange, *, memory, candidates, **scratch):
        radix = super().of_row(plan, scores, lengths, out, memory=memory, candidates=candidates)
        return dataclasses.replace(radix, exchange=exchange, **scratch)

    @staticmethod
    def scratch_types(plan: RadixPlan) -> dict[str, Any]:
        types = RadixSelect.scratch_types(plan) | dict(
            histograms=plgpu.SMEM((len(SHIFTS), plan.warpgroups, BINS), jnp.int32),
            block_barrier=plgpu.Barrier(num_arrivals=plan.warpgroups),
        )
        if plan.blocks > 1:
            types["cluster_barrier"] = plgpu.ClusterBarrier(collective_axes=("block",))
        return types

    @staticmethod
    def out_types(plan: RadixPlan, tokens: int) -> list[jax.ShapeDtypeStruct]:
        exchange = jax.ShapeDtypeStruct((tokens, plan.blocks, EXCHANGED, BINS), jnp.int32)
        return [*RadixSelect.out_types(plan, tokens), exchange]

    def zero(self) -> None:
        @pl.when(self.warpgroup == 0)
        def _():
            self.memory[...] = jnp.zeros((self.plan.offsets.end,), jnp.int32)
            self.histograms[...] = jnp.zeros(self.histograms.shape, jnp.int32)

    def wait(self) -> None:
        self._sync(cluster=True)

    def _sync(self, cluster=False):
        plgpu.barrier_arrive(self.block_barrier)
        plgpu.barrier_wait(self.block_barrier)
        if cluster and self.cluster_barrier is not None:

            @pl.when(self.warpgroup == 0)
            def _():
                plgpu.barrier_arrive(self.cluster_barrier)
                plgpu.barrier_wait(self.cluster_barrier)

            self._sync()

    def _send(self, what, values):
        self.exchange[self.row, self.block, what] = jnp.pad(values, (0, BINS - values.size))

    def _received(self, what):
        return self.exchange[self.row, :, what]

    def load(self, chunk: jax.Array) -> jax.Array:
        """[4, 32 * values], the warps' scores."""
        held = 32 * self.plan.values
        within = chunk * held + lax.iota(jnp.int32, held)[None, :]
        begin = self.first + (self.warpgroup * 4 + lax.iota(jnp.int32, 4)[:, None]) * (self.steps * STEP)
        entry = begin + within
        inside = (within < self.steps * STEP) & (entry < self.length)
        scores = jnp.where(inside, self.scores[self.row][jnp.where(inside, entry, 0)], -jnp.inf)
        return jnp.where(lax.bitcast_convert_type(scores, jnp.int32) == jnp.int32(-(1 << 31)), 0.0, scores)

    def count(self, scores: jax.Array, chunk: jax.Array) -> None:
        # Scores past the end count as -inf, which is never found.
        self._count(0, _keys(scores) >> SHIFTS[0], jnp.full(scores.shape, True))

    def collect(self, scores: jax.Array, low: jax.Array, chunk: jax.Array) -> CandidateList:
        """Lists the scores themselves, with -inf in place of the others."""
        return CandidateList(jnp.where(_unsigned(_keys(scores)) >= _unsigned(low), scores, -jnp.inf), chunk)

    def no_candidates(self) -> jax.Array:
        """[4, 32 * slots, 2]: a key, 0 for a free slot, and its entry in the warp's stretch."""
        return jnp.zeros((4, 32 * self.plan.slots, 2), jnp.int32)

    def append(self, count: jax.Array, scores: jax.Array, low: jax.Array, chunk: jax.Array) -> jax.Array:
        entry = chunk * scores.shape[1] + jnp.broadcast_to(lax.iota(jnp.int32, scores.shape[1])[None, :], scores.shape)
        keys = jnp.where(_unsigned(_keys(scores)) >= _unsigned(low), _keys(scores), 0)
        size = count.shape[1]
        both = jnp.concatenate([count, jnp.stack([keys, entry], axis=-1)], axis=1)
        # Candidates move to the front, in a stable order.
        order = jnp.argsort(both[:, :, 0] == 0, axis=1)
        both = jnp.take_along_axis(both, order[:, :, None], axis=1)

        @pl.when((both[:, size:, 0] != 0).any())
        def _():
            self.memory[self.plan.offsets.overflow + self.warpgroup] = jnp.int32(1)

        return both[:, :size]

    def overflowed(self) -> jax.Array:
        self._sync()
        return (self.memory[pl.ds(self.plan.offsets.overflow, self.plan.warpgroups)] > 0).any()

    def _candidate_keys(self, kept):
        """(keys [4, n], 0 = none; entries in the warp's stretch [4, n])."""
        if kept.chunk is None:
            return kept.mask_or_count[..., 0], kept.mask_or_count[..., 1]
        scores = kept.mask_or_count
        keys = jnp.where(scores > -jnp.inf, _keys(scores), 0)
        held = scores.shape[1]
        return keys, jnp.broadcast_to((kept.chunk * held + lax.iota(jnp.int32, held))[None, :], keys.shape)

    def share_candidates(self, kept: CandidateList, overflowed: jax.Array) -> None:
        keys = self._candidate_keys(kept)[0].reshape(-1)
        self.candidates[pl.ds(self.warpgroup * keys.size, keys.size)] = keys
        self._sync()

        @pl.when(self.warpgroup == 0)
        def _():
            every = self.candidates[pl.ds(0, self.plan.warpgroups * keys.size)]
            total = jnp.where(overflowed, self.plan.max_shared + 1, (every != 0).sum())
            self.memory[self.plan.offsets.candidate_counts] = total
            self._send(CANDIDATE_COUNT, total[None])
            order = jnp.argsort(every == 0)
            self._send(CANDIDATES, every[order][: self.plan.max_shared])

        self._sync(cluster=True)

    def all_shared(self) -> jax.Array:
        return (self._received(CANDIDATE_COUNT)[:, 0] <= self.plan.max_shared).all()

    def count_candidates(self, number: int, kept: CandidateList, low: jax.Array, width: jax.Array) -> None:
        offset = self._candidate_keys(kept)[0] - low
        self._count(number, offset >> SHIFTS[number], _unsigned(offset) < _unsigned(width))

    def count_shared_candidates(self, number: int, low: jax.Array, width: jax.Array) -> None:
        @pl.when(self.warpgroup == 0)
        def _():
            offset = self._received(CANDIDATES) - low
            self._count(number, offset >> SHIFTS[number], _unsigned(offset) < _unsigned(width))

    def _count(self, number, digit, counted):
        histogram = jnp.zeros((BINS,), jnp.int32).at[digit & (BINS - 1)].add(counted.astype(jnp.int32))
        self.histograms[number, self.warpgroup] = self.histograms[number, self.warpgroup] + histogram

    def total_shared_marks(self, low: jax.Array, width: jax.Array) -> None:
        @pl.when(self.warpgroup == 0)
        def _():
            keys = self._received(CANDIDATES)
            listed = _unsigned(keys) >= _unsigned(low)
            tie = _unsigned(keys - low) < _unsigned(width)
            totals = (listed & ~tie).sum(1) * (1 << 16) + (listed & tie).sum(1)
            self.memory[pl.ds(self.plan.offsets.totals, self.plan.blocks)] = totals

    def find(self, number: int, rank: jax.Array, shared: jax.Array) -> None:
        self._sync()

        def own():
            return self.histograms[number].sum(0)

        @pl.when(~shared)
        def _():
            pl.when(self.warpgroup == 0)(lambda: self._send(number, own()))
            self._sync(cluster=True)

        @pl.when(self.warpgroup == 0)
        def _():
            counts = lax.cond(shared, own, lambda: self._received(number).sum(0))
            if number == 0:
                counts = jnp.where(lax.iota(jnp.int32, BINS) >= FIRST_KEY >> SHIFTS[0], counts, 0)
            above = _sum_before(counts[::-1])[::-1]
            hit = (above < rank) & (rank <= above + counts)
            digit = jnp.argmax(hit).astype(jnp.int32)
            here = rank - above[digit]
            result = jnp.where(hit.any(), jnp.stack([digit + 1, here, counts[digit] - here, here]), 0)
            self.memory[pl.ds(self.plan.results(number), RESULT)] = result

        self._sync()

    def mark(self, kept: CandidateList, low: jax.Array, width: jax.Array) -> None:
        plan = self.plan
        keys, entry = self._candidate_keys(kept)
        listed = _unsigned(keys) >= _unsigned(low)
        tie = _unsigned(keys - low) < _unsigned(width)
        size = plan.chunks * plan.values
        warp = jnp.broadcast_to(lax.iota(jnp.int32, 4)[:, None], keys.shape)
        for area, flags in enumerate((listed & ~tie, listed & tie)):
            bits = jnp.where(flags, jnp.left_shift(1, entry & 31), 0)
            own = pl.ds(plan.offsets.above + area * plan.marks + self.warpgroup * 4 * size, 4 * size)
            marks = self.memory[own].reshape(4, size).at[warp, entry >> 5].add(bits)
            self.memory[own] = marks.reshape(-1)

    def write(self, ties: jax.Array, shared: jax.Array) -> None:
        plan = self.plan
        self._sync()
        stretch = plan.chunks * plan.values * 32

        def marked(area):
            marks = self.memory[pl.ds(plan.offsets.above + area * plan.marks, plan.marks)]
            return ((marks[:, None] >> lax.iota(jnp.int32, 32)[None, :]) & 1).reshape(-1)

        above = marked(0)
        tied = marked(1)

        @pl.when(~shared & ~self.alone)
        def _():
            pl.when(self.warpgroup == 0)(lambda: self._send(TOTALS, jnp.stack([above.sum(), tied.sum()])))
            self._sync(cluster=True)

        @pl.when(self.warpgroup == 0)
        def _():
            @pl.when(self.alone)
            def _():
                own = above.sum() * (1 << 16) + jnp.minimum(tied.sum(), plan.k)
                blocks = lax.iota(jnp.int32, plan.blocks)
                self.memory[pl.ds(plan.offsets.totals, plan.blocks)] = jnp.where(blocks == self.block, own, 0)

            def known():
                totals = self.memory[pl.ds(plan.offsets.totals, plan.blocks)]
                return jnp.stack([totals >> 16, totals & 0xFFFF], axis=1)

            totals = lax.cond(shared | self.alone, known, lambda: self._received(TOTALS)[:, :2])
            before = jnp.where(lax.iota(jnp.int32, plan.blocks)[:, None] < self.block, totals, 0).sum(0)
            rank = _sum_before(tied) + before[1]
            position = _sum_before(above) + before[0] + jnp.minimum(rank, ties)
            at = lax.iota(jnp.int32, plan.marks * 32)
            entry = self.first + at // stretch * (self.steps * STEP) + at % stretch
            selected = (above == 1) | ((tied == 1) & (rank < ties))
            filled = totals[:, 0].sum() + jnp.minimum(totals[:, 1].sum(), ties)

            def put(to, _):
                here = selected & (position == to)
                padding = (to >= filled) & (self.block == 0)

                @pl.when(here.any() | padding)
                def _():
                    self.out[self.row, to] = jnp.where(padding, -1, jnp.where(here, entry, 0).sum())

            lax.fori_loop(0, plan.k, put, None)


def _keys(scores):
    """int32 whose unsigned order is that of the scores."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    return bits ^ ((bits >> 31) | jnp.int32(-(1 << 31)))


def _sum_before(x):
    # Not jnp.cumsum: on a CPU of few cores XLA splits it over threads that the interpreter's barriers hold up.
    return lax.associative_scan(jnp.add, x) - x


def _unsigned(key):
    """uint32 of the same bits."""
    return lax.bitcast_convert_type(key, jnp.uint32)
