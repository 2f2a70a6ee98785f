"""The first launch of `hyper_connections` for up to 4 tokens: new streams, and partial sums of the logits.

The grid is one block of one warpgroup for each 32 channels. Each warp computes one of the 4 streams, and each lane one
channel of this stream with float32 FMAs. A lane keeps its column of `fn` [R, 4 * D], the weights of the logits, in
registers. If y is to be summed over GPUs, a block first exchanges its channels of y with the same block of the other
GPUs, see `mgpu.mailbox`.
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
from pallas_kernels.mgpu.mlir import U32, WARP
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
    thread = _Thread(index, refs, total_smem)
    tokens = refs.streams.type.shape[0]
    inbox = thread_ops.shared(inbox_smem)
    fn_column = thread.load_fn()
    loaded = [thread.load_streams(U32(token)) for token in range(tokens)]
    if total_smem is not None:
        thread.sum_over_gpus(tokens)
    terms = [None if refs.y is None else thread.load_y(U32(token)) for token in range(tokens)]
    for token, ((values, factors), term) in enumerate(zip(loaded, terms, strict=True)):
        value = values[0] if term is None else thread.update_stream(U32(token), values, factors, term)
        products = [arith.mulf(value, weight) for weight in fn_column]
        products += [None] * (SQUARES - len(products)) + [arith.mulf(value, value)]
        number = ((U32(token) * STREAMS + thread.warp) << 5) + thread.lane  # index of the sum in the inbox
        thread_ops.store(inbox + (number << 2), thread_ops.lane_sums(products))
    mgpu.utils.warpgroup_barrier()
    with thread_ops.when(thread.warp < tokens):
        thread.store_partials(inbox)


class _Thread:
    """Emits the code of one thread, which computes one channel of one stream, for all tokens."""

    def __init__(self, index, refs, total):
        self.thread = mlir.thread()
        self.index = index
        self.refs = refs
        self.total = total
        self.warp = self.thread >> 5
        self.lane = self.thread & 31
        self.column = index * CHANNELS + self.lane
        self.width = refs.streams.type.shape[2]
        self.f32 = mlir.f32_type()
        self.bf16 = ir.BF16Type.get()

    def load_bf16(self, pointer):
        return arith.extf(self.f32, llvm.load(self.bf16, pointer))

    def load_fn(self):
        first_row = mlir.element(self.refs.fn, self.warp * self.width + self.column)
        rows = self.refs.fn.type.shape[0]
        return [llvm.load(self.f32, mlir.at(first_row, 4 * STREAMS * self.width * r)) for r in range(rows)]

    def load_streams(self, token):
        """Loads a token's values of this thread's channel, as MLIR float32.

        Returns:
          (values, factors). `values` lists the value of each stream. This thread's new stream is a weighted sum of y
          and these values. `factors` lists the weight of y, then the weight of each value. If y is None, `values` has
          only the value of this thread's stream, and `factors` is empty.
        """
        index = token * (STREAMS * self.width) + self.column
        if self.refs.y is None:
            return [self.load_bf16(mlir.element(self.refs.streams, index + self.warp * self.width))], []
        first_stream = mlir.element(self.refs.streams, index)
        values = [self.load_bf16(mlir.at(first_stream, 2 * self.width * j)) for j in range(STREAMS)]
        factors = mlir.element(self.refs.mixing, token * MIXING + self.warp)
        return values, [llvm.load(self.f32, mlir.at(factors, 4 * STREAMS * (1 + j))) for j in range(1 + STREAMS)]

    def sum_over_gpus(self, tokens):
        """Writes the sum of this block's channels of y over the GPUs to shared memory."""
        units = CHANNELS // UNIT
        index = (self.thread // units) * self.width + self.index * CHANNELS + (self.thread % units) * UNIT
        unit = mailbox.Unit(
            active=self.thread < tokens * units,
            load=lambda: words.load_four(mlir.element(self.refs.y, index)),
            store=lambda four: thread_ops.store_vector(thread_ops.shared(self.total) + (self.thread << 4), four),
        )
        mailbox.exchange(self.index, self.width // CHANNELS, self.refs.table, [unit])
        mgpu.utils.warpgroup_barrier()

    def load_y(self, token):
        if self.total is None:
            return self.load_bf16(mlir.element(self.refs.y, token * self.width + self.column))
        # A word holds two channels, this lane's and the adjacent lane's.
        word = thread_ops.load(thread_ops.shared(self.total) + (((token * CHANNELS + self.lane) >> 1) << 2))
        return thread_ops.as_float((self.lane & 1).equals(0).where(word << 16, word & 0xFFFF0000))

    def update_stream(self, token, values, factors, term):
        """Stores and returns this thread's value of the new stream, rounded to bfloat16.

        `values` and `factors` are results of `load_streams`; `term` is the value of y.
        """
        value = arith.mulf(term, factors[0])
        for x, factor in zip(values, factors[1:], strict=True):
            value = fma(x, factor, value)
        low = arith.truncf(self.bf16, value)
        index = token * (STREAMS * self.width) + self.warp * self.width + self.column
        llvm.store(low, mlir.element(self.refs.new, index), alignment=2)
        return arith.extf(self.f32, low)

    def store_partials(self, inbox):
        """Adds up the partial sums of a token's four streams, and stores the totals. Warp w does this for token w.

        `inbox` is the address of the partial sums in shared memory.
        """
        numbers = (((self.warp * STREAMS + j) << 5) + self.lane for j in range(STREAMS))
        sums = [thread_ops.load(inbox + (number << 2)) for number in numbers]
        low = arith.addf(thread_ops.as_float(sums[0]), thread_ops.as_float(sums[1]))
        high = arith.addf(thread_ops.as_float(sums[2]), thread_ops.as_float(sums[3]))
        index = (self.warp * (self.width // CHANNELS) + self.index) * SUMS + self.lane
        llvm.store(arith.addf(low, high), mlir.element(self.refs.partials, index), alignment=4)
