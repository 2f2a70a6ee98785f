"""Reads safetensors files as views of mapped memory.

Our own reader because the safetensors package's numpy reader knows neither F8_E4M3 nor F8_E8M0, which the release
stores. The format (https://github.com/huggingface/safetensors): 8 bytes of header length, little-endian, a JSON header
of name -> {dtype, shape, data_offsets}, then the data without gaps.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the safetensors package's own limit
_MAX_SIZE = 2**48  # of an axis; numpy cannot represent much more, even where another axis is 0
_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
}
# The release's quantised storage: codes and scales, which `storage` puts together.
_QUANTISED_ITEMSIZE = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file; nothing of its data is read before `load`.

    Attributes:
        name: its key in the file.
        dtype: as the header spells it, e.g. "BF16".
        shape: its shape.
        file: the file it lies in.
        data: its bytes, uint8, a view of the mapped file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    data: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def quantised(self) -> bool:
        """Whether its values need a scale that lies beside it."""
        return self.dtype in _QUANTISED_ITEMSIZE

    def load(self) -> np.ndarray:
        """The values, `shape`, as a read-only view of the mapped file.

        Raises:
            ValueError: the tensor is quantised.
        """
        if self.quantised:
            raise ValueError(
                f"{self.name} in {self.file} is stored as {self.dtype}: codes that mean something only with the scale "
                "beside them (checkpoint.storage)."
            )
        return self.data.view(_DTYPES[self.dtype]).reshape(self.shape)


def read_file(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, by name, after checking its header against its size.

    Raises:
        ValueError: no such file, or a header that is cut off, absurdly long, no JSON, or says what the data contradicts
            (offsets out of range, overlapping, with gaps, of another size than shape and dtype need). The message names
            the file and the tensor.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size < 8:
            raise ValueError(f"{path} has {size} bytes; a safetensors file starts with 8 bytes of header length.")
        mapped = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}.") from None
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(
            f"{path} claims a header of {length} bytes, but {size - 8} follow (at most {_MAX_HEADER_BYTES} are "
            "accepted): the file is truncated or no safetensors file."
        )
    header = _parse_json(path, mapped[8 : 8 + length].tobytes())
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise ValueError(f"{path}: __metadata__ is {metadata!r}; it must be an object.")
    data = mapped[8 + length :]
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, start, stop = _check_entry(path, name, entry, len(data))
        tensors[name] = StoredTensor(name, dtype, shape, path, data[start:stop])
        spans.append((start, stop, name))
    _check_spans(path, spans, len(data))
    return tensors


def read_checkpoint(path: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, by name.

    Args:
        path: a `.safetensors` file, or a folder with `model.safetensors` or with shards and their
            `model.safetensors.index.json`.

    Raises:
        ValueError: as `read_file`; or no checkpoint in the folder; or an index that names missing files or tensors,
            leaves tensors out, or shards that hold a tensor twice.
    """
    path = Path(path)
    if not path.is_dir():
        return read_file(path)
    if (path / SINGLE_NAME).exists():
        return read_file(path / SINGLE_NAME)
    if (path / INDEX_NAME).exists():
        return _read_shards(path / INDEX_NAME)
    shards = sorted(file.name for file in path.glob("*.safetensors"))
    found = f"only {', '.join(shards[:3])}{', ...' if len(shards) > 3 else ''}" if shards else "no *.safetensors at all"
    raise ValueError(f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}; {found}.")


def _read_shards(index: Path) -> dict[str, StoredTensor]:
    try:
        content = index.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {index}: {error.strerror}.") from None
    weight_map = _parse_json(index, content).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map of tensor names to file names.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} places {name} in {file!r}; it must be the name of a file beside the index.")
        if not (index.parent / file).is_file():
            raise ValueError(f"{index} places {name} in {file}, and there is no such file.")
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        shard = read_file(index.parent / file)
        for name in shard:
            if name in tensors:
                raise ValueError(f"{name} lies in two shards: {tensors[name].file.name} and {file}.")
            if name not in weight_map:
                raise ValueError(f"{name} lies in {file}, but {index} does not list it.")
        tensors |= shard
    for name, file in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{index} places {name} in {file}, which does not hold it.")
        if tensors[name].file.name != file:
            raise ValueError(f"{index} places {name} in {file}, but it lies in {tensors[name].file.name}.")
    return tensors


def _parse_json(path: Path, content: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
        return result

    try:
        parsed = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its JSON is broken: {error}.") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: its JSON is no object but {type(parsed).__name__}.")
    return parsed


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_entry(path: Path, name: str, entry: Any, data_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    where = f"{path}: {name}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} is described by {entry!r}; it must have dtype, shape and data_offsets.")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    itemsizes = {key: value.itemsize for key, value in _DTYPES.items()} | _QUANTISED_ITEMSIZE
    if not isinstance(dtype, str) or dtype not in itemsizes:
        raise ValueError(f"{where} has dtype {dtype!r}; known are {', '.join(itemsizes)}.")
    if not _is_sizes(shape) or len(shape) > 32 or max(shape, default=0) > _MAX_SIZE:
        raise ValueError(f"{where} has shape {shape!r}; it must be a short list of sizes.")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has data_offsets {offsets!r}; they must be [start, stop].")
    start, stop = offsets
    if stop > data_bytes:
        raise ValueError(f"{where} ends at byte {stop} of the data, but the file has {data_bytes}: it is truncated.")
    needed = math.prod(shape) * itemsizes[dtype]
    if needed != stop - start:
        raise ValueError(
            f"{where} is {dtype} {shape}, which takes {needed} bytes, but data_offsets {offsets} span {stop - start}."
        )
    return dtype, tuple(shape), start, stop


def _check_spans(path: Path, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    end, before = 0, "the header"
    for start, stop, name in sorted(spans):
        if start != end:
            problem = "overlaps" if start < end else "leaves a gap after"
            raise ValueError(f"{path}: {name} starts at data byte {start} and {problem} {before} (ends at {end}).")
        end, before = stop, name
    if end != data_bytes:
        raise ValueError(f"{path} has {data_bytes} bytes of data, but its tensors end at byte {end}, after {before}.")
