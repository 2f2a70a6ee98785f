"""The first launch of `hyper_connections` for more than 256 tokens: new streams, and partial sums of the logits.

The grid has two axes: slices of 128 channels, and groups of tiles of 64 tokens. A block has three warpgroups, which
take the tiles of its group in turns:

  1. All three split the slice's columns of `fn` [R, 4 * D], the weights of the logits, into sums of three bfloat16 in
     shared memory. So products with bfloat16 streams are as exact as float32 products. The warpgroups synchronize at
     `weights_ready`.
  2. For each tile and each chunk of 64 channels, a warpgroup computes the new streams and writes them to global and to
     shared memory (`mix_chunk`). Meanwhile, it loads the first rows of the next chunk. Then it multiplies the new
     streams with the chunk's weights by `wgmma` (`multiply_add`).
  3. At the end of a tile, the warpgroup stores the partial sums (`store_sums`).
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.hyper_connections import mixing
from pallas_kernels.hyper_connections.collapse import WARPS
from pallas_kernels.hyper_connections.mixing import MIXING, SQUARES, STREAMS, SUMS, StreamRefs, mixed_streams
from pallas_kernels.mgpu import barriers, bfloat16_words as words, mlir, thread_ops, vectors, wgmma
from pallas_kernels.mgpu.bfloat16_words import PARTS
from pallas_kernels.mgpu.mlir import THREADS, Scalar
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import axis_indices, kernel, primitive
from pallas_kernels.runtime.layer_operands import weights_of_layer


CHANNELS = 128  # number of channels of a slice
CHUNK = 64  # number of channels that are multiplied at a time
CHUNKS = CHANNELS // CHUNK
TOKENS = 64  # number of tokens of a tile
WARPGROUPS = 3
ROWS = 4  # number of a tile's rows (tokens) that a thread mixes, 8 channels of each
AHEAD = 2  # number of rows that a thread loads ahead


def launch(streams, fn, layer, added, new_type, interpret):
    """Launches the kernel, which computes new streams and partial sums of the logits.

    Args:
      streams: [T, 4, D] bfloat16.
      fn: [R, 4 * D] float32 weights of the logits, or with `layer` a stack of them.
      layer: [1] int32 index of the layer within fn, or None.
      added: (y, mixing, None) of `hyper_connections`.
      new_type: shape and dtype of the new streams, or None if y is None.
      interpret: whether to interpret the kernel.

    Returns:
      (new streams or None, [slices, N * 32] float32 partial sums with N = T rounded up to a multiple of 4).
    """
    tokens, _, width = streams.shape
    slices = width // CHANNELS
    tiles = -(-tokens // TOKENS)
    warpgroups = 1 if interpret else WARPGROUPS
    columns = PARTS * (-(-fn.shape[-2] // 8) * 8)
    groups = min(max((3 if interpret else MULTIPROCESSORS) // slices, 1), tiles)

    def body(streams_gmem, fn_gmem, layer_gmem, added_gmem, new_gmem, partials_gmem, **scratch):
        fn_gmem = weights_of_layer(fn_gmem, layer_gmem)
        index, group, warpgroup = axis_indices("slice", "group", "warpgroup")
        refs = StreamRefs(streams_gmem, fn_gmem, partials_gmem.at[index], new_gmem, *added_gmem)
        _body(index, group, warpgroup, refs, **scratch)

    # The second launch reads whole groups of four tokens. Sums past the last token are neither written nor used.
    padded = -(-tokens // WARPS) * WARPS
    launch = kernel(
        body,
        out_type=(new_type, jax.ShapeDtypeStruct((slices, padded, SUMS), jnp.float32)),
        kernel_name="hyper_connections_many",
        grid={"slice": slices, "group": groups},
        num_threads=warpgroups,
        scratch_types={
            "operand_smem": wgmma.operand(warpgroups, STREAMS, TOKENS, CHUNK),
            "weights_smem": wgmma.operand(CHUNKS * STREAMS, columns, CHUNK),
            "weights_ready": plgpu.Barrier(num_arrivals=warpgroups),
        },
        interpret=interpret,
    )
    new, partials = launch(streams, fn, layer, added)
    return new, partials.reshape(slices, -1)


def _body(index, group, warpgroup, refs, operand_smem, weights_smem, weights_ready):
    split_weight(weights_smem, refs.fn, index, warpgroup)
    barriers.sync_block(weights_ready)
    tokens = refs.streams.shape[0]
    groups = lax.axis_size("group")
    tiles = -(-tokens // TOKENS)
    stride = groups * operand_smem.shape[0]
    first_tile = warpgroup * groups + group

    def chunk_at(i, chunk):
        """Returns (first token, first channel) of chunk `chunk` of this warpgroup's i-th tile.

        `chunk` may be CHUNKS, for the first chunk of the next tile.
        """
        i = i + lax.div(chunk, CHUNKS)
        chunk = lax.rem(chunk, CHUNKS)
        # The last tile ends with the last token. It may overlap the previous tile; both write the same values.
        first_token = jnp.minimum((first_tile + i * stride) * TOKENS, tokens - TOKENS)
        return first_token, index * CHANNELS + chunk * CHUNK

    def visit_tile(i, ahead):
        def visit_chunk(chunk, carry):
            acc, squares, ahead = carry
            streams_smem = operand_smem.at[vectors.opaque(warpgroup)]
            places = chunk_at(i, chunk), chunk_at(i, chunk + 1)
            chunk_squares, ahead = mix_chunk(streams_smem, ahead, *places, refs)
            return multiply_add(acc, streams_smem, weights_smem, chunk), squares + chunk_squares, ahead

        acc = wgmma.zeros((TOKENS, weights_smem.shape[1]))
        squares = plgpu.layout_cast(jnp.zeros((vectors.THREADS,), jnp.float32), vectors.layout(vectors.THREADS))
        acc, squares, ahead = lax.fori_loop(0, CHUNKS, visit_chunk, (acc, squares, ahead))
        store_sums(refs.partials, chunk_at(i, jnp.int32(0))[0], acc, squares)
        return ahead

    ahead = load_rows(*chunk_at(jnp.int32(0), jnp.int32(0)), refs)
    lax.fori_loop(0, lax.div(tiles - first_tile + stride - 1, stride), visit_tile, ahead)


@primitive
def split_weight(target, fn, index: jax.Array, warpgroup: jax.Array) -> None:
    """Splits a slice of fn into bfloat16 terms in shared memory. All warpgroups call this; a barrier has to follow.

    Args:
      target: [2 * 4, 3 * N, 64] bfloat16 with TRANSFORMS to write. For each chunk of 64 channels and each stream it
        receives the high, then the middle, then the low terms of N rows: the R rows of fn, then zeros.
      fn: [R, 4 * D] float32 in global memory.
      index: int32 scalar, index of the slice.
      warpgroup: int32 scalar, index of this warpgroup.
    """
    rows = fn.shape[0]
    width = fn.shape[1] // STREAMS
    padded = target.shape[1] // PARTS

    @pl.when(warpgroup == 0)
    def _():
        for chunk in range(CHUNKS):
            for j in range(STREAMS):
                remainder = fn[:, pl.ds(j * width + index * CHANNELS + chunk * CHUNK, CHUNK)]
                for i in range(PARTS):
                    piece = round_bfloat16(remainder)
                    remainder = remainder - piece
                    piece = jnp.pad(piece, ((0, padded - rows), (0, 0))).astype(jnp.bfloat16)
                    target[chunk * STREAMS + j, pl.ds(i * padded, padded)] = piece


@mlir.emits(split_weight, plgpu.RefType(TRANSFORMS))
def _emit_split_weight(target, fn, index, warpgroup):
    rows, columns = fn.type.shape
    dim = columns // STREAMS
    padded = -(-rows // 8) * 8
    eights = CHANNELS // 8  # number of pieces of 8 channels of a row in one stream
    units = padded * STREAMS * eights  # number of all such pieces; a thread splits one at a time
    thread = mlir.thread() + warpgroup * THREADS
    base = thread_ops.shared(target)
    column = index * CHANNELS

    def visit(unit):
        row = unit // (STREAMS * eights)
        stream = (unit // eights) % STREAMS
        eight = unit % eights
        clamped_row = row.minimum(rows - 1)
        pointer = mlir.element(fn, clamped_row * (STREAMS * dim) + stream * dim + column + eight * 8, 4)
        values = [(row < rows).where(x, 0) for i in range(2) for x in words.load_four(mlir.at(pointer, 16 * i))]
        chunk = eight // (CHUNK // 8)
        inner = eight % (CHUNK // 8)
        terms = [words.split(values[n : n + 4]) for n in (0, 4)]
        for part, (first_four, last_four) in enumerate(zip(*terms, strict=True)):
            line = (chunk * STREAMS + stream) * (PARTS * padded) + row + part * padded
            thread_ops.store_vector(_swizzled(base, line, inner), [*first_four, *last_four])

    threads = WARPGROUPS * THREADS
    for first_unit in range(0, units, threads):
        with thread_ops.when(thread + first_unit < units):
            visit(thread + first_unit)
    mlir.ptx("fence.proxy.async.shared::cta;")


@primitive
def load_rows(start: jax.Array, column: jax.Array, refs: StreamRefs) -> jax.Array:
    """Loads each thread's first two rows of the chunk at (token `start`, channel `column`), for `mix_chunk`.

    Returns int32 [2 * 512 * n], words of two bfloat16. n is 4 for the streams, or 5 with y. Interpreted, the words are
    zeros, which `mix_chunk` ignores.
    """
    return jnp.zeros(_ahead_shape(refs), jnp.int32)


@mlir.emits(
    load_rows,
    layout=thread_ops.vector_layout,
    returns=lambda start, column, refs: jax.ShapeDtypeStruct(_ahead_shape(refs), jnp.int32),
)
def _emit_load_rows(start, column, refs):
    for i in range(AHEAD):
        yield from _load(start + _row_of(i), column, refs)


@primitive
def mix_chunk(operand, ahead: jax.Array, here, following, refs: StreamRefs) -> tuple[jax.Array, jax.Array]:
    """Writes new streams of a chunk, 64 tokens and 64 channels, to global memory and to the operand of `wgmma`.

    Args:
      operand: [4 streams, 64 tokens, 64 channels] bfloat16 with TRANSFORMS in shared memory that only this
        warpgroup uses.
      ahead: first rows of this chunk, from `load_rows` or from the call for the previous chunk.
      here: (first token, first channel) of this chunk.
      following: (first token, first channel) of the next chunk.
      refs: references to the launch's arrays.

    Returns:
      (squares, ahead). `squares` [128] float32 are the sums of squares of each token over the chunk's channels, in the
      order of `store_sums`. `ahead` are the first rows of the next chunk.
    """
    tokens = pl.ds(here[0], TOKENS)
    columns = pl.ds(here[1], CHUNK)
    values = refs.streams[tokens, :, columns].astype(jnp.float32)
    if refs.y is not None:
        values = mixed_streams(values, refs.y[tokens, columns], refs.mixing[tokens, :])
        refs.new[tokens, :, columns] = values.astype(jnp.bfloat16)
    for j in range(STREAMS):
        operand[j] = values[:, j].astype(jnp.bfloat16)
    # The three axes are warp, lane // 8 and lane % 8, see `store_sums`. The last axis has 4 values here, and is padded
    # to 8 below.
    squares = jnp.sum(values * values, axis=(1, 2)).reshape(4, 4, 4).transpose(0, 2, 1)
    return jnp.pad(squares, ((0, 0), (0, 0), (0, 4))).reshape(-1), ahead


@mlir.emits(
    mix_chunk,
    plgpu.RefType(TRANSFORMS),
    layout=thread_ops.vector_layout,
    returns=lambda operand, ahead, *_: (jax.ShapeDtypeStruct((THREADS,), jnp.float32), ahead),
)
def _emit_mix_chunk(operand, ahead, here, following, refs):
    start, column = here
    eight = mlir.thread() & 7
    base = thread_ops.shared(operand)
    # Each warp has waited until its `wgmma` has read `operand`. So after this barrier `operand` can be overwritten.
    mgpu.utils.warpgroup_barrier()

    def mix_row(i, squares, *rows_ahead):
        token = start + _row_of(i)
        factors = None
        if refs.y is not None:
            factors = mixing.load_factors(mlir.element(refs.mixing, token * MIXING, 4))
        is_here = i < ROWS - AHEAD  # whether row i + AHEAD is in this chunk
        next_token = is_here.where(here[0], following[0])
        next_column = is_here.where(here[1], following[1])
        loaded = _load(next_token + _row_of((i + AHEAD) & (ROWS - 1)), next_column, refs)
        row = rows_ahead[: len(loaded)]
        rows_ahead = rows_ahead[len(loaded) :]
        fours = [list(row[4 * j : 4 * j + 4]) for j in range(len(row) // 4)]
        if factors is not None:
            fours = mixing.mix(fours, factors)
            mixing.store_streams(refs.new, token, column + eight * 8, fours)
        addresses = (_swizzled(base, _row_of(i) + k * TOKENS, eight) for k in range(STREAMS))
        total = thread_ops.sum_lanes(mixing.store_and_square(fours, addresses), 8)
        return [eight.equals(i).where(total.bits(), squares), *rows_ahead, *loaded]

    squares, *rows = thread_ops.loop(ROWS, mix_row, Scalar(0), *mlir.values(ahead))
    mlir.ptx("fence.proxy.async.shared::cta;")
    mgpu.utils.warpgroup_barrier()
    return [squares.as_float()], rows


def _ahead_shape(refs):
    return (AHEAD * 4 * THREADS * (STREAMS if refs.y is None else STREAMS + 1),)


def _row_of(i):
    """Returns the index of a thread's i-th row in its tile. A warp mixes the 16 rows that it also multiplies."""
    thread = mlir.thread()
    return ((thread >> 5) << 4) + (i << 2) + ((thread & 31) >> 3)


