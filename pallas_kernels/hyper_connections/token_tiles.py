"""First launch, some tokens: new streams, and sums of logits over a slice of channels, by `mma`.

A block of threads has 32 tokens and 32 channels of all four streams. It computes the new streams, a thread 8 channels
of a token, and puts them into shared memory. Then a warp multiplies a stream with its columns of the weight, as sums of
three bfloat16, so that the products are as exact as float32.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hyper_connections.mixing import SQUARES, STREAMS, SUMS, add_channels, load_factors, mixed_words
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops
from pallas_kernels.mgpu.mlir import THREADS, WARP
from pallas_kernels.mgpu.thread_ops import U32, fma
from pallas_kernels.runtime.launch import primitive


CHANNELS = 32  # of a slice
TOKENS = 32  # of a tile
STEP = 16  # columns of `mma`


@primitive
def add_tile(
    part: jax.Array, tile: jax.Array, streams, fn, new, partials, tile_values, sums, y=None, mixing=None
) -> None:
    """One block's work.

    Args:
      part: number of the slice.
      tile: number of the 32 tokens.
      streams, fn, new, partials, y, mixing: as in `few_tokens.add_slice`.
      tile_values: [4 * 32, 32] bfloat16 shared memory.
      sums: [4 * 2 * ceil(R / 8) * 128] float32 shared memory.
    """

    @pl.when(tile == 0)
    def _():  # that of all tiles: their tokens are few
        add_channels(pl.ds(part * CHANNELS, CHANNELS), part * SUMS, streams, fn, new, partials, y, mixing)


@add_tile.mosaic
def _(part, tile, streams, fn, new, partials, tile_values, sums, y=None, mixing=None):
    tokens, _, width = streams.shape
    rows, slices = fn.shape[0], width // CHANNELS
    groups = -(-rows // 8)

    def emit(part, tile, streams, fn, partials, tile_values, sums, new=None, y=None, mixing=None):
        thread, part, tile = U32(mlir.thread()), U32(mlir.scalar(part)), U32(mlir.scalar(tile)) * TOKENS
        warp, lane = thread >> 5, thread & 31
        values, sums = thread_ops.shared(tile_values), thread_ops.shared(sums)

        def element(ref, index, size):
            offset = arith.muli(mlir.to_i64(index.value), mlir.i64(size))
            return mlir.at(mlir.global_pointer(ref), offset)

        def place(stream, row, eight):
            """Where 8 channels of a token are, so that neither stores nor loads meet in a bank."""
            return values + ((stream * TOKENS + row) << 6) + ((eight ^ (row & 2)) << 4)

        # Clamped: the last token may be written several times, with the same values.
        row, eight = thread >> 2, thread & 3
        token, own = (tile + row).minimum(tokens - 1), part * CHANNELS + eight * 8
        first = token * (STREAMS * width) + own
        loaded = [words.load_four(mlir.at(element(streams, first, 2), 2 * width * j)) for j in range(STREAMS)]
        factors = []
        if y is not None:
            loaded.append(words.load_four(element(y, token * width + own, 2)))
            factors = load_factors(element(mixing, token * (STREAMS * (2 + STREAMS)), 4))
        # The warp's stream: a lane has 4 channels of every 16, of a row of every 8.
        inner, column = lane & 3, warp * width + part * CHANNELS
        weights = {}
        for group in range(groups):
            for step in range(CHANNELS // STEP):
                index = (
                    ((lane >> 2) + 8 * group).minimum(rows - 1) * (STREAMS * width) + column + step * STEP + inner * 4
                )
                weights[group, step] = words.load_four(element(fn, index, 4))
        if y is not None:
            loaded = list(zip(*(mixed_words(four, factors) for four in zip(*loaded, strict=True)), strict=True))
            for k in range(STREAMS):
                words.store_four(mlir.at(element(new, first, 2), 2 * width * k), loaded[k])
        squares = [mlir.f32(0.0), mlir.f32(0.0)]
        for k in range(STREAMS):
            words.store_shared(place(U32(k), row, eight), loaded[k])
            for word in loaded[k]:
                squares = [fma(x, x, total) for x, total in zip(words.unpack(word), squares, strict=True)]
        total = arith.addf(*squares)
        for distance in (2, 1):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        with thread_ops.when(eight.equals(0)):
            llvm.store(total, element(partials, (token * slices + part) * SUMS + SQUARES, 4), alignment=4)
        mgpu.utils.warpgroup_barrier()

        products: dict[tuple[int, int], Any] = {}
        for step in range(CHANNELS // STEP):
            for half in range(TOKENS // 16):
                pairs = []
                for line in (16 * half, 16 * half + 8):
                    there = place(warp, (lane >> 2) + line, (inner >> 1) + 2 * step) + ((inner & 1) << 3)
                    code = "ld.shared.v2.b32 {$0, $1}, [$2];"
                    pairs.append([U32(x) for x in mlir.ptx(code, there.value, results=[mlir.int_type()] * 2)])
                operand = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
                for group in range(groups):
                    acc = products.get((half, group), [mlir.f32(0.0)] * 4)
                    for piece in words.split(weights[group, step]):
                        acc = words.multiply_add(acc, operand, piece)
                    products[half, group] = acc
        # A warp's sums, four of each lane, then those of all warps.
        each = TOKENS // 16 * groups
        for (half, group), acc in products.items():
            number = (warp * each + half * groups + group) * WARP + lane
            words.store_shared(sums + (number << 4), [thread_ops.bits(x) for x in acc])
        mgpu.utils.warpgroup_barrier()

        def store(number):
            found = [thread_ops.load_vector(sums + ((number + j * each * WARP) << 4)) for j in range(STREAMS)]
            totals = [_tree([thread_ops.as_float(x) for x in four]) for four in zip(*found, strict=True)]
            lane, tile_part = number & 31, number >> 5
            token = tile + (tile_part // groups) * 16 + (lane >> 2)
            logit = (tile_part % groups) * 8 + (lane & 3) * 2
            for i in range(2):
                with thread_ops.when(token + 8 * i < tokens):
                    there = element(partials, ((token + 8 * i) * slices + part) * SUMS + logit, 4)
                    llvm.store(mlir.pack(totals[2 * i : 2 * i + 2]), there, alignment=8)

        for begin in range(0, each * WARP, THREADS):
            if begin + THREADS <= each * WARP:
                store(thread + begin)
            else:
                with thread_ops.when(thread + begin < each * WARP):
                    store(thread + begin)

    added = [] if y is None else [new, y, mixing]
    mlir.inline(emit, part, tile, streams, fn, partials, tile_values, sums, *added)


def _tree(terms):
    low, high = (arith.addf(*pair) for pair in (terms[:2], terms[2:]))
    return arith.addf(low, high)
