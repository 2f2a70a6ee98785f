"""Attention over the sliding window and compressed entries: one softmax with a sink."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.common.mesh_axes import MODEL_AXIS
from dsv4_jax.ops.context_parallel import attend_to_shards
from dsv4_jax.ops.dense_rows import dense_rows, max_runs, ring_of_call
from dsv4_jax.ops.dispatch import with_kernel
from dsv4_jax.ops.gather import gather_all_compressed_kv, gather_compressed_kv, window_rows
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.ops.views import AttentionKV, run_bounds
from dsv4_jax.quant import LayerSlice, layer_stacks, layer_value, round_to
from pallas_kernels.sparse_attention import (
    HEADS,
    MAX_PAIRS,
    attention_sums,
    prefill_attention,
    sparse_attention as decode_attention,
)


# Query tokens attended at a time by XLA; bounds the dense rows gathered for them.
QUERY_BLOCK = 32
# Finite and below every score, so that differences of two maxima are not NaN.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Says which calls use the prefill kernel, which dequantizes a call's rows once instead of once per token."""

    min_tokens: int = 128  # minimum number of tokens
    # Maximum number of dequantized rows, by default 272 MB; there may be as many as all requests can have.
    max_rows: int = (1 << 18) + (1 << 12)
    # Maximum number of rows for each token; beyond it, writing them takes longer than they save.
    max_rows_per_token: int = 512

    def takes(self, kv: AttentionKV, tokens: int) -> bool:
        """Whether a call uses the prefill kernel."""
        if kv.new_kv is None or tokens < self.min_tokens:
            return False
        max_rows = min(self.max_rows, self.max_rows_per_token * tokens)
        return kv.compressed is None or max_runs(kv.window, tokens) * kv.compressed.max_entries <= max_rows


def _sparse_attention_kernel(q, sinks, kv, slots, positions, inv_freq, *, context_parallel, prefill, interpret):
    tokens, heads, _ = q.shape
    # Kernels rotate back what lies in one warpgroup; XLA does the rest.
    in_kernel = inv_freq is not None and len(inv_freq) <= MAX_PAIRS and len(inv_freq) % 4 == 0
    kernel_freq, xla_freq = (inv_freq, None) if in_kernel else (None, inv_freq)
    stack, layer = layer_stacks(sinks)
    if prefill.takes(kv, tokens):
        rows = dense_rows(kv, slots, positions, implementation="interpret" if interpret else "mosaic_gpu")
        if context_parallel:
            # Each device has zeros for the entries of others.
            rows = dataclasses.replace(rows, entries=jax.lax.psum(rows.entries, MODEL_AXIS))
        padded = _pad_heads(q, HEADS), _pad_heads(stack, HEADS, axis=-1)
        out = prefill_attention(*padded, rows, kernel_freq, layer=layer, interpret=interpret)
        return _inverse_rope(out[:, :heads], positions, xla_freq)

    rings = kv.window.for_kernels() if kv.new_kv is None else ring_of_call(kv.window, kv.new_kv, slots, positions)
    entries = None if kv.compressed is None else kv.compressed.for_kernels(kv.indices)
    if not context_parallel:
        padded = _pad_heads(q), _pad_heads(stack, axis=-1)
        arrays = *padded, slots, positions, rings, entries, kernel_freq
        out = decode_attention(*arrays, layer=layer, interpret=interpret)
        return _inverse_rope(out[:, :heads], positions, xla_freq)

    def attend(q, with_window):
        visible = dataclasses.replace(rings, layer=jnp.where(with_window, rings.layer, -1))
        splits = attention_sums(_pad_heads(q), slots, positions, visible, entries, interpret=interpret)
        return jax.tree.map(lambda x: x[:, : q.shape[1]], _merge_splits(*splits))

    return _inverse_rope(attend_to_shards(attend, q, layer_value(sinks)), positions, inv_freq)


