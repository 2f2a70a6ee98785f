"""The kernel that rotates queries of the lightning indexer by RoPE and quantizes them as indexer keys are quantized.

The grid is (token, slice of the heads). A block is one warpgroup and holds 32 heads at a time in registers, see
`query_tiles`. If the call has at least as many tokens as the GPU has SMs, a block takes all heads of a token, and so
computes the token's angles once. Otherwise a block takes 32 heads.
"""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.formats.exact_math import cos_sin, product
from pallas_kernels.formats.layouts import KeyLayout
from pallas_kernels.formats.row_encoder import E2M1_MAX, key_scales
from pallas_kernels.indexer_scores import query_tiles
from pallas_kernels.indexer_scores.key_tiles import DIM, check_layout, operand_dtype
from pallas_kernels.mgpu import vectors
from pallas_kernels.runtime.checks import check_array, check_rules, check_tokens
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


@cached_trace("layout")
def round_index_query(
    q: jax.Array,
    weights: jax.Array,
    positions: jax.Array | None,
    inv_freq: jax.Array | None,
    layout: KeyLayout,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Rotates the queries of `indexer_scores` by RoPE and quantizes them in the format of the keys.

    MXFP4 queries after a Hadamard rotation are returned in units of the largest scale of their head, and the weight of
    the head is multiplied by this scale instead. Values of scale blocks whose scale is up to 14 binades (factors of 2)
    smaller than the largest scale are exact. Values of blocks with smaller scales lose up to 2**-15 of the largest
    scale.

    Args:
      q: [T, H, 128] bfloat16 queries, H a multiple of 32.
      weights: [T, H] float32 head weights.
      positions: [T] int32, at most 2**20; a negative position counts as 0. None if `inv_freq` is None.
      inv_freq: [P] float32, radians per token, at most 1; P is at most 64. The last 2 * P channels are rotated, in
        interleaved pairs, and rounded to bfloat16. None if q is already rotated.
      layout: format of the keys: NVFP4, or MXFP4 with or without a Hadamard rotation. After a Hadamard rotation, values
        are rounded to bfloat16 before they are quantized.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      queries: [T, H, 128] of `operand_dtype(layout)`, with channels in the order of `permute_dims`. In bfloat16, they
        are the dequantized values. In float8_e4m3fn, they are in units of 2**-`key_tiles.TOP` times the head's largest
        scale.
      weights: [T, H] float32. With queries in bfloat16, they are the argument. With queries in float8_e4m3fn, they are
        multiplied by the head's largest scale.

    Raises:
      NotImplementedError: the layout, a shape or a dtype is not supported.
    """
    _check(q, weights, positions, inv_freq, layout)
    tokens, heads, _ = q.shape
    rounded = jax.ShapeDtypeStruct((tokens * heads, DIM), operand_dtype(layout))
    fp8 = rounded.dtype == jnp.float8_e4m3fn
    if q.size == 0:
        return q.astype(rounded.dtype), weights
    tiles = heads // query_tiles.HEADS
    splits = tiles if tokens < MULTIPROCESSORS else 1

    first_rotated = DIM if inv_freq is None else DIM - 2 * inv_freq.size  # index of the first rotated channel

    def body(q_gmem, weights_gmem, positions_gmem, inv_freq_gmem, out_gmem, scaled_gmem):
        token, split = axis_indices("token", "split")
        angles = None if inv_freq_gmem is None else _angles(token, positions_gmem, inv_freq_gmem)

        @pl.loop(0, tiles // splits)
        def _(i):
            head = token * heads + (split * (tiles // splits) + i) * query_tiles.HEADS
            x = query_tiles.load_heads(q_gmem, head)
            if angles is not None:
                x = query_tiles.turn(x, *angles, first=first_rotated)
            x = query_tiles.hadamard(x) if layout.hadamard else x
            round_tile = _round_e4m3 if fp8 else _round_bfloat16
            words = round_tile(x, layout, head, weights_gmem, scaled_gmem)
            query_tiles.store_words(out_gmem, head, words)

    launch = kernel(
        body,
        out_type=(rounded, jax.ShapeDtypeStruct((tokens * heads,), jnp.float32) if fp8 else None),
        kernel_name="round_index_query",
        grid={"token": tokens, "split": splits},
        interpret=interpret,
    )
    positions = None if inv_freq is None else positions
    rounded, scaled = launch(q.reshape(-1, DIM), weights.reshape(-1) if fp8 else None, positions, inv_freq)
    return rounded.reshape(q.shape), weights if scaled is None else scaled.reshape(weights.shape)


def _angles(token, positions, inv_freq):
    """Returns the cosines and sines of a token's angles, each [32, 4, 16] float32, see `query_tiles.spread_angles`."""
    pairs = inv_freq.shape[0]
    pair = (vectors.channels(query_tiles.ANGLES) & (DIM // 2 - 1)) - (DIM // 2 - pairs)
    position = jnp.maximum(positions[token], 0).astype(jnp.float32)
    cos, sin = cos_sin(vectors.take(inv_freq, pair) * position, product)
    return query_tiles.spread_angles(cos), query_tiles.spread_angles(sin)


def _check(q, weights, positions, inv_freq, layout):
    check_layout(layout)
    check_array("q", q, jnp.bfloat16, None, None, layout.dim)
    tokens, heads, _ = q.shape
    check_rules({f"a multiple of {query_tiles.HEADS} heads, got {heads}": heads % query_tiles.HEADS == 0})
    if inv_freq is not None:
        check_tokens(tokens, positions=positions)
        check_array("inv_freq", inv_freq, jnp.float32, None)
        check_rules({f"at most {DIM} rotated channels, got {2 * inv_freq.size}": 2 * inv_freq.size <= DIM})
    check_array("weights", weights, jnp.float32, tokens, heads)


def _round_e4m3(x, layout, head, weights_gmem, scaled_gmem):
    """Returns the words of a tile from `query_tiles.mxfp4_words`, and stores weights times the heads' largest scales.

    `head` is the index of the tile's first head in `weights_gmem` and `scaled_gmem`, both [T * H] float32.
    """
    weight = query_tiles.load_weights(weights_gmem, head)
    words, scale = query_tiles.mxfp4_words(x, layout)
    query_tiles.store_weights(scaled_gmem, head, weight, scale)
    return words


def _round_bfloat16(x, layout, *_):
    """Quantizes a tile as keys are quantized. Returns the dequantized values as words of `query_tiles.pack_words`."""
    largest = query_tiles.block_largest(x, block=layout.scale_block)
    _, step, factor = key_scales(largest, layout=layout, registers=query_tiles.VALUES)
    # Values divided by E4M3 scales may exceed the largest code, because these scales are rounded to nearest. E8M0
    # scales are rounded up.
    scaled = jnp.minimum(jnp.maximum(x * factor, -E2M1_MAX), E2M1_MAX)
    return query_tiles.pack_words(query_tiles.round_e2m1(scaled) * step)
