"""Manifold-constrained hyper-connections (mHC): the residual is `hc_mult` parallel streams.

Before a block the streams collapse into one vector, after it they take the block's output back while a doubly
stochastic matrix mixes them (section 2.2 of the DeepSeek-V4 report). All weights are functions of the streams, and all
maths is float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import matmul, normal
from dsv4_jax.ops.norm_rope import rms_normalize
from dsv4_jax.quant import round_to


class HyperConnection(nnx.Module):
    """How one block (attention or MoE) reads the streams and writes them back.

    Attributes:
      fn: [(2 + h) * h, h * hidden] float32, projects the streams to the mixing logits; h = hc_mult.
      base: [(2 + h) * h] float32, their bias: h of `pre`, h of `post`, h * h of `comb`.
      scale: [3] float32, one factor each for `pre`, `post` and `comb`.
    """

    def __init__(self, config: DSV4Config, *, rngs: nnx.Rngs):
        self.config = config
        h = config.hc_mult
        self.fn = normal(rngs, ((2 + h) * h, h * config.hidden_size))
        self.base = normal(rngs, ((2 + h) * h,), std=0.5)
        self.scale = normal(rngs, (3,), mean=1.0)

    def __call__(
        self, streams: Float[Array, "T h D"]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T h"], Float[Array, "T h h"]]:
        """Collapses the streams to the block's input.

        Args:
          streams: [T, h, hidden] residual streams.

        Returns:
          collapsed [T, hidden] in the streams' dtype, and for `expand_streams` post [T, h] and comb [T, h, h], float32.
        """
        config, h = self.config, self.config.hc_mult
        logits = _mixing_logits(streams, self.fn[...], config.rms_norm_eps)
        bounds = [h, 2 * h]
        pre, post, comb = (
            logits * scale + bias[None, :]
            for logits, scale, bias in zip(
                jnp.split(logits, bounds, axis=1), self.scale[...], jnp.split(self.base[...], bounds), strict=True
            )
        )
        collapsed = _collapse(streams, jax.nn.sigmoid(pre) + config.hc_eps)
        comb = jax.nn.softmax(comb.reshape(-1, h, h), axis=-1) + config.hc_eps
        return collapsed, 2.0 * jax.nn.sigmoid(post), sinkhorn(comb, config.hc_sinkhorn_iters, config.hc_eps)


def expand_streams(
    streams: Float[Array, "T h D"], y: Float[Array, "T D"], post: Float[Array, "T h"], comb: Float[Array, "T h h"]
) -> Float[Array, "T h D"]:
    """The streams after a block: `new[k] = post[k] * y + sum_j comb[j, k] * streams[j]`.

    The sum runs over comb's first axis: a doubly stochastic matrix is not symmetric, so the direction matters.

    Args:
      streams: [T, h, hidden] as they were before the block.
      y: [T, hidden] the block's output.
      post: [T, h] float32.
      comb: [T, h, h] float32.

    Returns:
      [T, h, hidden], summed in float32 and rounded once to the streams' dtype.
    """
    mixed = jnp.einsum("tjk,tjd->tkd", comb, streams.astype(jnp.float32), precision="highest")
    return round_to(post[:, :, None] * y.astype(jnp.float32)[:, None, :] + mixed, streams.dtype)


def sinkhorn(comb: Float[Array, "T h h"], iters: int, eps: float) -> Float[Array, "T h h"]:
    """Makes positive matrices nearly doubly stochastic: columns, then `iters - 1` times rows and columns.

    Args:
      comb: [T, h, h] float32, positive.
      iters: at least 1; the last division is by column sums.
      eps: added to each sum.

    Returns:
      [T, h, h] float32, columns sum to 1 up to eps and rounding, rows as far as the iterations converged.
    """

    def columns(comb):
        return comb / (jnp.sum(comb, axis=1, keepdims=True) + eps)

    def rows(comb):
        return comb / (jnp.sum(comb, axis=2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iters - 1, lambda _, comb: columns(rows(comb)), columns(comb))


class HyperHead(nnx.Module):
    """Collapses the streams after the last layer.

    Attributes:
      hc_fn: [h, h * hidden] float32.
      hc_base: [h] float32.
      hc_scale: [1] float32.
    """

    def __init__(self, config: DSV4Config, *, rngs: nnx.Rngs):
        self.config = config
        h = config.hc_mult
        self.hc_fn = normal(rngs, (h, h * config.hidden_size))
        self.hc_base = normal(rngs, (h,), std=0.5)
        self.hc_scale = normal(rngs, (1,), mean=1.0)

    def __call__(self, streams: Float[Array, "T h D"]) -> Float[Array, "T D"]:
        """[T, h, hidden] streams to [T, hidden] in their dtype."""
        logits = _mixing_logits(streams, self.hc_fn[...], self.config.rms_norm_eps)
        pre = logits * self.hc_scale[...][None, :] + self.hc_base[...][None, :]
        return _collapse(streams, jax.nn.sigmoid(pre) + self.config.hc_eps)


def _mixing_logits(streams, fn, eps):
    flat = streams.astype(jnp.float32).reshape(streams.shape[0], -1)
    return matmul(rms_normalize(flat, eps), fn)


def _collapse(streams, pre):
    return round_to(jnp.sum(pre[:, :, None] * streams.astype(jnp.float32), axis=1), streams.dtype)
