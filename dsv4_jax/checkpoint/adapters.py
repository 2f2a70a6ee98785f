"""Reads and writes adapters of low rank (LoRA) in the file format of Hugging Face's PEFT.

A folder holds adapter_config.json and adapter_model.safetensors. Tensors have transformers' names of the linear maps:
`base_model.model.MAP.lora_A.weight` [r, inputs] is `Adapters.down`, and `.lora_B.weight` [outputs, r] is `Adapters.up`.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.checkpoint.reader import read_file
from dsv4_jax.common.arguments import adapter_index, check_positive, check_whole
from dsv4_jax.common.downloads import read_json_object
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.nn.lora import Adapters, add_adapters, linear_modules, module_variables, place_adapters


_CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_SIDES = {"down": "A", "up": "B"}  # {attribute of `Adapters`: PEFT's letter}
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Fields of adapter_config.json that must be absent or empty.
_UNSUPPORTED = (
    "use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens",
)  # fmt: skip
# The accepted values of fields of adapter_config.json. Other values change what an adapter computes.
_PLAIN = dict.fromkeys(_UNSUPPORTED, (None, [], {}, False)) | {
    "peft_type": ("LORA",), "bias": (None, "none"), "use_rslora": (None, True, False),
    "init_lora_weights": (None, False, "gaussian", "orthogonal", True),  # other values change the base model's weights
}  # fmt: skip


def load_adapters(
    model: DeepseekV4ForCausalLM, folders: Mapping[str, str | Path], *, dtype: DTypeLike = jnp.float32
) -> None:
    """Reads adapters from files and attaches them to a model's linear maps, see `nn.lora.add_adapters`.

    Args:
      model: the model, which is changed.
      folders: {name of an adapter: its folder}. The adapters may differ in their rank and in the maps that they adapt.
      dtype: dtype of the adapters, see `nn.lora.cast_adapters`.

    Raises:
      TypeError, ValueError: a file is missing or broken, an adapter is of another kind than LoRA or is for another
        model, or the model has adapters already.
    """
    if not isinstance(folders, Mapping):
        raise TypeError(f"{folders=} must map names of adapters to their folders")
    if not folders:
        raise ValueError("folders is empty: give at least one adapter")
    places = _places(model)
    adapters = []  # (rank, scale, {module: its matrices}) of each
    for name, folder in folders.items():
        try:
            adapters.append(_read(Path(folder), places))
        except (TypeError, ValueError) as error:
            raise ValueError(f"adapter {name!r}: {error}") from None
    ranks, scales, all_maps = zip(*adapters, strict=True)
    targets = {places[module].target for maps in all_maps for module in maps}
    add_adapters(model, [*folders], rank=max(ranks), scales=scales, targets=targets, dtype=dtype, place=False)
    views = parameter_views(model)
    for module, place in places.items():
        if f"{place.path}.up" not in views:  # none of the files has this map
            continue
        for side in _SIDES:
            view = views[f"{place.path}.{side}"]
            values = np.zeros(view.shape, np.float32)
            for number, maps in enumerate(all_maps):
                if module in maps:
                    matrix = maps[module][side]
                    rows, columns = matrix.shape
                    values[_of_adapter(side, number)][:rows, :columns] = matrix
            view.set_value(jnp.asarray(values, dtype))
    place_adapters(model)


def save_adapter(model: DeepseekV4ForCausalLM, name: str, folder: str | Path) -> None:
    """Writes an adapter of a model to files.

    Args:
      model: the model.
      name: name of the adapter.
      folder: destination, which is made if it does not exist; existing files are overwritten.

    Raises:
      ValueError: the model has no adapter of this name.
    """
    index = adapter_index(name, model.adapter_names)
    views = parameter_views(model)
    tensors = {}
    modules = []
    for module, place in _places(model).items():
        if f"{place.path}.up" in views:
            modules.append(module)
            for side, letter in _SIDES.items():
                value = np.asarray(views[f"{place.path}.{side}"].get_value()[_of_adapter(side, index)])
                tensors[f"base_model.model.{module}.lora_{letter}.weight"] = value
    scales = next(module.scales for _, module in nnx.iter_modules(model) if isinstance(module, Adapters))
    rank = tensors[f"base_model.model.{modules[0]}.lora_A.weight"].shape[0]
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None, "inference_mode": True,
        "r": rank, "lora_alpha": rank * scales[index], "lora_dropout": 0.0, "use_rslora": False,
        "bias": "none", "target_modules": modules,
    }  # fmt: skip
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / _TENSORS)


class _Place(NamedTuple):
    """The place of a linear map's adapters in a model.

    Attributes:
      path: path of the `Adapters`, whether the model has them or not.
      target: name of the map as `add_adapters` takes it.
      shape: [outputs, inputs] of the map.
    """

    path: str
    target: str
    shape: tuple[int, ...]


def _places(model):
    """Returns {transformers' name of a linear map that can have adapters: its place}."""
    variables = {id(variable) for *_, module in linear_modules(model) for variable in module_variables(module)}
    views = parameter_views(model)
    places = {}
    for weight in weights(model.config, "module"):
        if weight.path in views and id(views[weight.path].variable) in variables:
            parent, _, name = weight.path.rpartition(".")
            if name == "weight":  # the matrix of a `Linear`
                place = _Place(f"{parent}.adapters", parent.rpartition(".")[2], weight.source_shape)
            else:  # the matrix `weights.NAME` of a `FusedLinear`
                place = _Place(f"{parent.removesuffix('weights')}adapters.{name}", name, weight.source_shape)
            places[weight.sources[0].removesuffix(".weight")] = place
    return places


def _of_adapter(side, number):
    """Returns the index expression that selects adapter `number` in `Adapters.down` or `Adapters.up`."""
    return number if side == "down" else (slice(None), number)


def _read(folder, places):
    """Returns (rank, scale, {module: {"down": [r, inputs], "up": [outputs, r]}}) of an adapter's folder."""
    config = read_json_object(folder / _CONFIG)
    for field, accepted in _PLAIN.items():
        if config.get(field) not in accepted:
            raise ValueError(f"{field}={config.get(field)!r} in {_CONFIG} must be {accepted[-1]!r}")
    rank = check_whole("r", config.get("r"), 1, 2**16)
    scale = check_positive("lora_alpha", config.get("lora_alpha"))
    scale /= math.sqrt(rank) if config.get("use_rslora") else rank
    maps = {}  # {module: {"down" or "up": matrix}}
    for key, tensor in read_file(folder / _TENSORS).items():
        match = _NAME.fullmatch(key)
        if match is None or match[1] not in places:
            raise ValueError(f"{key!r:.200} in {_TENSORS} is for no map that can have an adapter")
        side = "down" if match[2] == "A" else "up"
        maps.setdefault(match[1], {})[side] = np.asarray(tensor.load(), np.float32)
        if not np.isfinite(maps[match[1]][side].astype(jnp.bfloat16)).all():  # the model rounds them to this dtype
            raise ValueError(f"{key} in {_TENSORS} has NaN or infinite values in bfloat16")
    if not maps:
        raise ValueError(f"{_TENSORS} is empty")
    for module, matrices in maps.items():
        outputs, inputs = places[module].shape
        shapes = {side: matrix.shape for side, matrix in matrices.items()}
        if shapes != {"down": (rank, inputs), "up": (outputs, rank)}:
            raise ValueError(
                f"{module} needs lora_A {[rank, inputs]} and lora_B {[outputs, rank]}, got "
                f"{', '.join(f'lora_{letter} {[*shapes[side]]}' for side, letter in _SIDES.items() if side in shapes)}"
            )
    return rank, scale, maps
