"""The epilogues of `skinny_gemm` and `dequant_gemm`, which store a tile of sums [64 weight rows, N inputs] transposed.

Each input gets a row of the output array. An epilogue first multiplies the sums by 2**32, because unpacked weights are
2**-32 times the weights (`quantized_weights.SHIFT`). If `limit` is given, the epilogue stores SwiGLU, with this
clipping limit, instead of the sums. A thread then holds the sums of a channel's gate row and up row, see
`quantized_weights.interleave_halves`. For many inputs a warpgroup transposes bfloat16 values in shared memory, so that
it writes long pieces of rows.
"""

import functools
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from pallas_kernels.formats.exact_math import round_bfloat16
from pallas_kernels.matmul.dequant_wgmma import permute_columns
from pallas_kernels.matmul.quantized_weights import HALF, ROWS, SHIFT
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops as ops, wgmma
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import primitive


COLUMNS = 32  # number of inputs that a warpgroup transposes at a time
LINE_BYTES = 2 * ROWS + 16  # bytes of an input's line in shared memory; the 16 bytes of padding avoid bank conflicts
STAGING_BYTES = COLUMNS * LINE_BYTES  # bytes of shared memory in which a warpgroup transposes


@primitive
def store_few(
    out_gmem, sums: jax.Array, tile: jax.Array, *, limit: float | None = None, rows_smem=None, weights_smem=None
) -> None:
    """Stores a tile of few inputs: for each input, 64 products or 32 values of SwiGLU go to the input's output row.

    Args:
      out_gmem: [P, channels] bfloat16.
      sums: [64, N] float32 sums of N inputs.
      tile: int32 scalar, index of the tile. Its first channel is `64 * tile`, or `32 * tile` with SwiGLU.
      limit: clipping limit of SwiGLU; None to store the products.
      rows_smem: [N] int32, index of each input's output row; an input with -1 is not stored. None: input n has row n,
        and inputs from P on are not stored.
      weights_smem: [N] float32, factor of each input's values of SwiGLU, applied before rounding; None for 1.
    """
    values = _finished(sums, limit)
    for n in range(values.shape[0] if rows_smem is not None else min(values.shape[0], out_gmem.shape[0])):
        row = jnp.int32(n) if rows_smem is None else rows_smem[n]
        value = values[n] if weights_smem is None else values[n] * weights_smem[n]

        @pl.when(row >= 0)
        def _(row=row, value=value):
            out_gmem[row, pl.ds(tile * value.size, value.size)] = value.astype(jnp.bfloat16)


@mlir.emits(store_few, layout=wgmma.layout)
def _emit_store_few(out_gmem, sums, tile, *, limit=None, rows_smem=None, weights_smem=None):
    gated = limit is not None
    thread = mlir.thread()
    channel = tile * (HALF if gated else ROWS)
    # The index in the tile of the channel to which the thread's first weight row belongs.
    channel_in_tile = (thread >> 5) * (8 if gated else 16) + ((thread % 32) >> 2)
    count, width = out_gmem.type.shape
    values = mlir.values(sums)

    def finished(gate, up, input_index):
        """Yields the values to store for the two sums of an input: both products, or one value of SwiGLU."""
        if not gated:
            yield from (x * 2.0**SHIFT for x in (gate, up))
            return
        value = _emit_swiglu(gate, up, limit)
        if weights_smem is not None:
            weight = ops.load(ops.shared(weights_smem, input_index))
            value = value * weight.as_float()
        yield value

    # A thread holds sums of weight rows r and r + 8 of its warp's 16: two products 8 channels apart, or with SwiGLU the
    # gate's and the up projection's product of one channel. Four consecutive `values` belong to two adjacent inputs:
    # row r of both inputs, then row r + 8 of both.
    for n in range(0, len(values), 4):
        for i in range(2):
            input_index = ((thread & 3) << 1) + (2 * n + i)
            row = input_index if rows_smem is None else ops.load(ops.shared(rows_smem, input_index))
            with ops.when(row < count):  # as unsigned numbers, which also skips row -1
                offset = mlir.to_i64(row) * width + mlir.to_i64(channel + channel_in_tile)
                place = mlir.at(mlir.global_pointer(out_gmem), offset, ir.BF16Type.get())
                for i_channel, value in enumerate(finished(values[n + i], values[n + 2 + i], input_index)):
                    value = arith.truncf(ir.BF16Type.get(), value)
                    llvm.store(value, mlir.at(place, 2 * 8 * i_channel), alignment=2)


