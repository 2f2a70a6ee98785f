"""Flush: stores the state rows of tokens, and a pooled, quantized entry for every window that closes.

    entry = rope(norm(sum_r softmax_r(gate[r] + bias[r]) * kv[r])) over the rows r of the window, for each channel

A window is `rate` consecutive tokens of a request. If windows overlap, it also has the `rate` tokens before these.
It closes at its last token. A token's row, its kv and gate, comes from the call, or from the request's ring of state
rows if an earlier call had the token. Entries are stored by one of two kernels:

  * `short_windows`, at most 16 rows: each warpgroup pools whole windows.
  * `long_windows`, more than 16 rows: the blocks of a cluster pool chunks of a window.

The same kernel also stores the state rows, if no token of the call overwrites a row of a ring that the kernel reads.
Otherwise a second launch stores them, see `states`.
"""

import jax

from pallas_kernels.flush import long_windows, short_windows, states
from pallas_kernels.flush.operands import CompressorOperands, Config, FlushCall
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
) -> list[tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]]:
    """Stores the state rows of a call's tokens and the entries of the windows that close, in place.

    Args:
      compressors: one compressor, or several with windows of at most 16 rows, which share a launch.
      slots: [T] int32, each token's request slot; -1 = padding. The tokens of a slot are adjacent and in order.
      positions: [T] int32, each token's position in its request; -1 = padding. Positions of a slot are consecutive.
      layer: [] int32, index of this layer if every compressor's `position_bias` and `norm_weight` are stacks; None if
        they are not.
      max_query_tokens: maximum number of tokens of a slot; None for T. If it is at most `ring - rows + 1` for every
        compressor, a single launch is enough.
      config: tuning choices, or None for `Config()`.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      The updated (state_kv, state_gate, pools) of each compressor.

    Raises:
      NotImplementedError: a layout, a shape or a dtype is not supported, or there are several compressors and one has
        windows of more than 16 rows.
    """
    for c in compressors:
        c.check(layer, interpret)
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
        short_windows.store_entries(call)
    if not call.with_states:
        states.store_state_rows(call)
    return [
        (
            jax.freeze(ref.state_kv).reshape(c.state_kv.shape),
            jax.freeze(ref.state_gate).reshape(c.state_gate.shape),
            tuple(map(jax.freeze, ref.pools)),
        )
        for c, ref in zip(compressors, refs, strict=True)
    ]
