"""A free list of blocks with a reference count for each block."""

import collections
from collections.abc import Callable, Iterable, Sequence

from dsv4_jax.common.arguments import check_whole


class CacheFullError(ValueError):
    """An operation needs more slots or blocks than are free; the message gives both numbers. Nothing was changed.

    The operation can succeed after another request is released, so a scheduler catches this error and waits.
    """


class BlockAllocator:
    """Hands out the block ids 0 .. num_blocks - 1 and counts the owners of each block.

    Each shard owns an equal, contiguous range of ids. If a shard has several devices, each device owns an equal,
    contiguous range of the shard's ids. A new allocator hands out blocks of all devices of a shard in rotation.

    A block's reference count is the number of its owners, 0 for a free block. A method with bad arguments raises and
    changes nothing. If an exception interrupts a method, `recount` rebuilds the counts from the owners' lists of
    blocks.

    Attributes:
      num_blocks: number of blocks, free or not, in all shards.
      num_shards: number of shards.
      listener: function that `share` and `release` call with the ids of the blocks whose reference counts they changed;
        it does nothing at first.
    """

    def __init__(self, num_blocks: int, num_shards: int = 1, devices: int = 1):
        """Makes an allocator whose blocks are all free.

        Args:
          num_blocks: number of blocks in all shards.
          num_shards: number of shards.
          devices: number of devices in each shard.

        Raises:
          ValueError: `num_blocks` is not a positive multiple of `num_shards * devices`.
        """
        if num_blocks < 1 or num_blocks % (num_shards * devices):
            raise ValueError(f"{num_blocks=} must be at least 1, and a multiple of {num_shards * devices}")
        self.num_blocks = num_blocks
        self.num_shards = num_shards
        self._references = [0] * num_blocks
        # Each shard has a stack of free blocks, so the most recently freed block is handed out next. A new stack yields
        # the first block of each device, then the second block of each, and so on; with one device per shard 0, 1, ...
        per_device = num_blocks // (num_shards * devices)
        order = sorted(range(num_blocks), key=lambda block: (block % per_device, block), reverse=True)
        self._free = self._by_shard(order)
        self.listener: Callable[[Sequence[int]], None] = lambda blocks: None

    @property
    def num_free(self) -> int:
        """The number of free blocks in all shards."""
        return sum(map(len, self._free))

    def shard(self, block: int) -> int:
        """Returns the shard of a block."""
        return block // (self.num_blocks // self.num_shards)

    def free_in(self, shard: int) -> int:
        """Returns the number of free blocks in a shard."""
        return len(self._free[shard])

    def acquire(self, n: int, shard: int = 0) -> list[int]:
        """Takes `n` free blocks of a shard, gives each of them one reference, and returns their ids.

        Raises:
          ValueError: `n` is negative.
          CacheFullError: fewer than `n` blocks of the shard are free.
        """
        check_whole("n", n, 0)
        self.check_free(n, shard)
        blocks = [self._free[shard].pop() for _ in range(n)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def check_free(self, n: int, shard: int = 0) -> None:
        """Raises CacheFullError if fewer than `n` blocks of a shard are free."""
        if n > (free := self.free_in(shard)):
            where = "" if self.num_shards == 1 else f" in shard {shard} of {self.num_shards}"
            raise CacheFullError(
                f"{n} blocks are needed, {free} of {self.num_blocks // self.num_shards} are free{where}: release a "
                "request, or make the cache larger (memory or num_blocks)"
            )

    def share(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each block; a block that is listed twice gets two.

        Raises:
          ValueError: an id is unknown or its block is free.
        """
        for block in blocks:
            if not self.references(block):
                raise ValueError(f"block {block} is free: it was released before or never acquired")
        for block in blocks:
            self._references[block] += 1
        self.listener(blocks)

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one reference to each block; a block that is listed twice loses two.

        A block becomes free when its last reference is dropped.

        Raises:
          ValueError: an id is unknown, or its block is released more often than it is held.
        """
        drops = collections.Counter(blocks)
        for block, count in drops.items():
            if count > (references := self.references(block)):
                raise ValueError(f"block {block} is released {count} times but has {references} references")
        for block, count in drops.items():
            self._references[block] -= count
            if not self._references[block]:
                self._free[self.shard(block)].append(block)
        self.listener(list(drops))

    def references(self, block: int) -> int:
        """Returns the number of owners of a block; 0 = free.

        Raises:
          ValueError: the id is unknown.
        """
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"{block=} is unknown: ids go from 0 to {self.num_blocks - 1}")
        return self._references[block]

    def state(self) -> tuple[list[int], list[int]]:
        """Returns copies of (free blocks, reference counts of all blocks)."""
        return [block for free in self._free for block in free], list(self._references)

    def recount(self, owned: Iterable[int]) -> None:
        """Rebuilds all counts from `owned`, which lists each block once for each owner. Does not call the listener."""
        references = [0] * self.num_blocks
        for block in owned:
            references[block] += 1
        # Blocks that become free go on top of the stack. Of these, the lowest id is handed out first.
        free = dict.fromkeys([*self.state()[0], *range(self.num_blocks - 1, -1, -1)])
        self._free = self._by_shard(block for block in free if not references[block])
        self._references = references

    def _by_shard(self, blocks):
        shards: list[list[int]] = [[] for _ in range(self.num_shards)]
        for block in blocks:
            shards[self.shard(block)].append(block)
        return shards
