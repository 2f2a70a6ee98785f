"""RMS norm and RoPE of queries and key-value rows."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.quant import round_to
from pallas_kernels.norm_rope import norm_rope as norm_rope_kernel


def norm_rope(
    q: Float[Array, "T H D"],
    kv: Float[Array, "T D"],
    weight: Float[Array, "D"],
    positions: Int[Array, "T"],
    inv_freq: Float[Array, "P"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "T D"]]:
    """Normalizes and rotates the queries, head by head and without a weight, and the key-value rows (dsv4.md 2).

    Results are rounded to their dtypes after the norm and after the rotation. The gradient is always that of "xla".

    Args:
      q: [T, H, D] queries.
      kv: [T, D] key-value rows.
      weight: [D] float32 weight of the rows' norm.
      positions: [T] absolute positions in tokens, not negative.
      inv_freq: [P] radians per token; the last 2 * P channels are rotated.
      eps: added to the mean square.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret" (bfloat16, D = 512).

    Returns:
      (q, kv) in their dtypes. Implementations add in different orders and differ by a unit in the last place.
    """
    args = q, kv, weight, positions, inv_freq
    return dispatch("norm_rope", implementation, *args, xla=_norm_rope_xla, kernel=norm_rope_kernel, eps=eps)


def rms_normalize(x: Float[Array, "... n"], eps: float) -> Float[Array, "... n"]:
    """`x / sqrt(mean(x**2) + eps)` over the last axis; float32 in and out."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _norm_rope_xla(q, kv, weight, positions, inv_freq, *, eps):
    normed = round_to(rms_normalize(q.astype(jnp.float32), eps), q.dtype)
    row = round_to(weight[None, :] * rms_normalize(kv.astype(jnp.float32), eps), kv.dtype)
    return apply_rope(normed, positions, inv_freq), apply_rope(row, positions, inv_freq)
