"""The kernel that stores state rows, and parts that all flush kernels share.

The main functions are:

  * `scan` loads the slots and positions of 32 tokens and finds the tokens that have state rows.
  * `row_writer` stores state rows from within a kernel that stores entries.
  * `run_workers` launches a kernel of independent warpgroups.
  * `store_state_rows` launches a separate kernel that stores all state rows of a call.

A token's state row is its kv, and its gate plus position bias, as the ring of its slot stores them. A token has a state
row unless it is padding. Of n independent warpgroups, each takes every n-th token.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.flush.entry import FlushContext
from pallas_kernels.flush.operands import FlushCall
from pallas_kernels.mgpu import vectors
from pallas_kernels.mgpu.mlir import WARP
from pallas_kernels.runtime.launch import kernel


WARPGROUPS = 2  # number of warpgroups in a block
SCAN = WARP  # number of tokens that a warp examines at once, one per lane


def scan(ctx: FlushContext, first, step: int, number, end) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Loads slots and positions of 32 of the tokens first, first + step, ... < end.

    Args:
      ctx: operands and buffers of the warpgroup.
      first: int32 scalar, index of the first token.
      step: distance between tokens.
      number: int32 scalar, number of tokens to skip: token i of the scan, i = 0 .. 31, has the index
        `first + (number + i) * step`.
      end: int32 scalar, end of the tokens' indices.

    Returns:
      Four arrays [128], in which lane i of every warp holds the value for token i of the scan:

      token: int32 index of the token.
      exists: bool, whether this index is below `end` and the token has a state row.
      slot: int32 request slot of the token; 0 from `end` on.
      position: int32 position of the token; 0 from `end` on.
    """
    token = first + (number + (vectors.thread() & (SCAN - 1))) * step
    clipped = jnp.where(token < end, token, -1)
    slot = vectors.take(ctx.slots_gmem, clipped)
    position = vectors.take(ctx.positions_gmem, clipped)
    return token, (clipped >= 0) & has_state(ctx, slot, position), slot, position


def has_state(ctx: FlushContext, slot, position) -> jax.Array:
    """Returns whether a token has a state row: its slot exists, and neither slot nor position is negative (padding)."""
    return (slot >= 0) & (slot < ctx.c.num_slots) & (position >= 0)


def is_last(ctx: FlushContext, position) -> jax.Array:
    """Returns whether a window closes at a position."""
    return lax.rem(position, ctx.c.rate) == ctx.c.rate - 1


def row_writer(ctx: FlushContext, first, step: int, count: int, end) -> Callable[[], None]:
    """Returns a function that stores the state rows of tokens first, first + step, ... < end.

    `count` is the maximum number of these tokens. If `count` is 1, the token's row is already loaded by `row_writer`,
    so that the load overlaps with work before the call of the returned function.
    """
    if count == 1:
        return _read_row(ctx, first, end)

    def store(i, _):
        _read_row(ctx, first + i * step, end)()

    return lambda: lax.fori_loop(0, count, store, None)


