"""The table of requests with their slots and blocks, and transfers between the host and the devices of the cache."""

import collections
import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.cache import CacheSchema
from dsv4_jax.common.arguments import check_whole
from dsv4_jax.common.mesh_axes import DATA_AXIS, MODEL_AXIS
from dsv4_jax.common.summary import Share
from dsv4_jax.host.allocator import BlockAllocator
from dsv4_jax.host.cache_errors import CacheFullError
from dsv4_jax.parallel.axis_rules import named_sharding


MAX_BLOCKS_PER_TRANSFER = 16


# The numbers of a request, kept in one array for all slots, so that a step changes those of all its requests at once.
NUMBERS = np.dtype(
    [(name, np.int64) for name in ("length", "min_length", "num_blocks", "published_blocks", "admitted", "changed")]
    + [("weights", np.int64), ("is_new", np.bool_)]
)


@dataclasses.dataclass(frozen=True)
class RequestState:
    """The host's immutable record of one request.

    Attributes:
      length: number of tokens that the cache holds.
      min_length: the shortest length the request can be rewound to; the rings hold no rows from further back.
      blocks: ids of the reserved blocks in order, all from the slot's shard.
      published_blocks: number of these blocks that the device's block table holds.
      is_new: the request has not been in a batch yet, so its slot still holds rows of the previous request.
      cached_blocks: the `CachedBlock`s of its full blocks in a `PrefixCache`, in order.
      admitted: time of its admission, by the table's clock, which begins at 1.
      changed: time of the last batch or copy that wrote its rows; see `host.step_order`.
      weights: version of the weights that its first rows come from, see `RequestTable.weights`.
    """

    length: int = 0
    min_length: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    published_blocks: int = 0
    is_new: bool = True
    cached_blocks: list[Any] = dataclasses.field(default_factory=list)
    admitted: int = dataclasses.field(default=0, compare=False)
    changed: int = dataclasses.field(default=0, compare=False)
    weights: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The row of `NUMBERS`."""
        numbers = self.length, self.min_length, len(self.blocks), self.published_blocks, self.admitted, self.changed
        return *numbers, self.weights, self.is_new

    def with_numbers(self, row: np.void) -> "RequestState":
        """Returns the state with the numbers of a row of `NUMBERS`; its lists stay."""
        numbers = dict(zip(row.dtype.names or (), row.item(), strict=True))
        del numbers["num_blocks"]
        return dataclasses.replace(self, **numbers)

    def shortened(self, length: int | None, slot: int) -> "RequestState":
        """Returns the state of a copy with `length` tokens, all (None) or all but the last one, which must run again.

        To run the same token again is always possible: it writes the bytes that are there, and its own row is the only
        one that it has overwritten.
        """
        if length is None or length == self.length:
            return self
        if length != self.length - 1:
            raise ValueError(f"{length=} must be the {self.length} tokens that slot {slot} holds, or one less")
        return dataclasses.replace(self, length=length, min_length=min(self.min_length, length))


@dataclasses.dataclass(frozen=True, eq=False)
class RequestStates(Mapping[int, RequestState]):
    """The state of each admitted request by slot. Immutable: each method returns other states.

    Attributes:
      numbers: [slots] `NUMBERS`; zeros in free slots.
      lists: (blocks, cached_blocks) of each request by slot, as in `RequestState`.
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

    def updated(self, states: Mapping[int, RequestState]) -> "RequestStates":
        """Replaces the states of some slots, or adds them."""
        numbers = self.numbers.copy()
        lists = dict(self.lists)
        for slot, state in states.items():
            numbers[slot] = state.numbers
            lists[slot] = (state.blocks, state.cached_blocks)
        return RequestStates(numbers, lists)

    def without(self, slots: Iterable[int]) -> "RequestStates":
        """Removes some slots."""
        numbers = self.numbers.copy()
        slots = set(slots)
        numbers[list(slots)] = 0
        return RequestStates(numbers, {slot: lists for slot, lists in self.lists.items() if slot not in slots})

    def replaced(self, slots: np.ndarray, numbers: np.ndarray, new_blocks: Mapping[int, list[int]]) -> "RequestStates":
        """Replaces the numbers [n] of `slots` [n], and appends blocks by slot, which these numbers count already."""
        all_numbers = self.numbers.copy()
        lists = self.lists
        all_numbers[slots] = numbers
        if new_blocks:
            longer = {slot: (lists[slot][0] + blocks, lists[slot][1]) for slot, blocks in new_blocks.items()}
            lists = {**lists, **longer}
        return RequestStates(all_numbers, lists)


