"""Reads config.json with the fields of the release or of transformers 5, and writes it with those of the release.

DeepSeek-V4.1 has a third format, the configuration of the release's own inference code. A "spelling" of a fact is a
field, perhaps of a nested object, that states this fact in one of the formats. A file may state a fact in several
spellings if their values are equal.
"""

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4_jax.common.arguments import check, check_choice, check_positive, check_whole
from dsv4_jax.common.downloads import read_json_object, snapshot_hint
from dsv4_jax.config.draft_config import DSparkConfig
from dsv4_jax.config.engram_config import EngramConfig
from dsv4_jax.config.layer_spec import LAYER_TYPES, MAX_ROWS, SLIDING, LayerSpec, numbered, shared_specs
from dsv4_jax.config.rope_scaling import RopeScaling


if TYPE_CHECKING:
    from dsv4_jax.config.dsv4_config import DSV4Config

_log = logging.getLogger(__name__)

_REFUSAL = "the release's config.json cannot express"
MLP_LAYER_TYPES = ("hash_moe", "moe")  # experts looked up by token id, and experts selected by a router
_OTHERS = "Layers of other rates are given as data: config.with_layers([LayerSpec.csa(8), ...])."

# {field with an integer: its maximum}. The minimum is 1. The maxima are far beyond any model. Most fields are checked
# later against the shapes of weights. For fields that occur in no shape, the maximum is the only check, so it is lower.
INTEGERS = dict.fromkeys((
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_lora_rank", "o_groups", "index_n_heads", "index_head_dim", "moe_intermediate_size",
    "n_shared_experts", "num_experts_per_tok", "hc_mult", "max_position_embeddings",
), 2**31 - 1) | {
    "n_routed_experts": 2**16, "index_topk": MAX_ROWS, "sliding_window": MAX_ROWS, "hc_sinkhorn_iters": 2**16,
}  # fmt: skip
# Fields with a positive real number.
REALS = ("routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta")
# Pairs of fields that state the same fact: the release's field, then the field of transformers. `_LAYER_SPELLINGS` is
# for V4 only.
_LAYER_SPELLINGS = (
    ("compress_ratios", "layer_types"), ("compress_ratios", "compress_rates"), ("num_hash_layers", "mlp_layer_types"),
)  # fmt: skip
_ROPE_SPELLINGS = (
    ("qk_rope_head_dim", "partial_rotary_factor"), ("rope_scaling", "rope_parameters"),
    ("rope_theta", "rope_parameters"), ("compress_rope_theta", "rope_parameters"),
)  # fmt: skip
# {field of V4.1's config.json: its name in the configuration of the release's inference code, where the names differ}.
_INFERENCE_NAMES = {
    "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
    "qk_rope_head_dim": "rope_head_dim", "sliding_window": "window_size", "moe_intermediate_size": "moe_inter_dim",
    "num_experts_per_tok": "n_activated_experts", "routed_scaling_factor": "route_scale",
    "scoring_func": "score_func", "rms_norm_eps": "norm_eps", "kv_source_layer_ids": "kv_source_layers",
    "index_source_layer_ids": "index_source_layers", "candidate_source_layer_id": "candidate_source_layer",
    "engram_pad_token_id": "engram_pad_id", "num_nextn_predict_layers": "n_mtp_layers",
    "dspark_num_experts_per_tok": "dspark_n_activated_experts",
}  # fmt: skip
# {field of `rope_scaling`: its name in the configuration of the release's inference code}.
_INFERENCE_YARN = {
    "factor": "rope_factor", "original_max_position_embeddings": "original_seq_len", "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}  # fmt: skip
_SOURCES = ("kv_source_layer_ids", "index_source_layer_ids", "candidate_source_layer_id")
_CANDIDATES = ("candidate_topk_blocks", "candidate_block_size")
# {model_type: fields of `DSV4Config` that follow from it}.
_TRAITS = {
    "deepseek_v4": {"kv_format": "v4", "norms_queries": True, "delays_pre": False, "weight_block": 128},
    "deepseek_v41": {"kv_format": "v41", "norms_queries": False, "delays_pre": True, "weight_block": 32},
}
# {field: the only value that the architecture allows}. All but `_REQUIRED_FIXED` may be missing in the file.
_FIXED = {
    "num_key_value_heads": 1, "scoring_func": "sqrtsoftplus", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "norm_topk_prob": True, "topk_method": "noaux_tc", "gate_temp": 1,
}  # fmt: skip
_REQUIRED_FIXED = ("num_key_value_heads", "scoring_func")
_RESPELLED = {name for names in _ROPE_SPELLINGS for name in names}
_COMMON = tuple((name,) for name in (*INTEGERS, *REALS, *_REQUIRED_FIXED) if name not in _RESPELLED) + _ROPE_SPELLINGS
_V4_REQUIRED = _COMMON + _LAYER_SPELLINGS
# Fields that are ignored: about training, the storage of weights (the dtypes in the files decide), and bookkeeping.
_IRRELEVANT = frozenset((
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "chunk_size_feed_forward", "dtype",
    "expert_dtype", "id2label", "initializer_range", "intermediate_size", "is_encoder_decoder", "label2id",
    "max_batch_size", "max_seq_len", "num_local_experts", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "problem_type", "return_dict", "router_aux_loss_coef",
    "router_jitter_noise", "temperature", "torch_dtype", "transformers_version", "use_cache",
))  # fmt: skip
# Fields that are read if the file has them, in addition to the required fields and the fields of `_FIXED`.
_READ_APART = frozenset((
    "model_type", "bos_token_id", "eos_token_id", "image_token_id", "num_nextn_predict_layers", "quantization_config",
    "tie_word_embeddings",
))  # fmt: skip
_YARN = tuple(field.name for field in dataclasses.fields(RopeScaling))
_CONTEXT = "original_max_position_embeddings"
_ROPE_KEYS = frozenset((*_YARN, "type", "rope_type", "rope_theta", "partial_rotary_factor", "attention_factor"))
_DSPARK = tuple(field.name for field in dataclasses.fields(DSparkConfig) if field.name != "num_layers")
_DSPARK_OPTIONAL = ("n_routed_experts", "num_experts_per_tok")
_ENGRAM = tuple(field.name for field in dataclasses.fields(EngramConfig))
_V41_LAYERS = ("compress_ratios", *_SOURCES, *_CANDIDATES, *(f"engram_{name}" for name in _ENGRAM))
_V41_REQUIRED = tuple(
    names + tuple(_INFERENCE_NAMES[name] for name in names if name in _INFERENCE_NAMES)
    for names in (*_COMMON, *((name,) for name in _V41_LAYERS))
)
# Fields of V4.1's config.json outside of `text_config`.
_OUTER = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "image_token_id", "architectures", "model_type")


