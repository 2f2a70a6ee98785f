"""Dequantizes KV rows on the way from global memory to bfloat16 tiles in shared memory, 16 rows (a unit) at a time.

    load_unit    global memory -> registers: codes, RoPE values and scales
    store_unit   registers -> shared memory: bfloat16, in the swizzled 8 x 64 tiles that `wgmma` reads

With two functions, loads of several units can be in flight at once. Each warp of a warpgroup holds 4 rows of a unit,
and 8 lanes share a row. A lane holds 8 values of every group of 64 columns.
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
# Number of bytes of a unit's bfloat16 values and float32 biases, as sent to the other block of a cluster.
UNIT_BYTES = UNIT * (2 * ROW_DIM + 4)


def _word_layout(words):
    """Returns the layout of 32-bit words [16, n] in which a lane holds `words` adjacent words of every `8 * words`.

    Warp w holds rows 4w .. 4w + 3, and 8 lanes share a row.
    """
    tiling = plgpu.Tiling(((UNIT, 8 * words), (4, 8 * words), (words,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


_CODES = _word_layout(2)
_ROPE = _word_layout(4)
PER_ROW = _CODES.reduce(1)
_INDICES = plgpu.ShapeDtypeStruct((UNIT,), jnp.int32, PER_ROW)


def iota() -> jax.Array:
    """Returns the numbers 0 .. 15 of a unit's rows, [16] int32 in the layout PER_ROW."""
    return plgpu.broadcasted_iota(jnp.int32, (UNIT,), 0, layout=PER_ROW)


def splat(x: jax.Array) -> jax.Array:
    """Broadcasts a scalar to [16] in the layout PER_ROW, a value for each row of a unit."""
    return plgpu.layout_cast(jnp.broadcast_to(x, (UNIT,)), PER_ROW)


@primitive
def take(array_gmem, index: jax.Array) -> jax.Array:
    """Loads `array.reshape(-1)[index]` of an int32 array; `index` is [16] int32 in the layout PER_ROW."""
    return array_gmem[...].reshape(-1)[index]


@mlir.emits(take, None, PER_ROW, returns=_INDICES)
def _emit_take(array_gmem, index):
    return _load(mlir.at(mlir.global_pointer(array_gmem), U32(mlir.scalar(index)) * 4), 1)


@primitive
def load_unit(first_pools, second_pools, use_second: jax.Array, row: jax.Array, layout: RowLayout) -> list[jax.Array]:
    """Starts to load the quantized rows of a unit to registers.

    Args:
      first_pools, second_pools: (nope, rope, scale) in global memory, as in `Paged`: E4M3 codes, bfloat16 RoPE
        values, and scales.
      use_second: int32 scalar; 0 to load from `first_pools`, else from `second_pools`.
      row: [16] int32 row numbers in the layout PER_ROW, with all axes of a pool but the last merged; -1 = none, which
        is read as zeros.
      layout: byte layout of a row.

    Returns:
      The unit for `store_unit`: arrays of codes, of RoPE values and of words of scales; a single dequantized array
      [16, 512] bfloat16 if interpreted.
    """
    first_rows, second_rows = (_dequantize(pools, row, layout) for pools in (first_pools, second_pools))
    return [jnp.where(use_second != 0, second_rows, first_rows)]


def _unit_types(first_pools, second_pools, use_second, row, layout):
    """Returns the types of the results of `load_unit`: codes, RoPE values and words of scales, for its arguments."""
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

    # The scales are loaded first, because `store_unit` needs them first.
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
    """Dequantizes a unit of 16 rows and stores it in shared memory.

    Args:
      tile_smem: [rows, 512] bfloat16 with `TRANSFORMS`; rows first .. first + 15 are written.
      bias_smem: [rows] float32; elements first .. first + 15 are set to 0 for rows that exist, otherwise to -inf.
      first: int32 scalar, number of the unit's first row in the tile.
      unit: result of `load_unit`.
      row: [16] int32, the argument of `load_unit`.
      layout: byte layout of a row.
      peer: None, or (number of another block of the cluster, one of this block's `transaction_barriers`). The same
        values and biases, `UNIT_BYTES` in all, are then also stored at the same places in the other block's shared
        memory. The other block's barrier at the same place counts the bytes.
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
    """Returns two functions that store in another block of the cluster: one for values, one for a row's bias.

    Args:
      start: pointer to this thread's first value in this block's shared memory.
      bias: pointer to the bias of this thread's row in this block's shared memory.
      block: number of the other block.
      barrier: one of this block's `transaction_barriers`; the other block's barrier at the same place counts the bytes.
    """
    pointers = start, bias, mlir.shared_pointer(barrier)
    addresses = (llvm.ptrtoint(mlir.int_type(), pointer) for pointer in pointers)
    peer_start, peer_bias, peer_barrier = (thread_ops.peer(address, block) for address in addresses)
    return (
        lambda offset, values: transaction_barriers.send(peer_start + offset, values, peer_barrier),
        lambda value: transaction_barriers.send(peer_bias, [value], peer_barrier),
    )


def unit_offsets(tile, columns: int) -> tuple[U32, Any, U32]:
    """Returns (chunk, pointer, row): the place of this thread's values in a tile in shared memory.

    A thread holds 16 bytes, number `chunk` of 8, of every group of 64 columns in row `row` of a unit. `pointer` is the
    address of its 16 bytes of group 0, for the unit that begins at row 0 of the tile.

    Args:
      tile: memref [rows, columns] bfloat16 with `TRANSFORMS`.
      columns: number of columns.
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
    """Writes the bias of this thread's row, 0 if the row exists and else -inf. The first of the row's 8 lanes does it.

    `bias` is the pointer to write to, and `chunk` the number from `unit_offsets`. `send`, if given, is called with the
    MLIR value of the bias.
    """
    value = arith.select(exists.value, mlir.f32(0.0), mlir.f32(-np.inf))
    with thread_ops.when(chunk.equals(0)):
        llvm.store(value, bias)
        if send is not None:
            send(value)


