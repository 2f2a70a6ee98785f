"""The DeepSeek-V4 language model on flat ragged tokens; the cache goes in and comes out, no module holds it."""

import functools
import itertools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from dsv4_jax.cache import Batch, KVCache, StepCache
from dsv4_jax.cache.expert_counts import count_experts, counts_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.attention import StepCarry
from dsv4_jax.nn.block import RECORDED, DecoderLayer
from dsv4_jax.nn.dspark import DSparkLayer
from dsv4_jax.nn.hyper_connection import HyperHead, ResidualStreams
from dsv4_jax.nn.layer_stack import LayerStack, Recorded
from dsv4_jax.nn.layers import AnyRngs, Embedding, Linear, RMSNorm
from dsv4_jax.nn.mtp import MTPBlock
from dsv4_jax.ops import all_gather, linear
from dsv4_jax.quant import round_to


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
        make_layer = functools.partial(_make_layer, config, param_dtype)
        self.layers = LayerStack(config, range(config.num_hidden_layers), make_layer, rngs)
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
        targets = () if self.config.dspark is None else self.config.dspark.target_layer_ids
        cache = cache.begin_step(batch)
        x = self.embed(batch)
        taps = jnp.zeros((len(targets), *x.shape), x.dtype) if targets else None
        residual = ResidualStreams.begin(jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1])))
        counted = {"experts"} if counts_experts(cache) else set()
        residual, carry, cache, recorded = self.layers(
            residual, cache, batch, StepCarry(taps=taps), tap_layers=targets, record=counted | {*record}
        )
        if counted:
            layers = tuple(itertools.chain.from_iterable(layers for layers, _ in recorded))
            cache = count_experts(cache, jnp.concatenate([values["experts"] for _, values in recorded]), layers)
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


def _make_layer(config: DSV4Config, param_dtype: DTypeLike, layer: int, rngs: AnyRngs) -> DecoderLayer:
    return DecoderLayer(config, layer, param_dtype=param_dtype, rngs=rngs)


