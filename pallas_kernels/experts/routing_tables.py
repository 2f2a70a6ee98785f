"""Which tokens an expert has: what blocks of threads read of that, and how they wait for each other."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.matmul.quantized_weights import ROWS
from pallas_kernels.matmul.routing import (
    FIRST_PAIR,
    SIZE,
    WORDS,
    counts_size,
    group_pairs,
    most_blocks,
    scratch_words,
)
from pallas_kernels.mgpu import mlir, thread_ops as ops
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.launch import kernel, primitive


def assign(selected: jax.Array, experts: int, channels: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """(table, counts) of `group_pairs`; one block of threads runs it.

    Args:
      selected: [P] int32, the expert of each pair.
      experts: how many there are.
      channels: of a token.
      interpret: run on the CPU, interpreted, with the race detector on.
    """
    blocks = most_blocks(selected.size, experts)
    run = kernel(
        functools.partial(_body, experts),
        out_type=(
            jax.ShapeDtypeStruct((blocks * WORDS,), jnp.int32),
            jax.ShapeDtypeStruct((counts_size(blocks, channels),), jnp.int32),
        ),
        kernel_name="experts_assign",
        grid=(1,),
        grid_names=("worker",),
        scratch_types=dict(scratch=plgpu.SMEM((scratch_words(experts),), jnp.int32)),
        interpret=interpret,
    )
    return tuple(run(selected))


def _body(experts, selected, table, counts, *, scratch):
    group_pairs(selected, table, counts, experts, scratch)


@primitive
def load_blocks(table, first: jax.Array, target) -> None:
    """Copies blocks `first ..` of the table to `target` [16 * blocks] int32 in shared memory, by one warpgroup."""
    rows = jnp.minimum(first * WORDS + lax.iota(jnp.int32, target.shape[0]), table.shape[0] - 1)
    target[...] = table[...][rows]


@load_blocks.mosaic
def _(table, first, target):
    size, last = target.shape[0], table.shape[0] - 1

    def emit(table, first, target):
        thread, first, there = ops.thread() % mlir.THREADS, U32(mlir.scalar(first)) * WORDS, ops.shared(target)
        for start in range(0, size, mlir.THREADS):
            at = thread + start
            with ops.when(at < size):
                ops.store(there + (at << 2), ops.load_global(table, (first + at).minimum(last)))

    mlir.inline(emit, table, first, target)


@primitive
def load_weights(weights, blocks, target) -> None:
    """Copies the routing weights of blocks that `load_blocks` left to `target` [8 * blocks] float32 in shared memory.

    By the same warpgroup.

    Args:
      weights: [P] float32 in global memory.
      blocks: [16 * blocks] int32 in shared memory.
      target: unspecified where there is no pair.
    """
    pairs = blocks[...].reshape(-1, WORDS)[:, FIRST_PAIR:].reshape(-1)
    inside = (pairs >= 0) & (pairs < weights.shape[0])
    target[...] = jnp.where(inside, weights[...][jnp.where(inside, pairs, 0)], 0.0)


@load_weights.mosaic
def _(weights, blocks, target):
    size, last = target.shape[0], weights.shape[0] - 1

    def emit(weights, blocks, target):
        thread, source, there = ops.thread() % mlir.THREADS, ops.shared(blocks), ops.shared(target)
        mgpu.utils.warpgroup_barrier()
        for start in range(0, size, mlir.THREADS):
            at = thread + start
            with ops.when(at < size):
                word = (at >> 3) * WORDS + (at & SIZE - 1) + FIRST_PAIR
                pair = ops.load(source + (word << 2)).minimum(last)
                ops.store(there + (at << 2), ops.load_global(weights, pair))
        mgpu.utils.warpgroup_barrier()

    mlir.inline(emit, weights, blocks, target)


# --- blocks of threads that wait for each other ---


@primitive
def announce(counts, block: jax.Array) -> None:
    """Counts one more tile of a block of pairs, once this warpgroup has written it to global memory."""


@announce.mosaic
def _(counts, block):
    def emit(counts, block):
        mgpu.utils.warpgroup_barrier()
        with ops.when(U32(mlir.thread()).equals(0)):
            place = _count(counts, _of_block(block))
            mlir.ptx("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$0], 1;", place)

    mlir.inline(emit, counts, block)


@primitive
def await_tiles(counts, block: jax.Array, tiles: int) -> None:
    """Waits until so many tiles of a block of pairs are written; what follows reads them."""


@await_tiles.mosaic
def _(counts, block, tiles):
    def emit(counts, block):
        place = _count(counts, _of_block(block))
        with ops.when(ops.lane().equals(0)):
            code = """{ .reg .pred p; .reg .b32 r; waiting: ld.acquire.gpu.global.u32 r, [$0];
                setp.lt.u32 p, r, $1; @p bra waiting; }"""
            mlir.ptx(code, place, mlir.i32(tiles))
        mgpu.utils.warp_barrier()

    mlir.inline(emit, counts, block)


@primitive
def add_up(total, terms, last, selected, counts, first: int, tile: jax.Array, experts: int, scratch) -> None:
    """Counts one more part of a tile of channels that this warpgroup has written, and adds terms up after the last.

    There is a part of each block of pairs, and one of the shared expert. The warpgroup that brings the last one writes
    `total`: the sum over a token's pairs in their order, then the shared expert's.

    Args:
      total: [T, D] bfloat16 in global memory.
      terms: [P, D] bfloat16 in global memory, those of pairs; of pairs without an expert anything.
      last: [T, D] bfloat16 in global memory, the shared expert's.
      selected: [P] int32 in global memory, the experts of pairs.
      counts: [N] int32 in global memory: the number of blocks of pairs; from `first` on those of tiles, 0 at first.
      tile: number of 64 channels.
      experts: how many there are.
      scratch: [4] int32 in shared memory, of this warpgroup.
    """
    # The interpreter has no order of blocks' reads and writes: `experts` adds terms up behind an interpreted launch.


@add_up.mosaic
def _(total, terms, last, selected, counts, first, tile, experts, scratch):
    (tokens, width), chosen = total.shape, terms.shape[0] // total.shape[0]
    pairs_of_channels = ROWS // 2

    def emit(total, terms, last, selected, counts, tile, scratch):
        thread, tile, flag = ops.thread() % mlir.THREADS, U32(mlir.scalar(tile)), ops.shared(scratch)
        mgpu.utils.warpgroup_barrier()
        with ops.when(thread.equals(0)):
            place = _count(counts, mlir.to_i64((tile + first).value))
            code = "fence.acq_rel.gpu; atom.relaxed.gpu.global.add.u32 $0, [$1], 1; fence.acq_rel.gpu;"
            ops.store(flag, U32(mlir.ptx(code, place, results=mlir.int_type())))
        mgpu.utils.warpgroup_barrier()

        def place_of(ref, row, column):
            at = arith.addi(arith.muli(mlir.to_i64(row.value), mlir.i64(width)), mlir.to_i64(column.value))
            return mlir.at(mlir.global_pointer(ref), at, ir.BF16Type.get())

        def load(ref, row, column):
            code = "ld.relaxed.gpu.global.u32 $0, [$1];"
            return U32(mlir.ptx(code, place_of(ref, row, column), results=mlir.int_type()))

        def floats(word):
            return [ops.as_float(half) for half in (word << 16, word & 0xFFFF0000)]

        def sum_of(token, column):
            pairs = [token * chosen + j for j in range(chosen)]
            words = [load(terms, pair, column) for pair in pairs]
            inside = [ops.load_global(selected, pair) < experts for pair in pairs]
            words = [here.where(word, 0) for here, word in zip(inside, words, strict=True)]
            low, high = (
                functools.reduce(arith.addf, values)
                for values in zip(*map(floats, [*words, load(last, token, column)]), strict=True)
            )
            rounded = mlir.ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", high, low, results=mlir.int_type(), pure=True)
            mlir.ptx("st.global.u32 [$0], $1;", place_of(total, token, column), rounded)

        # As many parts as blocks, and one: of the last one there were so many before.
        with ops.when(ops.load(flag).equals(ops.load_global(counts, U32(0)))):
            for start in range(0, tokens * pairs_of_channels, mlir.THREADS):
                item = thread + start
                token, column = item // pairs_of_channels, tile * ROWS + (item % pairs_of_channels << 1)
                with ops.when(token < tokens):
                    sum_of(token, column)

    mlir.inline(emit, total, terms, last, selected, counts, tile, scratch)


def _count(counts, number):
    return mlir.at(mlir.global_pointer(counts), arith.shli(number, mlir.i64(2)))


def _of_block(block):
    return mlir.to_i64((U32(mlir.scalar(block)) + 1).value)
