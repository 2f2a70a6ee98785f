"""Sparse attention of few tokens (decode): one softmax over window rows, compressed entries and a sink.

If the tokens are too few to fill the GPU, the rows of each token are divided among several blocks (KV splits), and
`combine` adds up the blocks' sums. For many tokens, see `prefill_attention`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.formats.kv_rows import ROW_DIM
from pallas_kernels.formats.pool_operands import Paged, Rings
from pallas_kernels.runtime.checks import check_array, check_tokens
from pallas_kernels.runtime.layer_operands import check_weight
from pallas_kernels.runtime.lowering_cache import cached_trace
from pallas_kernels.sparse_attention.combine import combine
from pallas_kernels.sparse_attention.decode_attention import choose_splits, decode_attention
from pallas_kernels.sparse_attention.inverse_rope import check_frequencies, rope_angles
from pallas_kernels.sparse_attention.kv_tiles import check_layouts
from pallas_kernels.sparse_attention.online_softmax import HALF, check_heads, pad_sinks
from pallas_kernels.sparse_attention.row_addresses import AttentionProblem


@cached_trace("splits")
def sparse_attention(
    q: jax.Array,
    sinks: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    rings: Rings,
    compressed: Paged | None,
    inv_freq: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    splits: int | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes attention of each token to its window and its compressed entries.

    A row of 512 values is both the key and the value of all heads. The window is the token's own row and the rows of
    the preceding positions. Compressed entries are further rows, each made from `compress_rate` tokens.

    Args:
      q: [T, H, 512] bfloat16. H is a multiple of 64, or below 64 a multiple of 8. Scores are scaled by `512 ** -0.5`.
      sinks: [H] float32 sink logits. A sink adds a weight to the denominator of the softmax and has no value.
      slots: [T] int32, each token's request slot; -1 = padding.
      positions: [T] int32, each token's position in its request; -1 = padding.
      rings: the window rows. Layer -1 leaves the windows out. The E4M3 codes of NaN, 0x7F and 0xFF, are read as +-480.
      compressed: the compressed entries, or None. Their row layout is that of `rings`. If rows have no RoPE values in
        bfloat16 (DeepSeek-V4.1), entries may instead have E2M1 codes.
      inv_freq: [P] float32 RoPE frequencies, at most 1; P is a multiple of 4 up to 128. The last 2 * P channels of the
        result are rotated back by the token's position, in interleaved pairs, and rounded to bfloat16 before and after.
        None: no rotation.
      layer: [] int32, index of this layer if `sinks` is a stack [layers, H]; None if it is not.
      splits: number of KV splits of a token, which changes the result's rounding; None for `choose_splits`.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      [T, H, 512] bfloat16; zeros for padding.

    Raises:
      NotImplementedError: a layout, a shape or a dtype is not supported.
    """
    check_weight("sinks", sinks, layer, jnp.float32, q.shape[1])
    check_frequencies(inv_freq, HALF // 2)
    problem = _check_and_merge(q, slots, positions, rings, compressed)
    if not q.size:
        return q
    splits = splits or choose_splits(problem, *q.shape[:2])
    if splits > 1:
        sums, stats = decode_attention(problem, q, splits=splits, interpret=interpret)
        return combine(sums, stats, sinks, positions, inv_freq, layer=layer, interpret=interpret)
    angles = None if inv_freq is None else rope_angles(positions, inv_freq)
    sinks = pad_sinks(sinks)
    return decode_attention(problem, q, sinks=sinks, layer=layer, angles=angles, splits=None, interpret=interpret)


@cached_trace()
def attention_sums(
    q: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    rings: Rings,
    compressed: Paged | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes the sums of each KV split of `sparse_attention`, without combining the splits.

    `combine` computes the attention from these sums. For rows on several devices, `dsv4_jax.ops.context_parallel`
    combines the sums of all devices.

    Args:
      q, slots, positions, rings, compressed, interpret: as in `sparse_attention`; T at least 1.

    Returns:
      (sums [T, S, H, 512] float32, stats [T, S, 2, H] float32) of S splits, as `combine` takes them. H is rounded up to
      a multiple of 64.

    Raises:
      NotImplementedError: as in `sparse_attention`.
    """
    problem = _check_and_merge(q, slots, positions, rings, compressed)
    splits = choose_splits(problem, *q.shape[:2])
    return decode_attention(problem, q, splits=splits, interpret=interpret)


def _check_and_merge(q, slots, positions, rings, compressed):
    """Checks the arguments of `sparse_attention`, and returns all but the queries as an `AttentionProblem`."""
    tokens, heads, _ = q.shape
    check_array("q", q, jnp.bfloat16, tokens, None, ROW_DIM)
    check_tokens(tokens, slots=slots, positions=positions)
    rings.check()
    check_layouts((rings.layout, (compressed or rings).layout))
    check_heads(heads)
    if rings.own_rows is not None:
        check_array("own_rows", rings.own_rows, jnp.int32, tokens)
    if compressed is not None:
        compressed.check(tokens)
        compressed = dataclasses.replace(compressed, layer=compressed.layer.reshape(1)) if compressed.count else None
    rings = dataclasses.replace(rings, layer=rings.layer.reshape(1))
    return AttentionProblem(slots, positions, rings, compressed)
