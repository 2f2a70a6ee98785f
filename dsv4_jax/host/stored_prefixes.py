"""The blocks and snapshots of a prefix cache on disk: which are written, and which a prompt finds."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.request_rows import RequestRows, read_blocks
from dsv4_jax.host.identity import identity
from dsv4_jax.host.offload import blocks_struct
from dsv4_jax.host.prefix_files import FileLayout, PrefixFiles
from dsv4_jax.host.prefix_tree import CachedBlock
from dsv4_jax.host.request_table import RequestTable


_FEW_BLOCKS = 4  # so many are read one by one


@dataclasses.dataclass(frozen=True)
class FoundBlocks:
    """The cached prefix of a prompt.

    Attributes:
      nodes: its first blocks, which are in memory.
      digests: digests of the blocks that follow and were read from disk.
      blocks: bytes of these blocks on the host, as of `read_blocks`; None if there are none.
      snapshot: rows at the end of the prefix, from disk; None = the last block in memory has them.
    """

    nodes: list[CachedBlock]
    digests: Sequence[bytes] = ()
    blocks: Any = None
    snapshot: RequestRows | None = None

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.nodes) + len(self.digests)


class StoredPrefixes:
    """Writes blocks and snapshots that leave memory to `PrefixFiles`, and finds them again.

    Attributes:
      files: the files.
      identity: the bytes that every digest of this cache must depend on.
    """

    def __init__(self, files: PrefixFiles, table: RequestTable, snapshot_struct: RequestRows, *, key: str):
        """Begins to use the files for a cache.

        Args:
          files: see the class.
          table: the table of the cache's requests.
          snapshot_struct: shapes and dtypes of a snapshot.
          key: name of the model's weights.

        Raises:
          ValueError: the files' `max_bytes` hold no block with its snapshot, or the cache lies on several processes.
        """
        if table.mesh is not None and table.mesh.is_multi_process:
            raise ValueError("files of a prefix cache need a mesh of one process: others might find other files")
        self.files = files
        self._table = table
        metadata = {"format": "dsv4_jax prefix", "version": "1", **identity(table.schema, key)}
        self._blocks = FileLayout("block", blocks_struct(table.schema, 1), metadata, axis=1)
        self._snapshots = FileLayout("snapshot", snapshot_struct, metadata)
        self.identity = self._blocks.header + self._snapshots.header
        if files.max_bytes < (least := self._blocks.nbytes + self._snapshots.nbytes):
            raise ValueError(f"max_bytes={files.max_bytes} holds no block with its snapshot, which take {least} bytes")

    def save_blocks(
        self, nodes: Sequence[CachedBlock], get_cache: Callable[[], KVCache], *, wait: bool = False
    ) -> None:
        """Queues blocks for the writer that are not on disk; launches their copies to the host, and waits for none.

        Args:
          nodes: the blocks, in the order of their last use, the newest first.
          get_cache: returns the cache; it raises if there is none that holds the blocks.
          wait: whether to wait for the writer if it is behind; otherwise blocks beyond its limit are dropped.
        """
        now = time.time_ns()
        missing = [node for node in nodes if not self.files.exists(self._blocks, node.digest)]
        if len(missing) < len(nodes):
            self.files.touch(self._blocks, [node.digest for node in nodes], used=now)

        for first, ids in self._chunks([node.block for node in missing]):
            digests = [node.digest for node in missing[first : first + len(ids)]]
            get_arrays = functools.partial(self._read, get_cache, ids)
            nbytes = len(ids) * self._blocks.nbytes
            self.files.save(self._blocks, digests, get_arrays, nbytes=nbytes, used=now - first, wait=wait)

    def save_snapshot(self, node: CachedBlock, *, wait: bool = False) -> None:
        """Queues the snapshot of a block for the writer, unless it is on disk."""
        now = time.time_ns()
        snapshot = node.snapshot
        if self.files.exists(self._snapshots, node.digest):
            self.files.touch(self._snapshots, [node.digest], used=now)
        else:
            get_arrays = functools.partial(self._table.begin_get, snapshot)
            self.files.save(self._snapshots, [node.digest], get_arrays, used=now, wait=wait)

    def save_all(self, nodes: Iterable[CachedBlock], get_cache: Callable[[], KVCache]) -> None:
        """Writes blocks and their snapshots, as many as the files may hold, and waits until they are on disk."""
        used: dict[CachedBlock, int] = {}
        for node in sorted(nodes, key=lambda node: -node.length):  # a block is used when one after it is
            used[node] = max(used.get(node, 0), node.last_used)
            if node.parent is not None:
                used[node.parent] = max(used.get(node.parent, 0), used[node])
        room = self.files.max_bytes
        kept = []
        for node in sorted(used, key=lambda node: (-used[node], node.length)):
            room -= self._blocks.nbytes + (node.snapshot is not None) * self._snapshots.nbytes
            if room < 0:
                break
            kept.append(node)
        self.save_blocks(kept, get_cache, wait=True)
        for node in kept:
            if node.snapshot is not None:
                self.save_snapshot(node, wait=True)
        self.files.flush()

    def find(self, digests: Iterable[bytes], nodes: list[CachedBlock], least: int, most: int) -> FoundBlocks | None:
        """Reads the longest usable prefix of a prompt of which a part is on disk.

        Args:
          digests: digests of the prompt's blocks that may be used, in order.
          nodes: the first ones of them in memory.
          least: number of blocks that are usable without files.
          most: number of blocks for which there is room.

        Returns:
          The prefix; None if there is none with more than `least` blocks.
        """
        path: list[bytes] = []
        for digest in itertools.islice(digests, most):
            if len(path) >= len(nodes) and not self.files.exists(self._blocks, digest):
                break
            path.append(digest)
        while len(path) > least:
            has_snapshot, snapshot = self.files.read(self._snapshots, path[-1:])
            if not has_snapshot:
                path.pop()
                continue
            rest = path[len(nodes) :]
            count, blocks = self.files.read(self._blocks, rest)
            if count == len(rest):
                self._count(path, count)
                return FoundBlocks(nodes[: len(path)], rest, blocks, snapshot)
            del path[len(nodes) + count :]
        return None

    def warm_up(self, cache: KVCache) -> None:
        """Compiles the program that reads one block; those for more blocks are programs of `offload` and `resume`."""
        self._read(lambda: cache, np.array([-1], np.int32))

    def _chunks(self, blocks):
        """Splits blocks as `RequestTable.block_chunks` does, but yields few blocks one by one, without padding."""
        if len(blocks) > _FEW_BLOCKS:
            return self._table.block_chunks(blocks)
        return ((i, np.array([block], np.int32)) for i, block in enumerate(blocks))

    def _read(self, get_cache, ids):
        """Launches a copy of full blocks to the host, all of whose entries are live."""
        length = np.int32(len(ids) * self._table.schema.block_tokens)
        return self._table.begin_get(read_blocks(get_cache(), *self._table.put((ids, np.int32(0), length))))

    def _count(self, digests, num_read):
        self.files.metrics.hit_tokens += num_read * self._table.schema.block_tokens
        now = time.time_ns()
        self.files.touch(self._blocks, digests, used=now)
        self.files.touch(self._snapshots, digests[-1:], used=now)
