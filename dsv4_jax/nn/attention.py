"""Attention over the sliding window and compressed entries, with one key-value head that all query heads share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from dsv4_jax.cache import CacheHandle
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.compressor import Compressor
from dsv4_jax.nn.indexer import CSAIndexer
from dsv4_jax.nn.layers import AnyRngs, Linear, RMSNorm, normal
from dsv4_jax.nn.projections import FusedLinear, Projection
from dsv4_jax.ops import apply_rope
from dsv4_jax.quant import round_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepCarry:
    """Values that layers pass on to later layers of a step, besides the residual streams and the cache.

    Attributes:
      selection: {index of a layer with an indexer: [T, index_topk] int32 entries that the layer selected, then -1}.
      candidates: {index of a layer: [T, B] int32 blocks of entries to which the layer restricts the selections of later
        layers, then -1}, see `LayerSpec.candidates`.
      engram_rows: {index of a layer with Engram: [T, rows, head_dim] rows of its table}, see `engram.look_up_ahead`.
      taps: [n, S, hidden] inputs of DSpark's draft layers. Row i is the mean over the residual streams that leave layer
        `DSV4Config.tap_layers[i]`, and zeros before this layer has run. None if the model has no tap layers. S is as in
        `ResidualStreams`.
      recorded: {name: value} of the most recent layer, for the names in the argument `record` of `DecoderLayer`.
    """

    selection: dict[int, Int[Array, "T k"]] = dataclasses.field(default_factory=dict)
    candidates: dict[int, Int[Array, "T B"]] = dataclasses.field(default_factory=dict)
    engram_rows: dict[int, Float[Array, "T r d"]] = dataclasses.field(default_factory=dict)
    taps: Float[Array, "n S D"] | None = None
    recorded: dict[str, Shaped[Array, "..."]] = dataclasses.field(default_factory=dict)

    def with_tap(self, row: Int[Array, ""] | int, streams: Float[Array, "S h D"]) -> "StepCarry":
        """Returns the carry in which row `row` of the taps, if it exists, is the mean over streams [S, h, hidden]."""
        mean = round_to(jnp.mean(streams.astype(jnp.float32), axis=1), streams.dtype)
        taps = None if self.taps is None else self.taps.at[row].set(mean, mode="drop")
        return dataclasses.replace(self, taps=taps)


class Attention(nnx.Module):
    """The attention of a layer of any kind (docs/dsv4.md 2). `config.layers[layer]` says which parts it has.

    Attributes:
      input_projections: FusedLinear of the layer's input, with these maps:

        * "q_a_proj" to the query latent.
        * "kv_proj" to the head that is both key and value.
        * In layers with an indexer, "indexer_weights_proj" to the weights of the indexer's heads.
        * In layers with a compressor, "compressor_kv_proj" and "compressor_gate_proj" in float32.
        * In layers with a compressor of index keys, "indexer_kv_proj" and "indexer_gate_proj" in float32.

        If an entry is a single token, there are no gates, and the `kv` maps of compressors have the input's dtype.
      latent_projections: FusedLinear of the normed query latent: "q_b_proj" to heads * head_dim, and in layers with an
        indexer "indexer_q_b_proj" to the indexer's queries.
      q_a_norm, kv_norm: RMSNorm of the query latent, and of the key-value head.
      o_a_proj, o_b_proj: Linear maps of the output: a low-rank map for each group of heads, then a map of all groups'
        results to hidden.
      sinks: [heads] float32, each head's additional logit in the softmax, which belongs to no row.
      compressor: Compressor if the layer stores compressed entries, else None.
      indexer: CSAIndexer if the layer selects entries itself, else None.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: AnyRngs):
        self.config = config
        self.layer = layer
        spec = config.layers[layer]
        options: dict[str, Any] = {"param_dtype": param_dtype, "rngs": rngs}
        heads_width = config.num_attention_heads * config.head_dim
        self.q_a_norm = RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps, rngs=rngs)
        self.kv_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, rngs=rngs)
        rank = config.o_groups * config.o_lora_rank
        self.o_a_proj = Linear(heads_width, rank, num_groups=config.o_groups, axes=("groups",), **options)
        self.o_b_proj = Linear(rank, config.hidden_size, axes=(None, "groups"), **options)
        self.sinks = normal(rngs, (config.num_attention_heads,), std=0.5, axes=("heads",))
        pools_keys = spec.owner and spec.key_compressor
        key_compressor = Compressor(config, layer, config.index_head_dim, **options) if pools_keys else None
        self.compressor = (
            Compressor(config, layer, config.head_dim, indexer=key_compressor, **options) if spec.owner else None
        )
        self.indexer = CSAIndexer(config, layer) if spec.selects else None

        input_maps = {"q_a_proj": Projection(config.q_lora_rank), "kv_proj": Projection(config.head_dim)}
        latent_maps = {"q_b_proj": Projection(heads_width, axes=("heads",))}
        for name, compressor in {"compressor": self.compressor, "indexer": key_compressor}.items():
            if compressor is not None:
                is_pooled = spec.compress_rate * (1 + spec.overlap) > 1
                dtype = jnp.float32 if is_pooled else None
                projection = Projection(compressor.width, out_dtype=dtype, is_fp8=False)
                input_maps |= {f"{name}_kv_proj": projection} | ({f"{name}_gate_proj": projection} if is_pooled else {})
        if spec.selects:
            input_maps["indexer_weights_proj"] = Projection(config.index_n_heads, is_fp8=False)
            latent_maps["indexer_q_b_proj"] = Projection(config.index_n_heads * config.index_head_dim)
        self.input_projections = FusedLinear(config.hidden_size, input_maps, **options)
        self.latent_projections = FusedLinear(config.q_lora_rank, latent_maps, **options)

    def __call__(
        self,
        x: Float[Array, "T D"],
        handle: CacheHandle,
        carry: StepCarry,
        forced_selection: Int[Array, "T K"] | None = None,
    ) -> tuple[Float[Array, "T D"], StepCarry, Any]:
        """Stores the tokens' rows in the layer's cache, and computes attention.

        Args:
          x: [T, hidden] normed input in the model's dtype.
          handle: the layer's cache for this batch. Padding tokens write nothing, and their outputs are unspecified.
          carry: values of earlier layers of this step.
          forced_selection: [T, K] int32 entries to take instead of the indexer's selection, in the first index_topk
            columns, see `Batch.decisions`. A row of -1 keeps the indexer's selection. None = keep it for all tokens.

        Returns:
          (y [T, hidden] in x's dtype; the carry with this layer's selection; the updated cache). On a mesh, y is this
          device's term of a sum, see `ops.all_reduce`.
        """
        config = self.config
        spec = config.layers[self.layer]
        inv_freq = jnp.asarray(config.inv_freq(self.layer))

        projected_x = self.input_projections(x)
        projected_latent = self.latent_projections(projected_x["q_a_proj"], self.q_a_norm)
        q = projected_latent["q_b_proj"].reshape(x.shape[0], -1, config.head_dim)
        with jax.named_scope("norm_rope"):
            q, handle = handle.norm_rope_append(
                q,
                projected_x["kv_proj"],
                self.kv_norm.weight.get_value(),
                inv_freq,
                eps=config.rms_norm_eps,
                norms_queries=config.norms_queries,
            )
        if self.compressor is not None:
            with jax.named_scope("compressor"):
                handle = self.compressor.store(projected_x, handle)
        if self.indexer is not None:
            # The carry lacks the candidates if this layer makes them itself, or if all blocks of the longest request
            # would be candidates (see `LayerCacheHandle.candidate_blocks`).
            candidates = None if spec.candidates is None else carry.candidates.get(spec.candidates)
            selection, own_candidates = self.indexer(
                projected_latent["indexer_q_b_proj"], projected_x["indexer_weights_proj"], handle, candidates
            )
            if forced_selection is not None:
                # A token that sees entries selects at least one. So if a forced row has no entry, it was not recorded,
                # or its token sees no entry. The indexer's selection is right in both cases.
                forced = forced_selection[:, : selection.shape[1]]
                selection = jnp.where(forced[:, :1] >= 0, forced, selection)
            made = {} if own_candidates is None else {self.layer: own_candidates}
            carry = dataclasses.replace(
                carry, selection=carry.selection | {self.layer: selection}, candidates=carry.candidates | made
            )
        indices = None if spec.selection is None else carry.selection[spec.selection]
        # Keys are also the values, and are rotated by their own positions. `attend` rotates the output back by the
        # query's position, so that the output depends on relative positions only.
        with jax.named_scope("attention"):
            out, handle = handle.attend(q, self.sinks.get_value(), indices, inv_freq)
        return self.o_b_proj(self.o_a_proj(out.reshape(x.shape[0], -1))), carry, handle.cache

    def window_rows(self, x: Float[Array, "T D"], positions: Int[Array, "T"]) -> Float[Array, "T d"]:
        """Computes the window rows [T, head_dim] that `__call__` stores, from inputs [T, hidden] at positions [T]."""
        kv = self.kv_norm(self.input_projections(x)["kv_proj"])
        return apply_rope(kv, jnp.maximum(positions, 0), jnp.asarray(self.config.inv_freq(self.layer)))
