"""The loss of the multi-token-prediction block: the distance of its drafts from the frozen model's distributions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dense_cache import DenseCache, whole_sequences
from jaxtyping import Array, Float, Int

from dsv4_jax.nn import DeepseekV4ForCausalLM


# Weights of drafts 1, 2 and 3 in the loss. They are about in proportion to the mean number of accepted tokens that
# depend on each draft, if three of four drafts are right.
_WEIGHTS = (4 / 7, 2 / 7, 1 / 7)


def draft_losses(
    model: DeepseekV4ForCausalLM, cache: DenseCache, ids: Int[Array, "B S1"]
) -> tuple[Float[Array, "B S"], DenseCache, dict[str, Float[Array, ""]]]:
    """Returns the cross-entropy of the block's drafts with the model's distributions, and the accepted drafts.

    Pass j = 1, 2, 3 runs the block at all positions t at once. It takes the token at t + j, and drafts the token at
    t + j + 1. Pass 1 also takes the model's streams, and each later pass the streams of the preceding pass. In
    decoding, the token that a later pass takes is the draft of the preceding pass. Here it is the token of the text,
    because a draft after a wrong one is rejected anyway. At position t, a pass sees the rows of pass 1 up to t, and the
    rows of the later passes at t.

    Args:
      model: from `for_training`.
      cache: cache of the block; the model itself runs without dropout.
      ids: [B, S + 1], see `training.batch`.

    Returns:
      ([B, S] float32 cross-entropy in nats, the weighted mean over the passes; the cache after the block; {"accepted":
      mean number of greedy drafts, of 3, before the first wrong one}).
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
        # Drafts at the last tokens are for bytes past the end of the excerpt, and do not count.
        inside = jnp.arange(shape[1])[None, :] + number < shape[1]
        tokens = jnp.roll(ids[:, 1:], 1 - number, axis=1)
        pass_batch = dataclasses.replace(batch, token_ids=tokens.reshape(-1), positions=batch.positions + number - 1)
        cache = dataclasses.replace(cache, pass_number=number - 1)
        hidden, streams, cache = model.drafts(model, streams, cache, pass_batch)
        logits = model.logits(hidden).reshape(*shape, -1)
        target = jnp.roll(model_logits, -number, axis=1)
        loss = optax.softmax_cross_entropy(logits, jax.nn.softmax(target))
        losses += jnp.where(inside, np.float32(weight) * loss, 0)
        right &= (jnp.argmax(logits, axis=-1) == jnp.argmax(target, axis=-1)) & inside
        accepted += jnp.sum(right, dtype=jnp.float32) / jnp.sum(jnp.broadcast_to(inside, shape), dtype=jnp.float32)
    cache = dataclasses.replace(cache, expert_load=cache.expert_load / len(_WEIGHTS))
    return losses, cache, {"accepted": accepted}
