"""Transaction barriers (`mbarrier`), which count bytes that other blocks of a cluster store in this block's memory.

A phase of a barrier ends when all 128 threads of one warpgroup have arrived and all bytes that the threads announced
have come. Bytes may come before the arrivals. The sender of bytes does not wait. The sender needs the barrier's
address, which Pallas's own barriers do not disclose. The module is for GPUs alone, because interpreted blocks share no
memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.mgpu import mlir, thread_ops, vectors
from pallas_kernels.mgpu.mlir import THREADS, Scalar


def scratch_type(count: int):
    """Returns the scratch type of `count` barriers: [count, 2] int32, 8 bytes each."""
    return plgpu.SMEM((count, 2), jnp.int32)


def start(barriers) -> None:
    """Initializes barriers [count, 2] int32 in shared memory, and arrives at the barrier of the cluster.

    All warpgroups call `start`, and then `wait_cluster` of `mgpu.barriers` before they use the barriers.
    """

    def emit(barriers):
        # A predicate rather than a branch keeps the warps together, as the `aligned` instruction below requires.
        init = f"{{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.init.shared::cta.b64 [$0], {THREADS}; }}"
        for i in range(count):
            mlir.ptx(init, thread_ops.shared(barriers, 2 * i), thread_ops.thread())
        # A relaxed arrival suffices after this fence: nothing but the barriers has been written.
        mlir.ptx("fence.mbarrier_init.release.cluster;")
        mlir.ptx("barrier.cluster.arrive.relaxed.aligned;")

    count, _ = barriers.shape
    mlir.inline(emit, barriers)


def arrive(barrier, expected: jax.Array | int) -> None:
    """Lets all threads of the warpgroup arrive at a barrier [2] int32. Each thread announces `expected` bytes."""
    _at_barrier("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;", barrier, jnp.int32(expected))


def wait(barrier, parity: jax.Array) -> None:
    """Waits until a phase of a barrier has ended. The next phase may have begun, but must not have ended.

    Args:
      barrier: [2] int32 in shared memory.
      parity: int32 scalar, the index of the phase modulo 2. The first phase has index 0.
    """
    code = """{ .reg .pred ended;
        again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [$0], $1;
        @!ended bra again; }"""
    _at_barrier(code, barrier, parity)


def _at_barrier(code, barrier, value):
    """Executes PTX instructions on a barrier's address, `$0`, and an int32 value, `$1`."""
    mlir.inline(lambda barrier, value: mlir.ptx(code, thread_ops.shared(barrier), value), barrier, value)


def send(address: Scalar, values: Sequence[Any], barrier: Scalar) -> None:
    """Stores values in another block's shared memory. A barrier of that block counts the bytes.

    The function is code for one thread, to be called within `mlir.inline`.

    Args:
      address: address of the values in the other block, from `thread_ops.peer`; a multiple of their size in bytes.
      values: one, two or four MLIR values of 32 bits.
      barrier: address of the barrier in the other block, from `thread_ops.peer`.
    """
    places = ", ".join(f"${i + 1}" for i in range(len(values)))
    vector, places = (f".v{len(values)}", f"{{{places}}}") if len(values) > 1 else ("", places)
    code = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [$0], {places}"
    mlir.ptx(f"{code}, [${len(values) + 1}];", address, *values, barrier)


def put(x: jax.Array, target, block: int, barrier) -> None:
    """Stores a vector in the shared memory of a block of the cluster. A barrier of that block counts the bytes.

    Args:
      x: [size] vector of a 32-bit type, see `vectors`.
      target: [size] reference to this block's shared memory; the same place of the other block is written.
      block: index of the other block in the cluster.
      barrier: [2] int32 reference to a barrier of this block; the barrier at the same place of the other block counts
        the bytes.
    """

    def emit(x, target, barrier):
        offset = mlir.thread() * (4 * x.layout.vec_size)
        address = thread_ops.shared(target)
        barrier_address = thread_ops.shared(barrier)
        values = [mgpu.utils.bitcast(value, mlir.int_type()) for value in mlir.values(x)]
        send(thread_ops.peer(address + offset, block), values, thread_ops.peer(barrier_address, block))

    vectors.inline(emit, x, target, barrier)
