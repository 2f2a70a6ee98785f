"""The kernel that stores the entries of windows of more than 16 rows. The blocks of a cluster share a window.

A window is pooled in 8 chunks of consecutive rows. The sums of the chunks are always added in the order of `tree_sum`,
so that an entry's bytes do not depend on the number of blocks. The grid consists of clusters of n blocks. A cluster
works on consecutive tokens of the call, and on the windows that these tokens close. Each warpgroup of a block works on
an equal part of the channels in all steps after the first.

    block    step           does                                          waits for              signals
    all      row_writer     stores the state rows of the cluster's tokens,
                            unless a separate launch stores them
    all      _start_rows    starts to copy the next chunks (cp.async),
                            also chunks of the next window
    all      _pool_chunk    pools chunks b, b + n, .. for block b         copies, `wait`         chunks_full
    first    _finish_entry  adds up the chunks, stores the entry          chunks_full            `arrive`
    others                                                                                       `arrive`

`arrive` and `wait` use the barrier of the cluster. After each window all blocks call `arrive`: the first block when it
has read the results of the window's chunks, the others when they have sent theirs. All blocks call `wait` before they
send results of the next window, which overwrite those of this one.
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
from pallas_kernels.flush.operands import CompressorOperands, Config, FlushCall
from pallas_kernels.flush.states import SCAN, has_state, is_last, row_writer, scan
from pallas_kernels.formats.exact_math import CHUNKS, SLICE, tree_sum
from pallas_kernels.mgpu import barriers, copies, transaction_barriers, vectors
from pallas_kernels.runtime.hardware import SHARED_BYTES
from pallas_kernels.runtime.launch import axis_indices, kernel


MAX_SCANS = 4  # maximum number of scans whose loads overlap; a scan examines 32 tokens
STAGES = 2  # number of chunks that a block copies at once, if shared memory has room for them
# Number of warpgroups of a block if no request has all tokens of a window in the call, and if one may have them. More
# warpgroups take longer to start.
DECODE_WARPGROUPS = 2
PREFILL_WARPGROUPS = 4


@dataclasses.dataclass(frozen=True)
class LongWindowPlan:
    """The division of a call's work on long windows among clusters, blocks and warpgroups."""

    c: CompressorOperands  # operands of the compressor; only their shapes and static options are read
    max_in_call: int  # maximum number of tokens of a slot in the call
    blocks: int  # number of blocks in a cluster, which share each window
    warpgroups: int  # number of warpgroups in a block, which share the channels
    workers: int  # number of clusters
    share: int  # maximum number of consecutive tokens that a cluster takes
    stages: int  # number of chunks that a block copies at once; divides `chunks`

    @classmethod
    def for_call(cls, config: Config, c: CompressorOperands, tokens: int, max_in_call: int) -> "LongWindowPlan":
        """Returns the plan for a call of `tokens` tokens, with at most `max_in_call` tokens of a slot."""
        windows = -(-tokens // min(max_in_call, c.rate))
        blocks = next((blocks for at_most, blocks in config.cluster_sizes if windows <= at_most), 1)
        share = -(-tokens // min(windows, config.long_blocks // blocks))
        warpgroups = PREFILL_WARPGROUPS if max_in_call >= c.rate else DECODE_WARPGROUPS
        warpgroups = min(warpgroups, c.dim // vectors.THREADS)
        single = cls(c, max_in_call, blocks, warpgroups, -(-tokens // share), share, 1)
        # If all rows of a chunk can be in the call, a stage also holds position biases for all of them. Then a second
        # stage may not fit into shared memory.
        staged = dataclasses.replace(single, stages=min(STAGES, single.chunks))
        return staged if 4 * sum(staged.shared.values()) <= SHARED_BYTES else single

    @property
    def channels(self) -> int:
        """The number of channels of a warpgroup."""
        return self.c.dim // self.warpgroups

    @property
    def chunks(self) -> int:
        """The number of chunks of a window that each block pools."""
        return CHUNKS // self.blocks

    @property
    def chunk_rows(self) -> int:
        return self.c.rows // CHUNKS

    @property
    def bias_rows(self) -> int:
        """The number of rows at the end of a chunk for which a stage holds biases.

        This is the maximum number of a chunk's rows that can be in the call, rounded up to a multiple of 4.
        """
        return min(self.chunk_rows, -(-self.max_in_call // 4) * 4)

    @property
    def stage_size(self) -> int:
        """The number of float32 values in a stage, which holds the logits, biases and values of a chunk."""
        return (2 * self.chunk_rows + self.bias_rows) * self.channels

    @property
    def shared(self) -> dict[str, int]:
        """The number of float32 values in each buffer of a block's shared memory, by name.

        The buffers are:

          * stages_smem: the stages; each warpgroup uses an equal part.
          * scratch_smem: scratch for `vectors.exchange`; each warpgroup uses an equal part.
          * sums_smem: the operands [D] of two reductions over channels, for even and for odd entries, see `_across`.
          * partials_smem: the results of every chunk: largest logits, sums of weights and weighted sums.
        """
        stages = self.stages * self.stage_size * self.warpgroups
        dim = self.c.dim
        return {"stages_smem": stages, "scratch_smem": dim, "sums_smem": 4 * dim, "partials_smem": 3 * CHUNKS * dim}


class WindowLocation(NamedTuple):
    """The location of a window's rows, as int32 scalars. Row 0 of the window is its oldest row."""

    token: Any  # index of the token that closes the window
    ring: Any  # index of the state row that holds row 0 of the window, counted over all layers and slots
    wrap: Any  # number of rows from `ring` to the ring's end; a longer window goes on at the ring's beginning
    new: Any  # index of the window's first row that is in the call


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongWindowWorker(FlushContext):
    """The operands, buffers and barriers of a warpgroup whose cluster stores entries of long windows."""

    plan: LongWindowPlan  # division of the work
    block: Any  # int32 scalar, index of the block in the cluster
    stages_smem: Any  # [stages * stage_size] float32, the warpgroup's stages
    sums_smem: Any  # [4 * D] float32, the block's buffer for sums over channels
    # [3 * CHUNKS * D] float32, the partials: results of a window's chunks. The first block receives the results of all
    # chunks. If interpreted with several blocks, the partials are in global memory.
    partials_smem: Any
    # [warpgroups, 2] int32, one barrier for each warpgroup, see `transaction_barriers`. The barrier counts the bytes of
    # results that the cluster's blocks send for the warpgroup's channels. None if a cluster has one block, or if
    # interpreted.
    chunks_full: Any = None
    block_barrier: Any = None  # barrier of the block's warpgroups, if interpreted
    cluster_barrier: Any = None  # barrier of the cluster's warpgroups, if interpreted

    def row(self, k):
        """Returns the index, in the window, of the first row of this block's chunk k."""
        return (self.block + self.plan.blocks * k) * self.plan.chunk_rows

    def staged(self, k, begin: int, rows: int):
        """Returns a reference to rows begin .. begin + rows - 1 of the stage of this block's chunk k.

        A stage holds `chunk_rows` rows of logits, then `bias_rows` rows of biases, then `chunk_rows` rows of values. A
        row holds the warpgroup's channels.
        """
        p = self.plan
        first_value = lax.rem(k, p.stages) * p.stage_size + begin * p.channels
        return self.stages_smem.at[pl.ds(first_value, rows * p.channels)]

    def place(self, i: int, chunk):
        """Returns the slice of the partials that holds result i of a chunk, for the warpgroup's channels.

        Result 0 is the largest logits, result 1 the sums of weights and result 2 the weighted sums of values.
        """
        return pl.ds((i * CHUNKS + chunk) * self.c.dim + self.first, self.plan.channels)

    def received(self, i: int):
        """Loads result i of every chunk from the partials, see `place`."""
        return [vectors.load(self.partials_smem.at[self.place(i, chunk)]) for chunk in range(CHUNKS)]

    def barrier(self):
        """Returns this warpgroup's barrier of `chunks_full`."""
        return self.chunks_full.at[lax.axis_index("warpgroup")]

    def arrive(self):
        """Arrives at the cluster's barrier, and makes this thread's writes visible to threads that call `wait`."""
        if self.plan.blocks > 1:
            barriers.arrive_cluster(self.cluster_barrier)

    def wait(self):
        """Waits until all threads of the cluster have called `arrive`."""
        if self.plan.blocks > 1:
            barriers.wait_cluster(self.cluster_barrier)


def store_entries(call: FlushCall) -> None:
    """Launches the kernel: stores the entries of all windows that close, and the state rows if `call.with_states`."""
    interpret = call.interpret
    (compressor,) = call.compressors
    p = LongWindowPlan.for_call(call.config, compressor, call.slots.shape[0], call.max_tokens)
    shared: dict[str, Any] = {name: plgpu.SMEM((size,), jnp.float32) for name, size in p.shared.items()}
    if p.blocks > 1 and not interpret:
        shared |= {"chunks_full": transaction_barriers.scratch_type(p.warpgroups)}
    out: Any = ()
    if interpret:
        # Interpreted blocks exchange partials through global memory.
        shared |= {"block_barrier": plgpu.Barrier(num_arrivals=p.warpgroups)}
        if p.blocks > 1:
            del shared["partials_smem"]
            out = [jax.ShapeDtypeStruct((p.workers, p.shared["partials_smem"]), jnp.float32)]
            shared |= {"cluster_barrier": plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=p.warpgroups)}

    def store_windows(slots_gmem, positions_gmem, layer_gmem, c, *partials_gmem, stages_smem, scratch_smem, **shared):
        cluster, warpgroup, block = axis_indices("worker", "warpgroup", "block")

        def own_part(ref):
            size = ref.shape[0] // p.warpgroups
            return ref.at[pl.ds(warpgroup * size, size)]

        if partials_gmem:
            shared |= {"partials_smem": partials_gmem[0].at[cluster]}
        worker = LongWindowWorker(
            c.of_layer(layer_gmem),
            slots_gmem,
            positions_gmem,
            call.max_tokens,
            first=warpgroup * p.channels,
            scratch_smem=own_part(scratch_smem),
            plan=p,
            block=block,
            stages_smem=own_part(stages_smem),
            **shared,
        )
        writer = block * p.warpgroups + warpgroup
        _run(worker, cluster * p.share, writer, call.with_states)

    launch = kernel(
        store_windows,
        out_type=out,
        kernel_name="flush_long",
        grid={"worker": p.workers},
        cluster={"block": p.blocks},
        num_threads=p.warpgroups,
        scratch_types=shared,
        # Turns off Pallas's automatic barriers, which are not needed: the primitives by which threads exchange data
        # synchronize the threads. Apart from that, a thread reads only shared memory that it has written itself.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    launch(call.slots, call.positions, call.layer, compressor)


def _run(worker, first, writer, with_states):
    """Stores the entries of the windows that the cluster's tokens close, and the tokens' state rows if `with_states`.

    `first` is the index of the cluster's first token, and `writer` the index of this warpgroup among the warpgroups of
    the cluster.
    """
    p = worker.plan
    end = jnp.minimum(first + p.share, worker.slots_gmem.shape[0])
    writers = p.blocks * p.warpgroups
    store = with_states and row_writer(worker, first + writer, writers, -(-p.share // writers), end)
    window = _find_window(worker, first, end)

    @pl.when(window.token < end)
    def _():
        if worker.chunks_full is not None:
            transaction_barriers.start(worker.chunks_full)
        for k in range(p.stages):
            for i in range(2):
                _start_rows(worker, window, jnp.int32(k), i)
                copies.commit_copies()

    if store:
        # If there is only one state row, `row_writer` has loaded it before the copies started.
        store()
    if worker.chunks_full is not None:
        pl.when(window.token < end)(lambda: barriers.wait_cluster(None))
    if p.share == 1:
        no_window = window._replace(token=end)
        pl.when(window.token < end)(functools.partial(_store_window, worker, window, no_window, end, jnp.int32(0)))
        return

    def exists(carry):
        _, window = carry
        return window.token < end

    def store_next(carry):
        count, window = carry
        following = _find_window(worker, window.token + 1, end)
        _store_window(worker, window, following, end, count)
        return count + 1, following

    count, _ = lax.while_loop(exists, store_next, (jnp.int32(0), window))
    pl.when(count > 0)(worker.wait)


def _find_window(worker, first, end) -> WindowLocation:
    """Returns the first window that one of the tokens first .. end - 1 closes.

    If there is no such window, `token` of the result is `end`, and the other fields are arbitrary.
    """
    tokens = worker.slots_gmem.shape[0]
    c = worker.c
    ring = jnp.int32(c.ring)
    scans = min(MAX_SCANS, -(-worker.plan.share // SCAN))
    step = scans * SCAN

    def search(start):
        """Returns the first of the tokens start .. start + step - 1 that closes a window, or `end`."""
        scanned = [scan(worker, start, 1, i * SCAN, end) for i in range(scans)]
        closing_bits = []
        for _, exists, _, position in scanned:
            closes = exists & is_last(worker, position)
            closing_bits.append(vectors.ballot(jnp.where(closes, 1, 0)))
        token = end
        for i, bits in reversed(list(enumerate(closing_bits))):
            token = jnp.where(bits != 0, start + i * SCAN + vectors.lowest_bit(bits), token)
        return token

    def is_missing(carry):
        start, token = carry
        return (token == end) & (start + step < end)

    def search_next(carry):
        start, _ = carry
        return start + step, search(start + step)

    if worker.plan.share == 1:
        clipped = jnp.minimum(first, tokens - 1)
        slot = worker.slots_gmem[clipped]
        position = worker.positions_gmem[clipped]
        closes = (first < end) & has_state(worker, slot, position) & is_last(worker, position)
        token = jnp.where(closes, first, end)
    else:
        _, token = lax.while_loop(is_missing, search_next, (first, search(first)))
        clipped = jnp.minimum(token, tokens - 1)
        slot = worker.slots_gmem[clipped]
        position = worker.positions_gmem[clipped]
    oldest = lax.rem(position - (c.rows - 1) + ring, ring)  # index in the slot's ring of row 0 of the window
    ring_begin = worker.state_row(slot, position) - lax.rem(position, ring)
    new = c.rows - entry.rows_in_call(worker, clipped)
    return WindowLocation(token, ring=ring_begin + oldest, wrap=ring - oldest, new=new)


@jax.named_scope("start_rows")
def _start_rows(worker, window, k, i):
    """Starts to copy the logits and biases (i = 0), or the values (i = 1), of this block's chunk k to its stage."""
    p = worker.plan
    c = worker.c
    row = worker.row(k)
    new, old = ((c.gate, c.state_gate), (c.kv, c.state_kv))[i]
    # The chunk has up to three pieces (see `copies.start_rows`): rows of the ring; rows from the ring's beginning on,
    # if the window wraps around the ring's end; and rows of this call, from the array `new`.
    pieces = [(old, window.ring + row, jnp.int32(0))]
    if c.ring % c.rows:
        pieces.append((old, window.ring + row - c.ring, window.wrap - row))
    pieces.append((new, window.token - (c.rows - 1) + row, window.new - row))
    start_copies = functools.partial(copies.start_rows, column=worker.first, size=p.channels)
    start_copies(worker.staged(k, i * (p.chunk_rows + p.bias_rows), p.chunk_rows), pieces)
    if i == 0:
        target = worker.staged(k, p.chunk_rows, p.bias_rows)
        biases = [(c.position_bias, row + p.chunk_rows - p.bias_rows, jnp.int32(0))]
        pl.when(window.new < row + p.chunk_rows)(functools.partial(start_copies, target, biases))


def _store_window(worker, window, following, end, count):
    """Stores the entry of a window, and starts to copy the first chunks of the following window.

    Args:
      worker: operands, buffers and barriers of the warpgroup.
      window: the window; copies of this block's first `stages` chunks have been started.
      following: the cluster's next window; `following.token` is `end` if there is none.
      end: int32 scalar, end of the cluster's tokens.
      count: int32 scalar, number of windows that the cluster has stored so far.
    """
    p = worker.plan
    target = entry.find_target(worker, worker.slots_gmem[window.token], worker.positions_gmem[window.token])
    # The angles are computed while the copies are in flight.
    rotation = entry.rotation(worker, target)

    if p.share > 1:
        # Waits until the first block has read the partials of the preceding window, because the results that are sent
        # below overwrite these partials.
        pl.when(count > 0)(worker.wait)

    def pool_chunk(k, _):
        # The next chunk that is copied to this chunk's stage belongs to this window or to the following one.
        same_window = k + p.stages < p.chunks
        next_window = jax.tree.map(functools.partial(jnp.where, same_window), window, following)
        next_chunk = jnp.where(same_window, k + p.stages, k + p.stages - p.chunks)

        def refill(i):
            # The copies overwrite rows that were just read, so all threads of the warp must have read them.
            copies.sync_warp()
            start_rows = functools.partial(_start_rows, worker, next_window, next_chunk, i)
            pl.when(next_window.token < end)(start_rows)
            copies.commit_copies()

        _pool_chunk(worker, window, k, refill)

    lax.fori_loop(0, p.chunks, pool_chunk, None)
    if worker.chunks_full is None:
        worker.arrive()
        worker.wait()

    pl.when(worker.block == 0)(functools.partial(_finish_entry, worker, target, rotation, count))
    if p.share > 1:
        pl.when(worker.block != 0)(worker.arrive)


@jax.named_scope("finish_entry")
def _finish_entry(worker, target, rotation, count):
    """Combines the results of a window's chunks and stores the entry. Only the first block of a cluster runs this."""
    p = worker.plan
    if worker.chunks_full is not None:
        transaction_barriers.arrive(worker.barrier(), 3 * CHUNKS * 4 * p.channels // vectors.THREADS)
        transaction_barriers.wait(worker.barrier(), count & 1)
    peaks = worker.received(0)
    scales = entry.softmax_weights(peaks, functools.reduce(jnp.maximum, peaks))
    weight = entry.weighted_sum(scales, worker.received(1))
    total = entry.weighted_sum(scales, worker.received(2))
    if p.share > 1:
        worker.arrive()
    across = functools.partial(_across, worker, count, iter(range(2)))
    entry.store_entry(worker, target, rotation, entry.normalize(weight, total), across)


@jax.named_scope("pool_chunk")
def _pool_chunk(worker, window, k, refill):
    """Pools this block's chunk k and sends the three results to the first block, see `LongWindowWorker.place`.

    `refill(i)` is called when the stage's logits and biases (i = 0), or its values (i = 1), have been read. It starts
    the copies that overwrite them.
    """
    p = worker.plan

    def wait_for_rows():
        # The logits and the values of a chunk are two groups of copies. At each call, 2 * stages groups are in flight.
        # The first call waits for the group of chunk k's logits, and the second call for that of chunk k's values.
        copies.wait_copies(2 * p.stages - 1)
        # A thread also reads rows that other threads of its warp have copied.
        copies.sync_warp()

    def logit(j):
        x = vectors.load(worker.staged(k, j, 1))
        bias_row = j - (p.chunk_rows - p.bias_rows)
        if bias_row < 0:
            return x
        bias = vectors.load(worker.staged(k, p.chunk_rows + bias_row, 1))
        return x + jnp.where(jnp.broadcast_to(worker.row(k) + j >= window.new, x.shape), bias, 0.0)

    wait_for_rows()
    logits = [logit(j) for j in range(p.chunk_rows)]
    refill(0)
    peak = entry.max_logit(logits)
    _send(worker, k, 0, peak)
    weights = entry.softmax_weights(logits, peak)
    _send(worker, k, 1, tree_sum(weights))
    wait_for_rows()
    values = [vectors.load(worker.staged(k, p.chunk_rows + p.bias_rows + j, 1)) for j in range(p.chunk_rows)]
    _send(worker, k, 2, entry.weighted_sum(weights, values))
    refill(1)


def _send(worker, k, i, x):
    """Stores x, [channels] float32, as result i of this block's chunk k in the first block's partials."""
    target = worker.partials_smem.at[worker.place(i, worker.block + worker.plan.blocks * k)]
    if worker.chunks_full is None:
        target[...] = x
    else:
        transaction_barriers.put(x, target, 0, worker.barrier())


def _across(worker, count, uses, combine, x):
    """Reduces x over all slices of 64 channels of an entry, including the slices of other warpgroups.

    Args:
      worker: operands, buffers and barriers of the warpgroup.
      count: int32 scalar, number of windows that the cluster has stored so far.
      uses: iterator over 0, 1, the indices of the two calls for an entry. A call takes the next index.
      combine: `jnp.add` or another reduction, such as `jnp.maximum`.
      x: [channels] float32, the warpgroup's channels; the values of each slice are equal.

    Returns:
      [channels] float32; all values are equal.
    """
    p = worker.plan
    dim = worker.c.dim
    # A warpgroup is at most one entry ahead of the other warpgroups. So each of the two calls needs two places in the
    # buffer, for even and for odd entries.
    base = (lax.rem(count, 2) * 2 + next(uses)) * dim
    worker.sums_smem.at[pl.ds(base + worker.first, p.channels)][...] = x
    barriers.sync_block(worker.block_barrier)
    slices = (worker.sums_smem.at[pl.ds(base + channel, SLICE)] for channel in range(0, dim, SLICE))
    slice_values = [vectors.load_repeated(x, p.channels) for x in slices]
    return tree_sum(slice_values) if combine is jnp.add else functools.reduce(combine, slice_values)
