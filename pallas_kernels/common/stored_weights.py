"""Weights as stored on their way from shared memory into products: FP8, FP4 with a scale for 32, and bfloat16.

A warp multiplies 16 rows by `mma`, of which a thread has two. Four threads share a row: each takes 16 bytes of 64, so
that it holds whole scale blocks of FP4. `mma` wants other columns in that thread, but a sum does not depend on the
order of its terms: `load_inputs` reorders the inputs instead.

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

from pallas_kernels.common import mlir_helpers as mlir, thread_ops
from pallas_kernels.common.primitive import primitive
from pallas_kernels.common.thread_ops import U32
from pallas_kernels.common.unpack import e2m1_pairs, e2m1_value, e4m3_pairs, multiply


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


# --- inputs ---


@primitive
def store_factors(factors, source, eps: float, group: jax.Array) -> None:
    """factors[n] = 1 / sqrt(mean(source[n]**2) + eps), by four warpgroups together; a barrier has to follow.

    Args:
      factors: [N] float32 in shared memory, N at least T.
      source: [T, K] bfloat16 in global memory, K a multiple of 256.
      eps: added to the mean square.
      group: number of the warpgroup, 0 .. 3, a scalar.
    """
    for n in range(source.shape[0]):

        @pl.when(n % MULTIPLIERS == group)
        def _(n=n):
            row = source[n].astype(jnp.float32)
            factors[n] = lax.rsqrt(jnp.mean(row * row) + eps)


@store_factors.mosaic
def _(factors, source, eps, group):
    tokens, columns = source.shape
    warps = MULTIPLIERS * mlir.THREADS // mlir.WARP

    def emit(factors, source, group):
        warp = (U32(mlir.thread()) >> 5) + U32(mlir.scalar(group)) * (warps // MULTIPLIERS)
        lane = thread_ops.lane()

        def add_row(i):
            row = warp + i * warps
            with thread_ops.when(row < tokens):
                total = mlir.f32(0.0)
                for start in range(0, columns, 8 * mlir.WARP):
                    at = row * (columns // 8) + (lane + start // 8)
                    at = arith.shli(arith.extui(mlir.int_type(64), at.value), mlir.i64(4))
                    words = mlir.ptx(_FETCH, mlir.at(mlir.global_pointer(source), at), results=[mlir.int_type()] * 4)
                    for value in _floats(words):
                        total = thread_ops.fma(value, value, total)
                for distance in (16, 8, 4, 2, 1):
                    code = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
                    other = thread_ops.ptx(code, thread_ops.bits(total))
                    total = arith.addf(total, thread_ops.as_float(other))
                mean = thread_ops.fma(total, mlir.f32(1 / columns), mlir.f32(eps))
                code = "{ .reg .f32 s; sqrt.rn.f32 s, $1; rcp.rn.f32 $0, s; }"
                factor = mlir.ptx(code, mean, results=mlir.f32_type())
                with thread_ops.when(lane.equals(0)):
                    thread_ops.store(thread_ops.shared(factors) + (row << 2), thread_ops.bits(factor))

        thread_ops.loop(-(-tokens // warps), add_row)

    mlir.inline(emit, factors, source, group)


_FETCH = "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];"


def _floats(words):
    """The values of pairs of bfloat16."""
    for word in map(U32, words):
        for half in (word << 16, word & 0xFFFF0000):
            yield thread_ops.as_float(half)


@primitive
def load_inputs(
    inputs, source, rows, divisor: int, column, columns: int, group: jax.Array, layout: WeightLayout, norm: tuple = ()
) -> None:
    """Copies rows of inputs to shared memory, by four warpgroups together, in the order in which weights are unpacked.

    A barrier has to follow.

    Args:
      inputs: [N / 8, units, 8, 32] bfloat16; a unit's values are in another order there on a GPU.
      source: [.., width] bfloat16 in global memory, which this kernel may have written.
      rows: [N] int32 in shared memory: row n of the inputs is row `rows[n] // divisor`; where negative, that of the
        first. Or a number: that of rows, the first ones.
      column: the first one, a multiple of 64.
      columns: how many, a multiple of 128.
      group: number of the warpgroup, 0 .. 3, a scalar.
      layout: of the weights.
      norm: () or (weight [width] float32 in global memory, factors [N] float32 in shared memory), by which a row is
        multiplied, factor first, before it is rounded.
    """
    units = columns // UNIT
    share = units // MULTIPLIERS
    for n in range(rows if isinstance(rows, int) else inputs.shape[0] * COLUMNS):
        row = jnp.int32(n) if isinstance(rows, int) else jnp.where(rows[n] < 0, rows[0], rows[n])
        values = source[lax.div(row, divisor), pl.ds(column, units * UNIT)]
        if norm:
            weight, factors = norm
            values = weight[pl.ds(column, units * UNIT)] * (values.astype(jnp.float32) * factors[n])
        values = values.astype(jnp.bfloat16).reshape(units, UNIT)
        for i in range(share):
            unit = group * share + i
            inputs[n // COLUMNS, unit, n % COLUMNS] = values[unit]


@load_inputs.mosaic
def _(inputs, source, rows, divisor, column, columns, group, layout, norm=()):
    tiles, units, _, _ = inputs.shape
    eights, threads = columns // 8, MULTIPLIERS * mlir.THREADS
    # Rows at once, in different threads, and in one thread: a norm takes registers.
    lines = max(1, threads // eights)
    count = rows if isinstance(rows, int) else tiles * COLUMNS
    together = min(-(-count // lines), COLUMNS // 4 if norm else COLUMNS)

    def emit(inputs, source, column, group, *more):
        table, norm_refs = more[: len(tables)], more[len(tables) :]
        thread = U32(mlir.thread()) + U32(mlir.scalar(group)) * mlir.THREADS
        there, width = thread_ops.shared(inputs), ir.MemRefType(source.type).shape[1]
        base = mlir.at(mlir.global_pointer(source), mlir.to_i64(mlir.scalar(column)), ir.BF16Type.get())

        def normed(words, n, eight):
            start = mlir.at(mlir.global_pointer(norm_refs[0]), mlir.to_i64(mlir.scalar(column)), mlir.f32_type())
            start = mlir.at(start, arith.extui(mlir.int_type(64), (eight << 5).value))
            found = (mlir.ptx(_FETCH, mlir.at(start, 16 * i), results=[mlir.int_type()] * 4) for i in range(2))
            weights = [thread_ops.as_float(U32(word)) for four in found for word in four]
            factor = thread_ops.as_float(thread_ops.load(thread_ops.shared(norm_refs[1]) + (n << 2)))
            values = [arith.mulf(w, arith.mulf(x, factor)) for w, x in zip(weights, _floats(words), strict=True)]
            code = "cvt.rn.bf16x2.f32 $0, $1, $2;"
            pairs = zip(values[1::2], values[::2], strict=True)
            return [mlir.ptx(code, *pair, results=mlir.int_type(), pure=True) for pair in pairs]

        def copy(n, row, eight):
            """8 columns, which one thread of a product has; returns how to go on once they are there."""
            offset = arith.muli(mlir.to_i64((row // divisor).value), mlir.i64(2 * width))
            offset = arith.addi(offset, arith.extui(mlir.int_type(64), (eight << 4).value))
            words = mlir.ptx(_FETCH, mlir.at(base, offset), results=[mlir.int_type()] * 4)
            words = normed(words, n, eight) if norm_refs else words
            unit, inner, words = _placed(eight, [U32(x) for x in words], layout)
            place = ((n >> 3) * units + unit << 9) + ((n & 7) << 6) + (inner << 4)
            return lambda: thread_ops.store_vector(there + place, words)

        def row_of(n):
            if not table:
                return n
            row, first = (thread_ops.load(thread_ops.shared(table[0]) + (i << 2)) for i in (n, U32(0)))
            return U32(arith.cmpi(arith.CmpIPredicate.slt, row.value, mlir.i32(0))).where(first, row)

        def copy_columns(eight, line):
            """A thread's columns of every `lines`th row, the last row maybe twice."""

            def copy_some(i):
                numbers = [(line + (i * together + j) * lines).minimum(count - 1) for j in range(together)]
                for put in [copy(n, row_of(n), eight) for n in numbers]:
                    put()

            thread_ops.loop(-(-count // (lines * together)), copy_some)

        for first in range(0, eights, threads):
            if lines > 1:
                with thread_ops.when(thread < lines * eights):
                    copy_columns(thread % eights, thread // eights)
            else:
                with thread_ops.when(thread + first < eights):
                    copy_columns(thread + first, U32(0))

    tables = [] if isinstance(rows, int) else [rows]
    mlir.inline(emit, inputs, source, jnp.int32(column), group, *tables, *norm)


def _placed(eight, words, layout):
    """(unit, thread of four, values) of the columns `8 * eight ..`, in the order of this thread's weights."""
    if layout.bits == 4:
        # A word of eight codes: pairs of codes i and i + 4.
        pairs = [_halves(words[i // 2], words[2 + i // 2], i % 2) for i in range(4)]
        return ((eight >> 4) << 2) + (eight & 3), (eight >> 2) & 3, pairs
    return ((eight >> 3) << 1) + (eight & 1), (eight >> 1) & 3, _fp8_pairs(words)


def _fp8_pairs(words):
    """8 columns as FP8 is unpacked: two words of four codes, pairs of codes i and i + 2."""
    return [_halves(words[i // 2 * 2], words[i // 2 * 2 + 1], i % 2) for i in range(4)]


def _halves(x, y, high):
    """The low or the high halves of two words, x's first."""
    return thread_ops.ptx(f"prmt.b32 $0, $1, $2, {'0x7632' if high else '0x5410'};", x, y)


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
      inputs: what `load_inputs` left.
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
        yield own, [_fp8_pairs(thread_ops.load_vector(place + (own << 4))) for place in places]


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
