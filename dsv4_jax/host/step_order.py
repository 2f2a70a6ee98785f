"""Knows which batches a cache has run, so that a batch that does not follow on them is refused before its launch.

Batches and caches are recognized by one array of theirs. So nothing is added to the pytrees, programs and their keys
stay as they are, and records vanish with the arrays. Arrays that a user's own program returned are unknown, and nothing
is checked for them; `decode.step_launch` records what the steps of this package return.
"""

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.host.request_table import NUMBERS, RequestState, RequestTable


@dataclasses.dataclass(frozen=True)
class PreparedBatch:
    """The host's record of a batch.

    Attributes:
      table: table of the manager that prepared it.
      time: time of its preparation, by the table's clock.
      slots: [n] slots of its requests.
      before: [slots] `NUMBERS` before it.
      after: [slots] `NUMBERS` after it.
    """

    table: RequestTable
    time: int
    slots: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclasses.dataclass
class CacheContents:
    """The host's record of a cache.

    Attributes:
      table: table of its manager.
      numbers: [slots] `NUMBERS` of the requests whose tokens the cache holds; zeros in other slots.
      is_complete: whether the other slots are known to be empty.
    """

    table: RequestTable
    numbers: np.ndarray
    is_complete: bool

    @classmethod
    def empty(cls, table: RequestTable, *, is_complete: bool = False) -> "CacheContents":
        """Returns the record of a cache without known requests."""
        return cls(table, np.zeros((table.schema.max_requests,), NUMBERS), is_complete)


class _Records:
    """Records by the identity of an array, which has no hash; a record lives as long as its array."""

    def __init__(self):
        self._records: dict[int, tuple[weakref.ref, Any]] = {}

    def get(self, array: Any) -> Any:
        return self._records.get(id(array), (None, None))[1]

    def put(self, array: Any, record: Any) -> None:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
            # The callback runs no Python, so that no exception from outside (Ctrl-C) can come in it.
            forget = functools.partial(self._records.pop, id(array))
            self._records[id(array)] = weakref.ref(array, forget), record


_batches = _Records()
_caches = _Records()


def record_batch(batch: Batch, prepared: PreparedBatch) -> None:
    """Records a batch that was prepared."""
    _batches.put(batch.positions, prepared)


def record_cache(cache: KVCache, contents: CacheContents) -> None:
    """Records a cache as the newest one of its manager."""
    if isinstance(lengths := cache.lengths, jax.Array):
        _caches.put(lengths, contents)
        contents.table.newest_lengths = weakref.ref(lengths)


def record_write(table: RequestTable, old: KVCache, new: KVCache, states: Mapping[int, RequestState]) -> None:
    """Commits the states of slots that a program wrote, which returned the cache `new`. Sets their times."""
    time = table.tick()
    states = {k: dataclasses.replace(s, admitted=s.admitted or time, changed=time) for k, s in states.items()}
    table.commit(states)
    _follow(table, old, new, list(states), table.states.numbers)


def record_step(old: KVCache, batch: Batch, new: KVCache) -> None:
    """Records the cache that a step returned."""
    if (prepared := _batches.get(batch.positions)) is not None:
        _follow(prepared.table, old, new, prepared.slots, prepared.after, prepared.before)


def _follow(table, old, new, slots, after, before=None):
    """Records a cache that holds what another one does, and in `slots` what the numbers `after` say."""
    contents = _caches.get(old.lengths)
    if contents is None or contents.table is not table:
        contents = CacheContents.empty(table)
    numbers = after
    if contents.numbers is not before:
        merged = contents.numbers.copy()
        merged[slots] = after[slots]
        # The same array as the table's shows `check_order` at a glance that nothing else has happened.
        numbers = after if np.array_equal(merged, after) else merged
    record_cache(new, dataclasses.replace(contents, numbers=numbers))


def check_manager(table: RequestTable, cache: KVCache, slot: int | None = None) -> None:
    """Raises ValueError if the cache is known to be another manager's, donated, or behind the manager in a slot."""
    check_not_donated(cache)
    if (contents := _caches.get(cache.lengths)) is None:
        return
    if contents.table is not table:
        raise ValueError("the cache is of another manager: take the one that this manager's init_cache made")
    if slot is not None and table.state(slot).length and _is_behind(contents, table.states.numbers, slot):
        raise ValueError(f"a batch of slot {slot} has not run on this cache. {_advice(contents, [slot])}")


