"""The kernels for windows of at most 16 rows. A warpgroup pools whole windows.

The grid is (compressor, block). Of the n warpgroups of a compressor, each takes every n-th token of the call and the
windows that these tokens close. Warpgroups share nothing, so there are no barriers between them. A warpgroup runs these
steps:

    step            does
    row_writer      stores the state rows of the warpgroup's tokens
    _start_window   starts to copy a window's rows from the call or the ring to shared memory
    _store_windows  pools the rows, starts to copy the next window's rows, finishes and stores the entry

Each thread copies and pools its own channels. The kernel of `pool_windows` either stores entries, or applies only the
norm to the pooled vectors and returns them. The kernel of `write_entries` stores such vectors as entries. A warpgroup
stores a whole vector.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flush import entry
from pallas_kernels.flush.entry import FlushContext
from pallas_kernels.flush.operands import FlushCall
from pallas_kernels.flush.states import SCAN, has_state, is_last, row_writer, run_workers, scan
from pallas_kernels.formats.exact_math import SLICE, tree_sum
from pallas_kernels.mgpu import copies, vectors


def pool_windows(call: FlushCall) -> list[jax.Array]:
    """Launches the kernel, which pools all windows that close, and stores the state rows if `call.with_states`.

    The pooled vectors are stored as entries, or returned if `call.results` is given.
    """
    max_tokens = call.max_tokens
    workers, share = _workers(call.slots.shape[0], max_tokens, call.config.short_workers)

    def sizes(c):
        stage = {} if c.gate is None else {"stage_smem": 2 * c.rows * c.dim}
        biases = {} if c.position_bias is None else {"biases_smem": min(c.rows, max_tokens) * c.dim}
        return stage | biases | {"scratch_smem": c.dim}

    work = functools.partial(_run, step=workers, share=share, with_states=call.with_states)
    name = "flush_short" if call.results is None else "pool_windows"
    return run_workers(name, work, workers, call, sizes)


def write_entries(call: FlushCall) -> None:
    """Launches the kernel that stores vectors as entries. `call.positions` are the entries' indices, not positions."""
    workers, share = _workers(call.slots.shape[0], 1, call.config.short_workers)
    work = functools.partial(_write, step=workers, share=share)
    run_workers("write_entries", work, workers, call, lambda c: {"scratch_smem": c.dim})


def _write(ctx, first, step, share):
    """Stores up to `share` vectors, with indices first, first + step, ..., as entries."""
    c = ctx.c
    # Hides the range of channel indices from the compiler. Otherwise, LLVM would compute the indices of rotated pairs
    # in vectors of two 16-bit integers, which ptxas adds wrongly.
    ctx = dataclasses.replace(ctx, first=vectors.opaque(jnp.int32(0)))
    vectors_in_call = ctx.slots_gmem.shape[0]

    def write_one(i, _):
        number = first + i * step
        clamped_number = jnp.minimum(number, vectors_in_call - 1)
        x = vectors.load(c.kv.at[clamped_number]).astype(jnp.float32)
        slot = ctx.slots_gmem[clamped_number]
        entry_index = ctx.positions_gmem[clamped_number]
        exists = (number < vectors_in_call) & has_state(ctx, slot, entry_index)
        target = entry.find_target(ctx, jnp.where(exists, slot, 0), jnp.maximum(entry_index, 0) * c.rate + (c.rate - 1))
        target = dataclasses.replace(target, keep=target.keep & exists)
        entry.store_entry(ctx, target, entry.rotation(ctx, target), x, functools.partial(_across, ctx))

    lax.fori_loop(0, share, write_one, None)


