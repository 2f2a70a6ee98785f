"""Reads config.json, in the release's spelling or transformers', into the fields of `DSV4Config`."""

import json
import warnings
from pathlib import Path
from typing import Any

from dsv4_jax.downloads import check_not_lfs_pointer, snapshot_hint
from dsv4_jax.layer_spec import LAYER_TYPES, MAX_ROWS, SLIDING, LayerSpec


MLP_LAYER_TYPES = ("hash_moe", "moe")
_OTHERS = "Layers of other rates are given as data: config.with_layers([LayerSpec.csa(8), ...])."

INTEGERS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "q_lora_rank",
    "o_lora_rank", "o_groups", "index_n_heads", "index_head_dim", "index_topk", "sliding_window",
    "moe_intermediate_size", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "hc_mult",
    "hc_sinkhorn_iters", "max_position_embeddings",
)  # fmt: skip
# Upper bounds, far beyond any model, for counts and sizes that no weight's shape confirms.
_MOST = {"n_routed_experts": 2**16, "index_topk": MAX_ROWS, "sliding_window": MAX_ROWS, "hc_sinkhorn_iters": 2**16}
REALS = ("routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps")
# Pairs of spellings: the release's, then transformers'.
_SPELLINGS = (
    ("compress_ratios", "layer_types"), ("compress_ratios", "compress_rates"), ("num_hash_layers", "mlp_layer_types"),
    ("qk_rope_head_dim", "partial_rotary_factor"), ("rope_scaling", "rope_parameters"),
    ("rope_theta", "rope_parameters"), ("compress_rope_theta", "rope_parameters"),
)  # fmt: skip
# Choices that the architecture fixes; where a config states one, it must state this.
_FIXED = {
    "num_key_value_heads": 1, "scoring_func": "sqrtsoftplus", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "norm_topk_prob": True, "topk_method": "noaux_tc",
}  # fmt: skip
_REQUIRED_FIXED = ("num_key_value_heads", "scoring_func")
# Keys that change nothing here: training, storage (the stored dtype decides), multi-token prediction, bookkeeping.
_IRRELEVANT = frozenset((
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "chunk_size_feed_forward", "dtype",
    "expert_dtype", "id2label", "initializer_range", "intermediate_size", "is_encoder_decoder", "label2id",
    "num_local_experts", "num_nextn_predict_layers", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "problem_type", "quantization_config", "return_dict",
    "router_aux_loss_coef", "router_jitter_noise", "torch_dtype", "transformers_version", "use_cache",
))  # fmt: skip
_READ_APART = frozenset(("model_type", "bos_token_id", "eos_token_id", "tie_word_embeddings"))
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
_ROPE_KEYS = frozenset((*_YARN, "type", "rope_type", "rope_theta", "partial_rotary_factor", "attention_factor"))


def check(right: bool, message: str) -> None:
    if not right:
        raise ValueError(message)


def check_integer(name: str, value: Any, least: int = 1) -> int:
    most = _MOST.get(name, 2**31 - 1)
    right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    check(right, f"{name} is {value!r}; it must be an integer of at least {least} (and at most {most}).")
    return value


def check_real(name: str, value: Any) -> float:
    right = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300
    check(right, f"{name} is {value!r}; it must be a finite number above 0.")
    return float(value)


def check_names(field: str, values: Any, known: tuple[str, ...], count: int) -> tuple[str, ...]:
    check(isinstance(values, list | tuple), f"{field} is {values!r}; it must be a list of {count} names.")
    check(len(values) == count, f"{field} names {len(values)} layers; num_hidden_layers is {count}.")
    for i, value in enumerate(values):
        check(value in known, f"{field}[{i}] is {value!r}; known values are {list(known)}.")
    return tuple(values)


def _object(name: str, value: Any) -> dict[str, Any]:
    check(isinstance(value, dict), f"{name} is {value!r}; it must be an object.")
    return value


def _agree(fact: str, spellings: dict[str, Any]) -> Any:
    """The one value of a fact that config.json may spell several ways; `spellings` maps key to value (at least one)."""
    (first_key, first), *others = spellings.items()
    for key, value in others:
        check(first == value, f"config.json contradicts itself on {fact}: {first_key} = {first!r}, {key} = {value!r}.")
    return first


