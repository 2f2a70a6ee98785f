"""Routed experts for many tokens: y[t, j] = down_e(w[t, j] * swiglu(gate_up_e(x[t]))) with e = selected[t, j].

The time is that of the products, or of reading the weights of all experts once. Four launches: sort the pairs of a
token and an expert by expert (`permutation`), gather their inputs (`gather_inputs`), multiply with gate and up,
multiply with down. The last two are grouped GEMMs with a persistent grid of one block per SM. An output tile has rows
of an expert and some of its pairs. Blocks that run at the same time share weights and inputs. An expert without pairs
has no tile. The warpgroups have the roles of `dequant_gemm`; those that multiply finish their tiles too.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.experts.expert_operands import check_operands
from pallas_kernels.experts.gather_inputs import gather_inputs
from pallas_kernels.experts.permutation import MAX_EXPERTS, sort_by_expert
from pallas_kernels.matmul import epilogue
from pallas_kernels.matmul.dequant_gemm import DequantGemm, Operands, OutputTile
from pallas_kernels.matmul.quantized_weights import FP4, ROWS
from pallas_kernels.runtime.checks import check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.layer_operands import layer_operand
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_TILE_PAIRS = 256


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning constants."""

    tile_pairs: int  # pairs of an output tile, a multiple of 16 up to 256
    warpgroups: int  # warpgroups that multiply, 2 or 4

    @classmethod
    def heuristic(cls, pairs: int, experts: int) -> "Config":
        """Returns a tile size with which nearly all experts have few tiles if routing is uniform."""
        mean = pairs / experts
        likely = int(mean + 2 * math.sqrt(mean))
        tile_pairs = -(-likely // (16 * -(-likely // MAX_TILE_PAIRS))) * 16
        return cls(tile_pairs, warpgroups=4 if tile_pairs <= 128 else 2)


@cached_trace("limit", "config")
def grouped_experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | tuple[jax.Array, jax.Array],
    down: jax.Array | tuple[jax.Array, jax.Array],
    *,
    layer: jax.Array | None = None,
    limit: float,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns `down_e(w * silu(min(gate_e(x), limit)) * clip(up_e(x), -limit, limit))` for each token and expert.

    Each linear map and the input of `down` are rounded to bfloat16. The order of a sum depends on the shapes and the
    storage of the weights alone.

    Args:
      x: [T, D] bfloat16 activations.
      selected: [T, k] int32 experts of each token. Pairs outside of [0, E) have no expert here.
      weights: [T, k] float32 routing weights.
      gate_up: weights of all experts, the gate's rows first, as for `experts`.
      down: weights of all experts, as for `experts`.
      layer: [] int32 index on a leading axis of layers of both maps' weights. None: they have no such axis.
      limit: clipping limit of SwiGLU.
      config: tuning constants; None: `Config.heuristic`.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, k, D] bfloat16, unspecified for pairs without an expert.

    Raises:
      NotImplementedError: the kernel does not take these shapes or dtypes.
    """
    tokens, depth = x.shape
    layout, number, inner, matrices = check_operands(x, selected, weights, gate_up, down, layer)
    rule = f"up to {MAX_EXPERTS} experts, got {number}"
    check_rules({"at least one token": tokens > 0, rule: number <= MAX_EXPERTS})
    config = config or Config.heuristic(selected.size, number)
    order, *tiles = sort_by_expert(selected.reshape(-1), number, config.tile_pairs, interpret=interpret)
    x = gather_inputs(x, order, selected.shape[1], layout == FP4, interpret=interpret)
    launch = functools.partial(_launch, tiles=tiles, layer=layer_operand(layer), interpret=interpret)
    gemm = DequantGemm(layout, depth, config.tile_pairs, config.warpgroups, gated=True)
    hidden = launch(GroupedGemm(gemm, number, order.size, inner, limit), weights.reshape(-1)[order], x, matrices[0])
    gemm = dataclasses.replace(gemm, depth=inner, gated=False)
    y = launch(GroupedGemm(gemm, number, selected.size, depth, limit), order, hidden, matrices[1])
    return y.reshape(*selected.shape, depth)


@dataclasses.dataclass(frozen=True)
class GroupedGemm:
    """A launch.

    Its GEMM, `gated` for gate and up, the experts of a layer, the rows and columns of the output, and SwiGLU's limit.
    """

    gemm: DequantGemm
    experts: int
    rows: int
    width: int
    limit: float

    @property
    def channels(self) -> int:
        """The number of output columns that a warpgroup computes of a tile."""
        return ROWS // 2 if self.gemm.gated else ROWS

    @property
    def tiles(self) -> int:
        """The number of output tiles of a block of pairs."""
        return self.width // (self.channels * self.gemm.warpgroups)


def _launch(p, table, x, weight, *, tiles, layer, interpret):
    """Runs one GEMM; `table` [P] has routing weights if it is gated, otherwise the output row of each sorted pair."""
    launch = kernel(
        functools.partial(_body, p),
        out_type=jax.ShapeDtypeStruct((p.rows, p.width), jnp.bfloat16),
        kernel_name="grouped_gate_up" if p.gemm.gated else "grouped_down",
        grid={"worker": 2 if interpret else MULTIPROCESSORS},
        num_threads=p.gemm.warpgroups + 1,
        scratch_types={"dequant": p.gemm.scratch()},
        interpret=interpret,
    )
    return launch(*tiles, table, x, *weight, layer)


def _body(p, count_gmem, blocks_gmem, table_gmem, x_gmem, codes_gmem, scales_gmem, layer_gmem, y_gmem, *, dequant):
    worker, warpgroup = axis_indices("worker", "warpgroup")
    workers = lax.axis_size("worker")
    tiles = lax.div(count_gmem[0] * p.tiles - worker + (workers - 1), workers)
    first_expert = 0 if layer_gmem is None else layer_gmem[0] * p.experts

    def block_and_tile(n):
        """Returns the block of pairs of this worker's n-th output tile, and the tile's number within it."""
        tile = worker + n * workers
        block = lax.div(tile, p.tiles)
        return block, tile - block * p.tiles

    def locate(n):
        block, tile = block_and_tile(n)
        matrix = (first_expert + blocks_gmem[0, block]) * p.gemm.matrices
        row = tile * (p.channels * p.gemm.warpgroups)
        return OutputTile(matrix, row, pl.multiple_of(blocks_gmem[1, block], 8))

    def finish(n, sums):
        block, tile = block_and_tile(n)
        column = (tile * p.gemm.warpgroups + warpgroup) * p.channels
        place = column, blocks_gmem[1, block], blocks_gmem[2, block]
        if p.gemm.gated:
            options: dict[str, Any] = {"limit": p.limit, "weights_gmem": table_gmem, "permuted": p.gemm.layout == FP4}
        else:
            options = {"rows_gmem": table_gmem}
        epilogue.store_many(y_gmem, sums, place, dequant.staging_smem.at[warpgroup], **options)

    p.gemm.run(warpgroup, Operands(tiles, x_gmem, codes_gmem, scales_gmem, locate, finish), dequant)
