"""A layer's queries and its key-value row, RMS-normed and rotated in one launch: a warp has a row."""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import kv_rows, mlir_helpers as mlir
from pallas_kernels.common.checks import check_array
from pallas_kernels.common.deterministic_math import cos_sin, inverse_sqrt, product, round_bfloat16
from pallas_kernels.common.primitive import kernel, primitive
from pallas_kernels.common.support import MULTIPROCESSORS, traced_once


DIM = kv_rows.ROW_DIM
# Rows that a warp loads before it computes, where there are many.
MOST_AT_ONCE = 4
# As many blocks as run at once; a token has one for its key-value row, and at least one for its queries.
BLOCKS = 4 * MULTIPROCESSORS


@traced_once("eps")
def norm_rope(
    q: jax.Array,
    kv: jax.Array,
    weight: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`rope(q / rms(q))` and `rope(weight * kv / rms(kv))`, rounded after the norm and after the rotation.

    Args:
      q: [T, H, 512] bfloat16.
      kv: [T, 512] bfloat16.
      weight: [512] float32, of kv's norm.
      positions: [T] int32, 0 .. 2**20.
      inv_freq: [P] float32, at most 1, P at most 256: the last 2 * P channels are rotated, in interleaved pairs.
      eps: added to the mean square.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      Both, in their shapes and dtypes.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    check_array("q", q, jnp.bfloat16, None, None, DIM)
    tokens, heads, _ = q.shape
    check_array("kv", kv, jnp.bfloat16, tokens, DIM)
    check_array("weight", weight, jnp.float32, DIM)
    check_array("positions", positions, jnp.int32, tokens)
    check_array("inv_freq", inv_freq, jnp.float32, None)
    (pairs,) = inv_freq.shape
    if pairs > DIM // 2:
        raise NotImplementedError(f"the kernel rotates up to {DIM} channels, got {2 * pairs}")
    if tokens == 0:
        return q, kv

    at_once = MOST_AT_ONCE if tokens * heads >= MULTIPROCESSORS * kv_rows.WARPS * MOST_AT_ONCE else 1
    steps = -(-heads // (kv_rows.WARPS * at_once))
    parts = min(steps, -(-BLOCKS // tokens))
    rows_shape = kv_rows.WARPS, kv_rows.GROUPS, kv_rows.GROUP

    def body(q, kv, weight, positions, inv_freq, q_out, kv_out):
        token, part = lax.axis_index("token"), lax.axis_index("part")
        channel = kv_rows.iota(rows_shape, 1) * kv_rows.GROUP + kv_rows.iota(rows_shape, 2)
        # Channels before the rotated ones: frequency 0, so an angle of 0, which changes nothing.
        frequency = _take(inv_freq, (channel - (DIM - 2 * pairs)) >> 1)
        cos, sin = cos_sin(frequency * positions[token].astype(jnp.float32))
        warp = kv_rows.iota((kv_rows.WARPS,), 0)

        def load(ref, row):
            return kv_rows.load_rows(ref, jnp.maximum(row, 0), rows_shape).astype(jnp.float32)

        def finish(x, row, weight, out):
            mean = product(jnp.sum(jnp.sum(product(x, x), axis=2), axis=1), 1 / DIM)
            x = x * lax.broadcast_in_dim(inverse_sqrt(mean + eps), x.shape, (0,))
            kv_rows.store_rows(out, row, _rotate(x if weight is None else weight * x, cos, sin, DIM - 2 * pairs))

        @pl.when(part < parts)
        def _():
            each = -(-steps // parts)

            @pl.loop(part * each, jnp.minimum((part + 1) * each, steps))
            def _(step):
                head = step * (kv_rows.WARPS * at_once) + warp
                heads_at_once = [head + i * kv_rows.WARPS for i in range(at_once)]
                rows = [jnp.where(head < heads, token * heads + head, -1) for head in heads_at_once]
                loaded = [load(q, row) for row in rows]
                for x, row in zip(loaded, rows, strict=True):
                    finish(x, row, None, q_out)

        @pl.when(part == parts)
        def _():
            row = jnp.where(warp == 0, token, -1)
            finish(load(kv, row), row, _take(weight, channel), kv_out)

    run = kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((x.size // DIM, DIM), x.dtype) for x in (q, kv)],
        kernel_name="norm_rope",
        grid=(tokens, parts + 1),
        grid_names=("token", "part"),
        interpret=interpret,
    )
    q_out, kv_out = run(q.reshape(-1, DIM), kv, weight, positions, inv_freq)
    return q_out.reshape(q.shape), kv_out


@primitive
def _take(ref, index: jax.Array) -> jax.Array:
    """`ref[index]` of float32 in global memory, for rows of indices in the layout of `kv_rows`; 0 where negative."""
    return jnp.where(index >= 0, ref[...][jnp.maximum(index, 0)], 0.0)


@_take.mosaic
def _(ref, index):
    def emit(ref, index):
        for register in index.registers.flat:
            yield mlir.pack(one(ref, at) for at in mlir.values(register))

    def one(ref, at):
        exists = arith.cmpi(arith.CmpIPredicate.sge, at, mlir.i32(0))
        place = mlir.to_i64(arith.select(exists, at, mlir.i32(0)))
        value = llvm.load(mlir.f32_type(), mlir.at(mlir.global_pointer(ref), place, mlir.f32_type()))
        return arith.select(exists, value, mlir.f32(0.0))

    returns = jax.ShapeDtypeStruct(index.shape, jnp.float32)
    return mlir.inline(emit, ref, index, layout=lambda _: kv_rows.VALUES, returns=returns)


@primitive
def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, first: int) -> jax.Array:
    """Rows [n, 8, 64] float32, rounded to bfloat16, interleaved pairs rotated from channel `first` on, and rounded."""
    rounded = round_bfloat16(x)
    other = rounded.reshape(*x.shape[:-1], -1, 2)[..., ::-1].reshape(x.shape)
    sign = jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) & 1 == 0, -1.0, 1.0)
    turned = product(rounded, cos) + product(other, sin * sign)
    return turned.astype(jnp.bfloat16)


@_rotate.mosaic
def _(x, cos, sin, first):
    def rounded(even, odd):
        return mlir.ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", odd, even, results=mlir.int_type(), pure=True)

    def times(x, y):
        # Never contracted to an FMA with what follows.
        return mlir.ptx("mul.rn.f32 $0, $1, $2;", x, y, results=mlir.f32_type(), pure=True)

    def turn(word, cos, sin):
        even = arith.bitcast(mlir.f32_type(), arith.shli(word, mlir.i32(16)))
        odd = arith.bitcast(mlir.f32_type(), arith.andi(word, mlir.i32(0xFFFF0000)))
        return rounded(arith.subf(times(even, cos), times(odd, sin)), arith.addf(times(odd, cos), times(even, sin)))

    def emit(x, cos, sin):
        kind = mlir.vector_type(8, ir.BF16Type.get())
        for at, position in zip(np.ndindex(x.registers.shape), _last_groups(x), strict=True):
            values, factors = mlir.values(x.registers[at]), (mlir.values(y.registers[at]) for y in (cos, sin))
            words = [rounded(*values[i : i + 2]) for i in range(0, 8, 2)]
            if position >= first // kv_rows.GROUP:
                cosines, sines = factors
                words = [turn(word, cosines[2 * i], sines[2 * i]) for i, word in enumerate(words)]
            yield vector.bitcast(kind, mlir.pack(words))

    returns = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    return mlir.inline(emit, x, cos, sin, layout=lambda _: kv_rows.VALUES, returns=returns)


def _last_groups(x):
    """The last group of which each register holds values: four lanes' worth of consecutive groups."""
    halves = kv_rows.GROUPS // 4
    return [4 * (i % halves) + 3 for i in range(x.registers.size)]