@primitive
def store_many(
    out_gmem, sums: jax.Array, place, staging_smem, *, limit=None, rows_gmem=None, weights_gmem=None, permuted=False
) -> None:
    """Stores a tile of many inputs: for each input, 64 products or 32 values of SwiGLU go to the input's output row.

    Args:
      out_gmem: [rows, channels] bfloat16; float32 only for products, without `rows_gmem`.
      sums: [64, N] float32 sums of the inputs from `first` on, N a multiple of 16.
      place: (column, first, end), int32 scalars: the indices of the first channel to store, of the first input, and of
        the input after the last one.
      staging_smem: [STAGING_BYTES] uint8, memory that only this warpgroup uses.
      limit: clipping limit of SwiGLU; None to store the products.
      rows_gmem: [inputs] int32, index of each input's output row; None: input n has row n. Must be None with SwiGLU.
      weights_gmem: [inputs] float32, factor of each input's values of SwiGLU; None for 1.
      permuted: whether SwiGLU is stored in FP4's order, see `permute_columns`.
    """
    column, first_input, end = place
    values = _finished(sums, limit)
    values = permute_columns(values) if permuted else values

    @pl.loop(0, values.shape[0])
    def _(n):
        @pl.when(first_input + n < end)
        def _():
            row = first_input + n if rows_gmem is None else rows_gmem[first_input + n]
            row_values = lax.dynamic_index_in_dim(values, n, keepdims=False)
            row_values = row_values if weights_gmem is None else row_values * weights_gmem[first_input + n]
            out_gmem[row, pl.ds(column, row_values.size)] = row_values.astype(out_gmem.dtype)


@mlir.emits(store_many, layout=wgmma.layout)
def _emit_store_many(
    out_gmem, sums, place, staging_smem, *, limit=None, rows_gmem=None, weights_gmem=None, permuted=False
):
    place = tuple(map(Scalar, place))
    values = mlir.values(sums)
    if limit is not None:
        put = functools.partial(_put_swiglu, values, limit, place[1:], weights_gmem, permuted)
        _store_lines(out_gmem, 2 * len(values), put, HALF, place, staging_smem)
        return
    values = [x * 2.0**SHIFT for x in values]
    if isinstance(out_gmem.type.element_type, ir.F32Type):
        _store_float32(out_gmem, values, *place)
    else:
        put = functools.partial(_put_transposed, values)
        _store_lines(out_gmem, 2 * len(values), put, ROWS, place, staging_smem, rows_gmem)


