"""Products of weights in shared memory with a few inputs, by the instruction `mma`: [64 rows, 8 inputs] at a time.

A warp multiplies 16 rows, and a thread holds weights of two of these rows. Four threads share a row: each thread reads
16 of 64 consecutive bytes. In FP4, 16 bytes are the 32 columns that have a common scale. `mma` expects other columns in
these threads, so `skinny_prologue` reorders the columns of the inputs in the same way. bfloat16 weights are read in the
order of unpacked FP8, so that weights of both kinds can be multiplied with the same inputs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import quantized_weights
from pallas_kernels.matmul.quantized_weights import HALF, ROWS, SEGMENT, SHIFT, WeightLayout, decode_scales, power_pair
from pallas_kernels.mgpu import bfloat16_words, mlir, thread_ops
from pallas_kernels.mgpu.bfloat16_words import e2m1_pairs, e4m3_pairs, fp8_pairs, multiply
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import primitive


UNIT = 32  # number of columns of two `mma` instructions; a thread reads 16 bytes of inputs for both
COLUMNS = 8  # number of inputs of an `mma`
MULTIPLIERS = 4  # number of warpgroups that multiply


@dataclasses.dataclass(frozen=True)
class StageFormat:
    """Static description of the stages of a matrix in shared memory."""

    layout: WeightLayout
    gated: bool  # whether a thread gets the sums of rows i and 32 + i, see `quantized_weights.interleave_halves`
    step_segments: int  # number of segments of a step; one warpgroup multiplies all stages of the step
    # FP4: number of scales of a row, if all scales of a tile were copied together; otherwise 0.
    row_scales: int
    # Whether a stage is stored as tiles [32, elements]. If so, each matrix has a whole number of steps, because a copy
    # with tiles may not go past the end of a row.
    has_tiles: bool

    def transforms(self, elements: int) -> tuple[Any, ...]:
        """Returns the transforms of a stage [64, elements] in shared memory: two tiles [32, elements], or none.

        The bytes are in the same order with tiles and without, row after row. Tiles have whole rows of the stage,
        because shorter pieces are slow to read from experts in host memory: PCIe carries reads of 64 bytes at 0.75 of
        the rate of reads of 256 bytes.
        """
        return (plgpu.TilingTransform((HALF, elements)),) if self.has_tiles else ()


@primitive
def load_scales(scales_gmem, rows: Sequence[jax.Array], first: jax.Array, step_segments: int = 0) -> jax.Array:
    """Loads the FP8 scales of a tile of 64 rows for `multiply_add`.

    Args:
      scales_gmem: [R / block, blocks] uint8, a scale for each block of 128, or of 32, rows and columns.
      rows: one int32 row index of `scales_gmem` for the whole tile, or two if the tile's halves have different scales.
      first: int32 scalar, index of the first block of columns, an even number.
      step_segments: 0 for blocks of 128 columns: the scales of all columns are loaded. For blocks of 32 columns, the
        number of segments of a step; a segment has two blocks. Only the scales of one warpgroup's steps are loaded:
        the step that begins with block `first`, and every fourth step from there on.

    Returns:
      [128] int32, equal in all warps. A lane holds the scales of two blocks: two bytes of the first row, then two of
      the second row. With blocks of 128 columns, lane i holds blocks `first + 2 * i` and `first + 2 * i + 1`. With
      blocks of 32 columns, lane i holds the two blocks of the i-th segment of the warpgroup's steps. Bytes of blocks
      past the end are unspecified.
    """
    pairs = lax.iota(jnp.int32, mlir.THREADS) % mlir.WARP  # index of each lane's pair of blocks
    if step_segments:
        # Skips the steps of the other warpgroups.
        pairs += pairs // step_segments * ((MULTIPLIERS - 1) * step_segments)
    blocks = first + 2 * pairs
    count = scales_gmem.shape[1]
    words = jnp.zeros(mlir.THREADS, jnp.int32)
    for byte, (row, i) in enumerate(itertools.product(rows, range(2))):
        scale = jnp.where(blocks + i < count, scales_gmem[row][jnp.minimum(blocks + i, count - 1)], 0)
        words |= scale.astype(jnp.int32) << (8 * byte)
    return words


@mlir.emits(
    load_scales,
    layout=thread_ops.vector_layout,
    returns=lambda *_: jax.ShapeDtypeStruct((mlir.THREADS,), jnp.int32),
)
def _emit_load_scales(scales_gmem, rows, first, step_segments=0):
    blocks = scales_gmem.type.shape[1]
    lane = thread_ops.lane()
    if step_segments:
        lane = lane + (lane // step_segments) * ((MULTIPLIERS - 1) * step_segments)
    block = first + (lane << 1)
    word = Scalar(0)
    for byte, (row, i) in enumerate(itertools.product(rows, range(2))):
        index = row * blocks + (block + i).minimum(blocks - 1)
        pointer = mlir.at(mlir.global_pointer(scales_gmem), mlir.to_u64(index))
        code = "{ .reg .u16 s; ld.global.nc.u8 s, [$1]; cvt.u32.u16 $0, s; }"
        word = word | (thread_ops.ptx(code, pointer) << (8 * byte))
    return [word]


@primitive
def multiply_add(
    acc: jax.Array, codes_smem, scales, inputs_smem, stage: jax.Array, stage_format: StageFormat
) -> jax.Array:
    """Returns acc + weights @ inputs.T over the columns of a stage.

    Products of FP8 and FP4 weights are scaled by 2**-32.

    Args:
      acc: [64, N] float32 sums to add to, for N inputs.
      codes_smem: [64, elements] weights or codes of the stage; at most 256 bytes a row, and a multiple of
        `layout.min_segments` segments. With `stage_format.row_scales`, the last segment may be a half segment.
      scales: one of these:
        * FP8: the result of `load_scales`, the scales of all stages.
        * FP4: [64, 16] uint8 in shared memory, the scales of 512 columns, among them the stage's columns. If a row has
          only 8 scales: [32, 16], all scales of the 64 rows.
        * FP4 with `stage_format.row_scales`: [lines, ..] uint8 in shared memory, all scales of the 64 rows, row after
          row.
        * bfloat16: not used.
      inputs_smem: inputs that `skinny_prologue.load_inputs` stored.
      stage: int32 scalar, index of the stage among those of a row, counted from the first column of the inputs.
      stage_format: format of the stage.
    """
    layout = stage_format.layout
    gated = stage_format.gated
    row_scales = stage_format.row_scales
    values = quantized_weights.decode(codes_smem[...], layout)
    size = values.shape[1]
    if layout.bits == 4:
        table = scales[...].reshape(ROWS, -1)
        if row_scales:
            table = jnp.pad(table, ((0, 0), (0, size // 32)))
        first_scale = lax.rem(stage * (size // 32), table.shape[1])
        exponents = lax.dynamic_slice_in_dim(table, first_scale, size // 32, axis=1).astype(jnp.int32)
        values *= decode_scales(jnp.repeat(exponents, 32, axis=1))
    elif layout.bits == 8:
        block = (stage * size + lax.iota(jnp.int32, size)) // layout.block  # index of each column's block
        lane = block // 2
        if layout.has_small_blocks:
            lane = _lane_of_segment(lane, stage_format.step_segments)
        # The word of a lane holds the scales of two blocks in its lower half. If the two halves of the tile's rows have
        # different scales, the upper half of the word belongs to the second half of the rows.
        half = lax.iota(jnp.int32, ROWS) // HALF  # 0 or 1 for each row
        half_bits = 16 if gated or layout.has_small_blocks else 0
        shift = 8 * (block % 2)[None, :] + half_bits * half[:, None]
        values *= decode_scales((scales[lane][None, :] >> shift) & 255)
    x = inputs_smem[:, pl.ds(stage * (size // UNIT), size // UNIT)].astype(jnp.float32)
    x = x.transpose(0, 2, 1, 3).reshape(-1, size)
    products = jnp.dot(values, x.T, precision="highest")
    return acc + (quantized_weights.interleave_halves(products) if gated else products)


@multiply_add.mosaic
def _multiply_add_mosaic(acc, codes_smem, scales, inputs_smem, stage, stage_format):
    layout = stage_format.layout
    gated = stage_format.gated
    row_bytes = codes_smem.shape[1] * layout.dtype.itemsize
    segments = row_bytes // SEGMENT
    has_half = row_bytes % SEGMENT > 0
    tiles, units, _, _ = inputs_smem.shape
    segment_units = layout.segment // UNIT
    stage_units = layout.columns(row_bytes) // UNIT
    together = layout.min_segments

    def emit(acc, codes, scales, inputs, stage):
        thread = mlir.thread()
        inner = thread & 3  # index of the thread among the four that share a row
        line = (thread % 32) >> 2  # index of this group of four threads in the warp
        # `first_row` is the address of the bytes that this thread reads in row 0 of the stage.
        if layout.bits == 16:
            # Each of four threads reads 16 consecutive columns, as for FP8. Here these are 32 bytes. Two of the threads
            # read the last 16 bytes first, so that the four threads read from different banks.
            late = inner >> 1
            first_row = thread_ops.shared(codes) + late * SEGMENT + ((inner & 1) << 5)
            weights = functools.partial(_weights_bf16, late)
        else:
            first_row = thread_ops.shared(codes) + (inner << 4)
            factors = _factors_fp4 if layout.bits == 4 else _factors_fp8
            if stage_format.row_scales:
                factors = _factors_of_tile
            factors = factors(stage_format, scales, thread, stage, stage_units)
            weights = functools.partial(_weights_fp, layout, factors)
        # `rows` are the addresses of the bytes that this thread reads in its two rows. If gated, the two rows are row i
        # of the tile's first half and row i of its second half.
        if gated:
            row = first_row + (((thread >> 5) << 3) + line) * row_bytes
            rows = [row, row + HALF * row_bytes]
        else:
            row = first_row + (thread >> 6) * (HALF * row_bytes)
            row = row + ((((thread >> 5) & 1) << 4) + line) * row_bytes
            rows = [row, row + 8 * row_bytes]
        # A unit of 8 inputs takes 512 bytes, 16 for each thread of a warp.
        stage_inputs = thread_ops.shared(inputs) + ((thread % 32) << 4) + ((stage * stage_units) << 9)

        def add_segments(i, *sums):
            """Adds the products of `together` segments, from segment `i * together` on, to the sums.

            It is the body of a loop, because unrolled code is slower to fetch.
            """
            segment = i * together
            segment_inputs = stage_inputs + segment * (segment_units << 9)
            return add_units(sums, segment_inputs, weights(segment, [row + segment * SEGMENT for row in rows]))

        def add_units(sums, segment_inputs, weights_of_units):
            sums = list(sums)
            for unit, pairs in weights_of_units:
                operands = [
                    thread_ops.load_vector(segment_inputs + ((unit + tile * units) << 9)) for tile in range(tiles)
                ]
                for k in (0, 2):
                    a = pairs[0][k], pairs[1][k], pairs[0][k + 1], pairs[1][k + 1]
                    for tile, b in enumerate(operands):
                        tile_sums = slice(4 * tile, 4 * tile + 4)
                        sums[tile_sums] = bfloat16_words.multiply_add(sums[tile_sums], a, b[k : k + 2], pure=True)
            return sums

        sums = thread_ops.loop(segments // together, add_segments, *mlir.values(acc))
        if not has_half:
            return sums
        # In the half segment at the end of the stage, each thread reads 8 bytes, and two threads share a scale.
        places = [row + segments * SEGMENT - (inner << 3) for row in rows]
        half_inputs = stage_inputs + segments * (segment_units << 9)
        return add_units(sums, half_inputs, weights(segments, places, half=True))

    layouts = codes_smem, plgpu.RefType(stage_format.transforms(codes_smem.shape[1]))
    operand = (scales, thread_ops.vector_layout(scales.shape)) if layout.bits == 8 else scales
    kind = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, plgpu.Layout.WGMMA)
    return mlir.inline(emit, (acc, plgpu.Layout.WGMMA), layouts, operand, inputs_smem, stage, returns=kind)


def _weights_fp(layout, factors, segment, places, half=False):
    """Yields (index of a unit in the segment, weights of the thread's two rows in this unit) for each unit.

    A unit is 32 columns, of which a thread holds 8. The weights of a row are four words of two bfloat16.

    Args:
      layout: storage of the weights.
      factors: result of `_factors_fp4`, or of one of the other functions `_factors_*`.
      segment: index of the segment in the stage.
      places: addresses of the thread's codes of both rows.
      half: whether this is a half segment, which FP4 stages with `_factors_of_tile` may end with.
    """
    if half:
        scales = factors(segment, half=True)
        rows = [thread_ops.ptx_words(2, "ld.shared.v2.u32 {$0, $1}, [$2];", place) for place in places]
    else:
        scales = factors(segment)
        rows = [thread_ops.load_vector(place) for place in places]
    for unit in range(layout.segment // UNIT // (1 + half)):
        if layout.bits == 4:
            pairs = [e2m1_pairs(row[unit]) for row in rows]
        else:
            pairs = [e4m3_pairs(row[2 * unit]) + e4m3_pairs(row[2 * unit + 1]) for row in rows]
        yield unit, [[multiply(x, scale) for x in row] for row, scale in zip(pairs, scales, strict=True)]


def _weights_bf16(late, segment, places, half=False):
    """Yields units 0 and 1 of two segments of bfloat16 weights, like `_weights_fp`. If `late` is 1, unit 1 is first."""
    assert not half
    for unit in range(2):
        segment_unit = late ^ unit
        yield segment_unit, [fp8_pairs(thread_ops.load_vector(place + (segment_unit << 4))) for place in places]


def _factors_fp4(stage_format, scales, thread, stage, stage_units):
    """Returns a function that maps a segment's index in the stage to two factors, one for each row of the thread.

    A factor is a word of two equal bfloat16: the scale of the thread's columns times 2**(126 - 32). Its products with
    the results of `e2m1_pairs` are the unpacked weights. `stage_units` is the number of units of 32 columns of a stage.
    """
    gated = stage_format.gated
    line = (thread % 32) >> 2
    inner = thread & 3
    row = (thread >> 5) * (8 if gated else 16) + line
    size = scales.type.shape[0] * quantized_weights.SCALE_BYTES // ROWS  # number of scales of a row
    first_place = thread_ops.shared(scales) + row * size + inner + ((stage * stage_units) & (size - 1))
    code = "{ .reg .u16 s; ld.shared.u8 s, [$1]; cvt.u32.u16 $0, s; }"

    def factors(segment):
        places = (first_place + (segment << 2) + half * size * (HALF if gated else 8) for half in range(2))
        return [power_pair(thread_ops.ptx(code, place) + (126 - SHIFT)) for place in places]

    return factors


def _factors_of_tile(stage_format, scales, thread, stage, stage_units):
    """Returns a function like that of `_factors_fp4`, for FP4 with all scales of the 64 rows in shared memory.

    The function has a further argument, `half`: whether the segment is a half segment at the end of the stage.
    """
    assert not stage_format.gated
    row_scales = stage_format.row_scales
    line = (thread % 32) >> 2
    row = thread_ops.shared(scales) + stage * stage_units + ((thread >> 5) * 16 + line) * row_scales
    rows = row, row + 8 * row_scales
    code = "{ .reg .u16 s; ld.shared.u8 s, [$1]; cvt.u32.u16 $0, s; }"

    def factors(segment, half=False):
        # Columns past the end of a row have unspecified scales. Their products are 0 nevertheless, because the codes
        # are 0 and `power_pair` is finite.
        block = ((thread & 3) >> half) + (segment << 2)
        return [power_pair(thread_ops.ptx(code, row + block) + (126 - SHIFT)) for row in rows]

    return factors


def _factors_fp8(stage_format, scales, thread, stage, stage_units):
    """Returns a function like that of `_factors_fp4`, for FP8 and the results of `e4m3_pairs`.

    `scales` is from `load_scales`.
    """
    gated = stage_format.gated
    has_small_blocks = stage_format.layout.has_small_blocks
    # Bit offset in a lane's word of scales, see `load_scales`. Of the four threads that share a row, two read the first
    # small block of a segment, and two the second. Without a gate, both rows of a thread are in one half of the tile.
    own_offset = ((thread & 3) >> 1) << 3
    if not gated:
        own_offset = own_offset + ((thread >> 6) << 4)

    def factors(segment):
        segment = stage * (stage_units // 2) + segment
        lane = _lane_of_segment(segment, stage_format.step_segments) if has_small_blocks else segment >> 2
        word = thread_ops.ptx("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", mlir.scalar(scales), lane)
        # A scale of a large block belongs to two segments.
        scales_of_blocks = word >> (own_offset if has_small_blocks else ((segment >> 1) & 1) << 3)
        halves = [power_pair(((scales_of_blocks >> (16 * half)) & 255) + (120 - SHIFT)) for half in range(1 + gated)]
        return [halves[0], halves[-1]]

    return factors


def _lane_of_segment(segment, step_segments):
    """Returns the lane that holds the scales of a segment of one of the warpgroup's steps, see `load_scales`."""
    return (segment // (MULTIPLIERS * step_segments)) * step_segments + segment % step_segments
