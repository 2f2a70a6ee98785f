"""DSpark, the draft layers of V4-Flash-0731 and V4-Pro-0813: a block of tokens in one pass."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.block import DecoderLayer
from dsv4_jax.nn.hyper_connection import HyperHead
from dsv4_jax.nn.layers import Embedding, Linear, RMSNorm


class MarkovHead(nnx.Module):
    """Corrects the logits of a draft by the token before it: a matrix [vocab, vocab] of low rank.

    Attributes:
      markov_w1: Embedding, vocab to `markov_rank`, of the token before.
      markov_w2: Linear, `markov_rank` to vocab.
    """

    def __init__(self, config: DSV4Config, rank: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.markov_w1 = Embedding(config.vocab_size, rank, param_dtype=param_dtype, rngs=rngs)
        self.markov_w2 = Linear(rank, config.vocab_size, param_dtype=param_dtype, axes=("vocab",), rngs=rngs)


class ConfidenceHead(nnx.Module):
    """Estimates how likely a draft is to be accepted, as a logit.

    Attributes:
      proj: Linear, hidden + `markov_rank` to 1.
    """

    def __init__(self, config: DSV4Config, rank: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.proj = Linear(config.hidden_size + rank, 1, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, hidden: Float[Array, "T D"], embedded: Float[Array, "T r"]) -> Float[Array, "T"]:
        """Maps hidden states [T, hidden] and embeddings [T, rank] of the tokens before the drafts to [T] float32."""
        x = jnp.concatenate([hidden, embedded], axis=1).astype(jnp.float32)
        return jnp.sum(x * self.proj.weight[...].astype(jnp.float32), axis=1)


class DSparkLayer(DecoderLayer):
    """A decoder layer with a window only, whose rows of earlier tokens come from the model's own layers.

    Embedding and head are the model's. The first layer also has what all layers' rows are made with, the last what
    logits are made with.

    Attributes:
      main_proj, main_norm: Linear, the streams of the target layers to hidden, and its RMSNorm; first layer.
      norm: RMSNorm before the head; last layer.
      hc_head: HyperHead; last layer.
      markov_head: MarkovHead; last layer.
      confidence_head: ConfidenceHead; last layer.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, layer, param_dtype=param_dtype, rngs=rngs)
        assert config.dspark is not None
        hidden, eps, dspark = config.hidden_size, config.rms_norm_eps, config.dspark
        options: dict[str, Any] = dict(param_dtype=param_dtype, rngs=rngs)
        if layer == config.num_hidden_layers:
            self.main_proj = Linear(len(dspark.target_layer_ids) * hidden, hidden, **options)
            self.main_norm = RMSNorm(hidden, eps=eps, rngs=rngs)
        if layer == len(config.layers) - 1:
            self.norm = RMSNorm(hidden, eps=eps, rngs=rngs)
            self.hc_head = HyperHead(config, rngs=rngs)
            self.markov_head = MarkovHead(config, dspark.markov_rank, **options)
            self.confidence_head = ConfidenceHead(config, dspark.markov_rank, **options)

    def project(self, taps: Float[Array, "T n D"]) -> Float[Array, "T D"]:
        """Maps the streams [T, n, hidden] of the target layers to the input [T, hidden] of all layers' rows."""
        return self.main_norm(self.main_proj(taps.reshape(taps.shape[0], -1)))
