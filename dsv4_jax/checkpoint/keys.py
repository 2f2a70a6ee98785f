"""The table of a model's tensors, with their names in each of three namings of checkpoints.

- "release": names in DeepSeek's own files, such as `layers.1.attn.wkv.weight`.
- "hybrid": names in files that transformers 5's `save_pretrained` writes. They are the release's names with `model.` in
  front, with a few exceptions.
- "module": names of transformers' modules, such as `model.layers.1.self_attn.kv_proj.weight`.

This package's modules have the paths of transformers' modules, except for linear maps with the same input, which are
fused into one `FusedLinear`.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from dsv4_jax.config import DSV4Config
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.quant import fp8_kind
from dsv4_jax.quant.fp4 import MXFP4_BLOCK


type Naming = Literal["release", "hybrid", "module"]
type Storage = Literal["quantized", "bfloat16", "float32"]

HEAD = "lm_head.weight"
ENGRAM_TABLE = "engram.embedding"  # end of the paths of Engram's tables
TABLES = ("embed_tokens.weight", ENGRAM_TABLE)  # path ends of the tables from which a step reads few rows
# This table has a row for each parameter outside the layers. A row holds the path in this package's model ("our path"),
# the name in the release, the storage in the release's files, and transformers' name if it differs from our path. The
# storage is a `Weight.dtype`, where "FP8" stands for `fp8_kind(config.weight_block)`, that is, "FP8" or "FP8_32". A row
# is used only if the model has a parameter at our path.
_TOP = (
    ("model.embed_tokens.weight", "embed.weight", "BF16"),
    ("model.norm.weight", "norm.weight", "BF16"),
    ("model.hc_head.hc_fn", "hc_head_fn", "F32"),
    ("model.hc_head.hc_base", "hc_head_base", "F32"),
    ("model.hc_head.hc_scale", "hc_head_scale", "F32"),
    (HEAD, "head.weight", "BF16"),
)
# This table has rows as in `_TOP`, for the parameters that compute the inputs of the draft layers. Our paths begin with
# `drafts.`. The release's names begin with `mtp.N.`, where N is the first draft layer.
_DRAFT_INPUTS = (
    ("e_proj.weight", "e_proj.weight", "FP8"),
    ("h_proj.weight", "h_proj.weight", "FP8"),
    ("enorm.weight", "enorm.weight", "BF16"),
    ("hnorm.weight", "hnorm.weight", "BF16"),
    ("main_proj.weight", "main_proj.weight", "FP8"),
    ("main_norm.weight", "main_norm.weight", "BF16"),
)
# This table has rows for the parameters that compute the outputs of the draft layers. The prefixes are as in
# `_DRAFT_INPUTS`, but N is the last draft layer.
_DRAFT_OUTPUTS = (
    ("norm.weight", "norm.weight", "BF16"),
    ("hc_head.hc_fn", "hc_head_fn", "F32"),
    ("hc_head.hc_base", "hc_head_base", "F32"),
    ("hc_head.hc_scale", "hc_head_scale", "F32"),
    ("markov_w1.weight", "markov_head.markov_w1.weight", "BF16"),
    ("markov_w2.weight", "markov_head.markov_w2.weight", "BF16"),
    ("confidence_proj.weight", "confidence_head.proj.weight", "BF16"),
)
# This table has a row for each parameter of a layer. Our paths begin with `model.layers.N.` or `drafts.layers.N.`, the
# release's names with `layers.N.` or `mtp.N.`. A release name with {expert} stands for one tensor per expert. If a row
# has two such names, the tensors' order is: both tensors of expert 0, both tensors of expert 1, and so on.
_LAYER = (
    ("input_layernorm.weight", "attn_norm.weight", "BF16"),
    ("post_attention_layernorm.weight", "ffn_norm.weight", "BF16"),
    ("attn_hc.fn", "hc_attn_fn", "F32"),
    ("attn_hc.base", "hc_attn_base", "F32"),
    ("attn_hc.scale", "hc_attn_scale", "F32"),
    ("ffn_hc.fn", "hc_ffn_fn", "F32"),
    ("ffn_hc.base", "hc_ffn_base", "F32"),
    ("ffn_hc.scale", "hc_ffn_scale", "F32"),
    ("{inputs}.q_a_proj", "attn.wq_a.weight", "FP8", "self_attn.q_a_proj.weight"),
    ("self_attn.q_a_norm.weight", "attn.q_norm.weight", "BF16"),
    ("{latents}.q_b_proj", "attn.wq_b.weight", "FP8", "self_attn.q_b_proj.weight"),
    ("{inputs}.kv_proj", "attn.wkv.weight", "FP8", "self_attn.kv_proj.weight"),
    ("self_attn.kv_norm.weight", "attn.kv_norm.weight", "BF16"),
    ("self_attn.o_a_proj.weight", "attn.wo_a.weight", "FP8"),
    ("self_attn.o_b_proj.weight", "attn.wo_b.weight", "FP8"),
    ("self_attn.sinks", "attn.attn_sink", "F32"),
    ("{inputs}.compressor_kv_proj", "attn.compressor.wkv.weight", "BF16", "self_attn.compressor.kv_proj.weight"),
    ("{inputs}.compressor_gate_proj", "attn.compressor.wgate.weight", "BF16", "self_attn.compressor.gate_proj.weight"),
    ("self_attn.compressor.position_bias", "attn.compressor.ape", "F32"),
    ("self_attn.compressor.kv_norm.weight", "attn.compressor.norm.weight", "BF16"),
    ("self_attn.compressor.key_proj.weight", "attn.indexer.wk.weight", "BF16"),
    ("self_attn.compressor.key_norm.weight", "attn.indexer.k_norm.weight", "BF16"),
    (
        "{inputs}.indexer_kv_proj",
        "attn.indexer.compressor.wkv.weight",
        "BF16",
        "self_attn.compressor.indexer.kv_proj.weight",
    ),
    (
        "{inputs}.indexer_gate_proj",
        "attn.indexer.compressor.wgate.weight",
        "BF16",
        "self_attn.compressor.indexer.gate_proj.weight",
    ),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape", "F32"),
    ("self_attn.compressor.indexer.kv_norm.weight", "attn.indexer.compressor.norm.weight", "BF16"),
    (
        "{latents}.indexer_q_b_proj",
        "attn.indexer.wq_b.weight",
        "FP8",
        "self_attn.compressor.indexer.q_b_proj.weight",
    ),
    (
        "{inputs}.indexer_weights_proj",
        "attn.indexer.weights_proj.weight",
        "BF16",
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
    ),
    ("mlp.gate.weight", "ffn.gate.weight", "BF16"),
    ("mlp.gate.tid2eid", "ffn.gate.tid2eid", "I64"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias", "F32"),
    ("mlp.gate.image_correction_bias", "ffn.gate.bias_vl", "F32"),
    ("mlp.experts.gate_up_proj", "ffn.experts.{expert}.w1.weight ffn.experts.{expert}.w3.weight", "FP4"),
    ("mlp.experts.down_proj", "ffn.experts.{expert}.w2.weight", "FP4"),
    ("{shared}.gate_proj", "ffn.shared_experts.w1.weight", "FP8", "mlp.shared_experts.gate_proj.weight"),
    ("{shared}.up_proj", "ffn.shared_experts.w3.weight", "FP8", "mlp.shared_experts.up_proj.weight"),
    ("mlp.shared_experts.down_proj.weight", "ffn.shared_experts.w2.weight", "FP8"),
    ("engram.embedding", "engram.embed.weight", "FP8_ROWS"),
    ("engram.kv_proj.weight", "engram.wkv.weight", "FP8"),
    ("engram.q_weight", "engram.q_weight", "BF16"),
    ("engram.k_weight", "engram.k_weight", "BF16"),
)
# The maps of a `FusedLinear` have paths that begin with a placeholder, such as {inputs} in `_LAYER`. `_FUSED` maps each
# placeholder to the path of the weights of its `FusedLinear`.
_FUSED = {
    "inputs": "self_attn.input_projections.weights",
    "latents": "self_attn.latent_projections.weights",
    "shared": "mlp.shared_experts.gate_up_proj.weights",
}


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter of the model, and the stored tensors that it consists of.

    Attributes:
      path: path of the parameter in the model, e.g. "model.layers.0.mlp.experts.down_proj".
      shape: shape of the parameter.
      dtype: storage of its tensors in the release's files: a `QuantizedKind`, or the dtype "BF16", "F32", or "I64" for
        ids of experts, the model's only integers.
      sources: names of the stored tensors. Their values, one tensor after the other, are the values of the parameter in
        row-major order.
      source_shape: shape of the values of each stored tensor.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[str, ...]
    source_shape: tuple[int, ...]

    @property
    def module(self) -> str:
        """The path of the module that owns the parameter."""
        return self.path.rpartition(".")[0]

    @property
    def is_expert(self) -> bool:
        """Whether the parameter holds a matrix of all routed experts of a layer."""
        return self.module.endswith(".experts")

    def stored_dtype(self, storage: Storage) -> str:
        """Returns the dtype or kind of the parameter's tensors in files of the given storage, see `save_release`."""
        if storage == "quantized" or self.dtype == "I64":
            return self.dtype
        return "BF16" if storage == "bfloat16" and self.dtype != "F32" else "F32"


