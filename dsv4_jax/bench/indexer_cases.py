"""The cases of `dsv4-jax bench ops indexer`."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.bench.cases import Case, distinct, group_with_keys, normal, normal_float32, paged_view, tree_bytes
from dsv4_jax.cache import CacheSchema
from dsv4_jax.ops.indexer_scores import round_index_query_operands, score_rounded_kernel, score_rounded_xla
from pallas_kernels.indexer_scores.key_tiles import DIM, operand_dtype
from pallas_kernels.indexer_scores.round_index_query import round_index_query


_RAGGED = [int(n) for n in np.exp(np.random.default_rng(5).uniform(np.log(1024), np.log(262144), 32))]
# `_SCORES` maps the label of a case to (number of keys of each request, tokens per request).
_SCORES = {
    "1 x 16384": ([16384], 1),
    "1 x 262144": ([262144], 1),
    "8 x 262144": ([262144] * 8, 1),
    "32 x 16384": ([16384] * 32, 1),
    "32 x 65536": ([65536] * 32, 1),
    "32 x 1k..262k": (_RAGGED, 1),
    "32 x 16384, 8 each": ([16384] * 32, 8),
    "65536, 2048 tokens": ([65536], 2048),
}
_SCORES_AND_TOPK = "1 x 262144", "8 x 262144", "32 x 65536"  # labels of cases of scores followed by top-k
# Shapes are (number of requests, number of keys of each request), for cases of candidate blocks and of top-k.
_CANDIDATE_SHAPES = (1, 65536), (1, 262144), (32, 65536), (8, 262144)
_TOPK_SHAPES = (*((n, 16384) for n in (1, 32)), *((n, keys) for keys in (65536, 262144) for n in (1, 8, 32, 64)))


def indexer_cases(schema: CacheSchema) -> Iterator[Case]:
    """Yields cases of the indexer's steps: rounding queries, scores, scores followed by top-k, and top-k alone.

    If layers select within candidate blocks (V4.1), there are cases of choosing the blocks and of scores within them.
    Scores are measured with one token and with 8 tokens of each request, and in the prefill of one request. In one case
    the requests have different numbers of keys, from 1k to 262k. The queries of all these cases are already rotated and
    rounded. The cases "index query" measure the rotation and the rounding.
    """
    config = schema.config
    if config.index_head_dim == DIM:
        for tokens in (1, 32, 2048, 8192):
            yield _query_case(schema, tokens)
    for label, (lengths, tokens) in _SCORES.items():
        yield _scores_case(schema, label, lengths, tokens)
    for label in _SCORES_AND_TOPK:
        yield _scores_case(schema, label, *_SCORES[label], topk=config.index_topk)
    for requests, keys in _TOPK_SHAPES:
        yield _topk_case(config.index_topk, requests, keys)
        if requests == 1:
            yield _topk_case(config.index_topk, 1, keys, are_equal=True)
            yield _topk_case(config.index_topk, 1, keys, visible=1024)
    for requests, keys in _CANDIDATE_SHAPES if config.candidate_topk_blocks else ():
        if keys > config.candidate_topk_blocks * config.candidate_block_size:
            yield _blocks_case(config, requests, keys)
            yield _within_case(schema, requests, keys)


def _query_case(schema, tokens):
    """Returns a case that rotates and rounds the index queries of `tokens` tokens."""
    config = schema.config
    codec = group_with_keys(schema).key
    heads = config.index_n_heads
    dim = config.index_head_dim
    inv_freq = jnp.asarray(config.inv_freq(next(spec.layer for spec in config.layers if spec.selects)))

    def call(q, weights, positions, inv_freq, *, implementation):
        if implementation == "xla":
            return round_index_query_operands(codec, q, weights, positions, inv_freq)
        return round_index_query(q, weights, positions, inv_freq, codec.layout)

    return Case(
        op="index query",
        shape=f"T={tokens}",
        # A value is read as bfloat16, 2 bytes. If the kernel multiplies E4M3, the value is written as E4M3, 1 byte, and
        # a float32 weight of each head is read and written. Otherwise the value is written as bfloat16.
        nbytes=tokens * heads * (4 * dim if operand_dtype(codec.layout) == jnp.bfloat16 else 3 * dim + 8),
        call=call,
        inputs=(normal(tokens, heads, dim), normal_float32(tokens, heads), np.arange(tokens), inv_freq),
    )


def _scores_case(schema, label, lengths, tokens, topk=0):
    """Returns a case of index scores, followed by the selection of the `topk` best entries unless `topk` is 0.

    Args:
      schema: schema of the cache.
      label: label of the shape.
      lengths: number of keys of each request.
      tokens: number of tokens of each request.
      topk: number of entries to select.
    """
    config = schema.config
    group = group_with_keys(schema)
    codec = group.key
    rate = group.compress_rate
    heads = config.index_n_heads
    dim = config.index_head_dim
    num_tokens = len(lengths) * tokens
    kernel_operands = jax.jit(functools.partial(round_index_query_operands, codec, positions=None, inv_freq=None))

    def queries(rng):
        """Returns {implementation: (queries, weights)}, rounded as the implementation takes them."""
        q = normal(num_tokens, heads, dim)(rng)
        weights = normal_float32(num_tokens, heads)(rng)
        rounded = {"xla": (codec.round_query(q), weights)}
        if dim == DIM:
            rounded["mosaic_gpu"] = kernel_operands(q, weights)
        return rounded

    def call(view, queries, slots, positions, *, implementation):
        if implementation not in queries:
            raise NotImplementedError(f"the kernel takes index queries of {DIM} channels, got {dim}")
        score = score_rounded_xla if implementation == "xla" else score_rounded_kernel
        q, weights = queries[implementation]
        scores = score(view, q, weights, slots, positions)
        if not topk:
            return scores
        return ops.indexer_topk(scores, ops.valid_lengths(positions, rate), topk, implementation=implementation)

    # Number of pairs of a token and a key that the token sees. The token at position p sees `(p + 1) // rate` keys.
    scored = sum((rate * n - i) // rate for n in lengths for i in range(tokens))
    query_bytes = jnp.dtype(operand_dtype(codec.layout)).itemsize
    input_bytes = sum(lengths) * tree_bytes(codec.struct) + num_tokens * (query_bytes * heads * dim + 4 * heads + 8)
    return Case(
        op="scores + top-k" if topk else "indexer_scores",
        shape=label,
        nbytes=input_bytes + 4 * (num_tokens * topk or scored),
        call=call,
        layer=(paged_view(schema, group, codec, lengths),),
        inputs=(
            queries,
            np.repeat(np.arange(len(lengths)), tokens),
            np.concatenate([np.arange(rate * n - tokens, rate * n) for n in lengths]),
        ),
        flops=2 * heads * dim * scored,
        reads=True,
        agree=_same_selection if topk else _same_scores,
        xla_calls=1 if num_tokens * max(lengths) > 1 << 20 else None,
    )


def _blocks_case(config, requests, keys):
    """Returns a case that chooses the candidate blocks of [requests, keys] scores."""
    count = config.candidate_topk_blocks

    def call(scores, lengths, *, implementation):
        topk = functools.partial(ops.indexer_topk, implementation=implementation)
        return ops.candidate_blocks(scores, lengths, count, config.candidate_block_size, topk)

    return Case(
        op="candidate_blocks",
        shape=f"{requests} x {keys}",
        nbytes=requests * 4 * (keys + 1 + count),
        call=call,
        inputs=(normal_float32(requests, keys), np.full(requests, keys)),
        reads=True,
    )


def _within_case(schema, requests, keys):
    """Returns a case of index scores within candidate blocks, for one token of each request."""
    config = schema.config
    group = schema.groups[next(spec.group for spec in config.specs if spec.makes_candidates)]
    heads = config.index_n_heads
    dim = config.index_head_dim
    size = config.candidate_block_size
    count = config.candidate_topk_blocks
    blocks = distinct(requests, count, keys // size)

    def call(*arrays, implementation):
        *arrays, blocks = arrays
        return ops.indexer_scores(*arrays, candidates=blocks, block_size=size, implementation=implementation)

    scored = requests * count * size
    return Case(
        op="indexer_scores",
        shape=f"{requests} x {keys}, in {count} blocks",
        nbytes=scored * (tree_bytes(group.key.struct) + 4) + requests * (2 * heads * dim + 4 * heads + 8 + 4 * count),
        call=call,
        layer=(paged_view(schema, group, group.key, [keys] * requests),),
        inputs=(
            normal(requests, heads, dim),
            normal_float32(requests, heads),
            np.arange(requests),
            np.full(requests, keys * group.compress_rate - 1),
            lambda rng: np.sort(blocks(rng), axis=1),
        ),
        flops=2 * heads * dim * scored,
        reads=True,
        agree=_same_scores,
    )


def _same_scores(scores, expected):
    """Returns whether all visible scores differ by at most 2**-15 times the largest magnitude in their row.

    Scores may differ, because the kernel and XLA add in different orders. XLA's scores of keys that are not visible are
    -inf.
    """
    visible = expected > -jnp.inf
    size = jnp.max(jnp.where(visible, jnp.abs(expected), 0.0), axis=1, keepdims=True)
    return jnp.all(~visible | (jnp.abs(scores - expected) <= 2.0**-15 * size))


def _same_selection(indices, expected):
    """Returns whether at most 1% of the selected entries differ. Some may differ, since scores differ by rounding."""
    return jnp.mean(jax.vmap(jnp.isin)(indices, expected)) >= 0.99


def _topk_case(topk, requests, keys, *, visible=None, are_equal=False):
    """Returns a case that selects the top k of the first `visible` scores in each row of [requests, keys] scores.

    The scores are random. If `are_equal` is True, all scores are the same random number.
    """
    label = ", all equal" if are_equal else f", {visible} visible" if visible else ""
    visible = visible or keys
    shape = () if are_equal else (requests, keys)
    return Case(
        op="indexer_topk",
        shape=f"{requests} x {keys}{label}",
        nbytes=requests * 4 * (visible + 1 + topk),
        call=functools.partial(ops.indexer_topk, k=topk),
        inputs=(
            lambda rng: jnp.broadcast_to(normal_float32(*shape)(rng), (requests, keys)),
            np.full(requests, visible),
        ),
        reads=True,
    )
