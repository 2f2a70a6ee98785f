"""The cases of `dsv4-jax bench ops attention`."""

from collections.abc import Iterator

import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.cases import (
    Case,
    close,
    distinct,
    group_label,
    normal,
    normal_float32,
    paged_view,
    permutation,
    tree_bytes,
    window_view,
)
from dsv4_jax.cache import CacheSchema


# Both versions round weights to bfloat16, at different scales, and round the result.
_AGREE = close(relative=2**-6, absolute=2**-6)


def attention_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of sparse_attention, one token per request, to the window and to selected or all entries.

    A request holds four times as many entries as it selects. Or requests of a million tokens share a pool of a million
    entries, so that hardly two selected rows are adjacent.
    """
    topk = schema.config.index_topk
    for group in schema.groups.values():
        if group.key is None:
            for tokens in (1, 8, 32):
                yield _attention_case(schema, group, tokens, attended=8192, entries=8192)
            continue
        for entries, shared in ((4 * topk, 0), (1 << 18, 1 << 20)):
            for tokens in (1, 8, 32, 64, 128):
                yield _attention_case(schema, group, tokens, topk, entries, shared)


def _attention_case(schema, group, tokens, attended, entries, shared=0):
    config = schema.config
    heads = config.num_attention_heads
    dim = config.head_dim
    window = config.sliding_window
    window_bytes = window * tree_bytes(schema.window_codec.struct)
    selects = group.key is not None

    def call(views, q, sinks, indices, slots, positions, *, implementation):
        window_rows, entry_rows = views
        kv = ops.AttentionKV(window_rows, entry_rows, indices)
        return ops.sparse_attention(q, sinks, kv, slots, positions, implementation=implementation)

    label = f"{group_label(group)} {tokens} x {attended}+{window}" + (f" of {shared:,}" if shared else "")
    entry_bytes = attended * (tree_bytes(group.entry.struct) + 4 * selects)
    return Case(
        op="sparse_attention",
        shape=label + (f", {heads} heads" if heads != 64 else ""),
        nbytes=tokens * (window_bytes + entry_bytes + 4 * heads * dim + 8),
        call=call,
        state=(window_view(schema, tokens), paged_view(schema, group, group.entry, [entries] * tokens, shared)),
        inputs=(
            normal(tokens, heads, dim),
            normal_float32(heads),
            distinct(tokens, attended, entries) if selects else None,
            permutation(tokens),
            np.full(tokens, entries * group.compress_rate - 1),
        ),
        flops=4 * tokens * heads * dim * (window + attended),
        reads=True,
        agree=_AGREE,
        xla_calls=4,  # XLA gathers dense rows first, which takes long
    )
