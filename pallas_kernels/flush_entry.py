"""One entry: the rows of a window to shared memory, pooled, normed, rotated, quantised and stored.

A warpgroup holds all channels of an entry, or a cluster of blocks one slice of 64 channels each. Then the rows are
split over all warps of a block, what they find is merged through shared memory, after which every warp holds the same
slice; the sums over all channels go through the shared memory of all blocks of the cluster.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels import copies, lanes
from pallas_kernels.compressor import Compressor
from pallas_kernels.encode import encode_index, encode_row
from pallas_kernels.exact import (
    LOWEST,
    PARTS,
    SLICE,
    cos_sin,
    exp_negative,
    inverse_sqrt,
    reciprocal,
    round_bfloat16,
    tree_sum,
)


WARPS = lanes.THREADS // copies.WARP


@dataclasses.dataclass(frozen=True)
class Site:
    """What a warpgroup works on and with: the compressor's operands as references, and shared memory.

    Attributes:
      c: the compressor.
      warpgroup: of the block.
      part: which slice of the channels is the block's.
      most_in_call: rows of a window that can be in the call; the others are in the ring.
      kv, gate, bias: [.., width].
      state_kv, state_gate: [layers * slots * ring, width].
      stage: [2 * warp_rows * vector], this warpgroup's rows of a window: values, then logits.
      biases: [rows that can be in the call * vector], this warpgroup's.
      scratch: [512], this warpgroup's, for exchanges.
      sums: [3 * PARTS * 64], the block's.
      inbox: what `share` needs, room for 4 uses.
      cluster, block: interpreted, barriers of all warpgroups of the cluster and of the block.
    """

    c: Compressor
    interpret: bool
    warpgroup: Any
    part: Any
    most_in_call: int
    slots: Any
    positions: Any
    kv: Any
    gate: Any
    bias: Any
    norm: Any
    inv_freq: Any
    table: Any
    state_layer: Any
    pool_layer: Any
    state_kv: Any
    state_gate: Any
    pools: Any
    stage: Any = None
    biases: Any = None
    scratch: Any = None
    sums: Any = None
    inbox: Any = None
    cluster: Any = None
    block: Any = None

    def state_row(self, slot, position):
        """Row of the states."""
        _, num_slots, ring, _ = self.c.state_kv.shape
        return (self.state_layer[0] * num_slots + slot) * ring + lax.rem(position, jnp.int32(ring))


def in_call(site: Site, token) -> Any:
    """How many rows of the window that closes at `token` are in the call."""
    most = min(site.most_in_call, site.c.rows)
    if most == 1:
        return jnp.int32(1)
    back = copies.thread(interpret=site.interpret)
    slots = lanes.take(site.slots, token - back, interpret=site.interpret)
    # Tokens of one slot stand together.
    is_row = (slots == site.slots[token]) & (back <= token) & (back < most)
    return copies.count(jnp.where(is_row, 1, 0), interpret=site.interpret)


def fetch_biases(site: Site) -> None:
    """Starts to copy the position biases of the rows that can be in the call: the same for every window."""
    c = site.c
    place, first = _place(site), _may_be_in_call(site).start

    def one(j, _):
        row, column = place(j)
        target = site.biases.at[pl.ds((j - first) * c.vector, c.vector)]
        copies.start_copy(target, site.bias, lax.rem(row, jnp.int32(c.rate)), column, interpret=site.interpret)

    lax.fori_loop(first, c.warp_rows, one, None)


def fetch(site: Site, token, rows_in_call) -> None:
    """Starts to copy the rows of the window that closes at `token`."""
    c = site.c
    slot, position = site.slots[token], site.positions[token]
    ring = jnp.int32(c.state_kv.shape[2])
    last = site.state_row(slot, position)
    first_of_ring = last - lax.rem(position, ring)
    oldest = lax.rem(position - (c.rows - 1) + ring, ring)
    place = _place(site)

    def in_ring(row):
        at = oldest + row
        return first_of_ring + jnp.where(at >= ring, at - ring, at)

    def either(j, _=None):
        row, column = place(j)
        number = jnp.where(row >= c.rows - rows_in_call, token - (c.rows - 1) + row, -1 - in_ring(row))
        for i, arrays in enumerate([(site.kv, site.state_kv), (site.gate, site.state_gate)]):
            copies.start_copy_either(_staged(site, i, j), *arrays, number, column, interpret=site.interpret)

    if site.most_in_call >= c.warp_rows:
        # Two addresses a row: a loop, or they take too many registers.
        lax.fori_loop(0, c.warp_rows, either, None)
        return
    for j in range(c.warp_rows):
        if j in _may_be_in_call(site):
            either(jnp.int32(j))
            continue
        # The rows of one window lie together where the ring has room for whole ones: one address, and offsets.
        below = j % c.rate if c.state_kv.shape[2] % c.rate == 0 else 0
        row, column = place(jnp.int32(j - below))
        for i, array in enumerate((site.state_kv, site.state_gate)):
            copies.start_copy(_staged(site, i, j), array, in_ring(row), column, below=below, interpret=site.interpret)


@dataclasses.dataclass(frozen=True)
class Target:
    """Where an entry goes, and what it takes to finish it.

    Attributes:
      row: references to the bytes of the entry in each pool.
      keep: whether to store it.
      position: of the window's first token.
      norm, frequency: [vector] of its channels; arbitrary frequencies of channels that are not rotated.
    """

    row: Any
    keep: Any
    position: Any
    norm: jax.Array
    frequency: jax.Array


def find_target(site: Site, token) -> Target:
    """Reads what the entry of the window that closes at `token` needs beside its rows."""
    c, interpret = site.c, site.interpret
    slot, position = site.slots[token], site.positions[token]
    per_block = jnp.int32(c.pools[0].shape[2])
    entry = lax.div(position, jnp.int32(c.rate))
    logical = lax.div(entry, per_block)
    block = site.table[slot, jnp.minimum(logical, site.table.shape[1] - 1)]
    keep = (logical < site.table.shape[1]) & (block >= 0)
    row = [pool.at[site.pool_layer[0], jnp.maximum(block, 0), lax.rem(entry, per_block)] for pool in site.pools]
    channel = _channels(site)
    norm = lanes.take(site.norm, channel, interpret=interpret)
    rotated = channel - (c.dim - 2 * c.inv_freq.shape[0])
    frequency = lanes.take(site.inv_freq, rotated >> 1, interpret=interpret)
    return Target(row, keep, position - (c.rate - 1), norm, frequency)


def take_values(site: Site, token) -> list[jax.Array]:
    """A warp's rows of values, which must be there."""
    return [_where_exists(site, token, j, 0, 0.0) for j in range(site.c.warp_rows)]


