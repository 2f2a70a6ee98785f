"""Gathers the input of each (token, expert) pair, in the order of experts: y[p] = x[pairs[p] // divisor].

A token has `divisor` pairs. For FP4 weights, the columns of y are put into the order in which the weights are unpacked
(`dequant_wgmma.permute_columns`). The grid has a block of one warpgroup for every two rows. A thread copies 16 bytes at
a time.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.dequant_wgmma import permute_columns
from pallas_kernels.mgpu import bfloat16_words as words, mlir, thread_ops
from pallas_kernels.runtime.launch import kernel, primitive


ROWS = 2  # number of rows of a block


def gather_inputs(x: jax.Array, pairs: jax.Array, divisor: int, permuted: bool, *, interpret: bool) -> jax.Array:
    """Returns `x[pairs // divisor]`; the values of rows with pair -1 are unspecified.

    Args:
      x: [T, D] bfloat16, D a multiple of 256.
      pairs: [P] int32 indices of pairs, P a multiple of 2. Pair t * divisor + j belongs to token t. -1 = no pair:
        `sort_by_expert` leaves such places between the pairs of two experts, and at the end.
      divisor: number of pairs of a token.
      permuted: whether to reorder the columns as `permute_columns` does.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [P, D] bfloat16.
    """

    def body(x_gmem, pairs_gmem, y_gmem):
        for i in range(ROWS):
            copy_row(y_gmem, x_gmem, lax.axis_index("block") * ROWS + i, pairs_gmem, divisor, permuted)

    launch = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(pairs), x.shape[1]), jnp.bfloat16),
        kernel_name="gather_inputs",
        grid={"block": len(pairs) // ROWS},
        interpret=interpret,
    )
    return launch(x, pairs)


@primitive
def copy_row(y_gmem, x_gmem, row: jax.Array, pairs_gmem, divisor: int, permuted: bool) -> None:
    """Sets y[row] to x[pairs[row] // divisor], with permuted columns if `permuted`. One warpgroup runs it.

    For pair -1, a GPU leaves y[row] unchanged, and the interpreter sets it to some row of x.
    """
    values = x_gmem[lax.div(pairs_gmem[row], divisor)]
    y_gmem[row] = permute_columns(values[None])[0] if permuted else values


@mlir.emits(copy_row)
def _emit_copy_row(y_gmem, x_gmem, row, pairs_gmem, divisor, permuted):
    width = x_gmem.type.shape[1]
    pair = thread_ops.load_global(pairs_gmem, row)
    source = pair // divisor

    def copy_eight(eight):
        """Copies columns 8 * eight .. 8 * eight + 7 of the row. All lanes of a warp call it together."""
        four = words.load_four(_address(x_gmem, source, width, eight))
        four = _permute(four) if permuted else four
        words.store_four(_address(y_gmem, row, width, eight), four)

    with thread_ops.when(pair.is_at_least(0)):
        thread_ops.for_each(width // 8, copy_eight)


def _permute(four):
    """Permutes 32 columns as `permute_columns` does. Four consecutive threads, a quad, hold eight columns each.

    `four` are this thread's columns, as words of two bfloat16. Word i of the result comes from thread i of the quad.
    """
    a, b, c, d = four
    # Puts columns i and i + 4 of this thread into word i. Then the threads of the quad exchange words.
    take_halves = "prmt.b32 $0, $1, $2, 0x5410;", "prmt.b32 $0, $1, $2, 0x7632;"
    four = _by_lane([thread_ops.pure(code, *pair) for pair in ((a, c), (b, d)) for code in take_halves])
    shuffle = "shfl.sync.bfly.b32 $0, $1, {}, 0x1f, 0xffffffff;"
    return _by_lane([four[0], *(thread_ops.ptx(shuffle.format(i), four[i]) for i in (1, 2, 3))])


def _by_lane(four):
    """Returns [four[i ^ j] for i in 0 .. 3], where j is the index of the thread in its quad."""
    for bit in (1, 2):
        odd = (thread_ops.lane() & bit) > 0
        four = [odd.where(four[i ^ bit], four[i]) for i in range(4)]
    return four


def _address(ref, row, width, eight):
    row = mlir.to_u64(row)
    offset = mlir.to_u64(eight << 4) + row * (2 * width)
    return mlir.at(mlir.global_pointer(ref), offset)