@with_kernel(_sparse_attention_kernel)
def sparse_attention(
    q: Float[Array, "T H D"],
    sinks: Float[Array, "H"] | LayerSlice,
    kv: AttentionKV,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    inv_freq: Float[Array, "P"] | None = None,
    context_parallel: bool = False,
    prefill: PrefillConfig = PrefillConfig(),
    implementation: str | None = None,
) -> Float[Array, "T H D"]:
    """Attends to each token's window and compressed entries (dsv4.md 2, 5).

    Scores are scaled by `D ** -0.5`; the sink is one more logit of the softmax, with no value. Entries whose tokens are
    also in the window are not excluded.

    The kernels take bfloat16 queries and rows of 448 + 64 dims in formats "v4" and "per_entry"; the one for prefills
    takes windows of a multiple of 64 tokens. They round weights before dividing by their sum, so that results differ
    from "xla" by about one part in 2 ** 8. A token's bits depend on T and K (or the block table's width), never on
    other tokens.

    Args:
      q: [T, H, D] queries after norm and RoPE, in the model's dtype.
      sinks: [H] float32 sink logits, which may be those of a layer in a stack.
      kv: the rows to attend to.
      slots, positions: [T] request slots and absolute positions; -1 = padding.
      inv_freq: [P] radians per token: the last 2 * P channels of results are rounded, rotated back by the token's
        position and rounded again (dsv4.md 2.2). None: no rotation.
      context_parallel: whether the entries are sharded over the axis "model"; q and sinks are then this device's heads.
      prefill: which calls use the prefill kernel.
      implementation: None, "xla", "mosaic_gpu" or "interpret".

    Returns:
      [T, H, D] in `q.dtype`; zeros for padding tokens.
    """
    if context_parallel:

        def attend(q, with_window):
            return _by_token(_softmax_sums, q, kv, slots, positions, with_window)

        out = attend_to_shards(attend, q, layer_value(sinks))
    else:
        out = _by_token(functools.partial(_attend_dense, sinks=sinks), q, kv, slots, positions, True)
    return _inverse_rope(out, positions, inv_freq)


def _inverse_rope(out, positions, inv_freq):
    return out if inv_freq is None else apply_rope(out, jnp.maximum(positions, 0), inv_freq, inverse=True)


def _by_token(attend_dense, q, kv, slots, positions, with_window):
    """Applies `attend_dense(q [H, D], rows [N, D], valid [N])` to each token and the rows that it sees."""
    window = kv.window
    compressed = kv.compressed
    new_kv = kv.new_kv
    if new_kv is not None:
        new_kv = window.codec.fake_quantize(new_kv, q.dtype)
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)

    def attend(token):
        q, slots, positions, tokens, starts, indices = jax.tree.map(lambda x: x[None], token)
        rows, valid = window_rows(window, slots, positions, tokens, starts, new_kv, q.dtype)
        valid = valid & with_window
        if compressed is not None:
            gather = functools.partial(gather_compressed_kv, compressed, indices, slots)
            if indices is None:
                gather = functools.partial(gather_all_compressed_kv, compressed, slots, positions)
            entries = gather(dtype=q.dtype, implementation="xla")
            rows, valid = (jnp.concatenate(pair, axis=1) for pair in zip((rows, valid), entries, strict=True))
        return attend_dense(q[0], rows[0], valid[0])

    inputs = q, slots, positions, tokens, run_bounds(slots)[0], kv.indices
    return jax.lax.map(attend, inputs, batch_size=min(QUERY_BLOCK, q.shape[0]))


def _attend_dense(q, rows, valid, sinks):
    """Attention of one token; weights are rounded to q's dtype before the product, as in the released model."""
    # The sink is part of the maximum, so that a token that sees no row divides 0 by 1, whatever the sink's value.
    out, largest, total = _softmax_sums(q, rows, valid, sinks)
    return round_to(out / (total + jnp.exp(sinks - largest))[:, None], q.dtype)


def _softmax_sums(q, rows, valid, least=LOWEST):
    """Returns (weighted sums [H, D], largest scores [H] but at least `least`, sums of weights [H]) of one token."""
    rows = rows.astype(jnp.float32)
    scores = jnp.einsum("hd,nd->hn", q.astype(jnp.float32), rows, precision="highest") * q.shape[-1] ** -0.5
    scores = jnp.where(valid[None, :], scores, -jnp.inf)
    largest = jnp.maximum(jnp.max(scores, axis=1, initial=-jnp.inf), least)
    weights = jnp.exp(scores - largest[:, None])
    out = jnp.einsum("hn,nd->hd", round_to(weights, q.dtype).astype(jnp.float32), rows, precision="highest")
    return out, largest, jnp.sum(weights, axis=1)


def _merge_splits(sums, stats):
    """Turns the KV splits of `attention_sums` into what `_softmax_sums` returns, for each token."""
    largest = stats[:, :, 0]
    totals = stats[:, :, 1]
    overall = jnp.max(largest, axis=1)
    factor = jnp.exp2(largest - overall[:, None])
    return jnp.sum(sums * factor[..., None], axis=1), overall * math.log(2), jnp.sum(totals * factor, axis=1)


def _pad_heads(x, multiple=None, axis=1):
    """Pads the heads to a multiple, by default to what the decode kernel takes."""
    # A device that shares a layer with others may have few heads.
    heads = x.shape[axis]
    padding = [(0, 0)] * x.ndim
    padding[axis] = 0, -heads % (multiple or (8 if heads < HEADS else HEADS))
    return jnp.pad(x, padding)
