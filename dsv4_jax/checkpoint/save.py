"""Writes a model as the release stores it: FP8 linears, FP4 experts, bfloat16 and float32 for the rest."""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import track

from dsv4_jax.checkpoint.keys import Weight, weights
from dsv4_jax.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from dsv4_jax.checkpoint.storage import FP4_GROUP
from dsv4_jax.config import DSV4Config
from dsv4_jax.layer_spec import LayerSpec
from dsv4_jax.nn import DeepseekV4ForCausalLM, ParameterView, parameter_views
from dsv4_jax.quant import WEIGHT_BLOCK
from dsv4_jax.safetensors_header import DTYPES, TensorHeader, write_header


# Suffixes of names in the release; all other tensors are BF16.
_FP8 = (
    "attn.wq_a.weight", "attn.wq_b.weight", "attn.wkv.weight", "attn.wo_a.weight", "attn.wo_b.weight",
    "indexer.wq_b.weight", "shared_experts.w1.weight", "shared_experts.w2.weight", "shared_experts.w3.weight",
    "e_proj.weight", "h_proj.weight", "main_proj.weight",
)  # fmt: skip
_F32 = (".ape", ".attn_sink", "gate.bias", "_fn", "_base", "_scale")


def save_release(
    model: DeepseekV4ForCausalLM, folder: str | Path, *, shard_bytes: int = 5 * 10**9, progress: bool = False
) -> None:
    """Writes config.json and the weights to a folder, in the release's spelling, names and storage.

    Linears become e4m3 with a power-of-two scale per 128 x 128 block. Experts become e2m1 with one per 32 inputs, or
    bfloat16 if the inputs do not divide into groups. Values are rounded to nearest, ties to even, with the smallest
    scale that holds the block's largest value. Values that were read from this storage are written back unchanged.
    Norms, compressors, routers' weights, embedding and head are rounded to bfloat16; sinks, biases and
    hyper-connections stay float32.

    Args:
        model: the model.
        folder: destination, which is made if it does not exist; existing files are overwritten.
        shard_bytes: largest size of a file, unless a single tensor with its scale exceeds it.
        progress: whether to show a progress bar on standard error.

    Raises:
        ValueError: `shard_bytes` is not positive, a parameter is not finite, or the release's spelling cannot express
            the layers: hash layers follow others, or a layer's spec is not that of its rate in a release.
    """
    if shard_bytes < 1:
        raise ValueError(f"{shard_bytes=} must be at least 1")
    table, parameters = list(weights(model.config, "release")), parameter_views(model)
    for weight in table:
        if not np.isfinite(np.asarray(parameters[weight.path].read(), np.float32)).all():
            raise ValueError(f"{weight.path} has NaN or infinite values")
    bar = track(table, "Saving weights", console=Console(stderr=True), disable=not progress)
    write_release(model.config, folder, _tensors(bar, parameters), shard_bytes=shard_bytes)


def write_release(
    config: DSV4Config, folder: str | Path, tensors: Iterable[np.ndarray], *, shard_bytes: int = 5 * 10**9
) -> None:
    """Writes config.json and the tensors that `release_tensors` lists (see `save_release`)."""
    folder = Path(folder)
    content = json.dumps(release_config(config), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content)

    shards: list[list[TensorHeader]] = [[]]
    for entries in release_tensors(config):
        if shards[-1] and sum(entry.nbytes for entry in shards[-1] + entries) > shard_bytes:
            shards.append([])
        shards[-1] += entries
    count, tensors = len(shards), iter(tensors)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)] if count > 1 else [SINGLE_NAME]
    for name, entries in zip(names, shards, strict=True):
        with (folder / name).open("wb") as file:
            file.write(write_header(entries, dict(format="pt")))
            for entry in entries:
                tensor = next(tensors)
                assert tensor.shape == entry.shape and tensor.nbytes == entry.nbytes, entry
                file.write(np.ascontiguousarray(tensor).view(np.uint8).data)
    if count > 1:
        places = {entry.name: name for name, entries in zip(names, shards, strict=True) for entry in entries}
        total = sum(entry.nbytes for entries in shards for entry in entries)
        index = dict(metadata=dict(total_size=total), weight_map=places)
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def release_tensors(config: DSV4Config) -> Iterator[list[TensorHeader]]:
    """Yields the headers of the release's tensors in our order: each weight, with its scales if quantized."""
    for weight in weights(config, "release"):
        for source in weight.sources:
            yield _entries(source, weight.source_shape)


