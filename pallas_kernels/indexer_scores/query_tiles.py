"""Operations on tiles of indexer queries in registers: load, rotate, quantize and store.

A tile is 32 heads of 128 dims, held by a warpgroup as an array [32 heads, 4 lanes, 32 dims]. Warp w holds heads
8w .. 8w + 7. Lane 4r + c of the warp, r = 0 .. 7 and c = 0 .. 3, holds dims 32c .. 32c + 31 of head 8w + r. These dims
are whole scale blocks. Therefore threads exchange values only in two of the seven steps of the Hadamard rotation, to
find a head's largest scale, and to reorder dims before a store.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith, llvm, math

from pallas_kernels.formats import exact_math
from pallas_kernels.formats.exact_math import power_of_two, product, round_bfloat16
from pallas_kernels.formats.layouts import KeyLayout
from pallas_kernels.formats.row_encoder import e2m1_codes, key_scales
from pallas_kernels.indexer_scores.key_tiles import DIM, TOP, permute_dims
from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.bfloat16_words import e2m1_value, halves, multiply, pack, unpack
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.runtime.launch import primitive


HEADS = 32  # number of heads in a tile
LANES = 4  # number of threads that share a head
HELD = DIM // LANES  # number of dims that a thread holds
# Number of values in a vector of angles over a warpgroup, see `mgpu.vectors`. Each warp holds all 64 pairs' angles.
ANGLES = mlir.THREADS * 2


def _layout(held):
    tiling = plgpu.Tiling(((HEADS, LANES, held), (8, LANES, 8)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-6,), lane_dims=(-3, -2), vector_dim=-1)


VALUES = _layout(HELD)
_TILE = plgpu.ShapeDtypeStruct((HEADS, LANES, HELD), jnp.float32, VALUES)
_PAIRS = plgpu.ShapeDtypeStruct((HEADS, LANES, HELD // 2), jnp.float32, _layout(HELD // 2))

_WORDS = plgpu.ShapeDtypeStruct(_PAIRS.shape, jnp.int32, _PAIRS.layout)
_E4M3_WORDS = plgpu.ShapeDtypeStruct((HEADS, LANES, HELD // 4), jnp.int32, _layout(HELD // 4))
# Layout of arrays [32 heads, 4 lanes] in which the lanes of a head hold the same value.
_HEAD_TILING = plgpu.Tiling(((HEADS, LANES), (8, LANES), (1,)))
_HEAD_LAYOUT = plgpu.Layout.TILED(_HEAD_TILING, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
_PER_HEAD = plgpu.ShapeDtypeStruct((HEADS, LANES), jnp.int32, _HEAD_LAYOUT)


@primitive
def load_heads(ref, head: jax.Array) -> jax.Array:
    """Loads rows head .. head + 31 of `ref`, [n, 128] bfloat16 in global memory, as a tile [32, 4, 32] float32."""
    return ref[pl.ds(head, HEADS)].astype(jnp.float32).reshape(_TILE.shape)


@mlir.emits(load_heads, returns=_TILE)
def _emit_load_heads(ref, head):
    part = head * LANES + mlir.thread()  # index of the thread's quarter of a row, 32 dims
    pointer = mlir.element(ref, part, 2 * HELD)
    for i in range(HELD // 8):
        words = llvm.load(mlir.vector_type(4, mlir.int_type()), mlir.at(pointer, 16 * i), alignment=16)
        for word in mlir.values(words):
            yield from unpack(word)


@primitive
def spread_angles(x: jax.Array) -> jax.Array:
    """Broadcasts values for the 64 pairs of dims to all heads of a tile.

    Args:
      x: [256] float32 vector over the warpgroup, the values of the 64 pairs repeated four times, once for each warp.

    Returns:
      [32 heads, 4 lanes, 16 pairs] float32.
    """
    return jnp.broadcast_to(x[: DIM // 2].reshape(1, LANES, HELD // 2), _PAIRS.shape)


@mlir.emits(spread_angles, plgpu.Layout.WG_STRIDED((ANGLES,), vec_size=2), returns=_PAIRS)
def _emit_spread_angles(x):
    pair = [value.bits() for value in mlir.values(x)]
    first_lane = (thread_ops.lane() & 3) * (HELD // 4)
    for i in range(HELD // 2):
        code = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        yield thread_ops.ptx(code, pair[i % 2], first_lane + i // 2).as_float()


@primitive
def turn(x: jax.Array, cos: jax.Array, sin: jax.Array, *, first: int) -> jax.Array:
    """Rotates the interleaved pairs of a tile's dims from dim `first` on, and rounds these dims to bfloat16.

    Args:
      x: [32, 4, 32] float32 tile.
      cos, sin: [32, 4, 16] float32 from `spread_angles`.
      first: index of the first rotated dim, an even number.

    Returns:
      [32, 4, 32] float32 tile.
    """
    even = x[..., 0::2]
    odd = x[..., 1::2]
    turned = jnp.stack([product(even, cos) - product(odd, sin), product(odd, cos) + product(even, sin)], axis=-1)
    return jnp.where(_channels() >= first, round_bfloat16(turned.reshape(x.shape)), x)


@mlir.emits(turn, VALUES, _PAIRS.layout, _PAIRS.layout, returns=_TILE)
def _emit_turn(x, cos, sin, first):
    times = thread_ops.multiply
    x = mlir.values(x)
    channel = (thread_ops.lane() & 3) * HELD
    for i, (cosine, sine) in enumerate(zip(mlir.values(cos), mlir.values(sin), strict=True)):
        even, odd = x[2 * i : 2 * i + 2]
        turned_even = times(even, cosine) - times(odd, sine)
        turned_odd = times(odd, cosine) + times(even, sine)
        is_rotated = channel + 2 * i >= first
        for new, old in zip(unpack(pack(turned_even, turned_odd)), (even, odd), strict=True):
            yield is_rotated.where(new, old)


@primitive
def hadamard(x: jax.Array) -> jax.Array:
    """Multiplies each head of a tile by the Hadamard matrix of 128 x 128 and by 128**-0.5."""
    return exact_math.hadamard(x.reshape(HEADS, DIM)).reshape(x.shape)


@mlir.emits(hadamard, VALUES, returns=_TILE)
def _emit_hadamard(x):
    x = mlir.values(x)
    lane = thread_ops.lane()
    step = 1
    while step < HELD:
        for i in range(HELD):
            if not i & step:
                low = x[i]
                high = x[i + step]
                x[i] = low + high
                x[i + step] = low - high
        step *= 2
    for distance in (1, 2):
        # Computes value + other (lower lane) or other - value (upper lane) in one instruction. Though this is an FMA,
        # the sum is rounded as in the reference, because the product with the sign is exact.
        upper = (lane & distance) > 0
        sign = upper.where(-1.0, 1.0)
        x = [thread_ops.fma(value, sign, thread_ops.shuffle_xor(value, distance)) for value in x]
    return [value * DIM**-0.5 for value in x]


@primitive
def block_largest(x: jax.Array, *, block: int) -> jax.Array:
    """Replaces each value of a tile by the largest magnitude in the value's block of `block` dims, 16 or 32."""
    blocks = jnp.abs(x).reshape(HEADS, -1, block)
    return jnp.broadcast_to(jnp.max(blocks, axis=2, keepdims=True), blocks.shape).reshape(x.shape)


