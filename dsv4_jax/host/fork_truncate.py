"""Forks and truncates requests: the implementation of `KVCacheManager.fork` and `truncate`.

Each launches one program that donates the cache.
"""

import dataclasses
import itertools

import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.request_rows import copy_request, write_request
from dsv4_jax.host.canary import check_snapshot
from dsv4_jax.host.request_table import RequestTable
from dsv4_jax.host.step_order import record_write


def fork(table: RequestTable, cache: KVCache, slot: int, n: int, length: int | None) -> tuple[list[int], KVCache]:
    """Implements `KVCacheManager.fork`."""
    parent = table.state(slot).shortened(length, slot)
    if n < 1:
        raise ValueError(f"{n=} must be at least 1")
    if not parent.length:
        raise ValueError(f"slot {slot} holds no tokens yet: admit another request instead of a fork")
    slots = table.find_slots(n, table.shard(slot))
    full, partial = divmod(parent.length, table.schema.block_tokens)
    shared = parent.blocks[:full]
    with table.transaction(dict.fromkeys(slots, int(partial > 0))) as copies:
        table.allocator.share(shared * n)
        states = {}
        cached = parent.cached_blocks[:full]
        for child in slots:
            blocks = shared + copies[child]
            states[child] = dataclasses.replace(
                parent,
                blocks=blocks,
                published_blocks=len(blocks),
                cached_blocks=cached,
                admitted=0,
            )
        new = _copy_request(table, cache, slot, states, parent.blocks[full] if partial else -1, copies)
        record_write(table, cache, new, states)
    return slots, new


def truncate(table: RequestTable, cache: KVCache, slot: int, length: int) -> tuple[int, KVCache]:
    """Implements `KVCacheManager.truncate`."""
    state = table.state(slot)
    if not 0 <= length <= state.length:
        raise ValueError(f"{length=} must be between 0 and the {state.length} tokens that slot {slot} holds")
    start = length
    min_length = state.min_length
    snapshot = None
    if length < min_length:
        kept = [node for node in state.cached_blocks if node.length <= length and node.snapshot is not None]
        start = 0
        if kept:
            check_snapshot(table.schema, kept[-1], f"slot {slot}")
            start = kept[-1].length
            snapshot = kept[-1].snapshot
        min_length = start
    full, partial = divmod(start, table.schema.block_tokens)
    keep = state.blocks[: full + bool(partial)]
    drop = state.blocks[full + bool(partial) :]
    written = keep[full:]
    with table.transaction({slot: len(written)} if table.is_shared(written) else None) as copies:
        if copies:
            keep = keep[:full] + copies[slot]
            drop = written + drop
        table.allocator.release(drop)
        state = dataclasses.replace(
            state,
            length=start,
            min_length=min_length,
            blocks=keep,
            published_blocks=len(keep),
            is_new=False,
            cached_blocks=state.cached_blocks[:full],
        )
        if copies:
            new = _copy_request(table, cache, slot, {slot: state}, written[0], copies)
        else:
            where = table.put((np.int32(slot), np.int32(start), table.block_table_row(keep)))
            new = write_request(cache, *where, snapshot)
        record_write(table, cache, new, {slot: state})
    return start, new


def _copy_request(table, cache, source, states, block, copies):
    """Copies slot `source` to the slots of `states`, and `block` to each block of `copies`."""
    max_requests = table.schema.max_requests
    slots, blocks = np.full((2, max_requests), -1, np.int32)
    copied = list(itertools.chain.from_iterable(copies.values()))
    slots[: len(states)] = list(states)
    blocks[: len(copied)] = copied
    rows = np.full((max_requests, table.schema.max_blocks), -1, np.int32)
    for i, state in enumerate(states.values()):
        rows[i] = table.block_table_row(state.blocks)
    (length,) = {state.length for state in states.values()}
    where = table.put((np.int32(source), np.int32(block), np.int32(length), slots, blocks, rows))
    return copy_request(cache, *where)
