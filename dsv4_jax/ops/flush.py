"""Compression: state rows in, and for every window that closes one pooled, quantised entry out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.ops.dispatch import run
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.ops.views import ClassicalView, IndexerView, StateView, put, run_bounds, take
from dsv4_jax.quant import ordered_sum, round_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressorWeights:
    """The compressor's parameters that act after its projections.

    Attributes:
      position_bias: [rate, width] float32, added to the gate by position within the window (`ape`).
      norm_weight: [D] float32, of the RMS norm on the pooled entry.
      inv_freq: [rope dims / 2] float32, radians per token.
      eps: of the RMS norm.
    """

    position_bias: Any
    norm_weight: Any
    inv_freq: Any
    eps: float = dataclasses.field(metadata=dict(static=True))


def flush(
    state: StateView,
    pool: ClassicalView | IndexerView,
    kv: Float[Array, "T width"],
    gate: Float[Array, "T width"],
    weights: CompressorWeights,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    dtype=jnp.bfloat16,
    implementation: str | None = None,
) -> tuple[StateView, ClassicalView | IndexerView]:
    """Feeds this call's tokens to the compressor and stores the entries of the windows they close.

    For every token that closes a window (`(position + 1) % rate == 0`): a softmax over the window's rows, per channel
    and in float32, pools them to one vector, which is rounded to `dtype`, RMS-normed, rotated at the window's first
    position, quantised and scattered through the block table as entry `position // rate` (dsv4.md 3). With overlap
    (CSA) an entry pools 2 * rate rows: the first half of the channels of the previous window, the second half of its
    own; the first window has no previous one. Rotating the streams moves no bytes: the state is a ring addressed by
    position. Nothing depends on how tokens are split into calls.

    Args:
      state: the layer's compressor state.
      pool: where entries go: KV entries, or indexer keys (same maths, another format).
      kv: [T, width] float32 projections, width = D or 2 * D with overlap.
      gate: [T, width] float32 pooling logits, without position bias.
      weights: the compressor's parameters.
      slots: [T] request slots; -1 = padding: nothing is written.
      positions: [T] absolute positions; -1 = padding: nothing is written.
      dtype: the model's dtype, to which the pooled entry, the normed one and the rotated one are rounded.
      implementation: None (best available) or "xla".

    Returns:
      (state, pool) views with updated arrays.
    """
    return run("flush", {"xla": _flush_xla}, implementation, state, pool, kv, gate, weights, slots, positions, dtype)


def _flush_xla(state, pool, kv, gate, weights, slots, positions, dtype):
    rate = pool.compress_rate
    gate = gate + take(weights.position_bias, jnp.maximum(positions, 0) % rate)
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    start, end = run_bounds(slots)
    real = (slots >= 0) & (positions >= 0)

    # Each request closes at most one window more than its tokens fill, so few rows are pooled in a long call.
    most = min(tokens.shape[0], tokens.shape[0] // rate + state.kv.shape[1])
    closing = jnp.nonzero(real & ((positions + 1) % rate == 0), size=most, fill_value=-1)[0].astype(jnp.int32)
    closes = closing >= 0
    slot, position, first = (take(x, closing) for x in (slots, positions, start))
    pooled = _pool_windows(state, kv, gate, closing, slot, position, first, rate)
    # The rings are read above and written below: tie the order down, or XLA keeps a copy of them for the reads.
    kv, gate, pooled = jax.lax.optimization_barrier((kv, gate, pooled))
    values = _finish_entry(pooled, jnp.where(closes, position // rate * rate, 0), weights, dtype)
    pool = pool.write(slot, position // rate, closes, values)
    keep = real & (end - tokens <= state.ring)
    index = (state.layer, slots, jnp.maximum(positions, 0) % state.ring)
    new_kv, new_gate = put((state.kv, state.gate), (kv, gate), keep, *index)
    return dataclasses.replace(state, kv=new_kv, gate=new_gate), pool


def _pool_windows(state, kv, gate, closing, slot, position, first, rate):
    """[n, D] pooled vectors of the windows that end at `position`, rows from this call or from the ring."""
    rows = 2 * rate if state.overlap else rate
    back = jnp.arange(rows - 1, -1, -1, dtype=jnp.int32)[None, :]
    source, index = position[:, None] - back, closing[:, None] - back
    in_call = (index >= first[:, None])[..., None]
    ring = (jnp.broadcast_to(slot[:, None], source.shape), jnp.maximum(source, 0) % state.ring)

    def half(new, old):
        new, old = take(new, index), take(old, state.layer, *ring)
        value = jnp.where(in_call, new, old)
        if not state.overlap:
            return value
        width = value.shape[-1] // 2
        return jnp.concatenate([value[:, :rate, :width], value[:, rate:, width:]], axis=1)

    before_start = (source < 0)[..., None]
    logits = jnp.where(before_start, -jnp.inf, half(gate, state.gate))
    values = jnp.where(before_start, 0.0, half(kv, state.kv))
    weight = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    weight = weight / ordered_sum(weight, axis=1)[:, None, :]
    return ordered_sum(weight * values, axis=1)


def _finish_entry(pooled, position, weights, dtype):
    """Rounding, RMS norm and RoPE; the roundings decide whether entries equal the released model's (dsv4.md 7.3)."""
    pooled = round_to(pooled, dtype).astype(jnp.float32)
    mean_square = ordered_sum(pooled * pooled, axis=1) / pooled.shape[1]
    normed = weights.norm_weight[None, :] * (pooled * jax.lax.rsqrt(mean_square + weights.eps)[:, None])
    return apply_rope(round_to(normed, dtype), position, weights.inv_freq)