@mlir.emits(block_largest, VALUES, returns=_TILE)
def _emit_block_largest(x, block):
    x = [math.absf(value) for value in mlir.values(x)]
    for start in range(0, HELD, block):
        largest = x[start : start + block]
        while len(largest) > 1:
            largest = [arith.maxnumf(*largest[i : i + 2]) for i in range(0, len(largest), 2)]
        yield from largest * block


@primitive
def round_e2m1(x: jax.Array) -> jax.Array:
    """Rounds a tile of values between -6 and 6 to values of E2M1, ties to even; the result is float32."""
    return e2m1_value(e2m1_codes(x))


@mlir.emits(round_e2m1, VALUES, returns=_TILE)
def _emit_round_e2m1(x):
    def rounded(value):
        bits = value.bits()
        # Adjacent E2M1 values differ by `power / 2`, where `power` is the value's power of two, or 1 for a value below
        # 1. The addition and subtraction of `large`, 1.5 * 2**22 * power, round to a multiple of `power / 2`.
        power = (bits & 0x7F800000).maximum(0x3F800000)
        large = (power + ((22 << 23) | (1 << 22))).as_float()
        whole = (value + large - large).bits()
        # Values that round to zero keep their sign.
        return (whole | (bits & 0x80000000)).as_float()

    return map(rounded, mlir.values(x))


