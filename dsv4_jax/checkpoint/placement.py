"""Copies stored tensors to devices. Each device gets its shard, directly from the mapped file where possible."""

import collections
import concurrent.futures
import functools
import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from dsv4_jax.checkpoint.keys import ENGRAM_TABLE, TABLES, Weight
from dsv4_jax.expert_pages import ExpertMemory, HostTables


Pieces = Sequence[Callable[[], np.ndarray]]  # see `Staging.place`
Bounds = tuple[tuple[int, int], ...]  # (start, end) of a shard on each axis
Check = Callable[[int, np.ndarray, np.ndarray], None]  # see `Staging.place`
_BLOCK_BYTES = 1 << 24  # number of bytes that a thread copies and checks at a time
# `jax.device_put` to a CPU device aliases memory with this alignment, in bytes, instead of copying it.
_ALIASED = 64


def expert_shapes(table: Iterable[Weight]) -> tuple[list[str], list[tuple[int, ...]]]:
    """Returns (paths of the layers' experts, shapes of the codes of a layer's matrices), for `ExpertMemory.plan`.

    Args:
      table: all weights of the model, in the order of its layers.

    Raises:
      ValueError: layers have different numbers of experts.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}  # {layer: shapes of the codes of its matrices}
    for weight in table:
        if weight.is_expert:
            shapes.setdefault(weight.module, []).append(weight.packed_shape)
    first, *others = shapes
    for layer in others:
        if shapes[layer] != shapes[first]:
            raise ValueError(
                f"expert memory needs as many experts in each layer: {layer} has {shapes[layer][0][0]}, {first} has "
                f"{shapes[first][0][0]}. Leave out the draft layers, or keep all experts on the GPU"
            )
    return list(shapes), shapes[first]


def tables_on_host(path: str, memory: ExpertMemory | None, host_tables: HostTables | None) -> HostTables | None:
    """Returns the host memory in which a parameter lies; None if it lies on the devices.

    Args:
      path: path of the parameter in the model.
      memory, host_tables: `expert_memory` and `host_tables` of `load_checkpoint`.
    """
    if memory is not None:
        return memory.tables if path.endswith(TABLES) else None
    return host_tables if path.endswith(ENGRAM_TABLE) else None


def fill(target: np.ndarray, pieces: Pieces, check: Check | None = None) -> None:
    """Casts pieces to the dtype of an array in host memory and writes them to it, with several threads.

    Args:
      target: array to write to.
      pieces, check: as for `Staging.place`.
    """
    stack = target.shape[:-2] if len(pieces) > 1 else ()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        # For a small array, starting threads would take longer than copying.
        run = pool.map if target.nbytes > _BLOCK_BYTES else map
        for number, index in enumerate(np.ndindex(stack)):  # one piece at a time, since a piece may be made in memory
            part = target[index] if stack else target
            blocks = _blocks(number, np.asarray(pieces[number]()).reshape(part.shape), part)
            collections.deque(run(functools.partial(_fill_block, check=check), blocks), maxlen=0)


# (Index of a piece, some of the piece's rows, array that these rows are copied to). None = they are only checked.
_Block = tuple[int, np.ndarray, np.ndarray | None]


def _blocks(number: int, values: np.ndarray, target: np.ndarray | None) -> Iterator[_Block]:
    """Divides a piece into blocks of rows. One thread copies and checks a block.

    Args:
      number: index of the piece.
      values: the piece.
      target: array in the shape of `values` that the blocks are copied to; None = they are only checked.
    """
    values = np.atleast_1d(values)
    target = None if target is None else np.atleast_1d(target)
    size = values.nbytes if target is None else target.nbytes
    rows = max(1, len(values) * _BLOCK_BYTES // max(size, 1))
    for i in range(0, len(values), rows):
        yield number, values[i : i + rows], None if target is None else target[i : i + rows]


def _fill_block(block: _Block, check: Check | None) -> None:
    """Copies the values of a block to its target, if there is one, and checks them."""
    number, values, target = block
    if target is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes infinity
            target[...] = values
    if check is not None:
        check(number, values, values if target is None else target)


class Staging:
    """A host buffer through which arrays are copied to devices, one at a time.

    The buffer is reused, because the first writes to fresh memory are slow.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def place(
        self,
        pieces: Pieces,
        shape: tuple[int, ...],
        dtype: np.typing.DTypeLike,
        where: NamedSharding | None,
        check: Check | None = None,
        threads: bool = True,
    ) -> jax.Array:
        """Makes an array on its devices from pieces. On return the buffer is free again.

        Each piece is read once. If there is one piece of the right dtype, its contiguous shards are copied to their
        devices directly. All other shards pass through the buffer.

        Args:
          pieces: functions that each return the values of a piece, possibly a view of a file. A single piece is the
            whole array. Several pieces are the array's matrices (its last two axes), in row-major order.
          shape, dtype: shape and dtype of the whole array. Values are cast.
          where: sharding of the array; None = the default device.
          check: function that is called for each block of values, from any thread. Its arguments are the index of the
            piece, the block before the cast, and the block after it.
          threads: whether several threads copy pieces, which is faster for views of a file. Otherwise one piece is
            made at a time.
        """
        stack = shape[:-2] if len(pieces) > 1 else ()
        devices = _devices_by_shard(shape, where)
        shard_shapes = [[end - start for start, end in bounds] for bounds in devices]
        # {bounds of a shard: array of its values}. The arrays lie in the buffer, and their values are not set yet.
        shards = dict(zip(devices, self._views(shard_shapes, dtype), strict=True))

        def blocks() -> Iterator[_Block]:
            """Yields the blocks to copy and check, piece by piece."""
            for number, index in enumerate(np.ndindex(stack)):
                values = np.asarray(pieces[number]()).reshape(shape[len(stack) :])
                # `index` is the piece's index on the axes of `stack`. A shard has a part of the piece if the index lies
                # within the shard's bounds on these axes.
                for bounds, shard in shards.items():
                    if all(start <= i < end for i, (start, end) in zip(index, bounds, strict=False)):
                        part = values[tuple(slice(*pair) for pair in bounds[len(stack) :])]
                        target = shard[tuple(i - start for i, (start, _) in zip(index, bounds, strict=False))]
                        # A part that a device can copy directly takes the place of the shard's buffer.
                        if direct := not stack and part.dtype == dtype and _can_be_source(part):
                            shards[bounds] = part
                        yield from _blocks(number, part, None if direct else target)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            # A single thread can be slower than the disk.
            run = pool.map if threads else map
            collections.deque(run(functools.partial(_fill_block, check=check), blocks()), maxlen=0)
            # A single thread is too slow to feed several devices.
            puts = [(shard, device) for bounds, shard in shards.items() for device in devices[bounds]]
            arrays = list(pool.map(jax.device_put, *zip(*puts, strict=True)))
        array = arrays[0] if where is None else jax.make_array_from_single_device_arrays(shape, where, arrays)
        return jax.block_until_ready(array)

    def _views(self, shapes: list[list[int]], dtype: np.typing.DTypeLike) -> list[np.ndarray]:
        """Returns an array in the buffer for each shape, misaligned so that no `jax.Array` on a CPU aliases it."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape in shapes]
        ends = np.cumsum([-(-size // _ALIASED) * _ALIASED for size in sizes])
        if (needed := int(ends[-1]) + _ALIASED) > self._memory.size:
            self._memory = np.empty(0, np.uint8)
            # JAX may hold the old buffer, as the source of a finished transfer, until the next garbage collection.
            # Collect first, so that the two buffers do not exist at the same time.
            gc.collect(0)
            self._memory = np.empty(needed, np.uint8)
        offset = (8 - self._memory.ctypes.data) % _ALIASED
        starts = [offset, *(offset + ends[:-1])]
        places = zip(starts, sizes, shapes, strict=True)
        return [self._memory[start : start + size].view(dtype).reshape(shape) for start, size, shape in places]


def _devices_by_shard(shape: tuple[int, ...], where: NamedSharding | None) -> dict[Bounds, list[jax.Device | None]]:
    """Returns {bounds of a shard on each axis: devices of this process that hold it}.

    `[None]` stands for the default device, if the array is not sharded (`where` is None).
    """
    if where is None:
        return {tuple((0, size) for size in shape): [None]}
    devices = collections.defaultdict(list)
    for device, index in where.addressable_devices_indices_map(shape).items():
        assert index is not None
        devices[tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))].append(device)
    return devices


def _can_be_source(values: np.ndarray) -> bool:
    """Returns whether `jax.device_put` can take an array as it is, and copies it even if the device is a CPU."""
    return values.flags.c_contiguous and values.ctypes.data % _ALIASED != 0
