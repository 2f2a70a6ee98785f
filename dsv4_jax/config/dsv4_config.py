"""The configuration of a DeepSeek-V4 model: its sizes, layers, RoPE and draft layers."""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4_jax.common.arguments import check, check_choice, check_whole
from dsv4_jax.config import config_json
from dsv4_jax.config.draft_config import DSparkConfig, MTPConfig
from dsv4_jax.config.engram_config import EngramConfig
from dsv4_jax.config.layer_spec import MAX_ROWS, LayerSpec, numbered, shared_specs
from dsv4_jax.config.rope_scaling import RopeScaling


if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSV4Config:
    """The configuration of a DeepSeek-V4 model; immutable and hashable (a static jit argument).

    Most fields have the name and the meaning of a field of config.json. The following fields differ, or have a meaning
    that their name does not tell:

    - `specs`: the attention of each layer, without draft layers.
    - `mlp_layer_types`: the MLP of each of these layers: "hash_moe" looks up its experts by token id, "moe" selects
      them by a router.
    - `rope_theta`: base of RoPE in layers that attend to a sliding window only.
    - `compress_rope_theta`: base of RoPE in the other layers.
    - `rope_scaling`: YaRN in these other layers; None = no YaRN.
    - `eos_token_id`: a tuple, empty if there is none.
    - `num_nextn_predict_layers`: 1 with draft layers, 0 without. The draft layers are the multi-token-prediction block
      if `dspark` is None, otherwise the layers that `dspark` describes.
    - `tie_word_embeddings`: whether a checkpoint may leave out the head, which is then a copy of the embedding.
    - `kv_format`: name of the release's format of the KV cache, "v4" or "v41", see `quant.formats`.
    - `norms_queries`: whether each head of the queries is normed; False in V4.1.
    - `delays_pre`: whether a hyper-connection collapses the streams by the weights `pre` of the preceding
      hyper-connection, as in V4.1. Then the model has no weights for the collapse before its head.
    - `candidate_topk_blocks`, `candidate_block_size`: number of blocks to which a layer restricts the selections of
      later layers, and number of entries in a block; 0 if no layer has `candidates`.
    - `engram`: V4.1's embeddings of n-grams; None = none.
    - `image_token_id`: token id that stands for a part of an image; None = the model knows no images. In a text it is
      an ordinary token: `Batch.is_image` says which tokens are parts of images.
    - `weight_block`: number of rows and of columns of a block of values that share a scale, in matrices that the
      release stores in FP8: 128, or 32 in V4.1.

    Raises:
      TypeError: a layer is not a LayerSpec, or a number has another type.
      ValueError: a field has an impossible value; the message names the field and the value.
    """

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    specs: tuple[LayerSpec, ...] = dataclasses.field(hash=False)  # hashing them would take 50 us at every launch
    mlp_layer_types: tuple[str, ...]
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    scoring_func: str
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    num_nextn_predict_layers: int = 0
    tie_word_embeddings: bool = False
    dspark: DSparkConfig | None = None
    kv_format: str = "v4"
    norms_queries: bool = True
    delays_pre: bool = False
    candidate_topk_blocks: int = 0
    candidate_block_size: int = 0
    engram: EngramConfig | None = None
    image_token_id: int | None = None
    weight_block: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", numbered(self.specs))
        config_json.check_numbers(vars(self) | {"num_hidden_layers": self.num_hidden_layers})
        names = config_json.check_names(
            "mlp_layer_types", self.mlp_layer_types, config_json.MLP_LAYER_TYPES, self.num_hidden_layers
        )
        object.__setattr__(self, "mlp_layer_types", names)
        ends = self.eos_token_id
        check(isinstance(ends, list | tuple), f"eos_token_id={ends!r} must be a tuple of token ids")
        object.__setattr__(self, "eos_token_id", tuple(check_whole("eos_token_id", x, 0, 2**31 - 1) for x in ends))
        if self.bos_token_id is not None:
            check_whole("bos_token_id", self.bos_token_id, 0, 2**31 - 1)
        check_choice("scoring_func", self.scoring_func, "sqrtsoftplus")
        check_choice("n_shared_experts", self.n_shared_experts, 1, reason=", as in DeepSeek-V4")
        check_choice("weight_block", self.weight_block, 128, 32)
        check_choice("kv_format", self.kv_format, "v4", "v41")
        for name, limit in _LIMITS:
            value = getattr(self, name)
            maximum = getattr(self, limit)
            check(value <= maximum, f"{name}={value} exceeds {limit}={maximum}")
        for name in ("rope_theta", "compress_rope_theta"):
            check(getattr(self, name) > 1, f"{name}={getattr(self, name)} must exceed 1")
        rope_dims = self.qk_rope_head_dim
        heads = self.num_attention_heads
        check(rope_dims % 2 == 0, f"qk_rope_head_dim={rope_dims} must be even: RoPE turns pairs")
        check(heads % self.o_groups == 0, f"num_attention_heads={heads} must be a multiple of o_groups={self.o_groups}")
        setting = f"num_nextn_predict_layers={self.num_nextn_predict_layers!r}"
        check(
            self.drafts is None or self.dspark is not None or not self.delays_pre,
            f"{setting} needs dspark if delays_pre=True, as in DeepSeek-V4.1",
        )
        check(self.num_nextn_predict_layers in (0, 1), f"{setting} must be 1, or 0 without drafts")
        check(self.num_nextn_predict_layers == 1 or self.dspark is None, f"{setting} must be 1 with dspark")
        for part in (self.dspark, self.engram):
            if part is not None:
                part.check(self.num_hidden_layers, self.vocab_size)
        experts, selected = self.layer_experts(self.num_hidden_layers)
        name = f"dspark_num_experts_per_tok={selected}"
        check(selected <= experts, f"{name} exceeds dspark_n_routed_experts={experts}")
        if self.image_token_id is not None:
            check_whole("image_token_id", self.image_token_id, 0, self.vocab_size - 1)
        self._check_candidates()

    def _check_candidates(self):
        """Checks the number and size of candidate blocks. They may be 0 only if no layer has `candidates`."""
        blocks = self.candidate_topk_blocks
        size = self.candidate_block_size
        least = int(any(spec.candidates is not None for spec in self.specs))
        check_whole("candidate_topk_blocks", blocks, least, MAX_ROWS)
        check_whole("candidate_block_size", size, least, MAX_ROWS)
        for spec in self.specs:
            # The candidate blocks must hold at least `topk` visible entries. The newest block is always one of them,
            # and may hold a single visible entry.
            if spec.candidates is not None and (blocks - 1) * size + 1 < self.topk(spec.layer):
                raise ValueError(
                    f"candidate_topk_blocks={blocks} and candidate_block_size={size} leave too few entries: "
                    f"({blocks} - 1) * {size} + 1 must be at least index_topk={self.topk(spec.layer)}"
                )

    def __repr__(self) -> str:
        kinds = collections.Counter(
            "window only" if spec.group is None else f"{spec.group} of {spec.compress_rate} tokens"
            for spec in self.layers
        )
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        names = "hidden_size", "num_attention_heads", "head_dim", "n_routed_experts", "vocab_size", "sliding_window"
        return f"DSV4Config({layers}; {', '.join(f'{name}={getattr(self, name)}' for name in names)}, ...)"

    @property
    def nope_head_dim(self) -> int:
        """The number of a head's first channels, which RoPE does not rotate."""
        return self.head_dim - self.qk_rope_head_dim

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The specs of all layers in order. The last ones are the draft layers, which have a sliding window only."""
        return numbered((*self.specs, *[LayerSpec()] * self.num_draft_layers))

    @property
    def num_hidden_layers(self) -> int:
        """The number of the model's layers; draft layers do not count."""
        return len(self.specs)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The name of each layer's kind of attention in transformers' config.json, without draft layers."""
        return tuple(spec.layer_type for spec in self.specs)

    @property
    def drafts(self) -> MTPConfig | DSparkConfig | None:
        """The description of the draft layers; None without draft layers."""
        return (self.dspark or MTPConfig()) if self.num_nextn_predict_layers else None

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The numbers of the layers whose output streams the draft layers read; -1 stands for the model's embedding.

        In V4, these are the target layers of `drafts`. The draft layers of V4.1 read the streams that enter the target
        layers, so in V4.1 these are the layers before the target layers.
        """
        targets = () if self.drafts is None else self.drafts.target_layer_ids
        return tuple(layer - int(self.delays_pre) for layer in targets)

    @property
    def num_draft_layers(self) -> int:
        """The number of draft layers."""
        return 0 if self.drafts is None else self.drafts.num_layers

    def with_layers(self, specs: Sequence[LayerSpec], mlp_layer_types: Sequence[str] | None = None) -> "DSV4Config":
        """Returns the configuration of a model with other layers. The last of them become DSpark's target layers.

        Engram keeps its layers whose indices are below the new number of layers.

        Args:
          specs: the attention of each layer.
          mlp_layer_types: the MLP of each layer, "hash_moe" or "moe"; None = "moe" in all layers.
        """
        count = len(specs)
        dspark = self.dspark
        if dspark is not None:
            targets = tuple(range(count))[-len(dspark.target_layer_ids) :]
            dspark = dataclasses.replace(dspark, target_layer_ids=targets)
        return dataclasses.replace(
            self,
            specs=tuple(specs),
            mlp_layer_types=tuple(mlp_layer_types or ("moe",) * count),
            dspark=dspark,
            engram=self.engram and self.engram.first_layers(count),
        )

    def first_layers(self, count: int) -> "DSV4Config":
        """Returns the configuration of a model that has only the first `count` layers of this one.

        Raises ValueError if this model has fewer layers, or `count` is below 1.
        """
        check_whole("count", count, 1, self.num_hidden_layers)
        return self.with_layers(self.specs[:count], self.mlp_layer_types[:count])

    def with_dspark(
        self, markov_rank: int, n_routed_experts: int | None = None, num_experts_per_tok: int | None = None
    ) -> "DSV4Config":
        """Returns the configuration with three draft layers of DSpark, whose other values are those of the releases.

        Args:
          markov_rank, n_routed_experts, num_experts_per_tok: see `DSparkConfig`.
        """
        dspark = DSparkConfig(
            num_layers=3,
            block_size=5,
            noise_token_id=min(128799, self.vocab_size - 1),
            target_layer_ids=tuple(range(self.num_hidden_layers))[-3:],
            markov_rank=markov_rank,
            n_routed_experts=n_routed_experts,
            num_experts_per_tok=num_experts_per_tok,
        )
        return dataclasses.replace(self, num_nextn_predict_layers=1, dspark=dspark)

    def with_drafts(self, drafts: bool) -> "DSV4Config":
        """Returns the configuration with draft layers, or without if `drafts` is False.

        The draft layers are the layers that `dspark` describes. If `dspark` is None, the only draft layer is the
        multi-token-prediction block. V4.1 has no such block. Its draft layers are added by `v41_flash(mtp=True)` or
        `with_dspark`.
        """
        return dataclasses.replace(self, num_nextn_predict_layers=int(drafts), dspark=self.dspark if drafts else None)

    def with_drafts_of(self, other: "DSV4Config") -> "DSV4Config":
        """Returns the configuration with draft layers of the kind that `other` has, or without if `other` has none."""
        if other.dspark is not None:
            return self.with_dspark(other.dspark.markov_rank)
        return self.with_drafts(other.drafts is not None)

    def compress_rate(self, layer: int) -> int:
        """Returns the number of tokens per compressed entry of a layer; 0 for a layer with a sliding window only."""
        return self.layers[layer].compress_rate

    def window(self, layer: int) -> int:
        """Returns the number of tokens in a layer's sliding window, including the token that attends to it."""
        return self.layers[layer].window or self.sliding_window

    def topk(self, layer: int) -> int:
        """Returns the number of entries that a layer's indexer selects for each token."""
        return self.layers[layer].index_topk or self.index_topk

    def layer_experts(self, layer: int) -> tuple[int, int]:
        """Returns the number of a layer's routed experts, and the number of them that a token is sent to."""
        source = (self.dspark or self) if layer >= self.num_hidden_layers else self
        return source.n_routed_experts or self.n_routed_experts, source.num_experts_per_tok or self.num_experts_per_tok

    def is_hashed(self, layer: int) -> bool:
        """Returns whether a layer looks up its experts by token id; draft layers never do."""
        return self.mlp_layer_types[layer : layer + 1] == ("hash_moe",)

    def has_engram(self, layer: int) -> bool:
        """Returns whether embeddings of n-grams are added to the residual streams before a layer."""
        return self.engram is not None and layer in self.engram.layer_ids

    def inv_freq(self, layer: int) -> "np.ndarray":
        """Returns RoPE's angle per position for each pair of channels, [qk_rope_head_dim // 2] float32 radians.

        The base is `rope_theta` in layers with a sliding window only. In other layers, it is `compress_rope_theta`, and
        YaRN interpolates the angles. The order of the float32 operations is that of the release's
        `precompute_freqs_cis`, so that the values equal its table bit for bit.
        """
        import numpy as np  # imported here, so that the command line can print its help without importing NumPy

        is_compressed = self.layers[layer].compress_rate > 0
        theta = self.compress_rope_theta if is_compressed else self.rope_theta
        exponents = np.arange(0, self.qk_rope_head_dim, 2, dtype=np.float32) / np.float32(self.qk_rope_head_dim)
        freqs = np.float32(1) / np.power(np.float32(theta), exponents)
        if not is_compressed or self.rope_scaling is None:
            return freqs
        return self.rope_scaling.interpolate(freqs, theta)

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any], *, mtp: bool = False) -> "DSV4Config":
        """Reads config.json with the fields of the release, with those of transformers 5, or with both if they agree.

        For DeepSeek-V4.1, the file may also be the configuration of the release's own inference code (in its folder
        `inference`), which has no `model_type` and other names of fields. If that file lacks `max_position_embeddings`,
        the field becomes `original_seq_len * rope_factor`, the length to which YaRN extends the context.

        Args:
          source: a folder that holds config.json, the file itself, a safetensors file beside it, or its parsed
            content.
          mtp: whether to include the draft layers, whose weights take additional memory. They are DSpark's layers if
            the file has fields `dspark_*`, otherwise the multi-token-prediction block.

        Raises:
          ValueError: the file is missing or not JSON; it describes another model; it lacks fields, which the message
            names; two fields contradict each other; a value is impossible; or `mtp` is True for a model without draft
            layers.
        """
        content = source if isinstance(source, dict) else config_json.read_json(Path(source))
        try:
            return cls(**config_json.read_fields(content, mtp=mtp))
        except TypeError as error:  # a value in config.json has the wrong JSON type
            raise ValueError(str(error)) from None

    @classmethod
    def small(cls, layers: Sequence[LayerSpec], **fields: Any) -> "DSV4Config":
        """Returns the configuration of a small model with any layers.

        Args:
          layers: specs of the layers, such as `LayerSpec()`, `LayerSpec.csa(rate)` and `LayerSpec.hca(rate)`.
          **fields: values of other fields, such as `hidden_size=256`. The default of `mlp_layer_types` is "moe" in all
            layers. A model like V4.1 has the layers of `shared_specs` and at least `kv_format="v41"`,
            `norms_queries=False` and `delays_pre=True`; to be saved, it needs `weight_block=32`, too.
        """
        defaults = _RELEASED | _SMALL | {"mlp_layer_types": ("moe",) * len(layers)}
        return cls(**defaults | fields, specs=tuple(layers))

    @classmethod
    def v4_flash(cls) -> "DSV4Config":
        """Returns the configuration of DeepSeek-V4-Flash.

        It has 43 layers: first 2 with a sliding window only, then 21 of CSA and 20 of HCA in turn.
        """
        csa = LayerSpec.csa()
        hca = LayerSpec.hca()
        return cls(
            **_RELEASED, hidden_size=4096, num_attention_heads=64, q_lora_rank=1024, o_groups=8, index_topk=512,
            specs=(LayerSpec(), LayerSpec(), *(csa, hca) * 20, csa), mlp_layer_types=config_json.mlp_types(3, 43),
            moe_intermediate_size=2048, n_routed_experts=256, routed_scaling_factor=1.5,
        )  # fmt: skip

    @classmethod
    def v4_pro(cls) -> "DSV4Config":
        """Returns the configuration of DeepSeek-V4-Pro.

        It has 61 layers: first 2 of HCA, then 30 of CSA and 29 of HCA in turn.
        """
        csa = LayerSpec.csa()
        hca = LayerSpec.hca()
        return cls(
            **_RELEASED, hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, o_groups=16, index_topk=1024,
            specs=(hca, hca, *(csa, hca) * 29, csa), mlp_layer_types=config_json.mlp_types(3, 61),
            moe_intermediate_size=3072, n_routed_experts=384, routed_scaling_factor=2.5,
        )  # fmt: skip

    @classmethod
    def v4_flash_0731(cls) -> "DSV4Config":
        """Returns the configuration of DeepSeek-V4-Flash-0731, which is V4-Flash with DSpark's draft layers."""
        return cls.v4_flash().with_dspark(256)

    @classmethod
    def v4_pro_0813(cls) -> "DSV4Config":
        """Returns the configuration of DeepSeek-V4-Pro-0813, which is V4-Pro with DSpark's draft layers."""
        return cls.v4_pro().with_dspark(512)

    @classmethod
    def v41_flash(cls, *, mtp: bool = False) -> "DSV4Config":
        """Returns the configuration of DeepSeek-V4.1-Flash.

        It has 40 layers: 2 with a sliding window only, 18 that share the entries of 3 layers, and 20 that share the
        entries of layer 20.

        Args:
          mtp: whether to include the release's draft layers, which are DSpark's, as in `from_hf`.
        """
        config = cls(
            **_RELEASED | {"rms_norm_eps": 1e-20, "index_n_heads": 32}, hidden_size=5120, num_attention_heads=64,
            q_lora_rank=1280, o_groups=8, index_topk=512, mlp_layer_types=("moe",) * 40,
            specs=shared_specs((0, 0, *(2,) * 18, *(1,) * 20), (2, 8, 14, 20), (2, 8, 14, 20, 24, 28, 32, 36), 20),
            moe_intermediate_size=2304, n_routed_experts=384, routed_scaling_factor=1.5, kv_format="v41",
            norms_queries=False, delays_pre=True, candidate_topk_blocks=2048, candidate_block_size=8,
            engram=EngramConfig(
                layer_ids=(1, 14), num_embeddings=(384006168, 384016682), max_ngram_size=4, vocab_size=16000000,
                n_heads=8, head_dim=256, pad_token_id=2, compressed_vocab_size=99092,
            ), image_token_id=129264, weight_block=32,
        )  # fmt: skip
        return config.with_dspark(256, n_routed_experts=128, num_experts_per_tok=3) if mtp else config


# Pairs of fields. The value of the first must not exceed that of the second.
_LIMITS = (
    ("qk_rope_head_dim", "head_dim"),
    ("qk_rope_head_dim", "index_head_dim"),
    ("num_experts_per_tok", "n_routed_experts"),
)
_RELEASED: dict[str, Any] = {
    "vocab_size": 129280, "head_dim": 512, "qk_rope_head_dim": 64, "o_lora_rank": 1024, "index_n_heads": 64,
    "index_head_dim": 128, "sliding_window": 128, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": RopeScaling(16.0, 65536, 32.0, 1.0), "max_position_embeddings": 1048576, "bos_token_id": 0,
    "eos_token_id": (1,),
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 96, "qk_rope_head_dim": 32,
    "q_lora_rank": 24, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 32, "index_head_dim": 64, "index_topk": 16,
    "sliding_window": 16, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5, "rope_scaling": None, "max_position_embeddings": 4096, "bos_token_id": None,
    "eos_token_id": (),
}  # fmt: skip