def _put_transposed(values, start, place):
    """Writes the lines of up to 32 inputs from `start` on, 64 products each, to shared memory at address `place`."""
    # An `stmatrix` of a warp transposes 16 rows and 16 inputs, as four matrices of 8 x 8 values.
    thread = mlir.thread()
    matrix = (thread % 32) >> 3
    line = thread & 7
    address = place + ((matrix >> 1) * 8 + line) * LINE_BYTES + ((thread >> 5) * 2 + (matrix & 1)) * 16
    for n in range(0, COLUMNS, 16):
        if 2 * start + 2 * n >= 4 * len(values):
            break
        pairs = [words.pack(*values[(start + n) // 2 + i :][:2]) for i in range(0, 8, 2)]
        code = f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0 + {n * LINE_BYTES}], {{$1, $2, $3, $4}};"
        mlir.ptx(code, address, *pairs)


def _put_swiglu(sums, limit, inputs, weights, permuted, start, place):
    """Writes SwiGLU of up to 32 inputs from `start` on, a line for each, to shared memory at address `place`.

    `inputs` is (first, end) and `weights` is `weights_gmem` of `store_many`.
    """
    first_input, end = inputs
    f32 = mlir.f32_type()
    thread = mlir.thread()
    warp = thread >> 5
    row = (thread % 32) >> 2
    # `position` is the place of channel `8 * warp + row` in the line, see `permute_columns`.
    in_order = warp * 8 + row
    position = ((row >> 1) & 1) * 16 + (row & 1) * 8 + warp * 2 + (row >> 2) if permuted else in_order
    for n in range(start, min(start + COLUMNS, 2 * len(sums)), 8):
        for i in range(2):
            number = (thread & 3) * 2 + (n + i)  # index of the input in the tile
            value = _emit_swiglu(sums[n // 2 + i], sums[n // 2 + 2 + i], limit)
            if weights is not None:
                # Inputs past the end, which are not stored, read the weight of the last input.
                weight = llvm.load(f32, _element(weights, (first_input + number).minimum(end - 1), f32))
                value = value * weight
            address = place + (number - start) * LINE_BYTES + position * 2
            code = "{ .reg .b16 s, t; mov.b32 {s, t}, $1; st.shared.b16 [$0], s; }"
            mlir.ptx(code, address, words.pack(value, value))


def _store_lines(
    out, inputs: int, put: Callable[[int, Scalar], None], width: int, place: tuple[Scalar, ...], staging, rows=None
):
    """Stores a line of `width` bfloat16 for each input, through shared memory.

    Args:
      out: [rows, channels] bfloat16 in global memory.
      inputs: number of inputs.
      put: function of (start, address) that writes the lines of up to 32 inputs from `start` on to shared memory.
      width: number of channels of a line, 32 or 64.
      place: (column, first, end), see `store_many`.
      staging: the warpgroup's shared memory.
      rows: [inputs] int32 in global memory, index of each input's output row; None: input n has row n.
    """
    column, first_input, end = place
    memory = ops.shared(staging)
    parts = width // 8  # number of threads that copy a line, 16 bytes each
    turn_lines = mlir.THREADS // parts  # number of lines that the warpgroup copies at a time
    line = mlir.thread() // parts
    part = mlir.thread() % parts
    numbers = [first_input + line + n for n in range(0, inputs, turn_lines)]
    # All indices are loaded before the first barrier, so that the warpgroup waits for global memory only once.
    out_rows = numbers if rows is None else [ops.load_global(rows, number.minimum(end - 1)) for number in numbers]
    for start in range(0, inputs, COLUMNS):
        # Wait until all threads have read the lines that `put` will overwrite, also those of the previous tile.
        mgpu.utils.warpgroup_barrier()
        put(start, memory)
        mgpu.utils.warpgroup_barrier()
        for n in range(start, min(start + COLUMNS, inputs), turn_lines):
            inside = numbers[n // turn_lines] < end
            if n + turn_lines > inputs:
                inside = inside & (line < inputs - n)
            with ops.when(inside):
                values = ops.load_vector(memory + (line + (n - start)) * LINE_BYTES + part * 16)
                target = _element(out, out_rows[n // turn_lines], ir.BF16Type.get(), column + part * 8)
                words.store_four(target, values)


def _store_float32(out, values, column, first, end):
    """Stores float32 products of the inputs `first` .. `end` - 1 to the 64 channels from `column` on.

    Eight threads write 32 consecutive bytes.
    """
    thread = mlir.thread()
    row = (thread >> 5) * 16 + ((thread % 32) >> 2)
    for n in range(0, 2 * len(values), 8):
        for i in range(2):
            line = first + ((thread & 3) * 2 + (n + i))
            with ops.when(line < end):
                pointer = _element(out, line, mlir.f32_type(), column + row)
                for half in range(2):
                    llvm.store(values[n // 2 + 2 * half + i], mlir.at(pointer, 32 * half))


def _element(ref, row, element, column=None):
    """Returns a pointer to an element of an array in global memory.

    Args:
      ref: [rows] array, or [rows, width] if `column` is given; both sizes are at most 2**31.
      row: Scalar, row index of the element.
      element: MLIR type of an element.
      column: Scalar, column index of the element.
    """
    offset = mlir.to_u64(row)
    if column is not None:
        offset = offset * ref.type.shape[1] + mlir.to_u64(column)
    return mlir.at(mlir.global_pointer(ref), offset, element)


def _finished(sums, limit):
    """Returns the float32 values to store for sums [64, N]; for interpreted kernels.

    Without a limit, these values are the products [N, 64]. With a limit, the products are rounded to bfloat16, and the
    values are SwiGLU [N, 32] of the rounded products.
    """
    sums = sums * 2.0**SHIFT
    if limit is None:
        return sums.T
    sums = sums.reshape(ROWS // 16, 2, 8, -1)
    gate = round_bfloat16(sums[:, 0]).reshape(HALF, -1).T
    up = round_bfloat16(sums[:, 1]).reshape(HALF, -1).T
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def _emit_swiglu(gate, up, limit):
    """Returns SwiGLU as an MLIR float32. `gate` and `up` are a thread's two sums, 2**-32 times the products."""
    f32 = mlir.f32_type()

    def rounded(x):
        return Scalar(arith.extf(f32, arith.truncf(ir.BF16Type.get(), x * 2.0**SHIFT)))

    gate = rounded(gate).minimum(limit)
    up = rounded(up).maximum(-limit).minimum(limit)
    silu = gate / (Scalar(math.exp(arith.negf(gate))) + 1.0)
    return silu * up
