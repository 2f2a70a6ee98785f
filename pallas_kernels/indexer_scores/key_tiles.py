"""Tiles of packed FP4 indexer keys in registers, as the left operand of Hopper's matrix product (`wgmma`).

A tile is 64 keys of 128 dims, held by a warpgroup. Warp w holds keys 16w .. 16w + 15. Lane 4r + c of the warp, r =
0 .. 7 and c = 0 .. 3, holds dims 32c .. 32c + 31 of the warp's keys r and r + 8. These dims are whole scale blocks, and
16 contiguous bytes of each key, which the thread copies itself. `wgmma` expects other dims in this thread. But a dot
product does not depend on the order of the dims, so `permute_dims` gives the queries the order of the keys.

Keys are multiplied as bfloat16, which is exact for all scales that occur. Only MXFP4 keys after a Hadamard rotation are
multiplied as E4M3, which is twice as fast. Such a key is expressed in units of its largest scale, and a query in units
of its head's largest scale. Codes times smaller scales are exact in these units, but sums of products may not be:

  * The tensor core aligns 32 products and the running sum to the largest of these 33 terms, and drops bits below 2**-13
    of the largest term (a gpu test shows this).
  * Products of two codes other than 0 are 0.25 to 36. Suppose that the scales of a key are within NEAR binades (factors
    of 2) of the key's largest scale, and likewise those of a query. Then products are multiples of 2**-6, and sums
    below 2**8 are exact. Sums of independent keys and queries are about 55.
  * If one of a warp's 16 keys has scales farther apart, the warp scores all 16 keys again as bfloat16 with float32
    sums. This is rare: values are about normal after the Hadamard rotation, and 1 of 4 million keys of normal values
    had such scales. Without the rotation this would be frequent, since a key can have a few large channels.
"""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.formats.exact_math import power_of_two
from pallas_kernels.formats.layouts import KeyLayout, check_pools
from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.bfloat16_words import decode_e4m3, e2m1_pairs, e2m1_value, multiply
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.launch import primitive
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


KEYS = 64  # number of keys in a tile
DIM = 128  # number of dims of a key and of a head
WARPS = 4  # number of warps in a warpgroup
WARP_KEYS = 16  # number of keys of a tile that a warp holds
CANDIDATE_KEYS = 8  # number of keys in a candidate block
SCALE_BLOCKS = {"e8m0": 32, "e4m3": 16}  # {format of scales: number of dims that share a scale}

# Keys in bfloat16 are multiplied by 2**-SHIFTS[format of scales]. A code times a scale times this factor is exact in
# bfloat16 for every E4M3 scale, and for E8M0 scales from 2**-68 to 2**65.
SHIFTS = {"e8m0": 64, "e4m3": 10}
MAX_E8M0 = 127 + 65  # bits of the largest E8M0 scale of keys in bfloat16; larger scales are replaced by this scale
# To convert MXFP4 keys and queries to E4M3, values are divided by the largest scale and multiplied by 2**TOP. The
# largest code, 6, becomes 384, which is in E4M3's range up to 448.
TOP = 6
NEAR = 2  # maximum number of binades between a key's scales for which E4M3 products are exact enough, see above