def _load(token, column, refs):
    """Loads this thread's 8 channels of the chunk that begins at `column`, for each stream of a token and for y."""
    fours = mixing.load_streams(refs.streams, refs.y, token, column + ((mlir.thread() & 7) << 3))
    return [word for four in fours for word in four]


@primitive
def multiply_add(acc: jax.Array, operand, weights, chunk: jax.Array) -> jax.Array:
    """Returns acc plus the products of all four streams of a chunk with the weights of this chunk.

    Args:
      acc: [64, 3 * N] float32 sums of the products of 64 tokens' streams with N rows of fn. N columns are for the rows'
        high terms, the next N for their middle terms, and the last N for their low terms.
      operand: streams from `mix_chunk`.
      weights: terms of fn from `split_weight`.
      chunk: int32 scalar, index of the chunk in the slice.
    """
    for j in range(STREAMS):
        stream = operand[j].astype(jnp.float32)
        terms = weights[chunk * STREAMS + j].astype(jnp.float32)
        acc = acc + jnp.dot(stream, terms.T, precision="highest")
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
    """Writes the partial sums of a tile of 64 tokens.

    Args:
      partials: [T, 32] float32 to write, see `mixing.SUMS`.
      start: int32 scalar, index of the tile's first token.
      acc: [64, 3 * N] float32 from `multiply_add`: the high, middle and low terms of N sums, which are added up here.
      squares: [128] float32 sums of squares from `mix_chunk`. For a = 0 .. 3 and b = 0 .. 3, lane 8 * a + b of warp w
        holds the sum for token 16 * w + 4 * b + a of the tile. The other lanes hold no sum.
    """
    tokens = pl.ds(start, TOKENS)
    rows = acc.shape[1] // PARTS
    partials[tokens, pl.ds(0, rows)] = jnp.sum(acc.reshape(TOKENS, PARTS, rows)[:, ::-1], axis=1)
    squares = squares.reshape(4, 4, 8)[:, :, :4].transpose(0, 2, 1).reshape(TOKENS, 1)
    partials[tokens, pl.ds(SQUARES, 1)] = squares


