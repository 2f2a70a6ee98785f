"""Choosing the next token."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; hashable, a static argument of jitted steps.

    Attributes:
      temperature: 0 = greedy (the lowest id among equal logits).
      top_k: keep this many best logits; 0 = all.
      top_p: keep the smallest set of best tokens whose probability reaches this; 1 = all.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or positive")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (all tokens) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]")


GREEDY = Sampling()


def sample(
    logits: Float[Array, "n vocab"], sampling: Sampling, seeds: UInt32[Array, "n"], positions: Int[Array, "n"]
) -> Int[Array, "n"]:
    """Draws one token a row.

    The random bits of a row depend on its seed and position only, so a request draws the same tokens in any batch,
    streamed or in an on-device loop.

    Args:
      logits: [n, vocab] float32.
      sampling: temperature, top-k, top-p.
      seeds: [n] one seed a request.
      positions: [n] position of the token being drawn.

    Returns:
      [n] int32 token ids.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        worst = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < worst, -jnp.inf, logits)
    if sampling.top_p < 1:
        logits = _nucleus(logits, sampling.top_p)
    draw = jax.vmap(lambda seed, position, row: jax.random.categorical(_key(seed, position), row))
    return draw(seeds, positions, logits).astype(jnp.int32)


def _key(seed, position):
    return jax.random.fold_in(jax.random.key(seed), position)


def _nucleus(logits, top_p):
    """-inf for tokens outside the smallest set of best tokens that holds `top_p` of the probability."""
    best_first = jnp.sort(logits, axis=-1, descending=True)
    probability = jax.nn.softmax(best_first, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # The best token is always kept: nothing stands before it.
    worst = jnp.min(jnp.where(before < top_p, best_first, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits < worst, -jnp.inf, logits)
