"""Hyper-connections between two blocks: the streams take a block's output, and collapse to the next block's input."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.ops.all_reduce import all_reduce, mailboxes
from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.linear import linear
from dsv4_jax.ops.norm_rope import rms_normalize
from dsv4_jax.quant import round_to
from pallas_kernels.hyper_connections import adds_up_parts, hyper_connections as hyper_connections_kernel


def hyper_connections(
    streams: Float[Array, "T h D"],
    fn: Float[Array, "m _"],
    base: Float[Array, "m"],
    scale: Float[Array, "_"],
    weight: Float[Array, "D"],
    y: Float[Array, "T D"] | None = None,
    mixing: Float[Array, "T _"] | None = None,
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
    implementation: str | None = None,
) -> tuple[Float[Array, "T h D"], Float[Array, "T D"], Float[Array, "T m"] | None]:
    """What lies between two blocks: `expand_streams` of one, `mixing_weights`, `collapse` and norm of the next.

    The formulas are those of section 2.2 of the DeepSeek-V4 report. The new streams and the collapsed ones are rounded
    before they are used. The gradient is that of "xla", whatever computes the values.

    Args:
      streams: [T, h, D] residual streams as they were before the block.
      fn: [(2 + h) * h, h * D] float32, projects the streams to the logits of `pre`, `post` and `comb`. Or [h, h * D],
        of the model's head, which has only `pre`.
      base: [m] float32, the logits' bias; m = fn's rows.
      scale: [3] float32, one factor each for the logits of `pre`, `post` and `comb`; [1] of the head.
      weight: [D] float32, of the norm.
      y: [T, D] the block's output, or this device's part of it, which `all_reduce` adds up, or the kernel in its stead.
        None: the streams stay as they are.
      mixing: [T, (2 + h) * h] float32, what the call before that block returned; with y.
      norm_eps: added to the mean square of all streams, and of the collapsed ones.
      hc_eps: added to `pre`, to the softmax of `comb` and to the sums that divide it.
      iterations: of Sinkhorn, at least 1.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret" (bfloat16, h = 4, D a multiple of 1024
        up to 7168).

    Returns:
      (the streams after the block [T, h, D]; the next block's input [T, D] in their dtype; its mixing weights
      [T, (2 + h) * h] float32, rows of `pre`, `post` and `comb`, or None of the head).

    Raises:
      ValueError: y comes without mixing, or mixing without y.
    """
    if (y is None) != (mixing is None):
        given, missing = ("y", "mixing") if mixing is None else ("mixing", "y")
        raise ValueError(f"{given} needs {missing}: what a block returned, and the weights with which it was entered")
    options = dict(norm_eps=norm_eps, hc_eps=hc_eps, iterations=iterations)
    args = streams, fn, base, scale, weight, y, mixing, mailboxes()
    functions = dict(xla=_hyper_connections_xla, kernel=_hyper_connections_kernel)
    return dispatch("hyper_connections", implementation, *args, **functions, **options)


def mixing_weights(
    streams: Float[Array, "T h D"],
    fn: Float[Array, "m _"],
    base: Float[Array, "m"],
    scale: Float[Array, "_"],
    *,
    norm_eps: float,
    hc_eps: float,
    iterations: int,
) -> Float[Array, "T m"]:
    """[T, m] float32: rows of `pre` [h], `post` [h] and `comb` [h, h]; of a head, whose fn has h rows, only `pre`."""
    tokens, h, _ = streams.shape
    flat = streams.astype(jnp.float32).reshape(tokens, -1)
    logits = linear(rms_normalize(flat, norm_eps), fn)[0]
    bounds = [h, 2 * h] if fn.shape[0] > h else []
    parts = zip(jnp.split(logits, bounds, axis=1), scale, jnp.split(base, bounds), strict=True)
    pre, *others = (logits * factor + bias[None, :] for logits, factor, bias in parts)
    found = [jax.nn.sigmoid(pre) + hc_eps]
    if others:
        post, comb = others
        comb = jax.nn.softmax(comb.reshape(-1, h, h), axis=-1) + hc_eps
        found += [2.0 * jax.nn.sigmoid(post), sinkhorn(comb, iterations, hc_eps).reshape(tokens, -1)]
    return jnp.concatenate(found, axis=1)


def collapse(streams: Float[Array, "T h D"], mixing: Float[Array, "T m"]) -> Float[Array, "T D"]:
    """`sum_j pre[j] * streams[j]`: [T, D], summed in float32 and rounded once to the streams' dtype."""
    pre = mixing[:, : streams.shape[1], None]
    return round_to(jnp.sum(pre * streams.astype(jnp.float32), axis=1), streams.dtype)


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


def split_mixing(mixing: Float[Array, "T _"], h: int) -> tuple[Float[Array, "T h"], Float[Array, "T h h"]]:
    """(post [T, h], comb [T, h, h]) of mixing weights [T, (2 + h) * h]."""
    _, post, comb = jnp.split(mixing, [h, 2 * h], axis=1)
    return post, comb.reshape(-1, h, h)


def _hyper_connections_xla(streams, fn, base, scale, weight, y, mixing, table, *, norm_eps, hc_eps, iterations):
    if y is not None:
        streams = expand_streams(streams, all_reduce(y), *split_mixing(mixing, streams.shape[1]))
    options = dict(norm_eps=norm_eps, hc_eps=hc_eps, iterations=iterations)
    mixing = mixing_weights(streams, fn, base, scale, **options)
    collapsed = collapse(streams, mixing)
    normed = weight[None, :] * rms_normalize(collapsed.astype(jnp.float32), norm_eps)
    return streams, round_to(normed, streams.dtype), mixing if fn.shape[0] > streams.shape[1] else None


def _hyper_connections_kernel(streams, fn, base, scale, weight, y, mixing, table, *, interpret, **options):
    arrays, options = (streams, fn, base, scale, weight), options | dict(interpret=interpret)
    if table is not None and adds_up_parts(*streams.shape):
        return hyper_connections_kernel(*arrays, y, mixing, table, **options)
    return hyper_connections_kernel(*arrays, None if y is None else all_reduce(y), mixing, **options)
