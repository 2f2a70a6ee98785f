"""The prefix tree: cached blocks and the order in which they can be evicted."""

import bisect
import dataclasses
import operator
from collections.abc import Iterable

import numpy as np

from dsv4_jax.cache.request_rows import RequestRows
from dsv4_jax.host.allocator import BlockAllocator


_LAST_USED = operator.attrgetter("last_used")


@dataclasses.dataclass(eq=False)
class CachedBlock:
    """A full block of a known token sequence: a node of the prefix tree.

    Attributes:
      digest: hash of all tokens up to the block's end, and of seed, model and format; 32 bytes.
      parent: the previous block; None for the first one.
      length: number of tokens up to the block's end.
      block: id of the block; the tree holds one reference.
      last_used: time of the last use; unique.
      hits: number of requests that continued from its snapshot.
      snapshot: rows of a request's slot at the block's end; None = not kept.
      sums, snapshot_sums: [layers] uint32 checksums of block and snapshot, for the canary; None = not taken.
      alive: whether the node is still in the tree.
      in_use: whether a request holds the block.
      children: number of nodes that follow this one.
      pins: number of reasons to stay: children that must stay, plus one if the block is in use.
    """

    digest: bytes
    parent: "CachedBlock | None"
    length: int
    block: int
    last_used: int = 0
    hits: int = 0
    snapshot: RequestRows | None = None
    sums: np.ndarray | None = None
    snapshot_sums: np.ndarray | None = None
    alive: bool = True
    in_use: bool = False
    children: int = 0
    pins: int = 0


class PrefixTree:
    """Cached blocks by shard and digest, with counters of evictable blocks in least-recently-used order.

    A block can be evicted when no request holds it and no block follows it. The parent of a block that must stay has
    to stay too, even if no request holds it: requests that ran side by side have their own blocks for the same tokens.
    A block follows only blocks of its own shard, so each shard has its own tree.

    Attributes:
      nodes: {(shard, digest): node}. All counters follow from the live nodes.
      evictable: number of nodes in each shard that can be evicted one after the other.
    """

    def __init__(self, allocator: BlockAllocator):
        """Makes an empty tree that listens to the allocator's reference counts."""
        self.nodes: dict[tuple[int, bytes], CachedBlock] = {}
        self._allocator = allocator
        self._clock = 0
        self.recount()
        allocator.listener = self._listen

    def key(self, node: CachedBlock) -> tuple[int, bytes]:
        """Returns the shard and digest of a node."""
        return self._shard(node), node.digest

    def oldest(self, shards: Iterable[int]) -> CachedBlock:
        """Returns the least recently used evictable node of some shards, one of which must have one."""
        return min((self._leaves[shard][0] for shard in shards if self._leaves[shard]), key=_LAST_USED)

    def add(self, node: CachedBlock) -> None:
        """Adds a node whose parent is in the tree; the caller has added the reference to its block."""
        node.last_used = self._tick()
        self.nodes[self.key(node)] = node
        self._place(node)

    def remove(self, node: CachedBlock) -> None:
        """Removes an evictable node and drops the reference to its block."""
        node.alive = False
        del self.nodes[self.key(node)], self._by_block[node.block]
        self.evictable[self._shard(node)] -= 1
        self._remove_leaf(node)
        self._count(node.parent, children=-1)
        self._allocator.release([node.block])

    def clear(self) -> None:
        """Removes all nodes and drops the references to their blocks, which requests may hold too."""
        nodes = list(self.nodes.values())
        for node in nodes:
            node.alive = False
        self.recount()
        self._allocator.release([node.block for node in nodes])

    def touch(self, node: CachedBlock) -> None:
        """Marks a node as the most recently used."""
        if leaf := self._is_leaf(node):
            self._remove_leaf(node)
        node.last_used = self._tick()
        if leaf:
            self._leaves[self._shard(node)].append(node)

    def recount(self) -> None:
        """Rebuilds all counters from the nodes that are alive and the allocator's reference counts."""
        self.nodes = {key: node for key, node in self.nodes.items() if node.alive}
        self._by_block: dict[int, CachedBlock] = {}
        # For each shard, nodes that can be evicted now, the least recently used first.
        self._leaves: list[list[CachedBlock]] = [[] for _ in range(self._allocator.num_shards)]
        self.evictable = [0] * self._allocator.num_shards
        for node in sorted(self.nodes.values(), key=operator.attrgetter("length")):
            node.in_use = False
            node.children = 0
            node.pins = 0
            self._place(node)

    def _listen(self, blocks: Iterable[int]):
        """Updates the nodes of blocks with changed reference counts."""
        for block in blocks:
            node = self._by_block.get(block)
            if node is not None and node.in_use != (in_use := self._allocator.references(block) > 1):
                node.in_use = in_use
                self._count(node, pins=1 if in_use else -1)

    def _place(self, node):
        self._by_block[node.block] = node
        self.evictable[self._shard(node)] += 1
        self._add_leaf(node)
        self._count(node.parent, children=1)
        self._listen([node.block])

    def _count(self, node, *, pins=0, children=0):
        """Adds to a node's counters and propagates pins up to the root."""
        while node is not None:
            was_pinned = node.pins > 0
            was_leaf = self._is_leaf(node)
            node.pins += pins
            node.children += children
            is_pinned = node.pins > 0
            is_leaf = self._is_leaf(node)
            if is_leaf and not was_leaf:
                self._add_leaf(node)
            elif was_leaf and not is_leaf:
                self._remove_leaf(node)
            if is_pinned == was_pinned:
                return
            self.evictable[self._shard(node)] += was_pinned - is_pinned
            # A node that must stay pins its parent.
            node = node.parent
            pins = is_pinned - was_pinned
            children = 0

    def _add_leaf(self, node):
        bisect.insort(self._leaves[self._shard(node)], node, key=_LAST_USED)

    def _remove_leaf(self, node):
        leaves = self._leaves[self._shard(node)]
        del leaves[bisect.bisect_left(leaves, node.last_used, key=_LAST_USED)]

    def _shard(self, node):
        return self._allocator.shard(node.block)

    def _tick(self):
        self._clock += 1
        return self._clock

    def _is_leaf(self, node):
        return not node.children and not node.pins
