"""One compiled step: tokens in, logits and the updated cache out; the cache is donated."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from dsv4_jax.cache import Batch, KVCache
from dsv4_jax.decode.packed import PackedModel, unpack
from dsv4_jax.decode.sampling import SamplingRows, sample
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.ops.views import run_bounds


@functools.partial(jax.jit, donate_argnames="cache")
def forward(
    model: DeepseekV4ForCausalLM | PackedModel, cache: KVCache, batch: Batch
) -> tuple[Float[Array, "T vocab"], KVCache]:
    """Runs the batch's tokens and returns logits after each of them.

    Args:
      model: the model; `pack` it where many steps run.
      cache: the cache; donated: use the returned one from here on.
      batch: from `KVCacheManager.prepare_forward`.

    Returns:
      (logits [T, vocab] float32, cache). Rows of padding tokens mean nothing.
    """
    module = unpack(model)
    hidden, cache = module(batch, cache)
    return module.logits(hidden), cache


@functools.partial(jax.jit, donate_argnames="cache")
def decode_step(
    model: DeepseekV4ForCausalLM | PackedModel, cache: KVCache, batch: Batch
) -> tuple[Float[Array, "slots vocab"], KVCache]:
    """Runs the batch's tokens and returns, by slot, the logits after each request's last token.

    Serves prefill chunks as well: it computes no logits of other tokens.

    Args:
      model: the model; `pack` it where many steps run.
      cache: the cache; donated: use the returned one from here on.
      batch: from `KVCacheManager.prepare_forward`.

    Returns:
      (logits [slots, vocab] float32, zeros for slots that are not in the batch; cache).
    """
    return last_logits(model, cache, batch)


@functools.partial(jax.jit, donate_argnames="cache")
def sample_step(
    model: DeepseekV4ForCausalLM | PackedModel,
    cache: KVCache,
    batch: Batch,
    rows: Int[Array, "rows"],
    sampling: SamplingRows,
    seeds: UInt32[Array, "slots"],
) -> tuple[Int[Array, "rows"], Float[Array, "rows"], KVCache]:
    """Runs the batch's tokens and draws what follows some of them, in one program for every kind of sampling.

    Args:
      model: the model; `pack` it where many steps run.
      cache: the cache; donated: use the returned one from here on.
      batch: from `KVCacheManager.prepare_forward`.
      rows: [rows] indices of tokens of the batch; -1 = none.
      sampling: [slots] how each slot's tokens are drawn.
      seeds: [slots] one seed a request.

    Returns:
      (tokens [rows] int32, their log-probabilities [rows] float32 under the model, temperature aside, cache). What
      stands where `rows` is -1 means nothing.
    """
    module = unpack(model)
    hidden, cache = module(batch, cache)
    at = jnp.maximum(rows, 0)
    logits, slots = module.logits(hidden[at]), jnp.maximum(batch.slots[at], 0)
    tokens = sample(logits, sampling[slots], seeds[slots], batch.positions[at] + 1)
    drawn = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    return tokens, drawn - jax.nn.logsumexp(logits, axis=1), cache


def last_logits(model, cache, batch):
    """`decode_step` for callers that are traced already."""
    module = unpack(model)
    hidden, cache = module(batch, cache)
    token = last_tokens(batch, cache.lengths.shape[0])
    logits = module.logits(hidden[jnp.maximum(token, 0)])
    return jnp.where((token >= 0)[:, None], logits, 0.0), cache


def last_tokens(batch: Batch, slots: int) -> Int[Array, "slots"]:
    """[slots] index of each slot's last token in the batch, -1 = the slot is not in the batch."""
    tokens = jnp.arange(batch.slots.shape[0], dtype=jnp.int32)
    last = (run_bounds(batch.slots)[1] == tokens + 1) & (batch.slots >= 0)
    return jnp.full((slots,), -1, jnp.int32).at[jnp.where(last, batch.slots, slots)].set(tokens, mode="drop")
