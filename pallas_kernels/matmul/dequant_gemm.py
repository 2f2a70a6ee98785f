"""GEMM with quantized weights: sums[r, t] = sum_k W[matrix, r, k] * x[t, k], for many inputs x.

Each output tile has its own index `matrix`, see `OutputTile`.

The kernel is bound by the throughput of `wgmma`. A block walks over the output tiles that the caller gives it, see
`Operands`. The columns k of the weights are split into steps of 32, 64 or 128 bytes of each weight row. A stage of
shared memory holds the weights and the inputs of one step. With w = `DequantGemm.warpgroups`:

    warpgroup   role        does                                                waits for       signals
    0..w-1      multiply    unpacks 64 weight rows in registers, runs `wgmma`,  stage_full      stage_empty
                            and calls `finish` with their sums                  codes_full      codes_empty
                                                                                scales_full     scales_empty
    w           load        copies operands, without a pause between tiles      stage_empty     stage_full
                                                                                codes_empty     codes_full
                                                                                scales_empty    scales_full

FP4's scales have a separate ring in shared memory, because one copy brings the scales of several steps. FP4's codes may
have a separate ring, too, if steps have at most 64 bytes. One copy then brings the codes of two steps, because PCIe
reads experts in host memory at a lower rate in pieces of 64 bytes than in pieces of 128. The two blocks of a cluster
multiply the same inputs, and each block copies half of the inputs to both.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import dequant_wgmma, epilogue
from pallas_kernels.matmul.quantized_weights import ROWS, SCALE_BYTES, SHIFT, WeightLayout
from pallas_kernels.mgpu import barriers, wgmma
from pallas_kernels.runtime.hardware import SHARED_BYTES


STAGING_BYTES = SHARED_BYTES - (1 << 10)  # bytes of shared memory for stages, scales and the epilogue's staging
MAX_STAGES = 8
# With up to this number of inputs, codes may have a separate ring. Shared memory then has room for three stages.
MAX_CODES_RING = 224
SCALES_STAGES = 3
CODES_STAGES = 2  # number of stages of the separate ring of codes
# {number of multiplying warpgroups: (registers of a loading thread, registers of a multiplying thread)}. The sum over
# the warpgroups of a block is at most 512, since a multiprocessor has 512 * 128 registers. With one multiplying
# warpgroup, all threads have 255 registers.
REGISTERS = {2: (40, 232), 4: (24, 112)}


class OutputTile(NamedTuple):
    """The location of an output tile's weights and inputs in global memory, as int32 indices."""

    matrix: Any  # index of the matrix; if gated, index of the gate's matrix, and the up projection's matrix is the next
    row: Any  # index of the tile's first row in the matrix
    input: Any  # index of the tile's first input, a row of the array of inputs; a multiple of 8
    column: Any = 0  # index of the tile's first column in the array of inputs


class Operands(NamedTuple):
    """Operands of a GEMM in global memory, and the tiles that a block multiplies.

    Rows and inputs past the end of an array are read as zeros.
    """

    tiles: jax.Array  # int32 scalar, number of tiles of this block; equal for both blocks of a cluster
    inputs_gmem: Any  # [.., width] bfloat16; for FP4 in the order of `dequant_wgmma.permute_columns`
    codes_gmem: Any  # [matrices, R, elements of a row] of the layout's dtype: bfloat16 weights, or codes of FP8 or FP4
    # E8M0 scales, uint8, or None for bfloat16:
    #   * FP8: [matrices, R / block, columns / block].
    #   * FP4: [matrices, R, columns / 32].
    #   * FP4 with 8 scales in a weight row: [matrices, R / 2, 16], with the scales of two weight rows in a line.
    #   * FP4 if one copy brings all scales of a tile: [matrices, lines, `WeightLayout.scale_line`].
    scales_gmem: Any
    locate: Callable[[jax.Array], OutputTile]  # maps the index of a tile of this block to its place
    # Stores the sums of a tile. Each multiplying warpgroup calls it with the index of the tile among those of this
    # block, and with sums [64, inputs] float32: 2**-32 times the sums of products of the warpgroup's 64 rows.
    finish: Callable[[jax.Array, jax.Array], None]


