"""The header of a safetensors file: names, dtypes and offsets of its tensors.

A file (https://github.com/huggingface/safetensors) has the length of the header in 8 bytes, little-endian, then a JSON
header {name: {dtype, shape, data_offsets}}, then the data without gaps. The safetensors package checks headers. It does
not read the data here, because its NumPy functions know neither BF16 nor the 8-bit floats of the release.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from dsv4_jax.common.downloads import check_not_lfs_pointer


_TYPES = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I8": np.int8,
    "U8": np.uint8,
}
DTYPES = {name: np.dtype(kind) for name, kind in _TYPES.items()}
_MAX_AXES = 32
# Maximum size of an axis. The limit of NumPy is not much higher, and also holds for arrays with an axis of size 0.
_MAX_SIZE = 2**48


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """A tensor's entry in the header: name, dtype (a key of `DTYPES`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_header(tensors: Iterable[TensorHeader], metadata: Mapping[str, str]) -> bytes:
    """Returns the beginning of a file, up to the data, which must follow in the order of `tensors`.

    Args:
      tensors: headers of the file's tensors.
      metadata: texts that are stored as "__metadata__".
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(path: Path) -> tuple[dict[str, tuple[TensorHeader, slice]], dict[str, str]]:
    """Reads the header of a file.

    Returns:
      ({name of a tensor: (header, range of its bytes in the file)}, metadata).

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is empty, a Git LFS pointer, truncated or damaged; or a tensor has a dtype that `DTYPES`
        lacks, more than 32 axes, or an axis above 2**48.
    """
    if path.stat().st_size == 0:  # also true for a pipe, from which reading would block
        raise ValueError(f"{path} has 0 bytes: it is truncated or no safetensors file.")
    with path.open("rb") as content:
        beginning = content.read(64)
    check_not_lfs_pointer(path, beginning)
    try:
        with safetensors.safe_open(path, "np") as file:
            lazy_tensors = {name: file.get_slice(name) for name in file.offset_keys()}
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated, damaged or no safetensors file: {error}.") from None
    # The file holds the length of the header in 8 bytes, the header, and then the tensors one after another.
    start = 8 + int.from_bytes(beginning[:8], "little")
    tensors = {}
    for name, lazy_tensor in lazy_tensors.items():
        tensor = TensorHeader(name, lazy_tensor.get_dtype(), tuple(lazy_tensor.get_shape()))
        is_too_large = len(tensor.shape) > _MAX_AXES or max(tensor.shape, default=0) > _MAX_SIZE
        if tensor.dtype not in DTYPES or is_too_large:
            raise ValueError(
                f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}; its dtype must be one of {', '.join(DTYPES)}, "
                f"and its shape have at most {_MAX_AXES} sizes of at most {_MAX_SIZE}."
            )
        stop = start + tensor.nbytes
        tensors[name] = tensor, slice(start, stop)
        start = stop
    return tensors, metadata
