"""The three gathers: cached rows back to dense values with a valid mask."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.views import ClassicalView, SWAView, run_bounds, take, valid_lengths
from pallas_kernels import gather as kernels
from pallas_kernels.formats.layouts import quantised


def gather_compressed_kv(
    view: ClassicalView,
    indices: Int[Array, "T K"],
    slots: Int[Array, "T"],
    *,
    dtype=jnp.bfloat16,
    implementation: str | None = None,
) -> tuple[Float[Array, "T K D"], Bool[Array, "T K"]]:
    """Compressed entries by index list, dequantised.

    Args:
      view: the layer's entries.
      indices: [T, K] entry numbers of each token's own request; -1 = none.
      slots: [T] each token's request slot; -1 = padding.
      dtype: of the result.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret" (rows of 448 + 64 dims in formats
        "v4" and "per_entry" to bfloat16).

    Returns:
      (kv, valid): kv [T, K, D], zeros where not valid; valid [T, K] bool. Keys and values are the same vectors.
    """
    functions = dict(xla=_gather_compressed_kv_xla, kernel=_gather_compressed_kv_kernel)
    return dispatch("gather_compressed_kv", implementation, view, indices, slots, **functions, dtype=dtype)


def _gather_compressed_kv_xla(view, indices, slots, *, dtype):
    rows, valid = view.read(jnp.broadcast_to(slots[:, None], indices.shape), indices)
    return _mask(view.codec.decode(rows, dtype), valid)


def gather_all_compressed_kv(
    view: ClassicalView,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    dtype=jnp.bfloat16,
    only_visible: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "T E D"], Bool[Array, "T E"]]:
    """Every compressed entry visible to each token: entries `0 .. (position + 1) // rate - 1` of its request.

    Args:
      view: the layer's entries.
      slots: [T] request slots; -1 = padding.
      positions: [T] absolute positions; -1 = padding.
      dtype: of the result.
      only_visible: what is not visible is never read, so that a kernel need not write it: its values, and those of
        `valid`, are unspecified. Then a call's time follows from what is visible, not from what could be.
      implementation: as in `gather_compressed_kv`.

    Returns:
      (kv, valid): kv [T, E, D] with E = max_blocks * entries a block, zeros where not valid; valid [T, E] bool.
    """
    functions = dict(xla=_gather_all_compressed_kv_xla, kernel=_gather_all_compressed_kv_kernel)
    options = dict(dtype=dtype, only_visible=only_visible)
    return dispatch("gather_all_compressed_kv", implementation, view, slots, positions, **functions, **options)


def _gather_all_compressed_kv_xla(view, slots, positions, *, dtype, only_visible):
    entries = jnp.arange(view.max_entries, dtype=jnp.int32)[None, :]
    visible = entries < valid_lengths(positions, view.compress_rate)[:, None]
    return _gather_compressed_kv_xla(view, jnp.where(visible, entries, -1), slots, dtype=dtype)


def gather_swa_kv(
    view: SWAView,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    new_kv: Float[Array, "T D"] | None = None,
    dtype=jnp.bfloat16,
    implementation: str | None = None,
) -> tuple[Float[Array, "T W D"], Bool[Array, "T W"]]:
    """The sliding window of each token, oldest first, the token itself last.

    Args:
      view: the layer's rings.
      slots: [T] request slots; -1 = padding.
      positions: [T] absolute positions; -1 = padding.
      new_kv: [T, D] this call's own rows when the rings do not hold them yet (prefill); they are read as the format
        would store them.
      dtype: of the result.
      implementation: as in `gather_compressed_kv`; the kernel does not take `new_kv`.

    Returns:
      (kv, valid): kv [T, W, D], zeros where not valid; valid [T, W] bool.
    """
    functions = dict(xla=_gather_swa_kv_xla, kernel=_gather_swa_kv_kernel)
    return dispatch("gather_swa_kv", implementation, view, slots, positions, new_kv, **functions, dtype=dtype)


def _gather_swa_kv_xla(view, slots, positions, new_kv, *, dtype):
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    if new_kv is not None:
        new_kv = fake_quantise(view, new_kv, dtype)
    return _window(view, slots, positions, tokens, run_bounds(slots)[0], new_kv, dtype)


def _window(view, slots, positions, tokens, starts, new_kv, dtype):
    """Windows of some of the call's tokens; `new_kv` holds dequantised rows of all of them."""
    back = jnp.arange(view.window - 1, -1, -1, dtype=jnp.int32)[None, :]
    position = positions[:, None] - back
    valid = (slots >= 0)[:, None] & (positions >= 0)[:, None] & (position >= 0)
    slot = jnp.broadcast_to(slots[:, None], position.shape)
    kv = view.codec.decode(take(view.rows, view.layer, slot, jnp.maximum(position, 0) % view.ring), dtype)
    if new_kv is not None:
        index = tokens[:, None] - back
        kv = jnp.where((index >= starts[:, None])[..., None], take(new_kv, index), kv)
    return _mask(kv, valid)


def fake_quantise(view: SWAView, kv: Float[Array, "T D"], dtype) -> Float[Array, "T D"]:
    """What a later read of these rows would return: quantised and dequantised by the view's format."""
    return view.codec.decode(view.codec.encode(kv), dtype)


def _mask(kv, valid):
    # where, not a product: rows nobody wrote may hold NaN.
    return jnp.where(valid[..., None], kv, jnp.zeros((), kv.dtype)), valid


def _gather_compressed_kv_kernel(view, indices, slots, *, dtype, interpret):
    options = _kernel_options(view, dtype, interpret)
    return kernels.gather_compressed_kv(indices, slots, *_kernel_pools(view, view.block_table), **options)


def _gather_all_compressed_kv_kernel(view, slots, positions, *, dtype, only_visible, interpret):
    options = _kernel_options(view, dtype, interpret)
    options |= dict(compress_rate=view.compress_rate, only_visible=only_visible)
    return kernels.gather_all_compressed_kv(slots, positions, *_kernel_pools(view, view.block_table), **options)


def _gather_swa_kv_kernel(view, slots, positions, new_kv, *, dtype, interpret):
    if new_kv is not None:
        raise NotImplementedError("the kernel reads windows from the rings alone: new_kv must be None")
    options = _kernel_options(view, dtype, interpret) | dict(window=view.window)
    return kernels.gather_swa_kv(slots, positions, *_kernel_pools(view), **options)


def _kernel_pools(view, *table):
    return jnp.asarray(view.layer, jnp.int32), *table, view.rows.nope, view.rows.rope, view.rows.scale


def _kernel_options(view, dtype, interpret):
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise NotImplementedError(f"the kernel writes bfloat16, not dtype={jnp.dtype(dtype).name}")
    return dict(layout=quantised(view.layout), interpret=interpret)