def extended(numbers: np.ndarray, counts: np.ndarray, schema: CacheSchema) -> np.ndarray:
    """Returns `numbers` [n] after `counts` [n] more tokens."""
    numbers = numbers.copy()
    numbers["length"] += counts
    longest_rewind = schema.max_query_tokens - 1
    numbers["min_length"] = np.maximum(numbers["min_length"], numbers["length"] - longest_rewind)
    return numbers


class BlockEvictor(Protocol):
    """Holds blocks that no request needs and gives them up on demand, as a `PrefixCache` does."""

    def blocks(self) -> Iterable[int]:
        """Returns the blocks that the evictor holds; each counts as one reference."""
        ...

    def evictable_in(self, shard: int) -> int:
        """Returns the number of blocks in a shard that the evictor could give up."""
        ...

    def reclaim(self, n_blocks: int, shard: int) -> None:
        """Gives up `n_blocks` blocks of a shard; at least that many must be evictable."""
        ...

    def recount(self) -> None:
        """Rebuilds the evictor's counters from its blocks and the allocator's reference counts."""
        ...

    def clear(self) -> None:
        """Gives up all blocks."""
        ...


def count_shards(mesh: Mesh | None) -> int:
    """Returns the number of shards of slots and blocks on a mesh."""
    return 1 if mesh is None else mesh.shape.get(DATA_AXIS, 1)


