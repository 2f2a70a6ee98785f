"""Attention of a token from the softmax sums over parts of its rows, rotated back."""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.exact_math import cos_sin, round_bfloat16
from pallas_kernels.mgpu import vectors
from pallas_kernels.runtime.launch import kernel


def combine(
    sums: jax.Array,
    stats: jax.Array,
    sinks: jax.Array,
    positions: jax.Array | None = None,
    inv_freq: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """[T, H, D] bfloat16: the parts of each token's attention, added up in their order.

    Args:
      sums: [T, S, H, D] float32 sums of weights times values; D a multiple of 512.
      stats: [T, S, 2, H] float32: the largest score of the part, as a power of two (weights are
        `2 ** (score - largest)`), and the sum of weights, 0 where the part has no rows. Its sums may then be anything.
      sinks, inv_freq, interpret: as in `sparse_attention`.
      positions: [T] int32, with inv_freq; negative ones are taken for 0.
    """
    (tokens, splits, _, dim), (heads,) = sums.shape, sinks.shape
    # A block loads this many parts at once, each into columns / 128 registers of a thread.
    columns, at_a_time = (512, splits) if splits <= 16 else (128, min(splits, 32))

    def body(sums, stats, sinks, *refs):
        *rotation, out = refs
        token, head = lax.axis_index("token"), lax.axis_index("head")
        start = lax.axis_index("columns") * columns
        mine = pl.ds(start, columns)
        turn_back = _rotation(rotation, token, start, columns, dim)

        def splat(x):
            return plgpu.layout_cast(jnp.broadcast_to(x, (columns,)), vectors.layout(columns))

        def add(i, so_far):
            parts = []
            for j in range(at_a_time):
                split = i * at_a_time + j
                at = jnp.minimum(split, splits - 1)
                weight = jnp.where(split < splits, stats[token, at, 1, head], 0.0)
                value = vectors.load(sums.at[token, at, head, mine])
                parts.append((splat(stats[token, at, 0, head]), splat(weight), value))
            for top, weight, value in parts:
                largest, total, acc = so_far
                exists = weight > 0
                peak = jnp.where(exists, jnp.maximum(largest, top), largest)
                old, new = jnp.exp2(largest - peak), jnp.where(exists, jnp.exp2(top - peak), 0.0)
                # Selected, not multiplied by 0: the sums of a part without rows were never written.
                acc = acc * old + jnp.where(exists, value * new, 0.0)
                so_far = peak, total * old + jnp.where(exists, weight * new, 0.0), acc
            return so_far

        # The sink is a part with one weight and no value.
        sink = splat(sinks[head] * math.log2(math.e)), splat(jnp.float32(1)), splat(jnp.float32(0))
        _, total, acc = lax.fori_loop(0, -(-splits // at_a_time), add, sink)
        out[token, head, mine] = turn_back(acc / total).astype(jnp.bfloat16)

    run = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((tokens, heads, dim), jnp.bfloat16),
        kernel_name="combine",
        grid=(tokens, heads, dim // columns),
        grid_names=("token", "head", "columns"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return run(sums, stats, sinks, *([] if inv_freq is None else [positions, inv_freq]))


def _rotation(operands, token, first, columns, dim):
    """A function of values [columns], of channels from `first` on, that rounds them and rotates them back.

    `operands`: (positions, inv_freq), or nothing: they stay as they are.
    """
    if not operands:
        return lambda value: value
    positions, inv_freq = operands
    channel = vectors.channels(columns) + (first - (dim - 2 * inv_freq.shape[0]))
    # On their way while the sums are.
    frequency, position = vectors.take(inv_freq, channel >> 1), jnp.maximum(positions[token], 0).astype(jnp.float32)

    def turn_back(value):
        value, (cos, sin) = round_bfloat16(value), cos_sin(frequency * position)
        other = vectors.exchange(value, 1, None) * jnp.where(channel & 1 == 0, sin, -sin)
        return jnp.where(channel >= 0, value * cos + other, value)

    return turn_back