@mlir.emits(store_sums, None, None, plgpu.Layout.WGMMA, vectors.layout(THREADS))
def _emit_store_sums(partials, start, acc, squares):
    thread = mlir.thread()
    warp = thread >> 5
    lane = thread & 31
    first_row = start + (warp << 4)

    def place(row, column):
        return mlir.element(partials, (row << 5) + column)

    # For every 8 columns, a thread holds two sums in row lane // 4 of its warp's 16 rows and two in row lane // 4 + 8.
    registers = list(acc.registers.flat)
    share = len(registers) // PARTS
    for i in range(share):
        total = arith.addf(arith.addf(registers[i + 2 * share], registers[i + share]), registers[i])
        row = first_row + (lane >> 2) + 8 * (i % 2)
        llvm.store(total, place(row, ((lane & 3) << 1) + 8 * (i // 2)), alignment=8)
    with thread_ops.when((lane & 7) < ROWS):
        row = first_row + ((lane & 7) << 2) + (lane >> 3)
        llvm.store(mlir.scalar(squares), place(row, SQUARES), alignment=4)


def _swizzled(base, line, eight):
    """Returns the address of 16-byte piece `eight` of 128-byte line `line`, with the 128-byte swizzle of TRANSFORMS."""
    return base + (line << 7) + ((eight ^ (line & 7)) << 4)
