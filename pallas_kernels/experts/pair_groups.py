"""Groups of up to 8 (token, expert) pairs of one expert.

The module has a kernel that writes the table of groups (`matmul.routing.group_pairs`), and functions that copy parts of
the table to shared memory for the blocks of `experts`.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.matmul import routing
from pallas_kernels.matmul.routing import FIRST_PAIR, GROUP_SIZE, GROUP_WORDS
from pallas_kernels.mgpu import mlir, thread_ops as ops
from pallas_kernels.runtime.launch import kernel, primitive


def group_by_expert(
    selected: jax.Array, experts: int, channels: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Groups pairs by expert in a launch of one warpgroup.

    Args:
      selected: [P] int32, the expert of each pair.
      experts: number of experts.
      channels: number of output channels of the experts, which decides the number of counters.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (table, counts), int32, as `matmul.routing.group_pairs` writes them.
    """
    groups = routing.max_groups(selected.size, experts)
    sizes = groups * GROUP_WORDS, routing.counts_size(groups, channels)
    launch = kernel(
        functools.partial(routing.group_pairs, experts=experts),
        out_type=tuple(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes),
        kernel_name="experts_group_pairs",
        grid={"worker": 1},
        scratch_types={"scratch_smem": plgpu.SMEM((routing.scratch_words(experts),), jnp.int32)},
        interpret=interpret,
    )
    return tuple(launch(selected))


@primitive
def load_groups(table_gmem, first: jax.Array, groups_smem) -> None:
    """Copies n groups of the table, from group `first` on, to shared memory. One warpgroup calls this function.

    `groups_smem` is [16 * n] int32. Groups past the end of the table are unspecified.
    """
    rows = jnp.minimum(first * GROUP_WORDS + lax.iota(jnp.int32, groups_smem.shape[0]), table_gmem.shape[0] - 1)
    groups_smem[...] = table_gmem[...][rows]


@mlir.emits(load_groups)
def _emit_load_groups(table_gmem, first, groups_smem):
    first = first * GROUP_WORDS
    last = table_gmem.type.shape[0] - 1
    target = ops.shared(groups_smem)

    def copy_word(word):
        ops.store(target + (word << 2), ops.load_global(table_gmem, (first + word).minimum(last)))

    ops.for_each(groups_smem.type.shape[0], copy_word)


@primitive
def load_weights(weights_gmem, groups_smem, weights_smem) -> None:
    """Copies the routing weights of pairs to shared memory. The warpgroup that called `load_groups` calls this, too.

    Args:
      weights_gmem: [P] float32 routing weights.
      groups_smem: [16 * n] int32 groups from `load_groups`.
      weights_smem: [8 * n] float32 to write, unspecified where a group has fewer than 8 pairs.
    """
    pairs = groups_smem[...].reshape(-1, GROUP_WORDS)[:, FIRST_PAIR:].reshape(-1)
    inside = (pairs >= 0) & (pairs < weights_gmem.shape[0])
    weights_smem[...] = jnp.where(inside, weights_gmem[...][jnp.where(inside, pairs, 0)], 0.0)


@mlir.emits(load_weights)
def _emit_load_weights(weights_gmem, groups_smem, weights_smem):
    last = weights_gmem.type.shape[0] - 1
    thread = mlir.thread()
    source = ops.shared(groups_smem)
    target = ops.shared(weights_smem)

    def copy_weight(place):
        word = (place >> 3) * GROUP_WORDS + (place & (GROUP_SIZE - 1)) + FIRST_PAIR
        pair = ops.load(source + (word << 2)).minimum(last)
        ops.store(target + (place << 2), ops.load_global(weights_gmem, pair))

    mgpu.utils.warpgroup_barrier()
    ops.for_each(weights_smem.type.shape[0], copy_weight, thread)
    mgpu.utils.warpgroup_barrier()
