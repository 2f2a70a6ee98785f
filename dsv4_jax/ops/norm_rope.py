"""RMS norm and RoPE of queries and key-value rows, alone or fused with `append_swa` of the rows."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.common.arguments import check_dtype
from dsv4_jax.ops.append_swa import append_swa
from dsv4_jax.ops.dispatch import with_kernel
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.ops.views import SWAView
from dsv4_jax.quant import LayerSlice, Rows, layer_stacks, layer_value, round_to
from pallas_kernels.norm_rope import norm_rope as norm_rope_kernel, norm_rope_append as norm_rope_append_kernel


def _norm_rope_kernel(q, kv, weight, positions, inv_freq, **options):
    weight, layer = layer_stacks(weight)
    return norm_rope_kernel(q, kv, weight, positions, inv_freq, layer=layer, **options)


@with_kernel(_norm_rope_kernel)
def norm_rope(
    q: Float[Array, "T H D"],
    kv: Float[Array, "T D"],
    weight: Float[Array, "D"] | LayerSlice,
    positions: Int[Array, "T"],
    inv_freq: Float[Array, "P"],
    *,
    eps: float,
    norms_queries: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "T D"]]:
    """Applies RMS norm and RoPE to queries and to key-value rows (docs/dsv4.md 2).

    Each head of a query is normalized by itself, without a weight. Values are rounded after the norm and again after
    the rotation. Implementations add in different orders, so that results differ by a unit in the last place. Gradients
    always come from "xla".

    Args:
      q: [T, H, D] queries.
      kv: [T, D] key-value rows.
      weight: [D] float32 weight of the rows' norm; an array or a `LayerSlice`.
      positions: [T] int32 absolute positions in tokens, not negative.
      inv_freq: [P] float32, radians per token; the last 2 * P channels are rotated.
      eps: constant added to the mean square.
      norms_queries: whether queries are normed before they are rotated.
      implementation: None for the best one available, "xla", "mosaic_gpu" or "interpret". The last two take bfloat16
        and D = 512.

    Returns:
      (queries [T, H, D], rows [T, D]) in the dtypes of q and kv.
    """
    normed = round_to(rms_normalize(q.astype(jnp.float32), eps), q.dtype) if norms_queries else q
    rows = rms_norm(kv, layer_value(weight), eps)
    return apply_rope(normed, positions, inv_freq), apply_rope(rows, positions, inv_freq)


def _norm_rope_append_kernel(view, q, kv, weight, slots, positions, inv_freq, **options):
    weight, layer = layer_stacks(weight)
    q, *pools = norm_rope_append_kernel(
        q, kv, weight, slots, positions, inv_freq, view.for_kernels(), layer=layer, **options
    )
    return q, dataclasses.replace(view, rows=Rows(*pools))


@with_kernel(_norm_rope_append_kernel)
def norm_rope_append(
    view: SWAView,
    q: Float[Array, "T H D"],
    kv: Float[Array, "T D"],
    weight: Float[Array, "D"] | LayerSlice,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    inv_freq: Float[Array, "P"],
    *,
    eps: float,
    norms_queries: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], SWAView]:
    """Applies `norm_rope` to queries and key-value rows, and stores the rows with `append_swa`, in one launch.

    An implementation stores the same bytes as its `norm_rope` followed by its `append_swa`.

    Args:
      view, slots, positions: as in `append_swa`. Negative positions, of padding, rotate like position 0.
      q, kv, weight, inv_freq, eps, norms_queries: as in `norm_rope`.
      implementation: None for the best one available, "xla", "mosaic_gpu" or "interpret". The last two take arguments
        that the kernels of both ops take.

    Returns:
      (queries [T, H, D] in their dtype, view with the updated rows).

    Raises:
      TypeError: `kv` is neither bfloat16 nor float32.
    """
    check_dtype("kv", kv, "bfloat16", "float32")
    q, kv = norm_rope(
        q,
        kv,
        weight,
        jnp.maximum(positions, 0),
        inv_freq,
        eps=eps,
        norms_queries=norms_queries,
        implementation=implementation,
    )
    return q, append_swa(view, kv, slots, positions, implementation=implementation)


def rms_norm(x: Float[Array, "... n"], weight: Float[Array, "n"] | None, eps: float) -> Float[Array, "... n"]:
    """Returns the RMS norm of x, computed in float32, in the dtype of x; x itself without a weight.

    Args:
      x: [..., n] values, normed over the last axis.
      weight: [n] float32 factors of the normed values, or None.
      eps: constant added to the mean square.
    """
    if weight is None:
        return x
    weight = weight.reshape(*(1,) * (x.ndim - 1), -1)
    return round_to(weight * rms_normalize(x.astype(jnp.float32), eps), x.dtype)


def rms_normalize(x: Float[Array, "... n"], eps: float) -> Float[Array, "... n"]:
    """Returns `x / sqrt(mean(x**2) + eps)`, with the mean over the last axis, computed in the dtype of x."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
