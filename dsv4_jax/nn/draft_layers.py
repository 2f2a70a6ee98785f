"""The base class of modules that draft tokens for speculative decoding."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, StepCache
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.attention import StepCarry
from dsv4_jax.nn.block import DecoderLayer
from dsv4_jax.nn.hyper_connection import ResidualStreams
from dsv4_jax.nn.layer_stack import LayerStack


# A `Draw` draws tokens [n] int32, given logits [n, vocab] float32 and the positions [n] of the tokens to draw.
Draw = Callable[[Float[Array, "n V"], Int[Array, "n"]], Int[Array, "n"]]


class DraftLayers(nnx.Module):
    """The draft layers of a model: decoder layers of one kind, with a sliding window but no compressed entries.

    Attributes:
      config: DSV4Config of the model.
      layers: LayerStack of DecoderLayers.
    """

    def __init__(self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.config = config
        self.layers = LayerStack(
            config,
            range(config.num_hidden_layers, len(config.layers)),
            DecoderLayer,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def run_layers(self, streams: Float[Array, "T h D"], cache: StepCache, batch: Batch) -> tuple[ResidualStreams, Any]:
        """Runs the draft layers; returns their residual streams and the updated cache.

        Args:
          streams: [T, hc_mult, hidden] residual streams that enter the first draft layer.
          cache, batch: cache and inputs of the step.
        """
        batch = dataclasses.replace(batch, decisions=None)  # a batch's decisions are for the model's layers only
        residual, _, cache, _ = self.layers(ResidualStreams.begin(streams), cache, batch, StepCarry())
        return residual, cache