def check_not_donated(cache: Any) -> None:
    """Raises RuntimeError if the arrays of a cache are deleted."""
    lengths = getattr(cache, "lengths", None)
    if isinstance(lengths, jax.Array) and not isinstance(lengths, jax.core.Tracer) and lengths.is_deleted():
        raise RuntimeError(
            "the cache was donated to an earlier step, which deleted its arrays: use the cache that this step returned "
            "(logits, cache = decode_step(model, cache, batch))"
        )


def check_order(cache: KVCache, batch: Batch) -> None:
    """Raises ValueError if the cache is known not to be in the state that the batch was prepared for."""
    prepared = _batches.get(batch.positions)
    contents = _caches.get(cache.lengths)
    if prepared is None or contents is None:
        return
    table = prepared.table
    if contents.table is not table:
        raise ValueError(
            "the batch and the cache are of two managers: prepare the batch with the manager whose init_cache made the "
            "cache"
        )
    if contents.numbers is prepared.before and table.states.numbers is prepared.after:
        return
    slots = prepared.slots
    before = prepared.before[prepared.slots]
    now = table.states.numbers[slots]
    held = contents.numbers[slots]
    if (wrong := now["admitted"] != before["admitted"]).any():
        raise ValueError(
            f"the request in slot {slots[wrong][0]} was released after the batch was prepared: drop the batch"
        )
    if (wrong := now["changed"] < prepared.time).any():
        raise ValueError(
            f"the batch's tokens of slot {slots[wrong][0]} were taken back by rewind: drop the batch and prepare them "
            "again"
        )
    if (wrong := held["changed"] >= prepared.time).any():
        raise ValueError(
            f"the cache has already run this batch, or one of slot {slots[wrong][0]} that was prepared after it: drop "
            "the batch; prepare_forward makes the next one"
        )
    if (behind := ~before["is_new"] & _is_behind(contents, prepared.before, slots)).any():
        behind = slots[behind].tolist()
        raise ValueError(
            f"the batch follows on another one of slot {behind[0]} that has not run on this cache. "
            + _advice(contents, behind)
        )


def device_state(table: RequestTable, slot: int) -> RequestState:
    """Returns the state of a request without the batches that have certainly not run.

    That is certain as long as the manager's newest cache exists, since a step would have donated it.
    """
    state = table.state(slot)
    contents = _newest(table)
    is_known = contents is None or not _is_behind(contents, table.states.numbers, slot)
    return state if contents is None or is_known else _held(contents, slot, state)


def commit(table: RequestTable, slot: int, state: RequestState) -> None:
    """Commits a state that differs from the one before in the number of tokens that the cache is taken to hold."""
    table.commit({slot: state})
    contents = _newest(table)
    if contents is not None and (held := contents.numbers[slot])["admitted"] and held["changed"] == state.changed:
        numbers = contents.numbers.copy()
        numbers[slot] = state.numbers
        contents.numbers = numbers


def _newest(table):
    """The contents of a manager's newest cache, or None if it was donated or is gone."""
    lengths = None if table.newest_lengths is None else table.newest_lengths()
    contents = None if lengths is None or lengths.is_deleted() else _caches.get(lengths)
    return contents if contents is not None and contents.table is table else None


def _is_behind(contents, numbers, slots):
    """Whether the cache is known to lack tokens that requests have by their numbers [slots]; for a slot or for [n]."""
    held = contents.numbers[slots]
    return np.where(held["admitted"] == 0, contents.is_complete, held["changed"] != numbers[slots]["changed"])


def _held(contents, slot, state):
    """The part of the request that the cache holds, with the blocks that are reserved now."""
    held = contents.numbers[slot]
    if held["admitted"] != state.admitted:
        return RequestState(blocks=state.blocks, admitted=state.admitted, weights=state.weights)
    return state.with_numbers(held)


def _advice(contents, slots):
    """Says how to go on where a cache lacks tokens of requests."""
    states = {slot: contents.table.state(slot) for slot in slots}
    calls = [f"manager.rewind({k}, {s.length - _held(contents, k, s).length})" for k, s in states.items()]
    return (
        "Batches run in the order in which they were prepared. If that one was dropped, take back the tokens of all "
        f"batches that did not run, {', '.join(calls)}, and prepare them again"
    )
