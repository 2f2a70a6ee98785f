"""The shards of a cache, and transfers between the host and the devices that hold it."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.cache import CacheSchema, KVCache, PoolGroup
from dsv4_jax.cache.request_rows import RequestRows, read_blocks, write_blocks, write_request
from dsv4_jax.common.mesh_axes import DATA_AXIS
from dsv4_jax.parallel.axis_rules import named_sharding


MAX_BLOCKS_PER_TRANSFER = 16


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of slots and blocks: one for each device along the axis "data" of a mesh, else one.

    Ids are global on the host: shard 1 continues where shard 0 ends. Steps and block tables use local ids, which begin
    at 0 in each shard.

    Attributes:
      count: number of shards.
      slots: number of slots in a shard.
      blocks: number of blocks in a shard.
    """

    count: int
    slots: int
    blocks: int

    def of(self, slot: Any) -> Any:
        """Returns the shard of a slot, or the shards of slots [n]."""
        return slot // self.slots

    def where(self, shard: int) -> str:
        """Returns where an error is: " in shard 1 of 2", or nothing if there is one shard."""
        return "" if self.count == 1 else f" in shard {shard} of {self.count}"

    def place_rows(self, slots: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
        """Returns the [n] first rows of requests in arrays with `size` rows for each shard.

        Args:
          slots: [n] slots of the requests.
          counts: [n] number of rows of each.
          size: number of rows of a shard.
        """
        shards = self.of(slots)
        begins = np.empty_like(counts)
        for shard in range(self.count):
            mine = shards == shard
            begins[mine] = shard * size + np.cumsum(counts[mine]) - counts[mine]
        return begins


class CacheDevices:
    """Transfers to and from the devices that hold a cache.

    Attributes:
      schema: geometry of the cache.
      mesh: devices that hold the cache; None = the default device.
      shards: the shards of its slots and blocks.
    """

    def __init__(self, schema: CacheSchema, mesh: Mesh | None = None):
        """Describes the devices; transfers nothing."""
        self.schema = schema
        self.mesh = mesh
        count = count_shards(mesh)
        self.shards = Shards(count, schema.max_requests // count, schema.num_blocks // count)
        self._last_put: dict[tuple, tuple[np.ndarray, Any]] = {}

    def block_table_row(self, blocks: Sequence[int]) -> np.ndarray:
        """Returns a request's row of the block table, [max_blocks] int32; -1 = none."""
        return padded(np.asarray(blocks, int) % self.shards.blocks, self.schema.max_blocks)

    def block_chunks(self, blocks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Splits blocks into chunks of one size, so that one program moves them with bounded device memory.

        Yields:
          (index of the first block, ids [n] int32 padded with -1), where n is at most `MAX_BLOCKS_PER_TRANSFER`.
        """
        size = min(MAX_BLOCKS_PER_TRANSFER, self.schema.max_blocks)
        for start in range(0, len(blocks), size):
            yield start, padded(blocks[start : start + size], size)

    def read_blocks(self, cache: KVCache, blocks: Sequence[int], length: int) -> dict[str, PoolGroup]:
        """Copies consecutive blocks of a request to the host.

        Args:
          cache: the cache; only read.
          blocks: [n] ids of the request's blocks from the first one on.
          length: number of tokens of the request; entries beyond are zeros.

        Returns:
          {pool group: entries and keys [layers, n, entries per block, ...]}, as NumPy arrays.
        """
        chunks = [
            jax.device_get(read_blocks(cache, *self.put((ids, np.int32(start), np.int32(length)))))
            for start, ids in self.block_chunks(blocks)
        ]
        return jax.tree.map(lambda *pieces: np.concatenate(pieces, axis=1)[:, : len(blocks)], *chunks)

    def put(self, tree: Any, axis: str | None = None) -> Any:
        """Puts arrays of the host on the devices, in one explicit transfer.

        Args:
          tree: NumPy arrays.
          axis: logical axis of axis 0, as in `axis_rules.RULES`. With None, each device holds all; scalars always do.
        """
        mesh = self.mesh
        if mesh is None:
            return jax.device_put(tree)
        shardings = jax.tree.map(lambda x: named_sharding((axis,) if np.ndim(x) else (), mesh), tree)
        if mesh.is_multi_process:
            # Each process supplies its own devices' data: `device_put` would compare the whole array first.
            return jax.tree.map(
                lambda x, s: jax.make_array_from_callback(np.shape(x), s, lambda index: x[index]), tree, shardings
            )
        return jax.device_put(tree, shardings)

    def write_request(
        self,
        cache: KVCache,
        slot: int,
        length: int,
        blocks: Sequence[int],
        rows: RequestRows | None,
        restored: Sequence[int] = (),
        block_rows: Any = None,
    ) -> KVCache:
        """Writes a request to a slot. Nothing can fail on the host once the cache is donated.

        Args:
          cache: the cache; donated.
          slot: slot of the request.
          length: number of its tokens.
          blocks: its blocks in order.
          rows: rows of its slot, on the devices; None leaves them as they are.
          restored: [n] blocks whose entries are written, too.
          block_rows: these entries as `read_blocks` returns them, [layers, n, entries per block, ...].
        """
        arguments = self.put((np.int32(slot), np.int32(length), self.block_table_row(blocks)))
        chunks = []
        for start, ids in self.block_chunks(restored):
            chunk = jax.tree.map(functools.partial(_padded_slice, start=start, count=len(ids)), block_rows)
            chunks.append(self.put((ids, chunk)))
        for ids, chunk in chunks:
            cache = write_blocks(cache, ids, chunk)
        return write_request(cache, *arguments, rows)

    def put_changed(self, tree: Any, axis: str | None = None) -> Any:
        """Puts arrays as `put` does, except those that equal the last ones in their places of such a tree.

        Args:
          tree: NumPy arrays, which must not change later.
          axis: as for `put`.
        """
        leaves, structure = jax.tree.flatten(tree)
        keys = [(structure, i, np.shape(leaf), axis) for i, leaf in enumerate(leaves)]
        changed = [i for i, key in enumerate(keys) if not self._is_there(key, leaves[i])]
        if changed:
            arrays = [leaves[i] for i in changed]
            for i, array, on_device in zip(changed, arrays, self.put(arrays, axis), strict=True):
                self._last_put[keys[i]] = array, on_device
        return structure.unflatten([self._last_put[key][1] for key in keys])

    def _is_there(self, key, array):
        """Whether the devices have an array already."""
        if key not in self._last_put:
            return False
        last, on_device = self._last_put[key]
        return not on_device.is_deleted() and (last is array or last.tobytes() == array.tobytes())

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


def count_shards(mesh: Mesh | None) -> int:
    """Returns the number of shards of slots and blocks on a mesh."""
    return 1 if mesh is None else mesh.shape.get(DATA_AXIS, 1)


def padded(values: Any, size: int) -> np.ndarray:
    """Returns whole numbers [n] as [size] int32, with -1 behind them."""
    array = np.full((size,), -1, np.int32)
    array[: len(values)] = values
    return array


def _padded_slice(x, start, count):
    """Returns `count` entries of axis 1 from `start` on, with zeros behind the last one."""
    part = x[:, start : start + count]
    return np.pad(part, [(0, 0), (0, count - part.shape[1])] + [(0, 0)] * (x.ndim - 2))


def consecutive(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns `counts` [n] consecutive integers from each of `begins` [n], one after another."""
    return np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
