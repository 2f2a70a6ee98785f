"""Prefix cache: full blocks and boundary snapshots of earlier requests, found by their tokens."""

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.request_rows import RequestRows, read_request, write_request
from dsv4_jax.host.canary import block_sums, check_blocks, check_snapshot, snapshot_sums
from dsv4_jax.host.identity import fingerprint
from dsv4_jax.host.manager import KVCacheManager, TokenIds
from dsv4_jax.host.prefix_tree import CachedBlock, PrefixTree
from dsv4_jax.host.request_table import RequestState
from dsv4_jax.host.shard_placement import FoundPrefix, find_slot, fits
from dsv4_jax.host.step_order import record_write
from dsv4_jax.sizes import readable_bytes
from dsv4_jax.summary import Summarized, Summary


@dataclasses.dataclass
class PrefixMetrics:
    """Counters of a `PrefixCache`.

    Attributes:
      requests: number of admitted requests.
      hits: number of requests with at least one cached block.
      prompt_tokens: number of prompt tokens of the admitted requests.
      hit_tokens: number of these tokens that were cached.
      blocks: number of blocks held now.
      snapshots: number of snapshots held now.
      snapshot_bytes: size of these snapshots in bytes.
      evicted_blocks: number of blocks evicted so far.
      evicted_snapshots: number of snapshots evicted so far.
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
        """The fraction of prompt tokens that were cached; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixCache(Summarized):
    """Shares the blocks of equal prefixes between requests, bit for bit.

    A chain of hashes over token ids finds a request's full blocks. To continue after them, a request also needs its
    slot's rows at that boundary: the last window and CSA's previous-window rows. These snapshots are arrays on the
    device beside the cache. The policy `every` chooses them, and the least recently used ones are dropped when they
    exceed a byte budget. A request that hits has the same live bytes as one that ran cold.

    The prefix cache registers itself as the manager's `BlockEvictor`: blocks that only it holds are evicted when a
    request needs them.

    Attributes:
      manager: the manager whose blocks are shared.
      every: interval of boundaries with a snapshot. None keeps snapshots of each request's last boundary and of
        boundaries that were hit.
      max_bytes: budget of all snapshots in bytes.
      bytes_per_snapshot: size of one snapshot in bytes.
      debug: whether checksums of blocks and snapshots are kept, and checked when a request begins to read them. This
        waits for the device.
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
        """Makes an empty prefix cache.

        Args:
          manager, every, max_bytes, debug: see the class.
          key: name of the model's weights.
          seed: seed of the hashes; whoever does not know it cannot construct prompts that collide.

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
        if manager.requests.evictor is not None:
            raise ValueError("the manager has a prefix cache already")
        self.manager, self.every, self.max_bytes, self.debug = manager, every, max_bytes, debug
        self._table = manager.requests
        root = _digest(fingerprint(manager.schema, key), repr(seed).encode())
        # Blocks can be shared within a shard only.
        self._roots = [root, *(_digest(root, repr(shard).encode()) for shard in range(1, self._table.num_shards))]
        self._tree = PrefixTree(self._table.allocator)
        self._snapshots: set[CachedBlock] = set()  # nodes with a snapshot
        self._metrics = PrefixMetrics()
        self._table.evictor = self

    @property
    def metrics(self) -> PrefixMetrics:
        """The counters so far."""
        snapshots = len(self._snapshots)
        held = dict(snapshots=snapshots, snapshot_bytes=snapshots * self.bytes_per_snapshot)
        return dataclasses.replace(self._metrics, blocks=len(self._tree.nodes), **held)

    def _summary(self) -> Summary:
        found = self.metrics
        snapshots = f"{found.snapshots} snapshots ({readable_bytes(found.snapshot_bytes)})"
        return Summary((f"{found.blocks} blocks", snapshots), {"hit rate": f"{found.hit_rate:.0%}"})

    @property
    def evictable(self) -> int:
        """The number of blocks that `evict` could give up: no request holds them or a block after them."""
        return sum(self._tree.evictable)

    def admit(self, cache: KVCache, prompt_ids: TokenIds, *, num_tokens: int | None = None) -> tuple[int, int, KVCache]:
        """Admits a request with the longest cached prefix of its prompt; at least one token is left to run.

        Args:
          cache: the cache; donated.
          prompt_ids: [n] token ids of the prompt.
          num_tokens: as in `KVCacheManager.admit`.

        Returns:
          (the slot, hit_tokens, the cache): run prompt_ids[hit_tokens:] next.

        Raises:
          TypeError, ValueError: as in `KVCacheManager.admit`, or the cache belongs to another manager.
          CacheFullError: every slot is taken.
          CacheCorruptionError: with `debug`, cached bytes have changed.
        """
        self.manager.check_cache(cache)
        ids = self.manager.check_ids(prompt_ids)
        paths, found = self._find(ids)
        slot = find_slot(self._table, len(ids), num_tokens, found)
        path = paths[self._table.shard(slot)]
        hit = path[-1].length if path else 0
        if path:
            check_blocks(self._table, cache, path, f"slot {slot} (new)")
            check_snapshot(self.manager.schema, path[-1], f"slot {slot} (new)")
        blocks, new = [node.block for node in path], cache
        with self._table.transaction():
            self._table.allocator.share(blocks)
            if path:
                where = (np.int32(slot), np.int32(hit), self._table.block_table_row(blocks))
                new = write_request(cache, *self._table.put(where), path[-1].snapshot)
                state = RequestState(hit, hit, blocks, published_blocks=len(blocks), is_new=False, cached_blocks=path)
                record_write(self._table, cache, new, {slot: state})
            else:
                self._table.admit(slot)
        metrics = self._metrics
        metrics.requests += 1
        metrics.prompt_tokens += len(ids)
        if path:
            metrics.hits += 1
            metrics.hit_tokens += hit
            path[-1].hits += 1
            self._tree.touch(path[-1])
        return slot, hit, new

    def observe(
        self, cache: KVCache, slot: int, tokens: TokenIds, *, length: int | None = None, snapshot: Any = None
    ) -> None:
        """Caches a request's full blocks, and a snapshot of its last boundary if the policy asks for it.

        A snapshot is taken only if the request stands at a block boundary or can still be rewound to it. So call this
        after steps that end there, and after rejected drafts were rewound.

        Args:
          cache: the cache after the step; only read.
          slot: slot of the request.
          tokens: [n] the request's token ids from the first one on, at least up to its last full block.
          length: number of the request's tokens that count; None = all. Fewer count if a later step was launched
            already, whose tokens are not known.
          snapshot: rows of the last boundary up to `length`, from `snapshot`; None = read them now.

        Raises:
          ValueError: the slot is not admitted, it holds more full blocks than `tokens`, or the cache belongs to another
            manager.
        """
        self.manager.check_cache(cache, slot)
        state, block_tokens = self._table.state(slot), self.manager.schema.block_tokens
        full = (state.length if length is None else min(length, state.length)) // block_tokens
        if len(tokens) < full * block_tokens:
            raise ValueError(f"slot {slot} holds {full} full blocks of {block_tokens} tokens, {len(tokens)=}")
        if not full:
            return
        with self._table.transaction():
            path = state.cached_blocks
            if len(path) < full or not path[-1].alive:
                path = [node for node in path if node.alive]
                for index in range(len(path), full):
                    ids = self.manager.check_ids(tokens[index * block_tokens : (index + 1) * block_tokens], "tokens")
                    path.append(self._cache_block(path[-1] if path else None, ids, state.blocks[index]))
                self._table.commit({slot: dataclasses.replace(state, cached_blocks=path)})
            if self.debug and (new := [node for node in path if node.sums is None]):
                for node, sums in zip(new, block_sums(self._table, cache, [n.block for n in new]).T, strict=True):
                    node.sums = sums
            if path[full - 1].snapshot is None:
                snapshot = self._read_snapshot(cache, state, slot, full) if snapshot is None else snapshot
                if snapshot is not None:
                    self._keep_snapshot(snapshot, path[:full])

    def snapshot(self, cache: KVCache, slot: int) -> RequestRows | None:
        """Reads the rows at a request's last block boundary, for a later `observe`.

        Args:
          cache: the cache; only read.
          slot: slot of the request.

        Returns:
          The rows; None if they are gone, or if the policy keeps no snapshot there.

        Raises:
          ValueError: the slot is not admitted.
        """
        state = self._table.state(slot)
        return self._read_snapshot(cache, state, slot, state.length // self.manager.schema.block_tokens)

    def warm_up(self, cache: KVCache, slot: int) -> KVCache:
        """Compiles both programs for snapshots by taking and restoring one; the cache is donated.

        This overwrites the slot, which must then be released.
        """
        row = self._table.block_table_row(self._table.state(slot).blocks)
        where, zero, row = self._table.put((np.int32(slot), np.int32(0), row))
        new = write_request(cache, where, zero, row, read_request(cache, where, zero, zero, boundary=True))
        record_write(self._table, cache, new, {slot: self._table.state(slot)})
        return new

    def fits(self, prompt_ids: TokenIds, num_tokens: int) -> bool:
        """Whether a slot and enough blocks are free for a request with this prompt [n] and `num_tokens` tokens.

        Does not count as a use of cached blocks.

        Raises:
          TypeError, ValueError: the ids are bad.
        """
        _, found = self._find(self.manager.check_ids(prompt_ids))
        return any(fits(self._table, shard, num_tokens, prefix) for shard, prefix in enumerate(found))

    def check(self, cache: KVCache, slot: int | None = None) -> None:
        """Compares bytes that were cached under `debug` with their checksums.

        Args:
          cache: the cache after a step; only read.
          slot: slot of the request whose blocks are checked; None = check all cached blocks.

        Raises:
          ValueError: the slot is not admitted.
          CacheCorruptionError: bytes have changed since they were cached.
        """
        nodes = list(self._tree.nodes.values()) if slot is None else self._table.state(slot).cached_blocks
        reader = "a check of everything" if slot is None else f"slot {slot}"
        check_blocks(self._table, cache, nodes, reader)
        for node in nodes:
            check_snapshot(self.manager.schema, node, reader)

    def evict(self, n_blocks: int) -> int:
        """Frees up to `n_blocks` blocks that no request holds, the least recently used first.

        Returns:
          The number of freed blocks.

        Raises:
          ValueError: the number is negative.
        """
        if n_blocks < 0:
            raise ValueError(f"{n_blocks=} must not be negative")
        count = min(n_blocks, self.evictable)
        with self._table.transaction():
            for _ in range(count):
                shards = [shard for shard, n in enumerate(self._tree.evictable) if n]
                self._evict(min(map(self._tree.oldest, shards), key=lambda node: node.last_used))
        return count

    # --- BlockEvictor ---

    def blocks(self) -> Iterable[int]:
        """Returns the blocks of the prefix cache; each counts as one reference."""
        return [node.block for node in self._tree.nodes.values() if node.alive]

    def evictable_in(self, shard: int) -> int:
        """Returns the number of evictable blocks in a shard."""
        return self._tree.evictable[shard]

    def reclaim(self, n_blocks: int, shard: int) -> None:
        """Gives up `n_blocks` blocks of a shard; at least that many must be evictable."""
        with self._table.transaction():
            for _ in range(n_blocks):
                self._evict(self._tree.oldest(shard))

    def recount(self) -> None:
        """Rebuilds all counters from the live nodes and the allocator's reference counts."""
        self._tree.recount()
        self._snapshots = {node for node in self._tree.nodes.values() if node.snapshot is not None}

    # --- internals ---

    def _find(self, ids):
        """Returns each shard's longest usable prefix: nodes that end in a snapshot and leave a token to run."""
        paths = [self._find_in(root, ids) for root in self._roots]
        return paths, [FoundPrefix(len(path), sum(not node.pins for node in path)) for path in paths]

    def _find_in(self, root, ids):
        path, digest, block_tokens = [], root, self.manager.schema.block_tokens
        for end in range(block_tokens, len(ids), block_tokens):
            digest = _digest(digest, ids[end - block_tokens : end].tobytes())
            if digest not in self._tree.nodes:
                break
            path.append(self._tree.nodes[digest])
        while path and path[-1].snapshot is None:
            path.pop()
        return path

    def _evict(self, node):
        """Evicts a node, inside a transaction."""
        if node.snapshot is not None:
            self._drop_snapshot(node)
        self._tree.remove(node)
        self._metrics.evicted_blocks += 1

    def _cache_block(self, parent, ids, block):
        """Returns the node of a full block with these token ids, which is added if the tree has none."""
        digest = _digest(parent.digest if parent else self._roots[self._table.allocator.shard(block)], ids.tobytes())
        if (node := self._tree.nodes.get(digest)) is not None:
            self._tree.touch(node)
        else:
            node = CachedBlock(digest, parent, (parent.length if parent else 0) + len(ids), block)
            self._table.allocator.share([block])
            self._tree.add(node)
        return node

    def _read_snapshot(self, cache, state, slot, full):
        """Reads the rows behind the first `full` blocks of a request, if the policy wants and the rings hold them."""
        length = full * self.manager.schema.block_tokens
        # The rings hold the boundary's rows as long as the request can be rewound to it.
        if not full or state.min_length > length or full % (self.every or 1):
            return None
        where = self._table.put((np.int32(slot), np.int32(length)))
        return read_request(cache, *where, where[1], boundary=True)

    def _keep_snapshot(self, snapshot, path):
        """Keeps the rows at the end of the last node, within the budget and the policy."""
        node, *before = reversed(path)
        if (len(self._snapshots) + 1) * self.bytes_per_snapshot > self.max_bytes:
            self._drop_snapshot(min(self._snapshots, key=lambda node: node.last_used))
        sums = snapshot_sums(self.manager.schema, snapshot) if self.debug else None
        node.snapshot, node.snapshot_sums = snapshot, sums
        self._snapshots.add(node)
        if self.every is None:
            last = next((n for n in before if n.snapshot is not None), None)
            if last is not None and not last.hits:
                self._drop_snapshot(last)

    def _drop_snapshot(self, node):
        node.snapshot = None
        self._snapshots.discard(node)
        self._metrics.evicted_snapshots += 1


def _digest(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(before + data, digest_size=32).digest()
