"""Weights as stored on their way from shared memory into products: FP8, FP4 with a scale for 32, and bfloat16.

A warp multiplies 16 rows by `mma`, of which a thread has two. Four threads share a row: each takes 16 bytes of 64, so
that it holds whole scale blocks of FP4. `mma` wants other columns in that thread, but a sum does not depend on the
order of its terms: `skinny_prologue` reorders the inputs instead.

Inputs in FP8's order serve bfloat16 as well: these weights are read in the order in which FP8's are unpacked.

Weights unpacked from FP8 and FP4 are 2**-32 of their values, as bfloat16: exact for E8M0 scales from 2**-85 to 2**33.
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
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.mgpu.unpack import e2m1_pairs, e2m1_value, e4m3_pairs, fp8_pairs, multiply
from pallas_kernels.runtime.launch import primitive


ROWS = 64  # of a tile
HALF = ROWS // 2  # rows that are consecutive where the halves of a tile lie apart
SEGMENT = 64  # bytes of a row that four threads share
UNIT = 32  # columns of two `mma`, for which a thread reads 16 bytes of inputs
COLUMNS = 8  # of a product of `mma`
MULTIPLIERS = 4  # warpgroups that multiply
SHIFT = 32
SCALED = 128  # columns, and rows, of FP8 with the same scale
SCALE_BYTES = 16  # of FP4's scales that travel together, the fewest of a bulk copy: a row's, or those of two short rows


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """How a matrix [out, in] is stored.

    Attributes:
      bits: of a weight: 8 of FP8, 4 of FP4, whose even columns are the low nibbles, 16 of bfloat16.
    """

    bits: int

    @property
    def segment(self) -> int:
        """Columns of a segment."""
        return self.columns(SEGMENT)

    @property
    def units(self) -> int:
        """Of a segment."""
        return self.segment // UNIT

    @property
    def least_segments(self) -> int:
        """That are multiplied together: what four threads hold in FP8's order has 64 columns."""
        return 2 if self.bits == 16 else 1

    @property
    def dtype(self) -> jnp.dtype:
        """Of the array that holds the weights, or their codes."""
        return jnp.dtype(jnp.bfloat16 if self.bits == 16 else jnp.uint8)

    def columns(self, size: int) -> int:
        """That so many bytes hold."""
        return 8 * size // self.bits

    def elements(self, columns):
        """Of the array that so many columns are; also of an array's number."""
        return columns // 2 if self.bits == 4 else columns

    def transforms(self) -> tuple[Any, ...]:
        """Of such an array in shared memory."""
        return (plgpu.TilingTransform((HALF, self.elements(self.segment))),)


FP8, FP4, BF16 = WeightLayout(8), WeightLayout(4), WeightLayout(16)


# --- scales ---


@primitive
def load_scales(scales, rows: Sequence[jax.Array], first: jax.Array) -> jax.Array:
    """FP8's scales of a tile for `multiply_add`: [128] int32.

    Args:
      scales: [R / 128, blocks] uint8 in global memory.
      rows: of it: one of the tile, or one of each of its halves.
      first: the first scale that is needed, an even number; up to 64 of a row are.
    """
    blocks = first + 2 * (lax.iota(jnp.int32, mlir.THREADS) % mlir.WARP)
    found = jnp.zeros(mlir.THREADS, jnp.int32)
    for place, (row, i) in enumerate(itertools.product(rows, range(2))):
        scale = jnp.where(blocks + i < scales.shape[1], scales[row][jnp.minimum(blocks + i, scales.shape[1] - 1)], 0)
        found |= scale.astype(jnp.int32) << 8 * place
    return found


@load_scales.mosaic
def _(scales, rows, first):
    def emit(scales, first, *rows):
        blocks = ir.MemRefType(scales.type).shape[1]
        block = first + (thread_ops.lane() << 1)
        found = U32(0)
        for place, (row, i) in enumerate(itertools.product(rows, range(2))):
            at = row * blocks + (block + i).minimum(blocks - 1)
            pointer = mlir.at(mlir.global_pointer(scales), arith.extui(mlir.int_type(64), at.value))
            code = "{ .reg .u16 s; ld.global.nc.u8 s, [$1]; cvt.u32.u16 $0, s; }"
            found = found | U32(mlir.ptx(code, pointer, results=mlir.int_type())) << 8 * place
        return found

    return thread_ops.inline(emit, scales, first, *rows, returns=jax.ShapeDtypeStruct((mlir.THREADS,), jnp.int32))


