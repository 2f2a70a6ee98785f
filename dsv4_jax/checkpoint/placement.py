"""Puts stored tensors on devices: each gets its part, straight from the file's pages."""

import collections
from collections.abc import Callable, Iterator, Sequence

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

    Each piece is read once. The host holds the parts of this array, or nothing where one piece is used as it is.

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
    if copy is None and len(pieces) == 1 and where is not None:
        whole = pieces[0]().reshape(shape)
        # On a CPU an array could else be the file's pages themselves; `device_put` to no named device does not ask.
        return _join(shape, where, ((whole[_slices(bounds)], on) for bounds, on in devices.items()), may_alias=False)
    parts = {bounds: np.empty([end - start for start, end in bounds], dtype) for bounds in devices}
    for number, at in enumerate(np.ndindex(stack)):
        values = pieces[number]().reshape(shape[len(stack) :])
        for bounds, part in parts.items():
            if all(start <= i < end for i, (start, end) in zip(at, bounds, strict=False)):
                here = part[tuple(i - start for i, (start, _) in zip(at, bounds, strict=False))]
                some = values[_slices(bounds[len(stack) :])]
                if copy is None:
                    here[...] = some
                else:
                    copy(number, some, here)
    return _join(shape, where, ((part, devices[bounds]) for bounds, part in parts.items()))


def _join(shape, where, parts: Iterator, **options) -> jax.Array:
    arrays = [jax.device_put(part, device, **options) for part, devices in parts for device in devices]
    return arrays[0] if where is None else jax.make_array_from_single_device_arrays(shape, where, arrays)


def _slices(bounds):
    return tuple(slice(*pair) for pair in bounds)
