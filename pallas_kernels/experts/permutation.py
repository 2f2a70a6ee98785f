"""Sorts (token, expert) pairs by expert, and divides the pairs of each expert into tiles of up to `size` pairs.

One block of 1024 threads does a counting sort. First, threads count the pairs of each expert by atomics. Then each
thread handles one expert: prefix sums over the threads give the expert's first place and first tile. Finally, threads
write the pairs to their places.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.routing import rank_pairs
from pallas_kernels.mgpu import mlir, thread_ops as ops
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import kernel, primitive


MAX_EXPERTS = 1024  # maximum number of experts, and number of threads; each thread handles one expert
WARPGROUPS = MAX_EXPERTS // mlir.THREADS
# The first place of an expert's pairs is a multiple of this number, because bulk copies take whole tiles of 8 rows.
ALIGNMENT = 8
_UNROLL = 4  # number of pairs whose experts a thread loads at once


def sort_by_expert(
    selected: jax.Array, number: int, size: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts pairs by expert and divides the pairs of each expert into tiles.

    Args:
      selected: [P] int32, the expert of each pair. A pair whose expert is not in [0, number) is left out.
      number: number of experts, at most 1024.
      size: maximum number of pairs of a tile.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      order: [at least P] int32, indices of the pairs ordered by expert, and in any order within an expert. The pairs of
        an expert begin at a multiple of 8. Places without a pair hold -1.
      count: [1] int32, the number of tiles.
      tiles: [3, N] int32, for each tile its expert, the index of its first place in `order`, and the index after the
        last place of the expert's pairs. The columns of unused tiles are unspecified.
    """
    pairs = len(selected)
    places = -(-(pairs + (ALIGNMENT - 1) * min(number, pairs)) // ALIGNMENT) * ALIGNMENT
    tiles = min(pairs, number + pairs // size)
    launch = kernel(
        functools.partial(sort_pairs, number=number, size=size),
        out_type=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((places,), (1,), (3, tiles))),
        kernel_name="sort_by_expert",
        grid={"block": 1},
        num_threads=1 if interpret else WARPGROUPS,
        scratch_types={"scratch": plgpu.SMEM((MAX_EXPERTS + 64,), jnp.int32)},
        interpret=interpret,
    )
    return tuple(launch(selected))


@primitive
def sort_pairs(selected, order, count, tiles, number: int, size: int, scratch) -> None:
    """Does the work of `sort_by_expert`, whose results are written to `order`, `count` and `tiles` in global memory.

    `scratch` is [1024 + 64] int32 in shared memory.
    """
    chosen = selected[...]
    pairs, has_expert, rank, sizes = rank_pairs(chosen, number)
    room = (sizes + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    first_place = jnp.cumsum(room) - room
    places = jnp.where(has_expert, first_place[jnp.where(has_expert, chosen, 0)] + rank, order.shape[0])
    order[...] = jnp.full(order.shape, -1, jnp.int32).at[places].set(pairs, mode="drop")
    num_tiles = (sizes + (size - 1)) // size
    end_tile = jnp.cumsum(num_tiles)
    tile = lax.iota(jnp.int32, tiles.shape[1])
    expert = jnp.minimum(jnp.sum(tile[:, None] >= end_tile[None, :], axis=1), number - 1).astype(jnp.int32)
    first_tile = end_tile - num_tiles
    count[...] = end_tile[-1:].astype(jnp.int32)
    table = expert, first_place[expert] + (tile - first_tile[expert]) * size, (first_place + sizes)[expert]
    tiles[...] = jnp.stack(table).astype(jnp.int32)


@mlir.emits(sort_pairs)
def _emit_sort_pairs(selected, order, count, tiles, number, size, scratch):
    pairs = selected.type.shape[0]
    places = order.type.shape[0]
    max_tiles = tiles.type.shape[1]
    warps = MAX_EXPERTS // mlir.WARP
    thread = ops.thread()
    sizes = ops.shared(scratch)
    sums = sizes + 4 * MAX_EXPERTS

    def for_each_pair(visit: Callable[[Scalar, Scalar], None]):
        """Calls `visit(pair, expert)` for each of this thread's pairs that has an expert."""

        def visit_pairs(i):
            loaded_pairs = [thread + (i * _UNROLL + j) * MAX_EXPERTS for j in range(_UNROLL)]
            experts = [ops.load_global(selected, pair.minimum(pairs - 1)) for pair in loaded_pairs]
            for pair, expert in zip(loaded_pairs, experts, strict=True):
                with ops.when((pair < pairs) & (expert < number)):
                    visit(pair, expert)

        ops.loop(-(-pairs // (_UNROLL * MAX_EXPERTS)), visit_pairs)

    def clear(i):
        place = thread + i * MAX_EXPERTS
        with ops.when(place < places):
            ops.store_global(order, place, -1)

    own_size = sizes + (thread << 2)
    ops.store(own_size, 0)
    ops.loop(-(-places // MAX_EXPERTS), clear)
    ops.sync()
    for_each_pair(lambda pair, expert: ops.add(sizes + (expert << 2), 1))
    ops.sync()
    # From here on, each thread computes values of the expert that has the same index as the thread.
    expert_pairs = ops.load(own_size)
    expert_places = (expert_pairs + (ALIGNMENT - 1)) & ((1 << 32) - ALIGNMENT)
    first_place, _ = ops.block_prefix_sum(expert_places, sums, warps)
    expert_tiles = (expert_pairs + (size - 1)) // size
    first_tile, total = ops.block_prefix_sum(expert_tiles, sums + 4 * warps, warps)
    ops.store(own_size, first_place)
    with ops.when(thread.equals(0)):
        ops.store_global(count, 0, total)

    def write_tile(i):
        for j, value in enumerate((thread, first_place + i * size, first_place + expert_pairs)):
            ops.store_global(tiles, first_tile + i + j * max_tiles, value)

    def write_pair(pair, expert):
        place = ops.fetch_add(sizes + (expert << 2), 1)  # the word now holds the place of the expert's next pair
        ops.store_global(order, place, pair)

    ops.loop(expert_tiles, write_tile)
    ops.sync()
    for_each_pair(write_pair)
