"""Compression of tokens to entries: every window of `rate` tokens is pooled to one quantized entry when it is complete.

`flush` also stores the tokens' projections as state rows, for windows that a later call completes. It consists of two
halves, which a GPU runs in one launch. `pool_windows` stores state rows, and pools and norms complete windows.
`write_entries` rotates, quantizes and stores the pooled vectors. Models that make index keys from the pooled vectors
call the two halves separately.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.common.arguments import check_dtype
from dsv4_jax.ops.dispatch import check_bfloat16, with_kernel
from dsv4_jax.ops.rope import apply_rope
from dsv4_jax.ops.views import ClassicalView, IndexerView, StateView, int_range, put_in_rings, run_bounds, take
from dsv4_jax.quant import layer_stacks, ordered_sum, round_to
from pallas_kernels.flush import (
    CompressorOperands,
    flush as flush_kernel,
    pool_windows as pool_windows_kernel,
    write_entries as write_entries_kernel,
)
from pallas_kernels.formats import exact_math
from pallas_kernels.formats.exact_math import product
from pallas_kernels.formats.layouts import quantized
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


@pytree_dataclass
class CompressorWeights:
    """The parameters of a compressor, besides its projections.

    Attributes:
      position_bias: [rate, width] float32, an array or a `LayerSlice`. Row i is added to the gate of the i-th token of
        a window (`ape` in the release). None = no bias.
      norm_weight: [D] float32 weight of the RMS norm; an array or a `LayerSlice`.
      inv_freq: [rope dims / 2] float32, radians per token.
      eps: epsilon of the RMS norm.
    """

    position_bias: Any
    norm_weight: Any
    inv_freq: Any
    eps: float = static_field()


@pytree_dataclass
class ClosedWindows:
    """The windows that the tokens of a call complete, each pooled to one vector.

    Attributes:
      values: [n, D] vectors in the model's dtype, after the RMS norm and before RoPE.
      slots: [n] int32 request slots.
      entries: [n] int32 index of each window's entry within the request; -1 = no window, so that the row is ignored.
    """

    values: Any
    slots: Any
    entries: Any


class CompressorInputs(NamedTuple):
    """The inputs of one compressor in a call: its parameters, its pools, and projections of the tokens.

    Attributes:
      state: the layer's compressor state, a ring buffer addressed by position.
      pool: pool that gets the entries, which are KV entries or indexer keys.
      kv: [T, width] float32 projections; the width is D, or with overlap 2 * D.
      gate: [T, width] float32 pooling logits, without position bias; None if a window is a single token.
      weights: the compressor's parameters.
    """

    state: StateView
    pool: ClassicalView | IndexerView
    kv: Float[Array, "T width"]
    gate: Float[Array, "T width"] | None
    weights: CompressorWeights


def _flush_kernel(compressors, slots, positions, *, dtype, max_query_tokens, interpret, config=None):
    """Computes `flush` with a kernel, for all compressors together."""
    check_bfloat16(dtype)
    stacks, layer = layer_stacks([(weights.position_bias, weights.norm_weight) for *_, weights in compressors])
    operands = []
    for (state, pool, kv, gate, weights), (position_bias, norm_weight) in zip(compressors, stacks, strict=True):
        windows = _windows(state, kv, gate, position_bias, norm_weight, weights.eps)
        operands.append(_with_entries(windows, pool, weights.inv_freq))
    written = flush_kernel(
        tuple(operands),
        slots,
        positions,
        layer=layer,
        max_query_tokens=max_query_tokens,
        config=config,
        interpret=interpret,
    )
    return [
        (_with_states(state, new_kv, new_gate), _with_pools(pool, pools))
        for (state, pool, *_), (new_kv, new_gate, pools) in zip(compressors, written, strict=True)
    ]


def _windows(state, kv, gate, position_bias, norm_weight, eps):
    """Returns the kernel's operands for pooling windows, without the operands for storing entries."""
    is_pooled = state.kv is not None
    return CompressorOperands(
        kv=kv,
        gate=gate if is_pooled else None,
        position_bias=position_bias if is_pooled else None,
        norm_weight=norm_weight,
        state_layer=jnp.asarray(state.layer, jnp.int32),
        state_kv=state.kv,
        state_gate=state.gate,
        rate=state.compress_rate,
        eps=eps,
        overlap=state.overlap,
    )


def _with_entries(operands, pool, inv_freq):
    """Returns `operands`, completed by the operands that the kernel needs to store entries in `pool`."""
    return dataclasses.replace(
        operands,
        inv_freq=inv_freq,
        block_table=pool.block_table,
        pool_layer=jnp.asarray(pool.layer, jnp.int32),
        pools=tuple(vars(pool.rows).values()),
        layout=quantized(pool.codec.layout),
        rate=pool.compress_rate,
    )


