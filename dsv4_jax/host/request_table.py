"""Which request holds which slot and blocks. Plain Python; keeps no arrays."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.cache import CacheSchema
from dsv4_jax.host.allocator import BlockAllocator
from dsv4_jax.host.cache_errors import CacheFullError
from dsv4_jax.parallel.axis_rules import named_sharding
from dsv4_jax.summary import Share


MAX_BLOCKS_PER_TRANSFER = 16


@dataclasses.dataclass(frozen=True)
class RequestState:
    """What the host knows about one request. It is replaced as a whole and never changed.

    Attributes:
      length: tokens the cache holds.
      min_length: the shortest length the request can be rewound to; the rings hold no rows from further back.
      blocks: ids of the reserved blocks, in order.
      published_blocks: how many of them the device's block table holds.
      is_new: the request has been in no batch yet, so its slot still holds rows of the previous one.
      cached_blocks: the `CachedBlock`s of its full blocks that a `PrefixCache` knows, in order.
    """

    length: int = 0
    min_length: int = 0
    blocks: list[int] = dataclasses.field(default_factory=list)
    published_blocks: int = 0
    is_new: bool = True
    cached_blocks: list[Any] = dataclasses.field(default_factory=list)


class BlockEvictor(Protocol):
    """Holds blocks that no request needs and gives them up on demand, as a `PrefixCache` does."""

    def blocks(self) -> Iterable[int]:
        """The blocks it holds; each counts as one reference."""
        ...

    def reclaim(self, n_blocks: int) -> None:
        """Gives up `n_blocks` blocks that no request holds, or none if it has fewer."""
        ...

    def recount(self) -> None:
        """Rebuilds its counters from the blocks it holds and the allocator's reference counts."""
        ...


