"""Products of low-rank adapters (LoRA) for few tokens: y[t, m] + sum_k up[m, k] * inner[t, k].

The sum runs over the values k that belong to the token's adapter.

All maps of one input take one launch. A block adds the products of 64 or 128 channels of a map. It copies its rows of
`up`, its columns of `y`, and `inner` to shared memory, and replaces the values of `inner` that do not belong to a
token's adapter by zeros. In the `wgmma`, the tokens are the rows of the accumulator and the channels its columns.
"""

import functools
from collections.abc import Sequence

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.spec import BFLOAT16_TOKENS, at_row
from pallas_kernels.mgpu import wgmma
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand, weights_of_layer
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_TOKENS = BFLOAT16_TOKENS[-1]  # also the number of rows of an accumulator
CHANNELS = 64  # smallest number of channels of a block
# Maximum number of blocks with 64 channels each. If more blocks would be needed, blocks have 128 channels, provided
# that 128 divides the number of channels of every group.
MAX_BLOCKS = 3 * MULTIPROCESSORS
RANKS = range(64, 257, 64)  # the depth, the number of adapters times their rank, is one of these numbers


@cached_trace("rank")
def add_adapters(
    outputs: Sequence[jax.Array],
    inners: Sequence[jax.Array],
    ups: Sequence[jax.Array],
    numbers: jax.Array,
    scales: jax.Array,
    *,
    layer: jax.Array | None = None,
    rank: int,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Adds the products of each token's adapter to the outputs of linear maps.

    Args:
      outputs: for each map its output [T, M] bfloat16. T is a multiple of 8 up to 64, M a multiple of 64.
      inners: for each map [T, groups * depth] float32, the products of the map's input with the matrices `down` of all
        adapters. The depth is the number of adapters times the rank, a multiple of 64 up to 256. If there are several
        groups, the g-th share of the M channels takes the g-th share of `inner`.
      ups: for each map [M, depth] bfloat16, the matrices `up` of all adapters side by side.
      numbers: [T] int32, index of each token's adapter, below `depth / rank`. A token with another value, such as -1,
        has no adapter.
      scales: [depth] float32 factors of the values of `inner`. Each product of a value and its factor is rounded to
        bfloat16.
      layer: [] int32 index of this layer if `ups` have a leading axis of layers, else None.
      rank: rank of the adapters, the number of values of `inner` that belong to one adapter.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      The outputs with the products added, rounded once to bfloat16.

    Raises:
      NotImplementedError: the kernel does not take these shapes or dtypes.
    """
    tokens = outputs[0].shape[0]
    depth = ups[0].shape[-1]
    check_array("numbers", numbers, jnp.int32, tokens)
    check_array("scales", scales, jnp.float32, depth)
    check_rules(
        {
            f"tokens in {BFLOAT16_TOKENS}, got {tokens}": tokens in BFLOAT16_TOKENS,
            f"adapters times rank in {RANKS}, got {depth}": depth in RANKS,
        }
    )
    sizes = []
    for y, inner, up in zip(outputs, inners, ups, strict=True):
        check_array("outputs", y, jnp.bfloat16, tokens, None)
        check_array("inners", inner, jnp.float32, tokens, None)
        check_weight("ups", up, layer, jnp.bfloat16, y.shape[1], depth)
        groups = inner.shape[1] // depth
        rule = f"groups of a multiple of {CHANNELS} channels, got {groups} groups of {y.shape[1]} channels"
        check_rules({rule: y.shape[1] % (groups * CHANNELS) == 0})
        sizes.append(y.shape[1] // groups)
    channels = CHANNELS
    if sum(y.shape[1] for y in outputs) > MAX_BLOCKS * CHANNELS and not any(size % (2 * CHANNELS) for size in sizes):
        channels *= 2
    launch = kernel(
        functools.partial(_body, rank),
        out_type=[jax.ShapeDtypeStruct(y.shape, y.dtype) for y in outputs],
        kernel_name="add_adapters",
        grid={"block": sum(y.shape[1] for y in outputs) // channels},
        scratch_types={
            "inner_smem": wgmma.operand(MAX_TOKENS, depth, dtype=jnp.float32),
            # `inner` times the scales; 0 outside of the token's adapter.
            "masked_smem": wgmma.operand(MAX_TOKENS, depth),
            "numbers_smem": plgpu.SMEM((MAX_TOKENS,), jnp.int32),
            # `y`, then the result.
            "out_smem": wgmma.operand(MAX_TOKENS, channels),
            "ready": plgpu.Barrier(num_arrivals=5),
            "scales_smem": plgpu.SMEM((depth,), jnp.float32),
            "up_smem": wgmma.operand(channels, depth),
        },
        interpret=interpret,
    )
    maps = list(zip(outputs, inners, strict=True))
    return tuple(launch(maps, list(ups), numbers, scales, layer_operand(layer)))


def _body(rank, maps_gmem, ups_gmem, numbers_gmem, scales_gmem, layer_gmem, *outs_gmem, **scratch):
    (block,) = axis_indices("block")
    ups_gmem = weights_of_layer(ups_gmem, layer_gmem)
    refs = [(*inputs, up, out) for inputs, up, out in zip(maps_gmem, ups_gmem, outs_gmem, strict=True)]
    blocks = [y_gmem.shape[1] // scratch["out_smem"].shape[1] for y_gmem, _ in maps_gmem]
    at_row(refs, blocks, block, functools.partial(_add, rank, numbers_gmem, scales_gmem, **scratch))


def _add(
    rank,
    numbers_gmem,
    scales_gmem,
    refs,
    block,
    *,
    inner_smem,
    masked_smem,
    numbers_smem,
    out_smem,
    ready,
    scales_smem,
    up_smem,
):
    """Computes a block's channels of one map: the map's output plus the products of the adapters.

    `refs` are the references (y, inner, up, out) of the map. `block` is the index of the block among those of the map.
    """
    y_gmem, inner_gmem, up_gmem, out_gmem = refs
    tokens, channels = y_gmem.shape
    width, depth = up_smem.shape
    groups = inner_gmem.shape[1] // depth
    group_blocks = channels // (groups * width)
    block_channels = pl.ds(block * width, width)
    rows = pl.ds(0, tokens)
    columns = pl.ds(lax.div(block, group_blocks) * depth, depth)
    copies = (
        (up_gmem.at[block_channels], up_smem),
        (inner_gmem.at[:, columns], inner_smem.at[rows]),
        (y_gmem.at[:, block_channels], out_smem.at[rows]),
        (numbers_gmem, numbers_smem.at[rows]),
        (scales_gmem, scales_smem),
    )
    for source, destination in copies:
        plgpu.copy_gmem_to_smem(source, destination, ready)
    plgpu.barrier_wait(ready)
    # Rows past the last token are unspecified, and are not stored.
    shape = MAX_TOKENS, depth
    layout = plgpu.Layout.WGMMA
    inner = plgpu.load(inner_smem, layout=layout)
    numbers = lax.broadcast_in_dim(plgpu.load(numbers_smem, layout=layout.reduce(1)), shape, (0,))
    scales = lax.broadcast_in_dim(plgpu.load(scales_smem, layout=layout.reduce(0)), shape, (1,))
    adapters = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout), rank)
    masked = jnp.where(adapters == numbers, inner * scales, 0.0)
    masked_smem[...] = masked.astype(jnp.bfloat16)
    plgpu.commit_smem()
    zeros = wgmma.zeros((MAX_TOKENS, width))
    sums = wgmma.multiply_add(zeros, masked_smem, up_smem.transpose((1, 0)))
    y = plgpu.load(out_smem, layout=layout).astype(jnp.float32)
    out_smem[...] = (y + sums).astype(jnp.bfloat16)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem.at[rows], out_gmem.at[:, block_channels])
    plgpu.wait_smem_to_gmem(0)
