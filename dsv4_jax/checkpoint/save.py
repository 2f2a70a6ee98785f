"""Writes a model as the release stores it (FP8 linears, FP4 experts), or in bfloat16 or float32, in any naming."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dsv4_jax.checkpoint import keys
from dsv4_jax.checkpoint.keys import Naming, Storage, Weight
from dsv4_jax.checkpoint.progress import byte_bar
from dsv4_jax.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from dsv4_jax.checkpoint.storage import QUANTIZED_KINDS, quantize_fp4, quantize_fp8, scale_name
from dsv4_jax.common.safetensors_header import DTYPES, TensorHeader, write_header
from dsv4_jax.config.config_json import release_config
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.quant import WEIGHT_BLOCK, quantized_shapes


_CHUNK_BYTES = 1 << 26  # of values that are converted at a time


def save_release(
    model: DeepseekV4ForCausalLM,
    folder: str | Path,
    *,
    weights: Storage = "quantized",
    naming: Naming = "release",
    shard_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> None:
    """Writes config.json, in the release's spelling, and the weights to a folder.

    With "quantized", linears become e4m3 with a power-of-two scale per 128 x 128 block. Experts become e2m1 with one
    per 32 inputs, or bfloat16 if the inputs do not divide into groups. Values are rounded to nearest, ties to even,
    with the smallest scale that holds the block's largest value. Values that were read from this storage are written
    back unchanged. Norms, compressors, routers' weights, embedding and head are rounded to bfloat16; sinks, biases and
    hyper-connections stay float32.

    With "bfloat16", linears and experts are rounded to bfloat16 as well, which holds all values of the quantized
    storage; with "float32", everything is float32.

    Args:
      model: the model.
      folder: destination, which is made if it does not exist; existing files are overwritten.
      weights: storage of the weights, see above.
      naming: names of the tensors, see `checkpoint.keys`. "module" stacks a layer's experts in one tensor.
      shard_bytes: largest size of a file, unless a single tensor with its scale exceeds it.
      progress: whether to show a progress bar on standard error.

    Raises:
      ValueError: `shard_bytes` is not positive, a parameter is not finite, `weights` and `naming` exclude each other
        (see `check_storage`), or the release's spelling cannot express the layers: hash layers follow others, or a
        layer's spec is not that of its rate in a release.
    """
    if shard_bytes < 1:
        raise ValueError(f"{shard_bytes=} must be at least 1")
    check_storage(weights, naming)
    parameters = parameter_views(model)
    table = list(keys.weights(model.config, naming))
    headers = [entries for weight in table for entries in tensor_headers(weight, weights)]
    for weight in table:
        if not np.isfinite(np.asarray(parameters[weight.path].read(), np.float32)).all():
            raise ValueError(f"{weight.path} has NaN or infinite values")

    def arrays() -> Iterator[np.ndarray]:
        for weight in table:
            value = np.asarray(parameters[weight.path].read()).reshape(len(weight.sources), *weight.source_shape)
            for name, piece in zip(weight.sources, value, strict=True):
                yield from encode(name, piece, weight.stored_dtype(weights))

    content = describe_storage(release_config(model.config), weights)
    with byte_bar("Saving weights", total_bytes(headers), progress) as advance:
        write_checkpoint(folder, content, headers, arrays(), shard_bytes=shard_bytes, advance=advance)


def write_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    headers: Iterable[list[TensorHeader]],
    arrays: Iterable[np.ndarray],
    *,
    shard_bytes: int = 5 * 10**9,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Writes config.json and safetensors files to a folder.

    Args:
      folder: destination, which is made if it does not exist; existing files are overwritten.
      config: content of config.json.
      headers: the tensors in order, of which those of a list lie in the same file.
      arrays: the tensors' data in the same order. Several arrays may follow one another in a tensor, so that no
        tensor has to be in memory as a whole.
      shard_bytes: largest size of a file, unless a single list of tensors exceeds it.
      advance: function that is called with the number of bytes after each array.
    """
    folder = Path(folder)
    content = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content)

    shards: list[list[TensorHeader]] = [[]]
    for entries in headers:
        if shards[-1] and sum(entry.nbytes for entry in shards[-1] + entries) > shard_bytes:
            shards.append([])
        shards[-1] += entries
    count = len(shards)
    arrays = iter(arrays)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE_NAME]
    for name, entries in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(write_header(entries, {"format": "pt"}))
            for entry in entries:
                missing = entry.nbytes
                while missing:
                    array = np.ascontiguousarray(next(arrays))
                    missing -= array.nbytes
                    assert missing >= 0, entry
                    file.write(array.reshape(-1).view(np.uint8).data)
                    advance(array.nbytes)
    if count > 1:
        places = {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        index = {"metadata": {"total_size": total_bytes(shards)}, "weight_map": places}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def total_bytes(headers: Iterable[list[TensorHeader]]) -> int:
    """Returns the number of bytes of all tensors."""
    return sum(entry.nbytes for entries in headers for entry in entries)


def tensor_headers(weight: Weight, weights: Storage) -> Iterator[list[TensorHeader]]:
    """Yields the headers of each of a parameter's tensors: its own, and that of its scales if it is quantized."""
    dtype = weight.stored_dtype(weights)
    kind = QUANTIZED_KINDS.get(dtype)
    for name in weight.sources:
        if kind is None:
            yield [TensorHeader(name, dtype, weight.source_shape)]
            continue
        codes, scale = quantized_shapes(kind, weight.source_shape)
        yield [TensorHeader(name, dtype, codes), TensorHeader(scale_name(name), "F8_E8M0", scale)]


def check_storage(weights: str, naming: str) -> None:
    """Raises ValueError unless there is such a storage and naming, and they go together."""
    if weights not in get_args(Storage.__value__) or naming not in get_args(Naming.__value__):
        raise ValueError(f"{weights=} must be quantized, bfloat16 or float32, and {naming=} release, hybrid or module")
    if weights == "quantized" and naming == "module":
        raise ValueError(f"{naming=} stacks experts in one tensor, so {weights=} must be bfloat16 or float32")


def describe_storage(config: Mapping[str, Any], weights: Storage) -> dict[str, Any]:
    """Returns the content of a config.json with the fields that tell how weights are stored."""
    content = {name: x for name, x in config.items() if name not in ("dtype", "expert_dtype", "quantization_config")}
    if weights != "quantized":
        return content | {"torch_dtype": weights}
    return content | {
        "expert_dtype": "fp4",
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [WEIGHT_BLOCK, WEIGHT_BLOCK],
        },
    }


def encode(name: str, values: np.ndarray, dtype: str) -> Iterator[np.ndarray]:
    """Yields the arrays that store a tensor's values, in the order in which they are written.

    A quantized dtype yields all codes, then all scales. Another dtype yields the converted values, some rows at a time.

    Args:
      name: name of the tensor, for errors.
      values: [rows, ..] values; [out, in] if the dtype is quantized.
      dtype: dtype in the files, such as "BF16" or "F8_E4M3".

    Raises:
      ValueError: a value is not finite in this dtype.
    """
    if dtype in QUANTIZED_KINDS:
        exact = values.astype(np.float32)
        _check_finite(name, exact)
        yield from (quantize_fp8 if QUANTIZED_KINDS[dtype] == "FP8" else quantize_fp4)(exact)
        return
    rows = max(1, _CHUNK_BYTES * len(values) // max(1, values.nbytes))
    for start in range(0, len(values), rows):
        with np.errstate(over="ignore"):
            chunk = values[start : start + rows].astype(DTYPES[dtype])
        _check_finite(name, chunk)
        yield chunk


def _check_finite(name, values):
    if values.dtype.kind != "i" and not np.isfinite(values).all():
        raise ValueError(f"{name} has NaN or infinite values as {values.dtype}")