def release_config(config: DSV4Config) -> dict[str, Any]:
    """Returns config.json in the release's spelling; raises ValueError as in `save_release`."""
    for layer, spec in enumerate(config.specs):
        read = LayerSpec.of_ratio(spec.compress_rate)
        kind = dataclasses.replace(spec.kind, group=read.group, window=None, index_topk=None)
        sizes = config.window(layer), config.topk(layer)
        if kind != read or sizes != (config.sliding_window, config.index_topk):
            raise ValueError(f"the release's config.json cannot express layer {layer}: {spec}")
    hashed = config.mlp_layer_types.count("hash_moe")
    if "hash_moe" in config.mlp_layer_types[hashed:]:
        raise ValueError(
            f"the release's config.json can only express hash layers that come first; this model has {hashed} others"
        )
    fields = dataclasses.asdict(config)
    for name in ("specs", "mlp_layer_types", "rope_scaling", "dspark"):
        del fields[name]
    if config.dspark is not None:
        fields |= {f"dspark_{name}": value for name, value in dataclasses.asdict(config.dspark).items()}
        del fields["dspark_num_layers"]  # the length of compress_ratios tells it
    scaling = config.rope_scaling and dict(dataclasses.asdict(config.rope_scaling), type="yarn")
    return fields | dict(
        architectures=["DeepseekV4ForCausalLM"],
        model_type="deepseek_v4",
        num_hidden_layers=config.num_hidden_layers,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        compress_ratios=[spec.compress_rate for spec in config.layers],
        num_hash_layers=hashed,
        rope_scaling=scaling,
        eos_token_id=list(config.eos_token_id),
        expert_dtype="fp4",
        torch_dtype="bfloat16",
        quantization_config=dict(
            quant_method="fp8", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[WEIGHT_BLOCK, WEIGHT_BLOCK]
        ),
    )


def quantize_fp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes [out, in] float32 to (codes [out, in] e4m3, scales [ceil(out / 128), ceil(in / 128)] e8m0)."""
    rows, columns = values.shape
    padded = np.pad(values, [(0, -rows % WEIGHT_BLOCK), (0, -columns % WEIGHT_BLOCK)])
    blocks = padded.reshape(-(-rows // WEIGHT_BLOCK), WEIGHT_BLOCK, -(-columns // WEIGHT_BLOCK), WEIGHT_BLOCK)
    exponents = _exponents(np.abs(blocks).max(axis=(1, 3)), np.float32(448))
    codes = np.ldexp(blocks, -exponents[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return codes.astype(ml_dtypes.float8_e4m3fn), _e8m0(exponents)


def quantize_fp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes [out, in] float32 to (codes [out, in / 2] uint8, even inputs in low nibbles; scales [out, in / 32])."""
    groups = values.reshape(len(values), -1, FP4_GROUP)
    exponents = _exponents(np.abs(groups).max(axis=2), np.float32(6))
    codes = np.ldexp(groups, -exponents[:, :, None]).reshape(values.shape).astype(ml_dtypes.float4_e2m1fn)
    codes = codes.view(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, _e8m0(exponents)


def _exponents(largest, limit):
    """Returns the least e with largest <= limit * 2 ** e, exactly; 0 for zeros."""
    (m, x), (limit_m, limit_x) = np.frexp(largest), np.frexp(limit)
    return np.where(largest > 0, np.clip(x - limit_x + (m > limit_m), -126, 127), 0)


def _e8m0(exponents):
    return (exponents + 127).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def stored_kind(name: str, shape: tuple[int, ...]) -> str:
    """Returns the release's dtype of a tensor [*shape]: "F8_E4M3", "I8" (FP4), "I64", "F32" or "BF16"."""
    if ".ffn.experts." in name and shape[-1] % FP4_GROUP == 0:
        return "I8"
    if name.endswith("tid2eid"):
        return "I64"
    return "F8_E4M3" if name.endswith(_FP8) else "F32" if name.endswith(_F32) else "BF16"


def _entries(name: str, shape: tuple[int, ...]) -> list[TensorHeader]:
    """Returns the tensors that store a weight: one, or codes and scales."""
    kind, scale = stored_kind(name, shape), name.removesuffix("weight") + "scale"
    if kind == "F8_E4M3":
        blocks = -(-shape[0] // WEIGHT_BLOCK), -(-shape[1] // WEIGHT_BLOCK)
        return [TensorHeader(name, kind, shape), TensorHeader(scale, "F8_E8M0", blocks)]
    if kind == "I8":
        groups = shape[0], shape[1] // FP4_GROUP
        return [TensorHeader(name, kind, (shape[0], shape[1] // 2)), TensorHeader(scale, "F8_E8M0", groups)]
    return [TensorHeader(name, kind, shape)]


def _tensors(table: Iterable[Weight], parameters: Mapping[str, ParameterView]) -> Iterator[np.ndarray]:
    """Yields the arrays of all entries in order, with one parameter in memory at a time."""
    for weight in table:
        value = np.asarray(parameters[weight.path].read()).reshape(len(weight.sources), *weight.source_shape)
        for source, piece in zip(weight.sources, value, strict=True):
            kind = stored_kind(source, piece.shape)
            if kind in ("F8_E4M3", "I8"):
                yield from (quantize_fp8 if kind == "F8_E4M3" else quantize_fp4)(piece.astype(np.float32))
            else:
                yield piece.astype(DTYPES[kind])
