"""The cases of `dsv4-jax bench ops attention`."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.cases import Case, close, entries_view, int32, normal, tree_bytes, window_view
from dsv4_jax.cache import CacheSchema


# Numbers of tokens, in layers that attend to selected entries and in layers that attend to all.
_SELECTED_TOKENS = (1, 8, 32, 64, 128)
_ALL_TOKENS = (1, 8, 32)
_ALL_ENTRIES = 8192
# Requests of a million tokens whose entries are drawn from a pool of a million, so that hardly two rows are adjacent.
_LONG_ENTRIES = 1 << 18
_SHARED_ENTRIES = 1 << 20
# Both versions round weights to bfloat16, at different scales, and round the result.
_AGREE = close(relative=2**-6, absolute=2**-6)
# Few calls, because XLA gathers dense rows first, which takes long.
_XLA_CALLS = 4


def attention_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """Yields cases of sparse_attention, one token per request, to the window and to selected or all entries."""
    for group in schema.groups.values():
        # A request holds four times as many entries as it selects.
        topk = schema.config.index_topk
        attended, entries = (_ALL_ENTRIES, _ALL_ENTRIES) if group.key is None else (topk, 4 * topk)
        sizes = _ALL_TOKENS if group.key is None else _SELECTED_TOKENS
        if small:
            sizes = (2,)
            attended = 512 if group.key is None else min(topk, 128)
            entries = 512
        for tokens in sizes:
            yield _attention_case(schema, group, tokens, attended, entries)
        if group.key is not None:
            entries, shared = (512, 1024) if small else (_LONG_ENTRIES, _SHARED_ENTRIES)
            for tokens in sizes:
                yield _attention_case(schema, group, tokens, attended, entries, shared)


def _attention_case(schema, group, tokens, attended, entries, shared=0):
    config = schema.config
    selects = group.key is not None
    heads = config.num_attention_heads
    dim = config.head_dim
    window = config.sliding_window
    window_bytes = window * tree_bytes(schema.window_codec.struct)
    row = tree_bytes(group.entry.struct)

    def state(rng, layers):
        compressed = entries_view(schema, group, rng, layers, tokens, entries, shared=shared)
        return window_view(schema, rng, layers, tokens), compressed

    def inputs(rng):
        q = normal(rng, (tokens, heads, dim), jnp.bfloat16)
        sinks = normal(rng, (heads,), jnp.float32)
        chosen = [rng.choice(entries, attended, replace=False) for _ in range(tokens)] if selects else None
        positions = int32(np.full(tokens, entries * group.compress_rate - 1))
        return q, sinks, chosen and int32(np.stack(chosen)), int32(rng.permutation(tokens)), positions

    def call(views, q, sinks, indices, slots, positions, *, implementation):
        window, compressed = views
        kv = ops.AttentionKV(window, compressed, indices)
        return ops.sparse_attention(q, sinks, kv, slots, positions, implementation=implementation)

    nbytes = tokens * (window_bytes + attended * row + 4 * heads * dim + 4 * attended * selects + 8)
    label = f"{group.name.upper()} {tokens} x {attended}+{window}" + (f" of {shared:,}" if shared else "")
    label += f", {heads} heads" if heads != 64 else ""
    flops = 4 * tokens * heads * dim * (window + attended)
    limits: dict[str, Any] = dict(flops=flops, reads=True, agree=_AGREE, xla_calls=_XLA_CALLS)
    layer_bytes = tokens * window_bytes + (shared or tokens * entries) * row
    return Case("sparse_attention", label, nbytes, inputs, call, state, layer_bytes=layer_bytes, **limits)
