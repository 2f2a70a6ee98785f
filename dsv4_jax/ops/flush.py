"""Compression of tokens: stores their state rows, and one pooled, quantized entry for every window that closes.

`flush` does both halves, on a GPU in one launch. As ops of their own, `pool_windows` pools and norms the windows that
close, and `write_entries` rotates, quantizes and stores the results.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.common.arguments import check_dtype
from dsv4_jax.ops.dispatch import with_kernel
from dsv4_jax.ops.rope import apply_rope_deterministic
from dsv4_jax.ops.views import ClassicalView, IndexerView, StateView, put, run_bounds, take
from dsv4_jax.quant import layer_stacks, layer_value, ordered_sum, round_to
from pallas_kernels.flush import flush as flush_kernel
from pallas_kernels.flush.operands import CompressorOperands
from pallas_kernels.formats import exact_math
from pallas_kernels.formats.exact_math import product
from pallas_kernels.formats.layouts import quantized
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@pytree_dataclass
class CompressorWeights:
    """The compressor's parameters that act after its projections; position_bias and norm_weight may be a `LayerSlice`.

    Attributes:
      position_bias: [rate, width] float32, added to the gate by position in the window (`ape`), or None.
      norm_weight: [D] float32 weight of the RMS norm.
      inv_freq: [rope dims / 2] float32, radians per token.
      eps: epsilon of the RMS norm.
    """

    position_bias: Any
    norm_weight: Any
    inv_freq: Any
    eps: float = static_field()


@pytree_dataclass
class ClosedWindows:
    """The windows that a call closes, each pooled to one vector.

    Attributes:
      values: [n, D] vectors in the model's dtype, after the RMS norm and before RoPE.
      slots: [n] int32 request slots.
      entries: [n] int32 entry numbers; -1 = none.
    """

    values: Any
    slots: Any
    entries: Any


class CompressorInputs(NamedTuple):
    """A compressor and what it does with the tokens of a call.

    Attributes:
      state: the layer's compressor state, a ring addressed by position.
      pool: destination, either KV entries or indexer keys.
      kv: [T, width] float32 projections, width = D or 2 * D with overlap.
      gate: [T, width] float32 pooling logits, without position bias; None if a window is a single token.
      weights: the compressor's parameters.
    """

    state: StateView
    pool: ClassicalView | IndexerView
    kv: Float[Array, "T width"]
    gate: Float[Array, "T width"] | None
    weights: CompressorWeights


def _flush_kernel(compressors, slots, positions, *, dtype, max_query_tokens, interpret, config=None):
    if jnp.dtype(dtype) != jnp.bfloat16:
        raise NotImplementedError(f"the flush kernel rounds entries to bfloat16, not {jnp.dtype(dtype).name}")
    stacks, layer = layer_stacks([(weights.position_bias, weights.norm_weight) for *_, weights in compressors])
    operands = []
    for (state, pool, kv, gate, weights), (position_bias, norm_weight) in zip(compressors, stacks, strict=True):
        if state.kv is None or position_bias is None:
            raise NotImplementedError("the flush kernel takes compressors with a state and a position bias")
        arrays = position_bias, norm_weight, weights.inv_freq, pool.block_table
        layers = jnp.asarray(state.layer, jnp.int32), jnp.asarray(pool.layer, jnp.int32)
        pools = tuple(jax.tree.leaves(pool.rows))
        layout = quantized(pool.layout)
        states = state.kv, state.gate
        operands.append(
            CompressorOperands(kv, gate, *arrays, *layers, *states, pools, layout, weights.eps, state.overlap)
        )
    results = []
    options = {"max_query_tokens": max_query_tokens, "config": config, "interpret": interpret}
    written = flush_kernel(tuple(operands), slots, positions, layer=layer, **options)
    for (state, pool, *_), (new_kv, new_gate, leaves) in zip(compressors, written, strict=True):
        rows = jax.tree.unflatten(jax.tree.structure(pool.rows), leaves)
        results.append((dataclasses.replace(state, kv=new_kv, gate=new_gate), dataclasses.replace(pool, rows=rows)))
    return results


@with_kernel(_flush_kernel)
def flush(
    compressors: Sequence[CompressorInputs],
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    dtype=jnp.bfloat16,
    max_query_tokens: int | None = None,
    implementation: str | None = None,
) -> list[tuple[StateView, ClassicalView | IndexerView]]:
    """Feeds tokens to compressors and stores the entries of the windows that they close; returns the updated views.

    A token closes a window if `(position + 1) % rate == 0`. A softmax over the window's rows, per channel and in
    float32, pools them to one vector. It is rounded to `dtype`, RMS-normed, rotated at the window's first position,
    quantized and stored as entry `position // rate` (dsv4.md 3). With overlap (CSA) an entry also pools the previous
    window, if there is one: the first half of its channels with the second half of the own window's. The bytes do not
    depend on how tokens are split into calls.

    Args:
      compressors: one or several that see the same tokens, such as the two of a CSA layer, which share a launch.
      slots: [T] request slots; -1 = padding, for which nothing is written.
      positions: [T] absolute positions; -1 = padding.
      dtype: the model's dtype, to which pooled, normed and rotated vectors are rounded.
      max_query_tokens: maximum number of tokens per request, or None. It saves a launch and changes no byte.
      implementation: None for the best one available, or "xla", "mosaic_gpu", "interpret".
    """
    for _, _, kv, gate, _ in compressors:
        _check_inputs(kv, gate)
    results = []
    for state, pool, kv, gate, weights in compressors:
        closed, state = pool_windows(state, kv, gate, weights, slots, positions, dtype=dtype)
        results.append((state, write_entries(pool, closed, weights.inv_freq)))
    return results


def pool_windows(
    state: StateView,
    kv: Float[Array, "T width"],
    gate: Float[Array, "T width"] | None,
    weights: CompressorWeights,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    dtype=jnp.bfloat16,
) -> tuple[ClosedWindows, StateView]:
    """Runs the first half of `flush`: pools and norms the windows that close, and stores the tokens' state rows.

    Returns the windows, at most `T // rate` and one more per slot, and the updated state. If the state has no arrays, a
    window is a single token: nothing is pooled or stored, and no gate is needed.

    Args:
      state, kv, gate, weights: as in `CompressorInputs`.
      slots, positions, dtype: as in `flush`.
    """
    _check_inputs(kv, gate)
    rate = state.compress_rate
    weights = layer_value(weights)
    if state.kv is None:
        entries = jnp.where((slots >= 0) & (positions >= 0), positions, -1)
        return ClosedWindows(_norm(kv, weights, dtype), slots, entries), state
    if weights.position_bias is not None:
        gate = gate + take(weights.position_bias, jnp.maximum(positions, 0) % rate)
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    start, end = run_bounds(slots)
    real = (slots >= 0) & (positions >= 0)

    # A request closes at most one window more than its tokens fill.
    size = min(tokens.shape[0], tokens.shape[0] // rate + state.kv.shape[1])
    closing = jnp.nonzero(real & ((positions + 1) % rate == 0), size=size, fill_value=-1)[0].astype(jnp.int32)
    slot, position, run_start = (take(x, closing) for x in (slots, positions, start))
    pooled = _pool_windows(state, kv, gate, closing, slot, position, run_start)
    # Orders the reads of the rings above before the writes below; otherwise XLA copies the rings.
    kv, gate, pooled = jax.lax.optimization_barrier((kv, gate, pooled))
    closed = ClosedWindows(_norm(pooled, weights, dtype), slot, jnp.where(closing >= 0, position // rate, -1))
    keep = real & (end - tokens <= state.ring)
    index = (state.layer, slots, jnp.maximum(positions, 0) % state.ring)
    new_kv, new_gate = put((state.kv, state.gate), (kv, gate), keep, *index)
    return closed, dataclasses.replace(state, kv=new_kv, gate=new_gate)


def write_entries(
    pool: ClassicalView | IndexerView, closed: ClosedWindows, inv_freq: Float[Array, "P"]
) -> ClassicalView | IndexerView:
    """Runs the second half of `flush`: rotates, quantizes and stores vectors; returns the pool with updated rows.

    Args:
      pool: destination.
      closed: the result of `pool_windows`, or other vectors for the same windows.
      inv_freq: [P] radians per token; rotates the last 2 * P channels by each window's first position.
    """
    check_dtype("closed.values", closed.values, "bfloat16", "float32")
    window_starts = jnp.maximum(closed.entries, 0) * pool.compress_rate
    values = apply_rope_deterministic(closed.values, window_starts, inv_freq)
    return pool.write(closed.slots, closed.entries, closed.entries >= 0, values)


def _check_inputs(kv, gate):
    check_dtype("kv", kv, "float32")
    if gate is not None:
        check_dtype("gate", gate, "float32")


def _pool_windows(state, kv, gate, closing, slot, position, run_start):
    """Pools the windows that end at `position`, with rows from the call or the ring, to vectors [n, D]."""
    rate = state.compress_rate
    rows = 2 * rate if state.overlap else rate
    back = jnp.arange(rows - 1, -1, -1, dtype=jnp.int32)[None, :]
    source = position[:, None] - back
    index = closing[:, None] - back
    in_call = (index >= run_start[:, None])[..., None]
    ring = (jnp.broadcast_to(slot[:, None], source.shape), jnp.maximum(source, 0) % state.ring)

    def half(new, old):
        new = take(new, index)
        old = take(old, state.layer, *ring)
        value = jnp.where(in_call, new, old)
        if not state.overlap:
            return value
        width = value.shape[-1] // 2
        return jnp.concatenate([value[:, :rate, :width], value[:, rate:, width:]], axis=1)

    before_start = (source < 0)[..., None]
    logits = jnp.where(before_start, -jnp.inf, half(gate, state.gate))
    # Rows without a window may find -inf alone, where derivatives are NaN. A later mask would not remove them.
    logits = jnp.where((closing >= 0)[:, None, None], logits, 0.0)
    values = jnp.where(before_start, 0.0, half(kv, state.kv))
    return _softmax_pool(logits, values)


def _softmax_pool(logits, values):
    """Pools [n, rows, D] to [n, D] in the kernel's order: the rows of each chunk, then the chunks."""
    n, rows, dim = logits.shape
    chunks = exact_math.CHUNKS if rows > exact_math.MAX_SHORT else 1
    padding = [(0, 0), (0, -rows % chunks), (0, 0)]
    logits = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(n, chunks, -1, dim)
    values = jnp.pad(values, padding).reshape(n, chunks, -1, dim)
    # The peak of a chunk of padding is finite, so that no infinities are subtracted.
    peak = jnp.maximum(jnp.max(logits, axis=2), exact_math.LOWEST)
    weight = exact_math.exp_negative(logits - peak[:, :, None])
    total = ordered_sum(product(weight, values), axis=2)
    weight = ordered_sum(weight, axis=2)
    if chunks == 1:
        return total[:, 0] * exact_math.reciprocal(weight[:, 0])
    factor = exact_math.exp_negative(peak - jnp.max(peak, axis=1, keepdims=True))
    weight, total = (ordered_sum(product(factor, x), axis=1) for x in (weight, total))
    return total * exact_math.reciprocal(weight)


def _norm(pooled, weights, dtype):
    """Applies the RMS norm with the released model's roundings (dsv4.md 7.3)."""
    pooled = round_to(pooled, dtype).astype(jnp.float32)
    mean_square = product(_sum_channels(product(pooled, pooled)), jnp.float32(1 / pooled.shape[1]))
    normed = weights.norm_weight[None, :] * (pooled * exact_math.inverse_sqrt(mean_square + weights.eps)[:, None])
    return round_to(normed, dtype)


def _sum_channels(x):
    """Sums [n, D] to [n]: the channels of each slice, then the slices."""
    slices = x.shape[1] // exact_math.SLICE if x.shape[1] % exact_math.SLICE == 0 else 1
    return ordered_sum(ordered_sum(x.reshape(x.shape[0], slices, -1), axis=2), axis=1)
