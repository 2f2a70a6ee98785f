"""Quantised append into the sliding-window rings."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.views import SWAView, put, run_bounds
from dsv4_jax.quant import Rows
from pallas_kernels.append_swa import append_swa as append_swa_kernel
from pallas_kernels.formats.layouts import quantised


def append_swa(
    view: SWAView,
    kv: Float[Array, "T D"],
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    implementation: str | None = None,
) -> SWAView:
    """Stores the window rows of this call's tokens, row `position % ring` of their slot.

    Rows are addressed by position, so the result does not depend on how tokens are split into calls. Of a request
    with more tokens than the ring, only the last ring-full is written: two writes never meet in one row.

    Args:
      view: the layer's rings.
      kv: [T, D] rows after norm and RoPE, model dtype; quantised here.
      slots: [T] the request's slot, -1 = padding: nothing is written.
      positions: [T] absolute position, -1 = padding: nothing is written.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret" (bfloat16 rows of 448 + 64 dims in
        formats "v4" and "per_entry").

    Returns:
      The view with updated rows.
    """
    args = view, kv, slots, positions
    return dispatch("append_swa", implementation, *args, xla=_append_swa_xla, kernel=_append_swa_kernel)


def _append_swa_xla(view, kv, slots, positions):
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    _, end = run_bounds(slots)
    keep = (slots >= 0) & (positions >= 0) & (end - tokens <= view.ring)
    rows = view.codec.encode(kv)
    return dataclasses.replace(
        view, rows=put(view.rows, rows, keep, view.layer, slots, jnp.maximum(positions, 0) % view.ring)
    )


def _append_swa_kernel(view, kv, slots, positions, *, interpret):
    rows, layer = view.rows, jnp.asarray(view.layer, jnp.int32)
    new = append_swa_kernel(
        kv,
        slots,
        positions,
        layer,
        rows.nope,
        rows.rope,
        rows.scale,
        layout=quantised(view.layout),
        interpret=interpret,
    )
    return dataclasses.replace(view, rows=Rows(*new))
