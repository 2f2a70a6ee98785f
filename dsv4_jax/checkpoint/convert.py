"""Converts a checkpoint to another storage or naming, tensor by tensor."""

import collections
import math
import shutil
from pathlib import Path

from dsv4_jax.checkpoint import keys
from dsv4_jax.checkpoint.keys import Naming, Storage
from dsv4_jax.checkpoint.match import match_weights
from dsv4_jax.checkpoint.reader import INDEX_NAME, read_checkpoint
from dsv4_jax.checkpoint.rounding_loss import RoundingLoss
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
from dsv4_jax.quant import is_quantized_kind


_ROWS = 1 << 16  # number of rows of a quantized weight that are dequantized at a time, a multiple of a block's rows
_COPIED = ".json", ".jinja", ".txt", ".md", ""  # suffixes of the files that are copied, such as tokenizer.json


def convert_checkpoint(
    source: str | Path,
    folder: str | Path,
    *,
    weights: Storage,
    naming: Naming | None = None,
    shard_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> dict[str, RoundingLoss]:
    """Writes a checkpoint's weights to another folder, in another storage or naming.

    FP8 and FP4 weights that keep their format are copied byte for byte. If they become bfloat16 or float32, each value
    stays exact. All other weights are rounded as `save_release` rounds them. One tensor at a time is in memory. The
    tensors of V4.1's image encoder are left out; the log says so.

    Draft layers are converted too. Copies of the embedding and the head among their tensors are left out, because draft
    layers share these weights with the model. Small files of the source folder that are not about weights, such as
    tokenizer.json, are copied.

    Args:
      source: folder of the checkpoint, or one `.safetensors` file with its config.json beside it.
      folder: destination: a path that does not exist, or an empty folder. Until everything is written, the files are in
        the folder `.NAME.partial` beside the destination.
      weights: storage of the weights, as in `save_release`.
      naming: naming of the tensors, see `checkpoint.keys`. None = the source's naming.
      shard_bytes: maximum size of a file in bytes. A file is larger if a single tensor with its scale is.
      progress: whether to show a progress bar on standard error.

    Returns:
      {storage in the new files, such as "FP4": the loss that rounding caused in the tensors of this storage}. The loss
      is 0 for weights that are copied, and for weights that the new storage holds exactly.

    Raises:
      ValueError: `load_checkpoint` could not read the source; a value is NaN or infinite in the new storage; `weights`
        and `naming` exclude each other (see `save_release`); the destination is not empty or its disk has too little
        room; `.NAME.partial` exists.
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
    # If the head is tied to the embedding, `table[0]`, and has no tensor in the source, no tensor is written for it.
    pairs = [(old, new) for old, new in pairs if old is table[0] or old.sources != table[0].sources]
    headers = [entries for _, new in pairs for entries in tensor_headers(new, weights)]
    _check_room(folder, total_bytes(headers))

    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        raise ValueError(f"{partial} exists: another conversion writes there, or was interrupted; then remove it")
    losses = collections.defaultdict(RoundingLoss)

    def arrays():
        """Yields the arrays to write, in the order of the headers."""
        for old, new in pairs:
            dtype = new.stored_dtype(weights)
            yield from _converted(old, new, dtype, tensors, losses[dtype])

    try:
        content = describe_storage(content, weights, config.weight_block)
        title = "Converting weights" if progress else None
        write_checkpoint(partial, content, headers, arrays(), shard_bytes=shard_bytes, title=title)
        for file in (source if source.is_dir() else source.parent).iterdir():
            is_about_weights = file.name in ("config.json", INDEX_NAME)
            if file.is_file() and file.suffix in _COPIED and not file.name.startswith(".") and not is_about_weights:
                shutil.copy(file, partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return dict(losses)


def _converted(old, new, dtype, tensors, loss):
    """Yields the arrays to write for one parameter, in the order of its tensors in the destination.

    Args:
      old: the parameter with its tensors in the source.
      new: the same parameter with its tensors in the destination. Both list the parameter's values in the same order.
      dtype: storage in the destination's files, such as "BF16" or "FP8", see `Weight`.
      tensors: the source's tensors by name.
      loss: record to which the loss of rounding is added.
    """
    # The number of new tensors for each old tensor; 1 if each old tensor is one new tensor or a part of one.
    pieces = max(1, len(new.sources) // len(old.sources))
    for name in old.sources:
        tensor = tensors[name]
        if isinstance(tensor, QuantizedTensor) and tensor.dtype == dtype:  # copied as it is
            yield tensor.codes.data
            yield tensor.scale.data
            loss.tensors[name].num_values += math.prod(tensor.shape)
            continue
        if isinstance(tensor, QuantizedTensor) and not is_quantized_kind(dtype):  # dequantized, some rows at a time
            for start in range(0, tensor.shape[0], _ROWS):
                yield from encode(name, tensor.load(start, start + _ROWS), dtype, loss)
            continue
        for piece in tensor.load().reshape(pieces, -1, tensor.shape[-1]):
            yield from encode(name, piece, dtype, loss)


def _check_room(folder, nbytes):
    """Raises ValueError unless the destination is new or empty, and its disk has `nbytes` bytes left."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} must not exist yet, or be an empty folder")
    if not folder.parent.is_dir():
        raise ValueError(f"{folder} cannot be made: there is no folder {folder.parent}")
    if nbytes > (free := shutil.disk_usage(folder.parent).free):
        raise ValueError(f"{folder} needs {readable_bytes(nbytes)}, and the disk has {readable_bytes(free)} left")
