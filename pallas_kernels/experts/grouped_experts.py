"""The sum over a token's experts, for many tokens: as long as the products take, or reading all experts.

Pairs of a token and an expert are sorted by expert. Two launches: gate and up with SwiGLU, then down. In both, blocks
of threads walk over tiles of rows of an expert and some of its pairs, in an order in which those that run at the same
time share weights and inputs. The list of an expert's pairs is made on the device: an expert without any has no tile.
"""

import dataclasses
import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.experts.expert_operands import check_operands
from pallas_kernels.experts.gather_inputs import gather_inputs
from pallas_kernels.experts.permutation import MAX_EXPERTS, sort_by_expert
from pallas_kernels.matmul import dequant_epilogue
from pallas_kernels.matmul.dequant_gemm import DequantGemm, Operands, OutputTile
from pallas_kernels.matmul.quantized_weights import FP4, ROWS
from pallas_kernels.runtime.checks import check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_INPUTS = 256  # pairs of a tile
CHANNELS = ROWS // 2  # of a warpgroup's rows of gate and up


@cached_trace("limit")
def grouped_experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | tuple[jax.Array, jax.Array],
    down: jax.Array | tuple[jax.Array, jax.Array],
    *,
    limit: float,
    interpret: bool = False,
) -> jax.Array:
    """What each of a token's experts makes of it: `down_e(w * silu(min(gate_e(x), limit)) * clip(up_e(x), +-limit))`.

    Args:
      x: [T, D] bfloat16.
      selected: [T, k] int32, each token's experts, 0 .. E - 1. A pair with another number has no expert here.
      weights: [T, k] float32, what w is.
      gate_up: [E, 2 * I, D] bfloat16, the gate's rows first; or codes [E, 2 * I, D / 2] uint8, two E2M1 codes in a
        byte, and scales [E, 2 * I, D / 32] uint8, E8M0. D and I are multiples of 512, of bfloat16 of 256; I may be 256.
      down: [E, D, I] bfloat16; or codes [E, D, I / 2] and scales [E, D, I / 32].
      limit: of SwiGLU.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, k, D] bfloat16; each linear map is rounded to bfloat16, and so is what enters the last. Unspecified for pairs
      that have no expert. The order of a sum depends on the weights' shapes and storage alone.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, depth = x.shape
    layout, number, inner, *matrices = check_operands(x, selected, weights, gate_up, down)
    rules = {"at least one token": tokens > 0, f"up to {MAX_EXPERTS} experts, got {number}": number <= MAX_EXPERTS}
    check_rules(rules)
    count = _inputs(selected.size, number)
    order, *tiles = sort_by_expert(selected.reshape(-1), number, count, interpret=interpret)
    x = gather_inputs(x, order, selected.shape[1], layout == FP4, interpret=interpret)
    warpgroups = 4 if count <= MAX_INPUTS // 2 else 2
    gemm = DequantGemm(layout, depth, count, warpgroups, gated=True)
    hidden = _launch(gemm, limit, inner, tiles, weights.reshape(-1)[order], x, matrices[0], order.size, interpret)
    gemm = DequantGemm(layout, inner, count, warpgroups)
    y = _launch(gemm, limit, depth, tiles, order, hidden, matrices[1], selected.size, interpret)
    return y.reshape(*selected.shape, depth)


def _inputs(pairs, number):
    """Pairs of a tile: so many that nearly all experts with as many as others have few tiles."""
    mean = pairs / number
    most = mean + 2 * math.sqrt(mean)
    return -(-int(most) // (16 * -(-int(most) // MAX_INPUTS))) * 16


@dataclasses.dataclass(frozen=True)
class GroupedExpertsProblem:
    """What is static about a launch. `width`: of the output."""

    gemm: DequantGemm
    width: int
    limit: float

    @property
    def channels(self) -> int:
        """Of the output, of a warpgroup."""
        return CHANNELS if self.gemm.gated else ROWS

    @property
    def tiles(self) -> int:
        """Of a block of pairs."""
        return self.width // (self.channels * self.gemm.warpgroups)


def _launch(gemm, limit, width, tiles, table, x, weight, rows, interpret):
    """`table`: [P], routing weights where gated, otherwise where each sorted pair goes."""
    p = GroupedExpertsProblem(gemm, width, limit)
    run = kernel(
        functools.partial(_body, p),
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        kernel_name="grouped_gate_up" if gemm.gated else "grouped_down",
        grid=(2 if interpret else MULTIPROCESSORS,),
        grid_names=("worker",),
        num_threads=gemm.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=dict(dequant=gemm.scratch()),
        interpret=interpret,
    )
    return run(*tiles, table, x, *weight)


def _body(p, count, blocks, table, x, codes, scales, out, *, dequant):
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    workers = lax.axis_size("worker")
    tiles = lax.div(count[0] * p.tiles - worker + (workers - 1), jnp.int32(workers))

    def block_of(n):
        tile = worker + n * workers
        block = lax.div(tile, jnp.int32(p.tiles))
        return block, tile - block * p.tiles

    def locate(n):
        block, tile = block_of(n)
        matrix, row = blocks[0, block] * (1 + p.gemm.gated), tile * (p.channels * p.gemm.warpgroups)
        return OutputTile(matrix, row, pl.multiple_of(blocks[1, block], 8))

    def finish(n, sums):
        block, tile = block_of(n)
        column = (tile * p.gemm.warpgroups + warpgroup) * p.channels
        place = column, blocks[1, block], blocks[2, block], dequant.staging_smem.at[warpgroup]
        if p.gemm.gated:
            dequant_epilogue.store_swiglu(out, sums, *place, p.limit, table, permuted=p.gemm.layout == FP4)
        else:
            dequant_epilogue.store_columns(out, sums, *place, table)

    p.gemm.run(warpgroup, Operands(tiles, x, codes, scales, locate, finish), dequant)
