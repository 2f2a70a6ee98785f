"""The first launch of `hyper_connections` for up to 4 tokens: new streams, and partial sums of the logits.

The grid is one block of one warpgroup for each 32 channels. Each warp computes one of the 4 streams, and each lane one
channel of this stream with float32 FMAs. A lane keeps its column of `fn` [R, 4 * D], the weights of the R logits, in
registers.

The new streams are weighted sums of the old streams and of y [T, D], the output of the block of the model. If y is to
be summed over GPUs, each thread block first exchanges its channels of y with the same thread block on the other GPUs,
see `mgpu.mailbox`.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hyper_connections import mixing
from pallas_kernels.hyper_connections.mixing import MIXING, SQUARES, STREAMS, SUMS, StreamRefs
from pallas_kernels.mgpu import bfloat16_words as words, mailbox, mlir, thread_ops
from pallas_kernels.mgpu.mailbox import UNIT
from pallas_kernels.mgpu.mlir import WARP, Scalar
from pallas_kernels.mgpu.thread_ops import fma
from pallas_kernels.runtime.launch import primitive


CHANNELS = WARP  # number of channels of a slice, one for each lane
MAX_TOKENS = 4  # largest number of tokens: at the end, each of the four warps adds up the sums of one token
TOKENS = MAX_TOKENS  # number of tokens of a tile, so there is one tile


def scratch_types(tokens: int, rows: int, fuses_all_reduce: bool) -> dict:
    """Returns the scratch types of `update_slice`.

    Args:
      tokens: number of tokens.
      rows: number of rows of fn; not used.
      fuses_all_reduce: whether y is summed over GPUs.
    """
    scratch = {"inbox_smem": plgpu.SMEM((tokens * STREAMS * SUMS,), jnp.float32)}
    if fuses_all_reduce:
        scratch["total_smem"] = plgpu.SMEM((tokens * CHANNELS // 2,), jnp.uint32)
    return scratch


@primitive
def update_slice(index: jax.Array, tile: jax.Array, refs: StreamRefs, inbox_smem, total_smem=None) -> None:
    """Writes 32 channels of the new streams of all tokens, and the partial sums of the logits over these channels.

    Args:
      index: int32 scalar, index of the slice.
      tile: index of the tile of tokens, always 0.
      refs: references to the launch's arrays.
      inbox_smem: [T * 4 * 32] float32, the 32 partial sums of each token and stream.
      total_smem: [T * 16] uint32, the slice's channels of the sum of y over GPUs; None if y is complete.
    """
    mixing.add_channels(refs, index, CHANNELS)


@mlir.emits(update_slice)
def _emit_update_slice(index, tile, refs, inbox_smem, total_smem=None):
    tokens, _, width = refs.streams.type.shape
    f32 = mlir.f32_type()
    thread = mlir.thread()
    warp = thread >> 5  # also the index of the stream that this warp computes
    lane = thread & 31
    column = index * CHANNELS + lane
    inbox = thread_ops.shared(inbox_smem)
    first_weight = mlir.element(refs.fn, warp * width + column)
    weights = [llvm.load(f32, mlir.at(first_weight, 4 * STREAMS * width * r)) for r in range(refs.fn.type.shape[0])]
    loaded = [_load_streams(refs, token, warp, column) for token in range(tokens)]
    if total_smem is not None:
        _sum_over_gpus(refs, total_smem, index, thread)
    terms = [None if refs.y is None else _load_y(refs, total_smem, token, lane, column) for token in range(tokens)]
    for token, ((values, factors), term) in enumerate(zip(loaded, terms, strict=True)):
        value = values[0]
        if term is not None:
            value = term * factors[0]
            for x, factor in zip(values, factors[1:], strict=True):
                value = fma(x, factor, value)
            rounded = arith.truncf(ir.BF16Type.get(), value)
            place = token * (STREAMS * width) + warp * width + column
            llvm.store(rounded, mlir.element(refs.new, place), alignment=2)
            value = Scalar(arith.extf(f32, rounded))
        products = [value * weight for weight in weights]
        products += [None] * (SQUARES - len(products)) + [value * value]
        number = ((token * STREAMS + warp) << 5) + lane  # index of the sum in the inbox
        thread_ops.store(inbox + (number << 2), thread_ops.lane_sums(products))
    mgpu.utils.warpgroup_barrier()
    with thread_ops.when(warp < tokens):
        # Warp w adds up the partial sums of token w's four streams.
        numbers = (((warp * STREAMS + j) << 5) + lane for j in range(STREAMS))
        sums = [thread_ops.load(inbox + (number << 2)) for number in numbers]
        low, high = (x.as_float() + y.as_float() for x, y in (sums[:2], sums[2:]))
        place = (warp * (width // CHANNELS) + index) * SUMS + lane
        llvm.store(low + high, mlir.element(refs.partials, place), alignment=4)


def _load_bfloat16(pointer):
    return Scalar(arith.extf(mlir.f32_type(), llvm.load(ir.BF16Type.get(), pointer)))


def _load_streams(refs, token, warp, column):
    """Loads a token's values of this thread's channel, as MLIR float32.

    Returns:
      (values, factors). `values` lists the value of each stream. This thread's new stream is a weighted sum of y and
      these values. `factors` lists the weight of y, then the weight of each value. If y is None, `values` has only the
      value of this thread's stream, and `factors` is empty.
    """
    width = refs.streams.type.shape[2]
    index = token * (STREAMS * width) + column
    if refs.y is None:
        return [_load_bfloat16(mlir.element(refs.streams, index + warp * width))], []
    first_stream = mlir.element(refs.streams, index)
    values = [_load_bfloat16(mlir.at(first_stream, 2 * width * j)) for j in range(STREAMS)]
    factors = mlir.element(refs.mixing, token * MIXING + warp)
    return values, [llvm.load(mlir.f32_type(), mlir.at(factors, 4 * STREAMS * (1 + j))) for j in range(1 + STREAMS)]


def _sum_over_gpus(refs, total_smem, index, thread):
    """Writes the sum of this block's channels of y over the GPUs to shared memory."""
    tokens, width = refs.y.type.shape
    units = CHANNELS // UNIT
    place = (thread // units) * width + index * CHANNELS + (thread % units) * UNIT
    unit = mailbox.Unit(
        active=thread < tokens * units,
        load=lambda: words.load_four(mlir.element(refs.y, place)),
        store=lambda four: thread_ops.store_vector(thread_ops.shared(total_smem) + (thread << 4), four),
    )
    mailbox.exchange(index, width // CHANNELS, refs.table, [unit])
    mgpu.utils.warpgroup_barrier()


def _load_y(refs, total_smem, token, lane, column):
    if total_smem is None:
        return _load_bfloat16(mlir.element(refs.y, token * refs.y.type.shape[1] + column))
    # A word holds two channels, this lane's and the adjacent lane's.
    word = thread_ops.load(thread_ops.shared(total_smem) + (((token * CHANNELS + lane) >> 1) << 2))
    return (lane & 1).equals(0).where(word << 16, word & 0xFFFF0000).as_float()
