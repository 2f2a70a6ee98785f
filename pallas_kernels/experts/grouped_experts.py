"""Routed experts for many tokens: y[t, j] = down_e(w[t, j] * swiglu(gate_up_e(x[t]))) with e = selected[t, j].

The kernels are bound by the throughput of products, or by the bandwidth of reading the weights of all experts once.
There are four launches:

  1. `permutation` sorts the (token, expert) pairs by expert.
  2. `gather_inputs` gathers the inputs of the pairs in this order.
  3. A grouped GEMM multiplies with gate and up, and computes SwiGLU.
  4. A grouped GEMM multiplies with down.

Both GEMMs have a persistent grid of one block per SM and the warpgroup roles of `dequant_gemm`. An output tile is a
range of weight rows of an expert times some of its pairs. An expert without pairs has no tile. Tiles are ordered so
that blocks that run at the same time share weights and inputs in the L2 cache.
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
    """Tuning constants of the grouped GEMMs."""

    tile_pairs: int  # maximum number of pairs of an output tile, a multiple of 16 up to 256
    warpgroups: int  # number of warpgroups that multiply, 2 or 4

    @classmethod
    def heuristic(cls, pairs: int, experts: int) -> "Config":
        """Chooses the tile size for `pairs` pairs of `experts` experts.

        With uniform routing, nearly every expert has at most `likely` pairs: the mean plus twice the standard
        deviation, which is `sqrt(mean)`. Let n be the number of tiles of 256 pairs that hold `likely` pairs. The tile
        size is the smallest multiple of 16 with which n tiles still hold `likely` pairs.
        """
        mean = pairs / experts
        likely = int(mean + 2 * math.sqrt(mean))
        tile_pairs = -(-likely // (16 * -(-likely // MAX_TILE_PAIRS))) * 16
        return cls(tile_pairs, warpgroups=4 if tile_pairs <= 128 else 2)


@cached_trace("limit", "total_experts", "config")
def grouped_experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | tuple[jax.Array, jax.Array],
    down: jax.Array | tuple[jax.Array, jax.Array],
    *,
    layer: jax.Array | None = None,
    limit: float,
    total_experts: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Returns `down_e(w * silu(min(gate_e(x), limit)) * clip(up_e(x), -limit, limit))` for each token and expert.

    Here, e is an expert of the token, and w the token's routing weight of e. The outputs of each linear map and the
    input of `down` are rounded to bfloat16. The order in which a sum's products are added depends on the shapes and the
    storage of the weights alone.

    Args:
      x: [T, D] bfloat16 activations.
      selected: [T, k] int32 experts of each token. A pair whose expert is outside of [0, E) is not computed.
      weights: [T, k] float32 routing weights.
      gate_up: weights of all experts, the gate's rows first, as for `experts`.
      down: weights of all experts, as for `experts`.
      layer: [] int32 index of this layer if both maps' weights have a leading axis of layers, else None.
      limit: clipping limit of SwiGLU.
      total_experts: number of experts among which `selected` was chosen, if other devices have some of them; None: E.
      config: tuning constants; None: `Config.heuristic`.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, k, D] bfloat16, unspecified for pairs without an expert.

    Raises:
      NotImplementedError: the kernel does not take these shapes or dtypes.
    """
    tokens, depth = x.shape
    layout, num_experts, inner, matrices = check_operands(x, selected, weights, gate_up, down, layer)
    rule = f"up to {MAX_EXPERTS} experts, got {num_experts}"
    check_rules({"at least one token": tokens > 0, rule: num_experts <= MAX_EXPERTS})
    config = config or Config.heuristic(selected.size, total_experts or num_experts)
    order, *tiles = sort_by_expert(selected.reshape(-1), num_experts, config.tile_pairs, interpret=interpret)
    x = gather_inputs(x, order, selected.shape[1], layout == FP4, interpret=interpret)
    launch = functools.partial(_launch, tiles=tiles, layer=layer_operand(layer), interpret=interpret)
    gemm = DequantGemm(layout, depth, config.tile_pairs, config.warpgroups, gated=True)
    gate_up_gemm = GroupedGemm(gemm, num_experts, order.size, inner, limit)
    hidden = launch(gate_up_gemm, weights.reshape(-1)[order], x, matrices[0])
    gemm = dataclasses.replace(gemm, depth=inner, gated=False)
    y = launch(GroupedGemm(gemm, num_experts, selected.size, depth, limit), order, hidden, matrices[1])
    return y.reshape(*selected.shape, depth)


@dataclasses.dataclass(frozen=True)
class GroupedGemm:
    """Static description of the launch of a grouped GEMM."""

    gemm: DequantGemm  # GEMM of a block; gated for gate and up
    experts: int  # number of experts of a layer
    rows: int  # number of rows of the output
    width: int  # number of columns of the output
    limit: float  # clipping limit of SwiGLU

    @property
    def channels(self) -> int:
        """The number of output columns of a tile that one warpgroup computes."""
        return ROWS // 2 if self.gemm.gated else ROWS

    @property
    def tiles(self) -> int:
        """The number of output tiles along the output's columns, for each tile of pairs of `sort_by_expert`."""
        return -(-self.width // (self.channels * self.gemm.warpgroups))


def _launch(p, table, x, weight, *, tiles, layer, interpret):
    """Runs one grouped GEMM.

    Args:
      p: description of the launch.
      table: if gated, [N] float32 routing weight of each of N sorted pairs; else [N] int32 output row of each pair.
      x: [N, channels] bfloat16 inputs of the sorted pairs.
      weight: (codes or weights, scales or None) of all experts.
      tiles: (count, tiles) from `sort_by_expert`.
      layer: [1] int32 index of the layer, or None.
      interpret: whether to interpret the kernel.
    """
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
        """Finds this worker's n-th output tile.

        Returns:
          (index of the tile of pairs in `blocks_gmem`, index of the output tile among those of this tile of pairs).
        """
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
        store = functools.partial(
            epilogue.store_many, y_gmem, sums, place, dequant.staging_smem.at[warpgroup], **options
        )
        if p.width % (p.channels * p.gemm.warpgroups):
            pl.when(column < p.width)(store)  # in the last tile, some warpgroups have no channels
        else:
            store()

    p.gemm.run(warpgroup, Operands(tiles, x_gmem, codes_gmem, scales_gmem, locate, finish), dequant)
