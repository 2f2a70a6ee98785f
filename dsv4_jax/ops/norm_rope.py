"""RMS norm and RoPE of queries and key-value rows, alone or fused with the quantized append of the rows."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.common.arguments import check_dtype
from dsv4_jax.ops.append_swa import append_swa
from dsv4_jax.ops.dispatch import with_kernel
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.ops.views import SWAView
from dsv4_jax.quant import LayerSlice, Rows, layer_stacks, round_to
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
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "T D"]]:
    """Normalizes and rotates the queries, head by head and without a weight, and the key-value rows (dsv4.md 2).

    Results (q, kv) are rounded to their dtypes after the norm and after the rotation. Implementations add in different
    orders and differ by a unit in the last place. The gradient is always that of "xla".

    Args:
      q: [T, H, D] queries.
      kv: [T, D] key-value rows.
      weight: [D] float32 weight of the rows' norm, which may be that of a layer in a stack.
      positions: [T] absolute positions in tokens, not negative.
      inv_freq: [P] radians per token; the last 2 * P channels are rotated.
      eps: added to the mean square.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret" (bfloat16, D = 512).
    """
    normed = round_to(rms_normalize(q.astype(jnp.float32), eps), q.dtype)
    row = round_to(weight[None, :] * rms_normalize(kv.astype(jnp.float32), eps), kv.dtype)
    return apply_rope(normed, positions, inv_freq), apply_rope(row, positions, inv_freq)


def _norm_rope_append_kernel(view, q, kv, weight, slots, positions, inv_freq, **options):
    weight, layer = layer_stacks(weight)
    arrays = q, kv, weight, slots, positions, inv_freq, view.for_kernels()
    q, *pools = norm_rope_append_kernel(*arrays, layer=layer, **options)
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
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], SWAView]:
    """Fuses `norm_rope` and the `append_swa` of its key-value rows: one launch, and rows are written once.

    Every implementation stores the bytes that its `norm_rope` and `append_swa` store. Returns the queries, in their
    dtype, and the view with updated rows.

    Args:
      view, slots, positions: as in `append_swa`; negative positions rotate like 0.
      q, kv, weight, inv_freq, eps: as in `norm_rope`.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret" (what both ops' kernels take).
    """
    check_dtype("kv", kv, "bfloat16", "float32")
    arrays = q, kv, weight, jnp.maximum(positions, 0), inv_freq
    q, kv = norm_rope(*arrays, eps=eps, implementation=implementation)
    return q, append_swa(view, kv, slots, positions, implementation=implementation)


def rms_normalize(x: Float[Array, "... n"], eps: float) -> Float[Array, "... n"]:
    """`x / sqrt(mean(x**2) + eps)` over the last axis; float32 in and out."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
