"""The header of a safetensors file: names, dtypes and offsets of its tensors.

The format (https://github.com/huggingface/safetensors): 8 bytes of header length, little-endian, a JSON header of
name -> {dtype, shape, data_offsets}, then the data without gaps. It is read and written here because the safetensors
package's NumPy functions know neither BF16 nor the 8-bit floats that the release stores.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from dsv4_jax.common.downloads import check_not_lfs_pointer, parse_json


DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors package's own limit
_MAX_SIZE = 2**48  # largest axis; numpy cannot represent much more, even if another axis is 0


@dataclasses.dataclass(frozen=True)
class TensorHeader:
    """A tensor's entry in the header: name, dtype (a key of `DTYPES`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_header(tensors: Iterable[TensorHeader], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes that precede the data of consecutive tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: np.ndarray, name: str) -> tuple[dict[str, tuple[TensorHeader, np.ndarray]], dict[str, Any]]:
    """Parses a whole file, [bytes] uint8, which may be memory-mapped; `name` is its name in errors.

    Returns ({name of a tensor: (header, bytes as a view of `file`)}, metadata). Raises ValueError if the file is a Git
    LFS pointer, or if the header is truncated, too long, not JSON, or contradicts the data: offsets out of range,
    overlapping, with gaps, or of another size than shape and dtype need.
    """
    check_not_lfs_pointer(name, file[:64].tobytes())
    if len(file) < 8:
        raise ValueError(f"{name} has {len(file)} bytes; a safetensors file starts with 8 bytes of header length.")
    length = int.from_bytes(file[:8].tobytes(), "little")
    if length > min(len(file) - 8, _MAX_HEADER_BYTES):
        raise ValueError(
            f"{name} claims a header of {length} bytes, but {len(file) - 8} follow (at most {_MAX_HEADER_BYTES} are "
            "accepted): the file is truncated or no safetensors file."
        )
    header = parse_json(name, file[8 : 8 + length].tobytes())
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{name}: __metadata__ is {metadata!r}; it must be an object.")
    data = file[8 + length :]
    tensors = {}
    spans = []
    for key, entry in header.items():
        tensor, start, stop = _check_entry(name, key, entry, len(data))
        tensors[key] = tensor, data[start:stop]
        spans.append((start, stop, key))
    _check_spans(name, spans, len(data))
    return tensors, metadata


def _are_sizes(value: Any, most: int) -> bool:
    """Whether a value is a list of at most so many sizes."""
    return isinstance(value, list) and len(value) <= most and all(type(n) is int and 0 <= n <= _MAX_SIZE for n in value)


def _check_entry(file: str, name: str, entry: Any, data_bytes: int) -> tuple[TensorHeader, int, int]:
    """Returns a tensor's header and where its bytes begin and end in the data."""
    where = f"{file}: {name}"
    is_well_formed = (
        isinstance(entry, dict)
        and entry.keys() == {"dtype", "shape", "data_offsets"}
        and entry["dtype"] in list(DTYPES)
        and _are_sizes(entry["shape"], most=32)
        and _are_sizes(entry["data_offsets"], most=2)
        and len(entry["data_offsets"]) == 2
    )
    if not is_well_formed:
        raise ValueError(
            f"{where} is described by {entry!r}; it must have a dtype ({', '.join(DTYPES)}), a shape of at most 32 "
            "sizes and data_offsets [start, stop]."
        )
    dtype = entry["dtype"]
    shape = entry["shape"]
    start, stop = entry["data_offsets"]
    if stop > data_bytes:
        raise ValueError(f"{where} ends at byte {stop} of the data, but the file has {data_bytes}: it is truncated.")
    tensor = TensorHeader(name, dtype, tuple(shape))
    if tensor.nbytes != stop - start:
        raise ValueError(
            f"{where} is {dtype} {shape}, which takes {tensor.nbytes} bytes, but data_offsets {[start, stop]} span "
            f"{stop - start}."
        )
    return tensor, start, stop


def _check_spans(file: str, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    end = 0
    before = "the header"
    for start, stop, name in sorted(spans):
        if start != end:
            problem = "overlaps" if start < end else "leaves a gap after"
            raise ValueError(f"{file}: {name} starts at data byte {start} and {problem} {before} (ends at {end}).")
        end = stop
        before = name
    if end != data_bytes:
        raise ValueError(f"{file} has {data_bytes} bytes of data, but its tensors end at byte {end}, after {before}.")
