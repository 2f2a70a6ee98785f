"""The DeepSeek-V4 language model on flat ragged tokens; the cache goes in and comes out, no module holds it."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from dsv4_jax.cache import Batch, KVCache, StepCache
from dsv4_jax.config import DSparkConfig, DSV4Config, MTPConfig
from dsv4_jax.nn.attention import StepCarry
from dsv4_jax.nn.block import RECORDED, DecoderLayer
from dsv4_jax.nn.dspark import DSparkDrafts
from dsv4_jax.nn.hyper_connection import HyperHead, ResidualStreams
from dsv4_jax.nn.layer_stack import LayerStack, Recorded
from dsv4_jax.nn.layers import Embedding, Linear, RMSNorm
from dsv4_jax.nn.mtp import MTPDrafts
from dsv4_jax.ops import all_gather
from dsv4_jax.quant import round_to


# The modules of each kind of draft layers.
_DRAFTS: dict[type[Any], type[Any]] = {MTPConfig: MTPDrafts, DSparkConfig: DSparkDrafts}


class DeepseekV4Model(nnx.Module):
    """Embedding, decoder layers and final norm.

    Attributes:
      embed_tokens: Embedding.
      layers: LayerStack of DecoderLayers; `layers[i]` is a view of one for reading.
      norm: RMSNorm.
      hc_head: HyperHead.
    """

    def __init__(self, config: DSV4Config, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, param_dtype=param_dtype, rngs=rngs)
        numbers = range(config.num_hidden_layers)
        self.layers = LayerStack(config, numbers, DecoderLayer, param_dtype=param_dtype, rngs=rngs)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, rngs=rngs)
        self.hc_head = HyperHead(config, rngs=rngs)

    def __call__(
        self, cache: StepCache, batch: Batch, *, record: Collection[str] = ()
    ) -> tuple[Float[Array, "T D"], Float[Array, "T n D"], Recorded, Any]:
        """Runs one step.

        Args:
          cache, batch: cache and inputs of the step.
          record: names of the layers' values to return, see `block.RECORDED`.

        Returns:
          hidden states; what drafts are made from (see `forward_streams`); the recorded values; the updated cache.
        """
        if isinstance(cache, KVCache):
            cache.schema.check_config(self.config)
        targets = () if self.config.drafts is None else self.config.drafts.target_layer_ids
        cache = cache.begin_step(batch)
        x = self.embed(batch)
        taps = jnp.zeros((len(targets), *x.shape), x.dtype) if targets else None
        residual = ResidualStreams.begin(jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1])))
        residual, carry, cache, recorded = self.layers(
            residual, cache, batch, StepCarry(taps=taps), tap_layers=targets, record=record
        )
        hidden, streams = self.hc_head.pre(residual, self.norm)
        if targets:
            if targets[-1] == len(self.layers) - 1:
                carry = carry.with_tap(len(targets) - 1, streams)
            assert carry.taps is not None
            streams = carry.taps.swapaxes(0, 1)
        return hidden, streams, recorded, cache

    def embed(self, batch: Batch) -> Float[Array, "T D"]:
        """Returns [T, hidden] embeddings of the batch's tokens in the model's dtype."""
        return round_to(self.embed_tokens(batch.token_ids), self.dtype)


class DeepseekV4ForCausalLM(nnx.Module):
    """DeepSeek-V4; attribute names follow Hugging Face transformers.

    Pass it to `jax.jit` as an argument, like any pytree; `nnx.eval_shape` gives its shapes without memory. The weights
    are random until a checkpoint is loaded.

    Attributes:
      config: DSV4Config.
      model: DeepseekV4Model.
      lm_head: Linear, hidden to vocab.
      drafts: the layers that make drafts, see `decode.drafts.Drafts`: MTPDrafts, DSparkDrafts or None.
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
          config: the model's shape.
          dtype: of activations, bfloat16 or float32.
          rngs: source of the random weights; None = seed 0.
          param_dtype: of embedding and linear weights, bfloat16 or float32; None = `dtype`. Norms, sinks, position
            biases, routers and hyper-connections are float32 in any case.

        Raises:
          ValueError: `dtype` or `param_dtype` is another one.
        """
        param_dtype = dtype if param_dtype is None else param_dtype
        for name, value in {"dtype": dtype, "param_dtype": param_dtype}.items():
            if jnp.dtype(value) not in (jnp.bfloat16, jnp.float32):
                raise ValueError(f"{name} must be bfloat16 or float32, got {jnp.dtype(value)}")
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.config = config
        self.model = DeepseekV4Model(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            out_dtype=jnp.float32,
            param_dtype=param_dtype,
            axes=("vocab",),
            rngs=rngs,
        )
        drafts = config.drafts
        self.drafts: Any = drafts and _DRAFTS[type(drafts)](config, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, cache: StepCache, batch: Batch) -> tuple[Float[Array, "T D"], Any]:
        """Runs one step of any mix of requests on the cache as the last step left it.

        Padding tokens of the ragged batch of T tokens leave the cache alone, and their rows are undefined. Raises
        ValueError if the cache was made for another model, or the batch for another cache.

        Returns:
          hidden [T, hidden] after the final norm in the model's dtype, and the updated cache.
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
        """Does `__call__` and also returns values of chosen layers.

        Args:
          cache, batch: as in `__call__`.
          names: which values, of `nn.RECORDED`; that constant's comment describes them.
          layers: numbers of the layers; None = all. Layers without a value, such as those that select nothing, are
            left out.

        Returns:
          hidden [T, hidden]; {name: {layer: value}}; the updated cache.

        Raises:
          ValueError: there is no such value or layer.
        """
        if unknown := sorted({*names} - {*RECORDED}):
            raise ValueError(f"names={unknown} are not recorded; known: {', '.join(RECORDED)}")
        count = self.config.num_hidden_layers
        if unknown := sorted({*(layers or ())} - {*range(count)}):
            raise ValueError(f"layers={unknown} must be from 0 to {count - 1}")
        hidden, _, recorded, cache = self.model(cache, batch, record=names)
        chosen: dict[str, dict[int, Shaped[Array, ...]]] = {name: {} for name in names}
        for numbers, values in recorded:
            for name in chosen.keys() & values.keys():
                chosen[name] |= {
                    layer: values[name][i] for i, layer in enumerate(numbers) if layers is None or layer in layers
                }
        return hidden, chosen, cache

    def forward_streams(self, cache: StepCache, batch: Batch) -> tuple[Float[Array, "T D"], Float[Array, "T n D"], Any]:
        """Does `__call__` and also returns what drafts are made from, [T, n, hidden].

        These are the means of the streams that leave each of the n target layers in `config.drafts`, or, if it has
        none, the n = hc_mult residual streams before the model's head.
        """
        hidden, streams, _, cache = self.model(cache, batch)
        return hidden, streams, cache

    def embed(self, batch: Batch) -> Float[Array, "T D"]:
        """Returns [T, hidden] embeddings of the batch's tokens in the model's dtype."""
        return self.model.embed(batch)

    @jax.named_scope("lm_head")
    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Maps [..., hidden] of `__call__`, for all or some tokens, to [..., vocab] float32 logits."""
        return all_gather(self.lm_head(hidden))
