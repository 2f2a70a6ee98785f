"""A layer's queries and its key-value row, RMS-normed, rotated and stored in one launch: a warp has a row."""

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.formats import kv_rows
from pallas_kernels.formats.exact_math import cos_sin, inverse_sqrt, product, round_bfloat16
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.formats.row_encoder import store_quantised
from pallas_kernels.mgpu import mlir
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import kernel, primitive
from pallas_kernels.runtime.lowering_cache import cached_trace


DIM = kv_rows.ROW_DIM
# Rows that a warp loads before it computes, where there are many.
MAX_AT_ONCE = 4
# As many blocks as run at once; a token has at least one for its queries, and a warp of one for its key-value row.
BLOCKS = 4 * MULTIPROCESSORS


@cached_trace("eps")
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
      positions: [T] int32, up to 2**20; negative ones are taken for 0.
      inv_freq: [P] float32, at most 1, P at most 256: the last 2 * P channels are rotated, in interleaved pairs.
      eps: added to the mean square.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      Both, in their shapes and dtypes.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    _check(q, kv, weight, positions, inv_freq)
    if len(q) == 0:
        return q, kv

    def place(token):
        return jnp.where(token < len(q), token, -1)

    def store(row, at, kv_out):
        kv_rows.store_rows(kv_out, at, row)

    q, kv = _launch("norm_rope", place, store, [kv], (), eps, interpret, q, kv, weight, positions, inv_freq)
    return q, kv


