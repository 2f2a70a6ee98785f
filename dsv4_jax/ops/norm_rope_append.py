"""Norm and rotation of queries and key-value rows, fused with the quantized append of the rows."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.append_swa import append_swa
from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.norm_rope import norm_rope
from dsv4_jax.ops.views import SWAView
from dsv4_jax.quant import Rows
from pallas_kernels.norm_rope import norm_rope_append as norm_rope_append_kernel


def norm_rope_append(
    view: SWAView,
    q: Float[Array, "T H D"],
    kv: Float[Array, "T D"],
    weight: Float[Array, "D"],
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    inv_freq: Float[Array, "P"],
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], SWAView]:
    """Fuses `norm_rope` and the `append_swa` of its key-value rows: one launch, and rows are written once.

    Every implementation stores the bytes that its `norm_rope` and `append_swa` store.

    Args:
      view, slots, positions: as in `append_swa`; negative positions rotate like 0.
      q, kv, weight, inv_freq, eps: as in `norm_rope`.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret" (what both ops' kernels take).

    Returns:
      (queries in their dtype, the view with updated rows).
    """
    args = view, q, kv, weight, slots, positions, inv_freq
    functions = dict(xla=_norm_rope_append_xla, kernel=_norm_rope_append_kernel)
    return dispatch("norm_rope_append", implementation, *args, **functions, eps=eps)


def _norm_rope_append_xla(view, q, kv, weight, slots, positions, inv_freq, *, eps):
    at = jnp.maximum(positions, 0)
    q, kv = norm_rope(q, kv, weight, at, inv_freq, eps=eps, implementation="xla")
    return q, append_swa(view, kv, slots, positions, implementation="xla")


def _norm_rope_append_kernel(view, q, kv, weight, slots, positions, inv_freq, *, eps, interpret):
    arrays = q, kv, weight, slots, positions, inv_freq, view.for_kernels()
    q, *pools = norm_rope_append_kernel(*arrays, eps=eps, interpret=interpret)
    return q, dataclasses.replace(view, rows=Rows(*pools))
