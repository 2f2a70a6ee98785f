"""Rows of the inputs in the order of their experts, with the columns in the order in which weights are unpacked."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.matmul.dequant_wgmma import permute_columns
from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.runtime.launch import kernel, primitive


ROWS = 2  # of a block


def gather_inputs(x: jax.Array, pairs: jax.Array, divisor: int, permuted: bool, *, interpret: bool) -> jax.Array:
    """`x[pairs // divisor]`, or with `permute_columns`.

    Args:
      x: [T, D] bfloat16, D a multiple of 256.
      pairs: [P] int32, P a multiple of 2.
      divisor: pairs that share a row.
      permuted: whether columns are, as FP4 wants it.
      interpret: run on the CPU, interpreted.
    """

    def body(x, pairs, out):
        for i in range(ROWS):
            copy_row(out, x, lax.axis_index("block") * ROWS + i, pairs, divisor, permuted)

    run = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((len(pairs), x.shape[1]), jnp.bfloat16),
        kernel_name="gather_inputs",
        grid=(len(pairs) // ROWS,),
        grid_names=("block",),
        interpret=interpret,
    )
    return run(x, pairs)


@primitive
def copy_row(out, x, row: jax.Array, pairs, divisor: int, permuted: bool) -> None:
    """out[row] = x[pairs[row] // divisor], its columns permuted or not, by one warpgroup."""
    values = x[lax.div(pairs[row], jnp.int32(divisor))]
    out[row] = permute_columns(values[None])[0] if permuted else values


@copy_row.mosaic
def _(out, x, row, pairs, divisor, permuted):
    def emit(out, x, row, pairs):
        thread, row, width = U32(mlir.thread()), U32(mlir.scalar(row)), ir.MemRefType(x.type).shape[1]
        source = thread_ops.load_global(pairs, row) // divisor
        for first in range(0, width // 8, mlir.THREADS):
            eight = thread + first
            if first + mlir.THREADS <= width // 8:
                _copy_eight(out, x, row, source, width, eight, permuted)
            else:  # whole warps
                with thread_ops.when(eight < width // 8):
                    _copy_eight(out, x, row, source, width, eight, permuted)

    mlir.inline(emit, out, x, row, pairs)


def _copy_eight(out, x, row, source, width, eight, permuted):
    load = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
    words = [U32(w) for w in mlir.ptx(load, _place(x, source, width, eight), results=[mlir.int_type()] * 4)]
    values = (w.value for w in (_permute(words) if permuted else words))
    mlir.ptx("st.global.v4.b32 [$0], {$1, $2, $3, $4};", _place(out, row, width, eight), *values)


def _permute(words):
    """8 columns of a thread; of 32 each of four threads has two of its columns in a word of another's."""
    a, b, c, d = words
    # Columns i and i + 4.
    words = [_halves(*pair, high) for pair in ((a, c), (b, d)) for high in (False, True)]
    words = _by_lane(words)
    shuffle = "shfl.sync.bfly.b32 $0, $1, {}, 0x1f, 0xffffffff;"
    return _by_lane([words[0], *(thread_ops.ptx(shuffle.format(i), words[i]) for i in (1, 2, 3))])


def _by_lane(words):
    """words[i ^ lane] for i = 0 .. 3, of the lanes of a quad."""
    for bit in (1, 2):
        odd = (thread_ops.lane() & bit) > 0
        words = [odd.where(words[i ^ bit], words[i]) for i in range(4)]
    return words


def _halves(x, y, high):
    """The low or the high halves of two words, x's first."""
    code = f"prmt.b32 $0, $1, $2, {'0x7632' if high else '0x5410'};"
    return U32(mlir.ptx(code, x.value, y.value, results=mlir.int_type(), pure=True))


def _place(ref, row, width, eight):
    offset = arith.muli(arith.extui(mlir.int_type(64), row.value), mlir.i64(2 * width))
    offset = arith.addi(offset, arith.extui(mlir.int_type(64), (eight << 4).value))
    return mlir.at(mlir.global_pointer(ref), offset)
