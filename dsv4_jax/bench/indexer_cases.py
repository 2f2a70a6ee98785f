"""The cases of `dsv4-jax bench ops indexer`."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.cases import Case, int32, normal, random_rows, tree_bytes
from dsv4_jax.cache import CacheSchema
from dsv4_jax.ops.indexer_scores import round_index_query_operands, score_rounded_kernel, score_rounded_xla
from pallas_kernels.indexer_scores.round_index_query import round_index_query


_RAGGED = [int(n) for n in np.exp(np.random.default_rng(5).uniform(np.log(1024), np.log(262144), 32))]
# label, keys of each request, tokens of each
_SCORES = (
    ("1 x 16384", [16384], 1),
    ("1 x 262144", [262144], 1),
    ("8 x 262144", [262144] * 8, 1),
    ("32 x 16384", [16384] * 32, 1),
    ("32 x 65536", [65536] * 32, 1),
    ("32 x 1k..262k", _RAGGED, 1),
    ("32 x 16384, 8 each", [16384] * 32, 8),
    ("65536, 2048 tokens", [65536], 2048),
)
_SMALL_SCORES = (("2 x 1024", [1024] * 2, 1),)
# requests, keys of each
_TOPK_SHAPES = (*((n, 16384) for n in (1, 32)), *((n, keys) for keys in (65536, 262144) for n in (1, 8, 32, 64)))


def indexer_cases(schema: CacheSchema, small: bool) -> Iterator[Case]:
    """Rounding queries, scores, scores with top-k, and top-k alone.

    Scores are of requests x keys, one token each; of 8 tokens each; of one request's prefill; of requests of 1k to 262k
    keys. Their queries come rotated and rounded: the cases "index query" time that.
    """
    group = next(group for group in schema.groups.values() if group.key is not None)
    for tokens in (2,) if small else (1, 32, 2048, 8192):
        yield _query_case(schema, group, tokens)
    for label, lengths, tokens in _SMALL_SCORES if small else _SCORES:
        yield _scores_case(schema, group, label, lengths, tokens)
    for label, lengths, tokens in () if small else (_SCORES[i] for i in (1, 2, 4)):
        yield _scores_case(schema, group, label, lengths, tokens, topk=True)
    for requests, keys in ((2, 4096),) if small else _TOPK_SHAPES:
        yield _topk_case(schema.config.index_topk, (requests, keys), keys)
        if requests == 1:
            yield _topk_case(schema.config.index_topk, (requests, keys), keys, ", all equal")
            yield _topk_case(schema.config.index_topk, (requests, keys), 1024, ", 1024 visible")


def _query_case(schema, group, tokens):
    config = schema.config
    key = group.key
    inv_freq = jnp.asarray(config.inv_freq(next(spec.layer for spec in config.layers if spec.selects)))

    def inputs(rng):
        shape = tokens, config.index_n_heads, config.index_head_dim
        return normal(rng, shape, jnp.bfloat16), normal(rng, shape[:2], jnp.float32), int32(np.arange(tokens))

    def call(inv_freq, q, weights, positions, *, implementation):
        if implementation == "xla":
            return round_index_query_operands(key, q, weights, positions, inv_freq)
        return round_index_query(q, weights, positions, inv_freq, key.layout)

    # A value read as bfloat16 is written as E4M3 where keys have E8M0 scales; a head's weight is then read and written.
    each = 3 * config.index_head_dim + 8 if key.layout.scale == "e8m0" else 4 * config.index_head_dim
    nbytes = tokens * config.index_n_heads * each
    return Case("index query", f"T={tokens}", nbytes, inputs, call, lambda rng, layers: inv_freq)


def _scores_case(schema, group, label, lengths, tokens, topk=False):
    config = schema.config
    key = group.key
    rate = group.compress_rate
    heads = config.index_n_heads
    dim = config.index_head_dim
    key_bytes = tree_bytes(key.struct)
    rows = len(lengths) * tokens
    count = sum(lengths)
    entries = schema.entries_per_block(group.name)

    def state(rng, layers):
        blocks = [-(-n // entries) for n in lengths]
        table = np.full((len(lengths), max(blocks)), -1)
        table[np.arange(max(blocks)) < np.array(blocks)[:, None]] = rng.permutation(sum(blocks))
        return ops.IndexerView(random_rows(key, rng, layers, sum(blocks), entries), 0, int32(table), rate, key)

    operands = jax.jit(functools.partial(round_index_query_operands, key, positions=None, inv_freq=None))

    def inputs(rng):
        q = normal(rng, (rows, heads, dim), jnp.bfloat16)
        weights = normal(rng, (rows, heads), jnp.float32)
        queries = dict(xla=(key.round_query(q), weights), mosaic_gpu=operands(q, weights))
        slots = int32(np.repeat(np.arange(len(lengths)), tokens))
        return queries, slots, int32(np.concatenate([np.arange(rate * n - tokens, rate * n) for n in lengths]))

    def score(view, queries, slots, positions, *, implementation):
        score = score_rounded_xla if implementation == "xla" else score_rounded_kernel
        q, weights = queries[implementation]
        return score(view, q, weights, slots, positions)

    def score_and_select(view, queries, slots, positions, *, implementation):
        scores = score(view, queries, slots, positions, implementation=implementation)
        visible = ops.valid_lengths(positions, rate)
        return ops.indexer_topk(scores, visible, config.index_topk, implementation=implementation)

    scored = sum((rate * n - i) // rate for n in lengths for i in range(tokens))
    query_bytes = 1 if key.layout.scale == "e8m0" else 2
    nbytes = count * key_bytes + rows * (query_bytes * heads * dim + 4 * heads + 8)
    flops = 2 * heads * dim * scored
    limits: dict[str, Any] = dict(flops=flops, xla_calls=1 if rows * max(lengths) > 1 << 20 else None, reads=True)
    limits |= dict(state=state, layer_bytes=count * key_bytes)
    if topk:
        nbytes += rows * 4 * config.index_topk
        return Case("scores + top-k", label, nbytes, inputs, score_and_select, agree=_same_selection, **limits)
    return Case("indexer_scores", label, nbytes + 4 * scored, inputs, score, agree=_same_scores, **limits)


def _same_scores(got, want):
    """Sums in another order: within 2**-15 of the row's largest. XLA marks with -inf what is not visible."""
    visible = want > -jnp.inf
    size = jnp.max(jnp.where(visible, jnp.abs(want), 0.0), axis=1, keepdims=True)
    return jnp.all(~visible | (jnp.abs(got - want) <= 2.0**-15 * size))


def _same_selection(got, want):
    """At most one entry in a hundred differs: those whose scores are equal but for rounding."""
    found = jax.vmap(jnp.isin)(got, want)
    return jnp.mean(found.astype(jnp.float32)) >= 0.99


def _topk_case(k, shape, visible, kind=""):
    """indexer_topk of random scores [requests, keys], or of equal ones, of which the first `visible` count."""

    def inputs(rng):
        scores = normal(rng, shape[:0] if "equal" in kind else shape, jnp.float32)
        return jnp.broadcast_to(scores, shape), jnp.full(shape[:1], visible, jnp.int32)

    def call(_, scores, lengths, *, implementation):
        return ops.indexer_topk(scores, lengths, k, implementation=implementation)

    requests, keys = shape
    nbytes = requests * (4 * visible + 4 + 4 * k)
    return Case("indexer_topk", f"{requests} x {keys}{kind}", nbytes, inputs, call, reads=True)
