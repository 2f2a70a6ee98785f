"""Which tokens an expert has: what blocks of threads read of that, and how they wait for each other."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.common import mlir_helpers as mlir, thread_ops as ops
from pallas_kernels.common.expert_blocks import FIRST_PAIR, SIZE, WORDS, group_pairs, most_blocks, scratch_words
from pallas_kernels.common.primitive import kernel, primitive
from pallas_kernels.common.thread_ops import U32


def assign(selected: jax.Array, experts: int, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """(table, counts) of `group_pairs`; one block of threads runs it.

    Args:
      selected: [P] int32, the expert of each pair.
      experts: how many there are.
      interpret: run on the CPU, interpreted, with the race detector on.
    """
    blocks = most_blocks(selected.size, experts)
    run = kernel(
        functools.partial(_body, experts),
        out_type=(
            jax.ShapeDtypeStruct((blocks * WORDS,), jnp.int32),
            jax.ShapeDtypeStruct((2 + blocks,), jnp.int32),
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
            place = _count(counts, block)
            mlir.ptx("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [$0], 1;", place)

    mlir.inline(emit, counts, block)


@primitive
def await_tiles(counts, block: jax.Array, tiles: int) -> None:
    """Waits until so many tiles of a block of pairs are written; what follows reads them."""


@await_tiles.mosaic
def _(counts, block, tiles):
    def emit(counts, block):
        place = _count(counts, block)
        with ops.when(ops.lane().equals(0)):
            code = """{ .reg .pred p; .reg .b32 r; waiting: ld.acquire.gpu.global.u32 r, [$0];
                setp.lt.u32 p, r, $1; @p bra waiting; }"""
            mlir.ptx(code, place, mlir.i32(tiles))
        mgpu.utils.warp_barrier()

    mlir.inline(emit, counts, block)


def _count(counts, block):
    offset = mlir.to_i64((U32(mlir.scalar(block)) * 4 + 4).value)
    return mlir.at(mlir.global_pointer(counts), offset)
