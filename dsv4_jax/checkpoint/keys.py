"""The table of a model's tensors with their names in three namings.

- "release": DeepSeek's own files, `layers.1.attn.wkv.weight`;
- "hybrid": files of transformers 5's `save_pretrained`: the release's names after `model.`, with a few exceptions;
- "module": transformers' module names, `model.layers.1.self_attn.kv_proj.weight`. Ours are the same, except that linear
  maps of one input are a `FusedLinear`.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Literal, get_args

from dsv4_jax.config import DSparkConfig, DSV4Config, MTPConfig


type Naming = Literal["release", "hybrid", "module"]

EMBEDDING = "model.embed_tokens.weight"
# (our path, which is also transformers', release name, shape)
_TOP = (
    (EMBEDDING, "embed.weight", "vocab hidden"),
    ("model.norm.weight", "norm.weight", "hidden"),
    ("model.hc_head.hc_fn", "hc_head_fn", "hc hc*hidden"),
    ("model.hc_head.hc_base", "hc_head_base", "hc"),
    ("model.hc_head.hc_scale", "hc_head_scale", "1"),
    ("lm_head.weight", "head.weight", "vocab hidden"),
)
# The same after `drafts.` and `mtp.N.`, where N is the first or the last draft layer.
_MTP = (
    ("e_proj.weight", "e_proj.weight", "hidden hidden", "first"),
    ("h_proj.weight", "h_proj.weight", "hidden hidden", "first"),
    ("enorm.weight", "enorm.weight", "hidden", "first"),
    ("hnorm.weight", "hnorm.weight", "hidden", "first"),
)
_DRAFT_HEAD = (
    ("norm.weight", "norm.weight", "hidden", "last"),
    ("hc_head.hc_fn", "hc_head_fn", "hc hc*hidden", "last"),
    ("hc_head.hc_base", "hc_head_base", "hc", "last"),
    ("hc_head.hc_scale", "hc_head_scale", "1", "last"),
)
_DSPARK = (
    ("main_proj.weight", "main_proj.weight", "hidden taps*hidden", "first"),
    ("main_norm.weight", "main_norm.weight", "hidden", "first"),
    ("markov_head.markov_w1.weight", "markov_head.markov_w1.weight", "vocab markov", "last"),
    ("markov_head.markov_w2.weight", "markov_head.markov_w2.weight", "vocab markov", "last"),
    ("confidence_head.proj.weight", "confidence_head.proj.weight", "1 with_markov", "last"),
)
_DRAFTS = {type(None): (), MTPConfig: (*_MTP, *_DRAFT_HEAD), DSparkConfig: (*_DRAFT_HEAD, *_DSPARK)}
# The same after `model.layers.N.` or `drafts.layers.N.`, and `layers.N.` or `mtp.N.`, with transformers' name if it is
# not ours. The last column names the layers that have the parameter: all, those that store entries ("owner")
# or index keys ("keys"), those that score keys ("selects"), or an MLP type. A release name with {expert}
# stands for one tensor per expert, stacked on axis 0 with {expert} outermost. "2|moe" is two axes of the parameter but
# a single axis of the stored tensor.
_LAYER = (
    ("input_layernorm.weight", "attn_norm.weight", None, "hidden", "all"),
    ("post_attention_layernorm.weight", "ffn_norm.weight", None, "hidden", "all"),
    ("attn_hc.fn", "hc_attn_fn", None, "mix hc*hidden", "all"),
    ("attn_hc.base", "hc_attn_base", None, "mix", "all"),
    ("attn_hc.scale", "hc_attn_scale", None, "3", "all"),
    ("ffn_hc.fn", "hc_ffn_fn", None, "mix hc*hidden", "all"),
    ("ffn_hc.base", "hc_ffn_base", None, "mix", "all"),
    ("ffn_hc.scale", "hc_ffn_scale", None, "3", "all"),
    ("{inputs}.q_a_proj", "attn.wq_a.weight", "self_attn.q_a_proj.weight", "q_lora hidden", "all"),
    ("self_attn.q_a_norm.weight", "attn.q_norm.weight", None, "q_lora", "all"),
    ("{latents}.q_b_proj", "attn.wq_b.weight", "self_attn.q_b_proj.weight", "heads*head q_lora", "all"),
    ("{inputs}.kv_proj", "attn.wkv.weight", "self_attn.kv_proj.weight", "head hidden", "all"),
    ("self_attn.kv_norm.weight", "attn.kv_norm.weight", None, "head", "all"),
    ("self_attn.o_a_proj.weight", "attn.wo_a.weight", None, "groups*o_lora group_in", "all"),
    ("self_attn.o_b_proj.weight", "attn.wo_b.weight", None, "hidden groups*o_lora", "all"),
    ("self_attn.sinks", "attn.attn_sink", None, "heads", "all"),
    ("{inputs}.compressor_kv_proj", "attn.compressor.wkv.weight",
     "self_attn.compressor.kv_proj.weight", "pair*head hidden", "owner"),
    ("{inputs}.compressor_gate_proj", "attn.compressor.wgate.weight",
     "self_attn.compressor.gate_proj.weight", "pair*head hidden", "owner"),
    ("self_attn.compressor.position_bias", "attn.compressor.ape", None, "rate pair*head", "owner"),
    ("self_attn.compressor.kv_norm.weight", "attn.compressor.norm.weight", None, "head", "owner"),
    ("{inputs}.indexer_kv_proj", "attn.indexer.compressor.wkv.weight",
     "self_attn.compressor.indexer.kv_proj.weight", "pair*index hidden", "keys"),
    ("{inputs}.indexer_gate_proj", "attn.indexer.compressor.wgate.weight",
     "self_attn.compressor.indexer.gate_proj.weight", "pair*index hidden", "keys"),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape", None, "rate pair*index", "keys"),
    ("self_attn.compressor.indexer.kv_norm.weight", "attn.indexer.compressor.norm.weight", None, "index", "keys"),
    ("{latents}.indexer_q_b_proj", "attn.indexer.wq_b.weight",
     "self_attn.compressor.indexer.q_b_proj.weight", "index_heads*index q_lora", "selects"),
    ("{inputs}.indexer_weights_proj", "attn.indexer.weights_proj.weight",
     "self_attn.compressor.indexer.scorer.weights_proj.weight", "index_heads hidden", "selects"),
    ("mlp.gate.weight", "ffn.gate.weight", None, "experts hidden", "all"),
    ("mlp.gate.tid2eid", "ffn.gate.tid2eid", None, "vocab chosen", "hash_moe"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias", None, "experts", "moe"),
    ("mlp.experts.gate_up_proj",
     "ffn.experts.{expert}.w1.weight ffn.experts.{expert}.w3.weight", None, "experts 2|moe hidden", "all"),
    ("mlp.experts.down_proj", "ffn.experts.{expert}.w2.weight", None, "experts hidden moe", "all"),
    ("{shared}.gate_proj", "ffn.shared_experts.w1.weight", "mlp.shared_experts.gate_proj.weight", "moe hidden", "all"),
    ("{shared}.up_proj", "ffn.shared_experts.w3.weight", "mlp.shared_experts.up_proj.weight", "moe hidden", "all"),
    ("mlp.shared_experts.down_proj.weight", "ffn.shared_experts.w2.weight", None, "hidden moe", "all"),
)  # fmt: skip
_FUSED = dict(
    inputs="self_attn.input_projections.weights",
    latents="self_attn.latent_projections.weights",
    shared="mlp.shared_experts.gate_up_proj.weights",
)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of the model and the stored tensors it is made of.

    Attributes:
        path: module path of the parameter, e.g. "model.layers.0.mlp.experts.down_proj".
        shape: shape of the parameter.
        sources: names of the stored tensors, whose concatenation is the parameter in row-major order.
        source_shape: shape of each stored tensor.
    """

    path: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shape: tuple[int, ...]

    @property
    def module(self) -> str:
        """The path of the module that has the parameter."""
        return self.path.rpartition(".")[0]

    @property
    def is_expert(self) -> bool:
        """Whether the parameter holds a matrix of all routed experts of a layer."""
        return self.module.endswith(".experts")

    @property
    def is_ids(self) -> bool:
        """Whether the parameter holds ids of experts, the model's only integers."""
        return self.path.endswith(".tid2eid")

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of the parameter's FP4 codes."""
        return *self.shape[:-1], self.shape[-1] // 2


