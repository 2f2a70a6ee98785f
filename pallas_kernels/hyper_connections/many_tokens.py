"""First launch, many tokens: new streams, and sums of logits over a slice of channels, by the tensor cores.

A block of threads has 128 channels of all four streams. It keeps its columns of the weight in shared memory, as sums of
three bfloat16, so that products with the bfloat16 streams are as exact as float32. A warpgroup takes 64 tokens at a
time: it computes 64 new channels, stores them to global memory and as an operand of `wgmma`.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.hyper_connections.mixing import SQUARES, STREAMS, load_factors, mixed_streams, mixed_words
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops, vectors
from pallas_kernels.mgpu.bfloat16_words import PARTS
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.mgpu.thread_ops import U32, fma
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import primitive


CHANNELS = 128  # of a slice
CHUNK = 64  # of them at a time
CHUNKS = CHANNELS // CHUNK
TOKENS = 64  # of a tile
WARPGROUPS = 3
ROWS = 4  # of a tile, in a thread
AHEAD = 2  # of them under way


@primitive
def split_weight(target, fn, part: jax.Array, group: jax.Array) -> None:
    """Writes a slice of the weight to shared memory, by all warpgroups together; a barrier has to follow.

    Args:
      target: [2 * 4, 3 * N, 64] bfloat16 with TRANSFORMS: for each chunk and stream the high, middle and low parts of N
        rows, of which the first are fn's, the others 0.
      fn: [R, 4 * D] float32.
      part: number of the slice.
      group: of the warpgroup.
    """
    rows, width = fn.shape[0], fn.shape[1] // STREAMS
    padded = target.shape[1] // PARTS

    @pl.when(group == 0)
    def _():
        for chunk in range(CHUNKS):
            for j in range(STREAMS):
                rest = fn[:, pl.ds(j * width + part * CHANNELS + chunk * CHUNK, CHUNK)]
                for i in range(PARTS):
                    piece = round_bfloat16(rest)
                    rest = rest - piece
                    piece = jnp.pad(piece, ((0, padded - rows), (0, 0))).astype(jnp.bfloat16)
                    target[chunk * STREAMS + j, pl.ds(i * padded, padded)] = piece


@split_weight.mosaic
def _(target, fn, part, group):
    rows, width = fn.shape[0], fn.shape[1] // STREAMS
    padded = target.shape[1] // PARTS
    eights = CHANNELS // 8  # of a row and stream
    units = padded * STREAMS * eights

    def emit(target, fn, part, group):
        thread = U32(mlir.thread()) + U32(mlir.scalar(group)) * THREADS
        base = thread_ops.shared(target)
        column = U32(mlir.scalar(part)) * CHANNELS

        def visit(unit):
            row, j, eight = unit // (STREAMS * eights), (unit // eights) % STREAMS, unit % eights
            # Rows that fn does not have are 0.
            own = row.minimum(rows - 1)
            start = _element(fn, own * (STREAMS * width) + j * width + column + eight * 8, 4)
            values = [(row < rows).where(x, 0) for i in range(2) for x in words.load_four(mlir.at(start, 16 * i))]
            chunk, inner = eight // (CHUNK // 8), eight % (CHUNK // 8)
            halves = [words.split(values[n : n + 4]) for n in (0, 4)]
            for i, (low, high) in enumerate(zip(*halves, strict=True)):
                line = (chunk * STREAMS + j) * (PARTS * padded) + row + i * padded
                words.store_shared(_swizzled(base, line, inner), [*low, *high])

        share = WARPGROUPS * THREADS
        for first in range(0, units, share):
            with thread_ops.when(thread + first < units):
                visit(thread + first)
        mlir.ptx("fence.proxy.async.shared::cta;")

    mlir.inline(emit, (target, plgpu.RefType(TRANSFORMS)), fn, part, group)


@primitive
def load_rows(start: jax.Array, column: jax.Array, streams, y=None) -> jax.Array:
    """Starts to load the first of a thread's rows of a chunk, for `mix_chunk`; nothing when interpreted.

    Args:
      start: the chunk's first token.
      column: its first channel.
      streams, y: as in `few_tokens.add_slice`.

    Returns:
      int32 [512 * 2 * (arrays of T rows)].
    """
    return jnp.zeros((_size_ahead(y),), jnp.int32)


@load_rows.mosaic
def _(start, column, streams, y=None):
    def emit(start, column, streams, y=None):
        start, column = U32(mlir.scalar(start)), U32(mlir.scalar(column))
        rows = [_load(start + _row_of(U32(i)), column, streams, y) for i in range(AHEAD)]
        return [word.value for row in rows for word in row]

    operands = start, column, streams, *([] if y is None else [y])
    return mlir.inline(emit, *operands, layout=_fours, returns=jax.ShapeDtypeStruct((_size_ahead(y),), jnp.int32))


@primitive
def mix_chunk(
    operand, ahead: jax.Array, here: tuple, following: tuple, streams, new, y=None, mixing=None
) -> tuple[jax.Array, jax.Array]:
    """New streams of 64 tokens and 64 channels, to global memory and to `operand`; what `wgmma` reads next.

    Args:
      operand: [4, 64, 64] bfloat16 with TRANSFORMS in shared memory, of this warpgroup.
      ahead: of `load_rows`, for this chunk.
      here, following: (first token, first channel) of this chunk, and of the one whose rows are loaded ahead.
      streams, new, y, mixing: as in `few_tokens.add_slice`.

    Returns:
      [128] float32 for `store_sums`, sums of squares over these channels; `ahead` of the following chunk.
    """
    tokens, columns = pl.ds(here[0], TOKENS), pl.ds(here[1], CHUNK)
    values = streams[tokens, :, columns].astype(jnp.float32)
    if y is not None and mixing is not None:
        values = mixed_streams(values, y[tokens, columns], mixing[tokens, :])
        new[tokens, :, columns] = values.astype(jnp.bfloat16)
    for j in range(STREAMS):
        operand[j] = values[:, j].astype(jnp.bfloat16)
    squares = jnp.sum(values * values, axis=(1, 2)).reshape(4, 4, 4).transpose(0, 2, 1)  # warp, lane // 8, lane % 8
    return jnp.pad(squares, ((0, 0), (0, 0), (0, 4))).reshape(-1), ahead


@mix_chunk.mosaic
def _(operand, ahead, here, following, streams, new, y=None, mixing=None):
    width = streams.shape[2]

    def emit(operand, ahead, start, column, next_start, next_column, streams, new=None, y=None, mixing=None):
        eight = U32(mlir.thread()) & 7
        base = thread_ops.shared(operand)
        start, column, next_start, next_column = (U32(mlir.scalar(x)) for x in (start, column, next_start, next_column))
        # `wgmma` has read what was here.
        mgpu.utils.warpgroup_barrier()

        def row(i, squares, *loaded):
            token, factors = start + _row_of(i), None
            if y is not None:
                factors = load_factors(_element(mixing, token * (STREAMS * (2 + STREAMS)), 4))
            inside = i < ROWS - AHEAD
            token_ahead = inside.where(start, next_start) + _row_of((i + AHEAD) & (ROWS - 1))
            last = _load(token_ahead, inside.where(column, next_column), streams, y)
            loaded, later = loaded[: len(last)], loaded[len(last) :]
            out = [list(loaded[4 * j : 4 * j + 4]) for j in range(len(loaded) // 4)]
            if factors is not None:
                out = list(zip(*(mixed_words(four, factors) for four in zip(*out, strict=True)), strict=True))
                place = _element(new, token * (STREAMS * width) + column + eight * 8, 2)
                for k in range(STREAMS):
                    words.store_four(mlir.at(place, 2 * width * k), out[k])
            sums = [mlir.f32(0.0), mlir.f32(0.0)]
            for k in range(STREAMS):
                words.store_shared(_swizzled(base, _row_of(i) + k * TOKENS, eight), out[k])
                for word in out[k]:
                    sums = [fma(x, x, total) for x, total in zip(words.unpack(word), sums, strict=True)]
            total = arith.addf(*sums)
            for distance in (4, 2, 1):
                total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
            return [eight.equals(i).where(thread_ops.bits(total), squares), *later, *last]

        squares, *rows = thread_ops.loop(ROWS, row, U32(0), *map(U32, mlir.values(ahead)))
        mlir.ptx("fence.proxy.async.shared::cta;")
        mgpu.utils.warpgroup_barrier()
        return [thread_ops.as_float(squares)], [word.value for word in rows]

    added = [] if y is None else [new, y, mixing]
    operands = (operand, plgpu.RefType(TRANSFORMS)), (ahead, _fours(ahead.shape)), *here, *following, streams, *added
    results = plgpu.ShapeDtypeStruct((THREADS,), jnp.float32, vectors.layout(THREADS))
    return mlir.inline(
        emit, *operands, returns=(results, plgpu.ShapeDtypeStruct(ahead.shape, jnp.int32, _fours(ahead.shape)))
    )


@primitive
def again(x: jax.Array) -> jax.Array:
    """The int32 scalar x. What is computed from it within a loop is not kept in registers across the loop."""
    return x


@again.mosaic
def _(x):
    def emit(x):
        return thread_ops.ptx("mov.b32 $0, $1;", U32(mlir.scalar(x))).value

    return mlir.inline(emit, x, returns=x)


def _size_ahead(y):
    return AHEAD * 4 * THREADS * (STREAMS if y is None else STREAMS + 1)


def _fours(shape):
    return plgpu.Layout.WG_STRIDED(shape, vec_size=4)


def _row_of(i):
    """A thread's i-th row; a warp has the 16 that its part of `wgmma` reads."""
    thread = U32(mlir.thread())
    return ((thread >> 5) << 4) + (i << 2) + ((thread & 31) >> 3)


