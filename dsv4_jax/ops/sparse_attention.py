"""Attention over the sliding window and selected compressed entries, in one softmax with a sink."""

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
from dsv4_jax.ops.views import AttentionKV, int_range, run_bounds
from dsv4_jax.quant import LayerSlice, layer_stacks, layer_value, round_to
from pallas_kernels.sparse_attention import (
    HEADS,
    MAX_PAIRS,
    attention_sums,
    prefill_attention,
    sparse_attention as decode_attention,
)


# XLA computes this number of query tokens at a time. This bounds the memory for the rows that these tokens gather.
QUERY_BLOCK = 32
# This stands for the largest score of a token that sees no row. It is finite, so that the difference of two such values
# is not NaN.
LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """Heuristics that decide which calls use the prefill kernel.

    The prefill kernel dequantizes each row of a call once, instead of once for each token that reads the row. For this
    it holds the dequantized rows of all requests in memory.
    """

    min_tokens: int = 128  # minimum number of tokens
    # Maximum number of entries for which a call makes room, by default 272 MB. The call makes room for `max_runs`
    # requests, and for all entries that the block table of each can address.
    max_rows: int = (1 << 18) + (1 << 12)
    # Maximum number of these entries per token of the call. With more, writing the entries takes more time than the
    # prefill kernel saves.
    max_rows_per_token: int = 512

    def takes(self, kv: AttentionKV, tokens: int) -> bool:
        """Returns whether a call with `tokens` tokens uses the prefill kernel."""
        if kv.new_kv is None or tokens < self.min_tokens:
            return False
        max_rows = min(self.max_rows, self.max_rows_per_token * tokens)
        return kv.compressed is None or max_runs(kv.window, tokens) * kv.compressed.max_entries <= max_rows


def _sparse_attention_kernel(q, sinks, kv, slots, positions, inv_freq, *, context_parallel, prefill, interpret):
    """Computes `sparse_attention` with the prefill kernel, if the call is large enough, or with the decode kernel."""
    tokens, heads, _ = q.shape
    # The kernels can rotate up to `MAX_PAIRS` pairs of channels back, in multiples of 4. XLA rotates other numbers of
    # pairs, and also the output of decode attention over the entries of several devices.
    in_kernel = inv_freq is not None and len(inv_freq) <= MAX_PAIRS and len(inv_freq) % 4 == 0
    kernel_freq, xla_freq = (inv_freq, None) if in_kernel else (None, inv_freq)
    stack, layer = layer_stacks(sinks)
    padded = _pad_heads(q), _pad_heads(stack, axis=-1)
    if prefill.takes(kv, tokens):
        rows = dense_rows(kv, slots, positions, implementation="interpret" if interpret else "mosaic_gpu")
        if context_parallel:
            # A device holds zeros for the entries that lie on other devices, so the sum gathers all entries.
            rows = dataclasses.replace(rows, entries=jax.lax.psum(rows.entries, MODEL_AXIS))
        out = prefill_attention(*padded, rows, kernel_freq, layer=layer, interpret=interpret)
        return _inverse_rope(out[:, :heads], positions, xla_freq)

    rings = kv.window.for_kernels() if kv.new_kv is None else ring_of_call(kv.window, kv.new_kv, slots, positions)
    entries = None if kv.compressed is None else kv.compressed.for_kernels(kv.indices)
    if not context_parallel:
        out = decode_attention(*padded, slots, positions, rings, entries, kernel_freq, layer=layer, interpret=interpret)
        return _inverse_rope(out[:, :heads], positions, xla_freq)

    def attend(q, with_window):
        """Returns this device's sums for all heads, as `attend_to_shards` takes them."""
        # The kernel reads no window rows of layer -1.
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
    """Computes attention of each token over its sliding window and its compressed entries (docs/dsv4.md 2, 5).

    Scores are scaled by `D ** -0.5`. The sink is an additional logit of the softmax, without a value. An entry counts
    even if its tokens are also in the window.

    The kernels take bfloat16 queries, and rows of 512 dims in the formats "v4", "v41" and "per_entry". The prefill
    kernel also requires a window of a multiple of 64 tokens. Kernels and "xla" differ in how they round the weights of
    the softmax, so that results differ by about one part in 2 ** 8.

    The bits of a token's result depend on T, and on the number K of columns of `kv.indices`. Without `kv.indices`, they
    depend on the width of the block table instead of K. The bits never depend on the values of other tokens.

    Args:
      q: [T, H, D] queries after norm and RoPE, in the model's dtype.
      sinks: [H] float32 sink logits; an array or a `LayerSlice`.
      kv: the rows to attend to.
      slots, positions: [T] int32 request slots and absolute positions; -1 = padding.
      inv_freq: [P] float32, radians per token. The last 2 * P channels of the result are rotated back by the token's
        position, and rounded before and after (docs/dsv4.md 2.2). None: no rotation.
      context_parallel: whether the entries are sharded over the mesh axis "model". Then q and sinks are those of
        this device's heads.
      prefill: heuristics that decide whether to use the prefill kernel.
      implementation: None, "xla", "mosaic_gpu" or "interpret".

    Returns:
      [T, H, D] in the dtype of q; zeros for padding tokens.
    """
    if context_parallel:

        def attend(q, with_window):
            """Returns this device's sums for all heads, as `attend_to_shards` takes them."""
            return _by_token(_softmax_sums, q, kv, slots, positions, with_window)

        out = attend_to_shards(attend, q, layer_value(sinks))
    else:
        out = _by_token(functools.partial(_attend_dense, sinks=sinks), q, kv, slots, positions, True)
    return _inverse_rope(out, positions, inv_freq)


