"""The layers that draft modules have in common."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from dsv4_jax.cache import Batch, StepCache
from dsv4_jax.cache.expert_counts import count_experts, counts_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.attention import StepCarry
from dsv4_jax.nn.block import DecoderLayer
from dsv4_jax.nn.hyper_connection import ResidualStreams


# Maps logits [n, vocab] float32, and the positions [n] of the tokens to draw, to tokens [n] int32.
Draw = Callable[[Float[Array, "n V"], Int[Array, "n"]], Int[Array, "n"]]


class DraftLayers(nnx.Module):
    """The draft layers of a model: equal decoder layers that have a window only.

    Attributes:
      config: DSV4Config of the model.
      layers: list of DecoderLayer.
    """

    def __init__(
        self, config: DSV4Config, *, param_dtype: DTypeLike, rngs: nnx.Rngs, layer_type: type[Any] = DecoderLayer
    ):
        self.config = config
        numbers = range(config.num_hidden_layers, len(config.layers))
        self.layers = nnx.List([layer_type(config, number, param_dtype=param_dtype, rngs=rngs) for number in numbers])

    def run_layers(self, streams: Float[Array, "T h D"], cache: StepCache, batch: Batch) -> tuple[ResidualStreams, Any]:
        """Runs the layers; returns the residual streams and the updated cache.

        Args:
          streams: [T, hc_mult, hidden] input of the first layer.
          cache, batch: cache and inputs of the step.
        """
        carry = StepCarry(experts={} if counts_experts(cache) else None)
        residual = ResidualStreams(streams)
        for layer in self.layers:
            residual, carry, cache = layer(residual, cache, batch, carry)
        return residual, count_experts(cache, carry.experts)
