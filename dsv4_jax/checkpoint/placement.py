"""Copies stored tensors to devices. Each device gets its shard, directly from the mapped file where possible."""

import collections
import concurrent.futures
import gc
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from dsv4_jax.checkpoint.keys import ENGRAM_TABLE, TABLES, Weight
from dsv4_jax.expert_pages import ExpertMemory, HostTables
from dsv4_jax.quant import quantized_shapes


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
    shapes = {}  # {layer: shapes of the codes of its matrices}
    for weight in table:
        if weight.is_expert:
            codes, _ = quantized_shapes("FP4", weight.shape)
            shapes.setdefault(weight.module, []).append(codes)
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


def fill(
    shards: dict[Bounds, np.ndarray],
    pieces: Pieces,
    shape: tuple[int, ...],
    check: Check | None = None,
    threads: bool = True,
    *,
    replaces: bool = False,
) -> None:
    """Casts the pieces of an array to the dtype of its shards in host memory, and writes them there.

    Args:
      shards: {bounds of a shard on each axis: array to write to}.
      pieces, shape, check, threads: as for `Staging.place`.
      replaces: whether shards are replaced instead of copied where possible. If `jax.device_put` can take a shard's
        values directly from a piece, a view of the piece replaces the shard's array in `shards`.
    """
    stack = shape[:-2] if len(pieces) > 1 else ()

    def blocks():
        """Yields (index of a piece, some of its rows, the array to copy them to or None), piece by piece."""
        for number, index in enumerate(np.ndindex(stack)):
            values = np.asarray(pieces[number]()).reshape(shape[len(stack) :])
            # `index` is the piece's index on the axes of `stack`. A shard has a part of the piece if the index lies
            # within the shard's bounds on these axes.
            for bounds, shard in shards.items():
                if all(start <= i < end for i, (start, end) in zip(index, bounds, strict=False)):
                    part = values[tuple(slice(*pair) for pair in bounds[len(stack) :])]
                    target = shard[tuple(i - start for i, (start, _) in zip(index, bounds, strict=False))]
                    if direct := replaces and not stack and part.dtype == shard.dtype and _can_be_source(part):
                        shards[bounds] = part
                    part, target = np.atleast_1d(part, target)
                    rows = max(1, len(part) * _BLOCK_BYTES // max(target.nbytes, 1))
                    for i in range(0, len(part), rows):
                        yield number, part[i : i + rows], None if direct else target[i : i + rows]

    def copy(block):
        """Copies the values of a block to its target, if there is one, and checks them."""
        number, values, target = block
        if target is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes infinity
                target[...] = values
        if check is not None:
            check(number, values, values if target is None else target)

    # A single thread can be slower than the disk. For small shards, starting threads takes longer than copying.
    is_large = sum(shard.nbytes for shard in shards.values()) > _BLOCK_BYTES
    with concurrent.futures.ThreadPoolExecutor() as pool:
        run = pool.map if is_large and (threads or len(pieces) == 1) else map
        collections.deque(run(copy, blocks()), maxlen=0)


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
        devices = _devices_by_shard(shape, where)
        shard_shapes = [[end - start for start, end in bounds] for bounds in devices]
        # {bounds of a shard: array of its values}. The arrays lie in the buffer, and their values are not set yet.
        shards = dict(zip(devices, self._views(shard_shapes, dtype), strict=True))
        fill(shards, pieces, shape, check, threads, replaces=True)
        puts = [(shard, device) for bounds, shard in shards.items() for device in devices[bounds]]
        with concurrent.futures.ThreadPoolExecutor() as pool:  # a single thread is too slow to feed several devices
            arrays = list(pool.map(jax.device_put, *zip(*puts, strict=True)))
        array = arrays[0] if where is None else jax.make_array_from_single_device_arrays(shape, where, arrays)
        return jax.block_until_ready(array)

    def _views(self, shapes, dtype):
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


def _devices_by_shard(shape, where):
    """Returns {bounds of a shard on each axis: devices of this process that hold it}.

    `[None]` stands for the default device, if the array is not sharded (`where` is None).
    """
    if where is None:
        return {bounds_of((), shape): [None]}
    devices = collections.defaultdict(list)
    for device, index in where.addressable_devices_indices_map(shape).items():
        assert index is not None
        devices[bounds_of(index, shape)].append(device)
    return devices


def bounds_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    """Returns the bounds of the part at `index` of an array. Axes that the index lacks are whole."""
    slices = *index, *[slice(None)] * (len(shape) - len(index))
    return tuple(axis.indices(size)[:2] for axis, size in zip(slices, shape, strict=True))


def _can_be_source(values):
    """Returns whether `jax.device_put` can take an array as it is, and copies it even if the device is a CPU."""
    return values.flags.c_contiguous and values.ctypes.data % _ALIASED != 0
