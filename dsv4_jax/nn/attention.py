"""Attention with one shared key-value head over the window and the compressed entries."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.cache import CacheHandle
from dsv4_jax.config import DSV4Config
from dsv4_jax.layer_spec import LayerSpec
from dsv4_jax.nn.carry import StepCarry
from dsv4_jax.nn.compressor import Compressor
from dsv4_jax.nn.indexer import CSAIndexer, IndexerQuery
from dsv4_jax.nn.layers import GroupedLinear, Linear, RMSNorm, normal
from dsv4_jax.nn.projections import Projections
from dsv4_jax.ops import apply_rope


class Attention(nnx.Module):
    """The attention of a layer of any kind (dsv4.md 2); `config.layers[layer]` says which of its parts it has.

    Attributes:
      q_a_proj, q_a_norm, q_b_proj: hidden to the query latent, its norm, latent to heads * head_dim.
      kv_proj, kv_norm: hidden to the one head that is both key and value.
      o_a_proj, o_b_proj: output projection: one low-rank map per group of heads, then all groups to hidden.
      sinks: [heads] float32, a logit per head that takes attention away from every entry.
      compressor: Compressor of a layer that stores entries, else None. It holds the layer's indexer.
      indexer: IndexerQuery of a layer that selects among entries that another layer stores, else None.
      input_projections, latent_projections: Projections of the layer's input, and of the normed query latent. Fused
        maps are None above.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.layer = layer
        spec = config.layers[layer]
        options: dict[str, Any] = dict(param_dtype=param_dtype, rngs=rngs)
        width = config.num_attention_heads * config.head_dim
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, **options)
        self.q_a_norm = RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps, rngs=rngs)
        self.q_b_proj = Linear(config.q_lora_rank, width, axes=("heads",), **options)
        self.kv_proj = Linear(config.hidden_size, config.head_dim, **options)
        self.kv_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps, rngs=rngs)
        self.o_a_proj = GroupedLinear(config.o_groups, width // config.o_groups, config.o_lora_rank, **options)
        self.o_b_proj = Linear(
            config.o_groups * config.o_lora_rank, config.hidden_size, axes=(None, "groups"), **options
        )
        self.sinks = normal(rngs, (config.num_attention_heads,), std=0.5, axes=("heads",))
        indexer = None
        if spec.owner and spec.key_compressor:
            indexer = (CSAIndexer if spec.selects else Compressor)(config, layer, config.index_head_dim, **options)
        self.compressor = Compressor(config, layer, config.head_dim, indexer=indexer, **options) if spec.owner else None
        self.indexer = IndexerQuery(config, layer, **options) if spec.selects and not spec.owner else None

        inputs, latents = ["q_a_proj", "kv_proj"], ["q_b_proj"]
        if spec.owner:
            inputs += ["compressor.kv_proj", "compressor.gate_proj"]
        if indexer is not None:
            inputs += ["compressor.indexer.kv_proj", "compressor.indexer.gate_proj"]
        if spec.selects:
            inputs.append(f"{_query_path(spec)}.scorer.weights_proj")
            latents.append(f"{_query_path(spec)}.q_b_proj")
        self.input_projections, self.latent_projections = Projections(*inputs), Projections(*latents)

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
        config, spec = self.config, self.config.layers[self.layer]
        inv_freq = jnp.asarray(config.inv_freq(self.layer))

        projected_x = self.input_projections(self, x)
        projected_latent = self.latent_projections(self, projected_x["q_a_proj"], self.q_a_norm)
        q = projected_latent["q_b_proj"].reshape(x.shape[0], -1, config.head_dim)
        rows = q, projected_x["kv_proj"], self.kv_norm.weight[...]
        with jax.named_scope("norm_rope"):
            q, handle = handle.norm_rope_append(*rows, inv_freq, eps=config.rms_norm_eps)

        def operands(path):
            return (
                projected_x[f"{path}.kv_proj"],
                projected_x[f"{path}.gate_proj"],
                operator.attrgetter(path)(self).weights(),
            )

        if spec.owner:
            keys = operands("compressor.indexer") if spec.key_compressor else None
            with jax.named_scope("compressor"):
                handle = handle.flush(*operands("compressor"), index=keys)
        if spec.selects:
            path = _query_path(spec)
            query = operator.attrgetter(path)(self)
            indices = query.select(
                projected_latent[f"{path}.q_b_proj"], projected_x[f"{path}.scorer.weights_proj"], handle
            )
            carry = carry.with_selection(self.layer, indices)
        indices = None if spec.selection is None else carry.selections[spec.selection]
        # Values carry their own RoPE. The inverse rotation at the query's position leaves the relative one.
        with jax.named_scope("attention"):
            out, handle = handle.attend(q, self.sinks[...], indices, inv_freq)
        heads_a_group = config.num_attention_heads // config.o_groups
        y = self.o_b_proj(self.o_a_proj(out.reshape(x.shape[0], -1, heads_a_group * config.head_dim)))
        return y, carry, handle.cache

    def write_window(self, x: Float[Array, "T D"], handle: CacheHandle) -> Any:
        """Updates the cache as `__call__` does in a layer without entries; returns the cache."""
        kv = self.kv_norm(self.input_projections(self, x)["kv_proj"])
        positions = jnp.maximum(handle.batch.positions, 0)
        return handle.write_swa(apply_rope(kv, positions, jnp.asarray(self.config.inv_freq(self.layer)))).cache


def _query_path(spec: LayerSpec) -> str:
    """Returns the path of the indexer's query half in the attention: beside the key half, if there is one."""
    return "compressor.indexer" if spec.owner else "indexer"