class DequantScratch(NamedTuple):
    """Shared memory and barriers of a GEMM: types to allocate outside the kernel, references inside it."""

    codes_smem: Any  # [stages, matrices of a tile, rows of each, elements] weights or codes
    codes_empty: Any  # barriers of the separate ring of codes; None if codes and inputs share their stages
    codes_full: Any  # like `codes_empty`
    stage_empty: Any  # a barrier for each stage
    stage_full: Any  # a barrier for each stage
    inputs_smem: Any  # [stages, inputs, columns of a step] bfloat16
    scales_empty: Any  # barriers of the ring of FP4's scales; None unless the weights are FP4
    scales_full: Any  # like `scales_empty`
    scales_smem: Any  # [stages, matrices of a tile, lines, scales of a line] uint8 scales of FP4; otherwise None
    staging_smem: Any  # [warpgroups, bytes] uint8, memory in which `epilogue.store_many` transposes sums


@dataclasses.dataclass(frozen=True)
class DequantGemm:
    """Static description of a GEMM."""

    layout: WeightLayout
    depth: int  # number of columns of the weights, a multiple of 64
    inputs: int  # number of inputs of a tile, a multiple of 16 up to 256
    warpgroups: int  # number of warpgroups that multiply, 1, 2 or 4; each multiplies 64 rows of a tile
    gated: bool = False  # whether half of a tile's rows are the gate's and half the up projection's, for SwiGLU
    blocks: int = 1  # number of blocks of a cluster, 1 or 2, along the cluster's axis "block"

    @property
    def rows(self) -> int:
        """The number of weight rows in a tile."""
        return ROWS * self.warpgroups

    @property
    def matrices(self) -> int:
        """The number of matrices from which a tile takes rows: 2 if gated, else 1."""
        return 1 + self.gated

    @property
    def step_bytes(self) -> int:
        """The number of bytes of each weight row that one step multiplies.

        Steps have 128 bytes for bfloat16 and with `has_wide_steps`, otherwise 64. A row has a whole number of steps, so
        steps are shorter if the size of a row is not a multiple of 128 or 64 bytes.
        """
        most = 128 if self.layout.bits == 16 or self.has_wide_steps else 64
        return math.gcd(most, self.depth * self.layout.bits // 8)

    @property
    def has_wide_steps(self) -> bool:
        """Whether three stages with steps of 128 bytes fit into shared memory, and the weights are FP4 or FP8.

        FP8 in blocks of 32 x 32 values has no such steps, because a step then has more scales than `_fp8_scales` packs.
        Steps of 128 bytes are whole lines of the L2 cache. With three stages, FP4 took 6% less time with steps of 128
        bytes than with steps of 64. With two stages, it took up to 31% longer.
        """
        stage_bytes = 128 * self.rows + 2 * self.layout.columns(128) * self.inputs
        is_wide = self.layout.bits < 16 and not self.layout.has_small_blocks
        return is_wide and 3 * stage_bytes <= self.free_bytes

    @property
    def free_bytes(self) -> int:
        """The number of bytes of shared memory for weights and inputs."""
        free_bytes = STAGING_BYTES - self.warpgroups * epilogue.STAGING_BYTES
        return free_bytes - math.prod(self.scales_shape) if self.layout.bits == 4 else free_bytes

    @property
    def scales_shape(self) -> tuple[int, int, int, int]:
        """The shape of the ring of FP4's scales: stages, matrices of a tile, lines of each, scales of a line."""
        matrix_rows = self.rows // self.matrices
        copies_all = self.layout.copies_all_scales(self.depth)
        line = self.layout.scale_line(self.depth) if copies_all else SCALE_BYTES
        return self.scales_stages, self.matrices, matrix_rows * self.scales // line, line

    @property
    def code_steps(self) -> int:
        """The number of steps for which one copy brings the codes, 1 or 2. With 2, codes have a separate ring."""
        has_ring = self.layout.bits == 4 and not self.has_wide_steps and self.inputs <= MAX_CODES_RING
        return 2 if has_ring and self.steps % 2 == 0 else 1

    @property
    def step_columns(self) -> int:
        return self.layout.columns(self.step_bytes)

    @property
    def steps(self) -> int:
        return self.depth // self.step_columns

    @property
    def scales(self) -> int:
        """The number of FP4 scales of a row that one copy brings: 16, 8, or all."""
        scales = self.depth // 32
        return scales if self.layout.copies_all_scales(self.depth) else min(SCALE_BYTES, scales)

    @property
    def scales_stages(self) -> int:
        """The number of stages of the ring of FP4's scales."""
        return 2 if self.layout.copies_all_scales(self.depth) else SCALES_STAGES

    @property
    def scale_steps(self) -> int:
        """The number of steps for which one copy brings FP4's scales."""
        return self.scales * 32 // self.step_columns

    @property
    def overlaps(self) -> bool:
        """Whether a step's weights are unpacked while the products of the previous step still run.

        With two warpgroups, a tile can have so many inputs that registers have no room for the unpacked weights beside
        the sums. Steps of a single chunk of 64 columns do not overlap, because the weights of the next step would be
        loaded into registers that the running products still read.
        """
        return self.warpgroups != 2 and self.step_columns > dequant_wgmma.CHUNK

    def scratch(self) -> DequantScratch:
        """Returns the scratch types for `run`. If codes have a separate ring, a stage holds only inputs."""
        has_codes_ring = self.code_steps > 1
        has_scales = self.layout.bits == 4
        matrix_rows = self.rows // self.matrices
        row_bytes = self.code_steps * self.step_bytes
        free_bytes = self.free_bytes
        stage_bytes = 2 * self.step_columns * self.inputs
        if has_codes_ring:
            free_bytes -= CODES_STAGES * self.rows * row_bytes
        else:
            stage_bytes += self.rows * self.step_bytes
        stages = min(free_bytes // stage_bytes, MAX_STAGES)
        codes_stages = CODES_STAGES if has_codes_ring else stages
        codes_columns = self.layout.elements(self.layout.columns(row_bytes))
        transforms = dequant_wgmma.code_transforms(self.layout, row_bytes)
        empty_barrier = functools.partial(plgpu.Barrier, num_arrivals=self.warpgroups)
        stage_empty = empty_barrier
        if self.blocks > 1:
            options = {"collective_axes": ("block",), "num_arrivals": self.warpgroups}
            stage_empty = functools.partial(plgpu.ClusterBarrier, **options)
        return DequantScratch(
            codes_smem=plgpu.SMEM(
                (codes_stages, self.matrices, matrix_rows, codes_columns), self.layout.dtype, transforms=transforms
            ),
            codes_empty=empty_barrier(num_barriers=CODES_STAGES) if has_codes_ring else None,
            codes_full=plgpu.Barrier(num_barriers=CODES_STAGES) if has_codes_ring else None,
            stage_empty=stage_empty(num_barriers=stages),
            stage_full=plgpu.Barrier(num_arrivals=1 if has_codes_ring else 2, num_barriers=stages),
            inputs_smem=wgmma.operand(stages, self.inputs, self.step_columns),
            scales_empty=empty_barrier(num_barriers=self.scales_stages) if has_scales else None,
            scales_full=plgpu.Barrier(num_barriers=self.scales_stages) if has_scales else None,
            scales_smem=plgpu.SMEM(self.scales_shape, jnp.uint8) if has_scales else None,
            staging_smem=plgpu.SMEM((self.warpgroups, epilogue.STAGING_BYTES), jnp.uint8),
        )

    def run(self, warpgroup: jax.Array, operands: Operands, refs: DequantScratch) -> None:
        """Multiplies all tiles of the block, and passes their sums to `operands.finish`.

        Every warpgroup of the block calls this method, with its index in the block.
        """
        registers = REGISTERS.get(self.warpgroups)

        @pl.when(warpgroup == self.warpgroups)
        def _():
            if registers:
                plgpu.set_max_registers(registers[0], action="decrease")
            _load(self, operands, refs)

        @pl.when(warpgroup < self.warpgroups)
        def _():
            if registers:
                plgpu.set_max_registers(registers[1], action="increase")
            with jax.named_scope("multiply"):
                pl.loop(0, operands.tiles)(functools.partial(_multiply_tile, self, operands, refs, warpgroup))


@jax.named_scope("load")
def _load(gemm, operands, refs):
    @pl.loop(0, operands.tiles)
    def load_tile(n):
        place = operands.locate(n)
        weights = pl.ds(place.matrix, gemm.matrices), pl.ds(place.row, gemm.rows // gemm.matrices)
        codes_gmem = operands.codes_gmem.at[weights]
        pl.loop(0, gemm.steps)(functools.partial(_load_step, gemm, operands, refs, n, place, codes_gmem))

    steps = operands.tiles * gemm.steps
    barriers.wait_for_last(refs.stage_empty, steps)
    if refs.codes_full is not None:
        barriers.wait_for_last(refs.codes_empty, lax.div(steps, gemm.code_steps))
    if refs.scales_smem is not None:
        barriers.wait_for_last(refs.scales_empty, lax.div(steps, gemm.scale_steps))


def _load_step(gemm, operands, refs, n, place, codes_gmem, step):
    """Copies the operands of a step of the block's tile `n` to shared memory, once their stages are empty."""
    i = n * gemm.steps + step  # index of the step among all steps of the block
    stage = barriers.turn(refs.stage_full, i)
    stage_full = refs.stage_full.at[stage]
    barriers.wait_empty(refs.stage_empty, i)
    columns = pl.ds(place.column + step * gemm.step_columns, gemm.step_columns)
    inputs_gmem = operands.inputs_gmem.at[pl.ds(place.input, gemm.inputs), columns]
    cluster_axis = "block" if gemm.blocks > 1 else None  # each block copies half of the inputs to both
    plgpu.copy_gmem_to_smem(inputs_gmem, refs.inputs_smem.at[stage], stage_full, collective_axes=cluster_axis)
    if refs.codes_full is None:
        _load_codes(codes_gmem, step, refs.codes_smem.at[stage], stage_full)
    else:

        @pl.when(lax.rem(i, gemm.code_steps) == 0)
        def _():
            copy_number = lax.div(i, gemm.code_steps)
            slot = barriers.turn(refs.codes_full, copy_number)
            barriers.wait_empty(refs.codes_empty, copy_number)
            piece = lax.div(step, gemm.code_steps)
            _load_codes(codes_gmem, piece, refs.codes_smem.at[slot], refs.codes_full.at[slot])

    if refs.scales_smem is not None:
        copy_number = lax.div(i, gemm.scale_steps)
        needs_scales = lax.rem(i, gemm.scale_steps) == 0
        pl.when(needs_scales)(lambda: _load_scales(gemm, operands, refs, place, copy_number, step))


def _load_codes(codes_gmem, piece, codes_smem, full):
    """Copies piece `piece` of a tile's codes [matrices, rows, elements] to `codes_smem`, which is as wide as a piece.

    The copy arrives at the barrier `full`.
    """
    elements = codes_smem.shape[2]
    plgpu.copy_gmem_to_smem(codes_gmem.at[:, :, pl.ds(piece * elements, elements)], codes_smem, full)


def _load_scales(gemm, operands, refs, tile, number, step):
    """Copies the FP4 scales of the next `gemm.scale_steps` steps of a tile to shared memory, from step `step` on.

    `tile` is the `OutputTile`. `number` is the index of this copy among all copies of scales by this block.
    """
    slot = barriers.turn(refs.scales_full, number)
    barriers.wait_empty(refs.scales_empty, number)
    lines, line = refs.scales_smem.shape[2:]
    columns = pl.ds(lax.div(step, gemm.scale_steps) * line, line)
    first_line = lax.div(tile.row, gemm.rows // gemm.matrices) * lines
    scales_gmem = operands.scales_gmem.at[pl.ds(tile.matrix, gemm.matrices), pl.ds(first_line, lines), columns]
    plgpu.copy_gmem_to_smem(scales_gmem, refs.scales_smem.at[slot], refs.scales_full.at[slot])


def _multiply_tile(gemm, operands, refs, warpgroup, n):
    place = operands.locate(n)
    add_step = functools.partial(_add_step, gemm, operands, refs, warpgroup, n, place)
    sums = lax.fori_loop(0, gemm.steps, add_step, wgmma.zeros((ROWS, gemm.inputs)))
    if gemm.overlaps:
        sums = dequant_wgmma.complete_sums(sums)
        barriers.release(refs.stage_empty.at[barriers.turn(refs.stage_full, (n + 1) * gemm.steps - 1)])
    # `finish` expects the sums times 2**-32. Sums of unpacked FP8 and FP4 weights have this factor already.
    operands.finish(n, sums * 2.0**-SHIFT if gemm.layout.bits == 16 else sums)


def _add_step(gemm, operands, refs, warpgroup, n, place, step, acc):
    """Adds the products of a step of the block's tile `n` to acc [64, inputs], and releases stages that were read."""
    i = n * gemm.steps + step
    scale_steps = gemm.scale_steps
    stage = barriers.turn(refs.stage_full, i)
    scales_slot = lax.rem(lax.div(i, scale_steps), gemm.scales_stages)
    scale_at = jnp.int32(0)
    scales_smem = None
    if gemm.layout.bits == 8:
        scale_at = _fp8_scales(gemm, operands, place, step, warpgroup)
    elif gemm.layout.bits == 4:
        scale_at = lax.rem(i, scale_steps) * (gemm.scales // scale_steps)
        scales_smem = refs.scales_smem.at[scales_slot]
        pl.when(lax.rem(i, scale_steps) == 0)(lambda: plgpu.barrier_wait(refs.scales_full.at[scales_slot]))
    plgpu.barrier_wait(refs.stage_full.at[stage])
    code_steps = gemm.code_steps
    codes_slot = stage
    if refs.codes_full is not None:
        codes_slot = barriers.turn(refs.codes_full, lax.div(i, code_steps))
        pl.when(lax.rem(i, code_steps) == 0)(lambda: plgpu.barrier_wait(refs.codes_full.at[codes_slot]))
    acc = dequant_wgmma.multiply_tile(
        acc,
        refs.codes_smem.at[codes_slot],
        scales_smem,
        scale_at,
        refs.inputs_smem.at[stage],
        warpgroup,
        gemm.layout,
        gemm.gated,
        not gemm.overlaps,
    )
    if refs.codes_full is not None:
        pl.when(lax.rem(i, code_steps) == code_steps - 1)(lambda: barriers.release(refs.codes_empty.at[codes_slot]))
    if gemm.overlaps:
        pl.when(step > 0)(lambda: barriers.release(refs.stage_empty.at[barriers.turn(refs.stage_full, i - 1)]))
    else:
        barriers.release(refs.stage_empty.at[stage])
    if gemm.layout.bits == 4:
        is_last = lax.rem(i, scale_steps) == scale_steps - 1
        pl.when(is_last)(lambda: barriers.release(refs.scales_empty.at[scales_slot]))
    return acc


def _fp8_scales(gemm, operands, tile, step, warpgroup):
    """Returns the FP8 scales of step `step` of an `OutputTile` as bytes of an int32 scalar.

    The order of the bytes is that of the argument `scale_at` of `dequant_wgmma.multiply_tile`.
    """
    block = gemm.layout.block
    last_row = operands.scales_gmem.shape[1] - 1
    row = lax.div(tile.row, block)
    column = lax.div(step * gemm.step_bytes, block)
    places = [(tile.matrix + i, row) for i in range(gemm.matrices)]
    columns = [column]
    if gemm.layout.has_small_blocks:
        columns.append(column + 1)
        if gemm.gated:
            places = [(matrix, row + warpgroup) for matrix, row in places]
        else:
            places = [(tile.matrix, row + 2 * warpgroup + half) for half in range(2)]
    word = jnp.int32(0)
    for byte, ((matrix, row), column) in enumerate(itertools.product(places, columns)):
        scale = operands.scales_gmem[matrix, jnp.minimum(row, last_row), column].astype(jnp.int32)
        word |= scale << (8 * byte)
    return word