@primitive
def fence() -> None:
    """Makes writes to shared memory visible to the async proxy, through which `wgmma` reads.

    They are this thread's own writes, and other threads' writes that this thread has waited for.
    """


@mlir.emits(fence)
def _():
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def _dequantize(pools, row, layout):
    """Returns the dequantized rows [16, 512] bfloat16, zeros for row number -1; for interpreted kernels."""
    nope, rope, scale = (pool[...].reshape(-1, pool.shape[-1])[jnp.maximum(row, 0)] for pool in pools)
    values = lax.bitcast_convert_type(nope, jnp.float8_e4m3fn).astype(jnp.float32)
    if layout.scale_block is None:
        scale = jnp.broadcast_to(scale, values.shape)
    else:
        exponent = scale[:, : layout.nope_dim // layout.scale_block].astype(jnp.int32) << 23
        scale = jnp.repeat(lax.bitcast_convert_type(exponent, jnp.float32), layout.scale_block, axis=1)
    values = jnp.concatenate([(values * scale).astype(jnp.bfloat16), rope], axis=1)
    return jnp.where((row >= 0)[:, None], values, jnp.zeros((), jnp.bfloat16))


# Instructions that turn two E4M3 codes, also subnormal ones, into a pair of bfloat16 with their values times 2**-120.
# They sign-extend each byte to 16 bits, shift it so that its lower 7 bits are the lowest exponent bits and the highest
# mantissa bits of bfloat16, and clear all other bits but the sign.
_SPREAD_PAIR = "prmt.b32 {to}, ${word}, 0, {select}; shl.b32 {to}, {to}, 4; and.b32 {to}, {to}, 0x87F087F0;"
_REGISTERS = {"a": (4, "0x9180"), "b": (4, "0xB3A2"), "c": (5, "0x9180"), "d": (5, "0xB3A2")}
# Instructions that decode the 8 codes in operands $4 and $5 of an inline assembly block to its registers a .. d.
_SPREAD = "".join(_SPREAD_PAIR.format(to=to, word=word, select=select) for to, (word, select) in _REGISTERS.items())


def _decode_block_scales(codes, scales, group):
    """Emits the decoding of a thread's 8 codes of a group, times the group's scale, to 4 words of bfloat16 pairs.

    The factor 2**120 and the scale, a power of two, are multiplied in two steps that are exact and cannot overflow.
    """
    code = "{ .reg .b32 a, b, c, d, k; mov.b32 k, 0x7B807B80;" + _SPREAD
    for i, x in enumerate(_REGISTERS):
        code += f"mul.rn.bf16x2 {x}, {x}, k; mul.rn.bf16x2 ${i}, {x}, $6;"
    # A word with two equal bfloat16, whose exponent bits are the byte of the group's scale.
    factor = (U32(scales[group // 4]) >> 8 * (group % 4) & 0xFF) * 0x00800080
    return mlir.ptx(code + "}", *codes, factor, results=[mlir.int_type()] * 4, pure=True)


def _decode_row_scale(codes, scales, group):
    """Emits the decoding of 8 codes, times the row's float32 scale, to 4 words of bfloat16 pairs.

    Each product is rounded to float32, then to bfloat16.
    """
    code = "{ .reg .b32 a, b, c, d; .reg .f32 l, h;" + _SPREAD
    for i, x in enumerate(_REGISTERS):
        code += f"shl.b32 l, {x}, 16; and.b32 h, {x}, 0xFFFF0000;"
        code += "mul.rn.f32 l, l, 0f7B800000; mul.rn.f32 h, h, 0f7B800000; mul.rn.f32 l, l, $6; mul.rn.f32 h, h, $6;"
        code += f"cvt.rn.bf16x2.f32 ${i}, h, l;"
    factor = arith.bitcast(mlir.f32_type(), scales[0])
    return mlir.ptx(code + "}", *codes, factor, results=[mlir.int_type()] * 4, pure=True)


def _load(base, words, *, offset=0, row=None):
    """Emits a load of 1, 2 or 4 words of 32 bits from global memory, and returns the words.

    Args:
      base: MLIR pointer to global memory.
      words: number of words.
      offset: number of bytes to add to `base`.
      row: MLIR value of an int32; if it is negative, nothing is loaded and the words are zeros. None to load always.
    """
    targets = ", ".join(f"${i}" for i in range(words))
    kind, targets = (f".v{words}.b32", f"{{{targets}}}") if words > 1 else (".b32", targets)
    load = f"ld.global.nc.L1::no_allocate{kind} {targets}, [${words} + {offset}];"
    results = [mlir.int_type()] * words
    if row is None:
        return mlir.ptx(load, base, results=results)
    zero = "".join(f"mov.b32 ${i}, 0;" for i in range(words))
    guarded = f"{{ .reg .pred p; setp.ge.s32 p, ${words + 1}, 0; {zero} @p {load} }}"
    return mlir.ptx(guarded, base, row, results=results)
