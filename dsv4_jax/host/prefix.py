"""Prefix cache: full blocks and boundary snapshots of earlier requests, found by the tokens they stand for."""

import dataclasses
import hashlib
import heapq
import itertools
from collections.abc import Iterator

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.requests import RequestRows, read_request, write_request
from dsv4_jax.host.book import Request
from dsv4_jax.host.canary import block_sums, check_blocks, check_snapshot, snapshot_sums
from dsv4_jax.host.identity import fingerprint
from dsv4_jax.host.manager import KVCacheManager, TokenIds


@dataclasses.dataclass
class PrefixMetrics:
    """What a `PrefixCache` has done and holds.

    Attributes:
      requests: admitted.
      hits: of them, with at least one block found.
      prompt_tokens: that the admitted requests came with.
      hit_tokens: of them, found.
      blocks: held now.
      snapshots: held now.
      snapshot_bytes: of them.
      evicted_blocks: so far.
      evicted_snapshots: so far.
    """

    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    blocks: int = 0
    snapshots: int = 0
    snapshot_bytes: int = 0
    evicted_blocks: int = 0
    evicted_snapshots: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclasses.dataclass(eq=False)
class SealedBlock:
    """A full block in the cache: a node of the tree of all token sequences seen.

    Attributes:
      digest: of the tokens up to its end and of what they mean (seed, model, format).
      parent: the block before it; None = it is the first.
      length: tokens up to its end.
      block: its id; the cache holds one reference.
      children: how many nodes follow it.
      used: when it was last sealed or hit.
      hits: requests that went on from its snapshot.
      snapshot: what a request's slot held at its end; None = not kept.
      sums, snapshot_sums: [layers] uint32 checksums of both, for the canary; None = not taken.
      alive: still in the cache.
    """

    digest: bytes
    parent: "SealedBlock | None"
    length: int
    block: int
    children: int = 0
    used: int = 0
    hits: int = 0
    snapshot: RequestRows | None = None
    sums: np.ndarray | None = None
    snapshot_sums: np.ndarray | None = None
    alive: bool = True


