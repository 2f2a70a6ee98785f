"""Barriers over a warpgroup, a block and a cluster, by the hardware's own instructions.

The blocks of an interpreted cluster share no memory: kernels give them global memory and a Pallas barrier instead.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import gpu, nvvm

from pallas_kernels.mgpu import mlir
from pallas_kernels.runtime.launch import interpreting, primitive


def turn(ring, i: jax.Array) -> jax.Array:
    """Returns the place of number `i` in a ring of barriers or memory."""
    return lax.rem(i, ring.shape[0])


def wait_empty(empty, i: jax.Array) -> None:
    """Waits until the place of number `i` in a ring is empty. The first numbers find empty places and do not wait.

    `empty` has a barrier for each place, at which a reader arrives. `wait_for_last` waits for the last arrivals.
    """
    pl.when(i >= empty.shape[0])(lambda: plgpu.barrier_wait(empty.at[turn(empty, i)]))


def wait_for_last(ring, count: jax.Array) -> None:
    """Waits for the last of `count` arrivals at a ring of barriers, of which each was waited for before it was reused.

    The interpreter wants every arrival waited for, and no block may end before the others of its cluster have arrived.
    """
    pl.loop(jnp.maximum(count - ring.shape[0], 0), count)(lambda i: plgpu.barrier_wait(ring.at[turn(ring, i)]))


def release(barrier) -> None:
    """Tells the loading warpgroup that a place of a ring was read.

    The values are in registers and were used: on a GPU no fence has to keep the next bulk copy from passing the reads.
    """
    if interpreting():
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


@primitive
def sync_warpgroup() -> None:
    """Waits for the warpgroup's other threads."""


sync_warpgroup.mosaic(lambda: mlir.inline(mgpu.utils.warpgroup_barrier))


@primitive
def sync_block(barrier) -> None:
    """Waits for all threads of the block; the interpreter uses `barrier`, at which every warpgroup arrives."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


sync_block.mosaic(lambda barrier: mlir.inline(gpu.barrier))


@primitive
def arrive_cluster(barrier) -> None:
    """Publishes this thread's writes to threads that call `wait_cluster`; the interpreter uses `barrier` if given."""
    if barrier is not None:
        plgpu.barrier_arrive(barrier)


arrive_cluster.mosaic(lambda barrier: mlir.inline(lambda: nvvm.cluster_arrive(aligned=True)))


@primitive
def wait_cluster(barrier) -> None:
    """Waits until all threads of the cluster have arrived."""
    if barrier is not None:
        plgpu.barrier_wait(barrier)


wait_cluster.mosaic(lambda barrier: mlir.inline(lambda: nvvm.cluster_wait(aligned=True)))
