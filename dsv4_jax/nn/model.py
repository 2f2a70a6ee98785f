"""The DeepSeek-V4 language model. It takes a ragged batch of tokens and the KV cache, and returns the updated cache.

Modules do not hold the cache.
"""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from dsv4_jax.cache import Batch, Decisions, KVCache, StepCache
from dsv4_jax.cache.newest_tokens import advance_ngrams
from dsv4_jax.common.arguments import check_choice
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.attention import StepCarry
from dsv4_jax.nn.block import RECORDED, DecoderLayer
from dsv4_jax.nn.dspark import DSparkDrafts
from dsv4_jax.nn.engram import look_up_ahead, random_token_map
from dsv4_jax.nn.hyper_connection import HyperHead, ResidualStreams
from dsv4_jax.nn.layer_stack import LayerStack, Recorded
from dsv4_jax.nn.layers import Embedding, Linear, RMSNorm
from dsv4_jax.nn.lora import adapter_variables
from dsv4_jax.nn.mtp import MTPDrafts
from dsv4_jax.nn.token_adapters import token_adapters
from dsv4_jax.ops import all_gather
from dsv4_jax.quant import round_to


class DeepseekV4Model(nnx.Module):
    """The model without its language head: embedding, decoder layers and final norm.

    Attributes:
      embed_tokens: Embedding.
      layers: LayerStack of DecoderLayers; `layers[i]` is a copy of layer i for reading.
      token_map: TokenMap for all layers with Engram; None without Engram.
      norm: RMSNorm after the last layer.
      hc_head: HyperHead, which collapses the residual streams after the last layer; None if the last layer's weights
        collapse them (`DSV4Config.delays_pre`).
    """

    def __init__(self, config: DSV4Config, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, param_dtype=param_dtype, rngs=rngs)
        self.layers = LayerStack(
            config, range(config.num_hidden_layers), DecoderLayer, param_dtype=param_dtype, rngs=rngs
        )
        self.token_map = random_token_map(config, rngs) if config.engram else None
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.hc_head = None if config.delays_pre else HyperHead(config, rngs=rngs)

    def __call__(
        self, cache: StepCache, batch: Batch, *, record: Collection[str] = ()
    ) -> tuple[Float[Array, "T D"], Float[Array, "T n D"], Recorded, Any]:
        """Runs one step.

        Args:
          cache, batch: cache and inputs of the step.
          record: names of the layers' values to return, see `block.RECORDED`.

        Returns:
          (hidden states [T, hidden] after the final norm; inputs of the draft layers [T, n, hidden], see
          `DeepseekV4ForCausalLM.forward_streams`; the recorded values; the updated cache).

        Raises:
          TypeError: the model has Engram, and the cache is not a KVCache.
          ValueError: in one of these cases:

            * The cache was made for another model, or the batch for another cache.
            * The decisions of the batch were made for other tokens or another model.
            * The batch has adapters, and the model has none.
        """
        if isinstance(cache, KVCache):
            cache.schema.check_config(self.config)
        if batch.decisions is not None:
            batch.decisions.check(self.config, len(batch.positions))
        if batch.adapters is not None and not adapter_variables(self):
            raise ValueError("the batch has adapters, but the model has none: add them with add_adapters")
        tap_layers = self.config.tap_layers
        cache = cache.begin_step(batch)
        x = self.embed(batch)
        engram_rows = {}
        if self.token_map is not None:
            if not isinstance(cache, KVCache):
                raise TypeError(
                    f"a model with Engram needs a KVCache, which keeps earlier tokens' ids; got {type(cache)}"
                )
            ngrams, cache = advance_ngrams(cache, batch, self.token_map.get_value())
            engrams = {
                layer.layer: layer.engram
                for loop in self.layers.loops
                for layer in loop.layers
                if layer.engram is not None
            }
            x, engram_rows = look_up_ahead(engrams, ngrams, x)
        residual = ResidualStreams.begin(jnp.repeat(x[:, None, :], self.config.hc_mult, axis=1))
        taps = jnp.zeros((len(tap_layers), *residual.streams[:, 0].shape), x.dtype) if tap_layers else None
        carry = StepCarry(engram_rows=engram_rows, taps=taps)
        with token_adapters(batch.token_adapters()):
            residual, carry, cache, recorded = self.layers(
                residual, cache, batch, carry, tap_layers=tap_layers, record=record
            )
        with jax.named_scope("lm_head"):  # no layer's scope includes the collapse of the final streams
            if self.hc_head is None:
                collapsed, streams = residual.collapsed()
                hidden = self.norm(collapsed)
            else:
                hidden, streams = self.hc_head.pre(residual, self.norm)

        if tap_layers:
            # A tap of a layer is stored by the next layer, which merges the layer's output into the streams. So the
            # last layer's tap is stored here.
            if tap_layers[-1] == len(self.layers) - 1:
                carry = carry.with_tap(len(tap_layers) - 1, streams)
            assert carry.taps is not None
            streams = carry.taps.swapaxes(0, 1)  # [n, S, hidden] -> [S, n, hidden]
        return residual.gather(hidden), residual.gather(streams), recorded, cache

    def embed(self, batch: Batch) -> Float[Array, "T D"]:
        """Returns [T, hidden] embeddings of the batch's tokens in the model's dtype."""
        return round_to(self.embed_tokens(batch.token_ids), self.dtype)


