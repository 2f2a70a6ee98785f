"""Moving a request's bytes: into another slot, out of the cache and back. Jitted functions of fixed shapes.

A byte that a later step can still read is live. Of a request of `length` tokens that may be rewound to `min_length`,
these are the entries up to `length`, the window rows from `min_length` - window on, where there are drafts the residual
streams from `min_length` - 1 on, and the compressor rows of the windows that are open at `min_length`; where entries
overlap also, in the channels that the next window pools, of the one before (dsv4.md 3.2). What is not live is read as
zeros: nothing of an earlier owner leaves the cache.

On a mesh slots and blocks are numbered through over its parts. What is read comes to all devices; each writes what is
its own.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dsv4_jax.cache.pools import KVCache, PoolGroup
from dsv4_jax.parallel.local_ids import all_reduce_bits, to_local_ids
from dsv4_jax.parallel.sharded_step import sharded_read, sharded_update
from dsv4_jax.quant import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RequestRows:
    """What a request keeps in its slot, rows in the order of their positions, the newest last.

    Attributes:
      swa: Rows [rings, n, ...].
      streams: [1, n, width], or None.
      groups: PoolGroup by name of which only the states are there: CompressorState [layers, n, width].
    """

    swa: Rows
    streams: Any
    groups: dict[str, PoolGroup]


@functools.partial(jax.jit, static_argnames="boundary")
@sharded_read
def read_request(
    cache: KVCache, slot: Int[Array, ""], length: Int[Array, ""], min_length: Int[Array, ""], *, boundary: bool = False
) -> RequestRows:
    """The live rows of a slot; the cache is only read.

    Args:
      cache: the cache.
      slot: scalar.
      length: scalar, tokens up to which to read.
      min_length: scalar, the shortest length the request may be rewound to.
      boundary: `length` = `min_length` is a multiple of every compression rate: only the rows that are live then, which
        are the last window's, the last streams and, of entries that overlap, the first half of the channels of the last
        `compress_rate` rows (static).

    Returns:
      RequestRows of as many rows as the rings have, zeros where not live, or of the boundary's few.
    """
    schema, slot = cache.schema, _own_slots(cache, slot)
    window = schema.config.sliding_window
    rows, _ = _newest(cache.swa, slot, length, window if boundary else schema.swa_ring, min_length - window)
    count = 1 if boundary else schema.max_query_tokens
    streams, _ = _newest(cache.streams, slot, length, count, min_length - 1)
    groups = {}
    for name, spec in schema.groups.items():
        rate, overlap = spec.compress_rate, spec.overlap
        opened = min_length // rate * rate
        groups[name] = PoolGroup()
        if boundary and not overlap:
            continue
        count = rate if boundary else schema.state_ring(name)
        states, positions = _newest(cache.groups[name].by_slot, slot, length, count, opened - rate * overlap)
        if boundary:
            states = jax.tree.map(lambda x: x[..., : x.shape[-1] // 2], states)
        elif overlap:
            # Of the window before the open one only these channels are pooled again.
            states = jax.tree.map(functools.partial(_pooled_again, is_open=positions >= opened), states)
        groups[name] = states
    return all_reduce_bits(RequestRows(rows, streams, groups), "slots")


def _pooled_again(x, *, is_open):
    first_half = jnp.arange(x.shape[-1], dtype=jnp.int32) < x.shape[-1] // 2
    return jnp.where((first_half[None, :] | is_open[:, None])[None], x, 0)


@functools.partial(jax.jit, donate_argnames="cache")
@sharded_update
def write_request(
    cache: KVCache,
    slot: Int[Array, ""],
    length: Int[Array, ""],
    table_row: Int[Array, "blocks"],
    rows: RequestRows | None,
) -> KVCache:
    """The cache after a slot has taken over rows, blocks and length.

    Args:
      cache: the cache; donated.
      slot: scalar.
      length: scalar, the position after the newest row.
      table_row: [max_blocks] the slot's row of the block table; -1 = none.
      rows: what `read_request` gave; None leaves the slot's rows as they are.
    """
    slots, slot = cache.lengths.shape[0], _own_slots(cache, slot)
    slot = jnp.where(slot >= 0, slot, slots)
    cache = dataclasses.replace(
        cache,
        block_table=cache.block_table.at[slot].set(table_row, mode="drop"),
        lengths=cache.lengths.at[slot].set(length, mode="drop"),
    )
    if rows is None:
        return cache

    def write(pool, new):
        ring, count, width = pool.shape[2], new.shape[1], new.shape[-1]
        index = (length - count + jnp.arange(count, dtype=jnp.int32)) % ring
        # Layers and rows are both arrays: between them a slice would move the axes.
        layers = jnp.arange(pool.shape[0], dtype=jnp.int32)
        return pool.at[layers[:, None], slot, index[None, :], :width].set(new, mode="drop")

    old = {name: cache.groups[name].like(group) for name, group in rows.groups.items()}
    cache = cache.with_groups(jax.tree.map(write, old, rows.groups))
    rings = jax.tree.map(write, (cache.swa, cache.streams), (rows.swa, rows.streams))
    return dataclasses.replace(cache, swa=rings[0], streams=rings[1])


@functools.partial(jax.jit, donate_argnames="cache")
@sharded_update
def copy_request(
    cache: KVCache,
    source: Int[Array, ""],
    source_block: Int[Array, ""],
    length: Int[Array, ""],
    targets: Int[Array, "n"],
    target_blocks: Int[Array, "n"],
    table_rows: Int[Array, "n blocks"],
) -> KVCache:
    """The cache after slots have become copies of one: all its rows, and one block.

    Args:
      cache: the cache; donated.
      source: scalar, the slot that is copied.
      source_block: scalar, the block that is copied.
      length: scalar, tokens the copies hold.
      targets: [n] slots of the same part, then -1; may name the source itself, whose block is then replaced by a copy.
      target_blocks: [n] the block that becomes the copy of `source_block` for each of them; -1 = none.
      table_rows: [n, max_blocks] the targets' rows of the block table; -1 = none.
    """
    count = jnp.sum(targets >= 0, dtype=jnp.int32)
    source, targets = _own_slots(cache, source), _own_slots(cache, targets)
    source_block, target_blocks = own_blocks(cache, source_block), own_blocks(cache, target_blocks)
    across = "context" if cache.schema.context_parallel else None  # a block and its copy may lie on two devices
    rings = cache.swa, cache.streams, {name: group.by_slot for name, group in cache.groups.items()}
    pools = {name: group.paged for name, group in cache.groups.items()}

    def copy(pool, to, index, across=None):
        # One at a time: a scatter of all copies would first hold them all.
        row = jax.lax.dynamic_index_in_dim(pool, index, axis=1)
        row = all_reduce_bits(jnp.where(index >= 0, row, jnp.zeros((), row.dtype)), across)
        row = jnp.where(to >= 0, row, jax.lax.dynamic_index_in_dim(pool, to, axis=1))
        return jax.lax.dynamic_update_index_in_dim(pool, row, to, axis=1)

    def one(i, carry):
        rings, pools = carry
        rings = jax.tree.map(lambda pool: copy(pool, targets[i], source), rings)
        return rings, jax.tree.map(lambda pool: copy(pool, target_blocks[i], source_block, across), pools)

    (swa, streams, states), pools = jax.lax.fori_loop(0, count, one, (rings, pools))
    to = jnp.where(targets >= 0, targets, cache.lengths.shape[0])
    cache = dataclasses.replace(
        cache,
        swa=swa,
        streams=streams,
        block_table=cache.block_table.at[to].set(table_rows, mode="drop"),
        lengths=cache.lengths.at[to].set(length, mode="drop"),
    )
    return cache.with_groups(states).with_groups(pools)


@jax.jit
@sharded_read
def read_blocks(
    cache: KVCache, blocks: Int[Array, "n"], first: Int[Array, ""], length: Int[Array, ""]
) -> dict[str, PoolGroup]:
    """The entries of some consecutive blocks of a request; the cache is only read.

    Args:
      cache: the cache.
      blocks: [n] block ids; -1 = none.
      first: scalar, which of the request's blocks the first of them is.
      length: scalar, tokens the request holds: entries beyond are read as zeros.

    Returns:
      PoolGroup by name of which only what is paged is there: [layers, n, entries a block, ...].
    """
    order, blocks = first + jnp.arange(blocks.shape[0], dtype=jnp.int32), own_blocks(cache, blocks)

    def read(pool, rate):
        per_block = pool.shape[2]
        entries = order[:, None] * per_block + jnp.arange(per_block, dtype=jnp.int32)[None, :]
        live = (blocks >= 0)[:, None] & (entries < length // rate)
        return _keep(pool.at[:, jnp.maximum(blocks, 0)].get(mode="clip"), live)

    rows = {
        name: jax.tree.map(functools.partial(read, rate=spec.compress_rate), cache.groups[name].paged)
        for name, spec in cache.schema.groups.items()
    }
    return all_reduce_bits(rows, cache.schema.block_axis)


@functools.partial(jax.jit, donate_argnames="cache")
@sharded_update
def write_blocks(cache: KVCache, blocks: Int[Array, "n"], rows: dict[str, PoolGroup]) -> KVCache:
    """The cache after blocks have taken over entries.

    Args:
      cache: the cache; donated.
      blocks: [n] block ids; -1 writes nothing.
      rows: what `read_blocks` gave.
    """
    blocks, pools = own_blocks(cache, blocks), {name: group.paged for name, group in cache.groups.items()}

    def write(pool, new):
        return pool.at[:, jnp.where(blocks >= 0, blocks, pool.shape[1])].set(new, mode="drop")

    return cache.with_groups(jax.tree.map(write, pools, rows))


def _own_slots(cache, slots):
    return to_local_ids(slots, "slots", cache.lengths.shape[0])


def own_blocks(cache: KVCache, blocks: Int[Array, "..."]) -> Int[Array, "..."]:
    """What this device calls blocks: see `to_local_ids`."""
    pools = jax.tree.leaves({name: group.paged for name, group in cache.groups.items()})
    return to_local_ids(blocks, cache.schema.block_axis, pools[0].shape[1]) if pools else blocks


def _newest(pools: Any, slot, length, count, first):
    """(the slot's rows [layers, count, ...] up to `length`, zeros before `first` or 0; their positions [count])."""
    positions = length - count + jnp.arange(count, dtype=jnp.int32)
    live, slot = (positions >= jnp.maximum(first, 0)) & (slot >= 0), jnp.maximum(slot, 0)
    rows = jax.tree.map(lambda pool: _keep(pool[:, slot][:, positions % pool.shape[2]], live), pools)
    return rows, positions


def _keep(x, live):
    """x [layers, *live, ...] where `live`, else zeros."""
    return jnp.where(live.reshape(1, *live.shape, *(1,) * (x.ndim - live.ndim - 1)), x, jnp.zeros((), x.dtype))
