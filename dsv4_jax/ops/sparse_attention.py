"""Decode attention over the sliding window and compressed entries, one softmax with a sink."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.context_parallel import attend_to_parts, every_entry
from dsv4_jax.ops.dense_rows import dense_rows, max_runs
from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.ops.gather import _window, fake_quantise, gather_all_compressed_kv, gather_compressed_kv
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.ops.views import ClassicalView, SWAView, run_bounds, take
from dsv4_jax.quant import round_to
from pallas_kernels.formats.layouts import quantised
from pallas_kernels.sparse_attention import (
    HEADS,
    MAX_PAIRS,
    Paged,
    attention_sums,
    prefill_attention,
    sparse_attention as kernel,
)


# Query tokens attended at a time: bounds the dense rows gathered for them.
QUERY_BLOCK = 32
# Below every score, and finite: differences of two are not NaN.
LOWEST = -1e30
# From so many tokens on, rows are dequantised once for all of them, if there are at most so many rows: 272 MB, and so
# many for a token that writing them takes less time than they save.
MANY_TOKENS = 128
MAX_DENSE_ROWS = (1 << 18) + (1 << 12)
DENSE_ROWS_A_TOKEN = 512


def sparse_attention(
    q: Float[Array, "T H D"],
    sinks: Float[Array, "H"],
    window: SWAView,
    compressed: ClassicalView | None,
    indices: Int[Array, "T K"] | None,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    new_kv: Float[Array, "T D"] | None = None,
    inv_freq: Float[Array, "P"] | None = None,
    context_parallel: bool = False,
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Attention of each token over its window and its compressed entries (dsv4.md 2, 5).

    One shared vector per row is key and value of all heads. Scores are scaled by `D ** -0.5`; the sink is one more
    logit of the softmax with no value. Entries whose tokens also stand in the window are not excluded.

    Args:
      q: [T, H, D] queries after norm and RoPE, in the model's dtype.
      sinks: [H] float32 sink logits.
      window: the layer's rings.
      compressed: the layer's entries, or None for a sliding-only layer.
      indices: [T, K] entries to attend to (-1 = none), or None for every visible entry.
      slots: [T] request slots; -1 = padding.
      positions: [T] absolute positions; -1 = padding.
      new_kv: [T, D] this call's window rows when the rings do not hold them yet (prefill).
      inv_freq: [P] radians per token, with which the last 2 * P channels of results, rounded, are rotated back at the
        token's position (dsv4.md 2.2), and rounded again; None: they are not.
      context_parallel: the devices of the axis "model" hold the entries between them, see `ops.context_parallel`; q
        and sinks are of this device's heads.
      implementation: None (best available), "xla", "mosaic_gpu" or "interpret". The kernel takes bfloat16 queries, rows
        of 448 + 64 dims in formats "v4" and "per_entry", and windows of a multiple of 64 tokens; it computes a multiple
        of 64 heads. It adds in another order than "xla", which depends on T and K (or the block table's width), never
        on other tokens, and rounds weights before they are divided by their final maximum: results differ by about
        one part in 2 ** 8.

    Returns:
      [T, H, D] in `q.dtype`; zeros for padding tokens.
    """
    args = q, sinks, window, compressed, indices, slots, positions, new_kv, inv_freq
    functions = dict(xla=_sparse_attention_xla, kernel=_sparse_attention_kernel)
    return dispatch("sparse_attention", implementation, *args, **functions, context_parallel=context_parallel)


def _sparse_attention_xla(
    q, sinks, window, compressed, indices, slots, positions, new_kv, inv_freq, *, context_parallel
):
    rows = window, compressed, indices, slots, positions, new_kv
    if context_parallel:
        out = attend_to_parts(lambda q, with_window: _by_token(_part, q, *rows, with_window), q, sinks)
    else:
        out = _by_token(functools.partial(_attend_dense, sinks=sinks), q, *rows, True)
    return _turned_back(out, positions, inv_freq)


