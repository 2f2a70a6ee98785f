"""The table of requests: their lengths and blocks by slot, and the transactions that change them."""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from dsv4_jax.cache import CacheSchema
from dsv4_jax.common.arguments import check_whole
from dsv4_jax.host.allocator import BlockAllocator, CacheFullError
from dsv4_jax.host.cache_devices import Shards
from dsv4_jax.host.prefix.prefix_tree import CachedBlock


if TYPE_CHECKING:
    from dsv4_jax.host.prefix.prefix_cache import PrefixCache


@dataclasses.dataclass(frozen=True)
class RequestState:
    """The host's immutable record of one request.

    Attributes:
      length: number of tokens that the cache holds.
      min_length: the shortest length that the request can be rewound to. To go on from a shorter length, a step would
        need rows that are overwritten in the rings, the circular buffers of the slot's newest rows.
      restored: the shortest length from which the request can go on if its rows were written to the slot; 0 if all of
        its tokens ran in the slot. Rows that only a shorter length would need were not copied.
      blocks: ids of the reserved blocks in order, all from the slot's shard.
      published_blocks: number of these blocks that the device's block table holds.
      cached_blocks: the `CachedBlock` objects of the request's first full blocks in a `PrefixCache`, in order.
      admitted: time of the request's admission, by the table's clock, see `RequestTable.tick`.
      changed: time of the newest batch or copy that wrote rows of the request, see `host.step_order`; 0 = none yet, so
        that the slot still holds rows of its previous request.
      weights: version of the weights that computed the request's first rows, see `RequestTable.weights`.
    """

    length: int = 0
    min_length: int = 0
    restored: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    published_blocks: int = 0
    cached_blocks: list[Any] = dataclasses.field(default_factory=list)
    admitted: int = dataclasses.field(default=0, compare=False)
    changed: int = dataclasses.field(default=0, compare=False)
    weights: int = 0

    @property
    def num_blocks(self) -> int:
        """The number of reserved blocks."""
        return len(self.blocks)

    def with_numbers(self, row: np.void) -> "RequestState":
        """Returns a state with the numbers of `row`, which has dtype `NUMBERS`, and with the lists of this state."""
        _, *numbers = row.item()
        return dataclasses.replace(self, **dict(zip(_NAMES[1:], numbers, strict=True)))

    def shortened(self, length: int | None, slot: int) -> "RequestState":
        """Returns the state of a copy of the request with all its tokens, or without the newest one.

        If the slot has run the newest token, the copy can run it again. The token has overwritten no row but its own,
        and it writes the same bytes there again.

        Args:
          length: number of tokens of the copy; None = all.
          slot: slot of the request, for errors.

        Raises:
          ValueError: `length` is neither the request's length nor one less, or the slot lacks rows to go on from there.
        """
        if length is None or length == self.length:
            return self
        if length != self.length - 1:
            raise ValueError(f"{length=} must be the {self.length} tokens that slot {slot} holds, or one less")
        if length < self.restored:
            raise ValueError(
                f"{length=}: the rows of slot {slot} were restored for a length of {self.restored} or more: copy all "
                f"{self.length} tokens, or run one more before"
            )
        return self.cut(length)

    def cut(self, length: int) -> "RequestState":
        """Returns the state with at most as many tokens. Below `min_length`, the rows must be restored for `length`."""
        if length >= self.min_length:
            return dataclasses.replace(self, length=length)
        return dataclasses.replace(self, length=length, min_length=length, restored=length)


# `NUMBERS` has a field for each number of a `RequestState`. One array of this dtype holds the numbers of all slots, so
# that a step changes all its requests at once. The records of batches and caches in `host.step_order` hold earlier
# versions of this array.
_NAMES = ("num_blocks", "length", "min_length", "restored", "published_blocks", "admitted", "changed", "weights")
NUMBERS = np.dtype([(name, np.int64) for name in _NAMES])


