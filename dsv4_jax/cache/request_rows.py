"""Jitted functions of fixed shapes that copy a request to another slot, read it out of the cache, and write it back.

A row of the cache is live if a later step can read it. A request of `length` tokens that may be rewound to `min_length`
tokens has these live rows, up to position `length - 1`:

  * all complete entries,
  * window rows from position `min_length - window` on,
  * with drafts, residual streams from position `min_length - 1` on,
  * with Engram, compressed token ids from position `min_length - (max_ngram_size - 1)` on,
  * compressor rows from position `min_length // rate * rate` on, where the window that is open at `min_length` begins,
  * if entries overlap, the first half of the channels of the preceding `rate` compressor rows, which the next entry
    pools (docs/dsv4.md, 3.1).

Other rows are read as zeros, so that no bytes of a slot's earlier request leave the cache.

On a mesh, arguments hold global ids of slots and blocks. Functions that read return replicated arrays. In functions
that write, each device writes its own shard.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dsv4_jax.cache.pools import KVCache
from dsv4_jax.cache.schema import PoolGroup
from dsv4_jax.ops.views import DROP, int_range
from dsv4_jax.parallel.local_ids import all_reduce_bits, to_local_ids
from dsv4_jax.parallel.sharded_step import sharded_read, sharded_update
from dsv4_jax.quant import Rows
from pallas_kernels.runtime.pytrees import pytree_dataclass


@pytree_dataclass
class RequestRows:
    """The rows of a request's slot, in the order of their positions. n differs between fields.

    Attributes:
      swa: Rows [layers, n, ...], window rows of the newest n tokens.
      streams: [1, n, hc_mult * hidden] residual streams of the newest n tokens, or None.
      ngram_ids: [1, n, 1] int32 compressed ids of the newest n tokens, or None.
      groups: {name: PoolGroup} with only the states set: CompressorState [layers, n, width] of the newest n tokens.
        With `boundary`, see `read_request`, a group is empty if its windows do not overlap, and otherwise holds the
        first half of the channels.
    """

    swa: Rows
    streams: Any
    ngram_ids: Any
    groups: dict[str, PoolGroup]


@functools.partial(jax.jit, static_argnames="boundary")
@sharded_read
def read_request(
    cache: KVCache, slot: Int[Array, ""], length: Int[Array, ""], min_length: Int[Array, ""], *, boundary: bool = False
) -> RequestRows:
    """Reads the live rows of a slot.

    Args:
      cache: the cache.
      slot: scalar, slot of the request.
      length: scalar, number of tokens up to which rows are read.
      min_length: scalar, the shortest length that the request may be rewound to.
      boundary: whether `length` equals `min_length` and is a multiple of every compression rate (static). Then only
        these rows are live and read:

        * the window rows of the newest window,
        * the newest token's streams,
        * the compressed ids of the newest `max_ngram_size - 1` tokens,
        * if entries overlap, the first half of the channels of the newest `compress_rate` compressor rows.

    Returns:
      RequestRows with the rows that a step reads and `max_query_tokens - 1` earlier ones. A row that is not live is
      zeros. With `boundary`, only the rows that are listed for this argument.
    """
    schema = cache.schema
    slot = _local_slots(cache, slot)
    spare = 0 if boundary else schema.max_query_tokens - 1
    groups = {}
    for name, spec in schema.groups.items():
        rate = spec.compress_rate
        overlap = spec.overlap
        open_start = min_length // rate * rate
        groups[name] = PoolGroup()
        if boundary and not overlap:
            continue
        count = rate if boundary else schema.state_ring(name)
        states = _newest_rows(cache.groups[name].by_slot, slot, length, count, open_start - rate * overlap)
        if boundary:
            states = jax.tree.map(lambda x: x[..., : x.shape[-1] // 2], states)
        elif overlap:
            # The next entry pools only the first half of the channels of the window preceding the open one.
            is_open = length - count + int_range(count) >= open_start
            states = jax.tree.map(functools.partial(_pooled_again, is_open=is_open), states)
        groups[name] = states
    # The number of rows before `min_length` that a step reads.
    contexts = {"swa": schema.max_window, "streams": 1, "ngram_ids": schema.ngram_context}
    rows = {
        name: _newest_rows(getattr(cache, name), slot, length, context + spare, min_length - context)
        for name, context in contexts.items()
    }
    return all_reduce_bits(RequestRows(**rows, groups=groups), "slots")


def _pooled_again(x, *, is_open):
    """Returns x [layers, n, width] with zeros in the second half of the channels where `is_open` [n] is False."""
    first_half = int_range(x.shape[-1]) < x.shape[-1] // 2
    return jnp.where((first_half[None, :] | is_open[:, None])[None], x, 0)


@sharded_update
def write_request(
    cache: KVCache,
    slot: Int[Array, ""],
    length: Int[Array, ""],
    table_row: Int[Array, "blocks"],
    rows: RequestRows | None,
) -> KVCache:
    """Writes a request to a slot: its rows, its block ids and its length.

    Args:
      cache: the cache; donated.
      slot: scalar, the slot to write.
      length: scalar, number of tokens of the request; the newest of `rows` has the position `length - 1`.
      table_row: [max_blocks] int32, block ids for the slot's row of the block table; -1 = none.
      rows: result of `read_request`. None leaves the slot's rows as they are.
    """
    slot = _local_slots(cache, slot)
    cache = _with_requests(cache, slot, length, table_row)
    if rows is None:
        return cache

    def write(new, pool):
        """Writes the request's rows of one pool, the newest at position `length - 1`."""
        if new is None:  # rows at a block boundary lack the states that are not live there
            return pool
        ring = pool.shape[2]
        count = new.shape[1]
        width = new.shape[-1]
        index = (length - count + int_range(count)) % ring
        # The index arrays of the first three axes are broadcast to [layers, count], the leading axes of `new`.
        layers = int_range(pool.shape[0])
        return pool.at[layers[:, None], slot, index[None, :], :width].set(new, **DROP)

    return _with_slot_pools(cache, jax.tree.map(write, rows, _slot_pools(cache), is_leaf=lambda x: x is None))


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
    """Copies all rows of a slot to other slots, and one block to other blocks.

    Args:
      cache: the cache; donated.
      source: scalar, the slot that is copied.
      source_block: scalar, id of the block that is copied.
      length: scalar, number of tokens in each copy.
      targets: [n] the slots to write, followed by -1. They lie in the source's shard of the cache. The source may be
        among them, to replace its block by a copy.
      target_blocks: [n] id of the block that receives `source_block` for each target; -1 = none.
      table_rows: [n, max_blocks] block ids for the targets' rows of the block table; -1 = none.
    """
    count = jnp.sum(targets >= 0, dtype=jnp.int32)
    source = _local_slots(cache, source)
    targets = _local_slots(cache, targets)
    source_block = _local_blocks(cache, source_block)
    target_blocks = _local_blocks(cache, target_blocks)
    # With context parallelism, a block and its copy may lie on different devices.
    block_axis = "context" if cache.schema.context_parallel else None

    def copy(pool, to, index, axis=None):
        """Copies row `index` of a pool to row `to`, both on axis 1; -1 = this device does not hold the row.

        `axis` is the logical axis along which devices exchange the row; None = both rows lie on the same device.
        """
        row = jax.lax.dynamic_index_in_dim(pool, index, axis=1)
        row = all_reduce_bits(jnp.where(index >= 0, row, jnp.zeros((), row.dtype)), axis)
        row = jnp.where(to >= 0, row, jax.lax.dynamic_index_in_dim(pool, to, axis=1))
        return jax.lax.dynamic_update_index_in_dim(pool, row, to, axis=1)

    def copy_to_target(i, carry):
        """Copies the rows and the block to target i."""
        by_slot, paged = carry
        by_slot = jax.tree.map(lambda pool: copy(pool, targets[i], source), by_slot)
        return by_slot, jax.tree.map(lambda pool: copy(pool, target_blocks[i], source_block, block_axis), paged)

    # Targets are written one after another, because a single scatter would hold all copies in memory.
    by_slot, paged = jax.lax.fori_loop(0, count, copy_to_target, (_slot_pools(cache), cache.paged))
    return _with_slot_pools(_with_requests(cache, targets, length, table_rows), by_slot).with_groups(paged)


