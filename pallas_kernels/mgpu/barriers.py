"""Barriers over a warpgroup, a block and a cluster, by the hardware's own instructions.

The blocks of an interpreted cluster share no memory: kernels give them global memory and a Pallas barrier instead.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import gpu, nvvm

from pallas_kernels.mgpu import mlir
from pallas_kernels.runtime.launch import primitive


@primitive
def sync_warpgroup() -> None:
    """Waits for the warpgroup's other threads."""


@sync_warpgroup.mosaic
def _():
    mlir.inline(mgpu.utils.warpgroup_barrier)


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


@arrive_cluster.mosaic
def _(barrier):
    mlir.inline(lambda: nvvm.cluster_arrive(aligned=True))


@primitive
def wait_cluster(barrier) -> None:
    """Waits until all threads of the cluster have arrived."""
    if barrier is not None:
        plgpu.barrier_wait(barrier)


@wait_cluster.mosaic
def _(barrier):
    mlir.inline(lambda: nvvm.cluster_wait(aligned=True))
