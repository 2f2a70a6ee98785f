"""Linear maps of few tokens with bfloat16 weights: y[t, r] = sum_k W[r, k] * x[t, k].

The kernel is bound by the bandwidth of reading W once. A persistent grid of clusters walks over tiles of 64 rows of W.
In a `wgmma`, the 64 rows are the rows of the accumulator and the tokens its columns. Weights and inputs are copied in
stages of 256 columns, without a pause between tiles. If W has few rows, the blocks of a cluster split the columns of
one tile, and add up their sums (`sum_exchange`).

    warpgroup   role        does                                    waits for       signals
    0           multiply    runs `wgmma`, stores tiles              full            empty
    1           load        copies stages to shared memory          empty           full
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.spec import BFLOAT16_TOKENS, LinearSpec, at_row, checked_outputs, out_types, store_tile
from pallas_kernels.linear.sum_exchange import SumExchange
from pallas_kernels.matmul.quantized_weights import ROWS
from pallas_kernels.mgpu import barriers, wgmma
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS, SHARED_BYTES
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand, weights_of_layer
from pallas_kernels.runtime.lowering_cache import cached_trace
from pallas_kernels.runtime.roles import dispatch_warpgroups


STEP = 256  # number of columns of a stage
STAGING_BYTES = SHARED_BYTES - (18 << 10)  # shared memory for stages and the inbox of `SumExchange`
MAX_SPLITS = 8  # maximum number of blocks of a cluster that every Hopper GPU supports
# Indices of warpgroups.
MULTIPLY = 0
LOAD = 1


@cached_trace("spec")
def bfloat16_linear(
    x: jax.Array,
    *weights: jax.Array,
    layer: jax.Array | None = None,
    spec: LinearSpec,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes `x @ weight.T` and splits it into the spec's outputs.

    Args:
      x: [T, num_groups * K] bfloat16 activations, T a multiple of 8 up to 64.
      weights: matrices whose rows, one matrix after the other, form the weight, [num_groups * M, K] bfloat16. K is a
        multiple of 256. M is a multiple of 64, or of 128 if there are several groups. Each matrix has a multiple of 64
        rows.
      layer: [] int32 index of this layer if the weights have a leading axis of layers, else None.
      spec: outputs in float32 or bfloat16, whose sizes are multiples of 64.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, size] of each output. Sums are computed in float32. The order in which a sum's products are added depends on
      the weight's shape alone.

    Raises:
      NotImplementedError: the kernel does not take these shapes or dtypes.
    """
    tokens = x.shape[0]
    sizes = [weight.shape[-2] for weight in weights]
    rows = sum(sizes)
    depth = weights[0].shape[-1]
    groups = spec.num_groups
    check_array("x", x, jnp.bfloat16, tokens, groups * depth)
    for weight, size in zip(weights, sizes, strict=True):
        check_weight("weight", weight, layer, jnp.bfloat16, size, depth)
    outputs = checked_outputs(spec, rows)
    check_rules(
        {
            f"columns in multiples of {STEP}, got {depth}": depth % STEP == 0,
            f"matrices of a multiple of {ROWS} rows, got {sizes}": not any(size % ROWS for size in sizes),
            f"tokens in {BFLOAT16_TOKENS}, got {tokens}": tokens in BFLOAT16_TOKENS,
        }
    )
    tiles = rows // ROWS
    splits = _splits(tiles, depth // STEP)
    workers = tiles if splits > 1 else min(tiles, 3 if interpret else MULTIPROCESSORS)
    exchange = SumExchange(splits, 1, (ROWS, tokens))
    stages = (STAGING_BYTES - exchange.num_bytes) // (2 * STEP * (ROWS + tokens))
    inbox_out, inbox = exchange.types(workers, interpret=interpret)
    launch = kernel(
        functools.partial(_body, outputs, tiles, tiles // groups, exchange),
        out_type=out_types(outputs, tokens) + inbox_out,
        kernel_name="linear",
        grid={"worker": workers},
        cluster={"split": splits},
        num_threads=2,
        scratch_types={
            "inbox": inbox,
            "stages": Stages(
                wgmma.operand(stages, tokens, STEP),
                plgpu.Barrier(num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                wgmma.operand(stages, ROWS, STEP),
            ),
        },
        interpret=interpret,
    )
    return tuple(launch(x, weights, layer_operand(layer))[: len(outputs)])


def _splits(tiles, steps):
    """Returns the number of blocks that split the columns of a tile.

    The number is the largest power of two, up to 8, with which there is at most one block per multiprocessor, and each
    block multiplies at least one stage of a tile. Other numbers are left out, because three blocks took longer than
    two.

    Args:
      tiles: number of tiles.
      steps: number of stages of a tile.
    """
    max_splits = min(MULTIPROCESSORS // tiles, MAX_SPLITS, steps)
    return 1 << (max_splits.bit_length() - 1) if max_splits else 1


class Stages(NamedTuple):
    """The ring of stages: types to allocate outside the kernel, references inside it."""

    inputs_smem: Any  # [stages, tokens, STEP] bfloat16
    empty: Any  # a barrier for each stage
    full: Any  # a barrier for each stage
    weights_smem: Any  # [stages, 64, STEP] bfloat16


def _body(outputs, all_tiles, group_tiles, exchange, x_gmem, weights_gmem, layer_gmem, *outs_gmem, inbox, stages):
    """Multiplies a block's tiles; of all tiles, `group_tiles` belong to each group of rows."""
    weights_gmem = weights_of_layer(weights_gmem, layer_gmem)
    worker, split, warpgroup = axis_indices("worker", "split", "warpgroup")
    workers = lax.axis_size("worker")
    # The range of stages of a tile, 256 columns each, that this block multiplies.
    tile_steps = jnp.int32(weights_gmem[0].shape[1] // STEP)
    first_step = lax.div(split * tile_steps, exchange.splits)
    end_step = lax.div((split + 1) * tile_steps, exchange.splits)
    steps = end_step - first_step
    tiles = lax.div(all_tiles - worker + workers - 1, workers)
    exchange = None if inbox is None else exchange.start(inbox, outs_gmem)
    store = functools.partial(store_tile, outs_gmem, outputs)

    def multiply_tile(i):
        add_stage = functools.partial(_add_stage, stages)
        sums = lax.fori_loop(i * steps, (i + 1) * steps, add_stage, wgmma.zeros((ROWS, x_gmem.shape[0])))
        tile = worker + i * workers
        if exchange is None:
            store(tile, sums)
        else:  # the cluster has only this tile
            exchange.send(i, sums)
            exchange.add_up(tiles, lambda _, total: store(tile, total))

    def load():
        load_stage = functools.partial(_load_stage, group_tiles, x_gmem, weights_gmem, stages, first_step, steps)
        pl.loop(0, tiles * steps)(load_stage)
        if exchange is not None:
            barriers.wait_cluster(None)  # required in all warpgroups, see `SumExchange.start`
        barriers.wait_for_last(stages.empty, tiles * steps)

    def multiply():
        pl.loop(0, tiles)(multiply_tile)

    dispatch_warpgroups(warpgroup, {LOAD: load, MULTIPLY: multiply})


def _load_stage(group_tiles, x_gmem, weights_gmem, stages, first, steps, i):
    """Copies the operands of the block's `i`-th stage, counted over all its tiles.

    The block multiplies the stages `first` .. `first + steps - 1` of each tile.
    """
    stage = barriers.turn(stages.full, i)
    tile = lax.axis_index("worker") + lax.div(i, steps) * lax.axis_size("worker")
    column = (first + lax.rem(i, steps)) * STEP
    barriers.wait_empty(stages.empty, i)

    def load_weights(weight_gmem, row):
        place = pl.ds(row, ROWS), pl.ds(column, STEP)
        plgpu.copy_gmem_to_smem(weight_gmem.at[place], stages.weights_smem.at[stage], stages.full.at[stage])

    if len(weights_gmem) == 1:
        load_weights(weights_gmem[0], tile * ROWS)
    else:
        at_row(weights_gmem, [weight.shape[0] for weight in weights_gmem], tile * ROWS, load_weights)
    columns = pl.ds(lax.div(tile, group_tiles) * weights_gmem[0].shape[1] + column, STEP)
    plgpu.copy_gmem_to_smem(x_gmem.at[:, columns], stages.inputs_smem.at[stage], stages.full.at[stage])


def _add_stage(stages, i, acc):
    stage = barriers.turn(stages.full, i)
    plgpu.barrier_wait(stages.full.at[stage])
    acc = wgmma.multiply_add(acc, stages.weights_smem.at[stage], stages.inputs_smem.at[stage].transpose((1, 0)))
    # The fence orders the reads of this stage before the next bulk copy to it.
    plgpu.commit_smem()
    plgpu.barrier_arrive(stages.empty.at[stage])
    return acc
