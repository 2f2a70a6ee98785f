"""Barriers of a block that also count the bytes which other blocks of its cluster send into its shared memory.

A phase ends when all threads of one warpgroup have arrived, and as many bytes as they announced have come, which may be
before that. Nobody waits for the bytes to leave. Pallas's barriers cannot be used for it, because they do not tell
their addresses; and interpreted blocks have no shared memory in common, so that these are for the GPU alone.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.mgpu import mlir, thread_ops, vectors
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.mgpu.thread_ops import U32


def scratch_type(count: int) -> Any:
    """What to allocate for so many barriers: [count, 2] int32, each of them 8 bytes."""
    return plgpu.SMEM((count, 2), jnp.int32)


def start(barriers) -> None:
    """Makes barriers [count, 2] int32 ready. All warpgroups call it, and `barriers.wait_cluster` before they use
    one."""

    def emit(barriers):
        # A predicate, not a branch: the warps stay together for what is `aligned`.
        init = f"{{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.init.shared::cta.b64 [$0], {THREADS}; }}"
        for i in range(count):
            thread_ops.ptx_effect(init, thread_ops.shared(barriers, 2 * i), thread_ops.thread())
        # This fence is what a relaxed arrival needs, and nothing else has been written.
        thread_ops.ptx_effect("fence.mbarrier_init.release.cluster;")
        thread_ops.ptx_effect("barrier.cluster.arrive.relaxed.aligned;")

    count, _ = barriers.shape
    thread_ops.inline(emit, barriers)


def arrive(barrier, expected: jax.Array | int) -> None:
    """A warpgroup's arrival at a barrier [2] int32; in this phase `expected` bytes come for each of its threads."""
    code = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;"

    def emit(barrier, expected):
        thread_ops.ptx_effect(code, thread_ops.shared(barrier), expected)

    thread_ops.inline(emit, barrier, jnp.int32(expected))


def wait(barrier, parity: jax.Array) -> None:
    """Waits for the end of a phase of a barrier [2] int32: of the first, third, .. if `parity`, an int32, is 0."""
    code = """{ .reg .pred ended;
        again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [$0], $1;
        @!ended bra again; }"""

    def emit(barrier, parity):
        thread_ops.ptx_effect(code, thread_ops.shared(barrier), parity)

    thread_ops.inline(emit, barrier, parity)


def send(address: U32, values: Sequence[Any], barrier: U32) -> None:
    """Stores one, two or four MLIR values of 32 bits in another block, on whose barrier they count when they are there.

    Within `inline`. Both addresses are from `thread_ops.peer`, that of the values a multiple of their size.
    """
    places = ", ".join(f"${i + 1}" for i in range(len(values)))
    vector, places = (f".v{len(values)}", f"{{{places}}}") if len(values) > 1 else ("", places)
    code = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [$0], {places}"
    mlir.ptx(f"{code}, [${len(values) + 1}];", address.value, *values, barrier.value)


def put(x: jax.Array, target, block: int, barrier) -> None:
    """Sends a vector x [size] to `target` [size] in a block of the cluster, on whose barrier [2] int32 it counts."""

    def emit(x, target, barrier):
        own = thread_ops.thread() % THREADS * (4 * x.layout.vec_size)
        address, counted = (U32(thread_ops.shared(ref)) for ref in (target, barrier))
        values = [mgpu.utils.bitcast(value, mlir.int_type()) for value in mlir.values(x)]
        send(thread_ops.peer(address + own, block), values, thread_ops.peer(counted, block))

    vectors.inline(emit, x, target, barrier)