class PrefixCache:
    """Shares the blocks of equal prefixes, bit for bit.

    A request's full blocks are found by a chain of hashes over its token ids. To go on behind them a request also needs
    what its slot would hold there: the rows of the last window and CSA's previous-window rows. These boundary snapshots
    are arrays on the device beside the cache, kept by policy under a byte budget, the least recently used are dropped
    first. A request that hits has the same live bytes as one that ran cold.

    The cache puts itself behind the manager: blocks that only it holds are given up when a request needs them.

    Attributes:
      manager: whose blocks are shared.
      every: keep the snapshot of every n-th boundary; None keeps those of a request's last boundary and of boundaries
        that were hit.
      max_bytes: that the snapshots may take.
      bytes_per_snapshot: that one takes.
      debug: keep checksums of blocks and snapshots, and check them whenever a request begins to read them. Waits for
        the device.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        key: str,
        every: int | None = 1,
        max_bytes: int = 2**30,
        seed: int = 0,
        debug: bool = False,
    ):
        """An empty cache.

        Args:
          manager: whose blocks are shared.
          key: names the model's weights.
          every: see the class.
          max_bytes: see the class.
          seed: of the hashes: whoever does not know it cannot make two prompts collide.
          debug: see the class.

        Raises:
          ValueError: `every` is not positive, `max_bytes` holds no snapshot, or the manager has a prefix cache already.
        """
        if every is not None and every < 1:
            raise ValueError(f"{every=} must be at least 1, or None for last boundaries only")
        abstract = jax.eval_shape(
            lambda cache: read_request(cache, 0, 0, 0, boundary=True), KVCache.abstract(manager.schema)
        )
        self.bytes_per_snapshot = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
        if max_bytes < self.bytes_per_snapshot:
            raise ValueError(f"{max_bytes=} holds no snapshot: one takes {self.bytes_per_snapshot} bytes")
        if manager.reclaim is not None:
            raise ValueError("the manager has a prefix cache already")
        self.manager, self.every, self.max_bytes, self.debug = manager, every, max_bytes, debug
        self._root = _digest(fingerprint(manager.schema, key), repr(seed).encode())
        self._nodes: dict[bytes, SealedBlock] = {}
        self._clock = 0
        self._metrics = PrefixMetrics()
        manager.reclaim = self._reclaim

    @property
    def metrics(self) -> PrefixMetrics:
        """What it has done and holds so far."""
        return dataclasses.replace(self._metrics)

    @property
    def evictable(self) -> int:
        """Blocks that no request holds."""
        return sum(1 for _ in self._by_age())

    def admit(self, cache: KVCache, prompt_ids: TokenIds, *, num_tokens: int | None = None) -> tuple[int, int, KVCache]:
        """Admits a request that begins with the longest known prefix of its prompt; at least one token is left to run.

        Args:
          cache: the cache; donated.
          prompt_ids: [n] the prompt.
          num_tokens: as in `KVCacheManager.admit`.

        Returns:
          (the slot, hit_tokens, the cache): run prompt_ids[hit_tokens:] next.

        Raises:
          TypeError, ValueError: as in `KVCacheManager.admit`.
          CacheFullError: every slot is taken.
          CacheCorruptionError: `debug`, and what was found has changed since it was sealed.
        """
        ids = self.manager.check_ids(prompt_ids)
        path = self._hit(ids)
        hit = path[-1].length if path else 0
        with self.manager.transaction():
            slot = self.manager.admit(ids, num_tokens=num_tokens)
            if path:
                blocks = [node.block for node in path]
                check_blocks(self.manager, cache, path, f"slot {slot} (new)")
                check_snapshot(self.manager.schema, path[-1], f"slot {slot} (new)")
                self.manager.allocator.share(blocks)
                self.manager.enter(slot, Request(hit, hit, blocks, announced=len(blocks), fresh=False, sealed=path))
                where = (np.int32(slot), np.int32(hit), self.manager.table_row(blocks))
                cache = write_request(cache, *jax.device_put(where), path[-1].snapshot)
        metrics = self._metrics
        metrics.requests += 1
        metrics.prompt_tokens += len(ids)
        if path:
            metrics.hits += 1
            metrics.hit_tokens += hit
            path[-1].hits += 1
            self._clock = path[-1].used = self._clock + 1
        return slot, hit, cache

    def observe(self, cache: KVCache, slot: int, tokens: TokenIds) -> None:
        """Learns a request's full blocks, and takes the snapshot of its last boundary if the policy wants it.

        Call it after steps that end at a block's border, or so little behind it that the request could be rewound to
        it, and after refused drafts were rewound. Otherwise it learns the blocks and takes no snapshot.

        Args:
          cache: after the step; only read.
          slot: the request.
          tokens: [n] its token ids from the first one on, at least up to its last full block.

        Raises:
          ValueError: the slot is not admitted, or it holds more full blocks than `tokens`.
        """
        request, block_tokens = self.manager.request(slot), self.manager.schema.block_tokens
        full = request.length // block_tokens
        if len(tokens) < full * block_tokens:
            raise ValueError(f"slot {slot} holds {full} full blocks of {block_tokens} tokens, {len(tokens)=}")
        path = [node for node in request.sealed if node.alive]
        for index in range(len(path), full):
            ids = self.manager.check_ids(tokens[index * block_tokens : (index + 1) * block_tokens], "tokens")
            path.append(self._seal(path[-1] if path else None, ids, request.blocks[index]))
        request.sealed = path
        if self.debug and (new := [node for node in path if node.sums is None]):
            for node, sums in zip(new, block_sums(self.manager, cache, [n.block for n in new]).T, strict=True):
                node.sums = sums
        # What can be rewound to can be read.
        if path and path[-1].snapshot is None and request.floor <= path[-1].length and full % (self.every or 1) == 0:
            self._take(cache, slot, path)

    def fits(self, prompt_ids: TokenIds, num_tokens: int) -> bool:
        """Whether a request admitted now would find blocks for `num_tokens` tokens; counts as no use.

        Args:
          prompt_ids: [n] its prompt.
          num_tokens: that it is to hold.

        Raises:
          TypeError, ValueError: bad ids.
        """
        path = self._hit(self.manager.check_ids(prompt_ids))
        missing = -(-num_tokens // self.manager.schema.block_tokens) - len(path)
        return missing <= self.manager.free_blocks + self.evictable - sum(map(self._idle, path))

    def check(self, cache: KVCache, slot: int | None = None) -> None:
        """The canary, for callers that want it more often than at hits: all that was sealed with `debug`.

        Args:
          cache: after a step; only read.
          slot: check what this request reads; None = everything that is cached.

        Raises:
          ValueError: the slot is not admitted.
          CacheCorruptionError: bytes have changed since they were sealed.
        """
        nodes = list(self._nodes.values()) if slot is None else self.manager.request(slot).sealed
        reader = "a check of everything" if slot is None else f"slot {slot}"
        check_blocks(self.manager, cache, nodes, reader)
        for node in nodes:
            check_snapshot(self.manager.schema, node, reader)

    def evict(self, n_blocks: int) -> int:
        """Gives up to `n_blocks` blocks that no request holds back, the least recently used first.

        Returns:
          How many are free now that were not.

        Raises:
          ValueError: a negative number.
        """
        if n_blocks < 0:
            raise ValueError(f"{n_blocks=} must not be negative")
        nodes = list(itertools.islice(self._by_age(), n_blocks))
        self._remove(nodes)
        return len(nodes)

    def _reclaim(self, n_blocks):
        nodes = list(itertools.islice(self._by_age(), n_blocks))
        if len(nodes) == n_blocks:
            self._remove(nodes)

    def _hit(self, ids):
        """The nodes of the longest known prefix that has a snapshot and leaves a token to run."""
        block_tokens = self.manager.schema.block_tokens
        path = self._find(ids[: (len(ids) - 1) // block_tokens * block_tokens])
        while path and path[-1].snapshot is None:
            path.pop()
        return path

    def _find(self, ids):
        """The nodes of the longest known prefix of whole blocks."""
        path, digest = [], self._root
        for block in np.split(ids, range(self.manager.schema.block_tokens, len(ids), self.manager.schema.block_tokens)):
            digest = _digest(digest, block.tobytes())
            if digest not in self._nodes:
                break
            path.append(self._nodes[digest])
        return path

    def _seal(self, parent, ids, block):
        digest = _digest(parent.digest if parent else self._root, ids.tobytes())
        if digest not in self._nodes:
            node = SealedBlock(digest, parent, (parent.length if parent else 0) + len(ids), block)
            self.manager.allocator.share([block])
            self._nodes[digest] = node
            self._metrics.blocks += 1
            if parent:
                parent.children += 1
        node = self._nodes[digest]
        self._clock = node.used = self._clock + 1
        return node

    def _take(self, cache, slot, path):
        node, *before = reversed(path)
        if (self._metrics.snapshots + 1) * self.bytes_per_snapshot > self.max_bytes:
            self._drop(min((n for n in self._nodes.values() if n.snapshot is not None), key=lambda n: n.used))
        where = jax.device_put((np.int32(slot), np.int32(node.length)))
        snapshot = read_request(cache, *where, where[1], boundary=True)
        sums = snapshot_sums(self.manager.schema, snapshot) if self.debug else None
        node.snapshot, node.snapshot_sums = snapshot, sums
        self._metrics.snapshots += 1
        self._metrics.snapshot_bytes += self.bytes_per_snapshot
        if self.every is None:
            last = next((n for n in before if n.snapshot is not None), None)
            if last is not None and not last.hits:
                self._drop(last)

    def _drop(self, node):
        node.snapshot = None
        self._metrics.snapshots -= 1
        self._metrics.snapshot_bytes -= self.bytes_per_snapshot
        self._metrics.evicted_snapshots += 1

    def _by_age(self) -> Iterator[SealedBlock]:
        """Nodes that no request holds, each after those that follow it, the least recently used first."""
        children = {node.digest: node.children for node in self._nodes.values()}
        idle = [(n.used, n.digest) for n in self._nodes.values() if not n.children and self._idle(n)]
        heapq.heapify(idle)
        while idle:
            node = self._nodes[heapq.heappop(idle)[1]]
            yield node
            if (parent := node.parent) is not None:
                children[parent.digest] -= 1
                if not children[parent.digest] and self._idle(parent):
                    heapq.heappush(idle, (parent.used, parent.digest))

    def _idle(self, node):
        return self.manager.allocator.references(node.block) == 1

    def _remove(self, nodes):
        self.manager.allocator.release([node.block for node in nodes])
        # Only assignments from here on: the tree and the allocator cannot part.
        for node in nodes:
            node.alive = False
            del self._nodes[node.digest]
            if node.parent is not None:
                node.parent.children -= 1
        metrics, snapshots = self._metrics, [node for node in nodes if node.snapshot is not None]
        metrics.blocks -= len(nodes)
        metrics.evicted_blocks += len(nodes)
        metrics.snapshots -= len(snapshots)
        metrics.snapshot_bytes -= len(snapshots) * self.bytes_per_snapshot
        metrics.evicted_snapshots += len(snapshots)
        for node in snapshots:
            node.snapshot = None


def _digest(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(before + data, digest_size=32).digest()
