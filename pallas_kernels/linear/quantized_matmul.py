"""Linear maps of many tokens whose weights stay in FP8: as long as the products take.

Clusters of two blocks walk over tiles of 256 rows and up to 256 tokens, so that those that run at the same time share
weights and inputs, which stay in the L2 cache.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.spec import LinearSpec, kernel_outputs
from pallas_kernels.matmul import dequant_epilogue
from pallas_kernels.matmul.dequant_gemm import DequantGemm, OutputTile
from pallas_kernels.matmul.quantized_weights import FP8, ROWS
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


SCALED = 128  # rows, and columns, that share a scale
MAX_INPUTS = 256  # tokens of a tile
# Tiles with fewer tokens take as long as with these: weights have to be unpacked.
MIN_INPUTS = 96
WARPGROUPS = 2
BLOCKS = 2  # of a cluster: 128 rows each
# Tiles of tokens that are multiplied with all weights before the next ones are.
TOGETHER = 12


@cached_trace("spec", "swiglu_limit")
def quantized_matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    spec: LinearSpec,
    swiglu_limit: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes `x @ weight.T` and splits it into the spec's outputs, or returns the SwiGLU of its two outputs.

    Args:
      x: [T, num_groups * K] bfloat16.
      codes: [num_groups * M, K] uint8, E4M3 bits, K a multiple of 128; M too if there are several groups.
      scales: [num_groups * M / 128, K / 128] uint8, E8M0 bits, one for 128 x 128 codes.
      spec: outputs in float32 or bfloat16, whose sizes are multiples of 64.
      swiglu_limit: limit of SwiGLU, or None. If given, the spec has two bfloat16 outputs, the gate and the up
        projection, whose sizes are one multiple of 128.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, size] of each output: float32 sums, in an order that depends on the weight's shape alone. With a limit, one
      [T, size] bfloat16 array, `silu(min(gate, limit)) * clip(up, -limit, limit)`.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, (rows, depth), groups = x.shape[0], codes.shape, spec.num_groups
    outputs = kernel_outputs(spec, rows)
    check_array("x", x, jnp.bfloat16, None, groups * depth)
    check_array("codes", codes, jnp.uint8, rows, depth)
    check_array("scales", scales, jnp.uint8, -(-rows // SCALED), -(-depth // SCALED))
    sizes = [size for size, _ in outputs]
    check_rules(
        {
            f"outputs of a multiple of {ROWS} rows, got {sizes}": not any(size % ROWS for size in sizes),
            f"groups of a multiple of {SCALED} rows, got {groups} groups of {rows} rows": groups == 1
            or rows % (groups * SCALED) == 0,
            f"columns in multiples of {SCALED}, got {depth}": depth % SCALED == 0,
            "at least one token": tokens > 0,
            f"gate and up of a multiple of {SCALED} rows, got {sizes}": swiglu_limit is None or sizes[0] % SCALED == 0,
        }
    )
    # Blocks of a cluster have the same inputs.
    blocks = BLOCKS if groups == 1 or rows // groups % (ROWS * WARPGROUPS * BLOCKS) == 0 else 1
    row_tiles = -(-rows // (ROWS * WARPGROUPS * blocks))
    workers, gated = MULTIPROCESSORS // blocks, swiglu_limit is not None
    most = MAX_INPUTS - 16 * gated  # leaves registers for scales of both
    gemm = DequantGemm(FP8, depth, _inputs(tokens, row_tiles, workers, most), WARPGROUPS, gated, blocks)
    outputs = outputs[:1] if gated else outputs
    p = QuantizedMatmulProblem(gemm, tokens, rows, row_tiles, groups, outputs, swiglu_limit)
    run = kernel(
        functools.partial(_body, p),
        out_type=[jax.ShapeDtypeStruct((tokens, size), dtype) for size, dtype in outputs],
        kernel_name="quantized_matmul",
        grid=(min(p.tiles, 2 if interpret else workers),),
        grid_names=("worker",),
        cluster=(blocks,),
        cluster_names=("block",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=gemm.scratch(),
        interpret=interpret,
    )
    # Bulk copies take whole tiles of 8 rows, of which there may be too few.
    x = jnp.pad(x, ((0, -tokens % 8), (0, 0)))
    return tuple(run(x, *(array.reshape(1 + gated, -1, array.shape[1]) for array in (codes, scales))))


def _inputs(tokens, row_tiles, workers, most):
    """Tokens of a tile: with equal ones, so many that the last blocks end early."""

    def time(count):
        turns = -(-count * row_tiles // workers)
        return turns * max(_share(tokens, count), MIN_INPUTS)

    fewest = -(-tokens // most)
    return _share(tokens, min(range(fewest, fewest + 4), key=time))


def _share(tokens, count):
    return -(-tokens // (16 * count)) * 16


@dataclasses.dataclass(frozen=True)
class QuantizedMatmulProblem:
    """What is static about a call."""

    gemm: DequantGemm
    tokens: int
    rows: int
    row_tiles: int
    groups: int
    outputs: tuple[tuple[int, jnp.dtype], ...]
    limit: float | None

    @property
    def height(self) -> int:
        """Rows of the output, of a warpgroup."""
        return ROWS // (1 + self.gemm.gated)

    @property
    def token_tiles(self) -> int:
        return -(-self.tokens // self.gemm.inputs)

    @property
    def tiles(self) -> int:
        return self.row_tiles * self.token_tiles

    def place(self, tile):
        """(row, token) where a cluster's tile begins."""
        batch = lax.div(tile, jnp.int32(TOGETHER * self.row_tiles))
        inner = tile - batch * (TOGETHER * self.row_tiles)
        size = jnp.minimum(self.token_tiles - batch * TOGETHER, TOGETHER)
        row = lax.div(inner, size)
        token = batch * TOGETHER + inner - row * size
        return row * (self.gemm.blocks * WARPGROUPS * self.height), token * self.gemm.inputs


def _body(p, x, codes, scales, *outs, staging, **streamed):
    worker, block, warpgroup = (lax.axis_index(name) for name in ("worker", "block", "warpgroup"))
    workers = lax.axis_size("worker")
    tiles = lax.div(p.tiles - worker + (workers - 1), jnp.int32(workers))

    def place(n):
        return p.place(worker + n * workers)

    def locate(n):
        row, token = place(n)
        # The cluster's, not the block's: it has common inputs, also where a block's rows are past the end.
        column = lax.div(row, jnp.int32(p.rows // p.groups)) * p.gemm.depth
        return OutputTile(0, row + block * (WARPGROUPS * p.height), token, column)

    def finish(n, sums):
        row, token = place(n)
        row, start = row + (block * WARPGROUPS + warpgroup) * p.height, 0
        own = staging.at[warpgroup]
        for out, (size, _) in zip(outs, p.outputs, strict=True):

            @pl.when((row >= start) & (row < start + size))
            def _(out=out, start=start):
                if p.limit is None:
                    dequant_epilogue.store_columns(out, sums, row - start, token, p.tokens, own)
                else:
                    dequant_epilogue.store_swiglu(out, sums, row, token, p.tokens, own, p.limit)

            start += size

    p.gemm.run(warpgroup, tiles, x, codes, scales, locate=locate, finish=finish, **streamed)
