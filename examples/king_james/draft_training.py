"""The loss of the multi-token-prediction block: the distance of its drafts from the frozen model's distributions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dense_cache import DenseCache, whole_sequences
from jaxtyping import Array, Float, Int

from dsv4_jax.nn import DeepseekV4ForCausalLM


# Weights of drafts 1, 2 and 3: the accepted tokens that depend on each, if three of four drafts are right.
_WEIGHTS = (4 / 7, 2 / 7, 1 / 7)


def draft_losses(
    model: DeepseekV4ForCausalLM, cache: DenseCache, ids: Int[Array, "B S1"]
) -> tuple[Float[Array, "B S"], DenseCache, dict[str, Float[Array, ""]]]:
    """Returns the cross-entropy of the block's drafts with the model's distributions, and the accepted drafts.

    Pass j runs the block at all tokens t at once and drafts the token at t + j + 1. As in decoding, the first pass
    takes the model's streams and the next token, and a later pass the streams of the pass before and the token after
    that. Here it is the true token, because drafts after a wrong one are refused. A pass at t sees the rows of the
    first pass up to t, and those of t's own passes.

    Args:
      model: from `for_training`.
      cache: cache of the block; the model itself runs without dropout.
      ids: [B, S + 1], see `training.batch`.

    Returns:
      ([B, S] weighted mean over the passes; the cache after the block; {"accepted": mean number of greedy drafts that
      are right up to the first wrong one, of 3}).
    """
    batch = whole_sequences(ids[:, :-1])
    shape = ids[:, :-1].shape
    frozen = dataclasses.replace(cache, select=jnp.bool_(True), quantize=jnp.bool_(True), key=None)
    hidden, streams, _ = model.forward_streams(frozen, batch)
    model_logits = jax.lax.stop_gradient(model.logits(hidden)).reshape(*shape, -1)
    windows = jnp.zeros((len(_WEIGHTS), *shape, model.config.head_dim), cache.schema.dtype)
    cache = dataclasses.replace(cache, passes=windows, expert_load=jnp.zeros_like(cache.expert_load))

    losses = jnp.zeros(shape, jnp.float32)
    right = jnp.ones(shape, bool)
    accepted = jnp.float32(0)
    for number, weight in enumerate(_WEIGHTS, 1):
        # The last tokens' drafts are for bytes outside the excerpt, and do not count.
        inside = jnp.arange(shape[1])[None, :] + number < shape[1]
        after = jnp.roll(ids[:, 1:], 1 - number, axis=1)
        step = dataclasses.replace(batch, token_ids=after.reshape(-1), positions=batch.positions + number - 1)
        cache = dataclasses.replace(cache, pass_number=number - 1)
        hidden, streams, cache = model.drafts(model, streams, cache, step)
        logits = model.logits(hidden).reshape(*shape, -1)
        target = jnp.roll(model_logits, -number, axis=1)
        loss = optax.softmax_cross_entropy(logits, jax.nn.softmax(target))
        losses += jnp.where(inside, np.float32(weight) * loss, 0)
        right &= (jnp.argmax(logits, axis=-1) == jnp.argmax(target, axis=-1)) & inside
        accepted += jnp.sum(right, dtype=jnp.float32) / jnp.sum(jnp.broadcast_to(inside, shape), dtype=jnp.float32)
    cache = dataclasses.replace(cache, expert_load=cache.expert_load / len(_WEIGHTS))
    return losses, cache, {"accepted": accepted}
