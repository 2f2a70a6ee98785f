"""Manifold-constrained hyper-connections (mHC), whose residual is `hc_mult` parallel streams.

Before a block, attention or MoE, the pre-mapping collapses the streams into one vector. After the block, the
post-mapping adds the block's output to each stream, and mixes the streams by a doubly stochastic matrix. The mixing
weights are functions of the streams (section 2.2 of the DeepSeek-V4 report). All computations are in float32.

The post-mapping of a block and the pre-mapping of the next one are a single op, `ops.hyper_connections`. So between two
blocks, the output of the earlier one is not merged into the streams yet.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from dsv4_jax import ops
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn.layers import AnyRngs, RMSNorm, normal
from dsv4_jax.ops.hyper_connections import (
    apply_post as apply_post,
    apply_pre,
    merge_output,
    mixing_weights,
    sinkhorn as sinkhorn,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidualStreams:
    """The residual streams between two blocks, with the earlier block's output that is not merged into them yet.

    Attributes:
      streams: [S, hc_mult, hidden] streams that entered the earlier block. S is the number of tokens T, or with
        `is_sharded` this device's share of them.
      y: [T, hidden] output of the earlier block; on a mesh, this device's term of a sum. None: nothing is to be merged.
      mixing: [S, (2 + hc_mult) * hc_mult] float32 mixing weights to merge y with, see `ops.hyper_connections`; or None.
        In V4.1 the weights `pre` in `mixing` collapse the merged streams, so `mixing` is needed even without y.
      is_sharded: whether the tokens are divided among the devices on the mesh axis "model" (static).
    """

    streams: Float[Array, "S h D"]
    y: Float[Array, "T D"] | None = None
    mixing: Float[Array, "S M"] | None = None
    is_sharded: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    @jax.named_scope("embedding")
    def begin(cls, streams: Float[Array, "T h D"]) -> "ResidualStreams":
        """Returns the residual before the first layer: the streams, and an output of zeros that does not change them.

        With this output the residual is the same pytree as between layers, as the carry of a loop requires. The weights
        `pre` choose the first stream. On a mesh, the tokens are divided among the devices if `ops.scatters_rows` is
        True for the shape of the output.
        """
        tokens, h, hidden = streams.shape
        y = jnp.zeros((tokens, hidden), streams.dtype)
        if is_sharded := ops.scatters_rows(y.shape):
            streams = ops.local_rows(streams)
        eye = jnp.eye(h, dtype=jnp.float32)
        mixing = jnp.concatenate([eye[0], jnp.zeros(h, jnp.float32), eye.reshape(-1)])
        return cls(streams, y, jnp.broadcast_to(mixing, (len(streams), mixing.size)), is_sharded)

    def local(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "S ..."]:
        """Returns the rows of x [T, ...] that belong to the tokens of `streams`."""
        return ops.local_rows(x) if self.is_sharded else x

    def gather(self, x: Float[Array, "S ..."]) -> Float[Array, "T ..."]:
        """Returns x [T, ...] of all tokens, given x [S, ...] of the tokens of `streams`."""
        return ops.all_gather(x, axis=0) if self.is_sharded else x

    def post(self, y: Float[Array, "T D"]) -> "ResidualStreams":
        """Returns the residual with the block's output y [T, hidden], which the next `pre` or `merged` merges."""
        return dataclasses.replace(self, y=y)

    @jax.named_scope("hyper_connections")
    def merged(self) -> Float[Array, "S h D"]:
        """Returns the streams [S, hc_mult, hidden] with the earlier block's output merged."""
        return merge_output(self.streams, self.y, self.mixing)

    def add(self, update: Callable[[Float[Array, "S h D"]], Float[Array, "S h D"]]) -> "ResidualStreams":
        """Merges the earlier block's output into the streams, and replaces the streams by `update(streams)`.

        The result keeps the mixing weights, because in V4.1 the weights `pre` in them collapse the streams.
        """
        return dataclasses.replace(self, streams=update(self.merged()), y=None)

    @jax.named_scope("hyper_connections")
    def collapsed(self) -> tuple[Float[Array, "S D"], Float[Array, "S h D"]]:
        """Returns (merged streams collapsed to [S, hidden] by the weights `pre` in `mixing`, the merged streams)."""
        assert self.mixing is not None
        streams = self.merged()
        return apply_pre(streams, self.mixing), streams


