"""The file that keeps how often experts were selected, so that the next process can choose experts for the GPU.

It is an .npz archive with a float32 array [E] for each layer, named after the layer.
"""

import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from pallas_kernels.runtime.atomic_write import atomic_write


_log = logging.getLogger(__name__)
_MAX_HEADER_BYTES = 4096  # maximum size of the header of an array in the file; NumPy writes 128 bytes


def read_frequencies(path: Path, num_experts: int) -> dict[str, Float[np.ndarray, "E"]]:
    """Reads the counts of earlier processes from the file.

    Args:
      path: the file.
      num_experts: number of experts of a layer.

    Returns:
      {name of a layer: [E] float64 counts}. The result is empty if the file does not exist. It is also empty, and a
      warning is logged, if the file is damaged or does not hold such counts.
    """
    if path.exists() and not path.is_file():
        return _ignored(path, "it is no regular file")
    try:
        with zipfile.ZipFile(path) as archive:
            largest = max((member.file_size for member in archive.infolist()), default=0)
        if largest > (limit := _MAX_HEADER_BYTES + 8 * num_experts):
            return _ignored(path, f"a member has {largest} bytes; {num_experts} counts take at most {limit}")
        with np.load(path, allow_pickle=False) as file:
            counts = {name: np.asarray(file[name]) for name in file.files}
    except FileNotFoundError:
        return {}
    # For damaged files, NumPy and zipfile raise all kinds of errors: MemoryError, NotImplementedError, TokenError ..
    except Exception as error:
        return _ignored(path, f"it cannot be read: {type(error).__name__}: {error}")
    for name, row in counts.items():
        if row.dtype.kind != "f" or row.shape != (num_experts,) or not (np.isfinite(row) & (row >= 0)).all():
            return _ignored(path, f"{name} is no count of {num_experts} experts")
    return {name: row.astype(np.float64) for name, row in counts.items()}


def _ignored(path, why):
    _log.warning("the placement of experts in %s is ignored: %s", path, why)
    return {}


def write_frequencies(path: Path, frequencies: Mapping[str, Float[np.ndarray, "E"]]) -> None:
    """Writes the file atomically. If that fails, as on a full disk, a warning is logged and the old file stays.

    Args:
      path: the file.
      frequencies: {name of a layer: [E] counts}.
    """
    rows = dict[str, Any]((name, row.astype(np.float32)) for name, row in frequencies.items())
    try:
        with atomic_write(path) as file:
            np.savez(file, **rows)
    except OSError as error:
        _log.warning("the placement of experts is not kept in %s: %s", path, error)
