"""Builds the inputs of a step: the implementation of `KVCacheManager.prepare_forward`."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dsv4_jax.cache import Batch
from dsv4_jax.host.request_table import RequestTable
from dsv4_jax.host.step_order import PreparedBatch, record_batch


def prepare_forward(
    table: RequestTable,
    tokens: Mapping[int, np.ndarray],
    reserve: int,
    prefill_size: int | None,
    decode_size: int | None,
) -> Batch:
    """Implements `KVCacheManager.prepare_forward` for checked token ids [n] int32 by slot."""
    schema, counts = table.schema, {slot: len(new) for slot, new in tokens.items()}
    padded = table.slots_per_shard if decode_size is None else decode_size
    per_shard = [
        sum(n for slot, n in counts.items() if table.shard(slot) == shard) for shard in range(table.num_shards)
    ]
    prefill, most = max(counts.values()) > schema.max_query_tokens, max(per_shard)
    if prefill_size is None:
        padded = padded if most <= padded else 1 << (most - 1).bit_length()
    elif prefill or most > padded:
        padded, prefill = prefill_size, True
        if most > prefill_size:
            where = "" if table.num_shards == 1 else f" in shard {per_shard.index(most)} of {table.num_shards}"
            raise ValueError(f"{prefill_size=} is less than the step's {most} tokens{where}")
    missing = {slot: table.missing_blocks(slot, count + reserve) for slot, count in counts.items()}
    # A request opens at most ceil(tokens / block_tokens) blocks: at most one more than its share of the sum.
    max_new_blocks = table.slots_per_shard * (1 + table.blocks_for(reserve)) + table.blocks_for(padded)
    arrays = dict(
        token_ids=np.zeros((table.num_shards, padded), np.int32),
        positions=np.full((table.num_shards, padded), -1, np.int32),
        slots=np.full((table.num_shards, padded), -1, np.int32),
        new_blocks=np.full((table.num_shards, max_new_blocks, 3), -1, np.int32),
        reset_slots=np.full((table.num_shards, table.slots_per_shard), -1, np.int32),
    )
    states, starts, time = {}, first_tokens(table, counts, padded), table.tick()
    with table.transaction(missing) as acquired:
        new_blocks, reset_slots = ([[] for _ in range(table.num_shards)] for _ in range(2))
        for slot, new in tokens.items():
            state, shard, own = table.state(slot), table.shard(slot), slot % table.slots_per_shard
            here = shard, slice(start := starts[slot] % padded, start + len(new))
            arrays["token_ids"][here] = new
            arrays["positions"][here] = np.arange(state.length, state.length + len(new))
            arrays["slots"][here] = own
            blocks = state.blocks + acquired[slot]
            # Only blocks that this step can reach are published, which bounds the size of new_blocks.
            published = max(state.published_blocks, table.blocks_for(state.length + len(new) + reserve))
            opened = range(state.published_blocks, published)
            new_blocks[shard] += [(own, index, table.local_block(blocks[index])) for index in opened]
            reset_slots[shard] += [own] if state.is_new else []
            state = dataclasses.replace(state, blocks=blocks, published_blocks=published, is_new=False, changed=time)
            states[slot] = state.extended(len(new), schema)
        for shard in range(table.num_shards):
            arrays["new_blocks"][shard, : len(new_blocks[shard])] = np.reshape(new_blocks[shard], (-1, 3))
            arrays["reset_slots"][shard, : len(reset_slots[shard])] = reset_slots[shard]
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
        batch = Batch(**table.put(flat, "tokens"), prefill=prefill, schema=schema)
        record_batch(batch, PreparedBatch(table, time, {slot: table.state(slot) for slot in tokens}, states))
        table.commit(states)
    return batch


def first_tokens(table: RequestTable, counts: Mapping[int, int], size: int) -> dict[int, int]:
    """Returns {slot: index of its first token} in a batch with `size` tokens per shard, for `counts` tokens by slot."""
    ends, starts = [shard * size for shard in range(table.num_shards)], {}
    for slot, count in counts.items():
        shard = table.shard(slot)
        starts[slot], ends[shard] = ends[shard], ends[shard] + count
    return starts
