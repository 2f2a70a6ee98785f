"""Compression: state rows in, and for every window that closes one quantised entry out.

A worker is a warpgroup, or for windows of more than 16 rows a cluster of blocks, one for each 64 channels. It takes
every n-th token of the call: it stores their state rows, and for each that closes a window it copies the window's rows
to shared memory, from this call's projections or from the ring, and makes an entry of them (`flush_entry`). The rows of
the next window are on their way while one is finished.

Where requests bring few tokens, reads and writes of the rings need no order: no row is read that a token of the call
overwrites. Where they may bring more, entries and states take one launch each.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import copies, lanes
from pallas_kernels.compressor import Compressor
from pallas_kernels.exact import PARTS, SLICE
from pallas_kernels.flush_entry import Site, fetch, fetch_biases, find_target, finish, in_call, take_logits, take_values
from pallas_kernels.support import interpret_params, traced_once


# Warpgroups of a block: a window that is split over its warps has a part for each.
WARPGROUPS = 2
# Workers that an H100 holds at once: warpgroups, and clusters of 8 blocks.
AT_ONCE = 513
CLUSTERS_AT_ONCE = 31
# Tokens that a worker looks at at once: a lane, and a bit, each.
LOOKS = copies.WARP


@traced_once("max_query_tokens")
def flush(
    compressors: tuple[Compressor, ...],
    slots: jax.Array,
    positions: jax.Array,
    *,
    max_query_tokens: int | None = None,
    interpret: bool = False,
) -> list[tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]]:
    """Feeds tokens to compressors and stores the entries of the windows they close, states and pools in place.

    Args:
      compressors: one, or several whose windows have at most 16 rows, in one launch.
      slots: [T] int32, -1 = padding. Tokens of one slot stand together and in order.
      positions: [T] int32, -1 = padding; those of one slot are consecutive.
      max_query_tokens: a slot brings at most so many tokens; None = any number. With few, a ring's rows above those of
        a window and one, a call is one launch instead of two.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (state_kv, state_gate, pools), updated, of each compressor.

    Raises:
      NotImplementedError: a shape or dtype is not one that `Compressor` describes.
    """
    for c in compressors:
        c.check()
    if len(compressors) > 1 and max(c.slices for c in compressors) > 1:
        raise NotImplementedError("the flush kernel takes windows of more than 16 rows of one compressor only")
    tokens = slots.shape[0]
    if tokens == 0:
        return [(c.state_kv, c.state_gate, c.pools) for c in compressors]
    most = tokens if max_query_tokens is None else max_query_tokens
    refs = [[jax.new_ref(array) for array in _written(c)] for c in compressors]
    if all(most <= c.state_kv.shape[2] - c.rows + 1 for c in compressors):
        _launch(compressors, refs, slots, positions, most, True, True, interpret)
    else:
        _launch(compressors, refs, slots, positions, most, True, False, interpret)
        _launch(compressors, refs, slots, positions, most, False, True, interpret)
    results = ([jax.freeze(ref) for ref in group] for group in refs)
    return [
        (kv.reshape(c.state_kv.shape), gate.reshape(c.state_gate.shape), tuple(pools))
        for c, (kv, gate, *pools) in zip(compressors, results, strict=True)
    ]


def _launch(compressors, refs, slots, positions, most, entries, states, interpret):
    slices, tokens = max(c.slices for c in compressors), slots.shape[0]
    split = slices > 1
    workers, share = _workers(tokens, CLUSTERS_AT_ONCE if split else AT_ONCE, most)
    operands = [_inputs(c) for c in compressors]
    scratch: dict[str, Any] = {}
    if entries:
        stage = max(2 * c.warp_rows * c.vector for c in compressors)
        scratch |= dict(stage=plgpu.SMEM((WARPGROUPS * stage,), jnp.float32))
        biases = max(min(c.warp_rows, most) * c.vector for c in compressors)
        scratch |= dict(biases=plgpu.SMEM((WARPGROUPS * biases,), jnp.float32))
        scratch |= dict(scratch=plgpu.SMEM((WARPGROUPS * compressors[0].vector,), jnp.float32))
    out: Any = ()
    if entries and split:
        scratch |= dict(sums=plgpu.SMEM((3 * PARTS * SLICE,), jnp.float32))
        if interpret:
            # Interpreted blocks meet in global memory.
            out = jax.ShapeDtypeStruct((workers, 4 * slices), jnp.float32)
            scratch |= dict(cluster=plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=WARPGROUPS))
            scratch |= dict(block=plgpu.Barrier(num_arrivals=WARPGROUPS))
        else:
            scratch |= dict(inbox=plgpu.SMEM((4 * slices,), jnp.float32))

    def body(slots, positions, *refs, **scratch):
        refs = list(refs)
        inputs = [[refs.pop(0) for _ in group] for group in operands]
        written = [[refs.pop(0) for _ in range(2 + len(c.pools))] for c in compressors]
        warpgroup, worker = lax.axis_index("warpgroup"), lax.axis_index("worker")
        for name in ("stage", "biases", "scratch"):
            if name in scratch:
                size = scratch[name].shape[0] // WARPGROUPS
                scratch[name] = scratch[name].at[pl.ds(warpgroup * size, size)]
        if refs:
            scratch["inbox"] = refs.pop().at[worker]
        for j, (c, ins, (state_kv, state_gate, *pools)) in enumerate(zip(compressors, inputs, written, strict=True)):
            site = Site(
                c, interpret, warpgroup, lax.axis_index("part"), most, slots, positions, *ins,
                state_kv=state_kv, state_gate=state_gate, pools=pools, **scratch,
            )  # fmt: skip
            first = worker if split else worker * WARPGROUPS + warpgroup
            # A warpgroup too many: there are no such tokens.
            first = jnp.where(first < workers, first, tokens)
            work = functools.partial(_work, site, first, workers, share, entries, states)
            pl.when(lax.axis_index("compressor") == j)(work)

    run = plgpu.kernel(
        body,
        out_type=out,
        kernel_name="flush",
        # The last axis runs fastest: the first compressor's blocks, which should be the longest, start first.
        grid=(len(compressors), workers if split else -(-workers // WARPGROUPS)),
        grid_names=("compressor", "worker"),
        cluster=(slices,),
        cluster_names=("part",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Threads meet where they have to (`copies`, `lanes`); what else a warpgroup reads back a thread wrote itself.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        interpret=interpret_params(interpret),
    )
    run(slots, positions, *(x for group in operands for x in group), *(ref for group in refs for ref in group))


def _workers(tokens, at_once, most):
    """(workers, tokens of each)."""
    share = -(-tokens // at_once)
    workers = -(-tokens // share)
    # Every 4th or 128th token of a long run closes a window: an odd step leads to them from every worker.
    return workers + (most > 1 and share > 1 and workers % 2 == 0), share


def _inputs(c):
    layers = c.state_layer.reshape(1), c.pool_layer.reshape(1)
    return [c.kv, c.gate, c.position_bias, c.norm_weight, c.inv_freq, c.block_table, *layers]


def _written(c):
    width = c.state_kv.shape[-1]
    return [c.state_kv.reshape(-1, width), c.state_gate.reshape(-1, width), *c.pools]


def _work(site, first, step, share, entries, states):
    """This warpgroup's part of the work on tokens first, first + step, ..."""
    c = site.c
    writers = c.slices * WARPGROUPS if c.slices > 1 else 1
    writer = site.part * WARPGROUPS + site.warpgroup if c.slices > 1 else jnp.int32(0)
    store = None
    if states and share <= writers:
        store = _state_row(site, first + writer * step, writer < share)
    begin, go_on = (functools.partial(f, site, first, step, share) for f in (_begin, _entries))
    found = begin(0) if entries else None
    if store is not None:
        # What it waits for was read before the rows of the window, and is written after they are on their way.
        store()
    elif states:

        def store_one(i, _):
            _state_row(site, first + (writer + i * writers) * step, writer + i * writers < share)()

        lax.fori_loop(0, -(-share // writers), store_one, None)
    if found is not None:
        count = go_on(0, jnp.int32(0), *found)
        if share > LOOKS:
            lax.fori_loop(1, -(-share // LOOKS), lambda look, count: go_on(look, count, *begin(look)), count)


def _begin(site, first, step, share, look):
    """(closing, rows in the call of the first): bit i of closing: token `look * LOOKS + i` closes a window."""
    tokens, num_slots = site.slots.shape[0], site.c.state_kv.shape[1]
    number = (copies.thread(interpret=site.interpret) & (LOOKS - 1)) + look * LOOKS
    token = first + number * step
    exists = (number < share) & (token < tokens)
    at = jnp.where(exists, token, -1)
    slot, position = (lanes.take(x, at, interpret=site.interpret) for x in (site.slots, site.positions))
    closes = exists & (slot >= 0) & (slot < num_slots) & (position >= 0)
    closes &= lax.rem(position, jnp.int32(site.c.rate)) == site.c.rate - 1
    closing = copies.bits(jnp.where(closes, 1, 0), interpret=site.interpret)
    token = first + (look * LOOKS + _lowest(closing)) * step
    return closing, _fetch_next(site, token, closing, fetch_biases)


def _entries(site, first, step, share, look, count, closing, rows_in_call):
    """Stores the entries of the windows that `_begin` found; the number of entries so far."""
    if site.c.slices > 1:
        pl.when(closing != 0)(functools.partial(copies.enter_cluster, interpret=site.interpret))

    # Copies start as soon as the rows are in registers. Where most rows are new, and a window is most of a cluster's
    # work, two blocks on a multiprocessor are worth more: the values stay where they are until they are needed.
    early = site.c.slices == 1 or site.most_in_call < site.c.warp_rows

    def one(carry):
        closing, count, rows_in_call = carry
        token = first + (look * LOOKS + _lowest(closing)) * step
        target = find_target(site, token)
        copies.wait_copies(interpret=site.interpret)
        held = take_values(site, token) if early else None
        logits = take_logits(site, token, rows_in_call)

        def values():
            if held is not None:
                return held
            copies.pause(interpret=site.interpret)
            return take_values(site, token)

        closing &= closing - 1
        following = first + (look * LOOKS + _lowest(closing)) * step
        if early and share > 1:
            # No copy may begin before the row whose place it takes was read.
            copies.pause(interpret=site.interpret)
            rows_in_call = _fetch_next(site, following, closing)
        finish(site, target, count, values, *logits)
        if not early and share > 1:
            rows_in_call = _fetch_next(site, following, closing)
        return closing, count + 1, rows_in_call

    return lax.while_loop(lambda carry: carry[0] != 0, one, (closing, count, rows_in_call))[1]


def _fetch_next(site, token, closing, also=lambda site: None):
    """Starts to copy the rows of the next window, if any; how many of them are in the call."""

    def start():
        rows_in_call = in_call(site, token)
        also(site)
        fetch(site, token, rows_in_call)
        return rows_in_call

    return lax.cond(closing != 0, start, lambda: jnp.int32(1))


def _lowest(bits):
    """Number of the lowest bit set."""
    return 31 - lax.clz(bits & -bits)


def _at(site, token):
    """(slot, position) of a token, slot -1 if there is none."""
    tokens = site.slots.shape[0]
    safe = jnp.minimum(token, tokens - 1)
    slot = site.slots[safe]
    exists = (token < tokens) & (slot < site.c.state_kv.shape[1])
    return jnp.where(exists, slot, -1), site.positions[safe]


def _state_row(site, token, mine):
    """Reads the token's row; the result stores it in the ring."""
    c = site.c
    tokens, ring = site.slots.shape[0], c.state_kv.shape[2]
    slot, position = _at(site, token)
    safe, later = jnp.minimum(token, tokens - 1), jnp.minimum(token + ring, tokens - 1)
    mine &= (slot >= 0) & (position >= 0)
    if site.most_in_call > ring:
        # A token that its own request overwrites in this call.
        mine &= (token + ring >= tokens) | (site.slots[later] != slot)
    halves = [pl.ds(half * c.dim, c.dim) for half in range(1 + c.overlap)]
    values = [(lanes.load(site.kv.at[safe, half]), lanes.load(site.gate.at[safe, half])) for half in halves]

    def store():
        @pl.when(mine)
        def _():
            row, phase = site.state_row(slot, position), lax.rem(position, jnp.int32(c.rate))
            for half, (value, logit) in zip(halves, values, strict=True):
                site.state_kv[row, half] = value
                site.state_gate[row, half] = logit + lanes.load(site.bias.at[phase, half])

    return store
