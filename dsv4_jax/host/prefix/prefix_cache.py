"""Prefix cache: full blocks and boundary snapshots of earlier requests, found by their tokens."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dsv4_jax.cache import KVCache, RequestRows, read_request
from dsv4_jax.common.arguments import check_flag, check_type, check_whole
from dsv4_jax.common.sizes import parse_bytes, readable_bytes
from dsv4_jax.common.summary import Summarized
from dsv4_jax.host.canary import block_sums, check_blocks, check_snapshot, snapshot_sums
from dsv4_jax.host.manager import KVCacheManager, TokenIds
from dsv4_jax.host.offload import identity, rows_struct
from dsv4_jax.host.prefix.prefix_files import FORMAT, PrefixFileMetrics, PrefixFiles, StoredPrefixes
from dsv4_jax.host.prefix.prefix_tree import CachedBlock, PrefixTree
from dsv4_jax.host.request_table import RequestState
from dsv4_jax.host.step_order import origin, record_write
from pallas_kernels.runtime.pytrees import total_bytes


@dataclasses.dataclass
class PrefixMetrics:
    """Counters of a `PrefixCache`.

    Attributes:
      requests: number of admitted requests.
      hits: number of requests with at least one cached block.
      prompt_tokens: number of prompt tokens of the admitted requests.
      hit_tokens: number of these prompt tokens that were cached.
      blocks: number of blocks in the prefix cache.
      snapshots: number of snapshots in the prefix cache.
      snapshot_bytes: size of these snapshots in bytes.
      evicted_blocks: number of blocks evicted so far.
      evicted_snapshots: number of snapshots evicted so far.
      files: counters of the prefix cache's files; None without files.
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
    files: PrefixFileMetrics | None = None

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that were cached; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixCache(Summarized):
    """Shares blocks between requests whose prompts begin with the same tokens (prefix caching).

    A full block is found by a hash over its tokens and the preceding block's hash. The end of a block is a boundary. To
    continue there, a request also needs the rows that a slot holds at the boundary: the newest window, and the rows of
    CSA's compressors for the previous compression window. A copy of these rows is a snapshot, which is kept in arrays
    on the device beside the cache. After a hit the cache holds the same bytes as if the request had run all its tokens.

    * Snapshots: `every` chooses the boundaries that get a snapshot. If all snapshots would exceed `max_bytes`, the
      least recently used one is dropped. A step leaves only the rows of its newest tokens, so a prompt gets snapshots
      only at the ends of its chunks, and later prompts hit there. `chunk_end` chooses the ends of chunks.
    * Eviction: blocks that only the prefix cache holds are evicted when a request needs blocks.
    * Weights: prefixes belong to the weights that computed them. Call `reset` when the model gets other weights.
      Requests that were admitted before the call, and their copies, are not cached, since their rows come from the
      earlier weights.
    * Files: with `files`, evicted blocks and snapshots go to disk, and a later prompt finds them there, also in a later
      process. For this `get_cache` must return the current cache. Without `get_cache`, only `save` writes blocks.

    A manager has one prefix cache. If a second one is made for the manager, the first cannot be used any more.

    All blocks lie in one cache. If a method gets a cache that comes from another `init_cache`, such as that of another
    engine, the prefix cache first forgets all blocks.

    Attributes:
      manager: the manager whose blocks are shared.
      key: name of the model's weights; None = a name that only this process knows.
      every: interval in blocks of the boundaries that may have a snapshot. None keeps snapshots of each request's
        newest boundary, of boundaries that were hit, and of boundaries at which prompts part.
      max_bytes: maximum size of all snapshots in bytes.
      bytes_per_snapshot: size of one snapshot in bytes.
      debug: whether checksums of blocks and snapshots are kept, and checked when a request begins to read them. This
        copies the bytes to the host.
      files: the files of evicted blocks and snapshots; None = evicted blocks are lost.
      get_cache: function without arguments that returns the cache with all cached blocks; None = not known. An `Engine`
        sets it.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        key: str,
        every: int | None = 1,
        max_bytes: int | str = 2**30,
        seed: int = 0,
        debug: bool = False,
        files: PrefixFiles | None = None,
    ):
        """Makes an empty prefix cache.

        Args:
          manager, every, debug, files: see the class.
          max_bytes: see the class; may be text, such as "2GiB".
          key: name of the model's weights. Other weights must have another name, see
            `checkpoint.weights_fingerprint`.
          seed: number that is part of all hashes. Prefix caches find each other's files only if their seeds are equal.
            It need not be secret: prompts whose 256-bit BLAKE2b hashes collide cannot be constructed.

        Raises:
          TypeError: `every`, `max_bytes`, `debug` or `files` has the wrong type.
          ValueError: `every` is not positive, `max_bytes` is less than a snapshot's size, the limit of `files` is less
            than the size of a block with its snapshot, or there are `files` and the mesh has several processes.
        """
        if every is not None:
            check_whole("every", every, 1)
        check_flag("debug", debug)
        check_type("files", files, PrefixFiles | None, "a PrefixFiles(directory, max_bytes), or None")
        max_bytes = parse_bytes(max_bytes, "max_bytes")
        self.bytes_per_snapshot = total_bytes(rows_struct(manager.schema, boundary=True))
        if max_bytes < self.bytes_per_snapshot:
            raise ValueError(f"{max_bytes=} holds no snapshot: one takes {self.bytes_per_snapshot} bytes")
        self.manager = manager
        self.every = every
        self.max_bytes = max_bytes
        self.debug = debug
        self.files = files
        self._table = manager.requests
        self._devices = manager.devices
        self._block_tokens = manager.schema.block_tokens
        self._seed = seed
        self.get_cache: Callable[[], KVCache] | None = None
        self._set_key(key)
        # A prefix cache that takes the place of an earlier one caches no request that runs already, because the
        # request's rows may come from other weights than `key` names. Incrementing `weights` excludes these requests.
        if self._table.evictor is not None:
            self._table.evictor.clear()
            self._table.weights += 1
        self._tree = PrefixTree(self._table.allocator)
        self._origin = 0  # `step_order.origin` of the cache that holds the blocks
        self._snapshots: set[CachedBlock] = set()  # nodes with a snapshot
        self._metrics = PrefixMetrics()
        self._table.evictor = self

    @property
    def metrics(self) -> PrefixMetrics:
        """The counters so far."""
        snapshots = len(self._snapshots)
        files = None if self.files is None else dataclasses.replace(self.files.metrics)
        return dataclasses.replace(
            self._metrics,
            blocks=len(self._tree.nodes),
            snapshots=snapshots,
            snapshot_bytes=snapshots * self.bytes_per_snapshot,
            files=files,
        )

    def _summary(self) -> dict[str, Any]:
        metrics = self.metrics
        snapshots = f"{metrics.snapshots} ({readable_bytes(metrics.snapshot_bytes)})"
        return {"blocks": metrics.blocks, "snapshots": snapshots, "hit rate": f"{metrics.hit_rate:.0%}"}

    def serves(self, manager: KVCacheManager) -> bool:
        """Returns whether this is the manager's prefix cache, not replaced by a later one."""
        return manager.requests.evictor is self

    @property
    def evictable(self) -> int:
        """The number of blocks that `evict` could free, since no request holds them."""
        return sum(map(len, self._tree.idle))

    def admit(
        self, cache: KVCache, prompt_ids: TokenIds, *, num_tokens: int | None = None, salt: str = ""
    ) -> tuple[int, int, KVCache]:
        """Admits a request to a slot that begins with the longest cached prefix of its prompt.

        At least the prompt's last token is left to run. With `files`, blocks of the prefix may come from disk.

        Args:
          cache: the cache; donated if a prefix is found.
          prompt_ids: [n] token ids of the prompt.
          num_tokens: number of tokens that the request will hold in the end, prompt included; None = the length of the
            prompt.
          salt: text that separates prefixes: only prefixes that were cached with the same salt are found. It must
            name all that rows depend on besides token ids, such as images (`Batch.is_image`) and the adapter.

        Returns:
          (the slot, number of tokens in the cached prefix, the cache). The next step runs the prompt's tokens that
          follow this prefix.

        Raises:
          TypeError, ValueError: as for `KVCacheManager.admit`, the cache belongs to another manager, or another prefix
            cache has taken the place of this one.
          RuntimeError: the cache was donated.
          CacheFullError: every slot is taken.
          CacheCorruptionError: with `debug`, cached bytes have changed.
        """
        self._check_current()
        self.manager.check_cache(cache)
        ids = self.manager.check_ids(prompt_ids)
        size = self.manager.check_size(len(ids), num_tokens)
        self._follow(cache)
        paths = self._find(ids, salt)
        slot = self._table.find_slot(size, paths)
        shard = self.manager.shards.of(slot)
        path = paths[shard]
        path, *stored = self._find_stored(ids, salt, shard, len(path)) or (path,)
        if path or stored:
            cache = self._restore(cache, slot, path, *stored)
        else:
            self._table.admit(slot)
        hit_tokens = path[-1].length if path else 0
        metrics = self._metrics
        metrics.requests += 1
        metrics.prompt_tokens += len(ids)
        if path:
            metrics.hits += 1
            metrics.hit_tokens += hit_tokens
            path[-1].hits += 1
            self._tree.touch(path[-1:])
        return slot, hit_tokens, cache

    def chunk_end(self, slot: int, tokens: np.ndarray, end: int, *, salt: str = "") -> int:
        """Returns the position at which the next chunk of a prompt should end, so that later prompts can hit there.

        A boundary is a multiple of `every` blocks, or of one block if `every` is None. A snapshot is taken at the end
        of a chunk that ends at a boundary. The first of these rules that applies decides:

        1. The prompt differs from all cached prompts from some position within the chunk on. If the last boundary
           before this position is within the chunk and has no snapshot, the chunk ends there. The next prompt that
           shares this beginning can then hit there.
        2. If the last boundary of the whole prompt is within the chunk, the chunk ends there. The next prompt of a chat
           begins with this prompt, so it can hit there. The tokens after the boundary take another step.
        3. If `every` is set, the chunk ends at its last boundary, unless this shortens it by more than an eighth.
        4. Otherwise the chunk ends at `end`.

        Args:
          slot: slot of the request.
          tokens: [n] int32 all token ids of the prompt.
          end: the largest position at which the chunk may end.
          salt: the salt that the request was admitted with.

        Raises:
          ValueError: the slot is not admitted.
        """
        state = self._table.state(slot)
        block_tokens = self._block_tokens
        stride = block_tokens * (self.every or 1)
        end_of_hits = min(end, len(tokens) - 1)  # a hit leaves at least one token to run
        nodes = self._nodes(tokens[:end_of_hits], salt, self.manager.shards.of(slot), state.cached_blocks)
        parting = len(nodes) * block_tokens // stride * stride
        last_boundary = len(tokens) // stride * stride
        boundary = min(end // stride * stride, last_boundary)
        if state.length < parting < boundary and nodes[parting // block_tokens - 1].snapshot is None:
            return parting
        if boundary == last_boundary:
            max_cut = end - state.length - 1
        else:
            max_cut = (end - state.length) // 8 if self.every else 0
        return boundary if end - boundary <= max_cut else end

    def observe(
        self,
        cache: KVCache,
        slot: int,
        tokens: TokenIds,
        *,
        length: int | None = None,
        snapshot: Any = None,
        salt: str = "",
    ) -> None:
        """Caches a request's full blocks, and a snapshot at the end of its last full block if `every` asks for it.

        A request that began with earlier weights is not cached.

        The cache holds the rows of a snapshot only while the request can be rewound to the end of that block. So call
        this method after each step that ends at a block boundary, as soon as rejected drafts have been rewound.

        Args:
          cache: the cache after the step; only read.
          slot: slot of the request.
          tokens: [n] token ids of the request from its first token on, at least up to the end of its last full block.
          length: number of the request's tokens to count; None = all. Give it if a later step was launched whose tokens
            are not known yet.
          snapshot: result of the method `snapshot` for the last block boundary up to `length`; None = read the rows
            from the cache, if it still holds them.
          salt: the salt that the request was admitted with.

        Raises:
          RuntimeError: the cache was donated.
          ValueError: the slot is not admitted, the request has more full blocks than `tokens`, the cache belongs to
            another manager, or another prefix cache has taken the place of this one.
        """
        self._check_current()
        self.manager.check_cache(cache, slot)
        self._follow(cache)
        state = self._table.state(slot)
        block_tokens = self._block_tokens
        num_full = (state.length if length is None else min(length, state.length)) // block_tokens
        if len(tokens) < num_full * block_tokens:
            raise ValueError(f"slot {slot} holds {num_full} full blocks of {block_tokens} tokens, {len(tokens)=}")
        if not num_full or state.weights != self._table.weights:
            return
        with self._table.transaction():
            # Keeps the nodes that are still in the tree, and appends a node for each later block.
            path = list(itertools.takewhile(lambda node: node.alive, state.cached_blocks))
            if (num_known := len(path)) < num_full:
                ids = self.manager.check_ids(tokens[num_known * block_tokens : num_full * block_tokens], "tokens")
                digests = list(self._digests(ids, salt, path))
                for digest, block in zip(digests, state.blocks[num_known:num_full], strict=True):
                    self._append_block(path, digest, block)
                self._tree.touch(path[num_known:])
                self._table.commit({slot: dataclasses.replace(state, cached_blocks=path)})
            if self.debug and (new_nodes := [node for node in path if node.sums is None]):
                all_sums = block_sums(self._devices, cache, [node.block for node in new_nodes])
                for node, sums in zip(new_nodes, all_sums, strict=True):
                    node.sums = sums
            if path[num_full - 1].snapshot is None:
                snapshot = self._read_snapshot(cache, state, slot, num_full) if snapshot is None else snapshot
                if snapshot is not None:
                    self._keep_snapshot(snapshot, path[:num_full])

    def snapshot(self, cache: KVCache, slot: int) -> RequestRows | None:
        """Reads the rows of a request's slot at its newest block boundary, for a later call of `observe`.

        Args:
          cache: the cache; only read.
          slot: slot of the request.

        Returns:
          The rows. None if the request has no full block, if the rows are overwritten, if `every` allows no snapshot at
          this boundary, or if the request began with earlier weights.

        Raises:
          ValueError: the slot is not admitted.
        """
        state = self._table.state(slot)
        return self._read_snapshot(cache, state, slot, state.length // self._block_tokens)

    def warm_up(self, cache: KVCache, slot: int) -> KVCache:
        """Compiles the programs that take and restore a snapshot, and those for `files`, by running them.

        This overwrites the request in the slot, which must then be released. Donates the cache and returns the new one.
        """
        state = self._table.state(slot)
        on_device, zero = self._devices.put((np.int32(slot), np.int32(0)))
        rows = read_request(cache, on_device, zero, zero, boundary=True)
        new = self._devices.write_request(cache, slot, 0, state.blocks, rows)
        record_write(self._table, cache, new, {slot: state})
        if self._stored is not None:
            self._stored.warm_up(new)
        return new

    def fits(self, prompt_ids: TokenIds, num_tokens: int, *, salt: str = "") -> bool:
        """Returns whether `admit` would find a slot and enough free or evictable blocks for a request.

        Cached blocks of the prompt need no room. The call does not mark these blocks as used.

        Args:
          prompt_ids: [n] token ids of the request's prompt.
          num_tokens: number of tokens that the request needs room for.
          salt: as in `admit`.

        Raises:
          TypeError, ValueError: the ids are bad.
        """
        paths = self._find(self.manager.check_ids(prompt_ids), salt)
        return any(self._table.fits(shard, num_tokens, path) for shard, path in enumerate(paths))

    def check(self, cache: KVCache, slot: int | None = None) -> None:
        """Compares the cached blocks and snapshots with the checksums that were taken under `debug`.

        Blocks and snapshots without checksums are skipped.

        Args:
          cache: the cache after a step; only read.
          slot: slot of the request whose cached blocks are checked; None = check all cached blocks.

        Raises:
          ValueError: the slot is not admitted.
          CacheCorruptionError: bytes have changed since they were cached.
        """
        nodes = list(self._tree.nodes.values()) if slot is None else self._table.state(slot).cached_blocks
        reader = "a check of everything" if slot is None else f"slot {slot}"
        check_blocks(self._devices, cache, nodes, reader)
        for node in nodes:
            check_snapshot(self.manager.schema, node, reader)

    def check_key(self, key: str | None) -> None:
        """Raises ValueError if `reset` would refuse `key` as the name of new weights."""
        if key is None and self.files is not None:
            raise ValueError("key=None: prefixes on disk need the name of the new weights, which no others have")
        if key is not None and key == self.key:
            raise ValueError(f"{key=} is the name of the weights so far: other weights need another name")

    def reset(self, *, key: str | None = None) -> None:
        """Forgets all blocks and snapshots, because the model gets other weights.

        With `files`, blocks that no request holds and all snapshots are first queued to be written. Running requests
        keep their blocks, but these are not cached again.

        Args:
          key: name of the new weights. With `files` a name is required, because prefixes that earlier processes
            computed with these weights are found by this name. None = a name that no other weights had.

        Raises:
          ValueError: `key` is the name of the weights so far, it is None although there are files, or another prefix
            cache has taken the place of this one. Nothing was changed.
        """
        self._check_current()
        self.check_key(key)
        self.clear()
        self._table.weights += 1
        self._set_key(key)

    def evict(self, n_blocks: int) -> int:
        """Frees up to `n_blocks` blocks that no request holds, the least recently used first.

        Returns:
          The number of freed blocks.

        Raises:
          ValueError: the number is negative.
        """
        check_whole("n_blocks", n_blocks, 0)
        count = min(n_blocks, self.evictable)
        self.reclaim(count, range(self.manager.shards.count))
        return count

    def save(self, cache: KVCache) -> None:
        """Writes the cached blocks and snapshots to the files, up to `max_bytes` of the files, and waits for the disk.

        Nothing is evicted. If not all blocks fit, blocks of running requests come first, then the most recently used.

        Args:
          cache: the cache after a step; only read.

        Raises:
          ValueError: the prefix cache has no files, or the cache belongs to another manager.
        """
        self.manager.check_cache(cache)
        if self._stored is None:
            raise ValueError("the prefix cache has no files: give it files=PrefixFiles(directory, max_bytes)")
        self._follow(cache)
        self._stored.save_all(self._tree.nodes.values(), lambda: cache)

    # --- called by RequestTable, whose `evictor` this is ---

    def blocks(self) -> Iterable[int]:
        """Returns the ids of the cached blocks, to each of which the prefix cache owns one reference."""
        return [node.block for node in self._tree.nodes.values() if node.alive]

    def evictable_in(self, shard: int) -> int:
        """Returns the number of evictable blocks in a shard."""
        return len(self._tree.idle[shard])

    def reclaim(self, n_blocks: int, shards: Iterable[int]) -> None:
        """Evicts the `n_blocks` least recently used blocks of some shards, among the blocks that no request holds.

        The shards must have at least `n_blocks` blocks of this kind. With `files` and `get_cache`, the evicted blocks
        are queued to be written.
        """
        nodes = []
        with self._table.transaction():
            for _ in range(n_blocks):
                nodes.append(node := self._tree.oldest(shards))
                self._tree.remove(node)
            self._metrics.evicted_blocks += n_blocks
            if self._stored is not None and self.get_cache is not None:
                # Nothing has overwritten the blocks yet. Later blocks of a prefix are useless without the earlier ones,
                # so the earlier ones are saved first.
                self._stored.save_blocks(nodes[::-1], functools.partial(self._cache_of_blocks, self.get_cache))
            for node in nodes:
                if node.snapshot is not None:
                    self._drop_snapshot(node)

    def clear(self) -> None:
        """Forgets all blocks and snapshots. Requests keep the blocks that they hold.

        With `files`, blocks that no request holds and all snapshots are queued to be written.
        """
        self.evict(self.evictable)
        with self._table.transaction():
            self._metrics.evicted_blocks += len(self._tree.nodes)
            for node in list(self._snapshots):
                self._drop_snapshot(node)
            self._tree.clear()

    def recount(self) -> None:
        """Rebuilds the tree's queues and the set of snapshots from the live nodes and the reference counts."""
        self._tree.recount()
        self._snapshots = {node for node in self._tree.nodes.values() if node.snapshot is not None}

    # --- internals ---

    def _set_key(self, key):
        """Sets the name of the weights, which all digests include; with None they include `RequestTable.weights`."""
        self.key = key
        self._stored = None
        if self.files is not None:
            self._stored = StoredPrefixes(self.files, self._devices, key=key)
        properties = identity(self.manager.schema, key or "") | {"seed": repr(self._seed), "format": FORMAT}
        if key is None:
            properties["weights"] = repr(self._table.weights)
        self._root = hashlib.blake2b(json.dumps(properties).encode(), digest_size=32).digest()

    def _check_current(self):
        if not self.serves(self.manager):
            raise ValueError("another PrefixCache of the manager has taken the place of this one: use that one")

    def _follow(self, cache):
        """Forgets all blocks if they lie in a cache of another origin than `cache`."""
        if self._origin != (new_origin := origin(cache)):
            self.clear()
            self._origin = new_origin

    def _cache_of_blocks(self, get_cache):
        """Returns the result of `get_cache`. Raises ValueError if the blocks lie in a cache of another origin."""
        cache = get_cache()
        if origin(cache) != self._origin:
            raise ValueError("the evicted blocks lie in a cache of another engine than the newest one")
        return cache

    def _salted_root(self, salt):
        """Returns the 32-byte digest that precedes a prompt's first block in its hash, see `_digests`.

        A salt is hashed in another way than blocks are, so the result is not the digest of any block.
        """
        data = salt.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, key=self._root, person=b"salt", digest_size=32).digest() if salt else self._root

    def _digests(self, ids, salt="", path=()):
        """Yields the digest of each full block of the token ids `ids`, which follow the blocks of the nodes `path`."""
        digest = path[-1].digest if path else self._salted_root(salt)
        block_tokens = self._block_tokens
        for end in range(block_tokens, len(ids) + 1, block_tokens):
            block = ids[end - block_tokens : end].tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=32).digest()
            yield digest

    def _find(self, ids, salt):
        """Finds in each shard the longest prefix in memory that ends in a snapshot and leaves a token of `ids` to run.

        Returns:
          For each shard, the list of the prefix's nodes.
        """
        paths = [self._nodes(ids[:-1], salt, shard) for shard in range(self.manager.shards.count)]
        for path in paths:
            while path and path[-1].snapshot is None:
                path.pop()
        return paths

    def _nodes(self, ids, salt, shard, path=()):
        """Returns the nodes of the longest prefix of `ids` in a shard's memory; `path` lists its known first nodes."""
        nodes = list(path)
        for digest in self._digests(ids[len(path) * self._block_tokens :], salt, path):
            if (node := self._tree.nodes.get((shard, digest))) is None:
                break
            nodes.append(node)
        return nodes

    def _find_stored(self, ids, salt, shard, min_blocks):
        """Finds the longest prefix of a prompt with a snapshot on disk, and reads the blocks that the cache lacks.

        Returns the result of `StoredPrefixes.find`; None if there are no files.
        """
        if self._stored is None:
            return None
        nodes = self._nodes(ids[:-1], salt, shard)
        room = len(nodes) + self._table.room(shard, nodes)
        return self._stored.find(self._digests(ids[:-1], salt), nodes, min_blocks, room)

    def _restore(self, cache, slot, path, digests=(), block_rows=None, snapshot=None):
        """Admits a request with a cached prefix: blocks in the cache, followed by blocks that were read from disk.

        Args:
          cache: the cache; donated.
          slot: the request's slot.
          path: list of the nodes of the blocks in the cache, to which the nodes of the other blocks are appended.
          digests, block_rows, snapshot: digests and contents of the blocks from disk, and rows of a slot at the end of
            the prefix, as from `StoredPrefixes.find`. With the defaults there are no such blocks, and the last node of
            `path` has a snapshot.

        Returns:
          The updated cache.
        """
        table = self._table
        devices = self._devices
        reader = f"slot {slot} (new)"
        check_blocks(self._devices, cache, path, reader)
        if snapshot is None:
            check_snapshot(self.manager.schema, path[-1], reader)
        with table.transaction():
            # The blocks in memory are shared first. Otherwise the inner transaction could evict them to acquire blocks.
            blocks = [node.block for node in path]
            table.allocator.share(blocks)
            # The blocks that were read from disk are written to newly acquired blocks of the cache.
            with table.transaction({slot: len(digests)}) as acquired:
                new_blocks = acquired[slot]
                blocks += new_blocks
                length = len(blocks) * self._block_tokens
                rows = path[-1].snapshot if snapshot is None else devices.put(snapshot)
                new_cache = devices.write_request(cache, slot, length, blocks, rows, new_blocks, block_rows)
                for digest, block in zip(digests, new_blocks, strict=True):
                    self._append_block(path, digest, block)
                if snapshot is not None:
                    self._keep_snapshot(rows, path)
                state = RequestState(
                    length=length,
                    min_length=length,
                    restored=length,
                    blocks=blocks,
                    cached_blocks=path,
                    weights=table.weights,
                )
                record_write(table, cache, new_cache, {slot: state})
        return new_cache

    def _append_block(self, path, digest, block):
        """Appends the tree's node with this digest to `path`. If there is none, adds one for `block` to the tree."""
        node = self._tree.nodes.get((self._table.allocator.shard(block), digest))
        if node is None:
            node = CachedBlock(digest, (len(path) + 1) * self._block_tokens, block)
            self._table.allocator.share([block])
            self._tree.add(node)
            if path:
                path[-1].num_next += 1
        path.append(node)

    def _read_snapshot(self, cache, state, slot, full):
        """Returns the rows of a slot at the end of a request's first `full` blocks, or None, see `snapshot`."""
        length = full * self._block_tokens
        is_stale = state.weights != self._table.weights
        # The rings hold the rows at the boundary as long as the request can be rewound to the boundary.
        if not full or is_stale or state.min_length > length or full % (self.every or 1):
            return None
        on_device, end = self._devices.put((np.int32(slot), np.int32(length)))
        return read_request(cache, on_device, end, end, boundary=True)

    def _keep_snapshot(self, snapshot, path):
        """Gives the last node of `path` a snapshot.

        If the snapshots would exceed `max_bytes`, the least recently used one is dropped. If `every` is None, the
        nearest preceding snapshot of the path is dropped too, unless it was hit or prompts part there.
        """
        node, *before = reversed(path)
        if (len(self._snapshots) + 1) * self.bytes_per_snapshot > self.max_bytes:
            self._drop_snapshot(min(self._snapshots, key=lambda node: node.last_used))
        sums = snapshot_sums(self.manager.schema, snapshot) if self.debug else None
        node.snapshot = snapshot
        node.snapshot_sums = sums
        self._snapshots.add(node)
        if self.every is None:
            previous = next((n for n in before if n.snapshot is not None), None)
            if previous is not None and not previous.hits and previous.num_next < 2:
                self._drop_snapshot(previous)

    def _drop_snapshot(self, node):
        if self._stored is not None:
            self._stored.save_snapshot(node)
        node.snapshot = None
        self._snapshots.discard(node)
        self._metrics.evicted_snapshots += 1
