"""Windows of more than 16 rows to entries, at the speed of the memory.

A window is 8 parts of consecutive rows, whole rows of all channels: long contiguous reads. Of a cluster of n blocks,
block b pools parts b, b + n, ...; which channels a thread has does not change from the copy to the entry. While a part
is pooled the rows of later parts, of the next window too, are copied; warps wait for nothing but their own copies. The
first block receives each part's largest logits and sums, adds them up and finishes the entry: blocks synchronise once a
window. Sums over parts are taken in the order of one tree (`tree_sum`) however many blocks there are, so that the bytes
do not depend on it.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flush import entry
from pallas_kernels.flush.entry import FlushContext
from pallas_kernels.flush.long_window_plan import LongWindowPlan, plan
from pallas_kernels.flush.operands import CompressorOperands
from pallas_kernels.flush.states import LOOKS, has_state, is_last, look, row_writer
from pallas_kernels.formats.exact_math import PARTS, SLICE, tree_sum
from pallas_kernels.mgpu import barriers, copies, transaction_barriers, vectors
from pallas_kernels.runtime.launch import kernel


MAX_LOOKS = 4  # at tokens, whose slots and positions are loaded at once


class WindowLocation(NamedTuple):
    """Where the rows of a window are; int32 scalars.

    Attributes:
      token: the token that closes it.
      ring: row of the states where its first row is.
      wrap: its first row that lies before that one, the ring's beginning.
      new: its first row that is in the call.
    """

    token: Any
    ring: Any
    wrap: Any
    new: Any


@dataclasses.dataclass(frozen=True)
class LongWindowWorker:
    """A warpgroup of a cluster, and the shared memory that it works with.

    Attributes:
      block: its number in the cluster.
      stage: [depth * plan.stage], this warpgroup's.
      sums: [4 * D], the block's, for sums over channels.
      inbox: [3 * PARTS * D], the block's; interpreted, the cluster's, in global memory.
      filled: [warpgroups, 2] int32, `transaction_barriers` of the block's inbox; None where blocks write none but their
        own memory, or are interpreted.
      meeting: interpreted, a barrier of the block's warpgroups.
      cluster: interpreted, a barrier of the cluster's warpgroups.
    """

    plan: LongWindowPlan
    ctx: FlushContext
    block: Any
    stage: Any
    sums: Any
    inbox: Any
    filled: Any = None
    meeting: Any = None
    cluster: Any = None

    def row(self, k):
        """First row of this block's part k."""
        return (self.block + self.plan.blocks * k) * self.plan.part_rows

    def staged(self, k, begin: int, rows: int):
        """`rows` rows of part k's stage: its logits, its biases and its values are one after the other."""
        p = self.plan
        at = lax.rem(k, jnp.int32(p.depth)) * p.stage + begin * p.vector
        return self.stage.at[pl.ds(at, rows * p.vector)]

    def place(self, i: int, part):
        """Where an inbox has a part's largest logits (0), sums of weights (1) or weighted sums (2)."""
        return pl.ds((i * PARTS + part) * self.plan.c.dim + self.ctx.first, self.plan.vector)

    def received(self, i: int):
        """What `place(i, part)` of the inbox holds, for every part."""
        return [vectors.load(self.inbox.at[self.place(i, part)]) for part in range(PARTS)]

    def barrier(self):
        """This warpgroup's of `filled`."""
        return self.filled.at[lax.axis_index("warpgroup")]

    def arrive(self):
        """What this thread wrote is seen by blocks that `wait` for it."""
        if self.plan.blocks > 1:
            barriers.arrive_cluster(self.cluster)

    def wait(self):
        """Until all threads of the cluster arrived."""
        if self.plan.blocks > 1:
            barriers.wait_cluster(self.cluster)