@jax.jit
@sharded_read
def read_blocks(
    cache: KVCache, blocks: Int[Array, "n"], first: Int[Array, ""], length: Int[Array, ""]
) -> dict[str, PoolGroup]:
    """Reads the compressed entries, and their index keys, of consecutive blocks of a request.

    Args:
      cache: the cache.
      blocks: [n] block ids; -1 = none, which is read as zeros.
      first: scalar, index of the first of these blocks within the request.
      length: scalar, number of tokens in the request; entries of positions from `length` on are read as zeros.

    Returns:
      {name of the group: PoolGroup} with only `entries` and `keys` set: [layers, n, entries per block, ...].
    """
    block_indices = first + int_range(blocks.shape[0])
    blocks = _local_blocks(cache, blocks)

    def read(pool, rate):
        """Reads the blocks from one pool, with zeros for entries that are not live."""
        per_block = pool.shape[2]
        entries = block_indices[:, None] * per_block + int_range(per_block)[None, :]
        live = (blocks >= 0)[:, None] & (entries < length // rate)
        return _keep(pool.at[:, jnp.maximum(blocks, 0)].get(mode="clip"), live)

    rows = {
        name: jax.tree.map(functools.partial(read, rate=spec.compress_rate), cache.paged[name])
        for name, spec in cache.schema.groups.items()
    }
    return all_reduce_bits(rows, cache.schema.block_axis)


@sharded_update
def write_blocks(cache: KVCache, blocks: Int[Array, "n"], rows: dict[str, PoolGroup]) -> KVCache:
    """Writes compressed entries, and their index keys, to blocks.

    Args:
      cache: the cache; donated.
      blocks: [n] block ids; -1 writes nothing.
      rows: result of `read_blocks`.
    """
    blocks = _local_blocks(cache, blocks)

    def write(pool, new):
        return pool.at[:, blocks].set(new, **DROP)

    return cache.with_groups(jax.tree.map(write, cache.paged, rows))


def _with_requests(cache, slots, length, table_rows):
    """Returns the cache with new lengths and rows of the block table in some slots of this device; -1 = none."""
    return dataclasses.replace(
        cache,
        block_table=cache.block_table.at[slots].set(table_rows, **DROP),
        lengths=cache.lengths.at[slots].set(length, **DROP),
    )


def _slot_pools(cache):
    """Returns the pools of a cache that are addressed by slot, as a RequestRows of [layers, slots, ring, ...]."""
    states = {name: group.by_slot for name, group in cache.groups.items()}
    return RequestRows(cache.swa, cache.streams, cache.ngram_ids, states)


def _with_slot_pools(cache, pools):
    """Returns the cache with `pools` in place of the pools that `_slot_pools` returns."""
    cache = dataclasses.replace(cache, swa=pools.swa, streams=pools.streams, ngram_ids=pools.ngram_ids)
    return cache.with_groups(pools.groups)


def _local_slots(cache, slots):
    return to_local_ids(slots, "slots", cache.lengths.shape[0])


def _local_blocks(cache, blocks):
    """Converts global block ids to this device's ids (see `to_local_ids`)."""
    pools = jax.tree.leaves(cache.paged)
    return to_local_ids(blocks, cache.schema.block_axis, pools[0].shape[1]) if pools else blocks


def _newest_rows(pools: Any, slot, length, count, first):
    """Reads the rows of a slot at the positions from `length - count` to `length - 1`.

    A row is zero if its position is less than `first`, or if another device holds the slot.

    Args:
      pools: tree of arrays [layers, slots, ring, ...].
      slot: int32 scalar, the slot on this device; -1 = another device holds it.
      length: int32 scalar, number of tokens of the request.
      count: number of rows to read.
      first: int32 scalar, the first position whose row is live; it may be negative.

    Returns:
      A tree of arrays [layers, count, ...].
    """
    positions = length - count + int_range(count)
    live = (positions >= jnp.maximum(first, 0)) & (slot >= 0)
    slot = jnp.maximum(slot, 0)
    return jax.tree.map(lambda pool: _keep(pool[:, slot][:, positions % pool.shape[2]], live), pools)


def _keep(x, live):
    """Returns x [layers, *n, ...] with zeros where `live` [*n] is False."""
    return jnp.where(live.reshape(1, *live.shape, *(1,) * (x.ndim - live.ndim - 1)), x, jnp.zeros((), x.dtype))
