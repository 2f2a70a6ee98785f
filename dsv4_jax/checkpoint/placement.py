"""Puts stored tensors on devices. Each device gets its shard, straight from the file's pages where possible."""

import collections
import concurrent.futures
import gc
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding

from dsv4_jax.checkpoint.keys import Weight
from dsv4_jax.expert_pages import ExpertMemory


Pieces = Sequence[Callable[[], np.ndarray]]
Bounds = tuple[tuple[int, int], ...]
Check = Callable[[int, np.ndarray, np.ndarray], None]
_BLOCK_BYTES = 1 << 24  # unit of copies and checks, which bounds the memory of a check
# XLA on a CPU aliases memory with this alignment instead of copying it.
_ALIASED = 64
_log = logging.getLogger(__name__)


def plan_expert_memory(memory: ExpertMemory, table: Iterable[Weight]) -> None:
    """Decides where the routed experts of a model with these weights lie, and logs it."""
    shapes: dict[str, list[tuple[int, ...]]] = {}  # of the codes, by layer
    for weight in table:
        if weight.is_expert:
            shapes.setdefault(weight.module, []).append(weight.packed_shape)
    _log.info("%s", memory.plan(list(shapes), next(iter(shapes.values()))))


def fill(target: np.ndarray, pieces: Pieces, check: Check | None = None) -> None:
    """Writes pieces to an array of the host.

    Args:
      target: array to write to.
      pieces, check: as for `Staging.place`.
    """
    stack = target.shape[:-2] if len(pieces) > 1 else ()
    for number, index in enumerate(np.ndindex(stack)):
        values = np.asarray(pieces[number]()).reshape(target.shape[len(stack) :])
        with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes infinity
            target[index] = values
        if check is not None:
            check(number, values, target[index])


class Staging:
    """A reused host buffer for one array at a time. First writes to fresh memory are slow."""

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

        Each piece is read once. Shards of `dtype` that are contiguous in a single piece go to their devices from there;
        all others pass through the buffer.

        Args:
          pieces: functions that return the values of a piece, possibly a view of a file. A piece is the whole array, or
            a matrix (the last two axes) of a stack in row-major order.
          shape, dtype: shape and dtype of the whole array. Values are cast.
          where: sharding of the array; None = the default device.
          check: function that is called with the number of a piece, some of its values and the cast values, from any
            thread.
          threads: whether several threads copy pieces, which pays for views; otherwise one piece is made at a time.
        """
        stack = shape[:-2] if len(pieces) > 1 else ()
        devices = _devices_by_shard(shape, where)
        shards = dict(zip(devices, self._views([[b - a for a, b in bounds] for bounds in devices], dtype), strict=True))

        def blocks() -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
            for number, index in enumerate(np.ndindex(stack)):
                values = np.asarray(pieces[number]()).reshape(shape[len(stack) :])
                for bounds, shard in shards.items():
                    if all(start <= i < end for i, (start, end) in zip(index, bounds, strict=False)):
                        part = values[tuple(slice(*pair) for pair in bounds[len(stack) :])]
                        target = shard[tuple(i - start for i, (start, _) in zip(index, bounds, strict=False))]
                        if direct := not stack and part.dtype == dtype and _can_be_source(part):
                            shards[bounds] = part
                        part, target = np.atleast_1d(part, target)
                        rows = max(1, len(target) * _BLOCK_BYTES // max(target.nbytes, 1))
                        for i in range(0, len(target), rows):
                            yield number, part[i : i + rows], None if direct else target[i : i + rows]

        def fill_block(block: tuple[int, np.ndarray, np.ndarray | None]) -> None:
            number, part, target = block
            if target is not None:
                with np.errstate(over="ignore", invalid="ignore"):  # overflow becomes infinity
                    target[...] = part
            if check is not None:
                check(number, part, part if target is None else target)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            # A single thread copies slower than a disk may read.
            collections.deque((pool.map if threads else map)(fill_block, blocks()), maxlen=0)
            # A single thread cannot feed several devices either.
            puts = [(shard, device) for bounds, shard in shards.items() for device in devices[bounds]]
            arrays = list(pool.map(jax.device_put, *zip(*puts, strict=True)))
        array = arrays[0] if where is None else jax.make_array_from_single_device_arrays(shape, where, arrays)
        return jax.block_until_ready(array)

    def _views(self, shapes: list[list[int]], dtype: np.typing.DTypeLike) -> list[np.ndarray]:
        """Returns views of the buffer, misaligned so that no array aliases them."""
        sizes = [math.prod(shape) * np.dtype(dtype).itemsize for shape in shapes]
        ends = np.cumsum([-(-size // _ALIASED) * _ALIASED for size in sizes])
        if (needed := int(ends[-1]) + _ALIASED) > self._memory.size:
            self._memory = np.empty(0, np.uint8)
            # A transfer that ended in a thread of JAX frees its source at the next collection: hold no two buffers.
            gc.collect(0)
            self._memory = np.empty(needed, np.uint8)
        offset = (8 - self._memory.ctypes.data) % _ALIASED
        starts = [offset, *(offset + ends[:-1])]
        places = zip(starts, sizes, shapes, strict=True)
        return [self._memory[start : start + size].view(dtype).reshape(shape) for start, size, shape in places]


def _devices_by_shard(shape: tuple[int, ...], where: NamedSharding | None) -> dict[Bounds, list[jax.Device | None]]:
    """Returns the devices of this process that hold each shard of an array, by the shard's bounds on each axis."""
    if where is None:
        return {tuple((0, size) for size in shape): [None]}
    devices = collections.defaultdict(list)
    for device, index in where.addressable_devices_indices_map(shape).items():
        assert index is not None
        devices[tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))].append(device)
    return devices


def _can_be_source(values: np.ndarray) -> bool:
    return values.flags.c_contiguous and values.ctypes.data % _ALIASED != 0