@cached_trace("layout", "eps", writes=True)
def norm_rope_append(
    q: jax.Array,
    kv: jax.Array,
    weight: jax.Array,
    slots: jax.Array,
    positions: jax.Array,
    inv_freq: jax.Array,
    layer: jax.Array,
    nope: jax.Array,
    rope: jax.Array,
    scale: jax.Array,
    *,
    layout: RowLayout,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`norm_rope`, whose key-value rows `append_swa` stores, in one launch: the same bits.

    Args:
      q, kv, weight, inv_freq, eps: as in `norm_rope`.
      slots, positions, layer, nope, rope, scale, layout: as in `append_swa`.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      (q, nope, rope, scale): the queries, and the pools updated, in place when the caller donates them.

    Raises:
      NotImplementedError: a layout, shape or dtype is not one of these.
    """
    kv_rows.check_row_pools(layout, nope, rope, scale)
    _check(q, kv, weight, positions, inv_freq)
    check_array("slots", slots, jnp.int32, len(q))
    if len(q) == 0:
        return q, nope, rope, scale

    def place(token, slots, positions, layer, *_):
        return kv_rows.ring_rows(token, slots, positions, layer, nope.shape)

    def store(row, at, slots, positions, layer, *pools):
        store_quantised(row.astype(jnp.float32), pools, at, layout)

    pools = [nope, rope, scale]
    refs = [jax.new_ref(pool.reshape(-1, pool.shape[-1])) for pool in pools]
    written = slots, positions, layer.reshape(1), *refs
    (q,) = _launch("norm_rope_append", place, store, [], written, eps, interpret, q, kv, weight, positions, inv_freq)
    nope, rope, scale = (jax.freeze(ref).reshape(pool.shape) for ref, pool in zip(refs, pools, strict=True))
    return q, nope, rope, scale


def _check(q, kv, weight, positions, inv_freq):
    check_array("q", q, jnp.bfloat16, None, None, DIM)
    check_array("kv", kv, jnp.bfloat16, len(q), DIM)
    check_array("weight", weight, jnp.float32, DIM)
    check_array("positions", positions, jnp.int32, len(q))
    check_array("inv_freq", inv_freq, jnp.float32, None)
    check_rules({f"up to {DIM} channels to rotate, got {2 * len(inv_freq)}": 2 * len(inv_freq) <= DIM})


def _launch(name, place, store, more_out, operands, eps, interpret, q, kv, weight, positions, inv_freq):
    """Rotated queries, and what else has the shapes and dtypes of `more_out`.

    `store(rows [4, 8, 64] bfloat16, place(tokens [4], *operands), *operands, *more_out)` is called with rows of four
    tokens, a warp's each; numbers from T on are of no token.
    """
    (tokens, heads, _), pairs = q.shape, len(inv_freq)
    at_once = MAX_AT_ONCE if tokens * heads >= MULTIPROCESSORS * kv_rows.WARPS * MAX_AT_ONCE else 1
    steps = -(-heads // (kv_rows.WARPS * at_once))
    parts = min(steps, -(-BLOCKS // tokens))
    each, kv_blocks = -(-steps // parts), -(-tokens // kv_rows.WARPS)
    rows_shape = kv_rows.WARPS, kv_rows.GROUPS, kv_rows.GROUP

    def body(q, kv, weight, positions, inv_freq, *refs):
        *operands, q_out = refs[: len(refs) - len(more_out)]
        block, warp = lax.axis_index("block"), kv_rows.iota((kv_rows.WARPS,), 0)
        channel = kv_rows.iota(rows_shape, 1) * kv_rows.GROUP + kv_rows.iota(rows_shape, 2)
        # Not in a branch: LLVM would compute it there in pairs of 16 bits, which ptxas adds wrongly.
        pair = (channel - (DIM - 2 * pairs)) >> 1

        def load(ref, row):
            return kv_rows.load_rows(ref, jnp.maximum(row, 0), rows_shape).astype(jnp.float32)

        def rotation(token):
            position = jnp.maximum(kv_rows.load_rows(positions, token, token.shape), 0).astype(jnp.float32)
            # Channels before the rotated ones: frequency 0, so an angle of 0, which changes nothing.
            frequency = _take(inv_freq, pair)
            angle = kv_rows.product(frequency, lax.broadcast_in_dim(position, frequency.shape, (0,)))
            return cos_sin(angle, kv_rows.product)

        def finish(x, weight, cos, sin):
            squares = jnp.sum(jnp.sum(kv_rows.product(x, x), axis=2), axis=1)
            mean = kv_rows.product(squares, 1 / DIM)
            x = x * lax.broadcast_in_dim(inverse_sqrt(mean + eps, kv_rows.product), x.shape, (0,))
            return _rotate(x if weight is None else weight * x, cos, sin, DIM - 2 * pairs)

        @pl.when(block < kv_blocks)
        def _():
            own = block * kv_rows.WARPS + warp
            token = jnp.minimum(own, tokens - 1)
            # What comes from memory is on its way before anything is computed.
            x, at = load(kv, token), place(own, *operands)
            scale = kv_rows.load_rows(weight, jnp.minimum(own, 0), rows_shape)
            row = finish(x, scale, *rotation(token))
            store(row, at, *operands, *refs[len(refs) - len(more_out) :])

        @pl.when(block >= kv_blocks)
        def _():
            token, part = lax.div(block - kv_blocks, parts), lax.rem(block - kv_blocks, parts)

            def loaded(step):
                head = step * (kv_rows.WARPS * at_once) + warp
                heads_at_once = [head + i * kv_rows.WARPS for i in range(at_once)]
                rows = [jnp.where(head < heads, token * heads + head, -1) for head in heads_at_once]
                return [(load(q, row), row) for row in rows]

            def put(rows, rotated):
                for x, row in rows:
                    kv_rows.store_rows(q_out, row, finish(x, None, *rotated))

            # The first rows are on their way while the rotation is computed.
            rows = loaded(part * each)
            rotated = rotation(jnp.where(warp >= 0, token, 0))
            put(rows, rotated)
            pl.loop(part * each + 1, jnp.minimum((part + 1) * each, steps))(lambda step: put(loaded(step), rotated))

    run = kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((x.size // DIM, DIM), x.dtype) for x in (q, *more_out)],
        kernel_name=name,
        grid=(kv_blocks + tokens * parts,),
        grid_names=("block",),
        interpret=interpret,
    )
    q_out, *rest = run(q.reshape(-1, DIM), kv, weight.reshape(1, DIM), positions, inv_freq, *operands)
    return q_out.reshape(q.shape), *rest


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