def store_entries(
    c: CompressorOperands,
    refs: CompressorOperands,
    slots: jax.Array,
    positions: jax.Array,
    most: int,
    states: bool,
    interpret: bool,
) -> None:
    """Stores the entries of the windows that close, and if `states` the state rows."""
    p = plan(c, slots.shape[0], most)
    shared: dict[str, Any] = {name: plgpu.SMEM((size,), jnp.float32) for name, size in p.shared.items()}
    if p.blocks > 1 and not interpret:
        shared |= dict(filled=transaction_barriers.scratch_type(p.warpgroups))
    out: Any = ()
    if interpret:
        # Interpreted blocks meet in global memory.
        shared |= dict(meeting=plgpu.Barrier(num_arrivals=p.warpgroups))
        if p.blocks > 1:
            del shared["inbox"]
            out = [jax.ShapeDtypeStruct((p.workers, p.shared["inbox"]), jnp.float32)]
            shared |= dict(cluster=plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=p.warpgroups))

    def body(slots, positions, refs, *inboxes, stage, scratch, **shared):
        number, warpgroup, block = (lax.axis_index(name) for name in ("worker", "warpgroup", "part"))

        def mine(ref):
            size = ref.shape[0] // p.warpgroups
            return ref.at[pl.ds(warpgroup * size, size)]

        ctx = FlushContext(c, refs, slots, positions, most, first=warpgroup * p.vector, scratch=mine(scratch))
        if inboxes:
            shared |= dict(inbox=inboxes[0].at[number])
        worker = LongWindowWorker(p, ctx, block, mine(stage), **shared)
        writer = block * p.warpgroups + warpgroup
        _run(worker, number * p.share, writer, states)

    run = kernel(
        body,
        out_type=out,
        kernel_name="flush_long",
        grid=(p.workers,),
        grid_names=("worker",),
        cluster=(p.blocks,),
        cluster_names=("part",),
        num_threads=p.warpgroups,
        thread_name="warpgroup",
        scratch_types=shared,
        # Primitives synchronise threads where they have to; what else a thread reads back it wrote itself.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    run(slots, positions, refs)


def _run(worker, first, writer, states):
    p, ctx = worker.plan, worker.ctx
    end = jnp.minimum(first + p.share, ctx.slots.shape[0])
    writers = p.blocks * p.warpgroups
    store = states and row_writer(ctx, first + writer, writers, -(-p.share // writers), end)
    window = _find(worker, first, end)

    @pl.when(window.token < end)
    def _():
        if worker.filled is not None:
            transaction_barriers.start(worker.filled)
        for k in range(p.depth):
            for i in range(2):
                _fetch(worker, window, jnp.int32(k), i)
                copies.commit_copies()

    if store:
        # It was read before the rows of the window, and is written while they are copied.
        store()
    if worker.filled is not None:
        pl.when(window.token < end)(lambda: barriers.wait_cluster(None))
    if p.share == 1:
        none = window._replace(token=end)
        pl.when(window.token < end)(functools.partial(_entry, worker, window, none, end, jnp.int32(0)))
        return

    def one(carry):
        count, window = carry
        following = _find(worker, window.token + 1, end)
        _entry(worker, window, following, end, count)
        return count + 1, following

    count, _ = lax.while_loop(lambda carry: carry[1].token < end, one, (jnp.int32(0), window))
    pl.when(count > 0)(worker.wait)


def _find(worker, first, end) -> WindowLocation:
    """The first window that a token first, first + 1, ... closes, or one of token `end`."""
    ctx, tokens = worker.ctx, worker.ctx.slots.shape[0]
    c, ring = ctx.c, jnp.int32(ctx.c.state_kv.shape[2])
    looks = min(MAX_LOOKS, -(-worker.plan.share // LOOKS))

    def search(start):
        seen = [look(ctx, start, 1, i * LOOKS, end) for i in range(looks)]
        found = [vectors.ballot(jnp.where(exists & is_last(ctx, position), 1, 0)) for _, exists, _, position in seen]
        token = end
        for i, bits in reversed(list(enumerate(found))):
            token = jnp.where(bits != 0, start + i * LOOKS + vectors.lowest_bit(bits), token)
        return token

    if worker.plan.share == 1:
        at = jnp.minimum(first, tokens - 1)
        slot, position = ctx.slots[at], ctx.positions[at]
        token = jnp.where((first < end) & has_state(ctx, slot, position) & is_last(ctx, position), first, end)
    else:
        step = looks * LOOKS
        _, token = lax.while_loop(
            lambda carry: (carry[1] == end) & (carry[0] + step < end),
            lambda carry: (carry[0] + step, search(carry[0] + step)),
            (first, search(first)),
        )
        at = jnp.minimum(token, tokens - 1)
        slot, position = ctx.slots[at], ctx.positions[at]
    oldest = lax.rem(position - (c.rows - 1) + ring, ring)
    row = ctx.state_row(slot, position) - lax.rem(position, ring) + oldest
    return WindowLocation(token, row, ring - oldest, c.rows - entry.in_call(ctx, at))


def _fetch(worker, window, k, i):
    """Starts to copy the logits (i = 0) or the values (1) of this block's part k."""
    p, ctx = worker.plan, worker.ctx
    c, row, ring = ctx.c, worker.row(k), ctx.c.state_kv.shape[2]
    call, state = ((ctx.refs.gate, ctx.refs.state_gate), (ctx.refs.kv, ctx.refs.state_kv))[i]
    pieces = [(state, window.ring + row, jnp.int32(0))]
    if ring % c.rows:
        pieces.append((state, window.ring + row - ring, window.wrap - row))
    pieces.append((call, window.token - (c.rows - 1) + row, window.new - row))
    start = functools.partial(copies.start_rows, column=ctx.first, size=p.vector)
    start(worker.staged(k, i * (p.part_rows + p.bias_rows), p.part_rows), pieces)
    if i == 0:
        target = worker.staged(k, p.part_rows, p.bias_rows)
        biases = [(ctx.refs.position_bias, row + p.part_rows - p.bias_rows, jnp.int32(0))]
        pl.when(window.new < row + p.part_rows)(functools.partial(start, target, biases))


def _entry(worker, window, following, end, count):
    """Stores the entry of a window, this worker's number `count`; starts to copy the rows of the one that follows."""
    p, ctx = worker.plan, worker.ctx
    target = entry.find_target(ctx, window.token)
    # While the rows are copied.
    rotation = entry.rotation(ctx, target)

    if p.share > 1:
        # Until the first block has read its inbox for the window before.
        pl.when(count > 0)(worker.wait)

    def one(k, _):
        same = k + p.depth < p.parts
        coming = WindowLocation(*(jnp.where(same, a, b) for a, b in zip(window, following, strict=True)))
        part = jnp.where(same, k + p.depth, k + p.depth - p.parts)

        def refill(i):
            # No copy may begin before the row whose place it takes was read.
            copies.sync_warp()
            pl.when(coming.token < end)(functools.partial(_fetch, worker, coming, part, i))
            copies.commit_copies()

        _pool_part(worker, window, k, refill)

    lax.fori_loop(0, p.parts, one, None)
    if worker.filled is None:
        worker.arrive()
        worker.wait()

    @pl.when(worker.block == 0)
    def _():
        if worker.filled is not None:
            transaction_barriers.arrive(worker.barrier(), 3 * PARTS * 4 * p.vector // vectors.THREADS)
            transaction_barriers.wait(worker.barrier(), count & 1)
        peaks = worker.received(0)
        scales = entry.factors(peaks, functools.reduce(jnp.maximum, peaks))
        weight, total = [entry.weighted(scales, worker.received(i)) for i in (1, 2)]
        if p.share > 1:
            worker.arrive()
        across = functools.partial(_across, worker, count, iter(range(2)))
        entry.store_entry(ctx, target, *rotation, entry.share_of(weight, total), across)

    if p.share > 1:
        pl.when(worker.block != 0)(worker.arrive)


def _pool_part(worker, window, k, refill):
    """Puts the largest logits, the sums of weights and the weighted sums of part k into the first block's inbox."""
    p = worker.plan

    def arrive():
        # The copies of all parts before k, and of k the logits, or the values too.
        copies.wait_copies(2 * p.depth - 1)
        # What a thread reads a thread of its warp has copied.
        copies.sync_warp()

    def logit(j):
        x = vectors.load(worker.staged(k, j, 1))
        number = j - (p.part_rows - p.bias_rows)
        if number < 0:
            return x
        bias = vectors.load(worker.staged(k, p.part_rows + number, 1))
        return x + jnp.where(jnp.broadcast_to(worker.row(k) + j >= window.new, x.shape), bias, 0.0)

    arrive()
    logits = [logit(j) for j in range(p.part_rows)]
    refill(0)
    peak = entry.peak_of(logits)
    _send(worker, k, 0, peak)
    weights = entry.factors(logits, peak)
    _send(worker, k, 1, tree_sum(weights))
    arrive()
    values = [vectors.load(worker.staged(k, p.part_rows + p.bias_rows + j, 1)) for j in range(p.part_rows)]
    _send(worker, k, 2, entry.weighted(weights, values))
    refill(1)


def _send(worker, k, i, x):
    """Puts x where the first block's `received(i)` has this block's part k."""
    target = worker.inbox.at[worker.place(i, worker.block + worker.plan.blocks * k)]
    if worker.filled is None:
        target[...] = x
    else:
        transaction_barriers.put(x, target, 0, worker.barrier())


def _across(worker, count, uses, combine, x):
    """x of all slices combined, where it is the same throughout each slice; the second or first of two `uses`."""
    p, ctx = worker.plan, worker.ctx
    # A warpgroup is at most one entry ahead of the others, so that entries take turns with two places.
    base = (lax.rem(count, jnp.int32(2)) * 2 + next(uses)) * p.c.dim
    worker.sums.at[pl.ds(base + ctx.first, p.vector)][...] = x
    barriers.sync_block(worker.meeting)
    slices = (worker.sums.at[pl.ds(base + at, SLICE)] for at in range(0, p.c.dim, SLICE))
    found = [vectors.load_repeated(x, p.vector) for x in slices]
    return tree_sum(found) if combine is jnp.add else functools.reduce(combine, found)