@dataclasses.dataclass(frozen=True, eq=False)
class RequestStates(Mapping[int, RequestState]):
    """The immutable mapping {slot: RequestState} of all admitted requests.

    Attributes:
      numbers: [slots] array of dtype `NUMBERS`; zeros in free slots.
      lists: {slot: (blocks, cached_blocks)} of each request, as in `RequestState`.
    """

    numbers: np.ndarray
    lists: Mapping[int, tuple[list[int], list[Any]]] = dataclasses.field(default_factory=dict)

    def __getitem__(self, slot: int) -> RequestState:
        blocks, cached_blocks = self.lists[slot]
        return RequestState(blocks=blocks, cached_blocks=cached_blocks).with_numbers(self.numbers[slot])

    def __iter__(self) -> Iterator[int]:
        return iter(self.lists)

    def __len__(self) -> int:
        return len(self.lists)

    def updated(self, states: Mapping[int, RequestState | None]) -> "RequestStates":
        """Returns a mapping in which the states of some slots are replaced or added; a state None removes the slot."""
        numbers = self.numbers.copy()
        lists = dict(self.lists)
        for slot, state in states.items():
            if state is None:
                numbers[slot] = 0
                del lists[slot]
            else:
                numbers[slot] = tuple(getattr(state, name) for name in _NAMES)
                lists[slot] = (state.blocks, state.cached_blocks)
        return RequestStates(numbers, lists)

    def replaced(self, slots: np.ndarray, numbers: np.ndarray, new_blocks: Mapping[int, list[int]]) -> "RequestStates":
        """Returns a copy in which some requests have other values of the fields in `NUMBERS`, and additional blocks.

        Args:
          slots: [n] slots of the requests.
          numbers: [n] array of dtype `NUMBERS`. Its field `num_blocks` includes the new blocks.
          new_blocks: {slot: ids of the blocks to append}.
        """
        all_numbers = self.numbers.copy()
        all_numbers[slots] = numbers
        lists = self.lists
        if new_blocks:
            longer = {slot: (lists[slot][0] + blocks, lists[slot][1]) for slot, blocks in new_blocks.items()}
            lists = {**lists, **longer}
        return RequestStates(all_numbers, lists)