class RequestTable:
    """The state of every admitted request, and the allocator of their blocks.

    An operation either completes or raises and changes nothing. It prepares the new states, does everything that can
    fail, and then writes all states in one assignment (`commit`). The allocator's reference counts follow from the
    states and can be rebuilt from them at any time (`recount`).

    Attributes:
      schema: geometry of the cache.
      mesh: the devices that the cache lies on; None = the default device.
      allocator: owner of the blocks.
      evictor: holds blocks besides the requests and gives some up before a request is refused; None = there is none.
      states: the state of each admitted request by slot.
    """

    def __init__(self, schema: CacheSchema, mesh: Mesh | None = None):
        """A table without requests."""
        self.schema, self.mesh = schema, mesh
        self.allocator = BlockAllocator(schema.num_blocks)
        self.evictor: BlockEvictor | None = None
        self.states: dict[int, RequestState] = {}

    def state(self, slot: int) -> RequestState:
        """The state of a request; ValueError if the slot is not admitted."""
        if slot not in self.states:
            raise ValueError(f"{slot=} is not admitted; admitted slots: {sorted(self.states)}")
        return self.states[slot]

    def use(self) -> dict[str, Share]:
        """What is in use of slots and blocks, and of each request's context, for people."""
        schema = self.schema
        rows = {f"slot {slot}": (state.length, len(state.blocks)) for slot, state in sorted(self.states.items())}
        return {
            "slots": Share(len(self.states), schema.max_requests),
            "blocks": Share(schema.num_blocks - self.allocator.num_free, schema.num_blocks),
        } | {name: Share(n, schema.max_context, f"tokens in {blocks:,} blocks") for name, (n, blocks) in rows.items()}

    def commit(self, states: Mapping[int, RequestState]) -> None:
        """Writes states by slot. If they hold other blocks than before, this belongs inside a `transaction`."""
        self.states = {**self.states, **states}

    def remove(self, slots: Iterable[int]) -> None:
        """Forgets requests, inside a `transaction` that releases their blocks."""
        slots = set(slots)
        self.states = {slot: state for slot, state in self.states.items() if slot not in slots}

    def put(self, tree: Any) -> Any:
        """Arrays of the host on the devices of the cache, all of them on each, in one explicit transfer."""
        where = None if self.mesh is None else named_sharding((), self.mesh)
        if where is None or where.is_fully_addressable:
            return jax.device_put(tree, where)
        # Of several processes each brings what its devices get: `device_put` would compare all of it first.
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(where, x, np.shape(x)), tree)

    @contextlib.contextmanager
    def transaction(self, num_blocks: int = 0) -> Iterator[list[int]]:
        """Guards an operation that acquires or releases blocks: if it fails, all reference counts match the states.

        The operation transfers its arrays, launches the one program that donates the cache, and commits, in this order.
        A block that is in no state is free, so nothing has to be undone.

        Yields:
          `num_blocks` acquired blocks. If too few are free, cached ones are evicted first, for good.

        Raises:
          CacheFullError: there are not enough blocks.
        """
        lacking = num_blocks - self.allocator.num_free
        if lacking > 0 and self.evictor is not None:
            self.evictor.reclaim(lacking)
        self.allocator.check_free(num_blocks)
        try:
            yield self.allocator.acquire(num_blocks)
        except BaseException:
            self.recount()
            raise

    def recount(self) -> None:
        """Rebuilds all reference counts from the states and from what the evictor holds."""
        held, evictor = [state.blocks for state in self.states.values()], self.evictor
        self.allocator.recount(itertools.chain(*held, () if evictor is None else evictor.blocks()))
        if evictor is not None:
            evictor.recount()

    def free_slots(self, n: int = 1) -> list[int]:
        """The lowest `n` free slots; CacheFullError if fewer are free."""
        slots = [slot for slot in range(self.schema.max_requests) if slot not in self.states]
        if n > len(slots):
            raise CacheFullError(
                f"{n} slot{'s are' if n > 1 else ' is'} needed, {len(slots)} of {self.schema.max_requests} are "
                "free: release a request, or raise max_requests"
            )
        return slots[:n]

    def find_slot(self, prompt_length: int, num_tokens: int | None = None) -> int:
        """The slot that a new request would get: the lowest free one. `num_tokens` is as in `KVCacheManager.admit`.

        Raises:
          ValueError: it could never run, since it needs more tokens than `max_context` or all the blocks hold.
          CacheFullError: every slot is taken.
        """
        if num_tokens is not None and num_tokens < 1:
            raise ValueError(f"{num_tokens=} must be at least 1")
        needed, schema = max(prompt_length, num_tokens or 0), self.schema
        if needed > schema.max_context:
            raise ValueError(f"the request needs {needed} tokens, max_context={schema.max_context}")
        if needed > (capacity := schema.num_blocks * schema.block_tokens):
            raise ValueError(
                f"the request needs {needed} tokens, the whole cache holds {capacity}: make it larger "
                "(memory or num_blocks)"
            )
        return self.free_slots()[0]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.schema.block_tokens)

    def is_shared(self, blocks: Iterable[int]) -> bool:
        """Whether anybody else, a request or the evictor, holds one of a request's blocks too."""
        return any(self.allocator.references(block) > 1 for block in blocks)

    def block_table_row(self, blocks: Sequence[int]) -> np.ndarray:
        """[max_blocks] int32 row of the block table for a request's blocks; -1 = none."""
        row = np.full((self.schema.max_blocks,), -1, np.int32)
        row[: len(blocks)] = blocks
        return row

    def block_chunks(self, blocks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Splits blocks into chunks of one size, which move with one program and bounded memory on the device.

        Yields:
          (index of the first block, ids [n] int32 padded with -1), n the smaller of `MAX_BLOCKS_PER_TRANSFER` and the
          most blocks of a request.
        """
        size = min(MAX_BLOCKS_PER_TRANSFER, self.schema.max_blocks)
        for first in range(0, len(blocks), size):
            ids = np.full((size,), -1, np.int32)
            chunk = blocks[first : first + size]
            ids[: len(chunk)] = chunk
            yield first, ids