class DeepseekV4ForCausalLM(nnx.Module):
    """DeepSeek-V4; attribute names follow Hugging Face transformers.

    Pass it to `jax.jit` as an argument, like any pytree; `nnx.eval_shape` gives its shapes without memory. The weights
    are random until a checkpoint is loaded.

    Attributes:
      config: DSV4Config.
      model: DeepseekV4Model.
      lm_head: Linear, hidden to vocab.
      mtp: list of the layers that make drafts: an MTPBlock, or `config.dspark.num_layers` DSparkLayer; or none.
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
        for name, value in dict(dtype=dtype, param_dtype=param_dtype).items():
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
        draft_layers = range(config.num_hidden_layers, len(config.layers))
        kind = MTPBlock if config.dspark is None else DSparkLayer
        self.mtp: Any = nnx.List([kind(config, i, param_dtype=param_dtype, rngs=rngs) for i in draft_layers])

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
        chosen: dict[str, dict[int, Shaped[Array, "..."]]] = {name: {} for name in names}
        for numbers, values in recorded:
            for name in chosen.keys() & values.keys():
                chosen[name] |= {
                    layer: values[name][i] for i, layer in enumerate(numbers) if layers is None or layer in layers
                }
        return hidden, chosen, cache

    def forward_streams(self, cache: StepCache, batch: Batch) -> tuple[Float[Array, "T D"], Float[Array, "T n D"], Any]:
        """Does `__call__` and also returns what drafts are made from, [T, n, hidden].

        For an MTP block these are the n = hc_mult residual streams before the model's head, for DSpark the means of the
        streams that leave each of its n target layers.
        """
        hidden, streams, _, cache = self.model(cache, batch)
        return hidden, streams, cache

    def mtp_forward(
        self, streams: Float[Array, "T h D"], cache: StepCache, batch: Batch
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h D"], Any]:
        """Runs the multi-token-prediction block, which predicts the token after the next.

        Args:
          streams: [T, hc_mult, hidden], the model's at the tokens of `batch.positions`, or, to predict further ahead
            from a draft, those that this method returned for the position before.
          cache: the cache; the block's window is written where `batch` has tokens.
          batch: T tokens, each the one that *follows* the token at its position.

        Returns:
          hidden [T, hidden], for `logits`; the block's own streams [T, hc_mult, hidden]; the updated cache.
        """
        block = self.mtp[0]
        # Without the barrier XLA would dequantize stored weights before a loop that calls this.
        block, streams = jax.lax.optimization_barrier((block, streams))
        return block.draft(block.join(streams, self.model.embed(batch)), cache, batch)

    def mtp_write(self, streams: Float[Array, "T h D"], cache: StepCache, batch: Batch) -> Any:
        """Updates the cache as `mtp_forward` does, without the rest of its work.

        Args:
          streams, cache, batch: as in `mtp_forward`.
        """
        block = self.mtp[0]
        return block.write_window(block.join(streams, self.model.embed(batch)), cache, batch)

    def dspark_write(self, taps: Float[Array, "T n D"], cache: KVCache, batch: Batch) -> KVCache:
        """Stores the rows that DSpark's layers attend to, one per token and layer; returns the updated cache.

        Args:
          taps: [T, n, hidden] of `forward_streams`.
          cache: the cache.
          batch: the T tokens' positions and slots.
        """
        x = self.mtp[0].project(taps)
        rows = {layer.layer: layer.self_attn.window_rows(x, batch.positions) for layer in self.mtp}
        return cache.write_windows(rows, batch)

    def dspark_forward(self, cache: StepCache, batch: Batch) -> tuple[Float[Array, "T D"], Float[Array, "T V"], Any]:
        """Runs DSpark's layers on blocks of tokens, each of which sees all of its block and a window before it.

        The cache holds the rows of all tokens before the blocks; those of the blocks are overwritten. The T tokens of
        the batch, with `draft_block` set, are each request's newest token, which the model has not run yet, and then
        `config.dspark.noise_token_id`.

        Returns:
          hidden [T, hidden] before the norm, and logits [T, vocab] float32 of the token after each position, both for
            `dspark_correct`; the updated cache.
        """
        layers = jax.lax.optimization_barrier(self.mtp)
        x = self.model.embed(batch)
        residual = ResidualStreams(jnp.broadcast_to(x[:, None, :], (x.shape[0], self.config.hc_mult, x.shape[1])))
        carry = StepCarry(experts={} if counts_experts(cache) else None)
        for layer in layers:
            residual, carry, cache = layer(residual, cache, batch, carry)
        hidden = layers[-1].hc_head(residual.merged())
        return hidden, self.logits(layers[-1].norm(hidden)), count_experts(cache, carry.experts)

    def dspark_correct(
        self, hidden: Float[Array, "T D"], logits: Float[Array, "T V"], previous: Int[Array, "T"]
    ) -> tuple[Float[Array, "T V"], Float[Array, "T"]]:
        """Adds to logits of a block's position what the token before the draft says.

        Args:
          hidden: [T, hidden] of `dspark_forward`.
          logits: [T, vocab] float32 of `dspark_forward`.
          previous: [T] int32, the token before the draft.

        Returns:
          the draft's logits [T, vocab] float32, and the logit [T] float32 of the probability that it is accepted if all
          drafts before it are.
        """
        last = self.mtp[-1]
        embedded = round_to(last.markov_head.markov_w1(previous), hidden.dtype)
        corrected = logits + all_gather(linear(embedded, last.markov_head.markov_w2.weight[...])[0])
        return corrected, last.confidence_head(hidden, embedded)

    @jax.named_scope("lm_head")
    def logits(self, hidden: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Maps [..., hidden] of `__call__`, for all or some tokens, to [..., vocab] float32 logits."""
        return all_gather(self.lm_head(hidden))
