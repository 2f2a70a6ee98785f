"""The lightning indexer's queries, rotated and rounded as its keys were, in the order in which tiles hold the dims.

A warp holds one head, so that every exchange stays within a warp.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mlir_helpers as mlir, vectors
from pallas_kernels.common.checks import check_array, check_rules
from pallas_kernels.common.layouts import KeyLayout
from pallas_kernels.common.primitive import kernel, primitive
from pallas_kernels.common.row_encoder import quantise_keys
from pallas_kernels.common.support import traced_once
from pallas_kernels.common.unpack import e2m1_value
from pallas_kernels.indexer_scores.key_tiles import DIM, check_layout, permute_dims


SIZE = 512  # values of a warpgroup
HEADS = SIZE // DIM


@traced_once("layout")
def round_index_query(q: jax.Array, layout: KeyLayout, *, interpret: bool = False) -> jax.Array:
    """Queries for `indexer_scores`: quantised and dequantised as indexer keys are.

    Args:
      q: [T, H, 128] bfloat16 after RoPE, H a multiple of 4.
      layout: of the keys: MXFP4 after a Hadamard rotation and rounding to bfloat16, or NVFP4.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, H, 128] bfloat16, dims in the order of `permute_dims`.

    Raises:
      NotImplementedError: the layout, a shape or a dtype is not one of these.
    """
    check_layout(layout)
    check_array("q", q, jnp.bfloat16, None, None, layout.dim)
    check_rules({f"a multiple of {HEADS} heads, got {q.shape[1]}": q.shape[1] % HEADS == 0})
    if q.size == 0:
        return q

    def body(q, out):
        at = lax.axis_index("vector")
        x = vectors.load(q.at[at]).astype(jnp.float32)
        code, _, step = quantise_keys(x, layout, None)
        _store_permuted(out.at[at], (e2m1_value(code) * step).astype(jnp.bfloat16))

    run = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((q.size // SIZE, SIZE), jnp.bfloat16),
        kernel_name="round_index_query",
        grid=(q.size // SIZE,),
        grid_names=("vector",),
        interpret=interpret,
    )
    return run(q.reshape(-1, SIZE)).reshape(q.shape)


@primitive
def _store_permuted(ref, x) -> None:
    """`ref = permute_dims(x)`, head by head; ref [512] in global memory."""
    ref[...] = permute_dims(x.reshape(HEADS, DIM)).reshape(SIZE)


@_store_permuted.mosaic
def _(ref, x):
    # Where a thread's values go, from the first on: they differ in the bits of the channel that a thread holds.
    target = np.argsort(permute_dims(np.arange(DIM)))
    held = SIZE // vectors.THREADS
    steps = [int(target[i] - target[0]) for i in range(held)]
    # The other bits of a channel, and what each adds.
    bits = [(1 << b, int(target[1 << b])) for b in range(DIM.bit_length() - 1) if 1 << b >= held]

    def emit(ref, x):
        (first,) = x.layout.linear_thread_idxs()
        first = mlir.to_i64(first)
        place = arith.andi(first, mlir.i64(-DIM))
        for bit, moved in bits:
            is_set = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(first, mlir.i64(bit)), mlir.i64(0))
            place = arith.addi(place, arith.select(is_set, mlir.i64(moved), mlir.i64(0)))
        for value, step in zip(mlir.values(x), steps, strict=True):
            there = arith.addi(place, mlir.i64(step))
            llvm.store(value, mlir.at(mlir.global_pointer(ref), there, ir.BF16Type.get()))

    vectors.inline(emit, ref, x)