def take_logits(site: Site, token, rows_in_call) -> tuple[list[jax.Array], jax.Array]:
    """(logits, the largest of them) of a warp's rows, which must be there."""
    c = site.c

    def add_bias(j, _):
        row = j
        if c.slices > 1:
            warp = site.warpgroup * WARPS + lax.div(lanes.channels(c.vector), jnp.int32(SLICE))
            row = warp * c.warp_rows + j
        is_new = jnp.broadcast_to(row >= c.rows - rows_in_call, (c.vector,))
        bias = lanes.load(site.biases.at[pl.ds((j - first) * c.vector, c.vector)])
        _staged(site, 1, j)[...] = lanes.load(_staged(site, 1, j)) + jnp.where(is_new, bias, 0.0)

    # A loop of its own: few registers.
    first = _may_be_in_call(site).start
    lax.fori_loop(first, c.warp_rows, add_bias, None)
    rows = range(c.warp_rows)
    logits = [_where_exists(site, token, j, 1, -jnp.inf) for j in rows]
    return logits, _peak(logits)


def _where_exists(site, token, j, i, other):
    """Row j, or `other` where there is none: the first window of a request has no window before it."""
    x = lanes.load(_staged(site, i, j))
    if not site.c.overlap or j >= site.c.rate:
        return x
    return jnp.where(jnp.broadcast_to(site.positions[token] >= site.c.rate, x.shape), x, other)


def finish(site: Site, target: Target, count, values: Callable, logits, peak) -> None:
    """Pools the rows, of which `values` gives the values, and stores the entry, this worker's number `count`."""
    c = site.c
    weights = _factors(site, logits, peak)
    weight, total = tree_sum(weights), _weighted(site, weights, values())
    if c.slices == 1:
        _store(site, target, count, total * reciprocal(weight, _product(site)))
        return
    _hand_over(site, peak, weight, total)

    @pl.when(site.warpgroup == 0)
    def _():
        weight, total = _merge(site)
        _store(site, target, count, total * reciprocal(weight, _product(site)))

    @pl.when(site.warpgroup != 0)
    def _():
        for _ in range(1 if site.pools[2].dtype == jnp.uint8 else 2):
            copies.attend_share(site.cluster, interpret=site.interpret)


