"""Gathers: ops that read rows of the KV cache as dequantized values, with a mask of valid rows."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax.ops.dispatch import check_bfloat16, with_kernel
from dsv4_jax.ops.views import ClassicalView, SWAView, int_range, run_bounds, take, valid_lengths
from pallas_kernels import gather as kernels


def _gather_compressed_kv_kernel(view, indices, slots, *, dtype, interpret):
    check_bfloat16(dtype)
    return kernels.gather_compressed_kv(slots, view.for_kernels(indices), interpret=interpret)


def _gather_all_compressed_kv_kernel(view, slots, positions, *, dtype, only_visible, interpret):
    check_bfloat16(dtype)
    return kernels.gather_all_compressed_kv(
        slots, positions, view.for_kernels(), only_visible=only_visible, interpret=interpret
    )


def _gather_swa_kv_kernel(view, slots, positions, new_kv, *, dtype, interpret):
    if new_kv is not None:
        raise NotImplementedError("the kernel reads windows from the rings alone: new_kv must be None")
    check_bfloat16(dtype)
    return kernels.gather_swa_kv(slots, positions, view.for_kernels(), interpret=interpret)


@with_kernel(_gather_compressed_kv_kernel)
def gather_compressed_kv(
    view: ClassicalView,
    indices: Int[Array, "T K"],
    slots: Int[Array, "T"],
    *,
    dtype=jnp.bfloat16,
    implementation: str | None = None,
) -> tuple[Float[Array, "T K D"], Bool[Array, "T K"]]:
    """Reads the compressed entries with given indices, and dequantizes them.

    Args:
      view: the layer's entries.
      indices: [T, K] int32 indices of entries within each token's request; -1 = none.
      slots: [T] int32, slot of each token's request; -1 = padding.
      dtype: dtype of the result.
      implementation: None, "xla", "mosaic_gpu" or "interpret". The last two take rows of 448 + 64 dims in the formats
        "v4" and "per_entry", and of 512 + 0 in "v41", and write bfloat16.

    Returns:
      kv: [T, K, D] values of the entries, each both a key and a value; zeros for entries that are not valid.
      valid: [T, K] bool, whether the token is not padding, the index is not -1, and the entry has a block.
    """
    rows, valid = view.read(jnp.broadcast_to(slots[:, None], indices.shape), indices)
    return _mask(view.codec.decode(rows, dtype), valid)


@with_kernel(_gather_all_compressed_kv_kernel)
def gather_all_compressed_kv(
    view: ClassicalView,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    dtype=jnp.bfloat16,
    only_visible: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "T E D"], Bool[Array, "T E"]]:
    """Reads all compressed entries that each token sees: entries `0 .. (position + 1) // rate - 1` of its request.

    Args:
      view: the layer's entries.
      slots, positions: [T] int32 request slots and absolute positions; -1 = padding.
      dtype: dtype of the result.
      only_visible: whether kv and `valid` may be left unspecified for entries that are not visible, which saves time.
      implementation: as in `gather_compressed_kv`.

    Returns:
      kv: [T, E, D] values of the entries, zeros for entries that are not valid; E = max_blocks * entries per block.
      valid: [T, E] bool, whether the entry is visible and has a block.
    """
    entries = int_range(view.max_entries)[None, :]
    indices = jnp.where(entries < valid_lengths(positions, view.compress_rate)[:, None], entries, -1)
    return gather_compressed_kv(view, indices, slots, dtype=dtype, implementation=implementation)


@with_kernel(_gather_swa_kv_kernel)
def gather_swa_kv(
    view: SWAView,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    new_kv: Float[Array, "T D"] | None = None,
    dtype=jnp.bfloat16,
    implementation: str | None = None,
) -> tuple[Float[Array, "T W D"], Bool[Array, "T W"]]:
    """Reads the sliding window of each token, from the oldest row to the token's own.

    Args:
      view: the layer's rings.
      slots, positions: [T] int32 request slots and absolute positions; -1 = padding.
      new_kv: [T, D] window rows of the call's tokens, if the rings do not hold them yet, as in a prefill. These rows
        are rounded as if they had been stored in the rings' format. None: all rows come from the rings.
      dtype: dtype of the result.
      implementation: as in `gather_compressed_kv`. The kernel does not take `new_kv`.

    Returns:
      kv: [T, W, D] values of the rows, zeros for rows that are not valid; W = `view.window`.
      valid: [T, W] bool. Rows of padding, and rows before position 0, are not valid.
    """
    if new_kv is not None:
        new_kv = view.codec.fake_quantize(new_kv, dtype)
    return window_rows(view, slots, positions, int_range(slots.shape[0]), run_bounds(slots)[0], new_kv, dtype)


def window_rows(view, slots, positions, tokens, starts, new_kv, dtype):
    """Reads the sliding windows of n of a call's T tokens, like `gather_swa_kv`.

    Args:
      view, dtype: as in `gather_swa_kv`.
      slots, positions: [n] slots and positions of the n tokens.
      tokens: [n] index of each of the n tokens in the call.
      starts: [n] index in the call of the first token of the same request.
      new_kv: [T, D] dequantized window rows of all T tokens, or None.
    """
    distance = int_range(view.window - 1, -1, -1)[None, :]
    position = positions[:, None] - distance
    valid = (slots >= 0)[:, None] & (positions >= 0)[:, None] & (position >= 0)
    kv = view.codec.decode(take(view.rows, view.layer, slots[:, None], jnp.maximum(position, 0) % view.ring), dtype)
    if new_kv is not None:
        index = tokens[:, None] - distance
        kv = jnp.where((index >= starts[:, None])[..., None], take(new_kv, index), kv)
    return _mask(kv, valid)


def _mask(kv, valid):
    # Rows that were never written may hold NaN, which a product with the mask would keep.
    return jnp.where(valid[..., None], kv, jnp.zeros((), kv.dtype)), valid
