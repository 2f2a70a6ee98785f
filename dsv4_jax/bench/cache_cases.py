"""The cases of `dsv4-jax bench ops append`, `gather`, `attention` and `flush`: the ops on the cache."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.cases import (
    Case,
    close,
    distinct,
    group_label,
    group_with_keys,
    normal,
    normal_float32,
    paged_view,
    permutation,
    tree_bytes,
    window_view,
)
from dsv4_jax.cache import CacheSchema


# Each shape is (label, requests, tokens per request, whether each request's step completes a compression window).
_FLUSH_SHAPES = (
    *((f"{n}, all close", n, 1, True) for n in (1, 8, 64, 256)),
    *((f"{n}, none closes", n, 1, False) for n in (64, 256)),
    ("prefill 8192", 8, 1024, True),
)
_FLUSH_CONTEXT = 1024  # maximum number of tokens of a request
# The kernel and XLA scale softmax weights differently before they round them to bfloat16. Both then round the result.
_ATTENTION_AGREES = close(relative=2**-6, absolute=2**-6)


def append_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of `append_swa`, and of `norm_rope_append`, its fusion with norm and RoPE.

    In a case of T <= 256 tokens, each request has one token. With T=8192, each request has `sliding_window` tokens, as
    in a prefill.
    """
    for tokens in (1, 8, 64, 256, 8192):
        yield _append_case(schema, tokens)
    for heads in (1, schema.config.num_attention_heads):
        for tokens in (1, 8, 64, 256):
            yield _norm_rope_case(schema, tokens, heads)