def _workers(tokens, max_tokens, limit):
    """Returns (number of warpgroups, maximum number of tokens of a warpgroup).

    Args:
      tokens: number of tokens in the call.
      max_tokens: maximum number of tokens of a slot in the call.
      limit: maximum number of warpgroups, an odd number.
    """
    share = -(-tokens // limit)
    workers = -(-tokens // share)
    # In a request with many tokens, every `rate`-th token closes a window, and `rate` is a power of two. An odd number
    # of warpgroups has no factor in common with `rate`, so that all warpgroups get such tokens.
    if max_tokens > 1 and share > 1 and workers % 2 == 0:
        workers += 1
    return workers, share


def _run(ctx, first, step, share, with_states):
    """Finishes the windows that close at up to `share` tokens first, first + step, ...: stores entries or results.

    If `with_states` is set, also stores the state rows of these tokens.
    """
    tokens = ctx.slots_gmem.shape[0]
    store = with_states and row_writer(ctx, first, step, share, tokens)
    started = _start_scan(ctx, first, step, 0)
    if store:
        # The state rows are stored while the first window's rows are being copied. If there is only one state row,
        # `row_writer` loaded it before these copies were started.
        store()
    _store_windows(ctx, first, step, 0, share, *started)
    if share > SCAN:

        def run_scan(number, _):
            _store_windows(ctx, first, step, number, share, *_start_scan(ctx, first, step, number))

        lax.fori_loop(1, -(-share // SCAN), run_scan, None)


def _start_scan(ctx, first, step, number):
    """Examines 32 tokens and starts to copy the rows of the first window that one of them closes.

    Args:
      ctx: operands and buffers of the warpgroup.
      first, step: the warpgroup's tokens are first, first + step, ...
      number: index of the scan. Its 32 tokens are the warpgroup's tokens 32 * number to 32 * number + 31.

    Returns:
      (bits, rows_in_call), int32 scalars. Bit i of `bits` says whether token i of the scan closes a window.
      `rows_in_call` says how many rows of the first of these windows are in the call.
    """
    _, exists, _, position = scan(ctx, first, step, number * SCAN, ctx.slots_gmem.shape[0])
    bits = vectors.ballot(jnp.where(exists & is_last(ctx, position), 1, 0))
    token = first + (number * SCAN + vectors.lowest_bit(bits)) * step
    return bits, _start_window(ctx, token, bits, _start_biases)


@jax.named_scope("store_windows")
def _store_windows(ctx, first, step, number, share, bits, rows_in_call):
    """Stores an entry, or a pooled vector, for each window that the scan with index `number` found.

    `bits` and `rows_in_call` are the results of `_start_scan`. The other arguments are as in `_run`.
    """

    def store_one(carry):
        bits, rows_in_call = carry
        token = first + (number * SCAN + vectors.lowest_bit(bits)) * step
        finish = _start_finish(ctx, token)
        x = _pool_window(ctx, token, rows_in_call)
        bits &= bits - 1  # clears the bit of this window
        if share > 1:
            # The next copies overwrite the window's rows, so all threads of the warp must have read them.
            copies.sync_warp()
            token = first + (number * SCAN + vectors.lowest_bit(bits)) * step
            rows_in_call = _start_window(ctx, token, bits)
        finish(x)
        return bits, rows_in_call

    def is_left(carry):
        bits, _ = carry
        return bits != 0

    lax.while_loop(is_left, store_one, (bits, rows_in_call))


def _start_finish(ctx, token):
    """Returns a function that finishes and stores the pooled vector of the window that closes at `token`.

    The function's argument is the pooled vector. Whatever else it needs, such as the weights of the norm, is loaded
    from global memory here, while the window's rows are copied.
    """
    across = functools.partial(_across, ctx)
    if ctx.results_gmem is None:
        target = entry.find_target(ctx, ctx.slots_gmem[token], ctx.positions_gmem[token])
        return lambda x: entry.store_entry(ctx, target, entry.rotation(ctx, target), x, across)
    channel = vectors.channels(ctx.c.dim)
    norm = vectors.take(ctx.c.norm_weight, channel)
    row = token if ctx.result_rows_gmem is None else ctx.result_rows_gmem[token]

    def store(x):
        x = entry.rms_norm(ctx, norm, x, across)
        vectors.store_channels(ctx.results_gmem.at[row], x.astype(jnp.bfloat16), channel)

    return store


def _across(ctx, combine, x):
    """Reduces x over all slices of 64 channels of the entry; the values of x are equal within each slice."""
    return vectors.butterfly(combine, x, ctx.c.dim // 2, SLICE, ctx.scratch_smem)


def _pool_window(ctx, token, rows_in_call):
    """Waits for copies, and returns the pooled vector, [D] float32, of the window that closes at `token`."""
    c = ctx.c
    if c.gate is None:
        return vectors.load(c.kv.at[token])
    copies.commit_copies()
    copies.wait_copies(0)
    exists = ctx.positions_gmem[token] >= c.rate
    logits, peak = _take_logits(ctx, exists, rows_in_call)
    weights = entry.softmax_weights(logits, peak)
    values = [_where_exists(ctx, exists, j, 0, 0.0) for j in range(c.rows)]
    return entry.normalize(tree_sum(weights), entry.weighted_sum(weights, values))


def _start_window(ctx, token, bits, also=lambda ctx: None):
    """Starts to copy the rows of the window that closes at `token`. A window of a single token needs no copies.

    Args:
      ctx: operands and buffers of the warpgroup.
      token: int32 scalar, index of the token that closes the window.
      bits: int32 scalar; 0 if there is no window.
      also: function of `ctx` that starts further copies; called before the rows' copies start.

    Returns:
      The number of the window's rows that are in the call, an int32 scalar; 1 if there is no window.
    """
    if ctx.c.gate is None:
        return jnp.int32(1)

    def start():
        rows_in_call = entry.rows_in_call(ctx, token)
        also(ctx)
        _start_rows(ctx, token, rows_in_call)
        return rows_in_call

    return lax.cond(bits != 0, start, lambda: jnp.int32(1))


def _start_biases(ctx: FlushContext) -> None:
    """Starts to copy the position biases, if there are any, of those rows of a window that can be in the call.

    The biases are the same for every window. The logits in the ring already include their biases.
    """
    c = ctx.c
    if c.position_bias is None:
        return
    column_of = _first_column(ctx)

    def start_bias(row, _):
        column = column_of(row)
        target = ctx.biases_smem.at[pl.ds((row - ctx.first_in_call) * c.dim, c.dim)]
        copies.start_copy(target, c.position_bias, lax.rem(row, c.rate), column)

    lax.fori_loop(ctx.first_in_call, c.rows, start_bias, None)


@jax.named_scope("start_rows")
def _start_rows(ctx: FlushContext, token, rows_in_call) -> None:
    """Starts to copy the values and logits of a window's rows to `stage_smem`.

    The window closes at `token`. Its last `rows_in_call` rows are in the call, and its other rows in the ring.
    """
    c = ctx.c
    slot = ctx.slots_gmem[token]
    position = ctx.positions_gmem[token]
    ring = jnp.int32(c.ring)
    ring_begin = ctx.state_row(slot, position) - lax.rem(position, ring)
    oldest = lax.rem(position - (c.rows - 1) + ring, ring)  # index of the window's row 0 in the ring
    column_of = _first_column(ctx)

    def in_ring(row):
        ring_row = oldest + row
        return ring_begin + jnp.where(ring_row >= ring, ring_row - ring, ring_row)

    def start_row(row, _=None):
        column = column_of(row)
        # A negative index stands for a row of the ring, see `start_copy`.
        source = jnp.where(row >= c.rows - rows_in_call, token - (c.rows - 1) + row, -1 - in_ring(row))
        for i, (new, old) in enumerate([(c.kv, c.state_kv), (c.gate, c.state_gate)]):
            copies.start_copy(_staged(ctx, i, row), new, source, column, other=old)

    if ctx.max_in_call >= c.rows:
        # Each row may come from the call or from the ring. Without a loop, the addresses would take too many registers.
        lax.fori_loop(0, c.rows, start_row, None)
        return
    for j in range(c.rows):
        if j >= ctx.first_in_call:
            start_row(jnp.int32(j))
            continue
        # If the ring's length is a multiple of `rate`, each group of `rate` rows is contiguous in the ring. Then the
        # addresses of the group's rows are the address of its first row plus a constant, `below` rows.
        below = j % c.rate if c.ring % c.rate == 0 else 0
        row = jnp.int32(j - below)
        column = column_of(row)
        for i, array in enumerate((c.state_kv, c.state_gate)):
            copies.start_copy(_staged(ctx, i, j), array, in_ring(row), column, below=below)


def _take_logits(ctx: FlushContext, exists, rows_in_call) -> tuple[list[jax.Array], jax.Array]:
    """Returns (logits, peak): a list of the logits [D] of each row, with position biases, and their maximum [D].

    The copies of the window must have arrived in shared memory. Logits of rows that do not exist are -inf.
    """
    c = ctx.c

    def logit(j):
        x = _where_exists(ctx, exists, j, 1, -jnp.inf)
        if j < ctx.first_in_call or c.position_bias is None:
            return x
        bias = vectors.load(ctx.biases_smem.at[pl.ds((j - ctx.first_in_call) * c.dim, c.dim)])
        return x + jnp.where(jnp.broadcast_to(j >= c.rows - rows_in_call, x.shape), bias, 0.0)

    logits = [logit(j) for j in range(c.rows)]
    return logits, entry.max_logit(logits)


def _where_exists(ctx, exists, j, i, other):
    """Loads the values (i = 0) or the logits (i = 1) of row j of a window from `stage_smem`; `other` for a missing row.

    With overlap, the first `rate` rows of a request's first window do not exist. `exists` is False for this window and
    True for all other windows.
    """
    x = vectors.load(_staged(ctx, i, j))
    if not ctx.c.overlap or j >= ctx.c.rate:
        return x
    return jnp.where(jnp.broadcast_to(exists, x.shape), x, other)


def _first_column(ctx):
    """Returns a function that maps a row's index in its window to this thread's first column of kv, gate and states.

    With overlap, these arrays have 2 * D columns. The last `rate` rows of a window use the second D columns, see
    `CompressorOperands.kv`.
    """
    c = ctx.c
    thread = vectors.thread()
    per_thread = c.dim // vectors.THREADS
    second = c.rate if c.overlap else c.rows  # index of the first row that uses the second D columns
    return lambda row: thread * per_thread + jnp.where(row >= second, c.dim, 0)


def _staged(ctx, i, j):
    c = ctx.c
    return ctx.stage_smem.at[pl.ds((i * c.rows + j) * c.dim, c.dim)]
