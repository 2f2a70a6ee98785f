"""Converts a checkpoint to another storage or naming, tensor by tensor."""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from dsv4_jax.checkpoint import keys
from dsv4_jax.checkpoint.keys import Naming, Storage, Weight
from dsv4_jax.checkpoint.match import match_weights
from dsv4_jax.checkpoint.progress import byte_bar
from dsv4_jax.checkpoint.reader import INDEX_NAME, StoredTensor, read_checkpoint
from dsv4_jax.checkpoint.save import (
    check_storage,
    describe_storage,
    encode,
    tensor_headers,
    total_bytes,
    write_checkpoint,
)
from dsv4_jax.checkpoint.storage import QuantizedTensor
from dsv4_jax.common.sizes import readable_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.config_json import read_json


_COPIED = ".json", ".jinja", ".txt", ".md", ""  # ends of files that lie beside the weights, such as tokenizer.json


def convert_checkpoint(
    source: str | Path,
    folder: str | Path,
    *,
    weights: Storage,
    naming: Naming | None = None,
    shard_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> None:
    """Writes a checkpoint's weights to another folder, in another storage or naming.

    Weights that are FP8 or FP4 already and stay so are copied byte for byte. bfloat16 and float32 hold each of their
    values exactly. Other weights are rounded as `save_release` rounds them. A part of one tensor is in memory at a
    time. Draft layers are converted too; copies of the embedding and the head in them are left out, as loading does.
    Other small files of the folder, such as tokenizer.json, are copied.

    Args:
      source: folder of the checkpoint, or one `.safetensors` file with its config.json beside it.
      folder: destination, which must not exist or be empty. It appears when all is written.
      weights: storage of the weights, as in `save_release`.
      naming: names of the tensors, see `checkpoint.keys`. None = those of the source.
      shard_bytes: largest size of a file, unless a single tensor with its scale exceeds it.
      progress: whether to show a progress bar on standard error.

    Raises:
      ValueError: the source is none that `load_checkpoint` reads; a value is NaN or infinite in the new storage;
        `weights` and `naming` exclude each other (see `save_release`); the destination is not empty, or has too
        little room.
      OSError: a file cannot be written.
    """
    source = Path(source)
    folder = Path(folder)
    content = read_json(source)
    stored = read_checkpoint(source)
    config = DSV4Config.from_hf(content, mtp=any(keys.is_draft(x) and not keys.is_draft_copy(x) for x in stored))
    table, tensors = match_weights(source, stored, config)
    naming = naming or keys.detect_naming(config, stored)
    check_storage(weights, naming)
    pairs = zip(table, keys.weights(config, naming), strict=True)
    # A head that no tensor is stays the embedding's copy.
    (embedding,) = (weight.sources for weight in table if weight.path == keys.EMBEDDING)
    pairs = [(old, new) for old, new in pairs if old.path == keys.EMBEDDING or old.sources != embedding]
    headers = [entries for _, new in pairs for entries in tensor_headers(new, weights)]
    _check_room(folder, total_bytes(headers))

    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        raise ValueError(f"{partial} exists: another conversion writes there, or was interrupted; then remove it")
    try:
        arrays = (array for old, new in pairs for array in _converted(old, new, new.stored_dtype(weights), tensors))
        with byte_bar("Converting weights", total_bytes(headers), progress) as advance:
            write_checkpoint(
                partial, describe_storage(content, weights), headers, arrays, shard_bytes=shard_bytes, advance=advance
            )
        _copy_others(source if source.is_dir() else source.parent, partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _converted(
    old: Weight, new: Weight, dtype: str, tensors: Mapping[str, StoredTensor | QuantizedTensor]
) -> Iterator[np.ndarray]:
    """Yields the data of a parameter's tensors in the destination, which hold the source's values in the same order."""
    pieces = max(1, len(new.sources) // len(old.sources))  # tensors that one of the source becomes
    for name in old.sources:
        tensor = tensors[name]
        if isinstance(tensor, QuantizedTensor) and tensor.codes.dtype == dtype:
            yield tensor.codes.data
            yield tensor.scale.data
            continue
        for piece in tensor.load().reshape(pieces, -1, tensor.shape[-1]):
            yield from encode(name, piece, dtype)


def _copy_others(source: Path, folder: Path) -> None:
    """Copies the small files of a checkpoint that are not about weights."""
    for file in source.iterdir():
        is_about_weights = file.name in ("config.json", INDEX_NAME)
        if file.is_file() and file.suffix in _COPIED and not file.name.startswith(".") and not is_about_weights:
            shutil.copy(file, folder)


def _check_room(folder: Path, nbytes: int) -> None:
    """Raises ValueError unless the destination is new or empty, and its disk has room for so many bytes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} must not exist yet, or be an empty folder")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder} cannot be made: there is no folder {folder.parent}")
    if nbytes > (free := shutil.disk_usage(folder.parent).free):
        raise ValueError(f"{folder} needs {readable_bytes(nbytes)}, and the disk has {readable_bytes(free)} left")
