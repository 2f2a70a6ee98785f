"""Writes a model's weights in the release's storage (FP8 linears, FP4 experts), in bfloat16 or in float32.

The names of the tensors follow any of the three namings, see `checkpoint.keys`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from flax import nnx

from dsv4_jax.checkpoint import keys
from dsv4_jax.checkpoint.keys import Naming, Storage, Weight
from dsv4_jax.checkpoint.match import listing
from dsv4_jax.checkpoint.progress import byte_bar
from dsv4_jax.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from dsv4_jax.checkpoint.rounding_loss import RoundingLoss
from dsv4_jax.checkpoint.storage import CODES, dequantize, scale_name
from dsv4_jax.common.safetensors_header import DTYPES, TensorHeader, write_header
from dsv4_jax.config.config_json import release_config
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.quant import QuantizedWeight, is_quantized_kind, quantized_shapes


_CHUNK_BYTES = 1 << 26  # number of bytes of a tensor's values that are converted at a time


def save_release(
    model: DeepseekV4ForCausalLM,
    folder: str | Path,
    *,
    weights: Storage = "quantized",
    naming: Naming = "release",
    shard_bytes: int = 5 * 10**9,
    progress: bool = False,
) -> None:
    """Writes the weights of a model to a folder, and a config.json whose fields have the names of the release.

    A model with Engram can be loaded again only if its tokenizer.json lies in the folder, too.

    The storage of a parameter depends on `weights`::

        parameters                                      "quantized"   "bfloat16"   "float32"
        linear maps, except the small ones below,
          and tables of Engram                          FP8           bfloat16     float32
        routed experts                                  FP4           bfloat16     float32
        norms, embedding, head, maps of compressors,
          routers, maps to indexers' head weights,
          draft heads                                   bfloat16      bfloat16     float32
        sinks, biases, hyper-connections                float32       float32      float32
        tables of hash-routed layers                    int64         int64        int64

    FP8 is e4m3 with a power-of-two scale per block of 128 x 128 values, or of 32 x 32 if the configuration says so. In
    tables of Engram, a block has 32 channels of a row. FP4 is e2m1 with a power-of-two scale per block of 32 inputs;
    experts whose inputs do not divide into blocks of 32 become bfloat16. A scale is the smallest power of two with
    which the largest value of its block does not overflow. Values are rounded to nearest, ties to even. Values that
    were read from the quantized storage are written back unchanged, and bfloat16 holds all of these values exactly.

    Args:
      model: the model.
      folder: destination, which is made if it does not exist; existing files are overwritten.
      weights: storage of the weights, see above.
      naming: naming of the tensors, see `checkpoint.keys`. "module" stacks a layer's experts in one tensor, and cannot
        be combined with weights="quantized".
      shard_bytes: maximum size of a file in bytes. A file is larger if a single tensor with its scale is.
      progress: whether to show a progress bar on standard error.

    Raises:
      ValueError: in one of these cases:

        * `shard_bytes` is not positive, `weights` or `naming` is unknown, or the two exclude each other.
        * The model has adapters, or a parameter is not finite.
        * The model and the release differ in parameters, for instance because of a module of your own.
        * The release's config.json cannot express the model, see `config_json.release_config`. For instance, a layer's
          spec differs from that of layers with the same compression rate in a release.
    """
    if shard_bytes < 1:
        raise ValueError(f"{shard_bytes=} must be at least 1")
    check_storage(weights, naming)
    if model.adapter_names:
        raise ValueError(f"the model has adapters, {model.adapter_names}: use `nn.merge_adapter` or `save_adapter`")
    parameters = parameter_views(model)
    table = list(keys.weights(model.config, naming))
    headers = [entries for weight in table for entries in tensor_headers(weight, weights)]
    trained = {path for path, view in parameters.items() if isinstance(view.variable, nnx.Param)}
    known = {weight.path for weight in table}
    if others := sorted((trained - known) | (known - parameters.keys())):
        raise ValueError(f"the model and the release differ in parameters:{listing(others)}")
    for weight in table:
        if not np.isfinite(np.asarray(parameters[weight.path].read(), np.float32)).all():
            raise ValueError(f"{weight.path} has NaN or infinite values")

    def arrays():
        """Yields the arrays to write, in the order of the headers."""
        for weight in table:
            value = np.asarray(parameters[weight.path].read()).reshape(len(weight.sources), *weight.source_shape)
            for name, piece in zip(weight.sources, value, strict=True):
                yield from encode(name, piece, weight.stored_dtype(weights))

    content = describe_storage(release_config(model.config), weights, model.config.weight_block)
    title = "Saving weights" if progress else None
    write_checkpoint(folder, content, headers, arrays(), shard_bytes=shard_bytes, title=title)


def write_checkpoint(
    folder: str | Path,
    config: Mapping[str, Any],
    headers: Iterable[list[TensorHeader]],
    arrays: Iterable[np.ndarray],
    *,
    shard_bytes: int = 5 * 10**9,
    title: str | None = None,
) -> None:
    """Writes config.json and safetensors files to a folder.

    Args:
      folder: destination, which is made if it does not exist; existing files are overwritten.
      config: content of config.json.
      headers: headers of the tensors, in the order of their data. The tensors of one list are written to the same file.
      arrays: data of the tensors, in the same order. The data of a tensor may be several consecutive arrays, so that it
        never has to be in memory as a whole.
      shard_bytes: maximum size of a file in bytes. A file is larger if a single list of tensors is.
      title: title of a progress bar on standard error; None = no bar.
    """
    folder = Path(folder)
    content = json.dumps(config, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content)
    for name in (INDEX_NAME, SINGLE_NAME):  # an earlier checkpoint in this folder may have left one of them
        (folder / name).unlink(missing_ok=True)

    shards = [[]]
    for entries in headers:
        if shards[-1] and sum(entry.nbytes for entry in shards[-1] + entries) > shard_bytes:
            shards.append([])
        shards[-1] += entries
    count = len(shards)
    arrays = iter(arrays)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE_NAME]
    with byte_bar(title, total_bytes(shards)) as advance:
        for name, entries in zip(names, shards, strict=True):
            with (folder / name).open("wb") as file:
                file.write(write_header(entries, {"format": "pt"}))
                for entry in entries:
                    bytes_left = entry.nbytes
                    while bytes_left:
                        array = np.ascontiguousarray(next(arrays))
                        bytes_left -= array.nbytes
                        assert bytes_left >= 0, entry
                        file.write(array.reshape(-1).view(np.uint8).data)
                        advance(array.nbytes)
    if count > 1:
        places = {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        index = {"metadata": {"total_size": total_bytes(shards)}, "weight_map": places}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def total_bytes(headers: Iterable[list[TensorHeader]]) -> int:
    """Returns the size of the data of all tensors in bytes."""
    return sum(entry.nbytes for entries in headers for entry in entries)


def tensor_headers(weight: Weight, weights: Storage) -> Iterator[list[TensorHeader]]:
    """Yields a list for each stored tensor of a parameter: its header, then the header of its scales if it has any."""
    dtype = weight.stored_dtype(weights)
    for name in weight.sources:
        if not is_quantized_kind(dtype):
            yield [TensorHeader(name, dtype, weight.source_shape)]
            continue
        codes, scale = quantized_shapes(dtype, weight.source_shape)
        yield [TensorHeader(name, CODES[dtype], codes), TensorHeader(scale_name(name), "F8_E8M0", scale)]


def check_storage(weights: str, naming: str) -> None:
    """Raises ValueError if the storage or the naming is unknown, or if "quantized" is combined with "module"."""
    if weights not in get_args(Storage.__value__) or naming not in get_args(Naming.__value__):
        raise ValueError(f"{weights=} must be quantized, bfloat16 or float32, and {naming=} release, hybrid or module")
    if weights == "quantized" and naming == "module":
        raise ValueError(f"{naming=} stacks experts in one tensor, so {weights=} must be bfloat16 or float32")


def describe_storage(config: Mapping[str, Any], weights: Storage, weight_block: int) -> dict[str, Any]:
    """Returns the content of a config.json in which the fields that describe the storage of weights are replaced.

    Args:
      config: content of the config.json.
      weights: storage of the weights.
      weight_block: see `DSV4Config`.
    """
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
            "weight_block_size": [weight_block, weight_block],
        },
    }


def encode(name: str, values: np.ndarray, dtype: str, loss: RoundingLoss | None = None) -> Iterator[np.ndarray]:
    """Yields the arrays that store a tensor's values, in the order in which they are written.

    If `dtype` is quantized storage, all codes come first, then all scales. Otherwise the converted values come, some
    rows at a time.

    Args:
      name: name of the tensor, for errors.
      values: [rows, ..] values; [out, in] if they are to be quantized.
      dtype: storage in the files, such as "BF16" or "FP8", see `Weight`.
      loss: record to which the differences between given and stored values are added, or None.

    Raises:
      ValueError: a value is not finite in this dtype.
    """
    if is_quantized_kind(dtype):
        exact = values.astype(np.float32)
        _check_finite(name, exact)
        stored = QuantizedWeight.encode(exact, dtype)
        if loss is not None:
            loss.add(name, exact, dequantize(stored.codes, stored.scale, dtype))
        yield from (stored.codes, stored.scale)
        return
    chunk_rows = max(1, _CHUNK_BYTES * len(values) // max(1, values.nbytes))
    for start in range(0, len(values), chunk_rows):
        chunk = values[start : start + chunk_rows]
        with np.errstate(over="ignore"):
            converted = chunk.astype(DTYPES[dtype], copy=False)
        _check_finite(name, converted)
        if loss is not None:
            loss.add(name, chunk, converted)
        yield converted


def _check_finite(name, values):
    if values.dtype.kind != "i" and not np.isfinite(values).all():
        raise ValueError(f"{name} has NaN or infinite values as {values.dtype}")
