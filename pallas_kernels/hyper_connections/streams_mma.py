"""The first launch of `hyper_connections` for 5 to 256 tokens: new streams, and partial sums of the logits.

The grid has a block of one warpgroup for each 32 channels and 32 tokens. A block does three steps:

  1. Each thread computes 8 channels of all new streams of a token, and writes them to global and to shared memory.
  2. Each warp multiplies one of the 4 streams with the stream's columns of `fn` [R, 4 * D], the weights of the logits.
     It uses `mma`, for which float32 weights are split into sums of three bfloat16. So products are as exact as float32
     products.
  3. The sums of the four warps are added up in shared memory and stored.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hyper_connections import mixing
from pallas_kernels.hyper_connections.mixing import MIXING, SQUARES, STREAMS, SUMS, StreamRefs
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops
from pallas_kernels.mgpu.mlir import THREADS, WARP, Scalar
from pallas_kernels.runtime.launch import primitive


CHANNELS = 32  # number of channels of a slice
TOKENS = 32  # number of tokens of a tile
STEP = 16  # number of channels that an `mma` multiplies
STEPS = CHANNELS // STEP
HALVES = TOKENS // 16  # an `mma` multiplies 16 tokens, half of a tile


def scratch_types(tokens: int, rows: int, fuses_all_reduce: bool) -> dict:
    """Returns the scratch types of `update_slice`.

    Args:
      tokens: number of tokens; not used.
      rows: number of rows of fn.
      fuses_all_reduce: always False, because this launch does not sum y over GPUs.
    """
    return {
        "sums_smem": plgpu.SMEM((STREAMS * HALVES * -(-rows // 8) * THREADS,), jnp.float32),
        "values_smem": plgpu.SMEM((STREAMS * TOKENS, CHANNELS), jnp.bfloat16),
    }


@primitive
def update_slice(index: jax.Array, tile: jax.Array, refs: StreamRefs, values_smem, sums_smem) -> None:
    """Writes 32 channels of the new streams of 32 tokens, and the partial sums of the logits over these channels.

    Args:
      index: int32 scalar, index of the slice of 32 channels.
      tile: int32 scalar, index of the tile of 32 tokens.
      refs: references to the launch's arrays.
      values_smem: [4 streams * 32 tokens, 32 channels] bfloat16, the new streams; on a GPU, in the order of `_address`.
      sums_smem: [4 * n * 128] float32, the sums of the 4 warps. A warp has 128 sums from each of its n products, with
        n = 2 * ceil(R / 8): one product for 16 tokens and 8 rows of fn, of several `mma` instructions.
    """
    # Interpreted, the call for tile 0 computes all tiles, since tests have few tokens.
    pl.when(tile == 0)(lambda: mixing.add_channels(refs, index, CHANNELS))


@mlir.emits(update_slice)
def _emit_update_slice(index, tile, refs, values_smem, sums_smem):
    tokens, _, width = refs.streams.type.shape
    rows = refs.fn.type.shape[0]
    slices = width // CHANNELS
    groups = -(-rows // 8)  # number of groups of 8 rows of fn; an `mma` multiplies one group
    thread = mlir.thread()
    first_token = tile * TOKENS
    warp = thread >> 5
    lane = thread & 31
    values = thread_ops.shared(values_smem)
    sums = thread_ops.shared(sums_smem)
    row = thread >> 2  # index of the thread's token in the tile
    eight = thread & 3  # index of the thread's group of 8 channels in the slice
    # Indices of tokens past the end are clamped, so the last token may be written several times, with equal values.
    token = (first_token + row).minimum(tokens - 1)
    channel = index * CHANNELS + eight * 8
    loaded = mixing.load_streams(refs.streams, refs.y, token, channel)
    factors = []
    if refs.y is not None:
        factors = mixing.load_factors(mlir.element(refs.mixing, token * MIXING, 4))
    weights = _load_fn(refs.fn, warp * width + index * CHANNELS, rows, width)
    if refs.y is not None:
        loaded = mixing.mix(loaded, factors)
        mixing.store_streams(refs.new, token, channel, loaded)
    addresses = (_address(values, k, row, eight) for k in range(STREAMS))
    squares = thread_ops.sum_lanes(mixing.store_and_square(loaded[:STREAMS], addresses), 4)
    with thread_ops.when(eight.equals(0)):
        llvm.store(squares, mlir.element(refs.partials, (token * slices + index) * SUMS + SQUARES, 4), alignment=4)
    mgpu.utils.warpgroup_barrier()

    # Each warp stores its sums, four per lane for each product of 16 tokens and 8 rows. Then `store_sums` adds up the
    # sums of the four warps.
    num_products = HALVES * groups
    for (half, group), acc in _multiply(values, warp, weights, groups).items():
        number = (warp * num_products + half * groups + group) * WARP + lane  # index of this lane's four sums
        thread_ops.store_vector(sums + (number << 4), [x.bits() for x in acc])
    mgpu.utils.warpgroup_barrier()

    def store_sums(number):
        terms = [thread_ops.load_vector(sums + ((number + j * num_products * WARP) << 4)) for j in range(STREAMS)]
        totals = [_sum_four(*map(Scalar.as_float, four)) for four in zip(*terms, strict=True)]
        lane = number & 31
        product = number >> 5  # index of the product, ordered by half of the tile, then by group of rows
        token = first_token + (product // groups) * 16 + (lane >> 2)
        logit = (product % groups) * 8 + (lane & 3) * 2
        for i in range(2):
            with thread_ops.when(token + 8 * i < tokens):
                place = mlir.element(refs.partials, ((token + 8 * i) * slices + index) * SUMS + logit, 4)
                llvm.store(mlir.pack(totals[2 * i : 2 * i + 2]), place, alignment=8)

    thread_ops.for_each(num_products * WARP, store_sums)


def _load_fn(fn, column, rows, width):
    """Loads the weights that this lane needs for one slice of one stream.

    Args:
      fn: [rows, 4 * width] float32 in global memory, all weights.
      column: MLIR index of the slice's first column in fn.
      rows: number of rows of fn.
      width: number of channels of a stream.

    Returns:
      {(index of a group of 8 rows, index of a step of 16 columns): bits of four float32 weights}. The four weights are
      in one row, in consecutive columns.
    """
    lane = mlir.thread() & 31
    weights = {}
    for group in range(-(-rows // 8)):
        for step in range(STEPS):
            row = ((lane >> 2) + 8 * group).minimum(rows - 1)
            index = row * (STREAMS * width) + column + step * STEP + (lane & 3) * 4
            weights[group, step] = words.load_four(mlir.element(fn, index, 4))
    return weights


def _multiply(values, warp, weights, groups):
    """Multiplies stream `warp` of the tile, in shared memory at address `values`, with the weights of `_load_fn`.

    Returns {(half of the tile's tokens, group of 8 rows): this lane's four MLIR float32 sums}.
    """
    lane = mlir.thread() & 31
    products: dict[tuple[int, int], Any] = {}
    for step in range(STEPS):
        for half in range(HALVES):
            pairs = []
            for line in (16 * half, 16 * half + 8):
                inner = lane & 3
                eight = _address(values, warp, (lane >> 2) + line, (inner >> 1) + 2 * step)
                address = eight + ((inner & 1) << 3)  # address of four adjacent channels
                pairs.append(thread_ops.ptx_words(2, "ld.shared.v2.b32 {$0, $1}, [$2];", address))
            operand = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
            for group in range(groups):
                acc = products.get((half, group), [Scalar(0.0)] * 4)
                for term in words.split(weights[group, step]):
                    acc = words.multiply_add(acc, operand, term)
                products[half, group] = acc
    return products


def _address(values, stream, row, eight):
    """Returns the shared memory address of channels 8 * eight .. 8 * eight + 7 of a stream of token `row`.

    The places of the 8-channel pieces are swizzled, so that neither stores nor loads have bank conflicts.
    """
    return values + ((stream * TOKENS + row) << 6) + ((eight ^ (row & 2)) << 4)


def _sum_four(first, second, third, fourth):
    return (first + second) + (third + fourth)
