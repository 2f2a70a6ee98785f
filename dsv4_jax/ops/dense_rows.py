"""The rows that a call of many tokens attends to, dequantised once for all of them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.gather import fake_quantise, gather_all_compressed_kv
from dsv4_jax.ops.views import ClassicalView, SWAView, run_bounds, take, valid_lengths
from pallas_kernels.sparse_attention import DenseRows


def dense_rows(
    window: SWAView,
    compressed: ClassicalView | None,
    indices: Int[Array, "T K"] | None,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    new_kv: Float[Array, "T D"],
    *,
    implementation: str | None = None,
) -> DenseRows:
    """What `sparse_attention` of these arguments attends to, as its kernel for many tokens takes it.

    Its arrays hold the call's T rows, a window of rows for each of up to min(T, slots) requests, and as many times
    all entries that a request may have, of which only visible ones are written.
    """
    tokens, before = slots.shape[0], window.window - 1
    token = jnp.arange(tokens, dtype=jnp.int32)
    real = (slots >= 0) & (positions >= 0)
    begin, end = run_bounds(slots)
    begins = real & (begin == token)
    runs = max_runs(window, tokens)
    run = jnp.cumsum(begins.astype(jnp.int32)) - 1
    first = jnp.nonzero(begins, size=runs, fill_value=-1)[0].astype(jnp.int32)
    slot, position = (jnp.where(first >= 0, take(x, first), -1) for x in (slots, positions))
    past = position[:, None] - jnp.arange(before, 0, -1, dtype=jnp.int32)[None, :]
    old = take(
        window.rows, window.layer, jnp.broadcast_to(slot[:, None], past.shape), jnp.maximum(past, 0) % window.ring
    )
    old = window.codec.decode(old, new_kv.dtype).reshape(runs * before, -1)
    rows = jnp.concatenate([fake_quantise(window, new_kv, new_kv.dtype), old])

    base, counts, entries = jnp.zeros((tokens,), jnp.int32), jnp.zeros((tokens,), jnp.int32), None
    if compressed is not None:
        last = jnp.where(first >= 0, take(positions, take(end, first) - 1), -1)
        options = dict(dtype=new_kv.dtype, only_visible=True, implementation=implementation)
        entries, _ = gather_all_compressed_kv(compressed, slot, last, **options)
        entries = entries.reshape(-1, entries.shape[-1])
        base = run * compressed.max_entries
        counts = jnp.minimum(valid_lengths(positions, compressed.compress_rate), compressed.max_entries)
        if indices is not None:
            place = jnp.arange(1, indices.shape[1] + 1, dtype=jnp.int32)
            counts = jnp.max(jnp.where(indices >= 0, place[None, :], 0), axis=1, initial=0)
    places = jnp.stack([positions, begin, tokens + (run + 1) * before, base], axis=1)
    return DenseRows(rows, entries, indices, places, jnp.where(real, counts, -1), window.window)


def max_runs(window: SWAView, tokens: int) -> int:
    """How many requests a call of so many tokens may have."""
    return min(tokens, jax.tree.leaves(window.rows)[0].shape[1])