def _inverse_rope(out, positions, inv_freq):
    return out if inv_freq is None else apply_rope(out, jnp.maximum(positions, 0), inv_freq, inverse=True)


def _by_token(attend_dense, q, kv, slots, positions, with_window):
    """Calls `attend_dense(q [H, D], rows [N, D], valid [N])` for each token, with the rows that the token sees.

    The rows are those of the window, valid only if `with_window`, then the compressed entries.
    """
    window = kv.window
    compressed = kv.compressed
    new_kv = kv.new_kv
    if new_kv is not None:
        new_kv = window.codec.fake_quantize(new_kv, q.dtype)

    def attend(token):
        """Returns the output of one token; `token` is a tuple with this token's element of each array in `inputs`."""
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

    inputs = q, slots, positions, int_range(slots.shape[0]), run_bounds(slots)[0], kv.indices
    return jax.lax.map(attend, inputs, batch_size=min(QUERY_BLOCK, q.shape[0]))


def _attend_dense(q, rows, valid, sinks):
    """Computes one token's attention [H, D]: q [H, D] attends to those of the rows [N, D] that are `valid` [N].

    As in the released model, weights are rounded to the dtype of q before the product.
    """
    # `largest` is at least the sink. So a token that sees no row divides 0 by exp(0) = 1, whatever the sink is.
    out, largest, total = _softmax_sums(q, rows, valid, sinks)
    return round_to(out / (total + jnp.exp(sinks - largest))[:, None], q.dtype)


def _softmax_sums(q, rows, valid, least=LOWEST):
    """Computes one token's attention as `_attend_dense` does, but without the division by the sum of weights.

    Returns (out, largest, total). `out` [H, D] is the sum of the rows with weights `exp(score - largest)`. `largest`
    [H] is the largest score, but at least `least`. `total` [H] is the sum of the weights.
    """
    rows = rows.astype(jnp.float32)
    scores = jnp.einsum("hd,nd->hn", q.astype(jnp.float32), rows, precision="highest") * q.shape[-1] ** -0.5
    scores = jnp.where(valid[None, :], scores, -jnp.inf)
    largest = jnp.maximum(jnp.max(scores, axis=1, initial=-jnp.inf), least)
    weights = jnp.exp(scores - largest[:, None])
    out = jnp.einsum("hn,nd->hd", round_to(weights, q.dtype).astype(jnp.float32), rows, precision="highest")
    return out, largest, jnp.sum(weights, axis=1)


def _merge_splits(sums, stats):
    """Combines the KV splits of `attention_sums`. Returns the arrays of `_softmax_sums` with an axis of tokens.

    Args:
      sums: [T, splits, H, D] sums of weighted rows.
      stats: [T, splits, 2, H] largest scores, in units of log(2), and sums of weights.
    """
    largest = stats[:, :, 0]
    overall = jnp.max(largest, axis=1)
    factor = jnp.exp2(largest - overall[:, None])
    return jnp.sum(sums * factor[..., None], axis=1), overall * math.log(2), jnp.sum(stats[:, :, 1] * factor, axis=1)


def _pad_heads(x, axis=1):
    """Pads the axis of heads to a number of heads that the kernels take."""
    # A device may have few heads under tensor parallelism. The kernels then take multiples of 8.
    heads = x.shape[axis]
    padding = [(0, 0)] * x.ndim
    padding[axis] = 0, -heads % (8 if heads < HEADS else HEADS)
    return jnp.pad(x, padding)
