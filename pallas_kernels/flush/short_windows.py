"""Windows of at most 16 rows to entries: a warpgroup holds all channels of a window.

It takes every n-th token of the call and stores their state rows. For each token that closes a window it copies the
window's rows to shared memory, from this call's projections or from the ring, and pools them to an entry. The rows of
the next window are copied while an entry is finished. A thread copies exactly what it reads back.
"""

import functools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flush import entry
from pallas_kernels.flush.entry import FlushContext
from pallas_kernels.flush.operands import CompressorOperands
from pallas_kernels.flush.states import LOOKS, closing, row_writer
from pallas_kernels.formats.exact_math import SLICE, tree_sum
from pallas_kernels.mgpu import copies, vectors
from pallas_kernels.runtime.launch import kernel


WARPGROUPS = 2
# Warpgroups that share a long call: nearly as many as a device holds at once, 4 * MULTIPROCESSORS; odd, see `_workers`.
AT_ONCE = 513


def store_entries(
    compressors: Sequence[CompressorOperands],
    refs: Sequence[CompressorOperands],
    slots: jax.Array,
    positions: jax.Array,
    most: int,
    states: bool,
    interpret: bool,
) -> None:
    """Stores the entries of the windows that close, and if `states` the state rows."""
    tokens = slots.shape[0]
    workers, share = _workers(tokens, most)
    sizes = dict(
        stage=max(2 * c.rows * c.dim for c in compressors),
        biases=max(min(c.rows, most) * c.dim for c in compressors),
        scratch=max(c.dim for c in compressors),
    )

    def body(slots, positions, refs, **shared):
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("block") * WARPGROUPS + warpgroup
        # Surplus warpgroups get no token.
        first = jnp.where(worker < workers, worker, tokens)
        for j, c in enumerate(compressors):
            own = {name: shared[name].at[pl.ds(warpgroup * size, size)] for name, size in sizes.items()}
            own["scratch"] = shared["scratch"].at[pl.ds(warpgroup * sizes["scratch"], c.dim)]
            ctx = FlushContext(c, refs[j], slots, positions, most, **own)
            work = functools.partial(_work, ctx, first, workers, share, states)
            pl.when(lax.axis_index("compressor") == j)(work)

    run = kernel(
        body,
        out_type=(),
        kernel_name="flush_short",
        # The last axis runs fastest: the first compressor's blocks, which should be the longest, start first.
        grid=(len(compressors), -(-workers // WARPGROUPS)),
        grid_names=("compressor", "block"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types={name: plgpu.SMEM((WARPGROUPS * size,), jnp.float32) for name, size in sizes.items()},
        # Primitives synchronise threads where they have to; what else a thread reads back it wrote itself.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    run(slots, positions, refs)


def _workers(tokens, most):
    """(workers, tokens of each)."""
    share = -(-tokens // AT_ONCE)
    workers = -(-tokens // share)
    # Every 4th token of a long run closes a window: an odd step leads to them from every worker.
    return workers + (most > 1 and share > 1 and workers % 2 == 0), share


def _work(ctx, first, step, share, states):
    """Works on tokens first, first + step, ..."""
    tokens = ctx.slots.shape[0]
    store = states and row_writer(ctx, first, step, share, tokens)
    found = _begin(ctx, first, step, 0)
    if store:
        # It was read before the rows of the window, and is written while they are copied.
        store()
    _entries(ctx, first, step, 0, share, *found)
    if share > LOOKS:

        def more(look, _):
            _entries(ctx, first, step, look, share, *_begin(ctx, first, step, look))

        lax.fori_loop(1, -(-share // LOOKS), more, None)


def _begin(ctx, first, step, look):
    """(closing, rows in the call of the first): bit i of closing: token `look * LOOKS + i` closes a window."""
    bits = closing(ctx, first, step, look * LOOKS, ctx.slots.shape[0])
    token = first + (look * LOOKS + vectors.lowest_bit(bits)) * step
    return bits, _fetch_next(ctx, token, bits, _fetch_biases)


def _entries(ctx, first, step, look, share, bits, rows_in_call):
    """Stores the entries of the windows that `_begin` found."""

    def one(carry):
        bits, rows_in_call = carry
        token = first + (look * LOOKS + vectors.lowest_bit(bits)) * step
        target = entry.find_target(ctx, token)
        copies.commit_copies()
        copies.wait_copies(0)
        exists = ctx.positions[token] >= ctx.c.rate
        logits, peak = _take_logits(ctx, exists, rows_in_call)
        weights = entry.factors(logits, peak)
        values = [_where_exists(ctx, exists, j, 0, 0.0) for j in range(ctx.c.rows)]
        x = entry.share_of(tree_sum(weights), entry.weighted(weights, values))
        bits &= bits - 1
        if share > 1:
            # No copy may begin before the row whose place it takes was read.
            copies.sync_warp()
            token = first + (look * LOOKS + vectors.lowest_bit(bits)) * step
            rows_in_call = _fetch_next(ctx, token, bits)
        entry.store_entry(ctx, target, *entry.rotation(ctx, target), x, functools.partial(_across, ctx))
        return bits, rows_in_call

    lax.while_loop(lambda carry: carry[0] != 0, one, (bits, rows_in_call))


def _across(ctx, combine, x):
    """x of all slices combined, where it is the same throughout each slice."""
    return vectors.butterfly(combine, x, ctx.c.dim // 2, SLICE, ctx.scratch)


def _fetch_next(ctx, token, bits, also=lambda ctx: None):
    """Starts to copy the rows of the next window, if any; how many of them are in the call."""

    def start():
        rows_in_call = entry.in_call(ctx, token)
        also(ctx)
        _fetch(ctx, token, rows_in_call)
        return rows_in_call

    return lax.cond(bits != 0, start, lambda: jnp.int32(1))


def _fetch_biases(ctx: FlushContext) -> None:
    """Starts to copy the position biases of the rows that can be in the call: the same for every window."""
    c = ctx.c
    place, first = _place(ctx), _may_be_in_call(ctx).start

    def one(j, _):
        row, column = place(j)
        target = ctx.biases.at[pl.ds((j - first) * c.dim, c.dim)]
        copies.start_copy(target, ctx.refs.position_bias, lax.rem(row, jnp.int32(c.rate)), column)

    lax.fori_loop(first, c.rows, one, None)


def _fetch(ctx: FlushContext, token, rows_in_call) -> None:
    """Starts to copy the rows of the window that closes at `token`."""
    c = ctx.c
    slot, position = ctx.slots[token], ctx.positions[token]
    ring = jnp.int32(c.state_kv.shape[2])
    last = ctx.state_row(slot, position)
    first_of_ring = last - lax.rem(position, ring)
    oldest = lax.rem(position - (c.rows - 1) + ring, ring)
    place = _place(ctx)

    def in_ring(row):
        at = oldest + row
        return first_of_ring + jnp.where(at >= ring, at - ring, at)

    def either(j, _=None):
        row, column = place(j)
        number = jnp.where(row >= c.rows - rows_in_call, token - (c.rows - 1) + row, -1 - in_ring(row))
        for i, (new, old) in enumerate([(ctx.refs.kv, ctx.refs.state_kv), (ctx.refs.gate, ctx.refs.state_gate)]):
            copies.start_copy(_staged(ctx, i, j), new, number, column, other=old)

    if ctx.most_in_call >= c.rows:
        # Two addresses a row: a loop, or they take too many registers.
        lax.fori_loop(0, c.rows, either, None)
        return
    for j in range(c.rows):
        if j in _may_be_in_call(ctx):
            either(jnp.int32(j))
            continue
        # The rows of one window lie together where the ring has room for whole ones: one address, and offsets.
        below = j % c.rate if c.state_kv.shape[2] % c.rate == 0 else 0
        row, column = place(jnp.int32(j - below))
        for i, array in enumerate((ctx.refs.state_kv, ctx.refs.state_gate)):
            copies.start_copy(_staged(ctx, i, j), array, in_ring(row), column, below=below)


def _take_logits(ctx: FlushContext, exists, rows_in_call) -> tuple[list[jax.Array], jax.Array]:
    """(logits, the largest of them) of the window, which must be there."""
    c, first = ctx.c, _may_be_in_call(ctx).start

    def logit(j):
        x = _where_exists(ctx, exists, j, 1, -jnp.inf)
        if j < first:
            return x
        bias = vectors.load(ctx.biases.at[pl.ds((j - first) * c.dim, c.dim)])
        return x + jnp.where(jnp.broadcast_to(j >= c.rows - rows_in_call, x.shape), bias, 0.0)

    logits = [logit(j) for j in range(c.rows)]
    return logits, entry.peak_of(logits)


def _where_exists(ctx, exists, j, i, other):
    """Row j, or `other` where there is none: the first window of a request has no window before it."""
    x = vectors.load(_staged(ctx, i, j))
    if not ctx.c.overlap or j >= ctx.c.rate:
        return x
    return jnp.where(jnp.broadcast_to(exists, x.shape), x, other)


def _place(ctx):
    """A function of j: (row of the window, column in the arrays) of what this thread has of row j."""
    c, thread = ctx.c, vectors.thread()
    held = c.dim // vectors.THREADS
    second = c.rate if c.overlap else c.rows
    return lambda j: (j, thread * held + jnp.where(j >= second, c.dim, 0))


def _may_be_in_call(ctx):
    """Rows that can be; the others are always in the ring."""
    return range(max(ctx.c.rows - ctx.most_in_call, 0), ctx.c.rows)


def _staged(ctx, i, j):
    c = ctx.c
    return ctx.stage.at[pl.ds((i * c.rows + j) * c.dim, c.dim)]
