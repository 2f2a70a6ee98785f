"""Counters in global memory, through which blocks of one launch wait for each other's tiles.

`counts` [N] int32 holds the number of groups of pairs, then a counter of hidden tiles for each group and the shared
expert, then a counter of terms for each 64 channels of the total. All counters start at 0.
"""

import functools

import jax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.matmul.quantized_weights import ROWS
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops as ops
from pallas_kernels.runtime.launch import primitive


# Waits until the counter at $0 is at least $1.
_WAIT = """{ .reg .pred p; .reg .b32 r; waiting: ld.acquire.gpu.global.u32 r, [$0];
    setp.lt.u32 p, r, $1; @p bra waiting; }"""


@primitive
def signal_tile(counts_gmem, number: jax.Array) -> None:
    """Counts a tile that this warpgroup has written to global memory: adds 1 to `counts_gmem[1 + number]`."""


@mlir.emits(signal_tile)
def _(counts_gmem, number):
    mgpu.utils.warpgroup_barrier()
    with ops.when(mlir.thread().equals(0)):
        mlir.ptx("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$0], 1;", mlir.element(counts_gmem, number + 1))


@primitive
def wait_for_tiles(counts_gmem, group: jax.Array, tiles: int) -> None:
    """Waits until `tiles` tiles of a group are written; the caller may then read them."""


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
    """Writes this block's part of `total_gmem` [T, D], waiting until its terms are written; one warpgroup runs it.

    Each value is the sum over a token's `terms_gmem` [P, D] in the order of its pairs, without those that
    `selected_gmem` [P] gives no expert, then its term in `last_gmem` [T, D]. All three are bfloat16. The counters of
    terms of 64 channels begin at `counts_gmem[1 + counter]`: each group of pairs has a term, and so has the last one.
    """
    # The interpreter has no order of blocks' reads and writes: `experts` adds terms up behind an interpreted launch.


@mlir.emits(add_up_terms)
def _emit_add_up_terms(
    total_gmem, terms_gmem, last_gmem, selected_gmem, counts_gmem, counter, worker, workers, experts
):
    tokens, width = total_gmem.type.shape
    top_k = terms_gmem.type.shape[0] // tokens
    # A word is two channels of a token. A tile is 64 channels, and its words of all tokens follow one another.
    words_per_tile = ROWS // 2  # of one token
    words_per_block = -(-tokens * width // (2 * workers))
    first_word = worker * words_per_block
    num_terms = ops.load_global(counts_gmem, 0) + 1  # of a tile: one for each group of pairs, and `last_gmem`

    def address(ref, row, column):
        offset = mlir.multiply_add(mlir.to_i64(row), width, mlir.to_i64(column))
        return mlir.at(mlir.global_pointer(ref), offset, ir.BF16Type.get())

    def load(ref, row, column):
        return ops.ptx("ld.relaxed.gpu.global.u32 $0, [$1];", address(ref, row, column))

    def store_sum(word):
        tile = word // (tokens * words_per_tile)  # a block has words of few tiles, and so waits for few
        token = word // words_per_tile % tokens
        column = tile * ROWS + (word % words_per_tile << 1)
        pairs = [token * top_k + j for j in range(top_k)]
        has_expert = [ops.load_global(selected_gmem, pair) < experts for pair in pairs]
        mlir.ptx(_WAIT, mlir.element(counts_gmem, tile + (1 + counter)), num_terms)
        terms = [load(terms_gmem, pair, column) for pair in pairs]
        terms = [exists.where(term, 0) for exists, term in zip(has_expert, terms, strict=True)]
        values = map(words.unpack, [*terms, load(last_gmem, token, column)])
        rounded = words.pack(*(functools.reduce(arith.addf, half) for half in zip(*values, strict=True)))
        mlir.ptx("st.global.u32 [$0], $1;", address(total_gmem, token, column), rounded)

    def visit(i):
        with ops.when(first_word + i < tokens * width // 2):
            store_sum(first_word + i)

    ops.for_each(words_per_block, visit)
