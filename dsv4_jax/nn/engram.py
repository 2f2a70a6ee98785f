"""Engram: embeddings of the n-grams that end with a token, added to the residual streams with gates as factors."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.compute_on import compute_on
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax import ops
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import AnyRngs, Linear, normal, parameter
from dsv4_jax.quant import QuantizedWeight, round_to


_MIN_DOT = 1e-6  # the gate takes the square root of max(|dot product|, _MIN_DOT)


class TokenMap(nnx.Variable):
    """The variable for the compressed id of each token id, [vocab] int32, which comes from a tokenizer."""


def random_token_map(config: DSV4Config, rngs: AnyRngs) -> nnx.Variable:
    """Makes a map for a model without tokenizer: token ids modulo the number of compressed ids."""
    assert config.engram is not None
    count = config.engram.compressed_vocab_size
    shape = (config.vocab_size,)
    return parameter(TokenMap, rngs, shape, jnp.int32, lambda _, shape: jnp.arange(*shape, dtype=jnp.int32) % count)


class Engram(nnx.Module):
    """The Engram of one layer: a table of embeddings, and gates that weight them. In shapes, h is hc_mult.

    A token looks up `EngramConfig.rows` embeddings by hashes of the n-grams that end with it. Their concatenation is
    projected to a key for each stream and to a value. The value is added to each stream, times a gate between 0 and 1
    that depends on the normed product of stream and key.

    The table may lie in host memory that is mapped to the GPU's addresses, see `HostTables` and `ExpertMemory`. Then
    the GPU reads the rows of a token, 12.7 KB in V4.1-Flash, over the bus. A model looks up the rows of all its layers
    before the first layer runs, see `look_up_ahead`.

    Attributes:
      embedding: the table, [num_embeddings, head_dim] in `param_dtype`; or a QuantizedWeight with a scale for each 32
        channels of a row. Only the rows that are looked up are dequantized.
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
        self.embedding = normal(
            rngs, (engram.num_embeddings[number], engram.head_dim), param_dtype, axes=(None, "channels")
        )
        self.kv_proj = Linear(
            engram.rows * engram.head_dim, (h + 1) * config.hidden_size, param_dtype=param_dtype, rngs=rngs
        )
        self.q_weight = normal(rngs, (h, config.hidden_size), mean=1.0)
        self.k_weight = normal(rngs, (h, config.hidden_size), mean=1.0)

    def row_ids(self, ngrams: Int[Array, "T n"]) -> Int[Array, "T r"]:
        """Returns the indices [T, rows] int32 of the table's rows for the n-grams of `newest_tokens.advance_ngrams`."""
        return ops.ngram_rows(ngrams, self.multipliers, self.primes)

    @jax.named_scope("engram")
    def __call__(
        self, streams: Float[Array, "T h D"], rows: Float[Array, "T r d"], is_image: Bool[Array, "T"] | None = None
    ) -> Float[Array, "T h D"]:
        """Adds the gated values of the tokens' n-grams to their streams.

        Args:
          streams: [T, h, hidden] residual streams in the model's dtype.
          rows: [T, rows, head_dim] the table's rows at `row_ids`.
          is_image: [T] bool, whether a token is a part of an image. Nothing is added to the streams of such a token.
            None = all tokens are text.

        Returns:
          [T, h, hidden] in the streams' dtype.
        """
        gate, value = self.gate_and_value(streams, rows)
        if is_image is not None:
            gate = jnp.where(is_image[:, None], 0.0, gate)
        added = gate[:, :, None] * value.astype(jnp.float32)[:, None, :]
        return round_to(streams.astype(jnp.float32) + added, streams.dtype)

    def gate_and_value(
        self, streams: Float[Array, "T h D"], rows: Float[Array, "T r d"]
    ) -> tuple[Float[Array, "T h"], Float[Array, "T D"]]:
        """Computes (gates [T, h] float32, values [T, hidden] in the streams' dtype). Arguments are as in `__call__`."""
        tokens, h, hidden = streams.shape
        projected = self.kv_proj(round_to(rows.reshape(tokens, -1), streams.dtype))
        key = projected[:, : h * hidden].astype(jnp.float32).reshape(streams.shape)
        x = streams.astype(jnp.float32)
        # Each stream and its key are normed separately. Only the product of the two norms' weights counts.
        weight = self.q_weight[...] * self.k_weight[...]
        scale = _inverse_rms(x, self.config.rms_norm_eps) * _inverse_rms(key, self.config.rms_norm_eps)
        dot = jnp.sum(x * weight[None] * key, axis=-1) * scale * hidden**-0.5
        gate = jax.nn.sigmoid(jnp.copysign(jnp.sqrt(jnp.maximum(jnp.abs(dot), _MIN_DOT)), dot))
        return gate, projected[:, h * hidden :]


