"""Flush: stores the state rows of tokens, and a pooled, quantized entry for every window that closes.

    entry = rope(norm(sum_r softmax_r(gate[r] + bias[r]) * kv[r])) over the rows r of the window, for each channel

A window's rows come from the call or from the ring of states. `short_windows` (a warpgroup pools whole windows) and
`long_windows` (blocks of a cluster pool chunks) store entries. If no row of a ring is read that a token of the call
overwrites, they store the state rows too; otherwise `states` does so in a launch of its own.
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
    """Feeds tokens to compressors and stores the entries of the windows that they close, in place.

    Returns the updated (state_kv, state_gate, pools) of each.

    Args:
      compressors: one compressor, or several with windows of at most 16 rows, which share a launch.
      slots: [T] int32, -1 = padding. The tokens of a slot are adjacent and in order.
      positions: [T] int32, -1 = padding; those of a slot are consecutive.
      layer: [] int32 index of every compressor's position_bias and norm_weight in stacks. None: they are not stacked.
      max_query_tokens: maximum number of tokens per slot, or None. If a ring has room for them, one launch is enough.
      config: tuning choices, or None for the measured ones.
      interpret: whether to run on the CPU, interpreted, with race detection.
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
