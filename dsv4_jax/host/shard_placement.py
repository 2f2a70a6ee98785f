"""Which part of the cache a new request gets: see `RequestTable`."""

from collections.abc import Sequence
from typing import NamedTuple

from dsv4_jax.host.request_table import RequestTable


class FoundPrefix(NamedTuple):
    """What a part of the cache has of a request's prompt: so many blocks, of which it could evict so many."""

    blocks: int = 0
    evictable: int = 0


NOTHING = FoundPrefix()


def find_slot(
    table: RequestTable, prompt_length: int, num_tokens: int | None = None, found: Sequence[FoundPrefix] = ()
) -> int:
    """The slot that a new request would get: the lowest free one of the part that `best_part` names.

    Args:
      table: of all requests.
      prompt_length: tokens of its prompt.
      num_tokens: as in `KVCacheManager.admit`.
      found: what each part has of its prompt; empty = nothing.

    Raises:
      ValueError: it could never run, since it needs more tokens than `max_context` or a part's blocks hold.
      CacheFullError: every slot is taken.
    """
    if num_tokens is not None and num_tokens < 1:
        raise ValueError(f"{num_tokens=} must be at least 1")
    needed, max_context = max(prompt_length, num_tokens or 0), table.schema.max_context
    if needed > max_context:
        raise ValueError(f"the request needs {needed} tokens, {max_context=}")
    if needed > (capacity := table.capacity):
        what = "the whole cache" if table.parts == 1 else f"each of the cache's {table.parts} parts"
        raise ValueError(
            f"the request needs {needed} tokens, {what} holds {capacity}: make it larger (memory or num_blocks)"
        )
    (slot,) = table.find_slots(1, best_part(table, needed, found))
    return slot


def best_part(table: RequestTable, num_tokens: int, found: Sequence[FoundPrefix] = ()) -> int:
    """Where a request of `num_tokens` tokens is placed: where it fits, at its longest prefix, else in the emptiest."""

    def rank(part):
        free, prefix = len(table.free_slots(part)), found[part] if found else NOTHING
        return free > 0, fits(table, part, num_tokens, prefix), prefix.blocks, free, table.room(part)

    return max(range(table.parts), key=rank)  # the first of equal ones


def fits(table: RequestTable, part: int, num_tokens: int, prefix: FoundPrefix = NOTHING) -> bool:
    """Whether a part has a slot and blocks for a new request now, beside what it has of its prompt."""
    missing = table.blocks_for(num_tokens) - prefix.blocks
    return bool(table.free_slots(part)) and missing <= table.room(part) - prefix.evictable
