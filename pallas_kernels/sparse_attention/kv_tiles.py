"""Quantised rows from global memory to tiles of bfloat16 rows in shared memory, 16 rows at a time, through registers.

A unit is 16 rows. A warp holds 4 of them: 8 lanes to a row, each with 8 values of every group of 64. Loads and stores
are apart, so that several units are on their way at once. A store leaves the values where `wgmma` wants them: in tiles
of 8 x 64 values with the 128-byte swizzle.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.formats.kv_rows import GROUP, ROW_DIM
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.mgpu import mlir, thread_ops, transaction_barriers
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import primitive


UNIT = 16
# Of a unit, with its biases, to another block.
SENT_BYTES = UNIT * (2 * ROW_DIM + 4)


def _word_layout(words):
    """Of [16, 8 * words] 32-bit words: warp w holds rows 4w .. 4w + 3, 8 lanes to a row."""
    tiling = plgpu.Tiling(((UNIT, 8 * words), (4, 8 * words), (words,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


_CODES = _word_layout(2)
_ROPE = _word_layout(4)
PER_ROW = _CODES.reduce(1)
_INDICES = plgpu.ShapeDtypeStruct((UNIT,), jnp.int32, PER_ROW)


def iota() -> jax.Array:
    """0 .. 15, one for each row of a unit."""
    return plgpu.broadcasted_iota(jnp.int32, (UNIT,), 0, layout=PER_ROW)


def splat(x: jax.Array) -> jax.Array:
    """A scalar for each row of a unit."""
    return plgpu.layout_cast(jnp.broadcast_to(x, (UNIT,)), PER_ROW)


@primitive
def opaque(x: jax.Array) -> jax.Array:
    """A scalar int32 of which the compiler knows nothing."""
    return x


@opaque.mosaic
def _(x):
    return mlir.inline(lambda x: mlir.ptx("mov.b32 $0, $1;", mlir.scalar(x), results=mlir.int_type()), x, returns=x)


@primitive
def take(ref, index: jax.Array) -> jax.Array:
    """`ref[index]` of an int32 array in global memory, its axes merged, for each row of a unit."""
    return ref[...].reshape(-1)[index]


@take.mosaic
def _(ref, index):
    def emit(ref, index):
        return _load(mlir.at(mlir.global_pointer(ref), arith.muli(mlir.scalar(index), mlir.i32(4))), 1)

    return mlir.inline(emit, ref, (index, PER_ROW), returns=_INDICES)


@primitive
def load_unit(pools, others, use_others: jax.Array, row: jax.Array, layout: RowLayout) -> list[jax.Array]:
    """Starts to load rows for `store_unit` from `pools`, or from `others` where the int32 scalar is not 0.

    Both are (nope, rope, scale) in global memory, as in `Paged`. `row`: [16] int32 row numbers, all axes of a pool but
    the last merged; -1 = none, which is read as zeros.
    """
    return [jnp.where(use_others != 0, _dequantise(others, row, layout), _dequantise(pools, row, layout))]


@load_unit.mosaic
def _(pools, others, use_others, row, layout):
    scale_words = 1 if layout.scale_block is None else 2
    returns = (
        plgpu.ShapeDtypeStruct((UNIT, layout.nope_dim // 4), jnp.int32, _CODES),
        plgpu.ShapeDtypeStruct((UNIT, layout.rope_dim // 2), jnp.int32, _ROPE),
        *[_INDICES] * scale_words,
    )

    def emit(nope, rope, scale, nope_2, rope_2, scale_2, use_others, row):
        second = arith.cmpi(arith.CmpIPredicate.ne, mlir.scalar(use_others), mlir.i32(0))
        row = mlir.scalar(row)
        lane = U32(mlir.thread()) % 8

        def start(ref, other, row_bytes, lane_bytes):
            base = arith.select(second, mlir.global_pointer(other), mlir.global_pointer(ref))
            offset = arith.muli(mlir.to_i64(row), mlir.i64(row_bytes))
            offset = arith.addi(offset, arith.extui(mlir.int_type(64), (lane * lane_bytes).value))
            return mlir.at(base, offset)

        # The scale comes first because it is needed first.
        at = start(scale, scale_2, 4 * scale_words, 0)
        scales = _load(at, scale_words, row=row)
        at = start(nope, nope_2, layout.nope_dim, 8)
        codes = [x for g in range(layout.nope_dim // GROUP) for x in _load(at, 2, offset=g * GROUP, row=row)]
        at = start(rope, rope_2, 2 * layout.rope_dim, 16)
        values = [x for g in range(layout.rope_dim // GROUP) for x in _load(at, 4, offset=2 * g * GROUP, row=row)]
        return codes, values, *([scale] for scale in scales)

    return list(mlir.inline(emit, *pools, *others, use_others, (row, PER_ROW), returns=returns))


@primitive
def store_unit(
    tile, bias, first: Any, unit: list[jax.Array], row: jax.Array, layout: RowLayout, other: Any = None
) -> None:
    """Writes a unit's values to rows first .. first + 15 of a tile, and to `bias` 0, or -inf where there is no row.

    In shared memory, `tile` is [rows, 512] bfloat16 with `TRANSFORMS`, and `bias` [rows] float32; `first` is a multiple
    of 16, int32, and `row` what the unit was loaded with. `other`: (block of the cluster, int32; one of this block's
    `transaction_barriers`): the same, `SENT_BYTES`, is sent to that block, and counts on its barrier; None: to none.
    """
    tile[pl.ds(first, UNIT)] = unit[0]
    bias[pl.ds(first, UNIT)] = jnp.where(row >= 0, 0.0, -jnp.inf).astype(jnp.float32)


@store_unit.mosaic
def _(tile, bias, first, unit, row, layout, other=None):
    def emit(tile, bias, first, codes, rope, *rest):
        *scales, row = map(mlir.scalar, rest[: len(per_row)])
        first = U32(mlir.scalar(first))
        chunk, start, at = unit_places(tile, ROW_DIM)
        start = mlir.at(start, (first * (2 * ROW_DIM)).value)
        bias = mlir.at(mlir.at(mlir.shared_pointer(bias), (at * 4).value), (first * 4).value)
        send_bias = None
        if other is not None:
            block, barrier = rest[len(per_row) :]
            pointers = start, bias, mlir.shared_pointer(barrier)
            addresses = (U32(llvm.ptrtoint(mlir.int_type(), pointer)) for pointer in pointers)
            there, bias_there, counted = (thread_ops.peer(x, U32(mlir.scalar(block))) for x in addresses)

            def send_bias(value):
                transaction_barriers.send(bias_there, [value], counted)

        def put(values, group):
            offset = 16 * GROUP * group
            llvm.store(mlir.pack(values), mlir.at(start, offset), alignment=16)
            if other is not None:
                transaction_barriers.send(there + offset, values, counted)

        decode = _decode_row_scale if layout.scale_block is None else _decode_block_scales
        groups = layout.nope_dim // GROUP
        for group, register in enumerate(codes.registers.flat):
            put(decode(mlir.values(register), scales, group), group)
        for group, register in enumerate(rope.registers.flat, start=groups):
            put(mlir.values(register), group)
        store_bias(bias, chunk, arith.cmpi(arith.CmpIPredicate.sge, row, mlir.i32(0)), send_bias)

    codes, rope, *scales = unit
    per_row = [(x, PER_ROW) for x in (*scales, row)]
    operands = jnp.int32(first), (codes, _CODES), (rope, _ROPE), *per_row, *(other or ())
    mlir.inline(emit, (tile, plgpu.RefType(TRANSFORMS)), bias, *operands)


def unit_places(tile, columns: int) -> tuple[U32, Any, U32]:
    """Of this thread: which 16 bytes of every group it holds, where those of group 0 are in a unit, and its row of it.

    `tile` is a memref [rows, columns] with `TRANSFORMS`. A unit's first row only adds a constant to addresses.
    """
    thread = U32(mlir.thread())
    warp, lane = thread // 32, thread % 32
    chunk = lane % 8
    at = warp * 4 + lane // 8
    line = at % 8
    offset = at // 8 * (2 * 8 * columns) + line * (2 * GROUP) + (chunk ^ line) * 16
    return chunk, mlir.at(mlir.shared_pointer(tile), offset.value), at


def store_bias(bias, chunk: U32, exists, send: Any = None) -> None:
    """Writes 0 for this thread's row of a unit, to which `bias` points, or -inf where it does not exist.

    `send`, if not None, is called with it.
    """
    value = arith.select(exists, mlir.f32(0.0), mlir.f32(-np.inf))
    with mgpu.utils.when(chunk.equals(0).value):
        llvm.store(value, bias)
        if send is not None:
            send(value)


@primitive
def fence() -> None:
    """Shows writes of shared memory to `wgmma`: this thread's before it arrives at a barrier, or what it waited for."""


