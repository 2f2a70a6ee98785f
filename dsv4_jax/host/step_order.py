"""Knows which batches a cache has run, so that a batch that does not follow on them is refused before its launch.

A batch and a cache are known by one array of theirs, which carries the host's record as a Python attribute. So nothing
is added to the pytrees, programs and their keys stay as they are, and a record vanishes with its array. Arrays that a
user's own program returned carry none, and nothing is checked for them and for caches made from them;
`decode.step_launch` records what the steps of this package return.
"""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.host.request_table import RequestState, RequestTable


_ATTRIBUTE = "_dsv4_jax_record"


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
      numbers: [slots] `NUMBERS` of the requests whose tokens the cache is known to hold; zeros in other slots.
      is_complete: whether the other slots are known to be empty.
    """

    table: RequestTable
    numbers: np.ndarray
    is_complete: bool = False

    def is_behind(self, numbers: np.ndarray, slots: Any) -> Any:
        """Whether the cache is known to lack tokens that `numbers` count, in a slot or in each of slots [n]."""
        present = self.numbers[slots]
        return np.where(present["admitted"] == 0, self.is_complete, present["changed"] != numbers[slots]["changed"])

    def state(self, slot: int) -> RequestState:
        """Returns the part of a request that the cache holds, with the blocks that are reserved now."""
        state = self.table.state(slot)
        present = self.numbers[slot]
        if present["admitted"] == state.admitted:
            return state.with_numbers(present)
        return RequestState(blocks=state.blocks, admitted=state.admitted, weights=state.weights)

    def advice(self, slots: list[int]) -> str:
        """Says how to go on if the cache lacks tokens of requests."""
        missing = {slot: self.table.state(slot).length - self.state(slot).length for slot in slots}
        calls = ", ".join(f"manager.rewind({slot}, {count})" for slot, count in missing.items())
        return (
            "Batches run in the order in which they were prepared. If that one was dropped, take back the tokens of "
            f"all batches that did not run, {calls}, and prepare them again"
        )


def record(array: Any, contents: PreparedBatch | CacheContents) -> None:
    """Attaches a record to a concrete array, `positions` of a batch or `lengths` of a cache."""
    if _is_concrete(array):
        setattr(array, _ATTRIBUTE, contents)


def record_empty(cache: KVCache, table: RequestTable) -> None:
    """Records a cache that holds no request."""
    _record_newest(cache, CacheContents(table, np.zeros_like(table.states.numbers), is_complete=True))


def record_write(table: RequestTable, old: KVCache, new: KVCache, states: Mapping[int, RequestState]) -> None:
    """Commits the states of slots that a program wrote, which returned the cache `new`. Sets their times."""
    time = table.tick()
    states = {k: dataclasses.replace(s, admitted=s.admitted or time, changed=time) for k, s in states.items()}
    table.commit(states)
    _follow(table, old, new, list(states), table.states.numbers)


def record_step(old: KVCache, batch: Batch, new: KVCache) -> None:
    """Records the cache that a step returned."""
    if (prepared := _record_of(batch.positions)) is not None:
        _follow(prepared.table, old, new, prepared.slots, prepared.after, prepared.before)


def check_manager(table: RequestTable, cache: KVCache, slot: int | None = None) -> None:
    """Raises ValueError if the cache is known to be another manager's, donated, or behind the manager in a slot."""
    check_not_donated(cache)
    if (contents := _record_of(cache.lengths)) is None:
        return
    if contents.table is not table:
        raise ValueError("the cache is of another manager: take the one that this manager's init_cache made")
    if slot is not None and table.state(slot).length and contents.is_behind(table.states.numbers, slot):
        raise ValueError(f"a batch of slot {slot} has not run on this cache. {contents.advice([slot])}")


def check_not_donated(cache: Any) -> None:
    """Raises RuntimeError if the arrays of a cache are deleted."""
    lengths: Any = getattr(cache, "lengths", None)
    if _is_concrete(lengths) and lengths.is_deleted():
        raise RuntimeError(
            "the cache was donated to an earlier step, which deleted its arrays: use the cache that this step returned "
            "(logits, cache = decode_step(model, cache, batch))"
        )


def check_order(cache: KVCache, batch: Batch) -> None:
    """Raises ValueError if the cache is known not to be in the state that the batch was prepared for."""
    prepared = _record_of(batch.positions)
    contents = _record_of(cache.lengths)
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
    before = prepared.before[slots]
    now = table.states.numbers[slots]
    if (wrong := now["admitted"] != before["admitted"]).any():
        raise ValueError(
            f"the request in slot {slots[wrong][0]} was released after the batch was prepared: drop the batch"
        )
    if (wrong := now["changed"] < prepared.time).any():
        raise ValueError(
            f"the batch's tokens of slot {slots[wrong][0]} were taken back by rewind: drop the batch and prepare them "
            "again"
        )
    if (wrong := contents.numbers[slots]["changed"] >= prepared.time).any():
        raise ValueError(
            f"the cache has already run this batch, or one of slot {slots[wrong][0]} that was prepared after it: drop "
            "the batch; prepare_forward makes the next one"
        )
    if (wrong := ~before["is_new"] & contents.is_behind(prepared.before, slots)).any():
        behind = slots[wrong].tolist()
        raise ValueError(
            f"the batch follows on another one of slot {behind[0]} that has not run on this cache. "
            + contents.advice(behind)
        )


def device_state(table: RequestTable, slot: int) -> RequestState:
    """Returns the state of a request without the batches that have certainly not run.

    That is certain as long as the manager's newest cache exists, since a step would have donated it.
    """
    state = table.state(slot)
    contents = _newest(table)
    return state if contents is None or not contents.is_behind(table.states.numbers, slot) else contents.state(slot)


def commit_length(table: RequestTable, slot: int, state: RequestState) -> None:
    """Commits the state of a request whose length changed without a batch, in the record of its cache too."""
    table.commit({slot: state})
    contents = _newest(table)
    if contents is not None and (present := contents.numbers[slot])["admitted"] and present["changed"] == state.changed:
        numbers = contents.numbers.copy()
        numbers[slot] = table.states.numbers[slot]
        contents.numbers = numbers


def _is_concrete(array):
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)


def _record_of(array):
    """Returns the record that an array carries, or None."""
    return getattr(array, _ATTRIBUTE, None)


def _record_newest(cache, contents):
    """Records a cache as the newest one of its manager."""
    record(cache.lengths, contents)
    if isinstance(cache.lengths, jax.Array):
        contents.table.newest_lengths = weakref.ref(cache.lengths)


def _follow(table, old, new, slots, after, before=None):
    """Records a cache that holds what another one does, and in `slots` what the numbers `after` say."""
    contents = _record_of(old.lengths)
    if contents is None or contents.table is not table:
        contents = CacheContents(table, np.zeros_like(table.states.numbers))
    numbers = after
    if contents.numbers is not before:
        merged = contents.numbers.copy()
        merged[slots] = after[slots]
        # The same array as the table's shows `check_order` at a glance that nothing else has happened.
        numbers = after if np.array_equal(merged, after) else merged
    _record_newest(new, dataclasses.replace(contents, numbers=numbers))


def _newest(table):
    """Returns the contents of a manager's newest cache, or None if it was donated or is gone."""
    lengths = None if table.newest_lengths is None else table.newest_lengths()
    contents = None if lengths is None or lengths.is_deleted() else _record_of(lengths)
    return contents if contents is not None and contents.table is table else None
