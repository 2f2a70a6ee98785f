"""Pairs of a token and an expert in the order of the experts, and tiles of many pairs of one expert."""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import mlir, thread_ops as ops
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.launch import kernel, primitive


MAX_EXPERTS = 1024  # one for each thread
WARPGROUPS = MAX_EXPERTS // mlir.THREADS
ALIGNED = 8  # where an expert's pairs begin: bulk copies take whole tiles of 8 rows
_AT_ONCE = 4  # pairs that a thread loads before it looks at them


def sort_by_expert(
    selected: jax.Array, number: int, size: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts pairs by expert. One block of threads runs it.

    Args:
      selected: [P] int32, the expert of each pair; pairs with none in 0 .. number - 1 are left out.
      number: of experts, up to 1024.
      size: the most pairs of a tile.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      pairs [at least P] int32: an expert's from a multiple of 8 on, in any order, and 0 where there is none. [1] int32:
      the number of tiles. [3, tiles] int32: of each tile the expert, its first place in pairs, and the end of the
      expert's pairs; unspecified after the last tile.
    """
    pairs = len(selected)
    places = -(-(pairs + (ALIGNED - 1) * min(number, pairs)) // ALIGNED) * ALIGNED
    tiles = min(pairs, number + pairs // size)
    run = kernel(
        functools.partial(_body, number, size),
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((places,), (1,), (3, tiles))),
        kernel_name="sort_by_expert",
        grid=(1,),
        grid_names=("block",),
        num_threads=1 if interpret else WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=dict(scratch=plgpu.SMEM((MAX_EXPERTS + 64,), jnp.int32)),
        interpret=interpret,
    )
    return tuple(run(selected))


def _body(number, size, selected, order, count, tiles, *, scratch):
    group(selected, order, count, tiles, number, size, scratch)


@primitive
def group(selected, order, count, tiles, number: int, size: int, scratch) -> None:
    """`sort_by_expert`; `scratch`: [1024 + 64] int32 in shared memory."""
    chosen = selected[...]
    pairs = lax.iota(jnp.int32, chosen.shape[0])
    rank = jnp.sum((chosen[None, :] == chosen[:, None]) & (pairs[None, :] < pairs[:, None]), axis=1)
    sizes = jnp.sum(chosen[None, :] == lax.iota(jnp.int32, number)[:, None], axis=1).astype(jnp.int32)
    room = (sizes + (ALIGNED - 1)) // ALIGNED * ALIGNED
    starts = jnp.cumsum(room) - room
    here = (chosen >= 0) & (chosen < number)
    places = jnp.where(here, starts[jnp.where(here, chosen, 0)] + rank, order.shape[0])
    order[...] = jnp.zeros(order.shape, jnp.int32).at[places].set(pairs, mode="drop")
    last = jnp.cumsum((sizes + (size - 1)) // size)
    tile = lax.iota(jnp.int32, tiles.shape[1])
    expert = jnp.minimum(jnp.sum(tile[:, None] >= last[None, :], axis=1), number - 1).astype(jnp.int32)
    before = last - (sizes + (size - 1)) // size
    count[...] = last[-1:].astype(jnp.int32)
    table = expert, starts[expert] + (tile - before[expert]) * size, (starts + sizes)[expert]
    tiles[...] = jnp.stack(table).astype(jnp.int32)


@group.mosaic
def _(selected, order, count, tiles, number, size, scratch):
    pairs, places, most = selected.shape[0], order.shape[0], tiles.shape[1]
    warps = MAX_EXPERTS // mlir.WARP

    def emit(selected, order, count, tiles, scratch):
        thread, sizes = ops.thread(), ops.shared(scratch)
        sums = sizes + 4 * MAX_EXPERTS

        def each_pair(visit: Callable[[U32, U32], None]):
            def turn(i):
                own = [thread + (i * _AT_ONCE + j) * MAX_EXPERTS for j in range(_AT_ONCE)]
                experts = [ops.load_global(selected, pair.minimum(pairs - 1)) for pair in own]
                for pair, expert in zip(own, experts, strict=True):
                    with ops.when((pair < pairs) & (expert < number)):
                        visit(pair, expert)

            ops.loop(-(-pairs // (_AT_ONCE * MAX_EXPERTS)), turn)

        def clear(i):
            place = thread + i * MAX_EXPERTS
            with ops.when(place < places):
                ops.store_global(order, place, U32(0))

        own_size = sizes + (thread << 2)
        ops.store(own_size, 0)
        ops.loop(-(-places // MAX_EXPERTS), clear)
        ops.sync()
        each_pair(lambda pair, expert: ops.add(sizes + (expert << 2), 1))
        ops.sync()
        # From here on a thread has an expert.
        own = ops.load(own_size)
        start, _ = ops.block_prefix_sum((own + (ALIGNED - 1)) & (1 << 32) - ALIGNED, sums, warps)
        own_tiles = (own + (size - 1)) // size
        before, total = ops.block_prefix_sum(own_tiles, sums + 4 * warps, warps)
        ops.store(own_size, start)
        with ops.when(thread.equals(0)):
            ops.store_global(count, U32(0), total)

        def write(i):
            for j, value in enumerate((thread, start + i * size, start + own)):
                ops.store_global(tiles, before + i + j * most, value)

        ops.loop(own_tiles, write)
        ops.sync()
        each_pair(lambda pair, expert: ops.store_global(order, ops.fetch_add(sizes + (expert << 2), 1), pair))

    mlir.inline(emit, selected, order, count, tiles, scratch)
