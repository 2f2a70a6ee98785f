"""Combines the KV splits of decode attention: one softmax from the weighted sums and statistics of each split.

    out = rope^-1(sum_s 2 ** (max_s - max) sums_s / (sum_s 2 ** (max_s - max) weight_s + 2 ** (sink - max)))

Here s is the index of a split, and max_s and weight_s are its statistics. max is the largest of all max_s and the sink.
rope^-1 is the optional inverse rotation. All scores and the sink include the factor log2(e). The grid is (token, head,
slice of columns). A block is one warpgroup and adds the splits in their order, so that the result's rounding does not
depend on which split was computed first.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import vectors
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.layer_operands import layer_operand, weights_of_layer
from pallas_kernels.sparse_attention.inverse_rope import vector_inverse_rope


def combine(
    sums: jax.Array,
    stats: jax.Array,
    sinks: jax.Array,
    positions: jax.Array | None = None,
    inv_freq: jax.Array | None = None,
    *,
    layer: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Adds up the KV splits of each token's attention and divides by the softmax's denominator.

    Args:
      sums: [T, S, H', D] float32, for each of S splits the sum of its rows times their weights; D is a multiple of 512
        and H' at least H. The sums of a split without rows are ignored.
      stats: [T, S, 2, H'] float32. Element 0 is the largest score of a split's rows, where scores include the factor
        `log2(e)`. Element 1 is the sum of the rows' weights `2 ** (score - largest)`, 0 if the split has no rows.
      sinks: [H] float32 sink logits, or a stack [layers, H].
      positions: [T] int32; negative positions count as 0. None if `inv_freq` is None.
      inv_freq: [P] float32 RoPE frequencies for the inverse rotation, or None, as in `sparse_attention`.
      layer: [] int32, index of this layer if `sinks` is a stack; None if it is not.
      interpret: whether to run on the CPU, interpreted, with race detection.

    Returns:
      [T, H, D] bfloat16.
    """
    tokens, splits, _, dim = sums.shape
    heads = sinks.shape[-1]
    # Number of columns of a block, and number of splits that a block loads at once. A split takes `columns / 128`
    # registers of each thread.
    columns, splits_at_once = (512, splits) if splits <= 16 else (128, min(splits, 32))
    launch = kernel(
        functools.partial(_combine_kernel, columns, splits_at_once),
        out_type=jax.ShapeDtypeStruct((tokens, heads, dim), jnp.bfloat16),
        kernel_name="combine",
        grid={"token": tokens, "head": heads, "columns": dim // columns},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    rotation = None if inv_freq is None else (positions, inv_freq)
    return launch(sums, stats, sinks, layer_operand(layer), rotation)


def _combine_kernel(columns, splits_at_once, sums_gmem, stats_gmem, sinks_gmem, layer_gmem, rotation_gmem, out_gmem):
    sinks_gmem = weights_of_layer(sinks_gmem, layer_gmem)
    splits = sums_gmem.shape[1]
    dim = sums_gmem.shape[3]
    token, head = axis_indices("token", "head")
    first_column = lax.axis_index("columns") * columns
    own_columns = pl.ds(first_column, columns)
    rotate = None
    if rotation_gmem is not None:
        positions_gmem, inv_freq_gmem = rotation_gmem
        channels = vectors.channels(columns) + (first_column - (dim - 2 * inv_freq_gmem.shape[0]))
        rotate = vector_inverse_rope(positions_gmem, inv_freq_gmem, token, channels)

    def splat(x):
        return plgpu.layout_cast(jnp.broadcast_to(x, (columns,)), vectors.layout(columns))

    def load_split(split):
        clipped = jnp.minimum(split, splits - 1)
        weight = jnp.where(split < splits, stats_gmem[token, clipped, 1, head], 0.0)
        values = vectors.load(sums_gmem.at[token, clipped, head, own_columns])
        return splat(stats_gmem[token, clipped, 0, head]), splat(weight), values

    def add_splits(i, carry):
        loaded = [load_split(i * splits_at_once + j) for j in range(splits_at_once)]
        for split_max, weight, values in loaded:
            running_max, running_sum, acc = carry
            exists = weight > 0
            new_max = jnp.where(exists, jnp.maximum(running_max, split_max), running_max)
            rescale = jnp.exp2(running_max - new_max)
            split_scale = jnp.where(exists, jnp.exp2(split_max - new_max), 0.0)
            # The sums of a split without rows are unspecified. A select leaves them out, since 0 times NaN is NaN.
            acc = acc * rescale + jnp.where(exists, values * split_scale, 0.0)
            carry = new_max, running_sum * rescale + jnp.where(exists, weight * split_scale, 0.0), acc
        return carry

    # The sink counts as a split whose largest score is the sink, whose sum of weights is 1 and whose values are 0.
    sink = splat(sinks_gmem[head] * math.log2(math.e)), splat(jnp.float32(1)), splat(jnp.float32(0))
    _, total, acc = lax.fori_loop(0, -(-splits // splits_at_once), add_splits, sink)
    result = acc / total
    out_gmem[token, head, own_columns] = (rotate(result) if rotate else result).astype(jnp.bfloat16)