def weights(config: DSV4Config, naming: Naming) -> Iterator[Weight]:
    """Yields every parameter of the model in the given naming, the embedding first."""
    shapes = _shapes(config)
    matrix_kind = fp8_kind(config.weight_block)
    for path, release, dtype in _TOP:
        is_release = naming == "release" or (naming == "hybrid" and path == HEAD)
        yield from _weight(shapes, path, release if is_release else path, dtype)
    # (prefix of the paths, prefix of the release's names, table of the parameters) of each part of the model.
    parts = [(f"model.layers.{layer}.", f"layers.{layer}.", _LAYER) for layer in range(config.num_hidden_layers)]
    parts += [(f"drafts.layers.{layer}.", f"mtp.{layer}.", _LAYER) for layer in range(config.num_draft_layers)]
    parts += [("drafts.", "mtp.0.", _DRAFT_INPUTS), ("drafts.", f"mtp.{config.num_draft_layers - 1}.", _DRAFT_OUTPUTS)]
    for our_prefix, their_prefix, rows in parts:
        if naming == "hybrid" or (naming == "module" and our_prefix.startswith("model.")):
            their_prefix = f"model.{their_prefix}"
        for path, release, dtype, *other_path in rows:
            names = release
            if naming == "module":
                names = other_path[0] if other_path else path
            elif naming == "hybrid" and release == "attn.kv_norm.weight":
                names = "attn.norm.weight"
            names = " ".join(their_prefix + name for name in names.split())
            kind = matrix_kind if dtype == "FP8" else dtype
            yield from _weight(shapes, our_prefix + path.format_map(_FUSED), names, kind)


