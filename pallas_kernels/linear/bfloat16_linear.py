"""Linear maps of few tokens with bfloat16 weights: y[t, r] = sum_k W[r, k] * x[t, k].

The time is that of reading W once. A persistent grid of clusters walks over tiles of 64 rows of W, which are the rows
of `wgmma`, the tokens its columns. Weights and inputs come in stages of 256 columns, over the borders of tiles. Where W
has few rows, the blocks of a cluster share the columns of one tile, and add up their sums (`sum_exchange`).

    warpgroup   role        does                                    waits for       signals
    0           multiply    runs `wgmma`, stores tiles              stage_full      stage_empty
    1           load        copies stages to shared memory          stage_empty     stage_full
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.spec import LinearSpec, Outputs, checked_outputs, out_types, store_tile
from pallas_kernels.linear.sum_exchange import SumExchange
from pallas_kernels.matmul.quantized_weights import ROWS
from pallas_kernels.mgpu import barriers, wgmma
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS, SHARED_BYTES
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand, weights_of_layer
from pallas_kernels.runtime.lowering_cache import cached_trace
from pallas_kernels.runtime.roles import dispatch_warpgroups


STEP = 256  # columns of a stage
MAX_TOKENS = 64
TOKENS = 8  # `wgmma` has multiples of so many columns
STAGING_BYTES = SHARED_BYTES - (18 << 10)
MAX_SPLITS = 8  # blocks of a cluster that every device runs
MULTIPLY = 0
LOAD = 1  # numbers of warpgroups


@cached_trace("spec")
def bfloat16_linear(
    x: jax.Array, weight: jax.Array, *, layer: jax.Array | None = None, spec: LinearSpec, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Computes `x @ weight.T` and splits it into the spec's outputs.

    Args:
      x: [T, num_groups * K] bfloat16, T a multiple of 8 up to 64.
      weight: [num_groups * M, K] bfloat16, K a multiple of 256; M too of 64.
      layer: [] int32 index on a leading axis of layers of the weight. None: it has no such axis.
      spec: outputs in float32 or bfloat16, whose sizes are multiples of 64.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, size] of each output: float32 sums, in an order that depends on the weight's shape alone.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens = x.shape[0]
    rows, depth = weight.shape[-2:]
    groups = spec.num_groups
    check_array("x", x, jnp.bfloat16, tokens, groups * depth)
    check_weight("weight", weight, layer, jnp.bfloat16, rows, depth)
    outputs = checked_outputs(spec, rows)
    rule = f"{TOKENS}, {2 * TOKENS}, .. or {MAX_TOKENS} tokens, got {tokens}"
    valid_tokens = tokens in range(TOKENS, MAX_TOKENS + 1, TOKENS)
    check_rules({f"columns in multiples of {STEP}, got {depth}": depth % STEP == 0, rule: valid_tokens})
    tiles = rows // ROWS
    splits = _splits(tiles, depth // STEP)
    workers = tiles if splits > 1 else min(tiles, 3 if interpret else MULTIPROCESSORS)
    p = Bfloat16LinearProblem(tokens, depth, tiles // groups, tiles, splits, workers, outputs)
    stages = (STAGING_BYTES - p.exchange.num_bytes) // (2 * STEP * (ROWS + tokens))
    inbox_out, inbox = p.exchange.types(workers, interpret=interpret)
    launch = kernel(
        functools.partial(_body, p),
        out_type=out_types(outputs, tokens) + inbox_out,
        kernel_name="linear",
        grid={"worker": workers},
        cluster={"split": splits},
        num_threads=2,
        scratch_types={
            "inbox": inbox,
            "stages": Stages(
                plgpu.SMEM((stages, tokens, STEP), jnp.bfloat16, transforms=TRANSFORMS),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.SMEM((stages, ROWS, STEP), jnp.bfloat16, transforms=TRANSFORMS),
            ),
        },
        interpret=interpret,
    )
    return tuple(launch(x, weight, layer_operand(layer))[: len(outputs)])


def _splits(tiles, steps):
    """Returns how many blocks share a tile: as many as run at once, a power of two. Three took longer than two."""
    max_splits = min(MULTIPROCESSORS // tiles, MAX_SPLITS, steps)
    return 1 << (max_splits.bit_length() - 1) if max_splits else 1


@dataclasses.dataclass(frozen=True)
class Bfloat16LinearProblem:
    """Static description of a launch."""

    tokens: int
    depth: int  # columns of W
    group_tiles: int  # tiles of a group of rows
    tiles: int
    splits: int  # blocks of a cluster
    workers: int  # clusters; each takes every `workers`-th tile, or one if it has several blocks
    outputs: Outputs

    @property
    def exchange(self) -> SumExchange:
        """The addition of the sums of a cluster's blocks."""
        return SumExchange(self.splits, 1, (ROWS, self.tokens))


