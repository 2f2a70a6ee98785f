"""Hyper-connections (mHC), the residual connections of DeepSeek-V4, whose residual is h parallel streams.

The post-mapping adds a block's output to the streams and mixes them. The pre-mapping collapses the streams to the next
block's input. A block is attention or MoE.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.common.arguments import check
from dsv4_jax.ops.all_reduce import all_reduce, mailboxes, reduce_scatter
from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.linear import linear
from dsv4_jax.ops.norm_rope import rms_norm, rms_normalize
from dsv4_jax.quant import LayerSlice, layer_stacks, round_to
from pallas_kernels.hyper_connections import fuses_all_reduce, hyper_connections as hyper_connections_kernel
from pallas_kernels.hyper_connections.mixing import sinkhorn as sinkhorn
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@pytree_dataclass
class HyperConnectionWeights:
    """The parameters of a hyper-connection. Arrays are float32, or each is a `LayerSlice` of a float32 array.

    The mixing weights of a token are `pre` [h], `post` [h] and `comb` [h, h]. They are functions of the token's h
    streams of D channels. The model's head has `pre` only.

    Attributes:
      fn: [m, h * D] projection of the streams to the m logits of the mixing weights; m = (2 + h) * h, or h in the head.
      base: [m] bias of the logits.
      scale: [3] factors of the logits of `pre`, `post` and `comb`; [1] in the head.
      norm_eps: constant added to mean squares, in the norm of the streams and in the norm of the collapsed streams.
      hc_eps: constant added to `pre`, to the softmax of `comb`, and to the sums by which Sinkhorn iterations divide.
      iterations: number of Sinkhorn iterations that make `comb` doubly stochastic, at least 1.
      delays_pre: whether the streams are collapsed by the weights `pre` of the preceding block, as in V4.1. The weights
        `pre` that are computed here then collapse the streams for the following block.
    """

    fn: Any
    base: Any
    scale: Any
    norm_eps: float = static_field()
    hc_eps: float = static_field()
    iterations: int = static_field()
    delays_pre: bool = static_field(default=False)


def hyper_connections(
    streams: Float[Array, "T h D"],
    weights: HyperConnectionWeights,
    norm_weight: Float[Array, "D"] | LayerSlice,
    y: Float[Array, "_ D"] | None = None,
    mixing: Float[Array, "T _"] | None = None,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T h D"], Float[Array, "T D"], Float[Array, "T m"] | None]:
    """Applies the post-mapping of one block, then the pre-mapping and the norm of the next block.

    The steps are `apply_post`, `mixing_weights`, `apply_pre` and an RMS norm. Section 2.2 of the DeepSeek-V4 report has
    the formulas. The new streams and the collapsed streams are rounded to the streams' dtype before they are used.
    Gradients always come from "xla".

    Args:
      streams: [T, h, D] residual streams before the block.
      weights: parameters of the next block's hyper-connection, or of the head.
      norm_weight: [D] float32 weight of the norm; an array or a `LayerSlice`.
      y: [T, D] output of the block. On a mesh, y is this device's term of a sum over the axis "model". If `streams` and
        `mixing` have only this device's share of the rows (see `local_rows`), y has all rows. None: no block precedes,
        and the streams do not change.
      mixing: [T, (2 + h) * h] float32 mixing weights that the preceding call of this op returned; required with y, and
        if `weights.delays_pre` is True. Without y only the weights `pre` in it are used.
      implementation: None, "xla", "mosaic_gpu" or "interpret". The last two take streams in bfloat16, with h = 4 and D
        a multiple of 1024 up to 7168.

    Returns:
      streams: [T, h, D] streams after the block.
      x: [T, D] normed input of the next block, in the streams' dtype.
      mixing: [T, (2 + h) * h] float32 mixing weights `pre`, `post` and `comb` of the next block; None for the head.

    Raises:
      ValueError: mixing is None, but y is given or `weights.delays_pre` is True; mixing is given, but y is None and
        `weights.delays_pre` is False; or the number of rows of y does not fit that of streams.
    """
    if mixing is None:
        check(y is None, "y needs mixing: a block's output needs the mixing weights from before the block")
        check(
            not weights.delays_pre,
            "weights with delays_pre=True need mixing, whose weights `pre` collapse the streams",
        )
    elif y is None:
        check(weights.delays_pre, "mixing needs y: the mixing weights from before a block are for the block's output")
    return dispatch(
        "hyper_connections",
        implementation,
        streams,
        weights,
        norm_weight,
        y,
        mixing,
        mailboxes(),
        xla=_hyper_connections_xla,
        kernel=_hyper_connections_kernel,
    )


def mixing_weights(streams: Float[Array, "T h D"], weights: HyperConnectionWeights) -> Float[Array, "T m"]:
    """Computes the mixing weights of each token from its streams.

    Returns [T, m] float32. A token's row holds `pre` [h], then `post` [h], then the flattened `comb` [h, h]; only `pre`
    if `weights.fn` has h rows.
    """
    tokens, h, _ = streams.shape
    flat = streams.astype(jnp.float32).reshape(tokens, -1)
    logits = linear(rms_normalize(flat, weights.norm_eps), weights.fn)[0]
    bounds = [h, 2 * h] if weights.fn.shape[0] > h else []
    parts = zip(jnp.split(logits, bounds, axis=1), weights.scale, jnp.split(weights.base, bounds), strict=True)
    pre, *post_and_comb = (logits * factor + bias[None, :] for logits, factor, bias in parts)
    mixing = [jax.nn.sigmoid(pre) + weights.hc_eps]
    if post_and_comb:
        post, comb = post_and_comb
        comb = jax.nn.softmax(comb.reshape(-1, h, h), axis=-1) + weights.hc_eps
        comb = sinkhorn(comb, weights.iterations, weights.hc_eps)
        mixing += [2.0 * jax.nn.sigmoid(post), comb.reshape(tokens, -1)]
    return jnp.concatenate(mixing, axis=1)


def apply_pre(streams: Float[Array, "T h D"], mixing: Float[Array, "T m"]) -> Float[Array, "T D"]:
    """Returns the collapsed streams `sum_j pre[j] * streams[j]` [T, D], summed in float32, in the streams' dtype."""
    pre = mixing[:, : streams.shape[1], None]
    return round_to(jnp.sum(pre * streams.astype(jnp.float32), axis=1), streams.dtype)