def _weight(shapes, path, names, dtype):
    """Yields the `Weight` of one parameter, or nothing if the model does not have it.

    Args:
      shapes: shape of each parameter of the model by path.
      path: path of the parameter.
      names: names of its tensors, separated by spaces. A name with {expert} stands for a tensor of each expert.
      dtype: storage in the release's files. "FP4" becomes "BF16" if the inputs do not divide into FP4's groups.
    """
    shape = shapes.get(path)
    if shape is None:
        return
    sources = tuple(names.split())
    source_shape = shape
    if "{expert}" in names:
        sources = tuple(source.format(expert=expert) for expert in range(shape[0]) for source in sources)
        source_shape = shape[-2:]
    elif len(shape) == 4:  # [experts, 2, out, in]: the tensor is [experts, 2 * out, in], rows of the gate first
        source_shape = (shape[0], shape[1] * shape[2], shape[3])
    if dtype == "FP4" and shape[-1] % MXFP4_BLOCK:
        dtype = "BF16"
    yield Weight(path, shape, dtype, sources, source_shape)


@functools.lru_cache
def _shapes(config):
    """Returns the shape of each parameter of the model by its path."""
    model = DeepseekV4ForCausalLM(config, rngs=ABSTRACT)
    return {path: view.shape for path, view in parameter_views(model).items()}


def detect_naming(config: DSV4Config, names: Iterable[str]) -> Naming:
    """Returns the naming in which most of these tensor names occur. Raises ValueError if none occurs in any naming."""
    names = set(names)
    hits = {
        naming: sum(source in names for weight in weights(config, naming) for source in weight.sources)
        for naming in get_args(Naming.__value__)
    }
    best = max(hits, key=hits.__getitem__)
    if not hits[best]:
        shown = ", ".join(sorted(names)[:3]) or "none at all"
        raise ValueError(f"these are not DeepSeek-V4 weights in any known naming; the tensors are {shown} ...")
    return best


def is_draft(name: str) -> bool:
    """Returns whether a tensor belongs to a draft layer, which a model without drafts leaves out."""
    return name.startswith(("mtp.", "model.mtp."))


def is_image_part(name: str, *, biases: bool) -> bool:
    """Returns whether a tensor is for images, which this package's text-only models leave out.

    These are the tensors of the encoder of images and, if `biases` is True, the routers' biases for tokens of images.
    """
    is_bias = biases and name.endswith((".gate.bias_vl", ".gate.image_correction_bias"))
    return is_bias or name.removeprefix("model.").startswith(("vision.", "aligner.", "image_"))


def is_draft_copy(name: str) -> bool:
    """Returns whether a tensor of a draft layer is a copy of the model's embedding or head.

    The rule comes from the release's conversion script: the name contains "emb" or ends with "head.weight".
    """
    return is_draft(name) and ("emb" in name or name.endswith("head.weight"))