def _turned_back(out, positions, inv_freq):
    """What attention adds up, with the inverse RoPE of the query's position; as it is where `inv_freq` is None."""
    return out if inv_freq is None else apply_rope(out, jnp.maximum(positions, 0), inv_freq, inverse=True)


def _by_token(attend_dense, q, window, compressed, indices, slots, positions, new_kv, with_window):
    """`attend_dense(q [H, D], kv [N, D], valid [N])` of each token and the rows that it sees."""
    if new_kv is not None:
        new_kv = fake_quantise(window, new_kv, q.dtype)
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)

    def attend(token):
        q, slots, positions, tokens, starts, indices = jax.tree.map(lambda x: x[None], token)
        kv, valid = _window(window, slots, positions, tokens, starts, new_kv, q.dtype)
        valid = valid & with_window
        if compressed is not None:
            if indices is None:
                more = gather_all_compressed_kv(compressed, slots, positions, dtype=q.dtype, implementation="xla")
            else:
                more = gather_compressed_kv(compressed, indices, slots, dtype=q.dtype, implementation="xla")
            kv, valid = (jnp.concatenate(pair, axis=1) for pair in zip((kv, valid), more, strict=True))
        return attend_dense(q[0], kv[0], valid[0])

    return jax.lax.map(
        attend,
        (q, slots, positions, tokens, run_bounds(slots)[0], indices),
        batch_size=min(QUERY_BLOCK, q.shape[0]),
    )


def _attend_dense(q, kv, valid, sinks):
    """One token: q [H, D] over kv [N, D]; probabilities rounded to q's dtype before the values, as released."""
    # With the sink in the maximum a token that sees no row divides 0 by 1, whatever the sink's value.
    out, top, total = _part(q, kv, valid, sinks)
    return round_to(out / (total + jnp.exp(sinks - top))[:, None], q.dtype)


def _part(q, kv, valid, least=LOWEST):
    """(sums [H, D], largest scores [H], at least `least`, sums [H] of weights) of one token."""
    kv = kv.astype(jnp.float32)
    scores = jnp.einsum("hd,nd->hn", q.astype(jnp.float32), kv, precision="highest") * q.shape[-1] ** -0.5
    scores = jnp.where(valid[None, :], scores, -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=1, initial=-jnp.inf), least)
    weights = jnp.exp(scores - top[:, None])
    out = jnp.einsum("hn,nd->hd", round_to(weights, q.dtype).astype(jnp.float32), kv, precision="highest")
    return out, top, jnp.sum(weights, axis=1)


def _sparse_attention_kernel(
    q, sinks, window, compressed, indices, slots, positions, new_kv, inv_freq, *, context_parallel, interpret
):
    if new_kv is not None and q.shape[0] >= MANY_TOKENS and _dense_rows(window, compressed, q.shape[0]):
        name = "interpret" if interpret else "mosaic_gpu"
        rows = dense_rows(window, compressed, indices, slots, positions, new_kv, implementation=name)
        if context_parallel:
            rows = dataclasses.replace(rows, entries=every_entry(rows.entries))
        return _attend_to_dense_rows(q, sinks, rows, positions, inv_freq, interpret)
    rings, layer, places = _pools(window), jnp.asarray(window.layer, jnp.int32), None
    if new_kv is not None:
        rows, places = _windows_in_a_row(window, new_kv, slots, positions)
        rings, layer = (rows.nope, rows.rope, rows.scale), jnp.int32(0)
    entries = None
    if compressed is not None:
        entries = Paged(
            jnp.asarray(compressed.layer, jnp.int32),
            compressed.block_table,
            _pools(compressed),
            indices,
            compressed.compress_rate,
            quantised(compressed.layout),
        )
    options = dict(window=window.window, places=places, layout=quantised(window.layout), interpret=interpret)
    if context_parallel:

        def attend(q, with_window):
            own = jnp.where(with_window, layer, -1)
            sums, stats = attention_sums(_padded(q), slots, positions, own, rings, entries, **options)
            return jax.tree.map(lambda x: x[:, : q.shape[1]], _joined(sums, stats))

        return _turned_back(attend_to_parts(attend, q, sinks), positions, inv_freq)
    turned, inv_freq = _for_the_kernel(inv_freq)
    out = kernel(_padded(q), _padded(sinks, axis=0), slots, positions, layer, rings, entries, turned, **options)
    return _turned_back(out[:, : q.shape[1]], positions, inv_freq)


