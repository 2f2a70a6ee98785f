"""Barriers that count the bytes which other blocks of the cluster store in this block's shared memory (`mbarrier`).

A phase ends when all threads of one warpgroup have arrived and the bytes that they announced have come. Bytes may come
before the arrivals. The sender does not wait. Pallas's barriers do not disclose their addresses, which a sender needs.
For GPUs alone: interpreted blocks share no memory.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.mgpu import mlir, thread_ops, vectors
from pallas_kernels.mgpu.mlir import THREADS, U32


def scratch_type(count: int):
    """Returns the scratch type of `count` barriers: [count, 2] int32, 8 bytes each."""
    return plgpu.SMEM((count, 2), jnp.int32)


def start(barriers) -> None:
    """Initializes barriers [count, 2] int32. All warpgroups call it, and then `barriers.wait_cluster`."""

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
    """Arrives at a barrier [2] int32 and announces `expected` bytes for each thread of the warpgroup."""
    _at_barrier("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], $1;", barrier, jnp.int32(expected))


def wait(barrier, parity: jax.Array) -> None:
    """Waits until a phase of a barrier [2] int32 ends: an even phase (the first is 0) if `parity`, an int32, is 0."""
    code = """{ .reg .pred ended;
        again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [$0], $1;
        @!ended bra again; }"""
    _at_barrier(code, barrier, parity)


def _at_barrier(code, barrier, value):
    """Executes instructions on a barrier's address `$0` and a number `$1`."""
    mlir.inline(lambda barrier, value: mlir.ptx(code, thread_ops.shared(barrier), value), barrier, value)


def send(address: U32, values: Sequence[Any], barrier: U32) -> None:
    """Stores one, two or four MLIR values of 32 bits in another block, whose barrier counts them. Within `inline`.

    Both addresses come from `thread_ops.peer`; that of the values is a multiple of their size.
    """
    places = ", ".join(f"${i + 1}" for i in range(len(values)))
    vector, places = (f".v{len(values)}", f"{{{places}}}") if len(values) > 1 else ("", places)
    code = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [$0], {places}"
    mlir.ptx(f"{code}, [${len(values) + 1}];", address, *values, barrier)


def put(x: jax.Array, target, block: int, barrier) -> None:
    """Stores a vector x [size] in `target` [size] of a block of the cluster, whose barrier [2] int32 counts it."""

    def emit(x, target, barrier):
        offset = thread_ops.thread() % THREADS * (4 * x.layout.vec_size)
        address, counted = (U32(thread_ops.shared(ref)) for ref in (target, barrier))
        values = [mgpu.utils.bitcast(value, mlir.int_type()) for value in mlir.values(x)]
        send(thread_ops.peer(address + offset, block), values, thread_ops.peer(counted, block))

    vectors.inline(emit, x, target, barrier)
