"""Computes the host's arrays of a `Batch`: the places of its tokens, its new blocks and its new requests."""

import dataclasses
import functools

import numpy as np

from dsv4_jax.host.cache_devices import Shards, consecutive
from dsv4_jax.host.request_table import RequestStates


@dataclasses.dataclass(frozen=True)
class Layout:
    """The places of the tokens of n requests in the token arrays [T] of a batch.

    T is the number of tokens after padding. Each shard has an equal range of these arrays, padded at its end.

    Attributes:
      begins: [n] int64, index in [0, T) of each request's first token.
      indices: [total number of tokens] int64, index in [0, T) of each token, request by request.
      slots: [T] int32, the field `Batch.slots`: local id of each token's slot in its shard; -1 = padding.
      prefill: the field `Batch.prefill`: whether the batch runs as a prefill rather than as a decode step.
    """

    begins: np.ndarray
    indices: np.ndarray
    slots: np.ndarray
    prefill: bool

    def place(self, values: np.ndarray, padding: int) -> np.ndarray:
        """Returns an array with one value for each of the T places of tokens.

        Args:
          values: [total number of tokens] one value for each token, request by request.
          padding: value of the places that have no token.

        Returns:
          [T] int32, each token's value at the token's index.
        """
        array = np.full(self.slots.shape, padding, np.int32)
        array[self.indices] = values
        return array


@functools.lru_cache(maxsize=8)  # most steps have the same requests as the previous step
def find_layout(
    shards: Shards,
    slots: bytes,
    counts: bytes,
    max_query_tokens: int,
    prefill_size: int | None,
    decode_size: int | None,
) -> Layout:
    """Returns the layout of a batch of n requests.

    Args:
      shards: the shards of the cache.
      slots: the slot of each request, as the bytes of an [n] int64 array. Bytes, unlike arrays, can be a key of
        `lru_cache`.
      counts: the number of tokens of each request, as the bytes of an [n] int64 array.
      max_query_tokens: as in `CacheSchema`.
      prefill_size, decode_size: as in `KVCacheManager.prepare_forward`.

    Raises:
      ValueError: a shard has more tokens than `prefill_size`.
    """
    slot_of = np.frombuffer(slots, int)
    num_tokens = np.frombuffer(counts, int)
    per_shard = [int(num_tokens[shards.of(slot_of) == shard].sum()) for shard in range(shards.count)]
    largest = max(per_shard)
    shard_size = shards.slots if decode_size is None else decode_size
    prefill = bool(num_tokens.max() > max_query_tokens)
    if prefill_size is None:
        if largest > shard_size:
            shard_size = 1 << (largest - 1).bit_length()  # the next power of two
    elif prefill or largest > shard_size:
        shard_size = prefill_size
        prefill = True
        if largest > shard_size:
            where = shards.where(per_shard.index(largest))
            raise ValueError(f"{prefill_size=} is less than the step's {largest} tokens{where}")
    begins = shards.place_rows(slot_of, num_tokens, shard_size)
    indices = consecutive(begins, num_tokens)
    token_slots = np.full((shards.count * shard_size,), -1, np.int32)
    token_slots[indices] = np.repeat(slot_of % shards.slots, num_tokens)
    for array in (begins, indices, token_slots):
        array.flags.writeable = False  # `lru_cache` returns the same arrays again for later batches
    return Layout(begins, indices, token_slots, prefill)


def find_new_rows(
    shards: Shards, slots: np.ndarray, before: np.ndarray, after: RequestStates, max_blocks: int
) -> dict[str, np.ndarray]:
    """Returns the fields `new_blocks` and `reset_slots` of a batch, as {name: array}.

    `new_blocks` [shards * max_blocks, 3] int32 has a row (slot, index in the request's block table, block) for each
    block that the batch adds to the device's block table. `reset_slots` [max_requests] int32 lists the slots of the
    requests that begin with this batch. In both arrays each shard has an equal range of rows, with local ids; unused
    rows are -1.

    Args:
      shards: the shards of the cache.
      slots: [n] slots of the batch's requests.
      before: [n] array of dtype `request_table.NUMBERS`, the state of the batch's requests before the batch.
      after: the states of all requests after the batch.
      max_blocks: maximum number of blocks that the batch can add to the block tables of one shard.
    """
    rows = _blank_rows(shards, max_blocks)
    published = after.numbers["published_blocks"][slots]
    is_new = before["changed"] == 0  # no batch or copy has written rows of the request yet
    changed = np.flatnonzero(is_new | (published > before["published_blocks"])).tolist()
    if not changed:
        return rows
    rows = {name: array.copy() for name, array in rows.items()}
    num_blocks = [0] * shards.count
    num_resets = [0] * shards.count
    for i in changed:
        slot = int(slots[i])
        shard, local_slot = divmod(slot, shards.slots)
        for index in range(before["published_blocks"][i], published[i]):
            row = shard * max_blocks + num_blocks[shard]
            blocks, _ = after.lists[slot]
            rows["new_blocks"][row] = local_slot, index, blocks[index] % shards.blocks
            num_blocks[shard] += 1
        if is_new[i]:
            rows["reset_slots"][shard * shards.slots + num_resets[shard]] = local_slot
            num_resets[shard] += 1
    return rows


@functools.lru_cache(maxsize=8)
def _blank_rows(shards, max_blocks):
    """Returns the `new_blocks` and `reset_slots` of a batch that adds no block and begins no request: all -1."""
    new_blocks = np.full((shards.count * max_blocks, 3), -1, np.int32)
    return {"new_blocks": new_blocks, "reset_slots": np.full((shards.count * shards.slots,), -1, np.int32)}
