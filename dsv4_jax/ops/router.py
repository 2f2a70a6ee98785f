"""The router of a mixture-of-experts layer: it selects experts for each token and weights them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.ops.dispatch import PreferXla, with_kernel
from dsv4_jax.ops.linear import linear
from dsv4_jax.quant import LayerSlice, layer_stacks, layer_value, round_to
from pallas_kernels.mgpu.bfloat16_words import PARTS
from pallas_kernels.router import MAX_TOKENS, router as router_kernel


class Routing(NamedTuple):
    """The experts that each token is routed to.

    Attributes:
      experts: [T, k] int32 experts of each token; -1 for padding tokens.
      weights: [T, k] float32 weights of these experts.
      permutation: arrays from the router's kernel that sort the (token, expert) pairs by expert, for `ops.experts`.
        None: `ops.experts` sorts the pairs itself.
    """

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    permutation: tuple[Int[Array, "_"], Int[Array, "_"]] | None = None


@jax.custom_jvp
def _score(logits):
    return jnp.sqrt(jax.nn.softplus(logits))


@_score.defjvp
def _(primals, tangents):
    """Computes the tangent: the derivative of the score is `sigmoid(logit) / (2 * score)`.

    For logits below -20, the score is `exp(logit / 2)` to float32 precision, and its derivative half the score. The
    quotient is not used there, because it becomes 0 / 0 where the score underflows, and its derivatives overflow.
    """
    (logits,) = primals
    (tangent,) = tangents
    score = _score(logits)
    small = logits < -20
    slope = jnp.where(small, score / 2, jax.nn.sigmoid(logits) / (2 * jnp.where(small, 1.0, score)))
    return score, slope * tangent


def _router_kernel(x, weight, bias, table, token_ids, slots, images, *, interpret, **options):
    _check(bias, table, token_ids, options["top_k"])
    if x.shape[0] > MAX_TOKENS and x.dtype == jnp.bfloat16:
        bias, table = layer_value((bias, table))
        return _select(_products(x, layer_value(weight)), bias, table, token_ids, slots, images, **options)
    if x.shape[0] > MAX_TOKENS or images is not None:
        raise PreferXla(f"the kernel is for up to {MAX_TOKENS} tokens without images, got {x.shape[0]} of {x.dtype}")
    weights, layer = layer_stacks((weight, bias, table))
    return Routing(*router_kernel(x, *weights, token_ids, slots, layer=layer, interpret=interpret, **options))


def _products(x, weight):
    """Returns `x @ weight.T` [T, E] float32 for x [T, D] bfloat16 and weight [E, D] float32.

    Each float32 weight is split into a sum of three bfloat16 terms. So the tensor cores compute exact products, and add
    them in float32. XLA would multiply float32 without the tensor cores, which takes 5 times as long (H200, 8,192
    tokens).
    """
    terms = []
    for _ in range(PARTS):
        terms.append(round_to(weight, jnp.bfloat16))
        weight = weight - terms[-1].astype(jnp.float32)
    products = jnp.einsum("td,ed->te", x, jnp.concatenate(terms), preferred_element_type=jnp.float32)
    return products.reshape(len(x), PARTS, -1).sum(axis=1)


def _check(bias, table, token_ids, top_k):
    if (bias is None) == (table is None) or (table is None) != (token_ids is None):
        arguments = {"bias": bias, "table": table, "token_ids": token_ids}
        names = ", ".join(name for name, value in arguments.items() if value is not None)
        raise ValueError(f"either bias, or table and token_ids must be given, got {names or 'none of them'}")
    if table is not None and table.shape[-1] != top_k:
        raise ValueError(f"{top_k=} must be {table.shape[-1]}, the number of experts that the table has for a token id")


@with_kernel(_router_kernel)
def router(
    x: Float[Array, "T D"],
    weight: Float[Array, "E D"] | LayerSlice,
    bias: Float[Array, "E"] | LayerSlice | None = None,
    table: Int[Array, "V k"] | LayerSlice | None = None,
    token_ids: Int[Array, "T"] | None = None,
    slots: Int[Array, "T"] | None = None,
    images: tuple[Float[Array, "E"] | LayerSlice, Bool[Array, "T"]] | None = None,
    *,
    top_k: int,
    scaling_factor: float,
    implementation: str | None = None,
) -> Routing:
    """Selects experts for each token and weights them by their scores, `sqrt(softplus(x @ weight.T))`.

    Either a bias or a table selects the experts. The weights of a token's experts are their scores, scaled so that the
    weights sum to `scaling_factor`.

    Implementations add up products in different orders, so they may select different experts if two scores are equal up
    to float32 rounding. Gradients always come from "xla".

    Args:
      x: [T, D] activations.
      weight: [E, D] float32 projection to the logits. Each of `weight`, `bias` and `table` may be a `LayerSlice`; then
        all are slices of the same layer.
      bias: [E] float32. The experts with the `top_k` largest values of `score + bias` are selected; among equal values,
        the lowest ids. The bias does not enter the weights.
      table: [V, k] int32 experts of each token id, in hash layers; the alternative to `bias`.
      token_ids: [T] int32 token ids, clipped to [0, V); required with a table, otherwise None.
      slots: [T] int32; -1 = a padding token, which gets experts -1 with weight 0, so that `ops.experts` reads no expert
        for it. None = no token is padding.
      images: (bias [E] float32, [T] bool whether a token is a part of an image). This bias selects the experts of image
        tokens, in place of `bias` or `table`. The kernel takes no images. None = no token is a part of an image.
      top_k: number of experts per token.
      scaling_factor: sum of a token's weights.
      implementation: None, "xla", "mosaic_gpu" or "interpret". The last two take x in bfloat16. For up to 256 tokens
        they run a kernel, which needs D a multiple of 512 and E a multiple of 128 up to 1024. For more tokens they
        differ from "xla" only in how they compute `x @ weight.T`.

    Returns:
      Routing with the experts and weights of each token.

    Raises:
      ValueError: neither or both of bias and table are given, or only one of table and token ids; or the table has
        another number of experts than `top_k`.
    """
    _check(bias, table, token_ids, top_k)
    logits = linear(x.astype(jnp.float32), weight)[0]
    return _select(logits, bias, table, token_ids, slots, images, top_k=top_k, scaling_factor=scaling_factor)


def _select(logits, bias, table, token_ids, slots, images, *, top_k, scaling_factor):
    """Selects and weights the experts of each token, see `router`, for logits [T, E] float32."""
    scores = _score(logits)
    if bias is not None:
        experts = jax.lax.top_k(scores + bias[None, :], top_k)[1]
    else:
        assert token_ids is not None
        experts = jnp.take(layer_value(table), token_ids, axis=0, mode="clip")
    if images is not None:
        image_bias, is_image = images
        of_images = jax.lax.top_k(scores + layer_value(image_bias)[None, :], top_k)[1]
        experts = jnp.where(is_image[:, None], of_images, experts)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20) * scaling_factor
    if slots is None:
        return Routing(experts, weights)
    is_token = slots[:, None] >= 0
    return Routing(jnp.where(is_token, experts, -1), jnp.where(is_token, weights, 0.0))