class Stages(NamedTuple):
    """Stages of operands, a barrier for each: the types to allocate, and within the kernel the references."""

    inputs_smem: Any
    empty: Any
    full: Any
    weights_smem: Any


def _body(p, x_gmem, weight_gmem, layer_gmem, *outs_gmem, inbox, stages):
    weight_gmem = weights_of_layer(weight_gmem, layer_gmem)
    worker, split, warpgroup = axis_indices("worker", "split", "warpgroup")
    # A block's steps over the columns.
    first_step, end_step = (lax.div((split + n) * jnp.int32(p.depth // STEP), p.splits) for n in range(2))
    steps = end_step - first_step
    tiles = lax.div(p.tiles - worker + p.workers - 1, p.workers)
    exchange = None if inbox is None else p.exchange.start(inbox, outs_gmem)
    store = functools.partial(store_tile, outs_gmem, p.outputs)

    def multiply_tile(i):
        add_stage = functools.partial(_add_stage, stages)
        sums = lax.fori_loop(i * steps, (i + 1) * steps, add_stage, wgmma.zeros((ROWS, p.tokens)))
        tile = worker + i * p.workers
        if exchange is None:
            store(tile, sums)
        else:
            exchange.send(i, sums)
            exchange.add_up(tiles, lambda _, total: store(tile, total))

    def load():
        load_stage = functools.partial(_load_stage, p, x_gmem, weight_gmem, stages, first_step, steps)
        pl.loop(0, tiles * steps)(load_stage)
        if exchange is not None:
            barriers.wait_cluster(None)
        barriers.wait_for_last(stages.empty, tiles * steps)

    def multiply():
        pl.loop(0, tiles)(multiply_tile)

    dispatch_warpgroups(warpgroup, {LOAD: load, MULTIPLY: multiply})


def _load_stage(p, x_gmem, weight_gmem, stages, first, steps, i):
    """Copies the operands of a block's step `i`, counted over all its tiles."""
    stage = barriers.turn(stages.full, i)
    tile = lax.axis_index("worker") + lax.div(i, steps) * p.workers
    column = (first + lax.rem(i, steps)) * STEP
    barriers.wait_empty(stages.empty, i)
    place = pl.ds(tile * ROWS, ROWS), pl.ds(column, STEP)
    plgpu.copy_gmem_to_smem(weight_gmem.at[place], stages.weights_smem.at[stage], stages.full.at[stage])
    columns = pl.ds(lax.div(tile, p.group_tiles) * p.depth + column, STEP)
    plgpu.copy_gmem_to_smem(x_gmem.at[:, columns], stages.inputs_smem.at[stage], stages.full.at[stage])


def _add_stage(stages, i, acc):
    stage = barriers.turn(stages.full, i)
    plgpu.barrier_wait(stages.full.at[stage])
    acc = wgmma.multiply_add(acc, stages.weights_smem.at[stage], stages.inputs_smem.at[stage].transpose((1, 0)))
    # Shared memory was read; bulk copies write it next.
    plgpu.commit_smem()
    plgpu.barrier_arrive(stages.empty.at[stage])
    return acc