def store_state_rows(call: FlushCall) -> None:
    """Launches the kernel that stores the state rows of all tokens of a call."""
    tokens = call.slots.shape[0]
    workers = min(tokens, call.config.state_workers)
    work = functools.partial(_store_rows, step=workers, share=-(-tokens // workers))
    run_workers("flush_states", work, workers, call)


def run_workers(
    name: str, work: Callable, workers: int, call: FlushCall, sizes: Callable = lambda c: {}
) -> list[jax.Array]:
    """Launches a kernel of independent warpgroups for each compressor. The grid is (compressor, block).

    Args:
      name: name of the kernel.
      work: function (FlushContext, index of the warpgroup's first token) that each warpgroup runs. Warpgroup i begins
        with token i. If `workers` is odd, the last block has one warpgroup too many, which begins past the last token.
      workers: number of warpgroups that work for each compressor.
      call: arguments of the flush.
      sizes: function of a compressor that returns a warpgroup's buffers in shared memory, as {name of a field of
        `FlushContext`: number of float32 values}.

    Returns:
      A list of the array that `call.results` describes; an empty list if `call.results` is None.
    """
    tokens = call.slots.shape[0]
    strides = {buffer: max(sizes(c)[buffer] for c in call.compressors) for buffer in sizes(call.compressors[0])}

    def run_compressors(slots_gmem, positions_gmem, layer_gmem, compressors, result_rows_gmem, *results, **smem):
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("block") * WARPGROUPS + warpgroup
        first_token = jnp.where(worker < workers, worker, tokens)
        for j, c in enumerate(compressors):
            buffers = {buffer: smem[buffer].at[pl.ds(warpgroup * strides[buffer], n)] for buffer, n in sizes(c).items()}
            ctx = FlushContext(
                c.of_layer(layer_gmem),
                slots_gmem,
                positions_gmem,
                call.max_tokens,
                results_gmem=results[0] if results else None,
                result_rows_gmem=result_rows_gmem,
                **buffers,
            )
            pl.when(lax.axis_index("compressor") == j)(functools.partial(work, ctx, first_token))

    launch = kernel(
        run_compressors,
        out_type=[] if call.results is None else [call.results],
        kernel_name=name,
        # Blocks start in the order of their indices, and the index on the last axis changes fastest. So the blocks of
        # the first compressor, which takes longest, start first.
        grid={"compressor": len(call.compressors), "block": -(-workers // WARPGROUPS)},
        num_threads=WARPGROUPS,
        scratch_types={buffer: plgpu.SMEM((WARPGROUPS * size,), jnp.float32) for buffer, size in strides.items()},
        # Turns off Pallas's automatic barriers, which are not needed: the primitives by which threads exchange data
        # synchronize the threads. Apart from that, a thread reads only shared memory that it has written itself.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=call.interpret,
    )
    return launch(call.slots, call.positions, call.layer, call.compressors, call.result_rows)


def _store_rows(ctx, first, step, share):
    tokens = ctx.slots_gmem.shape[0]
    ring = ctx.c.ring

    def store_rows(number, _):
        token, is_stored, slot, _ = scan(ctx, first, step, number * SCAN, tokens)
        if ctx.max_in_call > ring:
            # Skips a token if a later token of the call is stored in the same row of the ring.
            later_slot = vectors.take(ctx.slots_gmem, jnp.where(token + ring < tokens, token + ring, -1))
            is_stored &= (token + ring >= tokens) | (later_slot != slot)

        def store(bits):
            _read_row(ctx, first + (number * SCAN + vectors.lowest_bit(bits)) * step, tokens)()
            return bits & (bits - 1)

        bits = vectors.ballot(jnp.where(is_stored, 1, 0))
        lax.while_loop(lambda bits: bits != 0, store, bits)

    lax.fori_loop(0, -(-share // SCAN), store_rows, None)


def _read_row(ctx, token, end):
    """Loads a token's kv, gate and position bias, and returns a function that stores the token's state row."""
    c = ctx.c
    tokens = ctx.slots_gmem.shape[0]
    ring = c.ring
    clamped_token = jnp.minimum(token, tokens - 1)
    later_token = jnp.minimum(token + ring, tokens - 1)
    slot = ctx.slots_gmem[clamped_token]
    position = ctx.positions_gmem[clamped_token]
    is_stored = (token < end) & has_state(ctx, slot, position)
    if ctx.max_in_call > ring:
        # Skips a token if a later token of the call is stored in the same row of the ring.
        is_stored &= (token + ring >= tokens) | (ctx.slots_gmem[later_token] != slot)
    phase = lax.rem(jnp.maximum(position, 0), c.rate)
    halves = [pl.ds(half * c.dim, c.dim) for half in range(1 + c.overlap)]
    rows = [(c.kv, clamped_token), (c.gate, clamped_token)]
    if c.position_bias is not None:
        rows.append((c.position_bias, phase))
    values = [[vectors.load(array.at[row, half]) for array, row in rows] for half in halves]

    @jax.named_scope("store_row")
    def store():
        row = ctx.state_row(slot, position)
        for half, (value, *logit_and_bias) in zip(halves, values, strict=True):
            c.state_kv[row, half] = value
            c.state_gate[row, half] = functools.reduce(jnp.add, logit_and_bias)

    return lambda: pl.when(is_stored)(store)