def look_up_ahead(
    modules: Mapping[int, Engram], ngrams: Int[Array, "T n"], x: Float[Array, "T D"]
) -> tuple[Float[Array, "T D"], dict[int, Float[Array, "T r d"]]]:
    """Looks up the rows of all layers with Engram. On a GPU, layers run while the rows are read.

    Args:
      modules: {index of a layer: its Engram}.
      ngrams: [T, max_ngram_size] int32 compressed ids, see `cache.newest_tokens.advance_ngrams`.
      x: [T, hidden] input of the first layer.

    Returns:
      (x unchanged, {index of a layer: rows of its table}). The rows are [T, rows, head_dim]; on a mesh, they have this
      device's channels only.
    """
    looked_up = {}
    # The last layer's look-up starts first. If two look-ups run at the same time, the one that starts later then also
    # ends earlier. XLA records such a step as few CUDA graphs. In the other order, it would divide a graph.
    for layer in sorted(modules, reverse=True):
        with jax.named_scope("engram"):
            row_ids = modules[layer].row_ids(ngrams)
            table = modules[layer].embedding.get_value()
            # XLA starts an operation of another stream once its inputs exist. With the barrier, the inputs exist before
            # layers run. Otherwise XLA would compute row ids where the rows are used, and start the look-up there.
            (x, ngrams), _ = jax.lax.optimization_barrier(((x, ngrams), jax.lax.stop_gradient((row_ids, table))))
            looked_up[layer] = look_up_on_stream(table, row_ids)
    return x, looked_up


def look_up_on_stream(table: Any, rows: Int[Array, "T n"]) -> Float[Array, "T n d"]:
    """Does the same as `look_up`. A GPU reads a quantized table on a stream of its own, beside other operations."""
    if not isinstance(table, QuantizedWeight):  # an array has gradients, which would run on that stream, too
        return look_up(table, rows)

    def without_calls(table, rows):
        """Does the same as `look_up`, with its jitted functions inlined."""
        with jax.disable_jit():  # XLA does not compile jitted functions within a function that has a stream of its own
            return look_up(table, rows)

    on_stream: Any = compute_on(
        without_calls,
        compute_type="gpu_stream:1",
        out_memory_spaces=jax.memory.Space.Device,
        compiler_options={"force_earliest_schedule": True},  # read by XLA's scheduler for several devices
    )
    return jax.lax.platform_dependent(table, rows, cuda=on_stream, default=look_up)


def look_up(table: Any, rows: Int[Array, "T n"]) -> Float[Array, "T n d"]:
    """Reads rows [T, n] of a table [R, d], and dequantizes them if they are quantized.

    Args:
      table: array, or QuantizedWeight of the kind "FP8_ROWS". It may be a stack of a single table, [1, R, d], as in a
        `LayerLoop`. XLA could copy the table out of the stack, so rows are read from the stack.
      rows: [T, n] int32, in [0, R).
    """
    gathered = jax.tree.map(lambda x: x.at[(0,) * (x.ndim - 2) + (rows,)].get(mode="clip"), table)
    return gathered[...] if isinstance(gathered, QuantizedWeight) else gathered


def _inverse_rms(x, eps):
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + eps)
