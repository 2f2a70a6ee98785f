"""Reads the tensors of safetensors files as views of memory-mapped files."""

import dataclasses
import hashlib
import logging
import os
from pathlib import Path

import numpy as np

from dsv4_jax.common.downloads import read_json_object, snapshot_hint
from dsv4_jax.common.safetensors_header import DTYPES, TensorHeader, read_header


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_log = logging.getLogger(__name__)
# The dtypes of the release's quantized storage: FP8 codes, scales and FP4 codes. `storage.join_scales` joins codes and
# scales.
_QUANTIZED = ("F8_E4M3", "F8_E8M0", "I8")


@dataclasses.dataclass(frozen=True)
class StoredTensor(TensorHeader):
    """A tensor in a memory-mapped safetensors file.

    Attributes:
      name, dtype, shape: as in the file's header.
      file: path of the file.
      data: [nbytes] uint8 view of the tensor's bytes in the mapped file.
    """

    file: Path
    data: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def quantized(self) -> bool:
        """Whether the tensor holds codes or scales of a quantized weight, see `checkpoint.storage`."""
        return self.dtype in _QUANTIZED

    def load(self) -> np.ndarray:
        """Returns the values, of `shape`, as a read-only view of the mapped file.

        Raises ValueError if the tensor is quantized.
        """
        if self.quantized:
            raise ValueError(
                f"{self.name} in {self.file} is stored as {self.dtype}: codes that mean something only with the scale "
                "beside them (checkpoint.storage)."
            )
        return self.data.view(DTYPES[self.dtype]).reshape(self.shape)


def read_file(path: str | Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one safetensors file, {name: tensor}.

    Raises ValueError if the file cannot be read, or its header is broken (see `safetensors_header.read_header`).
    """
    path = Path(path)
    try:
        headers, _ = read_header(path)
        mapped = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}.") from None
    return {name: StoredTensor(name, x.dtype, x.shape, path, mapped[span]) for name, (x, span) in headers.items()}


def read_checkpoint(path: str | Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint, {name: tensor}.

    Other safetensors files of the folder are not read, and a warning names them.

    Args:
      path: a `.safetensors` file, or a folder with `model.safetensors` or with shards and their
        `model.safetensors.index.json`.

    Raises:
      ValueError: a file cannot be read or is broken (see `read_file`); the folder holds no checkpoint, or two; the
        index names missing files or tensors, or leaves tensors out; two shards hold the same tensor.
    """
    path = Path(path)
    if not path.is_dir():
        return read_file(path)
    files = {file.name for file in path.glob("*.safetensors")}
    if (path / INDEX_NAME).exists():
        tensors = _read_shards(path / INDEX_NAME)
        unused = files - {tensor.file.name for tensor in tensors.values()}
    elif SINGLE_NAME in files:
        tensors = read_file(path / SINGLE_NAME)
        unused = files - {SINGLE_NAME}
    else:
        content = f"only {_shortened(files)}." if files else f"no *.safetensors at all.{snapshot_hint(path)}"
        raise ValueError(f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}; {content}")
    if SINGLE_NAME in unused:
        raise ValueError(
            f"{path} holds two checkpoints: {SINGLE_NAME}, and the shards of {INDEX_NAME}. Remove one of them, or give "
            f"the path of {SINGLE_NAME}"
        )
    if unused:
        _log.warning("%s: %s is not read, since no other file refers to it", path, _shortened(unused))
    return tensors


def _shortened(names):
    return ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")


def weights_fingerprint(path: str | Path) -> str:
    """Returns a SHA-256 hash, in hexadecimal, that tells different checkpoints apart without reading them whole.

    The hash covers the name, the dtype, the shape and up to 4 KiB from the middle of each tensor. The number of files,
    their names and their times do not matter.

    Args:
      path: the checkpoint, as for `read_checkpoint`.

    Raises:
      ValueError: `read_checkpoint` cannot read the checkpoint.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(read_checkpoint(path).items()):
        digest.update(repr((name, tensor.dtype, tensor.shape)).encode())
        middle = tensor.nbytes // 2
        digest.update(tensor.data[max(0, middle - 2048) : middle + 2048])
    return digest.hexdigest()


def _read_shards(index):
    """Returns the tensors of all shards of an index. Raises ValueError if the index and the shards disagree."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map of tensor names to file names.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} places {name} in {file!r:.200}; it must be the name of a file beside the index.")
        if not os.path.isfile(index.parent / file):  # unlike Path.is_file, it returns False for impossible names
            raise ValueError(f"{index} places {name} in {file:.200}, and there is no such file.")
    tensors = {}
    for file in sorted(set(weight_map.values())):
        shard = read_file(index.parent / file)
        if twice := sorted(shard.keys() & tensors.keys()):
            raise ValueError(f"{twice[0]} lies in two shards: {tensors[twice[0]].file.name} and {file}.")
        tensors |= shard
    files = {name: tensor.file.name for name, tensor in tensors.items()}
    for name in sorted(files.keys() | weight_map.keys()):
        listed = weight_map.get(name, "no file")
        stored = files.get(name, "none of its files")
        if listed != stored:
            raise ValueError(f"{index} places {name} in {listed}, but it lies in {stored}.")
    return tensors
