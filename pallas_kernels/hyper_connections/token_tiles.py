"""First launch, some tokens: new streams, and sums of logits over a slice of channels, by float32 FMAs.

A block of threads has 32 tokens and 32 channels of all four streams. It computes the new streams, a thread 8 channels
of a token, and puts them and its columns of the weight into shared memory. Then a lane adds up products of a token, a
warp a quarter of the logits.
"""

import jax
import jax.experimental.pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mlir_helpers as mlir, thread_ops
from pallas_kernels.common.mlir_helpers import THREADS, WARP
from pallas_kernels.common.primitive import primitive
from pallas_kernels.common.thread_ops import U32, fma
from pallas_kernels.hyper_connections import words
from pallas_kernels.hyper_connections.mixing import SQUARES, STREAMS, SUMS, add_channels


CHANNELS = 32  # of a slice
COLUMNS = STREAMS * CHANNELS  # of the weight
TOKENS = WARP  # of a tile
PITCH = TOKENS + 1  # of a column's tokens in shared memory, so that threads write to different banks
WARPS = THREADS // WARP


@primitive
def add_tile(
    part: jax.Array, tile: jax.Array, streams, fn, new, partials, weights, values, y=None, mixing=None
) -> None:
    """One block's work.

    Args:
      part: number of the slice.
      tile: number of the 32 tokens.
      streams, fn, new, partials, y, mixing: as in `few_tokens.add_slice`.
      weights: [R * 128] float32 shared memory.
      values: [128 * 33] float32 shared memory.
    """
    # All tiles: their tokens are few.
    add_channels(pl.ds(part * CHANNELS, CHANNELS), part * SUMS, streams, fn, new, partials, y, mixing)


@add_tile.mosaic
def _(part, tile, streams, fn, new, partials, weights, values, y=None, mixing=None):
    tokens, _, width = streams.shape
    rows, slices = fn.shape[0], width // CHANNELS
    share = rows // WARPS

    def emit(part, tile, streams, fn, partials, weights, values, new=None, y=None, mixing=None):
        thread, part, tile = U32(mlir.thread()), U32(mlir.scalar(part)), U32(mlir.scalar(tile)) * TOKENS
        warp, lane, unit, row = thread >> 5, thread & 31, thread & 3, thread >> 2
        weights, values = thread_ops.shared(weights), thread_ops.shared(values)

        def element(ref, index, size):
            offset = arith.muli(mlir.to_i64(index.value), mlir.i64(size))
            return mlir.at(mlir.global_pointer(ref), offset)

        # Clamped: the last token may be written several times, with the same values.
        token, own = (tile + row).minimum(tokens - 1), part * CHANNELS + unit * 8
        first = token * (STREAMS * width) + own
        loaded = [words.load_four(mlir.at(element(streams, first, 2), 2 * width * j)) for j in range(STREAMS)]
        factors = []
        if y is not None:
            loaded.append(words.load_four(element(y, token * width + own, 2)))
            factors = words.load_factors(element(mixing, token * (STREAMS * (2 + STREAMS)), 4))
        # (row of the weight, stream, 4 channels) are in this order in shared memory. All loads come before a store.
        numbers = [thread + i for i in range(0, rows * COLUMNS // 4, THREADS)]
        columns = [((at >> 3) & 3) * width + part * CHANNELS + ((at & 7) << 2) for at in numbers]
        starts = [(at >> 5) * (STREAMS * width) + column for at, column in zip(numbers, columns, strict=True)]
        fours = [words.load_four(element(fn, start, 4)) for start in starts]
        for at, four in zip(numbers, fours, strict=True):
            words.store_shared(weights + (at << 4), four)
        if y is not None:
            loaded = list(zip(*(words.mixed(four, factors) for four in zip(*loaded, strict=True)), strict=True))
            for k in range(STREAMS):
                words.store_four(mlir.at(element(new, first, 2), 2 * width * k), loaded[k])
        sums = [mlir.f32(0.0), mlir.f32(0.0)]
        for k in range(STREAMS):
            for i, word in enumerate(loaded[k]):
                pair = words.unpack(word)
                sums = [fma(x, x, total) for x, total in zip(pair, sums, strict=True)]
                for half, x in enumerate(pair):
                    column = (unit << 3) + (k * CHANNELS + 2 * i + half)
                    thread_ops.store(values + (column * PITCH + row << 2), thread_ops.bits(x))
        total = arith.addf(*sums)
        for distance in (2, 1):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        with thread_ops.when(unit.equals(0)):
            llvm.store(total, element(partials, (token * slices + part) * SUMS + SQUARES, 4), alignment=4)
        mgpu.utils.warpgroup_barrier()

        def add(i, *totals):
            totals = [thread_ops.as_float(x) for x in totals]
            column = i * 8
            found = [thread_ops.load(values + ((column + n) * PITCH + lane << 2)) for n in range(8)]
            for r in range(share):
                start = weights + (((warp * share + r) * COLUMNS + column) << 2)
                own = [x for half in range(2) for x in thread_ops.load_vector(start + 16 * half)]
                for x, weight in zip(found, own, strict=True):
                    totals[r] = fma(thread_ops.as_float(x), thread_ops.as_float(weight), totals[r])
            return [thread_ops.bits(x) for x in totals]

        totals = thread_ops.loop(COLUMNS // 8, add, *[U32(0)] * share)
        with thread_ops.when(tile + lane < tokens):
            place = element(partials, ((tile + lane) * slices + part) * SUMS + warp * share, 4)
            for r, total in enumerate(totals):
                llvm.store(total.value, mlir.at(place, 4 * r), alignment=4)

    added = [] if y is None else [new, y, mixing]
    mlir.inline(emit, part, tile, streams, fn, partials, weights, values, *added)