def check_names(field: str, values: Any, known: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Returns the names in a field as a tuple.

    Args:
      field: name of the field, for errors.
      values: value of the field.
      known: valid names.
      count: number of layers, which is the number of names.

    Raises:
      ValueError: the value is not a list of `count` known names.
    """
    check(isinstance(values, list | tuple), f"{field}={values!r} must be a list of {count} names")
    check(len(values) == count, f"{field} names {len(values)} layers, but num_hidden_layers={count}")
    for i, value in enumerate(values):
        check(value in known, f"{field}[{i}]={value!r} must be one of {list(known)}")
    return tuple(values)


def check_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {field: number} for the fields of `INTEGERS` and `REALS`, from values that have at least these fields.

    Raises TypeError for a value of another type, and ValueError for a number that is out of range.
    """
    integers = {name: check_whole(name, values[name], 1, limit) for name, limit in INTEGERS.items()}
    return integers | {name: check_positive(name, values[name]) for name in REALS}


def _object(name, value):
    check(isinstance(value, dict), f"{name}={value!r} must be an object")
    return value


def _agree(fact, spellings):
    """Returns the value of a fact that config.json may state in several fields.

    Args:
      fact: description of the fact, for the error.
      spellings: {field: value} for each field that states the fact.

    Raises:
      ValueError: the values differ.
    """
    (key, value), *repetitions = spellings.items()
    for name, stated in repetitions:
        check(value == stated, f"config.json contradicts itself on {fact}: {key} = {value!r}, {name} = {stated!r}.")
    return value


def _stated(spellings):
    """Returns {field: value} without fields whose value is None: they are absent, or null in config.json."""
    return {key: value for key, value in spellings.items() if value is not None}


def _by_release_names(raw):
    """Returns {name in the release's config.json: value} of a model's fields, including those in `text_config`.

    Ignored fields are left out. For V4.1, the fields `vision_*` are ignored, too. If the configuration of V4.1's
    inference code has no `model_type`, the result has the `model_type` of V4.1. `eos_token_id` is a list or None.

    Args:
      raw: content of config.json, or of the configuration of V4.1's inference code.

    Raises:
      ValueError: the file describes another model, or states a fact twice with different values.
    """
    model_type = raw.get("model_type")
    # V4's inference code shares most names with V4.1's, but it has none for the fields of `_SOURCES`.
    has_inference_names = any(_INFERENCE_NAMES[name] in raw for name in _SOURCES)
    if has_inference_names and model_type is None:
        model_type = "deepseek_v41"
    check_choice("model_type", model_type, *_TRAITS, reason=": no other model is known")
    is_v41 = model_type == "deepseek_v41"
    is_inference = is_v41 and has_inference_names
    # {name in the inference code: name in the release's config.json}.
    aliases = {alias: name for name, alias in _INFERENCE_NAMES.items()} if is_v41 else {}
    fields = dict(raw)
    text_fields = _object("text_config", fields.pop("text_config", None) or {}) if is_v41 else {}
    check_choice("text_config.model_type", text_fields.get("model_type", "deepseek_v41_text"), "deepseek_v41_text")
    # {name in the release's config.json: {name in this file: value}}. A file may state a fact under several names.
    facts: dict[str, dict[str, Any]] = {"num_key_value_heads": {"the inference code": 1}} if is_inference else {}
    image_fields = []
    for prefix, section in (("", fields), ("text_config.", text_fields)):
        for key, value in section.items():
            if is_v41 and key.startswith("vision_"):
                image_fields.append(prefix + key)
            elif key not in _IRRELEVANT:
                is_single_eos = key == "eos_token_id" and value is not None and not isinstance(value, list)
                facts.setdefault(aliases.get(key, key), {})[prefix + key] = [value] if is_single_eos else value
    if image_fields:
        listed = ", ".join(sorted(image_fields))
        _log.info("The model reads text only, so these fields of config.json are ignored: %s", listed)
    facts["model_type"] = {"model_type": model_type}
    unified = {name: _agree(name, _stated(spellings) or spellings) for name, spellings in facts.items()}
    # The inference code has a field for each of YaRN's parameters, in place of an object.
    if is_inference and unified.keys().isdisjoint(("rope_scaling", "rope_parameters")):
        yarn = {name: unified.pop(alias, None) for name, alias in _INFERENCE_YARN.items()}
        missing = [_INFERENCE_YARN[name] for name, value in yarn.items() if value is None]
        check(not missing, f"config.json lacks {', '.join(missing)}.")
        context = check_whole("original_seq_len", yarn[_CONTEXT], 1, 2**31 - 1)
        unified["rope_scaling"] = yarn | {"type": "yarn"}
        unified.setdefault("max_position_embeddings", round(context * check_positive("rope_factor", yarn["factor"])))
    return unified


def read_fields(raw: dict[str, Any], *, mtp: bool) -> dict[str, Any]:
    """Returns the arguments of `DSV4Config` from the content of config.json.

    Relations between fields are not checked here, but by `DSV4Config`. A warning names fields that are not known.

    Args:
      raw: content of config.json.
      mtp: whether to include the draft layers.

    Raises:
      TypeError: a number is of another type.
      ValueError: the file describes another model, lacks fields, contradicts itself or has an impossible value; or
        `mtp` is True for a model without draft layers.
    """
    raw = _by_release_names(raw)
    is_v41 = raw["model_type"] == "deepseek_v41"
    required = _V41_REQUIRED if is_v41 else _V4_REQUIRED
    # The release may write `rope_scaling: null`, which means that there is no YaRN.
    present = {key for key, value in raw.items() if value is not None or key == "rope_scaling"}
    missing = [" or ".join(names) for names in required if present.isdisjoint(names)]
    check(not missing, f"config.json lacks {'; '.join(missing)}: these decide shapes and have no default.")
    for key, value in _FIXED.items():
        if raw.get(key) is not None:
            check_choice(key, raw[key], value)
    known = _READ_APART.union(_FIXED, *required)
    if unknown := sorted(key for key in raw if key not in known and not key.startswith("dspark_")):
        warnings.warn(f"config.json has keys that are not used here: {', '.join(unknown)}.", stacklevel=3)
    rope = _rope_fields(raw)
    numbers = check_numbers(raw | rope)
    layers = numbers.pop("num_hidden_layers")
    tied = raw.get("tie_word_embeddings") or False
    check(isinstance(tied, bool), f"tie_word_embeddings={tied!r} must be true or false")
    return {
        **rope,
        **numbers,
        **_TRAITS[raw["model_type"]],
        **(_v41_layers(raw, layers) if is_v41 else _v4_layers(raw, layers)),
        **(_draft_fields(raw, layers, is_v41) if mtp else {}),
        "scoring_func": raw["scoring_func"],
        "tie_word_embeddings": tied,
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_id": tuple(raw.get("eos_token_id") or ()),
    }


def release_config(config: "DSV4Config") -> dict[str, Any]:
    """Returns the content of a config.json with the fields of the release.

    Raises ValueError if these fields cannot express the model: it mixes traits of V4 and V4.1, or its layers are of a
    kind or order that the fields cannot state. An example is a hash-routed layer behind a layer with a router.
    """
    traits = {name: getattr(config, name) for name in _TRAITS["deepseek_v4"]}
    model_type = next((name for name in _TRAITS if _TRAITS[name] == traits), None)
    if model_type is None:
        stated = ", ".join(f"{name}={value!r}" for name, value in traits.items())
        raise ValueError(f"{_REFUSAL} {stated} in one model")
    is_v41 = model_type == "deepseek_v41"
    fields = dataclasses.asdict(config)
    dspark = fields["dspark"] or {}
    dspark.pop("num_layers", None)  # follows from the length of compress_ratios
    # config.json states these facts in another form, or they follow from the model's type.
    for name in (*traits, "specs", "mlp_layer_types", "dspark", "engram", *_CANDIDATES):
        del fields[name]
    if config.image_token_id is None:
        del fields["image_token_id"]
    content = {
        **fields,
        **{f"dspark_{name}": value for name, value in dspark.items() if value is not None},
        "architectures": ["DeepseekV41ForCausalLM" if is_v41 else "DeepseekV4ForCausalLM"],
        "model_type": model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "compress_ratios": [spec.compress_rate for spec in config.layers],
        **(_v41_layer_fields(config) if is_v41 else {"num_hash_layers": config.mlp_layer_types.count("hash_moe")}),
        "rope_scaling": config.rope_scaling and {**fields["rope_scaling"], "rope_type" if is_v41 else "type": "yarn"},
        "eos_token_id": list(config.eos_token_id),
    }
    _check_layers(config, content, is_v41)
    if not is_v41:
        return content
    # In V4.1's config.json, the facts about the text model are in a nested object.
    outer = {name: value for name, value in content.items() if name in _OUTER}
    text = {name: value for name, value in content.items() if name not in _OUTER}
    return outer | {"text_config": {"model_type": "deepseek_v41_text", **text}}


def _check_layers(config, content, is_v41):
    """Raises ValueError if config.json cannot express the layers of the model.

    The function reads the layers from `content` and compares them with those of `config`. The `group` and `index` of
    layers that store entries are not compared, because config.json states neither.

    Args:
      config: configuration of the model.
      content: fields of the config.json that was made from `config`.
      is_v41: whether the fields are those of V4.1.
    """
    try:
        restored = (_v41_layers if is_v41 else _v4_layers)(content, config.num_hidden_layers)
    except ValueError as error:
        raise ValueError(f"{_REFUSAL} the layers: {error}") from None
    for spec, expected in zip(config.specs, numbered(restored["specs"]), strict=True):
        not_compared: dict[str, Any] = {"group": expected.group, "index": expected.index} if spec.owner else {}
        is_same = dataclasses.replace(spec, window=None, index_topk=None, **not_compared) == expected
        # config.json states one window size and one top-k for all layers, so specs that are read from it have None for
        # both. The window size and top-k of this layer must be equal to these two numbers.
        sizes = (config.window(spec.layer), config.topk(spec.layer))
        if not is_same or sizes != (config.sliding_window, config.index_topk):
            raise ValueError(f"{_REFUSAL} layer {spec.layer}: {spec}")
    for name in ("mlp_layer_types", "engram", *_CANDIDATES):
        value = getattr(config, name)
        default = getattr(type(config), name, None)
        is_same = restored.get(name, default) == value
        check(is_same, f"{_REFUSAL} {name}={value!r} in a model of type {content['model_type']}")


def read_json(path: Path) -> dict[str, Any]:
    """Reads config.json.

    Args:
      path: the file, its folder, or a safetensors file beside it.

    Raises:
      ValueError: the file cannot be read or is no JSON object.
    """
    file = path
    if path.is_dir():
        file = path / "config.json"
    elif path.suffix == ".safetensors":
        file = path.with_name("config.json")
    return read_json_object(file, "the configuration ", snapshot_hint(path))


def mlp_types(hash_layers: int, layers: int) -> tuple[str, ...]:
    """Returns the `mlp_layer_types` of a model with `layers` layers whose first `hash_layers` are hash-routed."""
    return ("hash_moe",) * hash_layers + ("moe",) * (layers - hash_layers)


def _draft_fields(raw, layers, is_v41):
    """Returns the fields of `DSV4Config` about draft layers, for a model with `layers` other layers."""
    count = check_whole("num_nextn_predict_layers", raw.get("num_nextn_predict_layers") or 0)
    check(count != 0, "num_nextn_predict_layers is 0 or absent: this model has no layers that make drafts.")
    ratios = (raw.get("compress_ratios") or [])[layers:]  # ratios of the draft layers
    window_ratios = (0,) if is_v41 else (0, 1)  # ratios of a layer with a sliding window only
    check(
        all(ratio in window_ratios for ratio in ratios),
        f"compress_ratios ends in {ratios}; multi-token prediction has a window only (0).",
    )
    dspark = _dspark(raw, len(ratios))
    if dspark is not None:
        check(
            count in (1, dspark.num_layers),
            f"num_nextn_predict_layers={count} must be {dspark.num_layers}, the number of DSpark's layers, or 1",
        )
        count = 1
    return {"num_nextn_predict_layers": count, "dspark": dspark}


def _dspark(raw, num_layers):
    """Returns DSpark's configuration; None if the draft layer is the multi-token-prediction block.

    Args:
      raw: content of config.json.
      num_layers: number of draft layers in `compress_ratios`; 0 = as many draft layers as target layers. The field
        `num_nextn_predict_layers` does not tell their number, because it is 1 in all releases of V4.
    """
    fields = {key.removeprefix("dspark_"): value for key, value in raw.items() if key.startswith("dspark_")}
    if not fields:
        return None
    missing = [f"dspark_{name}" for name in _DSPARK if name not in _DSPARK_OPTIONAL and fields.get(name) is None]
    check(not missing, f"config.json lacks {', '.join(missing)}, but has other keys of DSpark.")
    unknown = sorted(f"dspark_{name}" for name in fields.keys() - set(_DSPARK))
    check(not unknown, f"config.json has {', '.join(unknown)}: draft layers of another kind than DeepSeek's.")
    fields["target_layer_ids"] = tuple(_integers("dspark_target_layer_ids", fields["target_layer_ids"]))
    return DSparkConfig(num_layers=num_layers or len(fields["target_layer_ids"]), **fields)


def _ratios(raw, layers):
    """Returns the elements of `compress_ratios` for the model's `layers` layers, without those for draft layers."""
    ratios = _integers("compress_ratios", raw["compress_ratios"])[:layers]
    check(len(ratios) == layers, f"compress_ratios has {len(ratios)} entries, but num_hidden_layers={layers}")
    return [check_whole(f"compress_ratios[{i}]", ratio, 0, MAX_ROWS) for i, ratio in enumerate(ratios)]


def _v4_layers(raw, layers):
    """Returns the fields of `DSV4Config` about the layers of a V4 model, from all formats that state them."""
    specs = _specs(raw, layers)
    mlps = {}
    if (hashed := raw.get("num_hash_layers")) is not None:
        mlps["num_hash_layers"] = mlp_types(check_whole("num_hash_layers", hashed, 0, layers), layers)
    if (names := raw.get("mlp_layer_types")) is not None:
        mlps["mlp_layer_types"] = check_names("mlp_layer_types", names, MLP_LAYER_TYPES, layers)
    return {"specs": specs, "mlp_layer_types": _agree("the MLPs' types", mlps)}


def _v41_layers(raw, layers):
    """Returns the fields of `DSV4Config` about the layers of a V4.1 model."""
    kv_sources, index_sources = (_integers(name, raw[name]) for name in _SOURCES[:2])
    candidates = check_whole("candidate_source_layer_id", raw["candidate_source_layer_id"], -1, layers - 1)
    quantization = _object("quantization_config", raw.get("quantization_config") or {})
    if (block := quantization.get("weight_block_size")) is not None:
        check_choice("quantization_config.weight_block_size", block, [32, 32], reason=" in DeepSeek-V4.1")
    engram = {name: raw[f"engram_{name}"] for name in _ENGRAM}
    engram |= {name: tuple(_integers(f"engram_{name}", engram[name])) for name in ("layer_ids", "num_embeddings")}
    return {
        "specs": shared_specs(_ratios(raw, layers), kv_sources, index_sources, None if candidates < 0 else candidates),
        "mlp_layer_types": mlp_types(0, layers),
        "engram": EngramConfig(**engram) if engram["layer_ids"] else None,
        **{name: check_whole(name, raw[name], 0) for name in _CANDIDATES},
        "image_token_id": raw.get("image_token_id"),
    }


def _integers(name, values):
    check(isinstance(values, list | tuple), f"{name}={values!r} must be a list of integers")
    return [check_whole(f"{name}[{i}]", value) for i, value in enumerate(values)]


def _specs(raw, layers):
    """Returns the specs of V4's layers, from `compress_ratios`, or from `layer_types` and `compress_rates`."""
    types = {}  # {field of config.json: kind of attention of each layer}
    rates = {}  # {field of config.json: compression rate of each layer}
    if raw.get("compress_ratios") is not None:
        specs = [LayerSpec.of_ratio(ratio) for ratio in _ratios(raw, layers)]
        types["compress_ratios"] = tuple(spec.layer_type for spec in specs)
        rates["compress_ratios"] = tuple(spec.compress_rate for spec in specs)
    if (names := raw.get("layer_types")) is not None:
        types["layer_types"] = check_names("layer_types", names, LAYER_TYPES, layers)
    layer_types = _agree("the layers' types", types)
    if raw.get("compress_rates") is not None:
        rate_of = _object("compress_rates", raw["compress_rates"]) | {SLIDING: 0}
        for kind in sorted({*layer_types} - {SLIDING}):
            check(kind in rate_of, f"config.json lacks compress_rates.{kind}, which its layers need.")
            rate = check_whole(f"compress_rates.{kind}", rate_of[kind], 1, MAX_ROWS)
            is_known = LayerSpec.of_ratio(rate).layer_type == kind
            check(is_known, f"compress_rates.{kind}={rate}: CSA pools 4 tokens, HCA another number above 1. {_OTHERS}")
        rates["compress_rates"] = tuple(rate_of[kind] for kind in layer_types)
    return tuple(LayerSpec.of_ratio(rate) for rate in _agree("the layers' rates", rates))


def _read_scaling(name, block):
    """Returns YaRN's parameters from `block`, the object `name` of config.json; None if its type is "default"."""
    block = _object(name, block)
    kinds = {key: block[key] for key in ("type", "rope_type") if key in block}
    kind = _agree(f"{name}'s type", kinds or {"type": None})
    unknown = sorted(set(block) - _ROPE_KEYS)
    check(not unknown, f"{name} has {', '.join(unknown)}, which DeepSeek-V4's RoPE does not have.")
    factor = block.get("attention_factor", 1.0)
    check_choice(f"{name}.attention_factor", factor, 1.0, reason=": DeepSeek-V4 scales no attention")
    check_choice(f"{name}.type", kind, "default", "yarn")
    if kind == "default":
        return None
    missing = [f"{name}.{key}" for key in _YARN if block.get(key) is None]
    check(not missing, f"config.json lacks {', '.join(missing)}.")
    try:
        numbers: dict[str, Any] = {key: check_positive(key, block[key]) for key in _YARN}
        return RopeScaling(**numbers | {_CONTEXT: check_whole(_CONTEXT, block[_CONTEXT])})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}.{error}") from None


