"""First launch, few tokens: new streams, and sums of logits over a slice of channels, by float32 FMAs.

A block of threads has 32 channels of all four streams: a warp a stream, a lane a channel. Each thread keeps its column
of the weight in registers.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mlir_helpers as mlir, thread_ops
from pallas_kernels.common.deterministic_math import round_bfloat16
from pallas_kernels.common.mlir_helpers import WARP
from pallas_kernels.common.primitive import primitive
from pallas_kernels.common.thread_ops import U32, fma
from pallas_kernels.hyper_connections.sizes import SQUARES, STREAMS, mixing_terms


CHANNELS = WARP  # of a slice
AT_A_TIME = 4  # tokens whose loads are under way together


@primitive
def add_slice(part: jax.Array, streams, fn, new, partials, inbox, y=None, mixing=None) -> None:
    """One block's work.

    Args:
      part: number of the slice.
      streams: [T, 4, D] bfloat16, the old ones.
      fn: [R, 4 * D] float32.
      new: [T, 4, D] bfloat16, receives the new streams of these channels; None without y.
      partials: [T, slices * 32] float32, receives for each token R sums of products and, at 31, one of squares.
      inbox: [T * 4 * 32] float32 shared memory.
      y, mixing: [T, D] bfloat16, [T, 24] float32; None: the streams stay as they are.
    """
    rows, columns = fn.shape[0], pl.ds(part * CHANNELS, CHANNELS)
    values = streams[:, :, columns].astype(jnp.float32)
    if y is not None and mixing is not None:
        post, comb = mixing_terms(mixing[...])
        added = post[:, :, None] * y[:, columns].astype(jnp.float32)[:, None, :]
        values = round_bfloat16(added + jnp.einsum("tjk,tjd->tkd", comb, values, precision="highest"))
        new[:, :, columns] = values.astype(jnp.bfloat16)
    weights = jnp.stack([fn[:, pl.ds(j * streams.shape[2] + part * CHANNELS, CHANNELS)] for j in range(STREAMS)], 1)
    partials[:, pl.ds(part * WARP, rows)] = jnp.einsum("tjd,rjd->tr", values, weights, precision="highest")
    partials[:, pl.ds(part * WARP + SQUARES, 1)] = jnp.sum(values * values, axis=(1, 2))[:, None]


@add_slice.mosaic
def _(part, streams, fn, new, partials, inbox, y=None, mixing=None):
    tokens, _, width = streams.shape
    rows, slices = fn.shape[0], width // CHANNELS
    f32, bf16 = mlir.f32_type, ir.BF16Type.get

    def emit(part, streams, fn, partials, inbox, new=None, y=None, mixing=None):
        thread, part = U32(mlir.thread()), U32(mlir.scalar(part))
        warp, lane = thread >> 5, thread & 31
        column = part * CHANNELS + lane
        streams, fn, partials = map(mlir.global_pointer, (streams, fn, partials))
        own = mlir.at(fn, mlir.to_i64((warp * width + column).value), f32())
        weights = [llvm.load(f32(), mlir.at(own, 4 * STREAMS * width * r)) for r in range(rows)]
        inbox = thread_ops.shared(inbox)

        def element(pointer, index, kind):
            return mlir.at(pointer, mlir.to_i64(index.value), kind)

        def load(pointer):
            return arith.extf(f32(), llvm.load(bf16(), pointer))

        def loads(token):
            """This thread's stream, or all streams, what is added, and the factors."""
            first = token * (STREAMS * width) + column
            if y is None:
                return [load(element(streams, first + warp * width, bf16()))], []
            start = element(streams, first, bf16())
            values = [load(element(mlir.global_pointer(y), token * width + column, bf16()))]
            values += [load(mlir.at(start, 2 * width * j)) for j in range(STREAMS)]
            factors = element(mlir.global_pointer(mixing), token * (STREAMS * (2 + STREAMS)) + warp, f32())
            return values, [llvm.load(f32(), mlir.at(factors, 4 * STREAMS * (1 + j))) for j in range(1 + STREAMS)]

        def finish(token, values, factors):
            if y is None:
                (value,) = values
            else:
                value = arith.mulf(values[0], factors[0])
                for x, factor in zip(values[1:], factors[1:], strict=True):
                    value = fma(x, factor, value)
                low = arith.truncf(bf16(), value)
                place = token * (STREAMS * width) + warp * width + column
                llvm.store(low, element(mlir.global_pointer(new), place, bf16()), alignment=2)
                value = arith.extf(f32(), low)
            terms: list[Any] = [arith.mulf(value, weight) for weight in weights]
            terms += [None] * (SQUARES - rows) + [arith.mulf(value, value)]
            thread_ops.store(inbox + (((token * STREAMS + warp) << 5) + lane << 2), thread_ops.lane_sums(terms))

        at_a_time = min(tokens, AT_A_TIME)

        def some(i):
            # Clamped: the last token may be written several times, by the same thread.
            numbers = [(i * at_a_time + n).minimum(tokens - 1) for n in range(at_a_time)]
            loaded = [loads(token) for token in numbers]
            for token, (values, factors) in zip(numbers, loaded, strict=True):
                finish(token, values, factors)

        thread_ops.loop(-(-tokens // at_a_time), some)
        mgpu.utils.warpgroup_barrier()

        def total(i):
            token = i * STREAMS + warp
            with thread_ops.when(token < tokens):
                sums = [thread_ops.load(inbox + (((token * STREAMS + j) << 5) + lane << 2)) for j in range(STREAMS)]
                low, high = (arith.addf(*map(thread_ops.as_float, pair)) for pair in (sums[:2], sums[2:]))
                place = element(partials, (token * slices + part) * WARP + lane, f32())
                llvm.store(arith.addf(low, high), place, alignment=4)

        thread_ops.loop(-(-tokens // STREAMS), total)

    added = [] if y is None else [new, y, mixing]
    mlir.inline(emit, part, streams, fn, partials, inbox, *added)