def _append_case(schema, tokens):
    """Returns a case of `append_swa` that stores `tokens` window rows."""
    config = schema.config
    window = config.sliding_window
    slots = max(256, -(-tokens // window))
    request_tokens = 1 if tokens <= slots else window

    def owners(rng):
        """Returns the slot of each token; the tokens of a request are adjacent."""
        return rng.permutation(slots)[: tokens // request_tokens].repeat(request_tokens)

    def positions(rng):
        starts = rng.integers(0, config.max_position_embeddings - request_tokens, tokens // request_tokens)
        return (starts[:, None] + np.arange(request_tokens)).reshape(-1)

    return Case(
        op="append_swa",
        shape=f"T={tokens}",
        nbytes=tokens * (2 * config.head_dim + tree_bytes(schema.window_codec.struct) + 8),
        call=ops.append_swa,
        layer=(window_view(schema, slots),),
        inputs=(normal(tokens, config.head_dim), owners, positions),
        updates=True,
    )


def _norm_rope_case(schema, tokens, heads):
    """Returns a case of `norm_rope_append`: the `_append_case` of `tokens` tokens, with `heads` query heads added."""
    append = _append_case(schema, tokens)
    config = schema.config
    dim = config.head_dim
    inv_freq = jnp.asarray(config.inv_freq(0))
    kv, slots, positions = append.inputs

    def call(state, *arrays, implementation):
        options = {"eps": config.rms_norm_eps, "norms_queries": config.norms_queries}
        return ops.norm_rope_append(state[1], *arrays, **options, implementation=implementation)

    def agree(result, expected):
        """Allows less than 2% of an array's elements to differ, because of rounding."""
        return jnp.mean(result != expected) < 0.02

    return dataclasses.replace(
        append,
        op="norm_rope + append",
        shape=f"{heads} head{'s' * (heads > 1)}, {append.shape}",
        nbytes=append.nbytes + 4 * tokens * heads * dim + 4 * dim + inv_freq.nbytes,
        call=call,
        # The result of a call, (queries, view), replaces this pair.
        layer=((lambda rng: jnp.zeros((tokens, heads, dim), jnp.bfloat16), *append.layer),),
        inputs=(normal(tokens, heads, dim), kv, normal_float32(dim), slots, positions, inv_freq),
        agree=agree,
    )


def gather_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of gathering a token's selected entries, all its entries, and its window rows."""
    config = schema.config
    group = group_with_keys(schema)
    topk = config.index_topk
    for tokens in (8, 64, 128):
        view = paged_view(schema, group, group.entry, [4 * topk] * tokens)
        indices = distinct(tokens, topk, 4 * topk)
        yield _gather_case(ops.gather_compressed_kv, group.entry, tokens, topk, view, indices, permutation(tokens))
    view = paged_view(schema, group, group.entry, [8192] * 32)
    inputs = permutation(32), np.full(32, 8192 * group.compress_rate - 1)
    yield _gather_case(ops.gather_all_compressed_kv, group.entry, 32, 8192, view, *inputs)
    window = config.sliding_window
    inputs = permutation(256), lambda rng: rng.integers(window, config.max_position_embeddings, 256)
    yield _gather_case(ops.gather_swa_kv, schema.window_codec, 256, window, window_view(schema, 256), *inputs)


def _gather_case(op, codec, tokens, rows, view, *inputs):
    """Returns a case in which each token gathers `rows` rows of `view`, stored by `codec`."""
    # For each row, the encoded row is read, and a bfloat16 row and a flag of one byte are written. For each
    # token, its slot and either the index of each row or the token's position are read, as int32.
    row_bytes = tree_bytes(codec.struct) + 2 * codec.dim + 1
    token_inputs = 1 + (rows if op is ops.gather_compressed_kv else 1)
    return Case(
        op=op.__name__,
        shape=f"{tokens} x {rows}",
        nbytes=tokens * (rows * row_bytes + 4 * token_inputs),
        call=op,
        layer=(view,),
        inputs=inputs,
    )


def attention_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of `sparse_attention`, with one token per request.

    A token attends to its window and to compressed entries of its request. Without an indexer, it attends to all 8,192
    entries. With an indexer, it attends to k entries, selected from 4 * k. In further cases, the k entries are selected
    from 2**18 entries. All requests then share a pool of 2**20 entries, so that selected rows are rarely adjacent.
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
    """Returns a case of `sparse_attention` for `tokens` requests with one token each.

    Args:
      schema: schema of the cache.
      group: the layer's group.
      tokens: number of tokens and of requests.
      attended: number of entries that a token attends to.
      entries: number of entries of a request.
      shared: number of entries in the pool if requests share blocks, see `paged_view`.
    """
    config = schema.config
    heads = config.num_attention_heads
    dim = config.head_dim
    window = config.sliding_window
    window_bytes = window * tree_bytes(schema.window_codec.struct)
    selects = group.key is not None

    def call(window_rows, entry_rows, q, sinks, indices, slots, positions, *, implementation):
        kv = ops.AttentionKV(window_rows, entry_rows, indices)
        return ops.sparse_attention(q, sinks, kv, slots, positions, implementation=implementation)

    label = f"{group_label(schema, group)} {tokens} x {attended}+{window}" + (f" of {shared:,}" if shared else "")
    entry_bytes = attended * (tree_bytes(group.entry.struct) + 4 * selects)
    return Case(
        op="sparse_attention",
        shape=label + (f", {heads} heads" if heads != 64 else ""),
        nbytes=tokens * (window_bytes + entry_bytes + 4 * heads * dim + 8),
        call=call,
        layer=(window_view(schema, tokens), paged_view(schema, group, group.entry, [entries] * tokens, shared)),
        inputs=(
            normal(tokens, heads, dim),
            normal_float32(heads),
            distinct(tokens, attended, entries) if selects else None,
            permutation(tokens),
            np.full(tokens, entries * group.compress_rate - 1),
        ),
        flops=4 * tokens * heads * dim * (window + attended),
        reads=True,
        agree=_ATTENTION_AGREES,
        xla_calls=4,  # XLA's version is slow, because it gathers dense rows first
    )


def flush_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of `flush`, which makes the entries of a group of layers, and index keys if the group has any.

    In V4.1, index keys are projections of the entries' pooled vectors. A case then runs `pool_windows` and
    `write_entries`, without the projection between them. The cases are decode steps in which all requests or no
    requests complete a compression window, and a prefill.
    """
    for group in schema.groups.values():
        for shape in _FLUSH_SHAPES:
            if shape[-1] or group.compress_rate > 1:
                yield _flush_case(schema, group, *shape)


def _flush_case(schema, group, label, requests, tokens, closes):
    """Returns a case of `flush` for the entries of a group of layers. The other arguments are as in `_FLUSH_SHAPES`."""
    rate = group.compress_rate
    has_state = group.pooled_rows > 1
    closed = int(closes) if tokens == 1 else tokens // rate  # number of windows that a request's tokens complete
    codecs = [group.entry, group.key] if group.key_compressor else [group.entry]
    keys = [] if group.key is None or group.key_compressor else [group.key]  # other keys are made from pooled vectors
    widths = [codec.dim * (1 + group.overlap) for codec in codecs]

    def state_view(width):
        """Returns the view of a compressor's state, with draws in place of arrays."""
        values = normal_float32(1, requests, group.pooled_rows, width) if has_state else None
        return ops.StateView(values, values, np.array(0), rate, group.overlap)

    def positions(rng):
        if tokens > 1:
            return np.tile(np.arange(tokens), requests)
        window = rng.integers(1, _FLUSH_CONTEXT // rate, requests)
        return window * rate + (rate - 1 if closes else rng.integers(0, rate - 1, requests))

    def call(state, weights, projections, slots, positions, *, implementation):
        if keys:
            return _flush_in_halves(state, weights, projections, slots, positions, implementation)
        compressors = [
            ops.CompressorInputs(states, pool, kv, gate, compressor)
            for (states, pool), (kv, gate), compressor in zip(state, projections, weights, strict=True)
        ]
        limit = 1 if tokens == 1 else None
        results = ops.flush(compressors, slots, positions, max_query_tokens=limit, implementation=implementation)
        return tuple(map(tuple, results))

    def pool(codec):
        return paged_view(schema, group, codec, [_FLUSH_CONTEXT // rate] * requests)

    request_bytes = sum(_flush_bytes(group, codec, tokens, closed) for codec in codecs)
    request_bytes += sum(closed * tree_bytes(key.struct) for key in keys)
    values = [normal_float32(requests * tokens, width) for width in widths]
    return Case(
        op="flush",
        shape=f"{group_label(schema, group)} {label}",
        nbytes=requests * (8 * tokens + request_bytes),
        call=call,
        layer=(
            (*zip(map(state_view, widths), map(pool, codecs), strict=True), *map(pool, keys)),
            [_compressor_weights(schema.config, group, codec) for codec in codecs],
        ),
        inputs=(
            [(value, value if has_state else None) for value in values],
            permutation(requests, tokens),
            positions,
        ),
        updates=True,
    )


def _flush_in_halves(state, weights, projections, slots, positions, implementation):
    """Stores entries, and index keys from the same pooled vectors, in three steps: pooling and two writes."""
    (states, entries), keys = state
    (compressor,) = weights
    ((kv, gate),) = projections
    with ops.use_implementation(implementation):
        closed, states = ops.pool_windows(states, kv, gate, compressor, slots, positions)
        projected = dataclasses.replace(closed, values=closed.values[:, : keys.codec.dim])  # in place of a projection
        entries = ops.write_entries(entries, closed, compressor.inv_freq)
        return (states, entries), ops.write_entries(keys, projected, compressor.inv_freq)


def _compressor_weights(config, group, codec):
    """Returns the parameters of the group's compressor for rows of `codec`, with draws in place of arrays."""
    layer = group.layers[0]
    bias = normal_float32(group.compress_rate, codec.dim * (1 + group.overlap))
    return ops.CompressorWeights(
        position_bias=bias if config.layers[layer].position_bias else None,
        norm_weight=normal_float32(codec.dim),
        inv_freq=jnp.asarray(config.inv_freq(layer), jnp.float32),
        eps=config.rms_norm_eps,
    )


def _flush_bytes(group, codec, tokens, closed):
    """Returns the number of bytes that a flush reads and writes for one request.

    The request's tokens complete `closed` windows. The flush reads the tokens' projections and writes them to the
    compressor state, a ring that keeps the newest ones. It also writes a row for each new entry. To make an entry, a
    decode step reads the other rows of the ring, and a prefill reads none. An entry of a single token needs no pooling,
    so there are no gate logits and no state then.
    """
    ring = group.pooled_rows
    entry_bytes = closed * tree_bytes(codec.struct)
    if ring == 1:
        return tokens * 4 * codec.dim + entry_bytes
    row_bytes = 8 * codec.dim * (1 + group.overlap)  # float32 values and logits
    ring_bytes = closed * (ring - 1) * codec.dim * 8 if tokens == 1 else 0  # bytes read to make the entry
    return (tokens + min(tokens, ring)) * row_bytes + ring_bytes + entry_bytes
