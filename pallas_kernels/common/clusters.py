"""Waiting for the other threads of a warpgroup, the other warpgroups of a block and the other blocks of its cluster.

Interpreted blocks have no shared memory in common: kernels give them global memory instead, and barriers of Pallas.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import gpu, nvvm

from pallas_kernels.common import mlir_helpers as mlir
from pallas_kernels.common.primitive import primitive


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
def arrive(barrier) -> None:
    """What this thread wrote is seen by those that `wait`; `barrier`: interpreted, one of the cluster, or None."""
    if barrier is not None:
        plgpu.barrier_arrive(barrier)


@arrive.mosaic
def _(barrier):
    mlir.inline(lambda: nvvm.cluster_arrive(aligned=True))


@primitive
def wait(barrier) -> None:
    """Waits until all threads of the cluster arrived."""
    if barrier is not None:
        plgpu.barrier_wait(barrier)


@wait.mosaic
def _(barrier):
    mlir.inline(lambda: nvvm.cluster_wait(aligned=True))
