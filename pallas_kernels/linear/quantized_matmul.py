"""Linear maps of many tokens: y[t, r] = sum_k W[r, k] * x[t, k], with W in FP8 or bfloat16, or SwiGLU of two such maps.

The kernel is bound by the throughput of products. A persistent grid of clusters walks over tiles of up to 256 rows of W
and up to 256 tokens. Tiles are ordered so that clusters that run at the same time share weights and inputs in the L2
cache. A cluster usually has two blocks, which multiply 128 or 64 rows of the tile each with the same tokens. The
warpgroups have the roles of `dequant_gemm`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.spec import LinearSpec, Outputs, at_row, checked_outputs, out_types
from pallas_kernels.matmul import epilogue
from pallas_kernels.matmul.dequant_gemm import DequantGemm, Operands, OutputTile
from pallas_kernels.matmul.quantized_weights import BF16, ROWS, SCALED, WeightLayout
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import axis_indices, kernel
from pallas_kernels.runtime.layer_operands import check_weight, layer_operand
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_TILE_TOKENS = 256
# Maximum number of tokens of a tile if one warpgroup multiplies. Tiles of 256 tokens took longer than `Config.choose`
# would expect.
MAX_NARROW_TILE_TOKENS = 128
BLOCKS = 2  # number of blocks of a cluster


@dataclasses.dataclass(frozen=True)
class Config:
    """The division of a launch's work into tiles, and their order."""

    tile_tokens: int  # number of tokens of a tile, a multiple of 16 up to 256, or up to 240 with SwiGLU
    warpgroups: int = 2  # number of warpgroups of a block that multiply, 1 or 2; each multiplies 64 rows of a tile
    # Number of tiles of tokens in a batch. A batch is multiplied with all weights before the next batch begins, so that
    # clusters that run at the same time share weights and inputs in the L2 cache.
    batch_tiles: int = 12

    @classmethod
    def choose(cls, tokens: int, rows: int, groups: int, gated: bool) -> "Config":
        """Chooses the config that takes the least time.

        The time is the number of waves times the time of a tile. A wave is the tiles that run at once, one in each
        cluster. One warpgroup takes less time for a tile than two, but a tile has half as many rows.

        Args:
          tokens: number of tokens.
          rows: number of rows of W.
          groups: number of groups of rows.
          gated: whether the launch computes SwiGLU.
        """

        def time(config):
            blocks, row_tiles = config.divide(rows, groups)
            waves = -(-row_tiles * -(-tokens // config.tile_tokens) // (MULTIPROCESSORS // blocks))
            # Fitted to times of an H200, docs/notes/linear.md. The unit is the time that a token adds to a tile of 64
            # rows. Unpacking the tile's weights takes `unpacking` of these units.
            unpacking = 340 if config.warpgroups == 2 else 260
            return waves * (unpacking + config.tile_tokens * config.warpgroups)

        # With SwiGLU, tiles have fewer tokens, because registers hold the scales of both maps.
        configs = []
        for warpgroups, max_tokens in ((2, MAX_TILE_TOKENS - 16 * gated), (1, MAX_NARROW_TILE_TOKENS)):
            fewest = -(-tokens // max_tokens)
            configs += [cls(-(-tokens // (16 * tiles)) * 16, warpgroups) for tiles in range(fewest, fewest + 4)]
        return min(configs, key=time)

    def divide(self, rows: int, groups: int) -> tuple[int, int]:
        """Returns the number of blocks of a cluster, and the number of tiles of rows.

        The blocks of a cluster multiply the same inputs, so their rows must belong to one group.
        """
        block_rows = ROWS * self.warpgroups
        blocks = BLOCKS if groups == 1 or rows // groups % (block_rows * BLOCKS) == 0 else 1
        return blocks, -(-rows // (block_rows * blocks))


@cached_trace("spec", "swiglu_limit", "scale_block", "config")
def quantized_matmul(
    x: jax.Array,
    weight: jax.Array | tuple[jax.Array, jax.Array],
    *,
    layer: jax.Array | None = None,
    spec: LinearSpec,
    swiglu_limit: float | None = None,
    scale_block: int = SCALED,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes `x @ weight.T` and splits it into the spec's outputs, or computes SwiGLU of its two outputs.

    Args:
      x: [T, num_groups * K] bfloat16 activations, T at least 1.
      weight: [num_groups * M, K] bfloat16, or (codes, scales) of a weight in FP8. Codes are [num_groups * M, K] uint8
        E4M3. Scales are [ceil(num_groups * M / scale_block), ceil(K / scale_block)] uint8 E8M0, one for each block of
        codes. K is a multiple of 64, or of 128 if the weight is in FP8 and `scale_block` is 128. If there are several
        groups, M is a multiple of 128.
      layer: [] int32 index of this layer if the weight's arrays have a leading axis of layers, else None.
      spec, swiglu_limit, scale_block: see `quantized_linear`.
      config: the division of the launch's work; None to choose it.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      The same outputs as `quantized_linear`. The order in which a sum's products are added depends on the weight's
      shape alone.

    Raises:
      NotImplementedError: the kernel does not take these shapes or dtypes.
    """
    tokens = x.shape[0]
    codes, scales = weight if isinstance(weight, tuple) else (weight, None)
    rows, depth = codes.shape[-2:]
    groups = spec.num_groups
    layout = BF16 if scales is None else WeightLayout(8, scale_block)
    check_array("x", x, jnp.bfloat16, None, groups * depth)
    check_weight("weight", codes, layer, layout.dtype, rows, depth)
    if scales is not None:
        check_weight("scales", scales, layer, jnp.uint8, -(-rows // scale_block), -(-depth // scale_block))
    multiple = ROWS if scales is None else max(scale_block, ROWS)
    outputs = checked_outputs(spec, rows, swiglu_limit, gate_multiple=multiple)
    gated = swiglu_limit is not None
    rule = f"columns in multiples of {multiple}, got {depth}"
    check_rules({rule: depth % multiple == 0, "at least one token": tokens > 0})
    config = config or Config.choose(tokens, rows, groups, gated)
    warpgroups = config.warpgroups
    blocks, row_tiles = config.divide(rows, groups)
    gemm = DequantGemm(layout, depth, config.tile_tokens, warpgroups, gated, blocks)
    outputs = outputs[:1] if gated else outputs
    p = QuantizedMatmulProblem(gemm, tokens, rows, row_tiles, groups, outputs, swiglu_limit, config.batch_tiles)
    launch = kernel(
        functools.partial(_body, p),
        out_type=out_types(outputs, tokens),
        kernel_name="quantized_matmul",
        grid={"worker": min(p.tiles, 2 if interpret else MULTIPROCESSORS // blocks)},
        cluster={"block": blocks},
        num_threads=warpgroups + 1,
        scratch_types={"dequant": gemm.scratch()},
        interpret=interpret,
    )
    # Bulk copies take whole tiles of 8 rows, so x needs a multiple of 8 tokens.
    x = jnp.pad(x, ((0, -tokens % 8), (0, 0)))
    num_matrices = math.prod(codes.shape[:-2]) * gemm.matrices
    codes, scales = jax.tree.map(lambda x: x.reshape(num_matrices, -1, x.shape[-1]), (codes, scales))
    return tuple(launch(x, codes, scales, layer_operand(layer)))


@dataclasses.dataclass(frozen=True)
class QuantizedMatmulProblem:
    """Static description of a launch of `quantized_matmul`."""

    gemm: DequantGemm
    tokens: int
    rows: int  # number of rows of W
    row_tiles: int  # number of tiles of rows
    num_groups: int  # number of groups of rows; each group multiplies different input channels
    outputs: Outputs
    limit: float | None  # clipping limit of SwiGLU
    batch_tiles: int  # see `Config`

    @property
    def height(self) -> int:
        """The number of output channels that one warpgroup computes in a tile: 64, or 32 if gated."""
        return ROWS // self.gemm.matrices

    @property
    def token_tiles(self) -> int:
        return -(-self.tokens // self.gemm.inputs)

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.token_tiles

    def place(self, tile):
        """Returns the indices of the first output channel and of the first token of a cluster's tile."""
        batch = lax.div(tile, self.batch_tiles * self.row_tiles)
        inner = tile - batch * (self.batch_tiles * self.row_tiles)
        size = jnp.minimum(self.token_tiles - batch * self.batch_tiles, self.batch_tiles)
        row = lax.div(inner, size)
        token = batch * self.batch_tiles + inner - row * size
        return row * (self.gemm.blocks * self.gemm.warpgroups * self.height), token * self.gemm.inputs


def _body(p, x_gmem, codes_gmem, scales_gmem, layer_gmem, *outs_gmem, dequant):
    worker, block, warpgroup = axis_indices("worker", "block", "warpgroup")
    workers = lax.axis_size("worker")
    tiles = lax.div(p.tiles - worker + (workers - 1), workers)
    matrix = 0 if layer_gmem is None else layer_gmem[0] * p.gemm.matrices

    def locate(n):
        row, token = p.place(worker + n * workers)
        # The column follows from the first row of the cluster, so that a block whose rows are past the end loads the
        # same inputs as the other block.
        column = lax.div(row, p.rows // p.num_groups) * p.gemm.depth
        return OutputTile(matrix, row + block * (p.gemm.warpgroups * p.height), token, column)

    def finish(n, sums):
        row, token = p.place(worker + n * workers)
        row += (block * p.gemm.warpgroups + warpgroup) * p.height

        def store(out_gmem, row):
            staging_smem = dequant.staging_smem.at[warpgroup]
            epilogue.store_many(out_gmem, sums, (row, token, p.tokens), staging_smem, limit=p.limit)

        at_row(outs_gmem, [size for size, _ in p.outputs], row, store)

    p.gemm.run(warpgroup, Operands(tiles, x_gmem, codes_gmem, scales_gmem, locate, finish), dequant)
