"""Records which batches a cache has run, so that a step out of order is refused before its launch.

Batches have to run in the order in which they were prepared, each on the cache that has run the preceding batches. The
host keeps a record of each batch and of each cache to check this. A record is a Python attribute of one array,
`Batch.positions` or `KVCache.lengths`. Records therefore change neither pytrees nor compiled programs, and a record
vanishes with its array.

`decode.step_launch` records the caches that the steps of this package return. An array that a user's program returned
carries no record, so the batch or cache that contains the array is not checked. If a step runs a batch without a
record, the returned cache has no record either. If a step runs on a cache without a record, the record of the returned
cache covers only the step's requests.
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
      table: table of the manager that prepared the batch.
      time: time of the preparation, by the table's clock.
      slots: [n] slots of the batch's requests.
      before: [slots] array of dtype `NUMBERS`, the states of all requests before the batch.
      after: [slots] array of dtype `NUMBERS`, the states of all requests after the batch.
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
      table: table of the cache's manager.
      numbers: [slots] array of dtype `NUMBERS`: the states of the requests whose tokens the cache is known to hold, and
        zeros in other slots.
      is_complete: whether the other slots are known to be empty.
      origin: time, by the table's clock, at which the empty cache was made that this cache comes from; 0 = not known.
    """

    table: RequestTable
    numbers: np.ndarray
    is_complete: bool = False
    origin: int = 0

    def is_behind(self, numbers: np.ndarray, slots: Any) -> Any:
        """Returns whether the cache is known to lack tokens of requests that have tokens.

        Args:
          numbers: [slots] array of dtype `NUMBERS`, the states of the requests with all of their tokens.
          slots: slot of a request, or [n] slots.

        Returns:
          Boolean array of the shape of `slots`.
        """
        present = self.numbers[slots]
        return np.where(present["admitted"] == 0, self.is_complete, present["changed"] != numbers[slots]["changed"])

    def state(self, slot: int) -> RequestState:
        """Returns the state that a request has in this cache, with the blocks that the table reserves for the request.

        If the cache holds no token of the request, the state has length 0.
        """
        state = self.table.state(slot)
        present = self.numbers[slot]
        if present["admitted"] == state.admitted:
            return state.with_numbers(present)
        return RequestState(blocks=state.blocks, admitted=state.admitted, weights=state.weights)

    def advice(self, slots: list[int]) -> str:
        """Returns text for an error that says how to go on if the cache lacks tokens of the requests in `slots`."""
        missing = {slot: self.table.state(slot).length - self.state(slot).length for slot in slots}
        calls = ", ".join(f"manager.rewind({slot}, {count})" for slot, count in missing.items())
        return (
            "Batches run in the order in which they were prepared. If that one was dropped, take back the tokens of "
            f"all batches that did not run, {calls}, and prepare them again"
        )


def record(array: Any, contents: PreparedBatch | CacheContents) -> None:
    """Attaches a record to an array, `positions` of a batch or `lengths` of a cache. Does nothing for a tracer."""
    if _is_concrete(array):
        setattr(array, _ATTRIBUTE, contents)


def record_empty(cache: KVCache, table: RequestTable) -> None:
    """Records a cache that holds no request."""
    empty = np.zeros_like(table.states.numbers)
    _record_newest(cache, CacheContents(table, empty, is_complete=True, origin=table.tick()))


def origin(cache: KVCache) -> int:
    """Returns the `origin` in a cache's record, equal for all caches that come from one empty cache; 0 = no record."""
    contents = _record_of(cache.lengths)
    return 0 if contents is None else contents.origin


def record_write(table: RequestTable, old: KVCache, new: KVCache, states: Mapping[int, RequestState]) -> None:
    """Commits the states of requests that a program wrote to the cache, and records the cache that the program made.

    The program has written the requests' rows of the block table, so all blocks of `states` count as published. The
    requests' `changed` becomes a new time of the table's clock, and so does `admitted` if it is 0.

    Args:
      table: table of the cache's manager.
      old: the cache that the program got.
      new: the cache that the program returned.
      states: {slot: state} of the written requests.
    """
    time = table.tick()
    written = {
        slot: dataclasses.replace(
            state, published_blocks=len(state.blocks), admitted=state.admitted or time, changed=time
        )
        for slot, state in states.items()
    }
    table.commit(written)
    _follow(table, old, new, list(states), table.states.numbers)


def record_step(old: KVCache, batch: Batch, new: KVCache) -> None:
    """Records the cache `new` that a step returned for the cache `old`. Does nothing if the batch has no record."""
    if (prepared := _record_of(batch.positions)) is not None:
        _follow(prepared.table, old, new, prepared.slots, prepared.after, prepared.before)