_WARP_TILING = plgpu.Tiling(((WARPS,), (1,)))
_ALL_LANES = plgpu.Replicated(32)
PER_WARP = plgpu.Layout.TILED(_WARP_TILING, warp_dims=(-2,), lane_dims=(_ALL_LANES,), vector_dim=-1)
# Layout of arrays [4, 2]: all threads of warp w hold the two values of row w.
_HALF_TILING = plgpu.Tiling(((WARPS, 2),))
PER_HALF = plgpu.Layout.TILED(_HALF_TILING, warp_dims=(-2,), lane_dims=(_ALL_LANES,), vector_dim=-1)
PER_THREAD = plgpu.ShapeDtypeStruct((mlir.THREADS,), jnp.int32, plgpu.Layout.WG_STRIDED((mlir.THREADS,), vec_size=1))
CODES = plgpu.ShapeDtypeStruct((KEYS, DIM // 8), jnp.int32, plgpu.Layout.WGMMA_8BIT)  # words of 8 codes
_SCALE_TILING = plgpu.Tiling(((KEYS, 4), (WARP_KEYS, 4), (8, 4), (1,)))
_SCALE_LAYOUT = plgpu.Layout.TILED(_SCALE_TILING, warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1)
SCALES = plgpu.ShapeDtypeStruct((KEYS, 4), jnp.int32, _SCALE_LAYOUT)
E4M3_KEYS = plgpu.ShapeDtypeStruct((KEYS, DIM // 4), jnp.int32, plgpu.Layout.WGMMA_8BIT)  # words of 4 values
BF16_KEYS = plgpu.ShapeDtypeStruct((KEYS, DIM // 2), jnp.bfloat16, plgpu.Layout.WGMMA)


def check_layout(layout: KeyLayout) -> None:
    """Raises NotImplementedError unless keys have 128 dims, and are MXFP4 or unrotated NVFP4."""
    known = "an E8M0 scale for 32, or without a Hadamard rotation an E4M3 scale for 16"
    is_known = SCALE_BLOCKS.get(layout.scale) == layout.scale_block and layout.hadamard <= (layout.scale == "e8m0")
    check_rules({f"keys of {DIM} dims with {known}, got {layout}": layout.dim == DIM and is_known})


def operand_dtype(layout: KeyLayout) -> DTypeLike:
    """Returns the dtype in which keys of a layout and their queries are multiplied."""
    return jnp.float8_e4m3fn if layout.scale == "e8m0" and layout.hadamard else jnp.bfloat16


@pytree_dataclass
class IndexerKeys:
    """The paged indexer keys of a layer, or references to them within a kernel.

    Attributes:
      layer: int32 scalar, index on axis 0 of the pools, `codes` and `scales`.
      block_table: [slots, max_blocks] int32, ids of each request's blocks of keys; -1 = none.
      codes: [layers, blocks, keys per block, 64] uint8, pairs of E2M1 codes. The number of keys per block is a multiple
        of 16.
      scales: [layers, blocks, keys per block, scales] uint8, 4 E8M0 or 8 E4M3 scales per key, as the layout says.
      compress_rate: number of tokens per key; token t sees the first `(positions[t] + 1) // compress_rate` keys.
      layout: format of the keys, either MXFP4 (E8M0 scales of 32 dims) or NVFP4 (E4M3 scales of 16 dims).
    """

    layer: Any
    block_table: Any
    codes: Any
    scales: Any
    compress_rate: int = static_field()
    layout: KeyLayout = static_field()

    @property
    def dtype(self) -> DTypeLike:
        """The dtype in which keys and queries are multiplied."""
        return operand_dtype(self.layout)

    @property
    def per_block(self) -> int:
        """The number of keys in a block."""
        return self.codes.shape[2]

    @property
    def max_keys(self) -> int:
        """The number of keys that a row of the block table can hold."""
        return self.block_table.shape[1] * self.per_block

    def check(self) -> None:
        """Raises NotImplementedError if a shape, a dtype or the layout is not supported."""
        check_layout(self.layout)
        check_array("block_table", self.block_table, jnp.int32, None, None)
        check_pools(self.layout, (self.codes, self.scales))
        per_block = self.per_block
        check_rules({f"blocks of a multiple of {WARP_KEYS} keys, got {per_block}": per_block % WARP_KEYS == 0})


def permute_dims[A: (jax.Array, np.ndarray)](x: A, dtype: Any) -> A:
    """Returns x [..., 128] with its dims in the order in which `wgmma` multiplies the dims of a tile.

    `dtype` is the dtype of the multiplied keys and queries, float8_e4m3fn or bfloat16.
    """
    # `sizes` splits the index of a dim into digits, and `order` is the order of these digits in the result. Each of the
    # four lanes that share a key holds four words of 8 FP4 codes. In bfloat16, a word of each lane takes two `wgmma` of
    # 16 dims: the digits (lane, word, half of the word, `wgmma`, code) become (word, `wgmma`, code, lane, half).
    sizes = (4, 4, 2, 2, 2)
    order = (1, 3, 4, 0, 2)
    if dtype == jnp.float8_e4m3fn:
        # In E4M3, a `wgmma` multiplies a word of each lane, 32 dims: the digits (lane, word, half of the word, code)
        # become (word, half, lane, code).
        sizes = (4, 4, 2, 4)
        order = (1, 2, 0, 3)
    lead = x.ndim - 1
    parts = x.reshape(*x.shape[:-1], *sizes)
    return parts.transpose(*range(lead), *(lead + i for i in order)).reshape(x.shape)


@primitive
def load_words(ref, index: jax.Array, layout) -> jax.Array:
    """Loads `ref.reshape(-1)[index]` from an int32 array in global memory; `index` is int32 in a register layout."""
    return ref[...].reshape(-1)[index]


@load_words.mosaic
def _(ref, index, layout):
    def emit(ref, index):
        return [llvm.load(mlir.int_type(), mlir.element(ref, number)) for number in mlir.values(index)]

    return mlir.inline(emit, ref, index, layout=lambda _: layout, returns=index)


@primitive
def start_tile(tiles_smem, stage: jax.Array, pools, rows: jax.Array, is_wanted: jax.Array) -> None:
    """Starts to copy a tile of keys to shared memory. Each thread copies the bytes that it reads later.

    Args:
      tiles_smem: (codes [stages, 64 keys, 64 bytes], scales [stages, 64 keys, 4 or 8 bytes]), uint8 in shared memory.
      stage: int32 scalar, index of the stage to write to.
      pools: (codes, scales) in global memory, as in `IndexerKeys`.
      rows: [4] int32 in layout PER_WARP, the row of each warp's key 0 in the pools with leading axes merged. The warp's
        other 15 keys are in the next 15 rows. Or [4, 2] int32 in layout PER_HALF, the rows of each warp's keys 0 and 8.
        The 7 keys that follow each of these are in the next 7 rows.
      is_wanted: bool scalar, whether to copy the tile.
    """
    offsets = lax.iota(jnp.int32, KEYS // rows.size)
    rows = (jnp.where(is_wanted, rows, 0).reshape(-1, 1) + offsets[None, :]).reshape(-1)
    for target, pool in zip(tiles_smem, pools, strict=True):
        target[stage] = jnp.where(is_wanted, pool[...].reshape(-1, pool.shape[-1])[rows], target[stage])


@mlir.emits(start_tile, layout=lambda shape: PER_WARP if len(shape) == 1 else PER_HALF)
def _emit_start_tile(tiles_smem, stage, pools, rows, is_wanted):
    key, dims = _own_key()
    rows = _own_rows(rows)
    key = stage * KEYS + key
    code = []
    operands = []

    def add_copies(target, source, size, offset):
        """Adds code that copies bytes of the thread's two keys from `source` (global memory) to `target` (shared).

        A key has `size` bytes there. The code copies `min(size, 16)` of them, from byte `offset` on.
        """
        number = len(operands)
        operands.append(mlir.at(mlir.shared_pointer(target), key * size + offset))
        for row in rows:
            operands.append(mlir.at(mlir.global_pointer(source), row * size + mlir.to_i64(offset)))
        per_copy = min(size, 16)
        copy = f"@p cp.async.{'cg' if per_copy == 16 else 'ca'}.shared.global"
        # In shared memory, the thread's second key is 8 rows after its first key. The same is true in global memory,
        # unless `rows` contains a row for each of the two keys.
        below = 8 * size
        second = f"${number + 1} + {below}" if len(rows) == 1 else f"${number + 2} + 0"
        code.append(f"{copy} [${number} + 0], [${number + 1} + 0], {per_copy};")
        code.append(f"{copy} [${number} + {below}], [{second}], {per_copy};")

    codes_smem, scales_smem = tiles_smem
    codes_gmem, scales_gmem = pools
    add_copies(codes_smem, codes_gmem, DIM // 2, dims * 16)
    add_copies(scales_smem, scales_gmem, scales_gmem.type.shape[-1], 0)
    is_wanted = arith.extui(mlir.int_type(), is_wanted)
    mlir.ptx(f"{{ .reg .pred p; setp.ne.b32 p, ${len(operands)}, 0; {' '.join(code)} }}", *operands, is_wanted)


@primitive
def read_tile(tiles_smem, stage: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads a tile that `start_tile` has copied.

    Returns:
      words: [64, 16] int32, 8 codes in each word.
      scales: [64, 4] int32. A word holds the scale bytes for 32 dims: one E8M0 scale, or two E4M3 scales.
    """
    return _pack_bytes(*(ref[stage] for ref in tiles_smem))


def _pack_bytes(words, factors):
    groups = factors.shape[1] // 4
    shifts = 8 * lax.iota(jnp.int32, 4)[None, None, :]
    words = words.astype(jnp.int32).reshape(KEYS, 16, 4)
    factors = factors.astype(jnp.int32).reshape(KEYS, 4, groups)
    return jnp.sum(words << shifts, axis=2), jnp.sum(factors << shifts[..., :groups], axis=2)


@mlir.emits(read_tile, returns=(CODES, SCALES))
def _emit_read_tile(tiles_smem, stage):
    key = mlir.to_i64(stage * KEYS + _own_key()[0])
    codes, scales = map(mlir.shared_pointer, tiles_smem)
    return _words(codes, scales, key, tiles_smem[1].type.shape[-1])


@primitive
def load_tile(pools, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loads a tile from global memory to registers. The results are as in `read_tile`.

    `pools` and `rows` are as in `start_tile`, but `rows` must be [4].
    """
    rows = (rows[:, None] + lax.iota(jnp.int32, WARP_KEYS)[None, :]).reshape(-1)
    return _pack_bytes(*(pool[...].reshape(-1, pool.shape[-1])[rows] for pool in pools))


@mlir.emits(load_tile, None, None, PER_WARP, returns=(CODES, SCALES))
def _emit_load_tile(pools, rows):
    codes, scales = map(mlir.global_pointer, pools)
    (row,) = _own_rows(rows)
    return _words(codes, scales, row, pools[1].type.shape[-1])


def _words(codes, scales, row, width):
    """Emits loads of a thread's 32 dims of its two keys.

    Args:
      codes, scales: MLIR pointers to the codes and scales of row 0.
      row: index of the row of the thread's first key, 64 bits; the second key is 8 rows after it.
      width: number of scales of a key, 4 or 8.

    Returns:
      words: a list of 8 words of codes, 4 of the first key, then 4 of the second key.
      factors: a list of 2 words, the scale bytes of each key.
    """
    groups = width // 4
    dims = _own_key()[1]
    codes = mlir.at(codes, row * (DIM // 2) + mlir.to_i64(dims * 16))
    scales = mlir.at(scales, row * width + mlir.to_i64(dims * groups))
    quad = mlir.vector_type(4, mlir.int_type())
    bits = mlir.int_type(8 * groups)
    words = []
    factors = []
    for below in (0, 8):
        words += mlir.values(llvm.load(quad, mlir.at(codes, below * DIM // 2), alignment=16))
        scale = llvm.load(bits, mlir.at(scales, below * width), alignment=groups)
        factors.append(arith.extui(mlir.int_type(), scale))
    return words, factors


def _own_key():
    """Returns (index of this thread's first key in a tile, c), where 32c .. 32c + 31 are the thread's dims."""
    thread = mlir.thread()
    return (thread >> 5) * WARP_KEYS + ((thread >> 2) & 7), thread & 3


def _own_rows(rows):
    """Returns a list of the rows in the pools of this thread's two keys; if `rows` is [4], of the first key only."""
    return [mlir.to_i64(row + _own_key()[0] % WARP_KEYS) for row in mlir.values(rows)]


@primitive
def unpack_bfloat16(tile: tuple[jax.Array, jax.Array], *, scale: str) -> tuple[jax.Array, jax.Array]:
    """Dequantizes a tile of keys from `read_tile`, without the layout's `global_scale`.

    Args:
      tile: result of `read_tile`.
      scale: format of the scales, "e8m0" or "e4m3".

    Returns:
      (low, high), each [64 keys, 64 dims] bfloat16: the two halves of the dims in the order of `permute_dims`, as left
      operands of `wgmma`. Their elements are the values of the keys times 2**-SHIFTS[scale].
    """
    words, scales = tile
    if scale == "e8m0":
        factor = power_of_two(jnp.minimum(scales, MAX_E8M0))
    else:
        bits = (scales[:, :, None] >> (8 * lax.iota(jnp.int32, 2))[None, None, :]).astype(jnp.uint8)
        factor = decode_e4m3(bits)
    factor = factor.reshape(KEYS, -1, 1) * 2.0 ** -SHIFTS[scale]
    keys = code_values(words).reshape(KEYS, -1, SCALE_BLOCKS[scale]) * factor
    keys = permute_dims(keys.reshape(KEYS, DIM).astype(jnp.bfloat16), jnp.bfloat16)
    return keys[:, : DIM // 2], keys[:, DIM // 2 :]


@mlir.emits(unpack_bfloat16, CODES.layout, SCALES.layout, returns=(BF16_KEYS, BF16_KEYS))
def _emit_unpack_bfloat16(tile, scale):
    words, scales = tile
    halves: list[list[Any]] = [[None] * 16, [None] * 16]
    pair_type = mlir.vector_type(2, ir.BF16Type.get())
    for row, (quad, bits) in enumerate(zip(words.registers.flat, mlir.values(scales), strict=True)):
        # The factors include 2**126, because `e2m1_pairs` returns values times 2**-126.
        if scale == "e8m0":
            factors = [(bits.minimum(MAX_E8M0) + (126 - SHIFTS[scale])) * 0x00800080]
        else:
            # The bits of an E4M3 scale, shifted, are a bfloat16 of the scale times 2**-120. The first product removes
            # this factor, and the second the factor of `e2m1_pairs`.
            exact = [multiply(((bits >> (8 * i)) & 0x7F) * 0x00100010, 0x7B807B80) for i in range(2)]
            factors = [multiply(x, (127 + 126 - SHIFTS[scale]) * 0x00800080) for x in exact]
        for i, word in enumerate(mlir.values(quad)):
            for pair, value in enumerate(e2m1_pairs(word)):
                # `wgmma` multiplies the 128 dims in eight steps of 16, four for each half. The index below is the place
                # of a register among all registers of its half.
                step = 2 * i + pair // 2
                column = pair % 2
                product = multiply(value, factors[i // 2 % len(factors)])
                halves[step // 4][4 * (step % 4) + 2 * column + row] = mgpu.utils.bitcast(product, pair_type)
    return halves


@primitive
def unpack_e4m3(tile: tuple[jax.Array, jax.Array], far: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Converts a tile of MXFP4 keys to E4M3, and flags keys whose scales are far apart.

    Args:
      tile: result of `read_tile`.
      far: [128] int32 in layout PER_THREAD, a word for each thread with flags of earlier tiles.

    Returns:
      values: [64, 32] int32, the left operand of `wgmma`: words of 4 E4M3 values, dims in the order of `permute_dims`.
        They are the keys' values times 2**TOP, in units of the key's largest scale. Values whose scale is more than
        NEAR binades smaller than the largest scale are wrong.
      largest: [64, 4] int32, the largest scale byte of each key, equal in all four columns.
      far: the flags shifted left by one bit. The lowest bit is set if, for one of the thread's two keys, the scale of
        the thread's dims is more than NEAR binades smaller than the key's largest scale.
    """
    words, scales = tile
    largest = jnp.broadcast_to(jnp.max(scales, axis=1, keepdims=True), scales.shape)
    below = largest - scales
    factor = power_of_two(127 + TOP - jnp.minimum(below, NEAR))
    values = (code_values(words) * factor[:, :, None]).reshape(KEYS, DIM)
    values = permute_dims(values.astype(jnp.float8_e4m3fn), jnp.float8_e4m3fn).reshape(E4M3_KEYS.shape + (4,))
    is_far = jnp.any((below > NEAR).reshape(WARPS, 2, 8, 4), axis=1).reshape(-1)
    return lax.bitcast_convert_type(values, jnp.int32), largest, (far << 1) | is_far.astype(jnp.int32)


@mlir.emits(unpack_e4m3, CODES.layout, SCALES.layout, PER_THREAD.layout, returns=(E4M3_KEYS, SCALES, PER_THREAD))
def _emit_unpack_e4m3(tile, far):
    words, scales = map(mlir.values, tile)
    largest = largest_scales(scales)
    below = [(top - scale).minimum(NEAR + 1) for top, scale in zip(largest, scales, strict=True)]
    earlier_flags = mlir.scalar(far) << 1
    is_far = (NEAR - below[0].maximum(below[1])) >> 31  # the sign bit of the difference
    flags = earlier_flags | is_far
    return e4m3_keys(words, below), largest, [flags]


@primitive
def any_set(words: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns a bool scalar: whether at least one of the words has at least one bit of the mask `bits` set.

    `words` is [128] int32 in layout PER_THREAD, and `bits` is an int32 scalar.
    """
    return jnp.any(words & bits != 0)


@mlir.emits(any_set, PER_THREAD.layout, returns=jax.ShapeDtypeStruct((), jnp.bool_))
def _emit_any_set(words, bits):
    code = "{ .reg .pred p; setp.ne.u32 p, $1, 0; bar.red.or.pred p, $2, 128, p; "
    # After `bar.red`, the compiler does not know that the result is uniform in the warp. After the vote it does.
    code += "vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
    barrier = mgpu.utils.warpgroup_barrier_idx(sync=False)
    return thread_ops.ptx(code, mlir.scalar(words) & bits, barrier) > 0


def code_values(words):
    """Returns the E2M1 values [64, 4, 32] float32 of a tile's words [64, 16]; for interpreted kernels."""
    return e2m1_value((words[:, :, None] >> (4 * lax.iota(jnp.int32, 8))[None, None, :]) & 15).reshape(KEYS, 4, -1)


def largest_scales(scales):
    """Emits code that finds the largest scale byte of each of a thread's two keys. Four lanes share the two keys.

    `scales` are two words: for each key, the scale byte of the thread's 32 dims.
    """
    both = scales[0] | (scales[1] << 16)
    for distance in (1, 2):
        exchanged = thread_ops.shuffle_xor(both, distance)
        both = thread_ops.pure("max.u16x2 $0, $1, $2;", both, exchanged)
    return both & 0xFFFF, both >> 16


def e4m3_keys(words, below):
    """Emits the E4M3 values of a thread's codes times 2**(TOP - below), as words in the order of the `wgmma` operand.

    A byte permutation looks up four magnitudes at once in a table that includes the factor. Then the signs are added.

    Args:
      words: 8 words of 8 codes, 4 of the thread's first key, then 4 of its second key.
      below: for each of the two keys, the number of binades by which the scale of the thread's dims is smaller than the
        key's largest scale.
    """
    keys: list[Any] = [None] * (2 * len(words))
    for number, word in enumerate(words):
        row, i = divmod(number, len(words) // 2)
        # The constants are the E4M3 codes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, times 2**TOP. Subtracting 8 from a code
        # halves its value. The code of 0 stays as it is.
        low = 0x6C686000 - below[row] * 0x08080800
        high = 0x7C787470 - below[row] * 0x08080808
        sizes = word & 0x77777777
        # The highest bits of byte j of `shifted` and of `word` are the signs of codes 2 * j and 2 * j + 1.
        shifted = word << 4
        for half, (selector, order) in enumerate(((sizes, 0x5140), (sizes >> 16, 0x7362))):
            size = thread_ops.pure("prmt.b32 $0, $1, $2, $3;", low, high, selector)
            sign = thread_ops.pure("prmt.b32 $0, $1, $2, $3;", shifted, word, order) & 0x80808080
            keys[4 * i + 2 * half + row] = size | sign
    return keys
