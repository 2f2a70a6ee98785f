"""What a manager does to build a step's inputs; the manager says what it promises."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from dsv4_jax.cache import Batch
from dsv4_jax.host.request_table import RequestTable


def prepare_forward(
    table: RequestTable,
    tokens: Mapping[int, np.ndarray],
    reserve: int,
    prefill_size: int | None,
    decode_size: int | None,
) -> Batch:
    """Does `KVCacheManager.prepare_forward`, of token ids [n] int32 by slot."""
    schema, counts = table.schema, {slot: len(new) for slot, new in tokens.items()}
    padded = table.slots_per_part if decode_size is None else decode_size
    of_parts = [sum(n for slot, n in counts.items() if table.part(slot) == part) for part in range(table.parts)]
    prefill, most = max(counts.values()) > schema.max_query_tokens, max(of_parts)
    if prefill_size is None:
        padded = padded if most <= padded else 1 << (most - 1).bit_length()
    elif prefill or most > padded:
        padded, prefill = prefill_size, True
        if most > prefill_size:
            where = "" if table.parts == 1 else f" in part {of_parts.index(most)} of {table.parts}"
            raise ValueError(f"{prefill_size=} is less than the step's {most} tokens{where}")
    missing = {slot: table.missing_blocks(slot, count + reserve) for slot, count in counts.items()}
    # Each request may open ceil(tokens / block_tokens) blocks: together at most one more each than their sum.
    max_new_blocks = table.slots_per_part * (1 + table.blocks_for(reserve)) + table.blocks_for(padded)
    arrays = dict(
        token_ids=np.zeros((table.parts, padded), np.int32),
        positions=np.full((table.parts, padded), -1, np.int32),
        slots=np.full((table.parts, padded), -1, np.int32),
        new_blocks=np.full((table.parts, max_new_blocks, 3), -1, np.int32),
        reset_slots=np.full((table.parts, table.slots_per_part), -1, np.int32),
    )
    states, starts = {}, first_tokens(table, counts, padded)
    with table.transaction(missing) as acquired:
        new_blocks, reset_slots = ([[] for _ in range(table.parts)] for _ in range(2))
        for slot, new in tokens.items():
            state, part, own = table.state(slot), table.part(slot), slot % table.slots_per_part
            here = part, slice(start := starts[slot] % padded, start + len(new))
            arrays["token_ids"][here] = new
            arrays["positions"][here] = np.arange(state.length, state.length + len(new))
            arrays["slots"][here] = own
            blocks = state.blocks + acquired[slot]
            # Of a larger reservation only what this step can reach: that bounds the size of new_blocks.
            published = max(state.published_blocks, table.blocks_for(state.length + len(new) + reserve))
            opened = range(state.published_blocks, published)
            new_blocks[part] += [(own, index, table.own_block(blocks[index])) for index in opened]
            reset_slots[part] += [own] if state.is_new else []
            state = dataclasses.replace(state, blocks=blocks, published_blocks=published, is_new=False)
            states[slot] = state.extended(len(new), schema)
        for part in range(table.parts):
            arrays["new_blocks"][part, : len(new_blocks[part])] = np.reshape(new_blocks[part], (-1, 3))
            arrays["reset_slots"][part, : len(reset_slots[part])] = reset_slots[part]
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in arrays.items()}
        batch = Batch(**table.put(flat, "tokens"), prefill=prefill, schema=schema)
        table.commit(states)
    return batch


def first_tokens(table: RequestTable, counts: Mapping[int, int], size: int) -> dict[int, int]:
    """{slot: where its first token stands} in a batch of `size` tokens a part, to which slots bring `counts` tokens."""
    ends, starts = [part * size for part in range(table.parts)], {}
    for slot, count in counts.items():
        part = table.part(slot)
        starts[slot], ends[part] = ends[part], ends[part] + count
    return starts