def weights(config: DSV4Config, naming: Naming) -> Iterator[Weight]:
    """Yields every parameter of the model in the given naming."""
    sizes = _sizes(config)
    for path, release, shape in _TOP:
        is_release = naming == "release" or (naming == "hybrid" and path == "lm_head.weight")
        yield _weight(path, shape, sizes, release if is_release else path)
    for layer, spec in enumerate(config.layers):
        draft_layer = layer - config.num_hidden_layers
        ours = f"model.layers.{layer}." if draft_layer < 0 else f"drafts.layers.{draft_layer}."
        theirs = f"layers.{layer}." if draft_layer < 0 else f"mtp.{draft_layer}."
        if naming == "hybrid" or (naming == "module" and draft_layer < 0):
            theirs = f"model.{theirs}"
        sizes |= {"rate": spec.compress_rate, "pair": 2 if spec.overlap else 1}
        parts = {
            "all": True, "owner": spec.owner, "keys": spec.owner and spec.key_compressor, "selects": spec.selects,
            "hash_moe" if config.is_hashed(layer) else "moe": True,
        }  # fmt: skip
        places = {"first": draft_layer == 0, "last": draft_layer == config.num_draft_layers - 1}
        for path, release, shape, place in _DRAFTS[type(config.drafts)]:
            if places[place]:
                yield _weight(f"drafts.{path}", shape, sizes, theirs + (path if naming == "module" else release))
        for path, release, module, shape, part in _LAYER:
            if parts.get(part):
                sources = (module or path) if naming == "module" else release
                if naming == "hybrid" and release == "attn.kv_norm.weight":
                    sources = "attn.norm.weight"
                yield _weight(ours + path.format_map(_FUSED), shape, sizes, *(theirs + one for one in sources.split()))