class RequestTable:
    """The state of every admitted request, and the allocator of their blocks.

    An operation that raises has changed nothing: it prepares the new states, does everything that can fail, and then
    writes all states in one assignment (`commit`). The allocator's reference counts follow from the states and can be
    rebuilt from them at any time (`recount`). A request's slot and blocks are in the same shard.

    Attributes:
      schema: geometry of the cache.
      shards: the shards of the cache's slots and blocks.
      allocator: free list and reference counts of the blocks.
      evictor: the prefix cache, which evicts blocks before a request is refused; None = there is no prefix cache.
      states: the state of each admitted request by slot.
      weights: version of the model's weights, 0 at first; a prefix cache increments it when the model's weights change.
      newest_lengths: weak reference to the array `lengths` of the newest known cache, a function that returns the array
        or None; see `host.step_order`.
    """

    def __init__(self, schema: CacheSchema, shards: Shards, devices_per_shard: int = 1):
        """Makes a table without requests.

        Args:
          schema: geometry of the cache.
          shards: the shards of the cache's slots and blocks.
          devices_per_shard: number of devices over which the blocks of a shard are sharded.
        """
        self.schema = schema
        self.shards = shards
        self.allocator = BlockAllocator(schema.num_blocks, shards.count, devices_per_shard)
        self.evictor: PrefixCache | None = None
        self.states = RequestStates(np.zeros((schema.max_requests,), NUMBERS))
        self._time = 0
        self.weights = 0
        self.newest_lengths: Callable[[], jax.Array | None] = lambda: None

    def state(self, slot: int) -> RequestState:
        """Returns the state of a request.

        Raises:
          TypeError: the slot is not an integer.
          ValueError: no request is admitted to the slot.
        """
        if check_whole("slot", slot) not in self.states.lists:
            raise ValueError(f"{slot=} is not admitted; admitted slots: {sorted(self.states)}")
        return self.states[slot]

    def commit(self, states: Mapping[int, RequestState | None]) -> None:
        """Replaces the states {slot: state}; a state None ends the request. Needs a `transaction` if blocks change."""
        self.states = self.states.updated(states)

    def tick(self) -> int:
        """Advances the table's clock and returns its time. The clock counts calls of this method, from 1 on."""
        self._time += 1
        return self._time

    def admit(self, slot: int) -> None:
        """Gives a free slot to a new request without tokens."""
        self.commit({slot: RequestState(admitted=self.tick(), weights=self.weights)})

    @contextlib.contextmanager
    def transaction(self, blocks: Mapping[int, int] | None = None) -> Iterator[dict[int, list[int]]]:
        """Guards an operation that acquires or releases blocks: if it fails, all reference counts are rebuilt.

        The operation, the body of the `with` statement, transfers its arrays, then launches the one program that
        donates the cache, and then commits the new states. If it fails before `commit`, no state lists the acquired
        blocks, so `recount` frees them again.

        Args:
          blocks: {slot: number of blocks to acquire for it}; None = no blocks.

        Yields:
          {slot: ids of the acquired blocks}. If too few blocks are free, blocks of the prefix cache are evicted first.

        Raises:
          CacheFullError: too few blocks of a shard are free or evictable.
        """
        blocks = blocks or {}
        needed = collections.Counter[int]()
        for slot, count in blocks.items():
            needed[self.shards.of(slot)] += count
        # Blocks are evicted only if all shards have room.
        for shard, count in needed.items():
            if self.room(shard) < count:
                self.allocator.check_free(count, shard)
        for shard, count in needed.items():
            if self.evictor is not None and (lacking := count - self.allocator.free_in(shard)) > 0:
                self.evictor.reclaim(lacking, [shard])
        try:
            acquired = {}
            for slot, count in blocks.items():
                acquired[slot] = self.allocator.acquire(count, self.shards.of(slot))
            yield acquired
        except BaseException:
            self.recount()
            raise

    def recount(self) -> None:
        """Rebuilds all reference counts from the states and from the prefix cache's blocks."""
        owned = [blocks for blocks, _ in self.states.lists.values()]
        evictor = self.evictor
        self.allocator.recount(itertools.chain(*owned, () if evictor is None else evictor.blocks()))
        if evictor is not None:
            evictor.recount()

    # --- room for requests ---

    def free_slots(self, shard: int) -> list[int]:
        """Returns the free slots of a shard in ascending order."""
        begin = shard * self.shards.slots
        return [slot for slot in range(begin, begin + self.shards.slots) if slot not in self.states.lists]

    def find_slots(self, n: int, shard: int) -> list[int]:
        """Returns the lowest `n` free slots of a shard; raises CacheFullError if fewer are free."""
        if n > len(slots := self.free_slots(shard)):
            raise CacheFullError(
                f"{n} slots are needed, {len(slots)} of {self.shards.slots} are free{self.shards.where(shard)}: "
                "release a request, or raise max_requests"
            )
        return slots[:n]

    def find_slot(self, num_tokens: int, paths: Sequence[Sequence[CachedBlock]] = ()) -> int:
        """Returns the slot for a new request: the lowest free slot in the best shard.

        The best shard is found by these criteria. Each one decides only if the criteria before it leave a tie.

        1. The shard has a free slot.
        2. It has enough blocks for the request.
        3. It has the longest cached prefix of the prompt.
        4. It has the most free slots.
        5. It has the most free or evictable blocks.

        Args:
          num_tokens: number of tokens that the request will hold in the end.
          paths: for each shard, the nodes of the prompt's cached prefix; empty = no prefix is cached.

        Raises:
          CacheFullError: every slot is taken.
        """

        def rank(shard):
            """Returns the criteria of a shard, in the order in which they decide."""
            num_free = len(self.free_slots(shard))
            path = paths[shard] if paths else ()
            return num_free > 0, self.fits(shard, num_tokens, path), len(path), num_free, self.room(shard)

        best_shard = max(range(self.shards.count), key=rank)  # the first one if several are equally good
        return self.find_slots(1, best_shard)[0]

    def fits(self, shard: int, num_tokens: int, path: Sequence[CachedBlock]) -> bool:
        """Returns whether a shard has a slot and enough blocks for a new request.

        Args:
          shard: index of the shard.
          num_tokens: number of tokens that the request needs room for.
          path: nodes of the cached prefix of its prompt in the shard. The request shares the blocks of this prefix.
        """
        return bool(self.free_slots(shard)) and self.blocks_for(num_tokens) <= len(path) + self.room(shard, path)

    def room(self, shard: int, path: Sequence[CachedBlock] = ()) -> int:
        """Returns the number of free or evictable blocks in a shard, without the blocks of the nodes `path`."""
        evictable = 0 if self.evictor is None else self.evictor.evictable_in(shard)
        return self.allocator.free_in(shard) + evictable - sum(not node.in_use for node in path)

    def blocks_for(self, num_tokens: Any) -> Any:
        """Returns the number of blocks that a request of `num_tokens` tokens needs; both may be arrays."""
        return -(-num_tokens // self.schema.block_tokens)

    def is_shared(self, blocks: Iterable[int]) -> bool:
        """Returns whether any of these blocks, which a request owns, has another owner too."""
        return any(self.allocator.references(block) > 1 for block in blocks)
