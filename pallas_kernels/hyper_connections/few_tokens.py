"""First launch, up to 4 tokens: new streams, and sums of logits over a slice of channels, by float32 FMAs.

A block of threads has 32 channels of all four streams: a warp a stream, a lane a channel. Each thread keeps its column
of the weight in registers. Where several GPUs have a part each of what is added, a block adds up its channels of these
first, see `mgpu.mailbox`: its equals on the other GPUs have the same channels.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hyper_connections.mixing import SQUARES, STREAMS, SUMS, add_channels
from pallas_kernels.mgpu import bfloat16_words as words, mailbox, mlir, thread_ops
from pallas_kernels.mgpu.mailbox import UNIT
from pallas_kernels.mgpu.mlir import WARP
from pallas_kernels.mgpu.thread_ops import U32, fma
from pallas_kernels.runtime.launch import primitive


CHANNELS = WARP  # of a slice
MAX_TOKENS = 4  # as many as warps


@primitive
def add_slice(part: jax.Array, streams, fn, new, partials, inbox, y=None, mixing=None, table=None, total=None) -> None:
    """One block's work.

    Args:
      part: number of the slice.
      streams: [T, 4, D] bfloat16, the old ones.
      fn: [R, 4 * D] float32.
      new: [T, 4, D] bfloat16, receives the new streams of these channels; None without y.
      partials: [T, slices * 32] float32, receives for each token R sums of products and, at 31, one of squares.
      inbox: [T * 4 * 32] float32 shared memory.
      y, mixing: [T, D] bfloat16, [T, 24] float32; None: the streams stay as they are.
      table: as for `mailbox.check_table`: y is the sum of what these GPUs have; None: y is whole.
      total: [T * 16] uint32 shared memory, with `table`.
    """
    columns = pl.ds(part * CHANNELS, CHANNELS)
    add_channels(columns, part * SUMS, streams, fn, new, partials, y, mixing)


@add_slice.mosaic
def _(part, streams, fn, new, partials, inbox, y=None, mixing=None, table=None, total=None):
    tokens, _, width = streams.shape
    rows, slices = fn.shape[0], width // CHANNELS
    ranks = 0 if table is None else mailbox.num_ranks(table)
    f32, bf16 = mlir.f32_type, ir.BF16Type.get

    def emit(part, streams, fn, partials, inbox, new=None, y=None, mixing=None, table=None, total=None):
        thread, part = U32(mlir.thread()), U32(mlir.scalar(part))
        warp, lane = thread >> 5, thread & 31
        column = part * CHANNELS + lane
        streams, fn, partials = map(mlir.global_pointer, (streams, fn, partials))
        own = mlir.at(fn, mlir.to_i64((warp * width + column).value), f32())
        weights = [llvm.load(f32(), mlir.at(own, 4 * STREAMS * width * r)) for r in range(rows)]
        inbox = thread_ops.shared(inbox)

        def element(pointer, index, kind):
            return mlir.at(pointer, mlir.to_i64(index.value), kind)

        def add_up():
            """The sum of this block's channels of all tokens, into shared memory."""
            units = CHANNELS // UNIT
            place = thread // units * width + part * CHANNELS + thread % units * UNIT

            def load():
                return words.load_four(element(mlir.global_pointer(y), place, bf16()))

            def store(four):
                words.store_shared(thread_ops.shared(total) + (thread << 4), four)

            mailbox.exchange(part, table, [mailbox.Unit(thread < tokens * units, load, store)], ranks=ranks)
            mgpu.utils.warpgroup_barrier()

        def load(pointer):
            return arith.extf(f32(), llvm.load(bf16(), pointer))

        def loads(token):
            """This thread's stream, or all streams, and the factors."""
            first = token * (STREAMS * width) + column
            if y is None:
                return [load(element(streams, first + warp * width, bf16()))], []
            start = element(streams, first, bf16())
            values = [load(mlir.at(start, 2 * width * j)) for j in range(STREAMS)]
            factors = element(mlir.global_pointer(mixing), token * (STREAMS * (2 + STREAMS)) + warp, f32())
            return values, [llvm.load(f32(), mlir.at(factors, 4 * STREAMS * (1 + j))) for j in range(1 + STREAMS)]

        def added(token):
            """What is added to the streams."""
            if table is None:
                return load(element(mlir.global_pointer(y), token * width + column, bf16()))
            word = thread_ops.load(thread_ops.shared(total) + ((token * CHANNELS + lane) >> 1 << 2))
            return thread_ops.as_float((lane & 1).equals(0).where(word << 16, word & 0xFFFF0000))

        def finish(token, values, factors, term):
            if term is None:
                (value,) = values
            else:
                value = arith.mulf(term, factors[0])
                for x, factor in zip(values, factors[1:], strict=True):
                    value = fma(x, factor, value)
                low = arith.truncf(bf16(), value)
                place = token * (STREAMS * width) + warp * width + column
                llvm.store(low, element(mlir.global_pointer(new), place, bf16()), alignment=2)
                value = arith.extf(f32(), low)
            terms: list[Any] = [arith.mulf(value, weight) for weight in weights]
            terms += [None] * (SQUARES - rows) + [arith.mulf(value, value)]
            thread_ops.store(inbox + (((token * STREAMS + warp) << 5) + lane << 2), thread_ops.lane_sums(terms))

        loaded = [loads(U32(token)) for token in range(tokens)]
        if table is not None:
            add_up()
        terms = [None if y is None else added(U32(token)) for token in range(tokens)]
        for token, ((values, factors), term) in enumerate(zip(loaded, terms, strict=True)):
            finish(U32(token), values, factors, term)
        mgpu.utils.warpgroup_barrier()

        with thread_ops.when(warp < tokens):
            sums = [thread_ops.load(inbox + (((warp * STREAMS + j) << 5) + lane << 2)) for j in range(STREAMS)]
            low, high = (arith.addf(*map(thread_ops.as_float, pair)) for pair in (sums[:2], sums[2:]))
            place = element(partials, (warp * slices + part) * SUMS + lane, f32())
            llvm.store(arith.addf(low, high), place, alignment=4)

    more = [] if y is None else [new, y, mixing]
    more += [] if table is None else [table, total]
    mlir.inline(emit, part, streams, fn, partials, inbox, *more)
