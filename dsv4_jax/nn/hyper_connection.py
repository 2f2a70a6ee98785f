"""Manifold-constrained hyper-connections (mHC): the residual is `hc_mult` parallel streams.

Before a block the streams collapse into one vector, after it they take the block's output back while a doubly
stochastic matrix mixes them (section 2.2 of the DeepSeek-V4 report). All weights are functions of the streams, and all
maths is float32. What follows a block and what comes before the next are one op, `ops.hyper_connections`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv4_jax import ops
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import AnyRngs, RMSNorm, normal
from dsv4_jax.ops.hyper_connections import apply_post, apply_pre, mixing_weights, sinkhorn as sinkhorn, split_mixing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidualStreams:
    """The residual streams between blocks, and the last block's output that is not merged yet.

    Attributes:
      streams: [T, hc_mult, hidden] as that block read them.
      y: [T, hidden], what it returned, this device's part of it; None where there is none: the streams are up to date.
      mixing: [T, (2 + hc_mult) * hc_mult] float32, how y and the streams mix, see `ops.hyper_connections`.
    """

    streams: Float[Array, "T h D"]
    y: Float[Array, "T D"] | None = None
    mixing: Float[Array, "T M"] | None = None

    @classmethod
    def begin(cls, streams: Float[Array, "T h D"]) -> "ResidualStreams":
        """Returns the residual of a first layer: streams and an output of zeros, which changes none of them.

        So the residuals before and after a layer have one structure, as the carry of a loop must have.
        """
        tokens, h, hidden = streams.shape
        unmixed = jnp.concatenate([jnp.zeros(2 * h), jnp.eye(h).reshape(-1)])
        mixing = jnp.broadcast_to(unmixed, (tokens, *unmixed.shape))
        return cls(streams, jnp.zeros((tokens, hidden), streams.dtype), mixing)

    def post(self, y: Float[Array, "T D"]) -> "ResidualStreams":
        """Returns the residual with the block's output y [T, hidden], to be merged later."""
        return dataclasses.replace(self, y=y)

    @jax.named_scope("hyper_connections")
    def merged(self) -> Float[Array, "T h D"]:
        """Returns the streams [T, hc_mult, hidden] with the last block's output merged."""
        if self.y is None or self.mixing is None:
            return self.streams
        return apply_post(self.streams, ops.all_reduce(self.y), *split_mixing(self.mixing, self.streams.shape[1]))


class HyperConnection(nnx.Module):
    """The hyper-connection of one block: attention or MoE.

    Attributes:
      fn: [(2 + h) * h, h * hidden] float32, projects the streams to the mixing logits; h = hc_mult.
      base: [(2 + h) * h] float32, their bias: h of `pre`, h of `post`, h * h of `comb`.
      scale: [3] float32, one factor each for `pre`, `post` and `comb`.
    """

    def __init__(self, config: DSV4Config, *, rngs: AnyRngs):
        self.config = config
        h = config.hc_mult
        self.fn = normal(rngs, ((2 + h) * h, h * config.hidden_size))
        self.base = normal(rngs, ((2 + h) * h,), std=0.5)
        self.scale = normal(rngs, (3,), mean=1.0)

    @jax.named_scope("hyper_connections")
    def pre(self, residual: ResidualStreams, norm: RMSNorm) -> tuple[Float[Array, "T D"], ResidualStreams]:
        """Merges the last block's output; returns this block's normed input [T, hidden], in the streams' dtype.

        `norm` is that of the collapsed streams. Also returns the residual, whose `post` takes this block's output.
        """
        args = residual.streams, self._weights(), norm.weight.get_value(), residual.y, residual.mixing
        streams, x, mixing = ops.hyper_connections(*args)
        return x, ResidualStreams(streams, None, mixing)

    def _weights(self):
        return _weights(self.config, self.fn, self.base, self.scale)


class HyperHead(nnx.Module):
    """Collapses the streams after the last layer.

    Attributes:
      hc_fn: [h, h * hidden] float32.
      hc_base: [h] float32.
      hc_scale: [1] float32.
    """

    def __init__(self, config: DSV4Config, *, rngs: AnyRngs):
        self.config = config
        h = config.hc_mult
        self.hc_fn = normal(rngs, (h, h * config.hidden_size))
        self.hc_base = normal(rngs, (h,), std=0.5)
        self.hc_scale = normal(rngs, (1,), mean=1.0)

    @jax.named_scope("hyper_connections")
    def pre(self, residual: ResidualStreams, norm: RMSNorm) -> tuple[Float[Array, "T D"], Float[Array, "T h D"]]:
        """Merges the last block's output; returns the normed input [T, hidden] and the streams [T, h, hidden]."""
        args = residual.streams, self._weights(), norm.weight.get_value(), residual.y, residual.mixing
        streams, x, _ = ops.hyper_connections(*args)
        return x, streams

    def __call__(self, streams: Float[Array, "T h D"]) -> Float[Array, "T D"]:
        """Collapses [T, h, hidden] streams to [T, hidden] in their dtype, without a norm."""
        return apply_pre(streams, mixing_weights(streams, self._weights()))

    def _weights(self):
        return _weights(self.config, self.hc_fn, self.hc_base, self.hc_scale)


def _weights(config, fn, base, scale):
    constants = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters
    return ops.HyperConnectionWeights(fn.get_value(), base.get_value(), scale.get_value(), *constants)