class DeepseekV4ForCausalLM(nnx.Module):
    """DeepSeek-V4 with its language head. Names of attributes follow Hugging Face transformers.

    The model is a pytree, to be passed to `jax.jit` as an argument. Its weights are random until a checkpoint is
    loaded. `nnx.eval_shape` makes a model with shapes only, without memory for the weights.

    Attributes:
      config: DSV4Config.
      model: DeepseekV4Model.
      lm_head: Linear, hidden to vocab.
      adapter_names: names of the model's adapters, see `nn.lora.add_adapters` (static).
      drafts: MTPDrafts or DSparkDrafts, the draft layers for speculative decoding (see `decode.drafts.Drafts`), or
        None.
    """

    def __init__(
        self,
        config: DSV4Config,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
        *,
        param_dtype: DTypeLike | None = None,
    ):
        """Makes the model.

        Args:
          config: configuration of the model.
          dtype: dtype of activations, bfloat16 or float32.
          rngs: source of the random weights; None = seed 0.
          param_dtype: dtype of the embedding's and linear maps' weights, bfloat16 or float32; None = `dtype`. Norms,
            sinks, position biases, routers and hyper-connections are always float32.

        Raises:
          ValueError: `dtype` or `param_dtype` is neither bfloat16 nor float32.
        """
        param_dtype = dtype if param_dtype is None else param_dtype
        for name, value in {"dtype": dtype, "param_dtype": param_dtype}.items():
            check_choice(name, jnp.dtype(value).name, "bfloat16", "float32")
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config = config
        self.adapter_names: tuple[str, ...] = ()
        self.model = DeepseekV4Model(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            out_dtype=jnp.float32,
            param_dtype=param_dtype,
            axes=("vocab",),
            rngs=rngs,
        )
        draft_type = DSparkDrafts if config.dspark else MTPDrafts
        self.drafts: Any = config.drafts and draft_type(config, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, cache: StepCache, batch: Batch) -> tuple[Float[Array, "T D"], Any]:
        """Runs one step: a forward pass over a ragged batch with T tokens of any requests.

        Padding tokens do not change the cache, and their rows of the result are unspecified.

        Args:
          cache: the cache that the preceding step returned.
          batch: inputs of the step.

        Returns:
          (hidden states [T, hidden] after the final norm in the model's dtype; the updated cache).

        Raises:
          ValueError: the cache was made for another model, or the batch for another cache.
        """
        hidden, _, _, cache = self.model(cache, batch)
        return hidden, cache

    def record(
        self,
        cache: StepCache,
        batch: Batch,
        names: Collection[str] = RECORDED,
        layers: Collection[int] | None = None,
    ) -> tuple[Float[Array, "T D"], dict[str, dict[int, Shaped[Array, "..."]]], Any]:
        """Runs one step like `__call__`, and also returns intermediate values of layers.

        Args:
          cache, batch: as in `__call__`.
          names: names of the values, from `nn.block.RECORDED`, where a comment describes them.
          layers: indices of the layers whose values are returned; None = all layers.

        Returns:
          (hidden states [T, hidden]; {name: {index of a layer: value}}; the updated cache). A layer that lacks a value
          is left out, for instance a layer that selects no entries.

        Raises:
          ValueError: a name is not in `RECORDED`, or there is no such layer.
        """
        if unknown := sorted({*names} - {*RECORDED}):
            raise ValueError(f"names={unknown} are not recorded; known: {', '.join(RECORDED)}")
        num_layers = self.config.num_hidden_layers
        if unknown := sorted({*(layers or ())} - {*range(num_layers)}):
            raise ValueError(f"layers={unknown} must be from 0 to {num_layers - 1}")
        hidden, _, recorded, cache = self.model(cache, batch, record=names)
        chosen = {
            name: {
                layer: values[name][i]
                for layer_indices, values in recorded
                if name in values
                for i, layer in enumerate(layer_indices)
                if layers is None or layer in layers
            }
            for name in names
        }
        return hidden, chosen, cache

    def forward_streams(self, cache: StepCache, batch: Batch) -> tuple[Float[Array, "T D"], Float[Array, "T n D"], Any]:
        """Runs one step like `__call__`, and also returns the inputs of the draft layers.

        Returns:
          (hidden states [T, hidden]; inputs of the draft layers [T, n, hidden]; the updated cache). If `config.drafts`
          has target layers, the inputs are the means over the residual streams that leave each of the n layers in
          `config.tap_layers`. Otherwise they are the n = hc_mult residual streams before the model's head.
        """
        hidden, streams, _, cache = self.model(cache, batch)
        return hidden, streams, cache

    def forward_decisions(
        self, cache: KVCache, batch: Batch, names: Collection[str] = ("experts", "selection")
    ) -> tuple[Float[Array, "T D"], Float[Array, "T n D"], Decisions, Any]:
        """Runs one step like `forward_streams`, and also returns the decisions of the layers.

        Args:
          cache, batch: as in `__call__`.
          names: names of the fields of `Decisions` to return. The other fields are None.

        Returns:
          (hidden states [T, hidden]; inputs of the draft layers [T, n, hidden]; Decisions [T, ...]; the updated cache).

        Raises:
          ValueError: a name is no field of `Decisions`.
        """
        if unknown := sorted({*names} - {*(known := Decisions.__annotations__)}):
            raise ValueError(f"names={unknown} are unknown; known: {', '.join(known)}")
        hidden, streams, recorded, new_cache = self.model(cache, batch, record=names)
        decisions = Decisions.collect(recorded, names, self.config, cache.schema.max_context)
        return hidden, streams, decisions, new_cache

    def embed(self, batch: Batch) -> Float[Array, "T D"]:
        """Returns [T, hidden] embeddings of the batch's tokens in the model's dtype."""
        return self.model.embed(batch)

    @jax.named_scope("lm_head")
    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Maps hidden states [..., hidden] of any tokens, from `__call__`, to [..., vocab] float32 logits."""
        return all_gather(self.lm_head(hidden))
