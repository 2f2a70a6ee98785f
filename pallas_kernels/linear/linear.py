"""Linear maps of few tokens, which take as long as reading the weights does.

A block multiplies 64 rows of a weight with all tokens. One warpgroup copies: weights and inputs stream through shared
memory, over the borders of tiles. The other multiplies: the weights are the rows of `wgmma`, the tokens its columns.
Where a weight has few rows, the blocks of a cluster share their columns, and the first adds up the sums, in order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.spec import LinearSpec, kernel_outputs
from pallas_kernels.mgpu import barriers, transaction_barriers, wgmma
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.checks import check_array
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


ROWS = 64  # of a weight at a time: the rows of one `wgmma`
STEP = 256  # of its columns
MAX_TOKENS = 64
TOKENS = 8  # `wgmma` has multiples of so many columns
SHARED_BYTES = 208 << 10
MAX_SPLITS = 8  # blocks of a cluster that every device runs


@cached_trace("spec")
def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    spec: LinearSpec,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes `x @ weight.T` and splits it into the spec's outputs.

    Args:
      x: [T, num_groups * K] bfloat16, T a multiple of 8 up to 64.
      weight: [num_groups * M, K] bfloat16, K a multiple of 256.
      spec: outputs in float32 or bfloat16, whose sizes are multiples of 64.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, size] of each output: float32 sums, in an order that depends on the weight's shape alone.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, (rows, depth), groups = x.shape[0], weight.shape, spec.num_groups
    outputs = kernel_outputs(spec, rows)
    check_array("x", x, jnp.bfloat16, tokens, groups * depth)
    check_array("weight", weight, jnp.bfloat16, rows, depth)
    if any(size % ROWS for size, _ in outputs) or rows % (ROWS * groups) or depth % STEP:
        raise NotImplementedError(
            f"the kernel takes outputs of a multiple of {ROWS} rows and columns in multiples of {STEP}, got "
            f"{[size for size, _ in outputs]} rows, {groups} groups, {depth} columns"
        )
    if tokens % TOKENS or not 0 < tokens <= MAX_TOKENS:
        raise NotImplementedError(f"the kernel takes {TOKENS}, {2 * TOKENS}, .. or {MAX_TOKENS} tokens, got {tokens}")
    tiles = rows // ROWS
    splits = _splits(tiles, depth // STEP)
    workers = tiles if splits > 1 else min(tiles, 3 if interpret else MULTIPROCESSORS)
    problem = LinearProblem(tokens, depth, tiles // groups, tiles, splits, workers, outputs)
    inbox = (splits - 1, ROWS * tokens)
    stages = (SHARED_BYTES - 4 * inbox[0] * inbox[1]) // (2 * STEP * (ROWS + tokens))
    out_type = [jax.ShapeDtypeStruct((tokens, size), dtype) for size, dtype in outputs]
    scratch: dict[str, Any] = dict(
        weights=plgpu.SMEM((stages, ROWS, STEP), jnp.bfloat16, transforms=TRANSFORMS),
        inputs=plgpu.SMEM((stages, tokens, STEP), jnp.bfloat16, transforms=TRANSFORMS),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
    )
    if splits > 1 and interpret:
        # Interpreted blocks meet in global memory.
        out_type.append(jax.ShapeDtypeStruct((workers, splits - 1, ROWS, tokens), jnp.float32))
        scratch |= dict(cluster=plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=1))
    elif splits > 1:
        scratch |= dict(inbox=plgpu.SMEM(inbox, jnp.float32), filled=transaction_barriers.scratch_type(1))
    run = kernel(
        functools.partial(_body, problem),
        out_type=out_type,
        kernel_name="linear",
        grid=(workers,),
        grid_names=("worker",),
        cluster=(splits,),
        cluster_names=("split",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
    )
    return tuple(run(x, weight)[: len(outputs)])


def _splits(tiles, steps):
    """Blocks that share the columns of 64 rows: as many as run at once, a power of two. Three took longer than two."""
    most = min(MULTIPROCESSORS // tiles, MAX_SPLITS, steps)
    return 1 << (most.bit_length() - 1) if most else 1


@dataclasses.dataclass(frozen=True)
class LinearProblem:
    """What is static about a call: `tiles` of 64 rows, `group` of them in a group, and how blocks share them.

    A cluster of `splits` blocks takes every `workers`-th tile; there are so many clusters.
    """

    tokens: int
    depth: int
    group: int
    tiles: int
    splits: int
    workers: int
    outputs: tuple[tuple[int, jnp.dtype], ...]

    def steps(self, split):
        """(first, end) of a block's steps over the columns."""
        steps = jnp.int32(self.depth // STEP)
        return lax.div(split * steps, jnp.int32(self.splits)), lax.div((split + 1) * steps, jnp.int32(self.splits))


def _body(p, x, weight, *outs, weights, inputs, full, free, inbox=None, filled=None, cluster=None):
    worker, split, warpgroup = (lax.axis_index(name) for name in ("worker", "split", "warpgroup"))
    stages = weights.shape[0]
    first, end = p.steps(split)
    steps = end - first
    mine = lax.div(p.tiles - worker + p.workers - 1, jnp.int32(p.workers))
    if filled is not None:
        transaction_barriers.start(filled)

    @pl.when(warpgroup == 1)
    def _():
        @pl.loop(0, mine * steps)
        def _(i):
            stage = lax.rem(i, jnp.int32(stages))
            tile = worker + lax.div(i, steps) * p.workers
            column = (first + lax.rem(i, steps)) * STEP

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(free.at[stage])

            place = pl.ds(tile * ROWS, ROWS), pl.ds(column, STEP)
            plgpu.copy_gmem_to_smem(weight.at[place], weights.at[stage], full.at[stage])
            columns = pl.ds(lax.div(tile, jnp.int32(p.group)) * p.depth + column, STEP)
            plgpu.copy_gmem_to_smem(x.at[:, columns], inputs.at[stage], full.at[stage])

        if filled is not None:
            barriers.wait_cluster(None)

        # The interpreter wants every arrival waited for.
        @pl.loop(jnp.maximum(mine * steps - stages, 0), mine * steps)
        def _(i):
            plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])

    @pl.when(warpgroup == 0)
    def _():
        @pl.loop(0, mine)
        def _(i):
            def add(j, acc):
                stage = lax.rem(j, jnp.int32(stages))
                plgpu.barrier_wait(full.at[stage])
                acc = wgmma.multiply_add(acc, weights.at[stage], inputs.at[stage].transpose((1, 0)))
                # Shared memory was read; bulk copies write it next.
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[stage])
                return acc

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, p.tokens), jnp.float32), plgpu.Layout.WGMMA)
            sums = lax.fori_loop(i * steps, (i + 1) * steps, add, zeros)
            row = (worker + i * p.workers) * ROWS
            if p.splits == 1:
                _store(p, outs, row, sums)
            else:
                _add_up(p, outs, worker, split, row, sums, inbox, filled, cluster)


