"""Placement of new requests on the shards of the cache (see `RequestTable`)."""

from collections.abc import Sequence
from typing import NamedTuple

from dsv4_jax.host.request_table import RequestTable


class FoundPrefix(NamedTuple):
    """The cached prefix of a prompt in one shard.

    Attributes:
      blocks: number of cached blocks of the prompt.
      evictable: number of these blocks that could be evicted.
    """

    blocks: int = 0
    evictable: int = 0


NOTHING = FoundPrefix()


def find_slot(
    table: RequestTable, prompt_length: int, num_tokens: int | None = None, found: Sequence[FoundPrefix] = ()
) -> int:
    """Returns the slot for a new request: the lowest free one in `best_shard`.

    Args:
      table: the requests.
      prompt_length: number of tokens in the prompt.
      num_tokens: as in `KVCacheManager.admit`.
      found: the prompt's cached prefix in each shard; empty = none.

    Raises:
      ValueError: the request needs more tokens than `max_context` or than the blocks of a shard hold.
      CacheFullError: every slot is taken.
    """
    if num_tokens is not None and num_tokens < 1:
        raise ValueError(f"{num_tokens=} must be at least 1")
    needed = max(prompt_length, num_tokens or 0)
    max_context = table.schema.max_context
    if needed > max_context:
        raise ValueError(f"the request needs {needed} tokens, {max_context=}")
    if needed > (capacity := table.capacity):
        what = "the whole cache" if table.num_shards == 1 else f"each of the cache's {table.num_shards} shards"
        raise ValueError(
            f"the request needs {needed} tokens, {what} holds {capacity}: make it larger (memory or num_blocks)"
        )
    (slot,) = table.find_slots(1, best_shard(table, needed, found))
    return slot


def best_shard(table: RequestTable, num_tokens: int, found: Sequence[FoundPrefix] = ()) -> int:
    """Prefers shards where a request of `num_tokens` tokens fits, then its longest cached prefix, then the emptiest."""

    def rank(shard):
        free = len(table.free_slots(shard))
        prefix = found[shard] if found else NOTHING
        return free > 0, fits(table, shard, num_tokens, prefix), prefix.blocks, free, table.room(shard)

    return max(range(table.num_shards), key=rank)  # the first of equal ones


def fits(table: RequestTable, shard: int, num_tokens: int, prefix: FoundPrefix = NOTHING) -> bool:
    """Whether a shard has a slot and enough blocks for a new request, whose `prefix` is cached there."""
    missing = table.blocks_for(num_tokens) - prefix.blocks
    return bool(table.free_slots(shard)) and missing <= table.room(shard) - prefix.evictable