# --- products ---


@primitive
def multiply_add(
    acc: jax.Array, codes, scales, inputs, step: jax.Array, layout: WeightLayout, gated: bool
) -> jax.Array:
    """acc + weights @ inputs over the columns of a step: [64, N] float32, 2**-32 of the products of FP8 and FP4.

    Args:
      acc: in layout WGMMA.
      codes: [64, n] of the layout's dtype in shared memory, with its transforms, up to 256 bytes a row, which are a
        multiple of the least segments.
      scales: of FP4 [64, 16] uint8 in shared memory, those of up to 256 bytes among which the step's are, or [32, 16]
        where a row has 8; of FP8 what `load_scales` found for all steps; of bfloat16 anything.
      inputs: what `skinny_prologue.load_inputs` left.
      step: which one, counted from the first column of the inputs.
      layout: of the weights.
      gated: rows i and 32 + i of the weights meet in a thread: they are rows 16 * (i // 8) + i % 8, and 8 more, of the
        sums.
    """
    values = codes[...]
    size = layout.columns(values.dtype.itemsize * values.shape[1])
    factors = jnp.float32(1.0)
    if layout.bits == 16:
        values = values.astype(jnp.float32)
    elif layout.bits == 4:
        values = values.astype(jnp.int32)
        values = e2m1_value(jnp.stack([values & 15, values >> 4], axis=-1)).reshape(ROWS, -1)
        table = scales[...].reshape(ROWS, -1)
        first = lax.rem(step * (size // 32), jnp.int32(table.shape[1]))
        exponents = lax.dynamic_slice_in_dim(table, first, size // 32, axis=1).astype(jnp.int32)
        factors = _power(jnp.repeat(exponents, 32, axis=1))
    else:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
        block = (step * size + lax.iota(jnp.int32, size)) // SCALED
        place = 8 * (block % 2)[None, :] + (lax.iota(jnp.int32, ROWS) // HALF * (16 * gated))[:, None]
        factors = _power(scales[block // 2][None, :] >> place & 255)
    x = inputs[:, pl.ds(step * (size // UNIT), size // UNIT)].astype(jnp.float32)
    x = x.transpose(0, 2, 1, 3).reshape(-1, size)
    products = jnp.dot(values * factors, x.T, precision="highest")
    if gated:
        products = products.reshape(2, 4, 8, -1).transpose(1, 0, 2, 3).reshape(ROWS, -1)
    return acc + products


@multiply_add.mosaic
def _(acc, codes, scales, inputs, step, layout, gated):
    segments = codes.shape[1] // layout.elements(layout.segment)
    tiles, units, _, _ = inputs.shape
    together = layout.least_segments

    def emit(acc, codes, scales, inputs, step):
        thread, step = U32(mlir.thread()), U32(mlir.scalar(step))
        inner, line = thread & 3, thread % 32 >> 2
        # A tile's halves of 32 rows, of each segment after segment: a thread's two rows.
        if layout.bits == 16:
            # FP8's order: 32 bytes for each of four threads. Two of these begin with the second 16 bytes, so that the
            # four read from different banks.
            late = inner >> 1
            start = thread_ops.shared(codes) + late * (HALF * SEGMENT) + ((inner & 1) << 5)
            weights = functools.partial(_weights_bf16, late)
        else:
            start = thread_ops.shared(codes) + (inner << 4)
            factors = _factors_fp4 if layout.bits == 4 else _factors_fp8
            weights = functools.partial(_weights_fp, layout, factors(scales, thread, step, segments, gated))
        if gated:
            begin = start + ((thread >> 5 << 3) + line) * SEGMENT
            rows = [begin, begin + segments * HALF * SEGMENT]
        else:
            begin = start + (thread >> 6) * (segments * HALF * SEGMENT)
            begin = begin + (((thread >> 5 & 1) << 4) + line) * SEGMENT
            rows = [begin, begin + 8 * SEGMENT]
        fragments = thread_ops.shared(inputs) + (thread % 32 << 4) + (step * (segments * layout.units) << 9)

        def add_segments(i, *sums):
            """In a loop: less code is fetched sooner."""
            sums, segment = [x.value for x in sums], i * together
            own = fragments + segment * (layout.units << 9)
            for unit, pairs in weights(segment, [row + segment * (HALF * SEGMENT) for row in rows]):
                operands = [thread_ops.load_vector(own + (unit + tile * units << 9)) for tile in range(tiles)]
                for i in (0, 2):
                    a = pairs[0][i], pairs[1][i], pairs[0][i + 1], pairs[1][i + 1]
                    for tile, b in enumerate(operands):
                        sums[4 * tile : 4 * tile + 4] = _mma(sums[4 * tile : 4 * tile + 4], a, b[i : i + 2])
            return [U32(x) for x in sums]

        return [x.value for x in thread_ops.loop(segments // together, add_segments, *map(U32, mlir.values(acc)))]

    layouts = codes, plgpu.RefType(layout.transforms())
    operand = (scales, thread_ops.vector_layout(scales.shape)) if layout.bits == 8 else scales
    kind = plgpu.ShapeDtypeStruct(acc.shape, acc.dtype, plgpu.Layout.WGMMA)
    return mlir.inline(emit, (acc, plgpu.Layout.WGMMA), layouts, operand, inputs, step, returns=kind)


def _power(exponents):
    """What an interpreted product is multiplied with."""
    return lax.bitcast_convert_type((exponents - SHIFT) << 23, jnp.float32)


def _weights_fp(layout, factors, segment, places):
    """(unit of the segment, pairs of bfloat16 of both rows), for each unit."""
    scale = factors(segment)
    words = [thread_ops.load_vector(place) for place in places]
    for unit in range(layout.units):
        if layout.bits == 4:
            pairs = [e2m1_pairs(words[half][unit]) for half in range(2)]
        else:
            pairs = [[x for i in range(2) for x in e4m3_pairs(words[half][2 * unit + i])] for half in range(2)]
        yield U32(unit), [[multiply(pair, scale[half]) for pair in pairs[half]] for half in range(2)]


def _weights_bf16(late, segment, places):
    """As `_weights_fp`, of two segments; a thread whose `late` is 1 begins with the second unit."""
    for unit in range(2):
        own = late ^ unit
        yield own, [fp8_pairs(thread_ops.load_vector(place + (own << 4))) for place in places]


def _factors_fp4(scales, thread, step, segments, gated):
    line, inner = thread % 32 >> 2, thread & 3
    row, size = (thread >> 5) * (8 if gated else 16) + line, ir.MemRefType(scales.type).shape[0] * SCALE_BYTES // ROWS
    place = thread_ops.shared(scales) + row * size + inner + (step * (4 * segments) & size - 1)
    code = "{ .reg .u16 s; ld.shared.u8 s, [$1]; cvt.u32.u16 $0, s; }"

    def factors(segment):
        found = []
        for half in range(2):
            below = half * size * (HALF if gated else 8)
            found.append(_factor(thread_ops.ptx(code, place + (segment << 2) + below) + (126 - SHIFT)))
        return found

    return factors


def _factors_fp8(scales, thread, step, segments, gated):
    word = U32(mlir.scalar(scales))

    def factors(segment):
        # A scale for two segments.
        block = (step * segments + segment) >> 1
        found = thread_ops.ptx("shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", word, block >> 1)
        found = found >> ((block & 1) << 3)
        halves = [_factor((found >> 16 * half & 255) + (120 - SHIFT)) for half in range(1 + gated)]
        return [halves[0], halves[-1]]

    return factors


def _factor(exponent):
    """A pair of bfloat16 powers of two; the exponent is at most 254."""
    return U32(arith.minsi(exponent.value, mlir.i32(254))) * 0x00800080


def _mma(sums, a, b):
    code = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9},
        {$10, $11, $12, $13};"""
    operands = *(x.value for x in (*a, *b)), *sums
    return mlir.ptx(code, *operands, results=[mlir.f32_type()] * 4, pure=True, convergent=True)