@primitive
def pack_words(x: jax.Array) -> jax.Array:
    """Rounds a tile to bfloat16 and packs pairs of dims to words, [32, 4, 16] int32.

    Word `4 * w + i` of a thread, i = 0 .. 3, holds the thread's dim `8 * w + i` in the lower half, and dim
    `8 * w + i + 4` in the upper half.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
    halves_of_eight = bits.reshape(HEADS, LANES, -1, 2, 4)
    low = halves_of_eight[:, :, :, 0]
    high = halves_of_eight[:, :, :, 1]
    return (low | (high << 16)).reshape(_WORDS.shape)


@mlir.emits(pack_words, VALUES, returns=_WORDS)
def _words(x):
    x = mlir.values(x)
    return [pack(x[8 * i + j], x[8 * i + j + 4]) for i in range(HELD // 8) for j in range(4)]


@primitive
def mxfp4_words(x: jax.Array, layout: KeyLayout) -> tuple[jax.Array, jax.Array]:
    """Rounds a tile to bfloat16, then to MXFP4 in blocks of 32 dims, and expresses the values in E4M3.

    Returns:
      words: [32, 4, 8] int32. Word w of a thread holds the E4M3 values of the thread's dims `4 * w .. 4 * w + 3`, in
        units of 2**-TOP times the head's largest scale. Values of blocks whose scale is up to 14 binades smaller than
        the largest are exact. Other values are truncated to multiples of 2**-9 units.
      largest: [32, 4] int32, E8M0 bits of the head's largest scale, equal in the four lanes of a head.
    """
    x = round_bfloat16(x)
    bits, _, factor = key_scales(jnp.max(jnp.abs(x), axis=2, keepdims=True), layout, VALUES)
    bits = bits.astype(jnp.int32)
    largest = jnp.broadcast_to(jnp.max(bits, axis=1, keepdims=True), bits.shape)
    step = power_of_two(127 + TOP - jnp.minimum(largest - bits, 30))
    values = e2m1_value(e2m1_codes(x * factor)) * step
    values = (jnp.trunc(values * 2.0**9) * 2.0**-9).astype(jnp.float8_e4m3fn)
    words = lax.bitcast_convert_type(values.reshape(*_E4M3_WORDS.shape, 4), jnp.int32)
    return words, largest[:, :, 0]


@mlir.emits(mxfp4_words, VALUES, returns=(_E4M3_WORDS, _PER_HEAD))
def _emit_mxfp4_words(x, layout):
    def on_pairs(name, x, y):
        return thread_ops.pure(f"{name} $0, $1, $2;", x, y)

    words = _words(x)
    largest = [word & 0x7FFF7FFF for word in words]
    while len(largest) > 1:
        largest = [on_pairs("max.u16x2", *largest[i : i + 2]) for i in range(0, len(largest), 2)]
    amax = (largest[0] & 0xFFFF).maximum(largest[0] >> 16) << 16
    amax = Scalar(arith.maxnumf(amax.as_float(), Scalar(6 * 2.0**-126)))
    scale = ((amax * (1 / 6)).bits() + 0x7FFFFF) >> 23  # the block's E8M0 scale, rounded up
    largest_scale = scale
    for distance in (1, 2):
        largest_scale = largest_scale.maximum(thread_ops.shuffle_xor(largest_scale, distance))
    # `factor` is 1 / the block's scale, and `step` is the block's scale / the head's largest scale. Each is a pair of
    # equal bfloat16, computed from the biased exponent.
    factor_exponent = 254 - scale
    step_exponent = 127 - (largest_scale - scale).minimum(30)
    factor = (factor_exponent << 7) * 0x00010001
    step = (step_exponent << 7) * 0x00010001
    codes_of_pairs = []
    for word in words:
        value = multiply(word, factor)
        # Rounds as `_emit_round_e2m1` does, but in bfloat16, whose mantissa has 16 bits less.
        power = on_pairs("max.u16x2", value & 0x7F807F80, 0x3F803F80)
        large = power + ((6 << 7) | (1 << 6)) * 0x00010001
        rounded = on_pairs("sub.rn.bf16x2", on_pairs("add.rn.bf16x2", value, large), large)
        # The bits of the bfloat16 value * 2**(TOP - 120), shifted by 4, are the exponent and mantissa of the E4M3
        # value * 2**TOP, even of a subnormal one. The sign bit is shifted by 8.
        scaled = multiply(multiply(rounded | (value & 0x80008000), step), (127 + TOP - 120) * 0x00800080)
        codes_of_pairs.append(((scaled >> 4) & 0x007F007F) | ((scaled >> 8) & 0x00800080))
    codes_of_fours = []
    for start in range(0, len(codes_of_pairs), 4):
        # Turns words with pairs of dims i and i + 4 into words of dims 0 .. 3 and of dims 4 .. 7.
        low = codes_of_pairs[start] | (codes_of_pairs[start + 1] << 8)
        high = codes_of_pairs[start + 2] | (codes_of_pairs[start + 3] << 8)
        codes_of_fours += [halves(low, high, i) for i in range(2)]
    return codes_of_fours, [largest_scale]


@primitive
def load_weights(ref, head: jax.Array) -> jax.Array:
    """Loads elements head .. head + 31 of `ref`, [n] float32 in global memory.

    Returns:
      [32 heads, 4 lanes] float32. All four lanes of a head hold the element of that head.
    """
    return jnp.broadcast_to(ref[pl.ds(head, HEADS)][:, None], _PER_HEAD.shape)


@mlir.emits(load_weights, returns=plgpu.ShapeDtypeStruct((HEADS, LANES), jnp.float32, _HEAD_LAYOUT))
def _emit_load_weights(ref, head):
    return [llvm.load(mlir.f32_type(), mlir.element(ref, _own_head(head)))]


@primitive
def store_weights(ref, head: jax.Array, weights: jax.Array, scale: jax.Array) -> None:
    """Stores weights times scales in elements head .. head + 31 of `ref`, [n] float32 in global memory.

    `weights` is [32, 4] float32 from `load_weights`, and `scale` is [32, 4] int32, the E8M0 bits from `mxfp4_words`.
    """
    ref[pl.ds(head, HEADS)] = (weights * power_of_two(scale))[:, 0]


@mlir.emits(store_weights, None, None, _HEAD_LAYOUT, _HEAD_LAYOUT)
def _emit_store_weights(ref, head, weights, scale):
    factor = (mlir.scalar(scale) << 23).as_float()
    with thread_ops.when((thread_ops.lane() & (LANES - 1)).equals(0)):
        llvm.store(mlir.scalar(weights) * factor, mlir.element(ref, _own_head(head)))


def _own_head(head):
    return head + (mlir.thread() >> 2)


@primitive
def store_words(ref, head: jax.Array, words: jax.Array) -> None:
    """Stores a packed tile in rows head .. head + 31 of `ref`, with dims in the order of `permute_dims`.

    Args:
      ref: [n, 128] bfloat16 or float8_e4m3fn in global memory.
      head: int32 scalar, index of the first row.
      words: result of `pack_words` if `ref` is bfloat16, or first result of `mxfp4_words` if `ref` is float8_e4m3fn.
    """
    if ref.dtype == jnp.float8_e4m3fn:
        values = lax.bitcast_convert_type(words, jnp.float8_e4m3fn).reshape(HEADS, DIM)
        ref[pl.ds(head, HEADS)] = permute_dims(values, ref.dtype)
        return
    low = words.astype(jnp.uint16)
    high = (words >> 16).astype(jnp.uint16)
    bits = jnp.stack([low, high], axis=-1).transpose(0, 2, 1, 3).reshape(HEADS, DIM)
    ref[pl.ds(head, HEADS)] = lax.bitcast_convert_type(bits, jnp.bfloat16)


@store_words.mosaic
def _store_words_mosaic(ref, head, words):
    size = jnp.dtype(ref.dtype).itemsize
    layout = _E4M3_WORDS.layout if size == 1 else _WORDS.layout

    def emit(ref, head, words):
        lane = thread_ops.lane()
        words = mlir.values(words)
        row = mlir.to_i64(_own_head(head))
        offset = mlir.to_i64((lane & 3) << 4) + row * (size * DIM)
        pointer = mlir.at(mlir.global_pointer(ref), offset)
        for start in range(0, len(words), LANES):
            # In the order of `permute_dims`, 16 adjacent bytes are one word from each of a head's four lanes. The lanes
            # exchange words by a 4 x 4 transpose, so that each lane stores 16 adjacent bytes.
            four = words[start : start + LANES]
            for distance in (1, 2):
                upper = (lane & distance) > 0
                for i in range(LANES):
                    if not i & distance:
                        low = four[i]
                        high = four[i + distance]
                        exchanged = thread_ops.shuffle_xor(upper.where(low, high), distance)
                        four[i] = upper.where(exchanged, low)
                        four[i + distance] = upper.where(high, exchanged)
            llvm.store(mlir.pack(four), mlir.at(pointer, 16 * start), alignment=16)

    mlir.inline(emit, ref, head, (words, layout))


def _channels():
    """Returns the index of the dim of each value in a tile, [32, 4, 32] int32; for interpreted kernels."""
    return HELD * lax.broadcasted_iota(jnp.int32, _TILE.shape, 1) + lax.broadcasted_iota(jnp.int32, _TILE.shape, 2)
