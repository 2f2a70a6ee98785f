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
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.launch import primitive


@primitive
def signal_tile(counts_gmem, group: jax.Array) -> None:
    """Counts a tile of a group that this warpgroup has written to global memory."""


@signal_tile.mosaic
def _signal_tile_mosaic(counts_gmem, group):
    def emit(counts_gmem, group):
        mgpu.utils.warpgroup_barrier()
        with ops.when(U32(mlir.thread()).equals(0)):
            counter = _counter(counts_gmem, U32(mlir.scalar(group)) + 1)
            mlir.ptx("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$0], 1;", counter)

    mlir.inline(emit, counts_gmem, group)


@primitive
def wait_for_tiles(counts_gmem, group: jax.Array, tiles: int) -> None:
    """Waits until `tiles` tiles of a group are written; the caller may then read them."""


@wait_for_tiles.mosaic
def _wait_for_tiles_mosaic(counts_gmem, group, tiles):
    def emit(counts_gmem, group):
        counter = _counter(counts_gmem, U32(mlir.scalar(group)) + 1)
        with ops.when(ops.lane().equals(0)):
            code = """{ .reg .pred p; .reg .b32 r; waiting: ld.acquire.gpu.global.u32 r, [$0];
                setp.lt.u32 p, r, $1; @p bra waiting; }"""
            mlir.ptx(code, counter, mlir.i32(tiles))
        mgpu.utils.warp_barrier()

    mlir.inline(emit, counts_gmem, group)


@primitive
def reduce_if_last(
    total_gmem, terms_gmem, last_gmem, selected_gmem, counts_gmem, first: int, tile: jax.Array, experts: int, flag_smem
) -> None:
    """Counts a term of 64 channels that this warpgroup has written; after the last term, adds them all up.

    Each group of pairs has a term, and so has the shared expert. The warpgroup that writes the last one also writes
    `total_gmem` [T, D]: the sum over a token's `terms_gmem` [P, D] in the order of its pairs, without those that
    `selected_gmem` [P] gives no expert, then its term in `last_gmem` [T, D]. All three are bfloat16. The counter of the
    channels is `counts_gmem[first + tile]`; `flag_smem` [4] int32 is this warpgroup's own.
    """
    # The interpreter has no order of blocks' reads and writes: `experts` adds terms up behind an interpreted launch.


@reduce_if_last.mosaic
def _reduce_if_last_mosaic(
    total_gmem, terms_gmem, last_gmem, selected_gmem, counts_gmem, first, tile, experts, flag_smem
):
    (tokens, width), top_k = total_gmem.shape, terms_gmem.shape[0] // total_gmem.shape[0]
    words_per_tile = ROWS // 2

    def emit(total, terms, last, selected, counts, tile, flag):
        thread, tile, flag = ops.thread() % mlir.THREADS, U32(mlir.scalar(tile)), ops.shared(flag)
        mgpu.utils.warpgroup_barrier()
        with ops.when(thread.equals(0)):
            code = "fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 $0, [$1], 1; fence.acq_rel.gpu;"
            ops.store(flag, U32(mlir.ptx(code, _counter(counts, tile + first), results=mlir.int_type())))
        mgpu.utils.warpgroup_barrier()

        def address(ref, row, column):
            offset = arith.addi(arith.muli(mlir.to_i64(row.value), mlir.i64(width)), mlir.to_i64(column.value))
            return mlir.at(mlir.global_pointer(ref), offset, ir.BF16Type.get())

        def load(ref, row, column):
            code = "ld.relaxed.gpu.global.u32 $0, [$1];"
            return U32(mlir.ptx(code, address(ref, row, column), results=mlir.int_type()))

        def store_sum(token, column):
            pairs = [token * top_k + j for j in range(top_k)]
            loaded = [load(terms, pair, column) for pair in pairs]
            inside = [ops.load_global(selected, pair) < experts for pair in pairs]
            loaded = [here.where(word, 0) for here, word in zip(inside, loaded, strict=True)]
            values = map(words.unpack, [*loaded, load(last, token, column)])
            rounded = words.pack(*(functools.reduce(arith.addf, half) for half in zip(*values, strict=True)))
            mlir.ptx("st.global.u32 [$0], $1;", address(total, token, column), rounded.value)

        # There is one more term than groups, so the last one found as many as there are groups.
        with ops.when(ops.load(flag).equals(ops.load_global(counts, U32(0)))):
            for start in range(0, tokens * words_per_tile, mlir.THREADS):
                word = thread + start
                token, column = word // words_per_tile, tile * ROWS + (word % words_per_tile << 1)
                with ops.when(token < tokens):
                    store_sum(token, column)

    mlir.inline(emit, total_gmem, terms_gmem, last_gmem, selected_gmem, counts_gmem, tile, flag_smem)


def _counter(counts_gmem, index):
    return mlir.at(mlir.global_pointer(counts_gmem), arith.shli(mlir.to_i64(index.value), mlir.i64(2)))
