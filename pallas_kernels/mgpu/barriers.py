"""Waiting for the other threads of a warpgroup, the other warpgroups of a block and the other blocks of its cluster.

Interpreted blocks have no shared memory in common: kernels give them global memory instead, and barriers of Pallas.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import gpu, nvvm

from pallas_kernels.mgpu import mlir
from pallas_kernels.runtime.launch import primitive


@primitive
def sync_warpgroup() -> None:
    """Waits for the warpgroup's other threads, before one of them arrives at a barrier of the cluster."""


@sync_warpgroup.mosaic
def _():
    mlir.inline(mgpu.utils.warpgroup_barrier)


@primitive
def sync_block(barrier) -> None:
    """Waits for all threads of the block; `barrier`: interpreted, one at which every warpgroup arrives."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


sync_block.mosaic(lambda barrier: mlir.inline(gpu.barrier))


@primitive
def arrive_cluster(barrier) -> None:
    """Publishes this thread's writes to threads that call `wait_cluster`; the interpreter uses `barrier`, or None."""
    if barrier is not None:
        plgpu.barrier_arrive(barrier)


@arrive_cluster.mosaic
def _(barrier):
    mlir.inline(lambda: nvvm.cluster_arrive(aligned=True))


@primitive
def wait_cluster(barrier) -> None:
    """Waits until all threads of the cluster arrived."""
    if barrier is not None:
        plgpu.barrier_wait(barrier)


@wait_cluster.mosaic
def _(barrier):
    mlir.inline(lambda: nvvm.cluster_wait(aligned=True))
