"""Copies quantized rows to bfloat16 tiles in shared memory, 16 rows (a unit) at a time, through registers.

    load_unit    global memory -> registers: codes, RoPE values and scales
    store_unit   registers -> shared memory: bfloat16, in the swizzled 8 x 64 tiles that `wgmma` reads

They are separate so that several units are in flight at once. A warp holds 4 rows of a unit, 8 lanes to a row, and a
lane 8 values of every group of 64.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_kernels.formats.kv_rows import GROUP, ROW_DIM
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.mgpu import mlir, thread_ops, transaction_barriers
from pallas_kernels.mgpu.mlir import U32
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import primitive


UNIT = 16
# Bytes of a dequantized unit and its biases, as sent to the other block of a cluster.
UNIT_BYTES = UNIT * (2 * ROW_DIM + 4)


def _word_layout(words):
    """The layout of [16, 8 * words] 32-bit words: warp w holds rows 4w .. 4w + 3, 8 lanes to a row."""
    tiling = plgpu.Tiling(((UNIT, 8 * words), (4, 8 * words), (words,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


_CODES = _word_layout(2)
_ROPE = _word_layout(4)
PER_ROW = _CODES.reduce(1)
_INDICES = plgpu.ShapeDtypeStruct((UNIT,), jnp.int32, PER_ROW)


def iota() -> jax.Array:
    """Row numbers 0 .. 15 of a unit."""
    return plgpu.broadcasted_iota(jnp.int32, (UNIT,), 0, layout=PER_ROW)


def splat(x: jax.Array) -> jax.Array:
    """Broadcasts a scalar to the rows of a unit."""
    return plgpu.layout_cast(jnp.broadcast_to(x, (UNIT,)), PER_ROW)


@primitive
def take(array_gmem, index: jax.Array) -> jax.Array:
    """Reads `array.reshape(-1)[index]` of an int32 array, one index for each row of a unit."""
    return array_gmem[...].reshape(-1)[index]


@mlir.emits(take, None, PER_ROW, returns=_INDICES)
def _emit_take(array_gmem, index):
    return _load(mlir.at(mlir.global_pointer(array_gmem), U32(mlir.scalar(index)) * 4), 1)


@primitive
def load_unit(first_pools, second_pools, use_second: jax.Array, row: jax.Array, layout: RowLayout) -> list[jax.Array]:
    """Starts to load the rows of a unit, for `store_unit`, from the second pools if `use_second` is not 0.

    The pools are (nope, rope, scale) in global memory, as in `Paged`. `row` is [16] int32 row numbers, with all axes of
    a pool but the last merged; -1 = none, which is read as zeros.
    """
    first_rows, second_rows = (_dequantize(pools, row, layout) for pools in (first_pools, second_pools))
    return [jnp.where(use_second != 0, second_rows, first_rows)]


def _unit_types(first_pools, second_pools, use_second, row, layout):
    """Returns the types of a unit's codes, RoPE values and words of scales, for the arguments of `load_unit`."""
    return (
        plgpu.ShapeDtypeStruct((UNIT, layout.nope_dim // 4), jnp.int32, _CODES),
        plgpu.ShapeDtypeStruct((UNIT, layout.rope_dim // 2), jnp.int32, _ROPE),
        *[_INDICES] * _scale_words(layout),
    )


def _scale_words(layout):
    """Returns the number of 32-bit words of a row's scales."""
    return 1 if layout.scale_block is None else 2


@mlir.emits(load_unit, layout=lambda _: PER_ROW, returns=_unit_types)
def _emit_load_unit(first_pools, second_pools, use_second, row, layout):
    is_second = arith.cmpi(arith.CmpIPredicate.ne, use_second.value, mlir.i32(0))
    row = mlir.scalar(row)
    lane = mlir.thread() % 8

    def row_pointer(pool, row_bytes, lane_bytes):
        base = arith.select(is_second, *(mlir.global_pointer(pools[pool]) for pools in (second_pools, first_pools)))
        return mlir.at(base, mlir.multiply_add(mlir.to_i64(row), row_bytes, mlir.to_u64(lane * lane_bytes)))

    # The scale comes first because it is needed first.
    scale_words = _scale_words(layout)
    scales = _load(row_pointer(2, 4 * scale_words, 0), scale_words, row=row)
    pointer = row_pointer(0, layout.nope_dim, 8)
    codes = [x for g in range(layout.nope_dim // GROUP) for x in _load(pointer, 2, offset=g * GROUP, row=row)]
    pointer = row_pointer(1, 2 * layout.rope_dim, 16)
    values = [x for g in range(layout.rope_dim // GROUP) for x in _load(pointer, 4, offset=2 * g * GROUP, row=row)]
    return codes, values, *([scale] for scale in scales)


@primitive
def store_unit(
    tile_smem, bias_smem, first: Any, unit: list[jax.Array], row: jax.Array, layout: RowLayout, peer: Any = None
) -> None:
    """Dequantizes a unit from `load_unit` into rows first .. first + 15 of `tile_smem`, [rows, 512] bfloat16.

    Sets the rows of `bias_smem`, [rows] float32, to 0, or to -inf where there is no row. `peer` is None or (number of
    another block of the cluster, one of this block's `transaction_barriers`), to send the same `UNIT_BYTES` also to
    that block, where they count on its barrier.
    """
    tile_smem[pl.ds(first, UNIT)] = unit[0]
    bias_smem[pl.ds(first, UNIT)] = jnp.where(row >= 0, 0.0, -jnp.inf).astype(jnp.float32)


@mlir.emits(store_unit, plgpu.RefType(TRANSFORMS), None, None, _CODES, _ROPE, layout=lambda _: PER_ROW)
def _emit_store_unit(tile_smem, bias_smem, first, unit, row, layout, peer=None):
    decode = _decode_row_scale if layout.scale_block is None else _decode_block_scales
    codes, rope, *scales = unit
    scales = [mlir.scalar(scale) for scale in scales]
    chunk, start, own_row = unit_offsets(tile_smem, ROW_DIM)
    start = mlir.at(start, first * (2 * ROW_DIM))
    bias = mlir.at(mlir.at(mlir.shared_pointer(bias_smem), own_row * 4), first * 4)
    send, send_bias = (None, None) if peer is None else _senders(start, bias, *peer)

    def put(values, group):
        offset = 16 * GROUP * group
        llvm.store(mlir.pack(values), mlir.at(start, offset), alignment=16)
        if send is not None:
            send(offset, values)

    for group, register in enumerate(codes.registers.flat):
        put(decode(mlir.values(register), scales, group), group)
    for group, register in enumerate(rope.registers.flat, start=layout.nope_dim // GROUP):
        put(mlir.values(register), group)
    store_bias(bias, chunk, U32(mlir.scalar(row)).is_at_least(0), send_bias)


def _senders(start, bias, block, barrier):
    """Functions that send a group's values, and a bias, to the same places of another block."""
    pointers = start, bias, mlir.shared_pointer(barrier)
    addresses = (llvm.ptrtoint(mlir.int_type(), pointer) for pointer in pointers)
    peer_start, peer_bias, peer_barrier = (thread_ops.peer(address, block) for address in addresses)
    return (
        lambda offset, values: transaction_barriers.send(peer_start + offset, values, peer_barrier),
        lambda value: transaction_barriers.send(peer_bias, [value], peer_barrier),
    )


def unit_offsets(tile, columns: int) -> tuple[U32, Any, U32]:
    """Returns (chunk, pointer, row): what this thread holds of a unit in a memref [rows, columns] with `TRANSFORMS`.

    It holds the `chunk`-th 16 bytes of every group of row `row`; `pointer` leads to those of group 0, for a unit at the
    start of the tile.
    """
    thread = mlir.thread()
    warp = thread // 32
    lane = thread % 32
    chunk = lane % 8
    row = warp * 4 + lane // 8
    line = row % 8
    offset = row // 8 * (2 * 8 * columns) + line * (2 * GROUP) + (chunk ^ line) * 16
    return chunk, mlir.at(mlir.shared_pointer(tile), offset), row


def store_bias(bias, chunk: U32, exists: U32, send: Any = None) -> None:
    """Writes the bias of this thread's row, 0 if it exists and else -inf, and passes it to `send` if there is one."""
    value = arith.select(exists.value, mlir.f32(0.0), mlir.f32(-np.inf))
    with thread_ops.when(chunk.equals(0)):
        llvm.store(value, bias)
        if send is not None:
            send(value)


@primitive
def fence() -> None:
    """Makes writes to shared memory visible to `wgmma`: this thread's own, or those that it waited for."""


@mlir.emits(fence)
def _():
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def _dequantize(pools, row, layout):
    """Returns the [16, 512] values of rows, zeros for none."""
    nope, rope, scale = (pool[...].reshape(-1, pool.shape[-1])[jnp.maximum(row, 0)] for pool in pools)
    values = lax.bitcast_convert_type(nope, jnp.float8_e4m3fn).astype(jnp.float32)
    if layout.scale_block is None:
        scale = jnp.broadcast_to(scale, values.shape)
    else:
        exponent = scale[:, : layout.nope_dim // layout.scale_block].astype(jnp.int32) << 23
        scale = jnp.repeat(lax.bitcast_convert_type(exponent, jnp.float32), layout.scale_block, axis=1)
    values = jnp.concatenate([(values * scale).astype(jnp.bfloat16), rope], axis=1)
    return jnp.where((row >= 0)[:, None], values, jnp.zeros((), jnp.bfloat16))


# Turns two E4M3 codes into the bfloat16 pair of their values times 2**-120, subnormals included: sign-extends each byte
# to 16 bits, moves its 7 bits to the lowest exponent and highest mantissa bits of bfloat16, and keeps those and a sign.
_SPREAD_PAIR = "prmt.b32 {to}, ${word}, 0, {select}; shl.b32 {to}, {to}, 4; and.b32 {to}, {to}, 0x87F087F0;"
_REGISTERS = {"a": (4, "0x9180"), "b": (4, "0xB3A2"), "c": (5, "0x9180"), "d": (5, "0xB3A2")}
# Decodes the 8 codes of input words 4 and 5 to registers a .. d.
_SPREAD = "".join(_SPREAD_PAIR.format(to=to, word=word, select=select) for to, (word, select) in _REGISTERS.items())


def _decode_block_scales(codes, scales, group):
    """Decodes 8 values and multiplies by their group's power of two, in two exact steps that cannot overflow."""
    code = "{ .reg .b32 a, b, c, d, k; mov.b32 k, 0x7B807B80;" + _SPREAD
    for i, x in enumerate(_REGISTERS):
        code += f"mul.rn.bf16x2 {x}, {x}, k; mul.rn.bf16x2 ${i}, {x}, $6;"
    # The scale's byte as the exponent of two bfloat16 values.
    factor = (U32(scales[group // 4]) >> 8 * (group % 4) & 0xFF) * 0x00800080
    return mlir.ptx(code + "}", *codes, factor, results=[mlir.int_type()] * 4, pure=True)


def _decode_row_scale(codes, scales, group):
    """Decodes 8 values and multiplies by the row's float32 factor, each rounded once."""
    code = "{ .reg .b32 a, b, c, d; .reg .f32 l, h;" + _SPREAD
    for i, x in enumerate(_REGISTERS):
        code += f"shl.b32 l, {x}, 16; and.b32 h, {x}, 0xFFFF0000;"
        code += "mul.rn.f32 l, l, 0f7B800000; mul.rn.f32 h, h, 0f7B800000; mul.rn.f32 l, l, $6; mul.rn.f32 h, h, $6;"
        code += f"cvt.rn.bf16x2.f32 ${i}, h, l;"
    factor = arith.bitcast(mlir.f32_type(), scales[0])
    return mlir.ptx(code + "}", *codes, factor, results=[mlir.int_type()] * 4, pure=True)


def _load(base, words, *, offset=0, row=None):
    """Loads 32-bit words from base + offset bytes, zeros where row < 0. Loads stay in program order."""
    targets = ", ".join(f"${i}" for i in range(words))
    kind, targets = (f".v{words}.b32", f"{{{targets}}}") if words > 1 else (".b32", targets)
    load = f"ld.global.nc.L1::no_allocate{kind} {targets}, [${words} + {offset}];"
    results = [mlir.int_type()] * words
    if row is None:
        return mlir.ptx(load, base, results=results)
    zero = "".join(f"mov.b32 ${i}, 0;" for i in range(words))
    guarded = f"{{ .reg .pred p; setp.ge.s32 p, ${words + 1}, 0; {zero} @p {load} }}"
    return mlir.ptx(guarded, base, row, results=results)