def _with_pools(pool, pools):
    return dataclasses.replace(pool, rows=type(pool.rows)(*pools))


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
    """Feeds tokens to compressors, and stores an entry for each window that they complete.

    A token completes a window if `(position + 1) % rate == 0`. The window's rows are pooled to one vector by a softmax
    over the rows, for each channel and in float32. The vector is rounded to `dtype`, RMS-normed, rotated by the
    window's first position, quantized and stored as entry `position // rate` (docs/dsv4.md 3).

    With overlap (in CSA layers), rows have 2 * D channels. An entry then pools the second D channels of its own
    window's rows, and the first D channels of the previous window's rows if there is such a window.

    The stored bytes do not depend on how tokens are split into calls.

    Args:
      compressors: compressors that see the same tokens and share a launch, such as the two of a CSA layer.
      slots: [T] int32 request slots; -1 = padding, for which nothing is written.
      positions: [T] int32 absolute positions; -1 = padding.
      dtype: the model's dtype, to which vectors are rounded after pooling, norm and rotation.
      max_query_tokens: maximum number of tokens of a request in the call, or None if it is not known. A known maximum
        can save a launch, and changes no byte.
      implementation: None for the best one available, or "xla", "mosaic_gpu", "interpret".

    Returns:
      (updated state, updated pool) of each compressor.

    Raises:
      TypeError: `kv` or `gate` is not float32.
    """
    results = []
    for state, pool, kv, gate, weights in compressors:
        closed, state = pool_windows(
            state, kv, gate, weights, slots, positions, dtype=dtype, implementation=implementation
        )
        results.append((state, write_entries(pool, closed, weights.inv_freq, implementation=implementation)))
    return results


def _pool_windows_kernel(state, kv, gate, weights, slots, positions, *, dtype, max_query_tokens, interpret):
    """Computes `pool_windows` with a kernel."""
    check_bfloat16(dtype)
    (position_bias, norm_weight), layer = layer_stacks((weights.position_bias, weights.norm_weight))
    operands = _windows(state, kv, gate, position_bias, norm_weight, weights.eps)
    closing = _closing_tokens(state, slots, positions)
    count = closing.shape[0]
    rows = None  # row of the results for the window that each token completes; None = row t for token t
    if count < slots.shape[0]:
        rows = jnp.cumsum(_closes_window(state, slots, positions), dtype=jnp.int32) - 1
    values, *states = pool_windows_kernel(
        operands,
        slots,
        positions,
        rows,
        count=count,
        max_query_tokens=max_query_tokens,
        layer=layer,
        interpret=interpret,
    )
    return _closed_windows(state, values, closing, slots, positions), _with_states(state, *states)


@with_kernel(_pool_windows_kernel)
def pool_windows(
    state: StateView,
    kv: Float[Array, "T width"],
    gate: Float[Array, "T width"] | None,
    weights: CompressorWeights,
    slots: Int[Array, "T"],
    positions: Int[Array, "T"],
    *,
    dtype=jnp.bfloat16,
    max_query_tokens: int | None = None,
    implementation: str | None = None,
) -> tuple[ClosedWindows, StateView]:
    """Runs the first half of `flush`: pools and norms complete windows, and stores the tokens' state rows.

    If the state has no arrays, a window is a single token. Then nothing is pooled or stored, and the gate is not used.

    Args:
      state, kv, gate, weights: as in `CompressorInputs`.
      slots, positions, dtype, max_query_tokens, implementation: as in `flush`.

    Returns:
      (complete windows, updated state). The `ClosedWindows` have n rows, with n = `T // rate` plus the number of slots,
      but at most T. If n is T, row t is for the window that token t completes. Rows without a window have entry -1 and
      unspecified values.
    """
    check_dtype("kv", kv, "float32")
    if gate is not None:
        check_dtype("gate", gate, "float32")
    closing = _closing_tokens(state, slots, positions)
    if state.kv is None:
        return _closed_windows(state, _norm(kv, weights, dtype), closing, slots, positions), state
    if weights.position_bias is not None:
        gate = gate + take(weights.position_bias, jnp.maximum(positions, 0) % state.compress_rate)
    start, _ = run_bounds(slots)
    slot, position, run_start = (take(x, closing) for x in (slots, positions, start))
    pooled = _pool_windows(state, kv, gate, closing, slot, position, run_start)
    # The barrier orders the reads of the rings above before the writes below. Otherwise XLA copies the rings.
    kv, gate, pooled = jax.lax.optimization_barrier((kv, gate, pooled))
    closed = _closed_windows(state, _norm(pooled, weights, dtype), closing, slots, positions)
    rings = put_in_rings((state.kv, state.gate), (kv, gate), state.layer, slots, positions)
    return closed, _with_states(state, *rings)


def _with_states(state, kv, gate):
    return dataclasses.replace(state, kv=kv, gate=gate)


def _closes_window(state, slots, positions):
    """Returns [T] bool, whether each token completes a window."""
    return (slots >= 0) & (positions >= 0) & ((positions + 1) % state.compress_rate == 0)