class RequestTable:
    """The state of every admitted request, and the allocator of their blocks.

    An operation either completes or raises and changes nothing. It prepares the new states, does everything that can
    fail, and then writes all states in one assignment (`commit`). The allocator's reference counts follow from the
    states and can be rebuilt from them at any time (`recount`).

    The mesh axis "data" shards slots and blocks. Ids are global on the host: shard 1 continues where shard 0 ends.
    Steps and block tables use local ids, which begin at 0 in each shard. A request lives in one shard.

    Attributes:
      schema: geometry of the cache.
      mesh: devices that hold the cache; None = the default device.
      num_shards: number of shards; 1 without the axis "data".
      slots_per_shard: number of slots in a shard.
      allocator: owner of the blocks.
      evictor: another holder of blocks, which gives some up before a request is refused; None = no such holder.
      states: the state of each admitted request by slot.
      weights: version of the model's weights; a prefix cache raises it when the model gets others.
      newest_lengths: weak reference to `lengths` of the newest known cache, or None; see `host.step_order`.
    """

    def __init__(self, schema: CacheSchema, mesh: Mesh | None = None):
        """Makes a table without requests."""
        self.schema = schema
        self.mesh = mesh
        self.num_shards = count_shards(mesh)
        self.slots_per_shard = schema.max_requests // self.num_shards
        devices = mesh.shape.get(MODEL_AXIS, 1) if mesh is not None and schema.context_parallel else 1
        self.allocator = BlockAllocator(schema.num_blocks, self.num_shards, devices)
        self.evictor: BlockEvictor | None = None
        self.states = RequestStates(np.zeros((schema.max_requests,), NUMBERS))
        self._kept: dict[tuple, tuple[np.ndarray, Any]] = {}
        self._time = self.weights = 0
        self.newest_lengths: weakref.ref[jax.Array] | None = None

    def state(self, slot: int) -> RequestState:
        """Returns the state of a request; raises TypeError or ValueError if the slot is not one that is admitted."""
        if check_whole("slot", slot) not in self.states.lists:
            raise ValueError(f"{slot=} is not admitted; admitted slots: {sorted(self.states)}")
        return self.states[slot]

    def use(self) -> dict[str, Share]:
        """Returns the use of slots, blocks and each request's context, for a repr."""
        schema = self.schema
        rows = {f"slot {slot}": (state.length, len(state.blocks)) for slot, state in sorted(self.states.items())}
        return {
            "slots": Share(len(self.states), schema.max_requests),
            "blocks": Share(schema.num_blocks - self.allocator.num_free, schema.num_blocks),
        } | {name: Share(n, schema.max_context, f"tokens in {blocks:,} blocks") for name, (n, blocks) in rows.items()}

    def commit(self, states: Mapping[int, RequestState]) -> None:
        """Writes states by slot. A change of their blocks belongs inside a `transaction`."""
        self.states = self.states.updated(states)

    def tick(self) -> int:
        """Returns a new time of the table's clock."""
        self._time += 1
        return self._time

    def admit(self, slot: int) -> None:
        """Gives a free slot to a new request without tokens."""
        self.commit({slot: RequestState(admitted=self.tick(), weights=self.weights)})

    def remove(self, slots: Iterable[int]) -> None:
        """Forgets requests, inside a `transaction` that releases their blocks."""
        self.states = self.states.without(slots)

    def put(self, tree: Any, axis: str | None = None) -> Any:
        """Puts arrays of the host on the devices of the cache, in one explicit transfer.

        Args:
          tree: NumPy arrays.
          axis: logical axis of axis 0, as in `axis_rules.RULES`. With None, each device holds all; scalars always do.
        """
        if self.mesh is None:
            return jax.device_put(tree)
        mesh = self.mesh
        where = jax.tree.map(lambda x: named_sharding((axis,) if np.ndim(x) else (), mesh), tree)
        if mesh.is_multi_process:
            # Each process supplies its own devices' data: `device_put` would compare the whole array first.
            return jax.tree.map(
                lambda x, s: jax.make_array_from_callback(np.shape(x), s, lambda at: x[at]), tree, where
            )
        return jax.device_put(tree, where)

    def put_changed(self, arrays: Mapping[str, np.ndarray], axis: str | None = None) -> dict[str, Any]:
        """Puts arrays as `put` does, except those that equal the last ones of their names and shapes.

        Args:
          arrays: NumPy arrays by name, which must not change later.
          axis: as for `put`.
        """
        keys = {name: (name, np.shape(x), axis) for name, x in arrays.items()}
        changed = {name: x for name, x in arrays.items() if not self._is_kept(keys[name], x)}
        if changed:
            new = self.put(changed, axis)
            self._kept |= {keys[name]: (changed[name], new[name]) for name in changed}
        return {name: self._kept[key][1] for name, key in keys.items()}

    def _is_kept(self, key, array):
        """Whether the devices have an array already."""
        if key not in self._kept:
            return False
        kept, on_device = self._kept[key]
        return not on_device.is_deleted() and (kept is array or kept.tobytes() == array.tobytes())

    def get(self, tree: Any) -> Any:
        """Copies the results of a step to the host."""
        return jax.device_get(self.begin_get(tree))

    def begin_get(self, tree: Any) -> Any:
        """Begins to copy the results of a step to the host, for a later `get` of the result."""
        if self.mesh is not None and self.mesh.is_multi_process:
            tree = jax.reshard(tree, named_sharding((), self.mesh))
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):  # a step of a test may return NumPy arrays
                leaf.copy_to_host_async()
        return tree

    @contextlib.contextmanager
    def transaction(self, blocks: Mapping[int, int] | None = None) -> Iterator[dict[int, list[int]]]:
        """Guards an operation that acquires or releases blocks: if it fails, all reference counts match the states.

        The operation transfers its arrays, launches the one program that donates the cache, and commits, in this order.
        A block that no state lists is free, so nothing has to be undone.

        Args:
          blocks: number of blocks to acquire for each slot.

        Yields:
          {slot: acquired blocks}. If too few blocks are free, cached ones are evicted first.

        Raises:
          CacheFullError: there are not enough blocks.
        """
        blocks = blocks or {}
        needed = collections.Counter[int]()
        for slot, count in blocks.items():
            needed[self.shard(slot)] += count
        for shard, count in needed.items():
            if self.room(shard) < count:
                self.allocator.check_free(count, shard)
        for shard, count in needed.items():
            if self.evictor is not None and (lacking := count - self.allocator.free_in(shard)) > 0:
                self.evictor.reclaim(lacking, shard)
        try:
            acquired = {}
            for slot, count in blocks.items():
                acquired[slot] = self.allocator.acquire(count, self.shard(slot))
            yield acquired
        except BaseException:
            self.recount()
            raise

    def recount(self) -> None:
        """Rebuilds all reference counts from the states and from the evictor's blocks."""
        held = [blocks for blocks, _ in self.states.lists.values()]
        evictor = self.evictor
        self.allocator.recount(itertools.chain(*held, () if evictor is None else evictor.blocks()))
        if evictor is not None:
            evictor.recount()

    def shard(self, slot: int) -> int:
        """Returns the shard of a slot."""
        return slot // self.slots_per_shard

    def free_slots(self, shard: int) -> list[int]:
        """Returns the free slots of a shard in ascending order."""
        first = shard * self.slots_per_shard
        return [slot for slot in range(first, first + self.slots_per_shard) if slot not in self.states.lists]

    def find_slots(self, n: int, shard: int) -> list[int]:
        """Returns the lowest `n` free slots of a shard; raises CacheFullError if fewer are free."""
        if n > len(slots := self.free_slots(shard)):
            where = "" if self.num_shards == 1 else f" in shard {shard} of {self.num_shards}"
            raise CacheFullError(
                f"{n} slot{'s are' if n > 1 else ' is'} needed, {len(slots)} of {self.slots_per_shard} are "
                f"free{where}: release a request, or raise max_requests"
            )
        return slots[:n]

    def room(self, shard: int) -> int:
        """Returns the number of blocks in a shard that are free or evictable."""
        return self.allocator.free_in(shard) + (0 if self.evictor is None else self.evictor.evictable_in(shard))

    @property
    def capacity(self) -> int:
        """The number of tokens that the blocks of one shard hold."""
        return self.schema.num_blocks // self.num_shards * self.schema.block_tokens

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.schema.block_tokens)

    def missing_blocks(self, slots: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Returns the [n] blocks that requests in `slots` [n] must acquire to hold `counts` [n] more tokens."""
        now = self.states.numbers[slots]
        max_context = self.schema.max_context
        lengths = now["length"] + counts
        for i in np.flatnonzero(lengths > max_context):
            raise ValueError(
                f"slot {slots[i]} holds {now['length'][i]} tokens and cannot take {counts[i]} more: {max_context=}"
            )
        return np.maximum(0, -(-lengths // self.schema.block_tokens) - now["num_blocks"])

    def is_shared(self, blocks: Iterable[int]) -> bool:
        """Whether one of a request's blocks has another owner too."""
        return any(self.allocator.references(block) > 1 for block in blocks)

    def block_table_row(self, blocks: Sequence[int]) -> np.ndarray:
        """Returns a request's row of the block table, [max_blocks] int32; -1 = none."""
        row = np.full((self.schema.max_blocks,), -1, np.int32)
        row[: len(blocks)] = [self.local_block(block) for block in blocks]
        return row

    def local_block(self, block: int) -> int:
        """Returns the id of a block within its shard."""
        return block % (self.schema.num_blocks // self.num_shards)

    def block_chunks(self, blocks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Splits blocks into chunks of one size, so that one program moves them with bounded device memory.

        Yields:
          (index of the first block, ids [n] int32 padded with -1), where n is at most `MAX_BLOCKS_PER_TRANSFER`.
        """
        size = min(MAX_BLOCKS_PER_TRANSFER, self.schema.max_blocks)
        for first in range(0, len(blocks), size):
            ids = np.full((size,), -1, np.int32)
            chunk = blocks[first : first + size]
            ids[: len(chunk)] = chunk
            yield first, ids