@fence.mosaic
def _():
    mlir.inline(lambda: nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta))


def _dequantise(pools, row, layout):
    """[16, 512] values of rows, zeros for none."""
    nope, rope, scale = (pool[...].reshape(-1, pool.shape[-1])[jnp.maximum(row, 0)] for pool in pools)
    values = lax.bitcast_convert_type(nope, jnp.float8_e4m3fn).astype(jnp.float32)
    if layout.scale_block is None:
        scale = jnp.broadcast_to(scale, values.shape)
    else:
        exponent = scale[:, : layout.nope_dim // layout.scale_block].astype(jnp.int32) << 23
        scale = jnp.repeat(lax.bitcast_convert_type(exponent, jnp.float32), layout.scale_block, axis=1)
    values = jnp.concatenate([(values * scale).astype(jnp.bfloat16), rope], axis=1)
    return jnp.where((row >= 0)[:, None], values, jnp.zeros((), jnp.bfloat16))


# Two E4M3 codes to the bfloat16 pair of their values times 2**-120, subnormals included: sign-extend each byte to 16
# bits, move its 7 bits to where bfloat16 has its lowest exponent and highest mantissa bits, and keep those and a sign.
_SPREAD = "prmt.b32 {to}, {word}, 0, {select}; shl.b32 {to}, {to}, 4; and.b32 {to}, {to}, 0x87F087F0;"
_LOW, _HIGH = "0x9180", "0xB3A2"
_REGISTERS = "a", "b", "c", "d"


def _spread(first_input):
    """PTX for 8 codes in two input words, to registers a .. d."""
    return "".join(
        _SPREAD.format(to=to, word=f"${first_input + i // 2}", select=(_LOW, _HIGH)[i % 2])
        for i, to in enumerate(_REGISTERS)
    )


def _decode_block_scales(codes, scales, group):
    """8 values times their group's power of two: two exact products, so that no exponent is out of range."""
    body = _spread(4) + "".join(
        f"mul.rn.bf16x2 {x}, {x}, k; mul.rn.bf16x2 ${i}, {x}, $6;" for i, x in enumerate(_REGISTERS)
    )
    # The scale's byte, twice, as the exponent of bfloat16.
    factor = (U32(scales[group // 4]) >> 8 * (group % 4) & 0xFF) * 0x00800080
    return _decode(codes, factor.value, "{ .reg .b32 a, b, c, d, k; mov.b32 k, 0x7B807B80;" + body + "}")


def _decode_row_scale(codes, scales, group):
    """8 values times the row's float32 factor, each rounded once."""
    body = _spread(4)
    for i, x in enumerate(_REGISTERS):
        body += f"shl.b32 l, {x}, 16; and.b32 h, {x}, 0xFFFF0000;"
        body += "mul.rn.f32 l, l, 0f7B800000; mul.rn.f32 h, h, 0f7B800000; mul.rn.f32 l, l, $6; mul.rn.f32 h, h, $6;"
        body += f"cvt.rn.bf16x2.f32 ${i}, h, l;"
    factor = arith.bitcast(mlir.f32_type(), scales[0])
    return _decode(codes, factor, "{ .reg .b32 a, b, c, d; .reg .f32 l, h;" + body + "}")


def _decode(codes, factor, code):
    """Four pairs of bfloat16 from two words of codes."""
    return mlir.ptx(code, *codes, factor, results=[mlir.int_type()] * 4, pure=True)


def _load(base, words, *, offset=0, row=None):
    """32-bit words of global memory at base + offset bytes; zeros where row < 0. In the order written."""
    targets = ", ".join(f"${i}" for i in range(words))
    kind, targets = (f".v{words}.b32", f"{{{targets}}}") if words > 1 else (".b32", targets)
    load = f"ld.global.nc.L1::no_allocate{kind} {targets}, [${words} + {offset}];"
    results = [mlir.int_type()] * words
    if row is None:
        return mlir.ptx(load, base, results=results)
    zero = "".join(f"mov.b32 ${i}, 0;" for i in range(words))
    guarded = f"{{ .reg .pred p; setp.ge.s32 p, ${words + 1}, 0; {zero} @p {load} }}"
    return mlir.ptx(guarded, base, row, results=results)