def _rope_fields(raw):
    """Returns the fields of `DSV4Config` about RoPE, from all formats that state them."""
    # {field of `DSV4Config`: {place in config.json: the value there, or None}}.
    spellings = {name: {name: raw.get(name)} for name in ("qk_rope_head_dim", "rope_theta", "compress_rope_theta")}
    # {place in config.json: the fraction of a head's channels that RoPE rotates, or None}.
    fractions = {"partial_rotary_factor": raw.get("partial_rotary_factor")}
    scalings = {}  # {place in config.json: YaRN's parameters there; None = no YaRN}
    if raw.get("rope_parameters") is not None:
        blocks = _object("rope_parameters", raw["rope_parameters"])
        for label, theta in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
            name = f"rope_parameters.{label}"
            block = _object(name, blocks.get(label))
            spellings[theta][f"{name}.rope_theta"] = block.get("rope_theta")
            fractions[f"{name}.partial_rotary_factor"] = block.get("partial_rotary_factor")
            scalings[name] = _read_scaling(name, block)
        is_plain = scalings.pop("rope_parameters.main") is None
        check(is_plain, "rope_parameters.main asks for YaRN; sliding layers have plain RoPE.")
    block = raw.get("rope_scaling")
    if block is not None or not scalings:
        scalings["rope_scaling"] = None if block is None else _read_scaling("rope_scaling", block)
    head_dim = check_whole("head_dim", raw["head_dim"], 1, INTEGERS["head_dim"])
    for key, fraction in fractions.items():
        if fraction is not None:
            # The fraction is a quotient of integers, so the product is an integer except for rounding.
            spellings["qk_rope_head_dim"][f"{key} * head_dim"] = round(head_dim * check_positive(key, fraction))
    fields = {"rope_scaling": _agree("YaRN", scalings)}
    for fact, values in spellings.items():
        stated = _stated(values)
        check(bool(stated), f"config.json lacks {' or '.join(values)}.")
        fields[fact] = _agree(fact, stated)
    return fields


def _v41_layer_fields(config):
    """Returns the fields of V4.1's config.json about sources of entries, candidates, draft layers and Engram."""
    specs = config.specs
    engram = dict.fromkeys(_ENGRAM, 0) | {"layer_ids": [], "num_embeddings": []}
    if config.engram is not None:
        engram = dataclasses.asdict(config.engram)
    return {
        "num_nextn_predict_layers": config.num_draft_layers,
        "kv_source_layer_ids": [spec.layer for spec in specs if spec.owner],
        "index_source_layer_ids": [spec.layer for spec in specs if spec.selects],
        "candidate_source_layer_id": next((spec.layer for spec in specs if spec.makes_candidates), -1),
        **{name: getattr(config, name) for name in _CANDIDATES},
        **{f"engram_{name}": value for name, value in engram.items()},
    }
