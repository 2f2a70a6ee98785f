"""The prefix tree of a `PrefixCache`: its cached blocks, and the order in which they are evicted."""

import collections
import dataclasses
import operator
from collections.abc import Iterable, Sequence

from dsv4_jax.cache import RequestRows
from dsv4_jax.host.allocator import BlockAllocator


_LAST_USED = operator.attrgetter("last_used")


@dataclasses.dataclass(eq=False)
class CachedBlock:
    """A full block of a known token sequence: a node of the prefix tree.

    Attributes:
      digest: 32-byte hash of all tokens up to the block's end, and of seed, model and format.
      length: number of tokens up to the block's end.
      block: id of the block; the tree owns one reference to it.
      last_used: time of the most recent use, by the tree's clock, which counts uses. No two nodes have the same time.
      hits: number of requests that continued from its snapshot.
      snapshot: rows of a request's slot at the block's end; None = no snapshot is kept.
      sums: checksums of the block, one for each layer, for `host.canary`; None = none were taken.
      snapshot_sums: checksums of the snapshot, one for each layer; None = none were taken.
      alive: whether the node is still in the tree.
      in_use: whether a request holds the block too.
      num_next: number of child nodes that were ever added. A child that was evicted and added again counts twice.
    """

    digest: bytes
    length: int
    block: int
    last_used: int = 0
    hits: int = 0
    snapshot: RequestRows | None = None
    sums: list[int] | None = None
    snapshot_sums: list[int] | None = None
    alive: bool = True
    in_use: bool = True
    num_next: int = 0


class PrefixTree:
    """Cached blocks by shard and digest, and for each shard an LRU queue of the blocks that no request holds.

    A block's digest depends on the digests of all preceding blocks, so a node needs no links to parent and children.

    A request releases its last block first, so as a rule a block is evicted earlier than its parent, the preceding
    block. The parent can be evicted first only if several requests computed the same tokens at the same time. In this
    case the child cannot be found until the parent is cached again. If that never happens, the child is evicted in its
    turn.

    Attributes:
      nodes: {(shard, digest): node}. All other state follows from the live nodes and the allocator.
      idle: for each shard {block: node} of the nodes whose blocks no request holds, the least recently used first.
    """

    def __init__(self, allocator: BlockAllocator):
        """Makes an empty tree, to which the allocator's `listener` reports changes of reference counts."""
        self.nodes: dict[tuple[int, bytes], CachedBlock] = {}
        self._allocator = allocator
        self._clock = 0
        self.recount()
        allocator.listener = self._listen

    def key(self, node: CachedBlock) -> tuple[int, bytes]:
        """Returns the shard and digest of a node."""
        return self._allocator.shard(node.block), node.digest

    def oldest(self, shards: Iterable[int]) -> CachedBlock:
        """Returns the least recently used idle node of some shards; at least one of them must have an idle node."""
        return min((next(iter(self.idle[shard].values())) for shard in shards if self.idle[shard]), key=_LAST_USED)

    def add(self, node: CachedBlock) -> None:
        """Adds a node whose block a request holds. The caller has already added the tree's reference to the block."""
        self._use(node)
        self.nodes[self.key(node)] = node
        self._by_block[node.block] = node

    def remove(self, node: CachedBlock) -> None:
        """Removes an idle node and drops the reference to its block."""
        node.alive = False
        del self.nodes[self.key(node)], self._by_block[node.block], self._idle_queue(node)[node.block]
        self._allocator.release([node.block])

    def clear(self) -> None:
        """Removes all nodes and drops the tree's references to their blocks. Requests keep the blocks they hold."""
        nodes = list(self.nodes.values())
        for node in nodes:
            node.alive = False
        self.recount()
        self._allocator.release([node.block for node in nodes])

    def touch(self, path: Sequence[CachedBlock]) -> None:
        """Marks the nodes of a prefix as used, in reverse order, so that the first node is the most recently used."""
        for node in reversed(path):
            self._use(node)
            if not node.in_use:
                self._idle_queue(node).move_to_end(node.block)

    def recount(self) -> None:
        """Rebuilds the tree's state from the nodes that are alive and from the allocator's reference counts."""
        self.nodes = {key: node for key, node in self.nodes.items() if node.alive}
        self._by_block = {node.block: node for node in self.nodes.values()}
        self.idle = [collections.OrderedDict[int, CachedBlock]() for _ in range(self._allocator.num_shards)]
        for node in sorted(self.nodes.values(), key=_LAST_USED):
            if not node.in_use:
                self._idle_queue(node)[node.block] = node
        by_length = sorted(self.nodes.values(), key=lambda node: node.length)  # a request releases its last block first
        self._listen([node.block for node in by_length])

    def _listen(self, blocks: Sequence[int]):
        """Updates `idle` after reference counts of `blocks` have changed.

        Goes through the blocks in reverse order, so that the last block of a request is evicted first.
        """
        for block in reversed(blocks):
            node = self._by_block.get(block)
            if node is None or node.in_use == (in_use := self._allocator.references(block) > 1):
                continue
            self._use(node)
            node.in_use = in_use
            if in_use:
                del self._idle_queue(node)[block]
            else:
                self._idle_queue(node)[block] = node

    def _use(self, node):
        self._clock += 1
        node.last_used = self._clock

    def _idle_queue(self, node):
        """Returns the queue in `idle` of a node's shard."""
        return self.idle[self._allocator.shard(node.block)]
