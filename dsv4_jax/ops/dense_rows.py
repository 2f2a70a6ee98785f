"""The rows that a prefill call attends to, laid out for kernels.

These are the call's own window rows, the window of cached rows before each request's first token, and the requests'
compressed entries.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.gather import gather_all_compressed_kv
from dsv4_jax.ops.views import AttentionKV, SWAView, int_range, run_bounds, take, take_or_none, valid_lengths
from dsv4_jax.quant import Rows
from pallas_kernels.formats.pool_operands import Rings
from pallas_kernels.sparse_attention import DenseRows


@dataclasses.dataclass(frozen=True)
class _Runs:
    """The runs of a call. A run is the consecutive tokens of one request.

    Arrays [R, ...] have room for R = `max_runs` runs. If the call has fewer runs, the remaining elements of
    `first_token` and `slot` are -1.
    """

    real: Array  # [T] bool, False for padding
    begin: Array  # [T] index of the first token of each token's run
    end: Array  # [T] one more than the index of the last token of each token's run
    index: Array  # [T] index of each token's run, from 0
    first_token: Array  # [R] index of the run's first token
    slot: Array  # [R] slot of the run's request
    past: Array  # [R, window - 1] positions before the run's first token; negative = none
    past_rows: Rows  # cached rows at the positions `past`


def max_runs(window: SWAView, tokens: int) -> int:
    """Returns the maximum number of requests in a call: `tokens` or the number of slots, whichever is less."""
    return min(tokens, jax.tree.leaves(window.rows)[0].shape[1])


def _find_runs(window, slots, positions):
    """Returns the `_Runs` of a call, with the cached rows that lie before each run."""
    tokens = slots.shape[0]
    real = (slots >= 0) & (positions >= 0)
    begin, end = run_bounds(slots)
    is_first = real & (begin == int_range(tokens))
    index = jnp.cumsum(is_first.astype(jnp.int32)) - 1
    first_token = jnp.nonzero(is_first, size=max_runs(window, tokens), fill_value=-1)[0].astype(jnp.int32)
    slot, position = (take_or_none(x, first_token) for x in (slots, positions))
    past = position[:, None] - int_range(window.window - 1, 0, -1)[None, :]
    past_rows = take(window.rows, window.layer, slot[:, None], jnp.maximum(past, 0) % window.ring)
    return _Runs(real, begin, end, index, first_token, slot, past, past_rows)


def dense_rows(
    kv: AttentionKV, slots: Int[Array, "T"], positions: Int[Array, "T"], *, implementation: str | None = None
) -> DenseRows:
    """Dequantizes the rows that a prefill call attends to, for the kernel `prefill_attention`.

    Args:
      kv: the rows to attend to, with `new_kv`.
      slots, positions: [T] int32 request slots and absolute positions; -1 = padding.
      implementation: implementation of `gather_all_compressed_kv`.

    Returns:
      The `DenseRows` of the call. `window_rows` holds the call's T rows, then for each of `max_runs` requests the
      window rows before the call. `entries` has room for the maximum number of entries of each of these requests.
      Entries that no token sees are unspecified.
    """
    tokens = slots.shape[0]
    window = kv.window
    compressed = kv.compressed
    new_kv = kv.new_kv
    assert new_kv is not None
    dtype = new_kv.dtype
    runs = _find_runs(window, slots, positions)
    past_rows = window.codec.decode(runs.past_rows, dtype).reshape(runs.past.size, -1)
    rows = jnp.concatenate([window.codec.fake_quantize(new_kv, dtype), past_rows])
    past_end = tokens + (runs.index + 1) * (window.window - 1)  # where the past rows of each token's run end in `rows`

    first_entry = jnp.zeros((tokens,), jnp.int32)
    counts = jnp.zeros((tokens,), jnp.int32)
    entries = None
    if compressed is not None:
        last_token = take_or_none(runs.end, runs.first_token) - 1
        last_position = take_or_none(positions, last_token)
        entries, _ = gather_all_compressed_kv(
            compressed, runs.slot, last_position, dtype=dtype, only_visible=True, implementation=implementation
        )
        entries = entries.reshape(-1, entries.shape[-1])
        first_entry = runs.index * compressed.max_entries
        counts = jnp.minimum(valid_lengths(positions, compressed.compress_rate), compressed.max_entries)
        if kv.indices is not None:  # counts the indices up to the last one that is not -1
            ordinals = int_range(1, kv.indices.shape[1] + 1)
            counts = jnp.max(jnp.where(kv.indices >= 0, ordinals[None, :], 0), axis=1, initial=0)
    metadata = jnp.stack([positions, runs.begin, past_end, first_entry], axis=1)
    return DenseRows(rows, entries, kv.indices, metadata, jnp.where(runs.real, counts, -1), window.window)


def ring_of_call(
    window: SWAView, new_kv: Float[Array, "T D"], slots: Int[Array, "T"], positions: Int[Array, "T"]
) -> Rings:
    """Makes one ring of all quantized window rows that a call sees, for kernels that read windows from rings.

    The ring holds, request by request, the window before the request's first token of this call, then the rows of the
    request's tokens of this call.

    Args:
      window: the layer's rings.
      new_kv: [T, D] window rows of the call's tokens.
      slots, positions: [T] int32 request slots and absolute positions; -1 = padding.

    Returns:
      Rings with one layer and one slot, whose `own_rows` [T] is the row of each token.
    """
    tokens = slots.shape[0]
    num_past = window.window - 1
    runs = _find_runs(window, slots, positions)
    # The ring holds, run after run, the run's `num_past` cached rows and then the rows of its tokens.
    own_rows = int_range(tokens) + num_past * (runs.index + 1)
    count = tokens + runs.past.size  # number of rows of the ring; `lay_out` drops writes to the index `count`
    new_places = jnp.where(runs.real, own_rows, count)

    # [R] row in the ring of each run's first token; -1 = no run
    first_row = take_or_none(own_rows, runs.first_token)
    past_places = first_row[:, None] - int_range(num_past, 0, -1)[None, :]
    past_places = jnp.where(runs.past >= 0, past_places, count)

    def lay_out(past, new):
        """Lays out `past` [R, num_past, ..] and `new` [T, ..] in the order of the ring. Returns [1, 1, count, ..]."""
        rows = jnp.zeros((count, past.shape[-1]), past.dtype)
        rows = rows.at[past_places].set(past, mode="drop").at[new_places].set(new, mode="drop")
        return rows[None, None]

    rows = jax.tree.map(lay_out, runs.past_rows, window.codec.encode(new_kv))
    ring = SWAView(rows, 0, window.window, window.codec)
    return dataclasses.replace(ring.for_kernels(), own_rows=own_rows)
