"""Dequantizes KV rows on the way from global memory to bfloat16 tiles in shared memory, 16 rows (a unit) at a time.

    load_unit    global memory -> registers: codes, RoPE values and scales
    store_unit   registers -> shared memory: bfloat16, in the swizzled 8 x 64 tiles that `wgmma` reads

Loading and storing are separate, so that loads of several units can be in flight at once. Each warp of a warpgroup
holds 4 rows of a unit, and 8 lanes share a row. A lane loads 8 bytes of every 64 bytes of codes. These are 8 E4M3
values of every group of 64 columns, or 16 E2M1 values, with a common scale, of every 128 columns.

A unit's rows lie in the first or in the second of two sets of pools, such as rings and pools of compressed entries. If
the two sets have different layouts, a unit has registers for a row of the first set, which needs more of them. A row of
the second set fills the first two arrays of the unit, its codes and scales.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir.dialects import llvm

from pallas_kernels.formats.exact_math import power_of_two
from pallas_kernels.formats.kv_rows import GROUP, GROUPS, ROW_DIM
from pallas_kernels.formats.layouts import RowLayout
from pallas_kernels.mgpu import mlir, thread_ops, transaction_barriers
from pallas_kernels.mgpu.bfloat16_words import decode_e2m1, decode_e4m3, multiply
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.checks import check_rules
from pallas_kernels.runtime.launch import primitive


type RowLayouts = tuple[RowLayout, RowLayout]

UNIT = 16  # number of rows of a unit
LANES = 8  # number of lanes that share a row
TILE_BYTES = 16 * GROUP  # bytes of an 8 x 64 tile that `wgmma` reads: 8 rows of a group of 64 columns, 128 bytes each
# Number of bytes of a unit's bfloat16 values and float32 biases, as sent to the other block of a cluster.
UNIT_BYTES = UNIT * (2 * ROW_DIM + 4)


def _word_layout(words):
    """Returns the layout of 32-bit words [16, n] in which a lane holds `words` adjacent words of every `8 * words`.

    Warp w holds rows 4w .. 4w + 3, and 8 lanes share a row.
    """
    tiling = plgpu.Tiling(((UNIT, LANES * words), (4, LANES * words), (words,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


_CODES = _word_layout(2)
_ROPE = _word_layout(4)
PER_ROW = _CODES.reduce(1)
_INDICES = plgpu.ShapeDtypeStruct((UNIT,), jnp.int32, PER_ROW)
_SCALES = plgpu.ShapeDtypeStruct((UNIT, LANES), jnp.int32, _word_layout(1))  # a word in each lane
_ENTRY_CODES = plgpu.ShapeDtypeStruct((UNIT, ROW_DIM // 8), jnp.int32, _CODES)


def iota() -> jax.Array:
    """Returns the indices 0 .. 15 of a unit's rows, [16] int32 in the layout PER_ROW."""
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
    return _load(mlir.at(mlir.global_pointer(array_gmem), mlir.scalar(index) * 4), 1)


@primitive
def load_unit(first_pools, second_pools, use_second: jax.Array, row: jax.Array, layouts: RowLayouts) -> list[jax.Array]:
    """Starts to load the quantized rows of a unit to registers.

    Args:
      first_pools, second_pools: (nope, rope, scale) in global memory, as in `Paged`. `rope` is None if all values are
        codes.
      use_second: int32 scalar; 0 to load from `first_pools`, else from `second_pools`.
      row: [16] int32 in the layout PER_ROW, index of each row in its pools, counted over all axes but the last. A row
        with -1 does not exist and is read as zeros.
      layouts: byte layouts of the rows in `first_pools` and in `second_pools`, see `check_layouts`.

    Returns:
      The unit for `store_unit`: arrays of words, see `_unit_types`; a single dequantized array [16, 512] bfloat16 if
      interpreted.
    """
    first_rows = _dequantize(first_pools, row, layouts[0])
    second_rows = _dequantize(second_pools, row, layouts[1])
    return [jnp.where(use_second != 0, second_rows, first_rows)]


def check_layouts(layouts: RowLayouts) -> None:
    """Raises NotImplementedError unless `load_unit` takes rows of these layouts."""
    first, second = layouts
    are_pair = first.rope_dim == second.rope_dim == 0 and second.codes == "e2m1"
    rules = {
        f"window rows of E4M3 codes, got {first}": first.codes == "e4m3",
        f"scales of 32 codes for rows without RoPE values only, got {first}": _is_fine(first) == (first.rope_dim == 0),
        f"one layout, or entries of E2M1 codes, got {first} and {second}": first == second or are_pair,
    }
    check_rules(rules)


