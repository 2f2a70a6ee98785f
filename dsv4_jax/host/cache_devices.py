"""The shards of a cache, and transfers between the host and the devices that hold it."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dsv4_jax.cache import CacheSchema, KVCache, PoolGroup, RequestRows, read_blocks, write_blocks, write_request
from dsv4_jax.common.mesh_axes import DATA_AXIS
from dsv4_jax.parallel.axis_rules import named_sharding


MAX_BLOCKS_PER_TRANSFER = 16


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a cache's slots and blocks: one for each index of the mesh axis "data", or one without this axis.

    The host uses global ids, which count on from one shard to the next. Steps and block tables on the device use local
    ids, which begin at 0 in each shard.

    Attributes:
      count: number of shards.
      slots: number of slots in a shard.
      blocks: number of blocks in a shard.
    """

    count: int
    slots: int
    blocks: int

    def of(self, slot: Any) -> Any:
        """Returns the shard of a slot, or an [n] array of the shards of [n] slots."""
        return slot // self.slots

    def where(self, shard: int) -> str:
        """Returns words for an error's message, such as " in shard 1 of 2"; an empty string if there is one shard."""
        return "" if self.count == 1 else f" in shard {shard} of {self.count}"

    def place_rows(self, slots: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
        """Returns the [n] indices of each request's first row in an array [number of shards * size, ...].

        The rows of a request are consecutive. Within a shard the requests stand in the given order.

        Args:
          slots: [n] slots of the requests.
          counts: [n] number of rows of each request.
          size: number of rows that each shard has in the array.
        """
        shards = self.of(slots)
        begins = np.empty_like(counts)
        for shard in range(self.count):
            in_shard = shards == shard
            begins[in_shard] = shard * size + np.cumsum(counts[in_shard]) - counts[in_shard]
        return begins


class CacheDevices:
    """Transfers to and from the devices that hold a cache.

    Attributes:
      schema: geometry of the cache.
      mesh: devices that hold the cache; None = the default device.
      shards: the shards of the cache's slots and blocks.
    """

    def __init__(self, schema: CacheSchema, mesh: Mesh | None = None):
        """Keeps the geometry and the mesh; transfers nothing. See the class for the arguments."""
        self.schema = schema
        self.mesh = mesh
        count = 1 if mesh is None else mesh.shape.get(DATA_AXIS, 1)
        self.shards = Shards(count, schema.max_requests // count, schema.num_blocks // count)
        self._last_put: dict[tuple, tuple[np.ndarray, Any]] = {}

    def block_table_row(self, blocks: Sequence[int]) -> np.ndarray:
        """Returns a request's row of the block table, [max_blocks] int32 local ids of its blocks; -1 = no block."""
        return padded(np.asarray(blocks, int) % self.shards.blocks, self.schema.max_blocks)

    def block_chunks(self, blocks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Splits block ids into chunks of equal size, so that the same compiled program moves every chunk.

        The size of a chunk bounds the device memory that a transfer takes. It is `MAX_BLOCKS_PER_TRANSFER`, or the
        maximum number of blocks of a request if that is less.

        Yields:
          (index in `blocks` of the chunk's first block, [size] int32 ids of the chunk, padded with -1).
        """
        size = min(MAX_BLOCKS_PER_TRANSFER, self.schema.max_blocks)
        for start in range(0, len(blocks), size):
            yield start, padded(blocks[start : start + size], size)

    def read_blocks(self, cache: KVCache, blocks: Sequence[int], length: int) -> dict[str, PoolGroup]:
        """Copies the first n blocks of a request to the host.

        Args:
          cache: the cache; only read.
          blocks: [n] ids of the blocks, in the request's order.
          length: number of tokens of the request. Entries of positions from `length` on are returned as zeros.

        Returns:
          {name of a pool group: its entries and keys [layers, n, entries per block, ...]}, as NumPy arrays.
        """
        chunks = [
            jax.device_get(read_blocks(cache, *self.put((ids, np.int32(start), np.int32(length)))))
            for start, ids in self.block_chunks(blocks)
        ]
        return jax.tree.map(lambda *pieces: np.concatenate(pieces, axis=1)[:, : len(blocks)], *chunks)

    def put(self, tree: Any, axis: str | None = None) -> Any:
        """Copies NumPy arrays to the devices, in one explicit transfer.

        Args:
          tree: pytree of NumPy arrays.
          axis: logical name of the arrays' first axis, a key of `axis_rules.RULES`, which says how the axis is sharded.
            None replicates the arrays on all devices. Scalars are always replicated.

        Returns:
          A pytree of the same structure, with the arrays on the devices.
        """
        mesh = self.mesh
        if mesh is None:
            return jax.device_put(tree)
        shardings = jax.tree.map(lambda x: named_sharding((axis,)[: np.ndim(x)], mesh, np.ndim(x)), tree)
        if mesh.is_multi_process:
            # Each process supplies the data of its own devices. `device_put` would first compare the whole array over
            # all processes.
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
        """Writes a request to a slot: its length, its block table, and optionally its rows and the entries of blocks.

        All transfers come before the first program that donates the cache, so a failed transfer leaves the cache valid.

        Args:
          cache: the cache; donated.
          slot: slot of the request.
          length: number of the request's tokens.
          blocks: ids of the request's blocks in order.
          rows: rows of the request's slot, on the devices; None leaves the slot's rows as they are.
          restored: [n] ids of blocks whose entries are to be written.
          block_rows: the entries of the `restored` blocks, [layers, n, entries per block, ...], as `read_blocks`
            returns them. None if no block is restored.

        Returns:
          The updated cache.
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
        """Copies arrays to the devices as `put` does, but skips arrays that have not changed since an earlier call.

        Each array is compared with the one that was put most recently with the same tree structure, place in the tree,
        shape, dtype and `axis`. If the two are equal, the array that is already on the devices is returned.

        Args:
          tree: pytree of NumPy arrays, which must not be modified later.
          axis: as for `put`.

        Returns:
          A pytree of the same structure, with the arrays on the devices.
        """
        leaves, structure = jax.tree.flatten(tree)
        arrays = {(structure, i, leaf.shape, leaf.dtype, axis): leaf for i, leaf in enumerate(leaves)}
        changed = {key: array for key, array in arrays.items() if not self._is_there(key, array)}
        if changed:
            on_devices = self.put(list(changed.values()), axis)
            for (key, array), on_device in zip(changed.items(), on_devices, strict=True):
                self._last_put[key] = array, on_device
        return structure.unflatten([self._last_put[key][1] for key in arrays])

    def _is_there(self, key, array):
        """Returns whether the array of this key in `_last_put` equals `array` and still exists on the devices."""
        if key not in self._last_put:
            return False
        last, on_device = self._last_put[key]
        return not on_device.is_deleted() and (last is array or last.tobytes() == array.tobytes())

    def get(self, tree: Any) -> Any:
        """Copies a step's results, a pytree of arrays, to the host, and returns them as NumPy arrays."""
        return jax.device_get(self.begin_get(tree))

    def begin_get(self, tree: Any) -> Any:
        """Starts an asynchronous copy of a step's results to the host.

        Returns a pytree of device arrays. A later `get` of this pytree waits for the copies and starts no other ones.
        On a mesh of several processes the arrays are replicated first.
        """
        if self.mesh is not None and self.mesh.is_multi_process:
            tree = jax.reshard(tree, named_sharding((), self.mesh))
        for leaf in jax.tree.leaves(tree):
            if isinstance(leaf, jax.Array):  # a step of a test may return NumPy arrays
                leaf.copy_to_host_async()
        return tree


def padded(values: Any, size: int) -> np.ndarray:
    """Returns n integers as an array [size] int32, padded with -1 at the end."""
    array = np.full((size,), -1, np.int32)
    array[: len(values)] = values
    return array


def _padded_slice(x, start, count):
    """Returns x[:, start : start + count], padded with zeros at the end of axis 1 where x has fewer entries."""
    part = x[:, start : start + count]
    return np.pad(part, [(0, 0), (0, count - part.shape[1])] + [(0, 0)] * (x.ndim - 2))


def consecutive(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenates n ranges. Range i has `counts[i]` consecutive integers, the first of which is `begins[i]`."""
    return np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