def _attend_to_dense_rows(q, sinks, rows, positions, inv_freq, interpret):
    turned, inv_freq = _for_the_kernel(inv_freq)
    angles = None
    if turned is not None:
        angle = jnp.maximum(positions, 0).astype(jnp.float32)[:, None] * turned[None, :]
        angles = jnp.cos(angle), jnp.sin(angle)
    out = prefill_attention(_padded(q, HEADS), _padded(sinks, HEADS, axis=0), rows, angles, interpret=interpret)
    return _turned_back(out[:, : q.shape[1]], positions, inv_freq)


def _for_the_kernel(inv_freq):
    """(inv_freq or None for the kernel, and for XLA): kernels rotate back what lies together in a warpgroup."""
    if inv_freq is not None and inv_freq.shape[0] <= MAX_PAIRS and inv_freq.shape[0] % 4 == 0:
        return inv_freq, None
    return None, inv_freq


def _joined(sums, stats):
    """As `_part`, of each token, from the parts of `attention_sums`."""
    tops, totals = stats[:, :, 0], stats[:, :, 1]
    top = jnp.max(tops, axis=1)
    share = jnp.exp2(tops - top[:, None])
    out = jnp.sum(sums * share[..., None], axis=1)
    return out, top * math.log(2), jnp.sum(totals * share, axis=1)


def _padded(x, multiple=None, axis=1):
    """x with a multiple of so many heads on an axis, by default what the kernel for few tokens takes."""
    # A device that shares a layer with others may have few heads.
    heads = x.shape[axis]
    missing = -heads % (multiple or min(HEADS, -(-heads // 8) * 8))
    return jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])


def _dense_rows(window, compressed, tokens):
    """Whether a call's rows may be dequantised: there could be as many as all its requests could ever have."""
    most = min(MAX_DENSE_ROWS, DENSE_ROWS_A_TOKEN * tokens)
    return compressed is None or max_runs(window, tokens) * compressed.max_entries <= most


def _windows_in_a_row(view, new_kv, slots, positions):
    """One ring [1, 1, N, ..] with, request by request, the window before its first token and then its new rows.

    Returns:
      (Rows, [T] int32 where each token's own row is).
    """
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    real = (slots >= 0) & (positions >= 0)
    before, runs = view.window - 1, min(slots.shape[0], jax.tree.leaves(view.rows)[0].shape[1])
    begins = real & (run_bounds(slots)[0] == tokens)
    places = tokens + before * jnp.cumsum(begins.astype(jnp.int32))
    first = jnp.nonzero(begins, size=runs, fill_value=-1)[0].astype(jnp.int32)
    slot, position, place = (jnp.where(first >= 0, take(x, first), -1) for x in (slots, positions, places))
    back = jnp.arange(before, 0, -1, dtype=jnp.int32)[None, :]
    past = position[:, None] - back
    old = take(view.rows, view.layer, jnp.broadcast_to(slot[:, None], past.shape), jnp.maximum(past, 0) % view.ring)
    count = slots.shape[0] + runs * before
    there = jnp.where(past >= 0, place[:, None] - back, count)
    mine = jnp.where(real, places, count)

    def lay_out(old, new):
        rows = jnp.zeros((count, old.shape[-1]), old.dtype)
        rows = rows.at[there].set(old, mode="drop").at[mine].set(new, mode="drop")
        return rows[None, None]

    return jax.tree.map(lay_out, old, view.codec.encode(new_kv)), places


def _pools(view):
    return view.rows.nope, view.rows.rope, view.rows.scale