def _store(site, target, count, x):
    """Norms, rotates, quantises and stores the pooled entry."""
    c, interpret, uses = site.c, site.interpret, iter(range(2))

    def over_channels(combine, x):
        x = lanes.butterfly(combine, x, SLICE // 2, 1, site.scratch, interpret=interpret)
        if c.slices == 1:
            return lanes.butterfly(combine, x, c.dim // 2, SLICE, site.scratch, interpret=interpret)
        inbox = site.inbox.at[pl.ds((lax.rem(count, jnp.int32(2)) * 2 + next(uses)) * c.slices, c.slices)]
        found = copies.share(x, inbox, c.slices, site.cluster, interpret=interpret)
        return tree_sum(found) if combine is jnp.add else functools.reduce(combine, found)

    x = _norm_and_rotate(site, target, x, over_channels)
    if len(site.pools) == 3:
        largest, part = functools.partial(over_channels, jnp.maximum), None if c.slices == 1 else site.part
        encode_row(x, target.row, largest, part, target.keep, site.scratch, interpret=interpret)
    else:
        encode = functools.partial(encode_index, x, target.row, c.index_scale, site.scratch, interpret=interpret)
        pl.when(target.keep)(encode)


def _place(site):
    """A function of j: (row of the window, column in the arrays) of a warp's row j."""
    c, thread = site.c, copies.thread(interpret=site.interpret)
    held = c.vector // lanes.THREADS
    if c.slices > 1:
        warp = site.warpgroup * WARPS + lax.div(thread, jnp.int32(copies.WARP))
        column = site.part * SLICE + (thread & (copies.WARP - 1)) * held
        return lambda j: (warp * c.warp_rows + j, column)
    second = c.rate if c.overlap else c.rows
    return lambda j: (j, thread * held + jnp.where(j >= second, c.dim, 0))


def _channels(site):
    channel = lanes.channels(site.c.vector)
    return channel if site.c.slices == 1 else (channel & (SLICE - 1)) + site.part * SLICE


def _may_be_in_call(site):
    """Rows j of some warp that can be; the others are always in the ring."""
    return range(max(site.c.warp_rows - site.most_in_call, 0), site.c.warp_rows)


def _staged(site, i, j):
    c = site.c
    return site.stage.at[pl.ds((i * c.warp_rows + j) * c.vector, c.vector)]


def _product(site):
    return functools.partial(lanes.product, interpret=site.interpret)


def _peak(logits):
    # Where no row exists all are -inf: infinity minus infinity must not happen.
    return jnp.maximum(functools.reduce(jnp.maximum, logits), LOWEST)


def _factors(site, logits, peak):
    return [exp_negative(logit - peak, _product(site)) for logit in logits]


def _weighted(site, factors, sums):
    return tree_sum([_product(site)(f, s) for f, s in zip(factors, sums, strict=True)])


def _hand_over(site, *pooled):
    """To `_merge`: (largest logit, sum of weights, weighted sum) of every warp of the block."""
    size = site.c.vector
    for i, value in enumerate(pooled):
        site.sums[pl.ds(i * PARTS * SLICE + site.warpgroup * size, size)] = value
    copies.meet(site.block, interpret=site.interpret)


def _merge(site):
    """(sum of weights, weighted sum) over all rows."""
    peaks, weights, totals = (
        [
            lanes.load_repeated(
                site.sums.at[pl.ds((i * PARTS + p) * SLICE, SLICE)], site.c.vector, interpret=site.interpret
            )
            for p in range(PARTS)
        ]
        for i in range(3)
    )
    factors = _factors(site, peaks, _peak(peaks))
    return _weighted(site, factors, weights), _weighted(site, factors, totals)


def _norm_and_rotate(site, target, x, over_channels):
    """Rounding, RMS norm and RoPE."""
    c, product = site.c, _product(site)
    channel = _channels(site)
    x = round_bfloat16(x)
    mean_square = product(over_channels(jnp.add, product(x, x)), 1 / c.dim)
    x = round_bfloat16(target.norm * (x * inverse_sqrt(mean_square + c.eps, product)))
    other = lanes.exchange(x, 1, site.scratch, interpret=site.interpret)
    cos, sin = cos_sin(target.frequency * target.position.astype(jnp.float32))
    turned = product(x, cos) + product(other, jnp.where((channel & 1) == 0, -sin, sin))
    return jnp.where(channel < c.dim - 2 * c.inv_freq.shape[0], x, round_bfloat16(turned))
