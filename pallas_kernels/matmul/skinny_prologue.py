"""The prologue of `skinny_gemm`: copies inputs to shared memory, in the order in which `skinny_mma` unpacks columns.

If the map has an RMSNorm, inputs are multiplied by 1 / rms(input) and by the norm's weight before they are stored.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.quantized_weights import WeightLayout
from pallas_kernels.matmul.skinny_mma import COLUMNS, MULTIPLIERS, UNIT
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops
from pallas_kernels.mgpu.bfloat16_words import fp8_pairs, halves
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import primitive


@primitive
def store_factors(factors_smem, source_gmem, eps: float, warpgroup: jax.Array) -> None:
    """Stores the factor of RMSNorm, 1 / sqrt(mean(source[n]**2) + eps), of each row n.

    The four multiplying warpgroups call this function together, and have to synchronize before they read the factors.

    Args:
      factors_smem: [T or more] float32 to write.
      source_gmem: [T, K] bfloat16, K a multiple of 256.
      eps: epsilon of the norm.
      warpgroup: int32 scalar, index of the warpgroup, 0 to 3.
    """
    for n in range(source_gmem.shape[0]):

        @pl.when(n % MULTIPLIERS == warpgroup)
        def _(n=n):
            row = source_gmem[n].astype(jnp.float32)
            factors_smem[n] = lax.rsqrt(jnp.mean(row * row) + eps)


@mlir.emits(store_factors)
def _emit_store_factors(factors_smem, source_gmem, eps, warpgroup):
    tokens, columns = source_gmem.type.shape
    warps = MULTIPLIERS * mlir.THREADS // mlir.WARP
    warp = (mlir.thread() >> 5) + warpgroup * (warps // MULTIPLIERS)
    lane = thread_ops.lane()

    def add_row(i):
        row = warp + i * warps
        with thread_ops.when(row < tokens):
            squares = Scalar(0.0)
            for first_column in range(0, columns, 8 * mlir.WARP):
                group = row * (columns // 8) + (lane + first_column // 8)  # index of a group of 8 values, 16 bytes
                offset = mlir.to_u64(group) << 4
                for value in _unpack(_fetch(mlir.at(mlir.global_pointer(source_gmem), offset))):
                    squares = thread_ops.fma(value, value, squares)
            mean_square = thread_ops.fma(thread_ops.sum_lanes(squares), Scalar(1 / columns), Scalar(eps))
            code = "{ .reg .f32 s; sqrt.rn.f32 s, $1; rcp.rn.f32 $0, s; }"
            factor = mlir.ptx(code, mean_square, results=mlir.f32_type())
            with thread_ops.when(lane.equals(0)):
                thread_ops.store(thread_ops.shared(factors_smem, row), factor.bits())

    thread_ops.loop(-(-tokens // warps), add_row)


def _fetch(pointer):
    """Loads 16 bytes of global memory that the kernel may have written."""
    return thread_ops.ptx_words(4, "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", pointer)


def _unpack(four):
    return (value for word in four for value in words.unpack(word))


@primitive
def load_inputs(
    inputs_smem,
    source_gmem,
    rows,
    divisor: int,
    column,
    columns,
    warpgroup,
    layout: WeightLayout,
    stage_columns: int,
    norm=(),
) -> None:
    """Copies N inputs to shared memory, with columns in the order of unpacked weights.

    The four multiplying warpgroups call this function together, and have to synchronize before they read the inputs.

    Args:
      inputs_smem: [N / 8, units, 8, 32] bfloat16 to write, in units of 32 columns. The interpreter keeps the columns in
        order.
      source_gmem: [.., width] bfloat16 rows. This kernel may have written them.
      rows: [N] int32 in shared memory: input n is row `rows[n] // divisor`, or if `rows[n]` is negative, the row of
        input 0. Or an int, the number of inputs to copy: input n is row `n // divisor`.
      divisor: see `rows`.
      column: index of the first column to copy, a multiple of 64.
      columns: (number of columns to copy, a multiple of 32; number of columns to write, a multiple of `stage_columns`).
        Columns that are written but not copied are zeros.
      warpgroup: int32 scalar, index of the warpgroup, 0 to 3.
      layout: storage of the weights, which decides the order of columns.
      stage_columns: number of columns of a stage. If a stage of FP4 ends with half a segment, the order differs there.
      norm: () or (weight [width] float32 in global memory, factors [N] float32 in shared memory, see `store_factors`).
        An input is multiplied by its factor, then by the weight, and rounded.
    """
    copied, written = columns
    share = -(-written // (UNIT * MULTIPLIERS))
    padding = share * UNIT * MULTIPLIERS - copied
    for n in range(rows if isinstance(rows, int) else inputs_smem.shape[0] * COLUMNS):
        row = jnp.int32(n) if isinstance(rows, int) else jnp.where(rows[n] < 0, rows[0], rows[n])
        values = source_gmem[lax.div(row, divisor), pl.ds(column, copied)]
        if norm:
            weight, factors = norm
            values = weight[pl.ds(column, copied)] * (values.astype(jnp.float32) * factors[n])
        values = jnp.pad(values.astype(jnp.bfloat16), (0, padding)).reshape(-1, UNIT)
        for i in range(share):
            unit = warpgroup * share + i

            @pl.when(unit < written // UNIT)
            def _(n=n, unit=unit, values=values):
                inputs_smem[n // COLUMNS, unit, n % COLUMNS] = values[unit]


@mlir.emits(load_inputs)
def _emit_load_inputs(
    inputs_smem, source_gmem, rows, divisor, column, columns, warpgroup, layout, stage_columns, norm=()
):
    tiles, units, _, _ = inputs_smem.type.shape
    copied, eights = (count // 8 for count in columns)  # counted in pieces of 8 columns, 16 bytes
    threads = MULTIPLIERS * mlir.THREADS
    # The threads copy `lines` rows at once. A thread loads its 8 columns of `rows_at_once` rows before it stores them.
    # `rows_at_once` is lower with a norm or with scales of small blocks, which take registers.
    lines = max(1, threads // eights)
    count = rows if isinstance(rows, int) else tiles * COLUMNS
    max_rows = COLUMNS // (4 if norm else 2 if layout.has_small_blocks and count > 2 * COLUMNS else 1)
    rows_at_once = min(-(-count // lines), max_rows)
    thread = mlir.thread() + warpgroup * mlir.THREADS
    target = thread_ops.shared(inputs_smem)
    width = source_gmem.type.shape[1]
    base = mlir.element(source_gmem, column)

    def normed(four, n, eight):
        weight_gmem, factors_smem = norm or (None, None)
        pointer = mlir.at(mlir.element(weight_gmem, column), mlir.to_u64(eight << 5))
        weights = [word.as_float() for i in range(2) for word in _fetch(mlir.at(pointer, 16 * i))]
        factor = thread_ops.load(thread_ops.shared(factors_smem, n)).as_float()
        values = [w * (x * factor) for w, x in zip(weights, _unpack(four), strict=True)]
        return [words.pack(*pair) for pair in zip(values[::2], values[1::2], strict=True)]

    def copy(n, row, eight):
        """Loads columns 8 * eight .. 8 * eight + 7 of input n from row `row // divisor`.

        Returns:
          A function without arguments that stores these columns in shared memory.
        """
        source_eight = eight if eights == copied else eight.minimum(copied - 1)
        offset = mlir.to_i64(row // divisor) * (2 * width) + mlir.to_u64(source_eight << 4)
        four = _fetch(mlir.at(base, offset))
        four = normed(four, n, source_eight) if norm else four
        if eights > copied:
            four = [(eight < copied).where(word, 0) for word in four]
        unit, inner, four = _placed(eight, four, layout, stage_columns)
        # A unit of 8 inputs takes 512 bytes, 64 for each input. A thread's 8 values take 16 bytes.
        offset = (((n >> 3) * units + unit) << 9) + ((n & 7) << 6) + (inner << 4)
        return lambda: thread_ops.store_vector(target + offset, four)

    def row_of(n):
        if isinstance(rows, int):
            return n
        row = thread_ops.load(thread_ops.shared(rows, n))
        first_row = thread_ops.load(thread_ops.shared(rows))
        return row.is_below(0).where(first_row, row)

    def copy_rows(eight, line, i):
        """Copies 8 columns of `rows_at_once` inputs, `lines` apart; the last input may be copied several times."""
        inputs = [(line + (i * rows_at_once + j) * lines).minimum(count - 1) for j in range(rows_at_once)]
        for store in [copy(n, row_of(n), eight) for n in inputs]:
            store()

    for first_eight in range(0, eights, threads):
        with thread_ops.when(thread + first_eight < lines * eights):
            eight, line = (thread % eights, thread // eights) if lines > 1 else (thread + first_eight, 0)
            thread_ops.loop(-(-count // (lines * rows_at_once)), functools.partial(copy_rows, eight, line))


def _placed(eight, four, layout, stage_columns):
    """Finds where columns 8 * eight .. 8 * eight + 7 of an input are stored, and in which order.

    An input's columns are stored in units of 32. Four threads multiply a unit, 8 columns each, with the weights that
    they have unpacked. So the 8 columns go to the thread that unpacks their weights.

    Args:
      eight: index of the group of 8 columns in the input.
      four: four words, the input's values in these columns as pairs of bfloat16.
      layout: storage of the weights.
      stage_columns: number of columns of a stage.

    Returns:
      (unit, inner, words). `unit` is the index of the unit in the input. `inner`, 0 to 3, is the index of the thread
      among the four. `words` are the values of `four` in the order in which this thread unpacks its weights.
    """
    if layout.bits == 4:
        # A word of weights holds eight codes, which `e2m1_pairs` unpacks to pairs of codes i and i + 4.
        pairs = [halves(four[i // 2], four[2 + i // 2], i % 2) for i in range(4)]
        unit = ((eight >> 4) << 2) + (eight & 3)
        inner = (eight >> 2) & 3
        if stage_columns % layout.segment:
            # In the half segment at the end of a stage, a thread unpacks two consecutive groups of 8 columns.
            stage_eights = stage_columns // 8
            in_stage = eight % stage_eights
            is_half = in_stage >= stage_eights - 8
            unit = ((in_stage >> 4) << 2) + is_half.where(in_stage & 1, in_stage & 3)
            unit = unit + (eight // stage_eights) * (stage_columns // UNIT)
            inner = is_half.where((in_stage >> 1) & 3, (in_stage >> 2) & 3)
        return unit, inner, pairs
    return ((eight >> 3) << 1) + (eight & 1), (eight >> 1) & 3, fp8_pairs(four)
