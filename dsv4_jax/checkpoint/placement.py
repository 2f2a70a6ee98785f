"""Puts stored tensors on devices: each gets its part, straight from the file's pages."""

import collections
import concurrent.futures
import gc
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding


Pieces = Sequence[Callable[[], np.ndarray]]
Copy = Callable[[int, np.ndarray, np.ndarray], None]


def place(
    pieces: Pieces,
    shape: tuple[int, ...],
    dtype: np.typing.DTypeLike,
    where: NamedSharding | None,
    copy: Copy | None = None,
) -> jax.Array:
    """An array on its devices, made of pieces.

    Each piece is read once; the host holds the parts of this array.

    Args:
      pieces: each returns a piece's values, possibly a view of a file: the whole array, or the matrices (the last two
        axes) of a stack in row-major order.
      shape, dtype: of the whole array.
      where: how it is cut; None = it lies on the default device.
      copy: called with the number of a piece, a part of its values and where to write them; None = they are of `dtype`
        and stay as they are.

    Returns:
      The array; its transfers may still run.
    """
    stack = shape[:-2] if len(pieces) > 1 else ()
    if where is None:
        devices = {tuple((0, n) for n in shape): [None]}
    else:
        devices = collections.defaultdict(list)
        for device, index in where.addressable_devices_indices_map(shape).items():
            assert index is not None
            devices[tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))].append(device)
    # A transfer's source is freed when Python collects, if it ended in a thread of JAX: else two would be held.
    gc.collect(0)
    # Copies, also where one piece is the whole: on a CPU an array may else be the file's pages, which can change.
    parts = {bounds: np.empty([end - start for start, end in bounds], dtype) for bounds in devices}

    def read(number: int, at: tuple[int, ...]) -> None:
        values = pieces[number]().reshape(shape[len(stack) :])
        for bounds, part in parts.items():
            if all(start <= i < end for i, (start, end) in zip(at, bounds, strict=False)):
                here = part[tuple(i - start for i, (start, _) in zip(at, bounds, strict=False))]
                some = values[_slices(bounds[len(stack) :])]
                if copy is None:
                    here[...] = some
                else:
                    copy(number, some, here)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        # One thread copies bytes slower than a disk may read them. Conversions take memory, and threads would keep it.
        run = threads.map if copy is None else map
        collections.deque(run(read, range(len(pieces)), np.ndindex(stack)), maxlen=0)
        # Nor does one thread hand over as many bytes as several devices take.
        puts = [(part, device) for bounds, part in parts.items() for device in devices[bounds]]
        arrays = list(threads.map(jax.device_put, *zip(*puts, strict=True)))
    return arrays[0] if where is None else jax.make_array_from_single_device_arrays(shape, where, arrays)


def _slices(bounds):
    return tuple(slice(*pair) for pair in bounds)