def check_manager(table: RequestTable, cache: KVCache, slot: int | None = None) -> None:
    """Checks that a cache was not donated, and that according to its record a manager can use it.

    Args:
      table: table of the manager.
      cache: the cache.
      slot: slot of the request whose tokens the cache must hold; None = no request.

    Raises:
      RuntimeError: the cache was donated.
      ValueError: by its record, the cache belongs to another manager, or lacks tokens of the request. A slot that is
        not admitted is also refused, but only if the cache has a record.
    """
    check_not_donated(cache)
    if (contents := _record_of(cache.lengths)) is None:
        return
    if contents.table is not table:
        raise ValueError("the cache is of another manager: take the one that this manager's init_cache made")
    if slot is not None and table.state(slot).length and contents.is_behind(table.states.numbers, slot):
        raise ValueError(f"a batch of slot {slot} has not run on this cache. {contents.advice([slot])}")


def check_not_donated(cache: KVCache) -> None:
    """Raises RuntimeError if the arrays of a cache are deleted, because an earlier step donated them."""
    if _is_concrete(cache.lengths) and cache.lengths.is_deleted():
        raise RuntimeError(
            "the cache was donated to an earlier step, which deleted its arrays: use the cache that this step returned "
            "(logits, cache = decode_step(model, cache, batch))"
        )


def check_order(cache: KVCache, batch: Batch) -> None:
    """Raises ValueError if the records show that the batch was prepared for another state of the cache."""
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
    is_wrong = {
        "the request in slot {} was released after the batch was prepared: drop the batch": (
            now["admitted"] != before["admitted"]
        ),
        "the batch's tokens of slot {} were taken back by rewind: drop the batch and prepare them again": (
            now["changed"] < prepared.time
        ),
        "the cache has already run this batch, or one of slot {} that was prepared after it: drop the batch; "
        "prepare_forward makes the next one": contents.numbers[slots]["changed"] >= prepared.time,
    }
    for reason, wrong in is_wrong.items():
        if wrong.any():
            raise ValueError(reason.format(slots[wrong][0]))
    if (wrong := (before["changed"] > 0) & contents.is_behind(prepared.before, slots)).any():
        behind = slots[wrong].tolist()
        raise ValueError(
            f"the batch follows on another one of slot {behind[0]} that has not run on this cache. "
            + contents.advice(behind)
        )


def device_state(table: RequestTable, slot: int) -> RequestState:
    """Returns the state of a request without the tokens of batches that have certainly not run.

    A step donates its cache. So if the manager's newest cache still exists, the batches that are missing in its record
    have not run. If that cache was donated or freed, all of the request's batches count as run.
    """
    state = table.state(slot)
    contents = _newest(table)
    return state if contents is None or not contents.is_behind(table.states.numbers, slot) else contents.state(slot)


def commit_length(table: RequestTable, slot: int, state: RequestState) -> None:
    """Commits the state of a request whose length changed without a batch, for instance by `rewind`.

    If the newest cache holds all of the request's batches, the record of this cache gets the new numbers too.
    """
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
    """Attaches `contents` to a cache and notes it as its manager's newest cache."""
    record(cache.lengths, contents)
    if isinstance(cache.lengths, jax.Array):
        contents.table.newest_lengths = weakref.ref(cache.lengths)


def _follow(table, old, new, slots, after, before=None):
    """Records the cache `new` that a program made from the cache `old` by writing some slots.

    If `old` has no record of this manager, the record covers only the written slots.

    Args:
      table: table of the manager.
      old: the cache that the program got.
      new: the cache that the program returned.
      slots: the written slots.
      after: [slots of the cache] array of dtype `NUMBERS`, the states after the program. It becomes the new record if
        the record of `old` is the very array `before`. Otherwise only the entries of the written slots are used.
      before: array of the same shape and dtype, the states before the program, from which `after` was made; or None.
    """
    contents = _record_of(old.lengths)
    if contents is None or contents.table is not table:
        contents = CacheContents(table, np.zeros_like(table.states.numbers))
    numbers = after
    if contents.numbers is not before:
        merged = contents.numbers.copy()
        merged[slots] = after[slots]
        # If possible, the record holds the very array of the table, because `check_order` first compares by identity.
        numbers = after if np.array_equal(merged, after) else merged
    _record_newest(new, dataclasses.replace(contents, numbers=numbers))


def _newest(table):
    """Returns the record of a manager's newest cache; None if there is no record, or the cache was donated or freed."""
    lengths = table.newest_lengths()
    return None if lengths is None or lengths.is_deleted() else _record_of(lengths)
