"""Engram: embeddings of the n-grams that end with a token, which gates add to the residual streams."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax import ops
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import AnyRngs, Linear, normal, parameter
from dsv4_jax.quant import LayerSlice, QuantizedWeight, round_to


_MIN_DOT = 1e-6  # lower bound of the absolute value under the gate's root


class TokenMap(nnx.Variable):
    """The variable for the compressed id of each token id, [vocab] int32, which comes from a tokenizer."""


def random_token_map(config: DSV4Config, rngs: AnyRngs) -> nnx.Variable:
    """Makes a map for a model without tokenizer: token ids modulo the number of compressed ids."""
    assert config.engram is not None
    count = config.engram.compressed_vocab_size
    shape = (config.vocab_size,)
    return parameter(TokenMap, rngs, shape, jnp.int32, lambda _, shape: jnp.arange(*shape, dtype=jnp.int32) % count)


class Engram(nnx.Module):
    """The Engram of one layer: a table of embeddings, and their gates. In shapes, h is hc_mult.

    A token looks up `EngramConfig.rows` embeddings by hashes of the n-grams that end with it. Their concatenation is
    projected to a key for each stream and to a value. The value is added to each stream, times a gate between 0 and 1
    that depends on the normed product of stream and key.

    The table may lie in host memory that is mapped to the GPU's addresses, see `ExpertMemory`. Then the GPU reads the
    rows of a token, 12.7 KB in V4.1-Flash, over the bus.

    Attributes:
      embedding: [num_embeddings, head_dim] in `param_dtype`, the table; or a QuantizedWeight with a scale for some
        channels of a row, of which only the rows that are looked up are dequantized.
      kv_proj: Linear from rows * head_dim to (h + 1) * hidden: the keys of the streams, then the value.
      q_weight, k_weight: [h, hidden] float32 weights of the streams' and the keys' norms.
    """

    def __init__(self, config: DSV4Config, layer: int, *, param_dtype: DTypeLike, rngs: AnyRngs):
        engram = config.engram
        assert engram is not None
        self.config = config
        number = engram.layer_ids.index(layer)
        self.multipliers = nnx.static(ops.hash_multipliers(engram, layer))
        self.primes = nnx.static(engram.primes[number])
        h = config.hc_mult
        table_shape = engram.num_embeddings[number], engram.head_dim
        self.embedding = normal(rngs, table_shape, param_dtype, axes=(None, "channels"))
        channels = (h + 1) * config.hidden_size
        self.kv_proj = Linear(engram.rows * engram.head_dim, channels, param_dtype=param_dtype, rngs=rngs)
        self.q_weight = normal(rngs, (h, config.hidden_size), mean=1.0)
        self.k_weight = normal(rngs, (h, config.hidden_size), mean=1.0)

    @jax.named_scope("engram")
    def __call__(
        self, streams: Float[Array, "T h D"], ngrams: Int[Array, "T n"], is_image: Bool[Array, "T"] | None = None
    ) -> Float[Array, "T h D"]:
        """Adds the gated values of the tokens' n-grams to their streams.

        Args:
          streams: [T, h, hidden] residual streams in the model's dtype.
          ngrams: [T, max_ngram_size] int32 compressed ids, see `cache.ngrams.advance_ngrams`.
          is_image: [T] bool, whether a token is a part of an image, to whose streams nothing is added; None = none is.

        Returns:
          [T, h, hidden] in the streams' dtype.
        """
        gate, value = self.gate_and_value(streams, ngrams)
        if is_image is not None:
            gate = jnp.where(is_image[:, None], 0.0, gate)
        added = gate[:, :, None] * value.astype(jnp.float32)[:, None, :]
        return round_to(streams.astype(jnp.float32) + added, streams.dtype)

    def gate_and_value(
        self, streams: Float[Array, "T h D"], ngrams: Int[Array, "T n"]
    ) -> tuple[Float[Array, "T h"], Float[Array, "T D"]]:
        """Computes (gates [T, h] float32, values [T, hidden] in the streams' dtype); the arguments are as in a call."""
        tokens, h, hidden = streams.shape
        row_ids = ops.ngram_rows(ngrams, self.multipliers, self.primes)
        rows = ops.all_gather(look_up(self.embedding.get_value(), row_ids))  # a device has some channels of each row
        projected = self.kv_proj(round_to(rows.reshape(tokens, -1), streams.dtype))
        key = projected[:, : h * hidden].astype(jnp.float32).reshape(streams.shape)
        x = streams.astype(jnp.float32)
        # Streams and keys are normed for each stream. The weights of both norms count only as a product.
        weight = self.q_weight[...] * self.k_weight[...]
        scale = _inverse_rms(x, self.config.rms_norm_eps) * _inverse_rms(key, self.config.rms_norm_eps)
        dot = jnp.sum(x * weight[None] * key, axis=-1) * scale * hidden**-0.5
        gate = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), _MIN_DOT)), dot))
        return gate, projected[:, h * hidden :]


def look_up(table: Any, rows: Int[Array, "T n"]) -> Float[Array, "T n d"]:
    """Reads rows [T, n] of a table [R, d], and dequantizes them if they are quantized.

    Args:
      table: array, or QuantizedWeight of the kind "FP8_ROWS", or a LayerSlice of one of them.
      rows: [T, n] int32, in [0, R).
    """
    index = (rows,)
    if isinstance(table, LayerSlice):
        # To gather from `value`, XLA would copy the layer's whole table out of the stack of layers. So rows of a
        # quantized table are read from the stack. Rows of an array are read from `value`, because only `value` has
        # gradients.
        is_quantized = isinstance(table.value, QuantizedWeight)
        index = (table.layer, rows) if is_quantized else index
        table = table.stack if is_quantized else table.value
    gathered = jax.tree.map(lambda x: x.at[index].get(mode="clip"), table)
    return gathered[...] if isinstance(gathered, QuantizedWeight) else gathered


def _inverse_rms(x, eps):
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