def _add_up(p, outs, worker, split, row, sums, inbox, filled, cluster):
    """The first block of a cluster gets the others' sums and stores the total."""
    if filled is None:
        inbox = outs[-1].at[worker]
    else:
        # A block sends to another one once that one runs.
        barriers.wait_cluster(None)

    @pl.when(split > 0)
    def _():
        if filled is None:
            wgmma.put(inbox.at[split - 1], sums)
        else:
            wgmma.send(inbox.at[split - 1], sums, jnp.int32(0), filled.at[0])

    if filled is None:
        barriers.arrive_cluster(cluster)

    @pl.when(split == 0)
    def _():
        if filled is None:
            barriers.wait_cluster(cluster)
        else:
            transaction_barriers.arrive(filled.at[0], (p.splits - 1) * 4 * ROWS * p.tokens // THREADS)
            transaction_barriers.wait(filled.at[0], jnp.int32(0))
        total = sums
        for i in range(p.splits - 1):
            total = wgmma.add(total, inbox.at[i])
        _store(p, outs, row, total)


def _store(p, outs, row, sums):
    """Writes 64 rows of the product to the output that has them."""
    start = 0
    for out, (size, _) in zip(outs, p.outputs, strict=False):

        @pl.when((row >= start) & (row < start + size))
        def _(out=out, start=start):
            wgmma.store(out.at[:, pl.ds(row - start, ROWS)], sums, transposed=True)

        start += size
