"""Builds the inputs of a step: the implementation of `KVCacheManager.prepare_forward`."""

import dataclasses
import functools

import numpy as np

from dsv4_jax.cache import Batch
from dsv4_jax.host.request_table import RequestTable, extended
from dsv4_jax.host.step_order import PreparedBatch, record_batch


def prepare_forward(
    table: RequestTable,
    slots: np.ndarray,
    counts: np.ndarray,
    ids: np.ndarray,
    layout: "Layout",
    *,
    reserve: int = 0,
) -> Batch:
    """Implements `KVCacheManager.prepare_forward` for arrays.

    Args:
      table: the requests.
      slots: [n] admitted slots, each once.
      counts: [n] number of tokens that each brings.
      ids: [sum of counts] int32, their checked token ids.
      layout: their places, of `find_layout`.
      reserve: as in `KVCacheManager.prepare_forward`.
    """
    block_tokens = table.schema.block_tokens
    states = table.states
    time = table.tick()
    missing = table.missing_blocks(slots, counts + reserve)
    now = states.numbers[slots]
    after = extended(now, counts, table.schema)
    after["num_blocks"] += missing
    after["changed"] = time
    after["is_new"] = False
    # Only blocks that this step can reach are published, which bounds the size of new_blocks.
    after["published_blocks"] = np.maximum(now["published_blocks"], -(-(after["length"] + reserve) // block_tokens))
    token_ids = np.zeros((len(layout.slots),), np.int32)
    positions = np.full((len(layout.slots),), -1, np.int32)
    positions[layout.indices] = indices(now["length"], counts)
    token_ids[layout.indices] = ids
    needs = np.flatnonzero(missing)
    with table.transaction(dict(zip(slots[needs].tolist(), missing[needs].tolist(), strict=True))) as acquired:
        states = states.replaced(slots, after, acquired)
        arrays = dict(token_ids=token_ids, slots=layout.slots) | _new_rows(table, slots, now, states, layout, reserve)
        positions = table.put(positions, "tokens")  # always a new array, by which a batch is known
        batch = Batch(
            positions=positions, **table.put_changed(arrays, "tokens"), prefill=layout.prefill, schema=table.schema
        )
        record_batch(batch, PreparedBatch(table, time, slots, table.states.numbers, states.numbers))
        table.states = states
    return batch


def _new_rows(table, slots, now, states, layout, reserve):
    """Returns a batch's `new_blocks` and `reset_slots`; `now` [n] are the numbers of its slots before it."""
    num_shards = table.num_shards
    per_shard = table.slots_per_shard
    # A request opens at most ceil(tokens / block_tokens) blocks: at most one more than its share of the sum.
    most = per_shard * (1 + table.blocks_for(reserve)) + table.blocks_for(len(layout.slots) // num_shards)
    blank = _blank_rows(num_shards, per_shard, most)
    published = states.numbers["published_blocks"][slots]
    if not (news := np.flatnonzero(now["is_new"] | (published > now["published_blocks"]))).size:
        return blank
    blocks_of = [[] for _ in range(num_shards)]
    resets_of = [[] for _ in range(num_shards)]
    for i in news.tolist():
        shard, own = divmod(int(slots[i]), per_shard)
        blocks = states.lists[int(slots[i])][0]
        opened = range(now["published_blocks"][i], published[i])
        blocks_of[shard] += [(own, index, table.local_block(blocks[index])) for index in opened]
        resets_of[shard] += [own] if now["is_new"][i] else []
    new_blocks = blank["new_blocks"].copy()
    reset_slots = blank["reset_slots"].copy()
    for shard, (blocks, resets) in enumerate(zip(blocks_of, resets_of, strict=True)):
        new_blocks[shard * most :][: len(blocks)] = np.reshape(blocks, (-1, 3))
        reset_slots[shard * per_shard :][: len(resets)] = resets
    return dict(new_blocks=new_blocks, reset_slots=reset_slots)


@functools.lru_cache(maxsize=8)
def _blank_rows(num_shards, slots_per_shard, most):
    """Returns the `new_blocks` and `reset_slots` of a batch that opens no block and begins no request."""
    new_blocks = np.full((num_shards * most, 3), -1, np.int32)
    return dict(new_blocks=new_blocks, reset_slots=np.full((num_shards * slots_per_shard,), -1, np.int32))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of tokens in a batch.

    Attributes:
      first: [n] index of each request's first token.
      indices: [sum of counts] index of each token.
      slots: [T] int32, `Batch.slots`.
      prefill: `Batch.prefill`.
    """

    first: np.ndarray
    indices: np.ndarray
    slots: np.ndarray
    prefill: bool


def find_layout(
    table: RequestTable, slots: np.ndarray, counts: np.ndarray, prefill_size: int | None, decode_size: int | None
) -> Layout:
    """Returns the layout of a batch; arguments as for `prepare_forward`."""
    sizes = table.slots_per_shard, table.num_shards, table.schema.max_query_tokens, prefill_size, decode_size
    return _find_layout(slots.tobytes(), counts.tobytes(), *sizes)


@functools.lru_cache(maxsize=8)  # most steps run the requests of the step before
def _find_layout(slots, counts, slots_per_shard, num_shards, max_query_tokens, prefill_size, decode_size):
    slots = np.frombuffer(slots, int)
    counts = np.frombuffer(counts, int)
    shards, own = np.divmod(slots, slots_per_shard)
    per_shard = [int(counts[shards == shard].sum()) for shard in range(num_shards)]
    size = slots_per_shard if decode_size is None else decode_size
    prefill = bool(counts.max() > max_query_tokens)
    most = max(per_shard)
    if prefill_size is None:
        size = size if most <= size else 1 << (most - 1).bit_length()
    elif prefill or most > size:
        size = prefill_size
        prefill = True
        if most > size:
            where = "" if num_shards == 1 else f" in shard {per_shard.index(most)} of {num_shards}"
            raise ValueError(f"{prefill_size=} is less than the step's {most} tokens{where}")
    first = first_indices(shards, counts, num_shards, size)
    padded = np.full((num_shards * size,), -1, np.int32)
    at = indices(first, counts)
    padded[at] = np.repeat(own, counts)
    return Layout(first, at, padded, prefill)


def first_indices(shards: np.ndarray, counts: np.ndarray, num_shards: int, size: int) -> np.ndarray:
    """Returns the [n] indices at which `counts` [n] rows begin, in arrays with `size` rows for each of the shards."""
    first = np.empty_like(counts)
    for shard in range(num_shards):
        mine = shards == shard
        first[mine] = shard * size + np.cumsum(counts[mine]) - counts[mine]
    return first


def indices(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns `counts` [n] consecutive integers from each of `first` [n], one after another."""
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