def apply_post(
    streams: Float[Array, "T h D"], y: Float[Array, "T D"], post: Float[Array, "T h"], comb: Float[Array, "T h h"]
) -> Float[Array, "T h D"]:
    """Returns the streams after a block, `new[k] = post[k] * y + sum_j comb[j, k] * streams[j]`.

    The sum runs over the first axis of `comb`, which is not symmetric in general. It is taken in float32 and rounded
    once to the streams' dtype.

    Args:
      streams: [T, h, D] streams before the block.
      y: [T, D] output of the block.
      post: [T, h] float32 mixing weights of the output.
      comb: [T, h, h] float32 mixing weights of the streams.
    """
    mixed = jnp.einsum("tjk,tjd->tkd", comb, streams.astype(jnp.float32), precision="highest")
    return round_to(post[:, :, None] * y.astype(jnp.float32)[:, None, :] + mixed, streams.dtype)


def split_mixing(mixing: Float[Array, "T _"], h: int) -> tuple[Float[Array, "T h"], Float[Array, "T h h"]]:
    """Returns (`post` [T, h], `comb` [T, h, h]) from mixing weights [T, (2 + h) * h]."""
    _, post, comb = jnp.split(mixing, [h, 2 * h], axis=1)
    return post, comb.reshape(-1, h, h)


def sum_rows(y: Float[Array, "_ D"], rows: int) -> Float[Array, "T D"]:
    """Returns the sum of y over devices: all rows if y has `rows` rows, otherwise this device's share of the rows."""
    total = all_reduce(y) if len(y) == rows else reduce_scatter(y)
    check(len(total) == rows, f"y has {len(y)} rows; it must have one for each of the tokens of streams, {rows} here")
    return total


def merge_output(
    streams: Float[Array, "T h D"], y: Float[Array, "_ D"] | None, mixing: Float[Array, "T _"] | None
) -> Float[Array, "T h D"]:
    """Returns the streams after a block with the output y, which is a term of a sum over devices; unchanged without y.

    The arguments are those of `hyper_connections`.
    """
    if y is None or mixing is None:
        return streams
    return apply_post(streams, sum_rows(y, len(streams)), *split_mixing(mixing, streams.shape[1]))


def _hyper_connections_xla(streams, weights, norm_weight, y, mixing, _):
    streams = merge_output(streams, y, mixing)
    new_mixing = mixing_weights(streams, weights)
    collapsed = apply_pre(streams, mixing if weights.delays_pre else new_mixing)
    x = rms_norm(collapsed, norm_weight, weights.norm_eps)
    return streams, x, new_mixing if weights.fn.shape[0] > streams.shape[1] else None


def _hyper_connections_kernel(streams, weights, norm_weight, y, mixing, table, *, interpret):
    """Computes `hyper_connections` with a kernel, which also sums y over devices if there are few tokens."""
    if y is not None and (table is None or len(y) != len(streams) or not fuses_all_reduce(len(y))):
        y = sum_rows(y, len(streams))
        table = None
    stacks, layer = layer_stacks((weights.fn, weights.base, weights.scale, norm_weight))
    return hyper_connections_kernel(
        streams,
        *stacks,
        y,
        mixing,
        table,
        layer=layer,
        norm_eps=weights.norm_eps,
        hc_eps=weights.hc_eps,
        iterations=weights.iterations,
        delays_pre=weights.delays_pre,
        interpret=interpret,
    )