def _closing_tokens(state, slots, positions):
    """Returns the index of the token that completes each window, [n] int32 as in `pool_windows`; -1 = no window."""
    closes = _closes_window(state, slots, positions)
    tokens = slots.shape[0]
    # A request with t tokens completes at most t // rate + 1 windows.
    size = tokens if state.kv is None else min(tokens, tokens // state.compress_rate + state.kv.shape[1])
    if size == tokens:
        return jnp.where(closes, int_range(tokens), -1)
    return jnp.nonzero(closes, size=size, fill_value=-1)[0].astype(jnp.int32)


def _closed_windows(state, values, closing, slots, positions):
    """Returns ClosedWindows with these values for the windows that the tokens `closing` complete."""
    entries = jnp.where(closing >= 0, take(positions, closing) // state.compress_rate, -1)
    return ClosedWindows(values, take(slots, closing), entries)


def _write_entries_kernel(pool, closed, inv_freq, *, interpret):
    operands = _with_entries(CompressorOperands(closed.values), pool, inv_freq)
    return _with_pools(pool, write_entries_kernel(operands, closed.slots, closed.entries, interpret=interpret))


@with_kernel(_write_entries_kernel)
def write_entries(
    pool: ClassicalView | IndexerView,
    closed: ClosedWindows,
    inv_freq: Float[Array, "P"],
    *,
    implementation: str | None = None,
) -> ClassicalView | IndexerView:
    """Runs the second half of `flush`: rotates, quantizes and stores pooled vectors. Returns the updated pool.

    Args:
      pool: pool that gets the entries.
      closed: the result of `pool_windows`, or other vectors for the same windows.
      inv_freq: [P] float32, radians per token. The last 2 * P channels are rotated by the window's first position.
      implementation: as in `flush`.

    Raises:
      TypeError: `closed.values` is neither bfloat16 nor float32.
    """
    check_dtype("closed.values", closed.values, "bfloat16", "float32")
    window_starts = jnp.maximum(closed.entries, 0) * pool.compress_rate
    values = apply_rope(closed.values, window_starts, inv_freq, deterministic=True)
    return pool.write(closed.slots, closed.entries, closed.entries >= 0, values)


def _pool_windows(state, kv, gate, closing, slot, position, run_start):
    """Pools the windows that end at `position` to vectors [n, D]. With overlap, a window has `2 * rate` rows.

    The row of a token of this call comes from `kv` and `gate`, the row of an earlier token from the state's ring.

    Args:
      state, kv, gate: as in `CompressorInputs`, `gate` with the position bias.
      closing: [n] index in the call of the last token of each window; -1 = none.
      slot, position: [n] slot and position of the last token of each window.
      run_start: [n] index of the first token of the window's request in the call.
    """
    rate = state.compress_rate
    rows = 2 * rate if state.overlap else rate
    distance = int_range(rows - 1, -1, -1)[None, :]
    row_position = position[:, None] - distance
    index = closing[:, None] - distance
    in_call = (index >= run_start[:, None])[..., None]
    ring_index = (slot[:, None], jnp.maximum(row_position, 0) % state.ring)

    def window_values(new, old):
        """Returns the values [n, rows, D] to pool, from the call's rows and from a ring."""
        new = take(new, index)
        old = take(old, state.layer, *ring_index)
        value = jnp.where(in_call, new, old)
        if not state.overlap:
            return value
        width = value.shape[-1] // 2
        return jnp.concatenate([value[:, :rate, :width], value[:, rate:, width:]], axis=1)

    before_start = (row_position < 0)[..., None]
    logits = jnp.where(before_start, -jnp.inf, window_values(gate, state.gate))
    # In rows without a window, all logits may be -inf. The softmax then has NaN derivatives, which no later mask
    # removes.
    logits = jnp.where((closing >= 0)[:, None, None], logits, 0.0)
    values = jnp.where(before_start, 0.0, window_values(kv, state.kv))
    return _softmax_pool(logits, values)


def _softmax_pool(logits, values):
    """Pools [n, rows, D] to [n, D]. Like the kernel, it sums over the rows of each chunk, then over chunks."""
    n, rows, dim = logits.shape
    chunks = exact_math.CHUNKS if rows > exact_math.MAX_SHORT else 1
    padding = [(0, 0), (0, -rows % chunks), (0, 0)]
    logits = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(n, chunks, -1, dim)
    values = jnp.pad(values, padding).reshape(n, chunks, -1, dim)
    # The maximum of a chunk that is all padding is made finite, because -inf - (-inf) below would be NaN.
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
    """Applies the RMS norm, and rounds where the released model does (docs/dsv4.md 7.3)."""
    pooled = round_to(pooled, dtype).astype(jnp.float32)
    mean_square = product(_sum_channels(product(pooled, pooled)), jnp.float32(1 / pooled.shape[1]))
    normed = weights.norm_weight[None, :] * (pooled * exact_math.inverse_sqrt(mean_square + weights.eps)[:, None])
    return round_to(normed, dtype)


def _sum_channels(x):
    """Sums [n, D] to [n] in the kernel's order: over the channels of each slice, then over slices."""
    slices = x.shape[1] // exact_math.SLICE if x.shape[1] % exact_math.SLICE == 0 else 1
    return ordered_sum(ordered_sum(x.reshape(x.shape[0], slices, -1), axis=2), axis=1)