class HyperConnection(nnx.Module):
    """The hyper-connection of one block, attention or MoE. In shapes, h is hc_mult.

    Attributes:
      fn: [(2 + h) * h, h * hidden] float32 projection of the streams to the logits of the mixing weights.
      base: [(2 + h) * h] float32 bias of the logits: h for `pre`, h for `post`, and h * h for `comb`.
      scale: [3] float32 factors of the logits of `pre`, `post` and `comb`.
    """

    def __init__(self, config: DSV4Config, *, rngs: AnyRngs):
        self.config = config
        h = config.hc_mult
        self.fn = normal(rngs, ((2 + h) * h, h * config.hidden_size))
        self.base = normal(rngs, ((2 + h) * h,), std=0.5)
        self.scale = normal(rngs, (3,), mean=1.0)

    @jax.named_scope("hyper_connections")
    def pre(self, residual: ResidualStreams, norm: RMSNorm) -> tuple[Float[Array, "T D"], ResidualStreams]:
        """Merges the preceding block's output into the streams, and collapses them to this block's input.

        Args:
          residual: the streams, with the preceding block's output that is not merged yet, if there is one.
          norm: norm of the collapsed streams.

        Returns:
          (x, residual). `x` [T, hidden] is the normed input of this block, in the streams' dtype. `residual` holds the
          merged streams and the new mixing weights. Pass this block's output to `residual.post`.
        """
        streams, x, mixing = _pre(residual, self._weights(), norm)
        return residual.gather(x), dataclasses.replace(residual, streams=streams, y=None, mixing=mixing)

    def _weights(self):
        return _weights(self.config, self.fn, self.base, self.scale)


class HyperHead(nnx.Module):
    """Collapses the h = hc_mult streams after the last layer, by mixing weights `pre`.

    Attributes:
      hc_fn: [h, h * hidden] float32 projection of the streams to the logits of `pre`.
      hc_base: [h] float32 bias of the logits.
      hc_scale: [1] float32 factor of the logits.
    """

    def __init__(self, config: DSV4Config, *, rngs: AnyRngs):
        self.config = config
        h = config.hc_mult
        self.hc_fn = normal(rngs, (h, h * config.hidden_size))
        self.hc_base = normal(rngs, (h,), std=0.5)
        self.hc_scale = normal(rngs, (1,), mean=1.0)

    @jax.named_scope("hyper_connections")
    def pre(self, residual: ResidualStreams, norm: RMSNorm) -> tuple[Float[Array, "S D"], Float[Array, "S h D"]]:
        """Merges the final block's output into the streams, and collapses them.

        Returns (the collapsed streams [S, hidden] after `norm`, which are the input of the model's head; the merged
        streams [S, h, hidden]).
        """
        streams, x, _ = _pre(residual, self._weights(), norm)
        return x, streams

    def __call__(self, streams: Float[Array, "T h D"]) -> Float[Array, "T D"]:
        """Collapses streams [T, h, hidden] to [T, hidden] in the same dtype, without a norm."""
        return apply_pre(streams, mixing_weights(streams, self._weights()))

    def _weights(self):
        return _weights(self.config, self.hc_fn, self.hc_base, self.hc_scale)


def _weights(config, fn, base, scale):
    constants = config.rms_norm_eps, config.hc_eps, config.hc_sinkhorn_iters, config.delays_pre
    return ops.HyperConnectionWeights(fn.get_value(), base.get_value(), scale.get_value(), *constants)


def _pre(residual, weights, norm):
    """Merges the preceding block's output, if there is one, and collapses the streams, see `ops.hyper_connections`."""
    mixing = None if residual.y is None and not weights.delays_pre else residual.mixing
    return ops.hyper_connections(residual.streams, weights, norm.weight.get_value(), residual.y, mixing)