def read_fields(raw: dict[str, Any], *, mtp: bool) -> dict[str, Any]:
    """The fields of `DSV4Config` from config.json's content, `rope_scaling` as those of `RopeScaling` or None.

    Raises:
        ValueError: as `DSV4Config.from_hf`, but for values that no field of its own refuses.
    """
    model_type = raw.get("model_type")
    check(model_type == "deepseek_v4", f"model_type is {model_type!r}; only 'deepseek_v4' is known.")
    alternatives = [(name,) for name in (*INTEGERS, *REALS, *_REQUIRED_FIXED)] + list(_SPELLINGS)
    # A null is an absent field, except that the release may write `rope_scaling: null` for "no YaRN".
    present = {key for key, value in raw.items() if value is not None or key == "rope_scaling"}
    missing = [" or ".join(names) for names in alternatives if present.isdisjoint(names)]
    check(not missing, f"config.json lacks {'; '.join(missing)}: these decide shapes and have no default.")
    for key, value in _FIXED.items():
        check(raw.get(key) in (None, value), f"{key} is {raw.get(key)!r}; it must be {value!r}.")
    known = _READ_APART.union(_IRRELEVANT, _FIXED, *alternatives)
    if unknown := sorted(key for key in raw if key not in known and not key.startswith("dspark_")):
        warnings.warn(f"config.json has keys that are not used here: {', '.join(unknown)}.", stacklevel=3)
    integers: dict[str, Any] = {name: check_integer(name, raw[name]) for name in INTEGERS}
    layers = integers.pop("num_hidden_layers")
    reals: dict[str, Any] = {name: check_real(name, raw[name]) for name in REALS}
    tied = raw.get("tie_word_embeddings") or False
    check(isinstance(tied, bool), f"tie_word_embeddings is {tied!r}; it must be true or false.")
    bos = raw.get("bos_token_id")
    eos = raw.get("eos_token_id")
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    return dict(
        **integers,
        **reals,
        **_rope_fields(raw),
        specs=_specs(raw, layers),
        mlp_layer_types=_mlp_layer_types(raw, layers),
        scoring_func=raw["scoring_func"],
        tie_word_embeddings=tied,
        num_nextn_predict_layers=_draft_layers(raw) if mtp else 0,
        dspark=_dspark_fields(raw) if mtp else None,
        bos_token_id=None if bos is None else check_integer("bos_token_id", bos, least=0),
        eos_token_id=tuple(check_integer("eos_token_id", token, least=0) for token in ends),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads a config.json, or that of a folder; raises ValueError if it cannot be read or is not an object."""
    file = path / "config.json" if path.is_dir() else path
    try:
        text = file.read_bytes()
    except OSError as error:
        hint = snapshot_hint(path)
        raise ValueError(f"cannot read the configuration {file}: {error.strerror}.{hint}") from None
    check_not_lfs_pointer(file, text)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON (truncated?): {error}.") from None
    return _object(str(file), content)


def mlp_types(hash_layers: int, layers: int) -> tuple[str, ...]:
    """Returns `mlp_layer_types` for a model whose first layers are hash layers."""
    return ("hash_moe",) * hash_layers + ("moe",) * (layers - hash_layers)


def _draft_layers(raw: dict[str, Any]) -> int:
    count = raw.get("num_nextn_predict_layers") or 0
    check(count != 0, "num_nextn_predict_layers is 0 or absent: this model has no layers that make drafts.")
    tail = (raw.get("compress_ratios") or [])[raw["num_hidden_layers"] :]
    check(set(tail) <= {0, 1}, f"compress_ratios ends in {tail}; multi-token prediction has a window only (0).")
    return check_integer("num_nextn_predict_layers", count)


def _dspark_fields(raw: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of `DSparkConfig`; None if the draft layer is the multi-token-prediction block.

    `num_nextn_predict_layers` is 1 in the releases, whatever the number of layers; the ratios behind the model's tell.
    """
    found = {key.removeprefix("dspark_"): value for key, value in raw.items() if key.startswith("dspark_")}
    if not found:
        return None
    names = "block_size", "noise_token_id", "target_layer_ids", "markov_rank"
    missing = [f"dspark_{name}" for name in names if found.get(name) is None]
    check(not missing, f"config.json lacks {', '.join(missing)}, but has other keys of DSpark.")
    unknown = sorted(f"dspark_{name}" for name in found.keys() - set(names))
    check(not unknown, f"config.json has {', '.join(unknown)}: draft layers of another kind than DeepSeek-V4's.")
    targets = found["target_layer_ids"]
    check(isinstance(targets, list | tuple), f"dspark_target_layer_ids is {targets!r}; it must be a list of layers.")
    tail = (raw.get("compress_ratios") or [])[raw["num_hidden_layers"] :]
    return found | dict(target_layer_ids=tuple(targets), num_layers=len(tail) or len(targets))


def _specs(raw: dict[str, Any], layers: int) -> tuple[LayerSpec, ...]:
    """The specs of the layers, by the release's list, whose tail belongs to draft layers, or transformers' names."""
    types = {}
    rates = {}
    if (ratios := raw.get("compress_ratios")) is not None:
        check(isinstance(ratios, list | tuple), f"compress_ratios is {ratios!r}; it must be a list of integers.")
        check(len(ratios) >= layers, f"compress_ratios has {len(ratios)} entries; num_hidden_layers is {layers}.")
        used = [check_integer(f"compress_ratios[{i}]", ratio, least=0) for i, ratio in enumerate(ratios[:layers])]
        specs = [LayerSpec.of_ratio(ratio) for ratio in used]
        types["compress_ratios"] = tuple(spec.layer_type for spec in specs)
        rates["compress_ratios"] = tuple(spec.compress_rate for spec in specs)
    if (names := raw.get("layer_types")) is not None:
        types["layer_types"] = check_names("layer_types", names, LAYER_TYPES, layers)
    layer_types = _agree("the layers' types", types)
    if raw.get("compress_rates") is not None:
        rate_of = _object("compress_rates", raw["compress_rates"]) | {SLIDING: 0}
        for kind in sorted({*layer_types} - {SLIDING}):
            check(kind in rate_of, f"config.json lacks compress_rates.{kind}, which its layers need.")
            rate = check_integer(f"compress_rates.{kind}", rate_of[kind])
            known = LayerSpec.of_ratio(rate).layer_type == kind
            check(known, f"compress_rates.{kind} is {rate}; CSA pools 4 tokens, HCA another number above 1. {_OTHERS}")
        rates["compress_rates"] = tuple(rate_of[kind] for kind in layer_types)
    return tuple(LayerSpec.of_ratio(rate) for rate in _agree("the layers' rates", rates))


def _mlp_layer_types(raw: dict[str, Any], layers: int) -> tuple[str, ...]:
    types = {}
    if (hashed := raw.get("num_hash_layers")) is not None:
        check_integer("num_hash_layers", hashed, least=0)
        check(hashed <= layers, f"num_hash_layers ({hashed}) exceeds num_hidden_layers ({layers}).")
        types["num_hash_layers"] = mlp_types(hashed, layers)
    if raw.get("mlp_layer_types") is not None:
        types["mlp_layer_types"] = check_names("mlp_layer_types", raw["mlp_layer_types"], MLP_LAYER_TYPES, layers)
    return _agree("the MLPs' types", types)


def _read_scaling(name: str, block: Any) -> dict[str, Any] | None:
    block = _object(name, block)
    kinds = {key: block[key] for key in ("type", "rope_type") if key in block}
    kind = _agree(f"{name}'s type", kinds or {"type": None})
    unknown = sorted(set(block) - _ROPE_KEYS)
    check(not unknown, f"{name} has {', '.join(unknown)}, which DeepSeek-V4's RoPE does not have.")
    factor = block.get("attention_factor", 1.0)
    check(factor == 1, f"{name}.attention_factor is {factor!r}; DeepSeek-V4 scales no attention (1.0).")
    check(kind in ("default", "yarn"), f"{name}.type is {kind!r}; known values are 'default' and 'yarn'.")
    if kind == "default":
        return None
    missing = [f"{name}.{key}" for key in _YARN if block.get(key) is None]
    check(not missing, f"config.json lacks {', '.join(missing)}.")
    context = check_integer(f"{name}.original_max_position_embeddings", block["original_max_position_embeddings"])
    real = {key: check_real(f"{name}.{key}", block[key]) for key in ("factor", "beta_fast", "beta_slow")}
    return real | dict(original_max_position_embeddings=context)


def _rope_fields(raw: dict[str, Any]) -> dict[str, Any]:
    head_dim = raw["head_dim"]
    scalings = {}
    thetas = {key: {key: raw[key]} if raw.get(key) is not None else {} for key in ("rope_theta", "compress_rope_theta")}
    dims = {"qk_rope_head_dim": raw["qk_rope_head_dim"]} if raw.get("qk_rope_head_dim") is not None else {}
    fractions = {"partial_rotary_factor": raw.get("partial_rotary_factor")}
    if raw.get("rope_parameters") is not None:
        blocks = _object("rope_parameters", raw["rope_parameters"])
        for label, theta in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
            name = f"rope_parameters.{label}"
            block = _object(name, blocks.get(label))
            check("rope_theta" in block or bool(thetas[theta]), f"config.json lacks {name}.rope_theta.")
            if "rope_theta" in block:
                thetas[theta][f"{name}.rope_theta"] = block["rope_theta"]
            fractions[f"{name}.partial_rotary_factor"] = block.get("partial_rotary_factor")
            scaling = _read_scaling(name, block)
            if label == "compress":
                scalings[name] = scaling
            else:
                check(scaling is None, f"{name} asks for YaRN; sliding layers have plain RoPE.")
    if raw.get("rope_scaling") is not None or not scalings:
        block = raw.get("rope_scaling")
        scalings["rope_scaling"] = None if block is None else _read_scaling("rope_scaling", block)
    for key, fraction in fractions.items():
        if fraction is not None:
            # The fraction is a quotient of integers, so the product is within an ulp of one.
            dims[f"{key} * head_dim"] = round(head_dim * check_real(key, fraction))
    return dict(
        qk_rope_head_dim=check_integer("qk_rope_head_dim", _agree("the RoPE width", dims)),
        rope_scaling=_agree("YaRN", scalings),
        **{fact: float(check_real(fact, _agree(fact, spellings))) for fact, spellings in thetas.items()},
    )
