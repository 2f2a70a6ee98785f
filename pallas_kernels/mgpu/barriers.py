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
from pallas_kernels.runtime.launch import primitive


def wait_for_last(ring, count: jax.Array) -> None:
    """Waits for the last of `count` arrivals at a ring of barriers, of which each was waited for before it was reused.

    The interpreter wants every arrival waited for, and no block may end before the others of its cluster have arrived.
    """
    size = ring.shape[0]

    @pl.loop(jnp.maximum(count - size, 0), count)
    def _(i):
        plgpu.barrier_wait(ring.at[lax.rem(i, size)])


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