def detect_naming(config: DSV4Config, names: Iterable[str]) -> Naming:
    """Returns the naming that most names belong to; raises ValueError if no name is known."""
    names = set(names)
    hits = {
        naming: sum(source in names for weight in weights(config, naming) for source in weight.sources)
        for naming in get_args(Naming.__value__)
    }
    best = max(hits, key=lambda naming: hits[naming])
    if not hits[best]:
        shown = ", ".join(sorted(names)[:3]) or "none at all"
        raise ValueError(f"these are not DeepSeek-V4 weights in any known naming; the tensors are {shown} ...")
    return best


def tied(table: list[Weight], names: Collection[str]) -> Iterator[Weight]:
    """Yields the weights of a model whose head, if no tensor in `names` is it, is a copy of the embedding."""
    (embedding,) = (weight.sources for weight in table if weight.path == EMBEDDING)
    for weight in table:
        absent = weight.path == "lm_head.weight" and weight.sources[0] not in names
        yield dataclasses.replace(weight, sources=embedding) if absent else weight


def is_draft(name: str) -> bool:
    """Whether a tensor belongs to a layer that makes drafts, which a model without drafts leaves out."""
    return name.startswith(("mtp.", "model.mtp."))


def is_draft_copy(name: str) -> bool:
    """Whether a tensor of such a layer is a copy of the embedding or the head, by the released converter's rule."""
    return is_draft(name) and ("emb" in name or name.endswith("head.weight"))


def _weight(path: str, spec: str, sizes: dict[str, int], *sources: str) -> Weight:
    shape = _shape(spec.replace("|", " "), sizes)
    stored = _shape(spec.replace("|", "*"), sizes)
    if "{expert}" in sources[0]:
        sources = tuple(source.format(expert=expert) for expert in range(sizes["experts"]) for source in sources)
        stored = math.prod(shape[:-1]) // len(sources), shape[-1]
    return Weight(path, shape, sources, stored)


def _sizes(config: DSV4Config) -> dict[str, int]:
    hc = config.hc_mult
    dspark = config.dspark
    return {
        "vocab": config.vocab_size, "hidden": config.hidden_size, "hc": hc, "mix": (2 + hc) * hc,
        "q_lora": config.q_lora_rank, "heads": config.num_attention_heads, "head": config.head_dim,
        "groups": config.o_groups, "o_lora": config.o_lora_rank,
        "group_in": config.num_attention_heads * config.head_dim // config.o_groups,
        "index_heads": config.index_n_heads, "index": config.index_head_dim,
        "experts": config.n_routed_experts, "chosen": config.num_experts_per_tok, "moe": config.moe_intermediate_size,
        "taps": len(dspark.target_layer_ids) if dspark else 0,
        "markov": dspark.markov_rank if dspark else 0,
        "with_markov": config.hidden_size + dspark.markov_rank if dspark else 0,
    }  # fmt: skip


def _shape(spec: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """Evaluates a shape such as `"2*moe hidden"`."""
    return tuple(
        math.prod(int(factor) if factor.isdecimal() else sizes[factor] for factor in axis.split("*"))
        for axis in spec.split()
    )
