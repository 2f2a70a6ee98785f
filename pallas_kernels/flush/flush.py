"""Flush: stores the state rows of tokens, and a pooled, quantized entry for every window that closes.

    entry = rope(norm(sum_r softmax_r(gate[r] + bias[r]) * kv[r])) over the rows r of the window, for each channel

A window is `rate` consecutive tokens of a request. If windows overlap, a window also includes the `rate` preceding
tokens. A window closes at its last token. The row of a token is the token's kv and gate. The rows of the call's tokens
are operands. The rows of tokens of earlier calls are in the request's ring of state rows. Entries are stored by one of
two kernels:

  * `short_windows`, for windows of at most 16 rows: each warpgroup pools whole windows.
  * `long_windows`, for windows of more than 16 rows: the blocks of a cluster pool chunks of a window.

The same launch also stores the state rows, if no token of the call overwrites a row of a ring that the launch reads.
Otherwise a second launch stores the state rows, see `states`.

`pool_windows` and `write_entries` are the two halves of a flush, for models that make index keys from the pooled
vectors. The first half ends with the norm, and the second half begins with the rotation. Both launch kernels of
`short_windows`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.flush import long_windows, short_windows, states
from pallas_kernels.flush.operands import CompressorOperands, Config, FlushCall
from pallas_kernels.formats.exact_math import MAX_SHORT
from pallas_kernels.runtime.checks import check_array, check_rules, check_tokens
from pallas_kernels.runtime.layer_operands import layer_operand
from pallas_kernels.runtime.lowering_cache import cached_trace


@cached_trace("max_query_tokens", "config", writes=True)
def flush(
    compressors: tuple[CompressorOperands, ...],
    slots: jax.Array,
    positions: jax.Array,
    *,
    layer: jax.Array | None = None,
    max_query_tokens: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> list[tuple[jax.Array, jax.Array, tuple[Any, ...]]]:
    """Stores the state rows of a call's tokens and the entries of the windows that close, in place.

    Args:
      compressors: one compressor, or several compressors with windows of at most 16 rows, which share a launch.
      slots: [T] int32, each token's request slot; -1 = padding. The tokens of a slot are adjacent and in order.
      positions: [T] int32, each token's position in its request; -1 = padding. Positions of a slot are consecutive.
      layer: [] int32, index of this layer if every compressor's `position_bias` and `norm_weight` are stacks; None if
        they are single weights.
      max_query_tokens: maximum number of tokens of a slot in the call; None for T. A single launch is enough if every
        compressor's ring has at least `max_query_tokens - 1` more rows than a window.
      config: tuning choices, or None for `Config()`.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      The updated (state_kv, state_gate, pools) of each compressor.

    Raises:
      NotImplementedError: a layout, a shape or a dtype is not supported, or one of several compressors has windows of
        more than 16 rows.
    """
    for c in compressors:
        c.check_windows(layer)
        c.check_entries(interpret)
        check_rules(
            {
                "windows with a state": c.state_kv is not None,
                f"windows of {c.rows} rows with a position bias": c.position_bias is not None or not c.is_long,
            }
        )
    if len(compressors) > 1 and any(c.is_long for c in compressors):
        raise NotImplementedError("the flush kernel takes windows of more than 16 rows of one compressor only")
    tokens = slots.shape[0]
    if tokens == 0:
        return [(c.state_kv, c.state_gate, c.pools) for c in compressors]
    max_tokens = tokens if max_query_tokens is None else max_query_tokens
    refs = [c.in_place() for c in compressors]
    call = FlushCall(refs, slots, positions, layer_operand(layer), max_tokens, config or Config(), interpret)
    if compressors[0].is_long:
        long_windows.store_entries(call)
    else:
        short_windows.pool_windows(call)
    if not call.with_states:
        states.store_state_rows(call)
    return [c.freeze(ref) for c, ref in zip(compressors, refs, strict=True)]


@cached_trace("count", "max_query_tokens", "config", writes=True)
def pool_windows(
    compressor: CompressorOperands,
    slots: jax.Array,
    positions: jax.Array,
    rows: jax.Array | None,
    *,
    count: int,
    layer: jax.Array | None = None,
    max_query_tokens: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, Any, Any]:
    """Stores the state rows of a call's tokens, in place, and returns the normed vectors of the windows that close.

    Args:
      compressor: the compressor, with windows of at most 16 rows.
      rows: [T] int32. If token t closes a window, the window's vector is stored in row `rows[t]` of the result, which
        must be below `count`. If `rows` is None, the vector is stored in row t.
      count: number of rows in the result.
      slots, positions, layer, max_query_tokens, config, interpret: as in `flush`.

    Returns:
      (vectors [count, D] bfloat16, state_kv, state_gate). Rows that get no vector are unspecified.

    Raises:
      NotImplementedError: a shape or a dtype is not supported.
    """
    c = compressor
    c.check_windows(layer)
    check_rules({f"windows of at most {MAX_SHORT} rows, got {c.rows}": not c.is_long})
    tokens = slots.shape[0]
    check_tokens(tokens, slots=slots, positions=positions)
    results = jax.ShapeDtypeStruct((count, c.dim), jnp.bfloat16)
    if count == 0:
        return jnp.zeros(results.shape, results.dtype), c.state_kv, c.state_gate
    max_tokens = tokens if max_query_tokens is None else max_query_tokens
    ref = c.in_place()
    options = layer_operand(layer), max_tokens, config or Config(), interpret
    call = FlushCall([ref], slots, positions, *options, results, rows)
    (values,) = short_windows.pool_windows(call)
    if c.state_kv is not None and not call.with_states:
        states.store_state_rows(dataclasses.replace(call, results=None, result_rows=None))
    state_kv, state_gate, _ = c.freeze(ref)
    return values, state_kv, state_gate


@cached_trace("config", writes=True)
def write_entries(
    compressor: CompressorOperands,
    slots: jax.Array,
    entries: jax.Array,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[Any, ...]:
    """Rotates, quantizes and stores vectors as entries, in place.

    Args:
      compressor: the operands, with vectors [n, D] bfloat16 in `kv`.
      slots: [n] int32, the request slot of each vector; -1 = nothing is stored.
      entries: [n] int32, index of the entry that each vector becomes, among the entries of the request; -1 = nothing is
        stored.
      config, interpret: as in `flush`.

    Returns:
      The updated pools.

    Raises:
      NotImplementedError: a layout, a shape or a dtype is not supported.
    """
    c = compressor
    c.check_entries(interpret)
    check_array("vectors", c.kv, jnp.bfloat16, None, None)
    check_rules({f"entries of 128, 256 or 512 channels, got {c.dim}": c.dim in (128, 256, 512)})
    check_tokens(len(c.kv), slots=slots, entries=entries)
    if len(c.kv) == 0:
        return c.pools
    ref = c.in_place()
    short_windows.write_entries(FlushCall([ref], slots, entries, None, 1, config or Config(), interpret))
    return c.freeze(ref)[2]
