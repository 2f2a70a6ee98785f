"""Compression: state rows in, and for every window that closes one quantised entry out.

Where requests bring few tokens, reads and writes of the rings need no order: no row is read that a token of the call
overwrites. Where they may bring more, entries and states take one launch each.
"""

import jax

from pallas_kernels.flush import long_windows, short_windows, states
from pallas_kernels.flush.operands import CompressorOperands
from pallas_kernels.runtime.lowering_cache import cached_trace


@cached_trace("max_query_tokens", writes=True)
def flush(
    compressors: tuple[CompressorOperands, ...],
    slots: jax.Array,
    positions: jax.Array,
    *,
    max_query_tokens: int | None = None,
    interpret: bool = False,
) -> list[tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]]:
    """Feeds tokens to compressors and stores the entries of the windows they close, states and pools in place.

    Args:
      compressors: one, or several whose windows have at most 16 rows, in one launch.
      slots: [T] int32, -1 = padding. Tokens of one slot stand together and in order.
      positions: [T] int32, -1 = padding; those of one slot are consecutive.
      max_query_tokens: a slot brings at most so many tokens; None = any number. With few, a ring's rows above those of
        a window and one, a call is one launch instead of two.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (state_kv, state_gate, pools), updated, of each compressor.

    Raises:
      NotImplementedError: a shape or dtype is not one that `CompressorOperands` describes.
    """
    for c in compressors:
        c.check()
    if len(compressors) > 1 and any(c.long for c in compressors):
        raise NotImplementedError("the flush kernel takes windows of more than 16 rows of one compressor only")
    tokens = slots.shape[0]
    if tokens == 0:
        return [(c.state_kv, c.state_gate, c.pools) for c in compressors]
    most = tokens if max_query_tokens is None else max_query_tokens
    refs = [c.in_place() for c in compressors]
    # Whether no row is read that a token of the call overwrites: then reads and writes of the rings need no order.
    at_once = all(most <= c.state_kv.shape[2] - c.rows + 1 for c in compressors)
    call = slots, positions, most
    if compressors[0].long:
        long_windows.store_entries(compressors[0], refs[0], *call, at_once, interpret)
    else:
        short_windows.store_entries(compressors, refs, *call, at_once, interpret)
    if not at_once:
        states.store_states(compressors, refs, *call, interpret)
    return [
        (
            jax.freeze(ref.state_kv).reshape(c.state_kv.shape),
            jax.freeze(ref.state_gate).reshape(c.state_gate.shape),
            tuple(map(jax.freeze, ref.pools)),
        )
        for c, ref in zip(compressors, refs, strict=True)
    ]
