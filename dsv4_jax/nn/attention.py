"""Attention with one shared key-value head over the window and the compressed entries."""

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
    """Passes through the layers of one step beside the residual streams; the cache never holds it.

    Attributes:
      selections: {layer: [T, index_topk] int32 entries selected for each token, -1 padded}.
      taps: [n, T, hidden], means of the streams that leave the n layers that drafts are made from; zeros for a layer
        that has not run. None without such layers.
      recorded: {name: array} values of the layer that ran last, of those that were asked for.
    """

    selections: dict[int, Int[Array, "T k"]] = dataclasses.field(default_factory=dict)
    taps: Float[Array, "n T D"] | None = None
    recorded: dict[str, Shaped[Array, "..."]] = dataclasses.field(default_factory=dict)

    def with_tap(self, row: Int[Array, ""] | int, streams: Float[Array, "T h D"]) -> "StepCarry":
        """Returns the carry with the mean of streams [T, h, hidden] in a row of the taps, if there is the row."""
        mean = round_to(jnp.mean(streams.astype(jnp.float32), axis=1), streams.dtype)
        taps = None if self.taps is None else self.taps.at[row].set(mean, mode="drop")
        return dataclasses.replace(self, taps=taps)

    def with_selection(self, layer: int, indices: Int[Array, "T k"]) -> "StepCarry":
        """Returns the carry with a layer's selection added."""
        return dataclasses.replace(self, selections=self.selections | {layer: indices})


class Attention(nnx.Module):
    """The attention of a layer of any kind (dsv4.md 2); `config.layers[layer]` says which of its parts it has.

    Attributes:
      input_projections: FusedLinear of the layer's input: "q_a_proj" to the query latent, "kv_proj" to the one head
        that is key and value, "indexer_weights_proj" to the weights of the indexer's heads, and for compressors in
        float32 "compressor_kv_proj", "compressor_gate_proj", "indexer_kv_proj" and "indexer_gate_proj".
      latent_projections: FusedLinear of the normed latent: "q_b_proj" to heads * head_dim; "indexer_q_b_proj".
      q_a_norm, kv_norm: RMSNorm of the query latent and of the key.
      o_a_proj, o_b_proj: output projection: one low-rank map per group of heads, then all groups to hidden.
      sinks: [heads] float32, a logit per head that takes attention away from every entry.
      compressor: Compressor of a layer that stores entries, else None.
      indexer: CSAIndexer of a layer that selects entries itself, else None.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: AnyRngs):
        self.config = config
        self.layer = layer
        spec = config.layers[layer]
        if spec.owner and spec.keys and not spec.key_compressor:
            raise ValueError(
                f"layer {layer} stores index keys without a compressor of its own (key_compressor=False): the cache "
                "takes such keys from a model of your own, but Attention does not make them"
            )
        options: dict[str, Any] = {"param_dtype": param_dtype, "rngs": rngs}
        width = config.num_attention_heads * config.head_dim
        self.q_a_norm = RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps, rngs=rngs)
        self.kv_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, rngs=rngs)
        rank = config.o_groups * config.o_lora_rank
        self.o_a_proj = Linear(width, rank, num_groups=config.o_groups, axes=("groups",), **options)
        self.o_b_proj = Linear(rank, config.hidden_size, axes=(None, "groups"), **options)
        self.sinks = normal(rngs, (config.num_attention_heads,), std=0.5, axes=("heads",))
        keys = (
            Compressor(config, layer, config.index_head_dim, rngs=rngs) if spec.owner and spec.key_compressor else None
        )
        self.compressor = Compressor(config, layer, config.head_dim, indexer=keys, rngs=rngs) if spec.owner else None
        self.indexer = CSAIndexer(config, layer) if spec.selects else None

        inputs = {"q_a_proj": Projection(config.q_lora_rank), "kv_proj": Projection(config.head_dim)}
        latents = {"q_b_proj": Projection(width, axes=("heads",))}
        for name, compressor in {"compressor": self.compressor, "indexer": keys}.items():
            if compressor is not None:
                pooled = Projection(compressor.width, out_dtype=jnp.float32, is_fp8=False)
                inputs |= {f"{name}_kv_proj": pooled, f"{name}_gate_proj": pooled}
        if spec.selects:
            inputs["indexer_weights_proj"] = Projection(config.index_n_heads, is_fp8=False)
            latents["indexer_q_b_proj"] = Projection(config.index_n_heads * config.index_head_dim)
        self.input_projections = FusedLinear(config.hidden_size, inputs, **options)
        self.latent_projections = FusedLinear(config.q_lora_rank, latents, **options)

    def __call__(
        self, x: Float[Array, "T D"], handle: CacheHandle, carry: StepCarry
    ) -> tuple[Float[Array, "T D"], StepCarry, Any]:
        """Stores the tokens in the layer's cache and attends.

        Args:
          x: [T, hidden] normed input in the model's dtype.
          handle: the layer's cache for this batch; padding tokens write nothing and yield values nobody reads.
          carry: selections of earlier layers of this step.

        Returns:
          (y [T, hidden] in x's dtype, on a mesh this device's partial sum, see `ops.all_reduce`; the carry with this
          layer's selection; the updated cache).
        """
        config = self.config
        spec = self.config.layers[self.layer]
        inv_freq = jnp.asarray(config.inv_freq(self.layer))

        projected_x = self.input_projections(x)
        projected_latent = self.latent_projections(projected_x["q_a_proj"], self.q_a_norm)
        q = projected_latent["q_b_proj"].reshape(x.shape[0], -1, config.head_dim)
        rows = q, projected_x["kv_proj"], self.kv_norm.weight.get_value()
        with jax.named_scope("norm_rope"):
            q, handle = handle.norm_rope_append(*rows, inv_freq, eps=config.rms_norm_eps)

        def operands(name, compressor):
            return projected_x[f"{name}_kv_proj"], projected_x[f"{name}_gate_proj"], compressor.weights()

        if self.compressor is not None:
            keys = self.compressor.indexer
            index = None if keys is None else operands("indexer", keys)
            with jax.named_scope("compressor"):
                handle = handle.flush(*operands("compressor", self.compressor), index=index)
        if self.indexer is not None:
            queries = projected_latent["indexer_q_b_proj"], projected_x["indexer_weights_proj"]
            carry = carry.with_selection(self.layer, self.indexer(*queries, handle))
        indices = None if spec.selection is None else carry.selections[spec.selection]
        # Values carry their own RoPE. The inverse rotation at the query's position leaves the relative one.
        with jax.named_scope("attention"):
            out, handle = handle.attend(q, self.sinks.get_value(), indices, inv_freq)
        y = self.o_b_proj(self.o_a_proj(out.reshape(x.shape[0], -1)))
        return y, carry, handle.cache

    def window_rows(self, x: Float[Array, "T D"], positions: Int[Array, "T"]) -> Float[Array, "T d"]:
        """Maps inputs [T, hidden] at [T] positions to the rows [T, head_dim] that `__call__` stores in the window."""
        kv = self.kv_norm(self.input_projections(x)["kv_proj"])
        return apply_rope(kv, jnp.maximum(positions, 0), jnp.asarray(self.config.inv_freq(self.layer)))
