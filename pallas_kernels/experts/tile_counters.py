"""Counters in global memory, through which the blocks of a launch of `experts` wait for each other's tiles.

`counts` [N] int32 holds:

  * the number of groups of (token, expert) pairs,
  * for each group and for the shared expert, the number of its written tiles of hidden channels,
  * for each 64 output channels, the number of groups whose outputs are written. The shared expert counts as a group.

All counters start at 0.
"""

import functools
import operator

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

from pallas_kernels.matmul.quantized_weights import ROWS
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops as ops
from pallas_kernels.runtime.launch import primitive


# Waits until the counter at $0 is at least $1.
_WAIT = """{ .reg .pred p; .reg .b32 r; waiting: ld.acquire.gpu.global.u32 r, [$0];
    setp.lt.u32 p, r, $1; @p bra waiting; }"""


@primitive
def signal_tile(counts_gmem, number: jax.Array) -> None:
    """Publishes a tile that this warpgroup has written to global memory: adds 1 to `counts_gmem[1 + number]`."""


@mlir.emits(signal_tile)
def _(counts_gmem, number):
    mgpu.utils.warpgroup_barrier()
    with ops.when(mlir.thread().equals(0)):
        mlir.ptx("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$0], 1;", mlir.element(counts_gmem, number + 1))


@primitive
def wait_for_tiles(counts_gmem, group: jax.Array, tiles: int) -> None:
    """Waits until `counts_gmem[1 + group]` is at least `tiles`. The caller may then read the group's tiles."""


@mlir.emits(wait_for_tiles)
def _(counts_gmem, group, tiles):
    counter = mlir.element(counts_gmem, group + 1)
    with ops.when(ops.lane().equals(0)):
        mlir.ptx(_WAIT, counter, tiles)
    mgpu.utils.warp_barrier()


@primitive
def add_up_terms(
    total_gmem, terms_gmem, last_gmem, selected_gmem, counts_gmem, counter: int, worker, workers: int, experts: int
) -> None:
    """Computes this block's part of the sums over each token's experts, once the terms of the sums are written.

    The outputs of a token's pairs are added in order in float32, then the shared expert's output is added, and the sum
    is rounded. One warpgroup calls this function.

    Args:
      total_gmem: [T, D] bfloat16 sums to write.
      terms_gmem: [P, D] bfloat16 outputs of the pairs.
      last_gmem: [T, D] bfloat16 outputs of the shared expert.
      selected_gmem: [P] int32 experts of the pairs. A pair whose expert is not in [0, experts) is left out.
      counts_gmem: counters, see the module.
      counter: index of the first counter of terms, which is `counts_gmem[1 + counter]`.
      worker: index of this block.
      workers: number of blocks.
      experts: number of experts.
    """
    # The interpreter does not order reads and writes of different blocks, so `experts` adds up the terms after an
    # interpreted launch.


@mlir.emits(add_up_terms)
def _emit_add_up_terms(
    total_gmem, terms_gmem, last_gmem, selected_gmem, counts_gmem, counter, worker, workers, experts
):
    tokens, width = total_gmem.type.shape
    top_k = terms_gmem.type.shape[0] // tokens
    # A word is two channels of a token. A tile is 64 channels. Words are ordered tile by tile, then token by token.
    words_per_tile = ROWS // 2  # number of words of one token in a tile
    words_per_block = -(-tokens * width // (2 * workers))
    first_word = worker * words_per_block
    num_terms = ops.load_global(counts_gmem, 0) + 1  # every group and the shared expert write a term of each tile

    def address(ref, row, column):
        offset = mlir.to_i64(row) * width + mlir.to_i64(column)
        return mlir.at(mlir.global_pointer(ref), offset, ir.BF16Type.get())

    def load(ref, row, column):
        return ops.ptx("ld.relaxed.gpu.global.u32 $0, [$1];", address(ref, row, column))

    def store_sum(word):
        tile = word // (tokens * words_per_tile)  # a block computes words of few tiles, so it waits for few counters
        token = (word // words_per_tile) % tokens
        column = tile * ROWS + ((word % words_per_tile) << 1)
        pairs = [token * top_k + j for j in range(top_k)]
        has_expert = [ops.load_global(selected_gmem, pair) < experts for pair in pairs]
        mlir.ptx(_WAIT, mlir.element(counts_gmem, tile + (1 + counter)), num_terms)
        terms = [load(terms_gmem, pair, column) for pair in pairs]
        terms = [exists.where(term, 0) for exists, term in zip(has_expert, terms, strict=True)]
        values = map(words.unpack, [*terms, load(last_gmem, token, column)])
        low, high = (functools.reduce(operator.add, channel) for channel in zip(*values, strict=True))
        rounded = words.pack(low, high)
        mlir.ptx("st.global.u32 [$0], $1;", address(total_gmem, token, column), rounded)

    def visit(i):
        with ops.when(first_word + i < tokens * width // 2):
            store_sum(first_word + i)

    ops.for_each(words_per_block, visit)
