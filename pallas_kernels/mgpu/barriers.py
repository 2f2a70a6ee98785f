"""Barriers over a warpgroup, a block and a cluster, by hardware instructions, and rings of Pallas barriers.

A ring is an array of slots in shared memory, with a barrier for each slot. Item i of a sequence, such as a tile, uses
slot i modulo the number of slots. Blocks of a cluster exchange values through shared memory on a GPU. The interpreter
does not support this, so interpreted blocks use global memory and a Pallas barrier.
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
    """Returns the index of item i's slot: i modulo the length of `ring`, an array of barriers or buffers."""
    return lax.rem(i, ring.shape[0])


def wait_empty(empty, i: jax.Array) -> None:
    """Waits until item `i` can be written to its slot of a ring. Does not wait if item `i` is the slot's first item.

    `empty` is an array with one barrier for each slot. The reader of a slot arrives at the slot's barrier after the
    read.
    """
    pl.when(i >= empty.shape[0])(lambda: plgpu.barrier_wait(empty.at[turn(empty, i)]))


def wait_for_last(ring, count: jax.Array) -> None:
    """Waits for the last arrival at each barrier of a ring, after `count` items have used the ring.

    `wait_empty` has not waited for these arrivals. The interpreter requires a wait for every arrival. On a GPU, a block
    of a cluster must not end before the other blocks have arrived at its barriers.
    """
    pl.loop(jnp.maximum(count - ring.shape[0], 0), count)(lambda i: plgpu.barrier_wait(ring.at[turn(ring, i)]))


@primitive
def fence() -> None:
    """Orders accesses to shared memory before later ones by the async proxy, that is, by bulk copies and `wgmma`.

    The fence covers the accesses of this thread, and those of other threads that this thread has waited for.
    """


fence.mosaic(lambda: mlir.inline(lambda: mlir.ptx("fence.proxy.async.shared::cta;")))


def release(barrier) -> None:
    """Tells the loading warpgroup that a slot of a ring was read and can be overwritten by a bulk copy.

    Without the fence, loads from the slot can still be under way when the copy overwrites it: a compiler may move the
    instructions that wait for their values behind the arrival.
    """
    if interpreting():
        plgpu.commit_smem()
    fence()
    plgpu.barrier_arrive(barrier)


@primitive
def sync_warpgroup() -> None:
    """Synchronizes the threads of a warpgroup."""


sync_warpgroup.mosaic(lambda: mlir.inline(mgpu.utils.warpgroup_barrier))


def meet(barrier) -> None:
    """Synchronizes the warpgroups that arrive at a Pallas barrier, and orders their accesses to shared memory."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@primitive
def sync_block(barrier) -> None:
    """Synchronizes all threads of a block. The interpreter uses `barrier`, a Pallas barrier of all warpgroups."""
    meet(barrier)


sync_block.mosaic(lambda barrier: mlir.inline(gpu.barrier))


@primitive
def arrive_cluster(barrier) -> None:
    """Arrives at the cluster's barrier. What this thread wrote before is visible to all threads after `wait_cluster`.

    The interpreter arrives at `barrier`, a `plgpu.ClusterBarrier`. If `barrier` is None, the interpreter does nothing.
    """
    if barrier is not None:
        plgpu.barrier_arrive(barrier)


arrive_cluster.mosaic(lambda barrier: mlir.inline(lambda: nvvm.cluster_arrive(aligned=True)))


@primitive
def wait_cluster(barrier) -> None:
    """Waits until all threads of the cluster have arrived. The interpreter waits at `barrier` if it is not None."""
    if barrier is not None:
        plgpu.barrier_wait(barrier)


wait_cluster.mosaic(lambda barrier: mlir.inline(lambda: nvvm.cluster_wait(aligned=True)))