def _unit_types(layout):
    """Returns the types of a unit's arrays, which hold words of 32 bits.

    If a scale belongs to 64 or more codes, a unit has codes, RoPE values, and an array for each word of a row's scales.
    If a scale belongs to fewer codes, a unit of E2M1 rows has (codes, scales), and a unit of E4M3 rows has (codes of
    the row's first half, scales, codes of its second half). The scales are then one array with a word for each lane.
    """
    if _is_fine(layout):
        return (_ENTRY_CODES, _SCALES) if layout.codes == "e2m1" else (_ENTRY_CODES, _SCALES, _ENTRY_CODES)
    return (
        plgpu.ShapeDtypeStruct((UNIT, layout.nope_dim // 4), jnp.int32, _CODES),
        plgpu.ShapeDtypeStruct((UNIT, layout.rope_dim // 2), jnp.int32, _ROPE),
        *[_INDICES] * (layout.row_bytes[2] // 4),
    )


def _is_fine(layout):
    """Returns whether a scale belongs to fewer than the 64 codes of a group."""
    return layout.scale_block is not None and layout.scale_block < GROUP


@mlir.emits(
    load_unit,
    layout=lambda _: PER_ROW,
    returns=lambda first_pools, second_pools, use_second, row, layouts: _unit_types(layouts[0]),
)
def _emit_load_unit(first_pools, second_pools, use_second, row, layouts):
    is_second = use_second > 0
    row = mlir.scalar(row)
    lane = mlir.thread() % LANES
    layout = layouts[0]

    def row_pointer(pool, lane_offset):
        second = mlir.global_pointer(second_pools[pool])
        base = is_second.where(second, mlir.global_pointer(first_pools[pool]))

        def offset(row_bytes):
            wide_row = mlir.to_i64(row)
            return mlir.to_u64(lane_offset(row_bytes)) + wide_row * row_bytes

        first_bytes, second_bytes = (x.row_bytes[pool] for x in layouts)
        first_offset = offset(first_bytes)
        if second_bytes == first_bytes:
            return mlir.at(base, first_offset)
        return mlir.at(base, is_second.where(offset(second_bytes), first_offset))

    def load_codes(groups, row):
        return [x for g in groups for x in _load(codes, 2, offset=g * GROUP, row=row)]

    # The scales are loaded first, because `store_unit` needs them first.
    if _is_fine(layout):
        scale = _load(row_pointer(2, lambda row_bytes: _scale_offset(lane, row_bytes)), 1, row=row)
        codes = row_pointer(0, lambda _: lane * 8)
        half = GROUPS // 2
        unit = [load_codes(range(half), row), scale]
        if layout.codes == "e4m3":
            other_row = row if layouts[1] == layout else is_second.where(-1, row)
            unit.append(load_codes(range(half, GROUPS), other_row))
        return unit
    scales = _load(row_pointer(2, lambda _: lane * 0), layout.row_bytes[2] // 4, row=row)
    codes = row_pointer(0, lambda _: lane * 8)
    words = load_codes(range(layout.nope_dim // GROUP), row)
    pointer = row_pointer(1, lambda _: lane * 16)
    values = [x for g in range(layout.rope_dim // GROUP) for x in _load(pointer, 4, offset=2 * g * GROUP, row=row)]
    return words, values, *([scale] for scale in scales)


def _scale_offset(lane, row_bytes):
    """Returns the offset in bytes of the word of scales that a lane loads, in the `row_bytes` bytes of a row's scales.

    Lanes i and 4 + i load the scales of columns 128 * i .. 128 * i + 127. If these scales are a single word, both lanes
    load this word. Otherwise the scales are two words, and each lane loads one.
    """
    quarter = (lane & 3) * (row_bytes // 4)
    return quarter if row_bytes == 16 else quarter + (lane >> 2) * 4


@primitive
def store_unit(
    tile_smem,
    bias_smem,
    first: Any,
    unit: Sequence[jax.Array],
    row: jax.Array,
    layout: RowLayout,
    peer: Any = None,
    zero: jax.Array | None = None,
) -> None:
    """Dequantizes a unit of 16 rows and stores it in shared memory.

    Args:
      tile_smem: [rows, 512] bfloat16 with `TRANSFORMS`; rows first .. first + 15 are written.
      bias_smem: [rows] float32; elements first .. first + 15 are set to 0 for rows that exist, otherwise to -inf.
      first: int32 scalar, index of the unit's first row in the tile.
      unit: result of `load_unit`, or the first two arrays of it for E2M1 codes of the second layout.
      row: [16] int32, the argument of `load_unit`.
      layout: byte layout of the rows.
      peer: None, or (index of another block of the cluster, one of this block's `transaction_barriers`). The values and
        biases, `UNIT_BYTES` in all, are then also stored at the same places in the other block's shared memory. The
        other block's barrier at the same place counts the bytes.
      zero: None, or an int32 scalar that the compiler does not know to be 0. With it, the unit is dequantized in a
        branch. This keeps the compiler from mixing the code of several units, which would spill registers.
    """
    tile_smem[pl.ds(first, UNIT)] = unit[0]
    bias_smem[pl.ds(first, UNIT)] = jnp.where(row >= 0, 0.0, -jnp.inf).astype(jnp.float32)


def _store_unit_layouts(tile_smem, bias_smem, first, unit, row, layout, peer=None, zero=None):
    return plgpu.RefType(TRANSFORMS), None, None, *(kind.layout for kind in _unit_types(layout))


@mlir.emits(store_unit, _store_unit_layouts, layout=lambda _: PER_ROW)
def _emit_store_unit(tile_smem, bias_smem, first, unit, row, layout, peer=None, zero=None):
    scales = [mlir.scalar(scale) for scale in (unit[1:2] if _is_fine(layout) else unit[2:])]
    lane, first_value, own_row = unit_offsets(tile_smem, ROW_DIM)
    first_value = mlir.at(first_value, first * (2 * ROW_DIM))
    bias = mlir.at(mlir.at(mlir.shared_pointer(bias_smem), own_row * 4), first * 4)
    send, send_bias = (None, None) if peer is None else _senders(first_value, bias, *peer)

    def put(values, offset):
        llvm.store(mlir.pack(values), mlir.at(first_value, offset), alignment=16)
        if send is not None:
            send(offset, values)

    with contextlib.nullcontext() if zero is None else thread_ops.when(zero.equals(0)):
        if layout.codes == "e2m1":
            _put_e2m1(unit[0], scales[0], lane, own_row, put)
        else:
            _put_e4m3(unit, scales, layout, lane, put)
    store_bias(bias, lane, mlir.scalar(row).is_at_least(0), send_bias)


def _put_e4m3(unit, scales, layout, lane, put):
    """Emits the decoding of a thread's part of a row of E4M3 codes.

    Args:
      unit: as in `store_unit`.
      scales: list of the words of scales that this thread holds.
      layout: byte layout of the row.
      lane: index of this thread among the 8 lanes that share the row.
      put: function (words, offset) that stores 4 words of bfloat16 pairs, a chunk of 16 bytes. The offset counts bytes
        from the place of chunk `lane` of group 0.
    """
    parts = [unit[0], unit[2]] if _is_fine(layout) else [unit[0]]
    codes = [register for part in parts for register in part.registers.flat]
    for group, register in enumerate(codes):
        put(_decode_e4m3(mlir.values(register), scales, layout, lane, group), TILE_BYTES * group)
    if not _is_fine(layout):
        for group, register in enumerate(unit[1].registers.flat, start=len(codes)):
            put(mlir.values(register), TILE_BYTES * group)


def _put_e2m1(codes, scale, lane, own_row, put):
    """Emits the decoding of a thread's part of a row of E2M1 codes.

    Lane l holds 16 codes of each of the groups l // 4, 2 + l // 4, ..: chunks 2 * (l % 4) and 2 * (l % 4) + 1, of 8
    codes each. Lanes 4 to 7 store the second chunk first, so that the 8 lanes of a row store to all banks of shared
    memory at once.

    Args:
      codes: the unit's array of codes.
      scale: the word of scales that this thread holds.
      lane, put: as in `_put_e4m3`.
      own_row: index of the row in the unit.
    """
    is_upper = lane >= 4
    line = own_row % 8
    chunk = ((lane & 3) << 1) | (lane >> 2)
    group_offset = (lane >> 2) * TILE_BYTES
    offsets = [group_offset + ((c ^ line) - (lane ^ line)) * 16 for c in (chunk, chunk ^ 1)]
    own_byte = (lane & 3) * 0x1111 + 0x8080  # selects a lane's scale twice, and extends its sign to 16 bits
    for i, register in enumerate(codes.registers.flat):
        factor = _e4m3_factor(_from_lane(scale, i), own_byte)
        low, high = mlir.values(register)
        for offset, word in zip(offsets, (is_upper.where(high, low), is_upper.where(low, high)), strict=True):
            put(_decode_e2m1(word, factor), offset + 2 * TILE_BYTES * i)


def _senders(first_value, bias, block, barrier):
    """Returns two functions that store in another block of the cluster: one for values, one for a row's bias.

    Args:
      first_value: pointer to this thread's first value in this block's shared memory.
      bias: pointer to the bias of this thread's row in this block's shared memory.
      block: index of the other block in the cluster.
      barrier: one of this block's `transaction_barriers`; the other block's barrier at the same place counts the bytes.
    """

    def peer_address(pointer):
        return thread_ops.peer(llvm.ptrtoint(mlir.int_type(), pointer), block)

    barrier = mlir.shared_pointer(barrier)
    peer_value = peer_address(first_value)
    peer_bias = peer_address(bias)
    peer_barrier = peer_address(barrier)
    return (
        lambda offset, values: transaction_barriers.send(peer_value + offset, values, peer_barrier),
        lambda value: transaction_barriers.send(peer_bias, [value], peer_barrier),
    )


def unit_offsets(tile, columns: int) -> tuple[Scalar, Any, Scalar]:
    """Returns (chunk, pointer, row): the place of this thread's values in a tile in shared memory.

    A group of 64 columns has 8 chunks of 16 bytes. A thread holds the chunk with index `chunk` of every group in row
    `row` of a unit. `pointer` is the address of this chunk of group 0, for the unit that begins at row 0 of the tile.

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
    offset = (row // 8) * (2 * 8 * columns) + line * (2 * GROUP) + (chunk ^ line) * 16  # swizzled as by `TRANSFORMS`
    return chunk, mlir.at(mlir.shared_pointer(tile), offset), row


def store_bias(bias, chunk: Scalar, exists: Scalar, send: Any = None) -> None:
    """Stores the bias of this thread's row, which is added to the row's scores: 0 if the row exists, else -inf.

    Args:
      bias: pointer to the row's float32 bias.
      chunk: index of the thread's chunk, from `unit_offsets`. The thread with chunk 0 stores the bias.
      exists: 1 if the row exists, else 0.
      send: function to which the storing thread also passes the MLIR value of the bias, or None.
    """
    value = exists.where(0.0, -np.inf)
    with thread_ops.when(chunk.equals(0)):
        llvm.store(value, bias)
        if send is not None:
            send(value)


def _dequantize(pools, row, layout):
    """Returns the dequantized rows [16, 512] bfloat16, zeros where `row` is -1; for interpreted kernels."""

    def take_rows(pool):
        return pool[...].reshape(-1, pool.shape[-1])[jnp.maximum(row, 0)]

    nope_pool, rope_pool, scale_pool = pools
    nope = take_rows(nope_pool)
    scale = take_rows(scale_pool)
    if layout.codes == "e2m1":
        values = decode_e2m1(nope)
        scale = decode_e4m3(scale)
    else:
        values = decode_e4m3(nope)
        if layout.scale_block is not None:
            scale = power_of_two(scale[:, : layout.nope_dim // layout.scale_block].astype(jnp.int32))
    values *= jnp.repeat(scale, layout.scale_block or layout.nope_dim, axis=1)
    parts = [values.astype(jnp.bfloat16)] + ([] if rope_pool is None else [take_rows(rope_pool)])
    return jnp.where((row >= 0)[:, None], jnp.concatenate(parts, axis=1), jnp.zeros((), jnp.bfloat16))


# Instructions that turn two E4M3 codes, also subnormal ones, into a pair of bfloat16 with their values times 2**-120.
# The instructions sign-extend each byte to 16 bits, shift it so that its lower 7 bits are the lowest exponent bits and
# the highest mantissa bits of bfloat16, and clear all other bits but the sign.
_SPREAD_PAIR = "prmt.b32 {to}, ${word}, 0, {select}; shl.b32 {to}, {to}, 4; and.b32 {to}, {to}, 0x87F087F0;"
# {register: (operand that holds the register's two codes, selector by which `prmt` sign-extends the codes)}.
_REGISTERS = {"a": (4, "0x9180"), "b": (4, "0xB3A2"), "c": (5, "0x9180"), "d": (5, "0xB3A2")}
# Instructions that decode the 8 codes in operands $4 and $5 of an inline assembly block to its registers a .. d.
_SPREAD = "".join(_SPREAD_PAIR.format(to=to, word=word, select=select) for to, (word, select) in _REGISTERS.items())


def _decode_e4m3(codes, scales, layout, lane, group):
    """Emits the decoding of a thread's 8 codes of a group, times their scale, to 4 words of bfloat16 pairs."""
    if layout.scale_block is None:
        return _decode_row_scale(codes, scales[0])
    if layout.scale_block == GROUP:
        # `factor` is a word of two equal bfloat16, whose exponent bits are the byte of the group's scale.
        factor = ((scales[group // 4] >> (8 * (group % 4))) & 0xFF) * 0x00800080
        return _decode_block_scale(codes, factor)
    # A group has two scales, one for lanes 0 to 3 and one for lanes 4 to 7.
    own_byte = (lane >> 2) * 0x0101 + (0x4040 + 0x0202 * (group % 2))
    factor = thread_ops.pure("prmt.b32 $0, $1, 0, $2;", _from_lane(scales[0], group // 2), own_byte) << 7
    return _decode_block_scale(codes, factor)


def _decode_block_scale(codes, factor):
    """Emits the decoding of a thread's 8 codes of a group to 4 words of bfloat16 pairs.

    `factor` is a word with two copies of the codes' scale in bfloat16, a power of two. Values are multiplied first by
    2**120 and then by the scale, so that both products are exact and cannot overflow.
    """
    code = "{ .reg .b32 a, b, c, d, k; mov.b32 k, 0x7B807B80;" + _SPREAD
    for i, x in enumerate(_REGISTERS):
        code += f"mul.rn.bf16x2 {x}, {x}, k; mul.rn.bf16x2 ${i}, {x}, $6;"
    return mlir.ptx(code + "}", *codes, factor, results=[mlir.int_type()] * 4, pure=True)


def _decode_row_scale(codes, scale):
    """Emits the decoding of 8 codes, times the row's float32 scale, to 4 words of bfloat16 pairs.

    Each product is rounded to float32, then to bfloat16.
    """
    code = "{ .reg .b32 a, b, c, d; .reg .f32 l, h;" + _SPREAD
    for i, x in enumerate(_REGISTERS):
        code += f"shl.b32 l, {x}, 16; and.b32 h, {x}, 0xFFFF0000;"
        code += "mul.rn.f32 l, l, 0f7B800000; mul.rn.f32 h, h, 0f7B800000; mul.rn.f32 l, l, $6; mul.rn.f32 h, h, $6;"
        code += f"cvt.rn.bf16x2.f32 ${i}, h, l;"
    factor = scale.as_float()
    return mlir.ptx(code + "}", *codes, factor, results=[mlir.int_type()] * 4, pure=True)


# Instructions that turn two E2M1 codes into a pair of bfloat16 with their values times 2**-126, as `_SPREAD_PAIR` does.
# Register z holds the codes of $4 shifted left by one code, 4 bits. So each code is the upper half of a byte of $4 or
# of z.
_SPREAD_CODES = "prmt.b32 a, z, $4, {select:#x}; shl.b32 a, a, 2; and.b32 a, a, 0x81C081C0;"


def _decode_e2m1(codes, factor):
    """Emits the decoding of a word of 8 E2M1 codes, times their scale, to 4 words of bfloat16 pairs.

    `factor` is a word with two copies of the scale in bfloat16. All products are exact.
    """
    code = "{ .reg .b32 a, k, z; mov.b32 k, 0x7E807E80; shl.b32 z, $4, 4;"
    for i in range(4):
        code += _SPREAD_CODES.format(select=0xC480 + 0x1111 * i)
        code += f"mul.rn.bf16x2 a, a, k; mul.rn.bf16x2 ${i}, a, $5;"
    return mlir.ptx(code + "}", codes, factor, results=[mlir.int_type()] * 4, pure=True)


def _e4m3_factor(scales, own_byte):
    """Emits the conversion of one of the four E4M3 scales in the word `scales` to a word with two equal bfloat16.

    `own_byte` is the selector by which `prmt` copies the scale to both halves of a word, and extends its sign.
    """
    spread = _SPREAD_PAIR.format(to="a", word=1, select="$2")
    return multiply(thread_ops.pure(f"{{ .reg .b32 a; {spread} mov.b32 $0, a; }}", scales, own_byte), 0x7B807B80)


def _from_lane(word, lane):
    """Emits a shuffle: returns the word in lane `lane` of the aligned group of 4 lanes to which this thread belongs."""
    code = f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1c1f, 0xffffffff;"
    return mlir.ptx(code, word, results=mlir.int_type(), pure=True, convergent=True)


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