def _load(token, column, streams, y):
    """16 bytes of each stream, and of what is added, as words."""
    width = ir.MemRefType(streams.type).shape[2]
    own = column + ((U32(mlir.thread()) & 7) << 3)
    first = _element(streams, token * (STREAMS * width) + own, 2)
    fours = [words.load_four(mlir.at(first, 2 * width * j)) for j in range(STREAMS)]
    if y is not None:
        fours.append(words.load_four(_element(y, token * width + own, 2)))
    return [word for four in fours for word in four]


def _element(ref, index, size):
    offset = arith.muli(mlir.to_i64(index.value), mlir.i64(size))
    return mlir.at(mlir.global_pointer(ref), offset)


@primitive
def multiply_add(acc: jax.Array, operand, weights, chunk: jax.Array) -> jax.Array:
    """acc [64, 3 * N] + products of the streams of `operand` with those of a chunk of `weights`."""
    for j in range(STREAMS):
        pair = operand[j], weights[chunk * STREAMS + j]
        a, b = (x.astype(jnp.float32) for x in pair)
        acc = acc + jnp.dot(a, b.T, precision="highest")
    return acc


@multiply_add.mosaic
def _(acc, operand, weights, chunk):
    def add(ref):
        for j in range(STREAMS):
            plgpu.wgmma(ref, operand.at[j], weights.at[chunk * STREAMS + j].transpose((1, 0)))

    run: Any = pl.run_state(add)
    return run(plgpu.ACC.init(acc))


