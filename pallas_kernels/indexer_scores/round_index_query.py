"""The lightning indexer's queries, rotated and rounded as its keys were, in the order in which tiles hold the dims."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.exact_math import cos_sin, round_bfloat16
from pallas_kernels.formats.layouts import KeyLayout
from pallas_kernels.formats.row_encoder import E2M1_MAX, e2m1_codes, key_scales
from pallas_kernels.indexer_scores import query_tiles
from pallas_kernels.indexer_scores.key_tiles import DIM, check_layout
from pallas_kernels.mgpu import vectors
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel
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
    """Queries for `indexer_scores`: rotated by RoPE, then quantised as indexer keys are; and their heads' weights.

    Args:
      q: [T, H, 128] bfloat16, H a multiple of 32.
      weights: [T, H] float32.
      positions: [T] int32, at most 2**20, a negative one counts as 0; None: as inv_freq.
      inv_freq: [P] float32, at most 1, P at most 64: the last 2 * P channels are rotated, in interleaved pairs, and
        rounded; None: q is rotated already.
      layout: of the keys: MXFP4 after a Hadamard rotation and rounding to bfloat16, or NVFP4.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (queries, weights), dims in the order of `permute_dims`. NVFP4: [T, H, 128] bfloat16, dequantised, and the weights
      as they are. MXFP4: [T, H, 128] float8_e4m3fn in units of 2**-TOP times the head's largest scale, and weights
      times that scale. Codes whose scale is up to 14 binades smaller are exact; below, 2**-15 of the largest is lost.

    Raises:
      NotImplementedError: the layout, a shape or a dtype is not one of these.
    """
    check_layout(layout)
    check_array("q", q, jnp.bfloat16, None, None, layout.dim)
    tokens, heads, _ = q.shape
    check_rules({f"a multiple of {query_tiles.HEADS} heads, got {heads}": heads % query_tiles.HEADS == 0})
    if inv_freq is not None:
        check_array("positions", positions, jnp.int32, tokens)
        check_array("inv_freq", inv_freq, jnp.float32, None)
        check_rules({f"at most {DIM} rotated channels, got {2 * inv_freq.size}": 2 * inv_freq.size <= DIM})
    check_array("weights", weights, jnp.float32, tokens, heads)
    mxfp4 = layout.scale == "e8m0"
    rounded = jax.ShapeDtypeStruct((tokens * heads, DIM), jnp.float8_e4m3fn if mxfp4 else jnp.bfloat16)
    if q.size == 0:
        return q.astype(rounded.dtype), weights
    tiles = heads // query_tiles.HEADS
    # Angles are worked out once a block.
    parts = tiles if tokens < MULTIPROCESSORS else 1

    def body(q, weights, positions, inv_freq, out, scaled):
        token, part = lax.axis_index("token"), lax.axis_index("part")
        turn = functools.partial(_turn, *_angles(token, positions, inv_freq)) if inv_freq is not None else lambda x: x

        @pl.loop(0, tiles // parts)
        def _(i):
            head = token * heads + (part * (tiles // parts) + i) * query_tiles.HEADS
            x = query_tiles.load_heads(q, head)
            x = query_tiles.hadamard(turn(x)) if layout.hadamard else turn(x)
            if mxfp4:
                weight = query_tiles.load_weights(weights, head)
                scales = functools.partial(key_scales, layout=layout, registers=query_tiles.VALUES)
                words, scale = query_tiles.mxfp4_words(x, scales, e2m1_codes)
                query_tiles.store_weights(scaled, head, weight, scale)
            else:
                words = _nvfp4_words(x, layout)
            query_tiles.store_words(out, head, words)

    run = kernel(
        body,
        out_type=(rounded, jax.ShapeDtypeStruct((tokens * heads,), jnp.float32) if mxfp4 else None),
        kernel_name="round_index_query",
        grid=(tokens, parts),
        grid_names=("token", "part"),
        interpret=interpret,
    )
    positions = None if inv_freq is None else positions
    rounded, scaled = run(q.reshape(-1, DIM), weights.reshape(-1) if mxfp4 else None, positions, inv_freq)
    return rounded.reshape(q.shape), weights if scaled is None else scaled.reshape(weights.shape)


def _angles(token, positions, inv_freq):
    """(cosines, sines) of a token's pairs, and its first rotated channel."""
    pairs = inv_freq.shape[0]
    pair = (vectors.channels(query_tiles.ANGLES) & (DIM // 2 - 1)) - (DIM // 2 - pairs)
    position = jnp.maximum(positions[token], 0).astype(jnp.float32)
    angles = cos_sin(vectors.take(inv_freq, pair) * position)
    return *map(query_tiles.spread_angles, angles), DIM - 2 * pairs


def _turn(cos, sin, first, x):
    return query_tiles.turn(x, cos, sin, first)


def _nvfp4_words(x, layout):
    """Packed words of a tile, quantised and dequantised."""
    x = round_bfloat16(x) if layout.hadamard else x
    largest = query_tiles.block_largest(x, layout.scale_block)
    _, step, factor = key_scales(largest, layout=layout, registers=query_tiles.VALUES)
    # E8M0 scales are rounded up, these to the nearest.
    scaled = jnp.minimum(jnp.maximum(x * factor, -E2M1_MAX), E2M1_MAX)
    return query_tiles.pack_words(query_tiles.round_e2m1(scaled, e2m1_codes) * step)
