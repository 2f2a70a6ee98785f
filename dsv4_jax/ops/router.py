"""Which experts each token goes to."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import PreferXla, dispatch
from dsv4_jax.ops.linear import linear
from pallas_kernels.router import MAX_TOKENS, router as router_kernel


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
      experts: [T, k] int32.
      weights: [T, k] float32.
      grouped: for `ops.experts`: pairs of a token and an expert by expert, or None where it groups them itself.
    """

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]
    grouped: tuple[Int[Array, "_"], Int[Array, "_"]] | None = None


def router(
    x: Float[Array, "T D"],
    weight: Float[Array, "E D"],
    bias: Float[Array, "E"] | None = None,
    table: Int[Array, "V k"] | None = None,
    token_ids: Int[Array, "T"] | None = None,
    *,
    chosen: int,
    factor: float,
    implementation: str | None = None,
) -> Routing:
    """Selects experts for each token, and weights them with the scores `sqrt(softplus(x @ weight.T))`.

    The gradient is that of "xla", whatever computes the values.

    Args:
      x: [T, D].
      weight: [E, D] float32.
      bias: [E] float32; the `chosen` best of score + bias are selected, of equals the first. It decides the selection
        only, never a weight. None: the table decides.
      table: [V, k] int32, the experts of each token id, `chosen` each.
      token_ids: [T] int32, clipped to 0 .. V - 1; with the table.
      chosen: experts of a token.
      factor: what a token's weights add up to.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret". The kernel takes up to 256 tokens in
        bfloat16, D in multiples of 512 and E in multiples of 128.

    Returns:
      `Routing`: the experts and their weights. Implementations add products up in different
      orders: where two experts' scores are closer than float32 rounding, they may select another one.

    Raises:
      ValueError: neither or both of bias and table are given, or a table without token ids.
    """
    if (bias is None) == (table is None) or (table is None) != (token_ids is None):
        given = [name for name, value in dict(bias=bias, table=table, token_ids=token_ids).items() if value is not None]
        raise ValueError(f"either bias, or table and token_ids must be given, got {', '.join(given) or 'none of them'}")
    args, options = (x, weight, bias, table, token_ids), dict(chosen=chosen, factor=factor)
    return dispatch("router", implementation, *args, xla=_router_xla, kernel=_router_kernel, **options)


def _router_xla(x, weight, bias, table, token_ids, *, chosen, factor):
    scores = jnp.sqrt(jax.nn.softplus(linear(x.astype(jnp.float32), weight)[0]))
    if bias is None:
        experts = jnp.take(table, token_ids, axis=0, mode="clip")
    else:
        experts = jax.lax.top_k(scores + bias[None, :], chosen)[1]
    weights = jnp.take_along_axis(scores, experts, axis=1)
    return Routing(experts, weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20) * factor)


def _router_kernel(x, *arrays, interpret, **options):
    if not interpret and x.shape[0] > MAX_TOKENS:
        raise PreferXla(f"the kernel is for up to {MAX_TOKENS} tokens, got {x.shape[0]}")
    return Routing(*router_kernel(x, *arrays, interpret=interpret, **options))