@primitive
def store_sums(partials, start: jax.Array, acc: jax.Array, squares: jax.Array) -> None:
    """Writes a tile's sums to `partials` [T, 32] float32: logits first, at 31 the squares.

    `acc`: [64, 3 * N], products with the parts of the weight; `squares`: of `mix_chunk`.
    """
    tokens, rows = pl.ds(start, TOKENS), acc.shape[1] // PARTS
    partials[tokens, pl.ds(0, rows)] = jnp.sum(acc.reshape(TOKENS, PARTS, rows)[:, ::-1], axis=1)
    found = squares.reshape(4, 4, 8)[:, :, :4].transpose(0, 2, 1).reshape(TOKENS, 1)
    partials[tokens, pl.ds(SQUARES, 1)] = found


@store_sums.mosaic
def _(partials, start, acc, squares):
    def emit(partials, start, acc, squares):
        thread = U32(mlir.thread())
        warp, lane = thread >> 5, thread & 31
        first = U32(mlir.scalar(start)) + (warp << 4)
        base = mlir.global_pointer(partials)

        def place(row, column):
            return mlir.at(base, mlir.to_i64(((row << 5) + column).value), mlir.f32_type())

        # 8 columns are 2 pairs of a thread, in rows lane // 4 and 8 more; parts are whole such groups.
        registers = list(acc.registers.flat)
        share = len(registers) // PARTS
        for i in range(share):
            total = arith.addf(arith.addf(registers[i + 2 * share], registers[i + share]), registers[i])
            row = first + (lane >> 2) + 8 * (i % 2)
            llvm.store(total, place(row, U32(8 * (i // 2)) + ((lane & 3) << 1)), alignment=8)
        with thread_ops.when((lane & 7) < ROWS):
            row = first + ((lane & 7) << 2) + (lane >> 3)
            llvm.store(mlir.scalar(squares), place(row, U32(SQUARES)), alignment=4)

    mlir.inline(emit, partials, start, (acc, plgpu.Layout.WGMMA), (squares, vectors.layout(THREADS)))


def _swizzled(base, line, eight):
    """The address of 16 bytes of a line of 128, in tiles of the 128-byte swizzle."""
    return base + (line << 7) + ((eight ^ (line & 7)) << 4)
