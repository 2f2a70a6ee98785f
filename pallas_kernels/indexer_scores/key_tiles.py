"""Tiles of packed FP4 indexer keys in registers, as the left operand of Hopper's matrix product.

A warpgroup holds 64 keys of 128 dims: warp w keys 16w .. 16w + 15, and thread (r, c) of its 8 x 4 lanes the 32 dims
32c .. 32c + 31 of keys r and r + 8. That is 16 contiguous bytes a key, which the thread copies itself, and whole scale blocks: one of MXFP4 or two of NVFP4. The tensor core wants other dims in that thread, but a dot product does not depend
on the order of the dims: `permute_dims` reorders the queries instead.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, nvvm, vector

from pallas_kernels.common import mlir_helpers as mlir, thread_ops
from pallas_kernels.common.checks import check_rules
from pallas_kernels.common.layouts import KeyLayout
from pallas_kernels.common.primitive import primitive
from pallas_kernels.common.thread_ops import U32
from pallas_kernels.common.unpack import e2m1_pairs, e2m1_value, multiply
from pallas_kernels.indexer_scores import query_operands
from pallas_kernels.indexer_scores.query_operands import DIM, HEADS


KEYS = 64  # a tile
WARPS, WARP_KEYS = 4, 16
SCALE_BLOCKS = dict(e8m0=32, e4m3=16)

# NVFP4 keys are used times 2**-SHIFT: then codes times scales are bfloat16 for every scale.
SHIFT = 10
# MXFP4 keys and their queries are used as E4M3, the largest possible value of each as 384 = 6 * 2**TOP.
TOP, FARTHEST = 6, 12

PER_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((WARPS,), (1,))), warp_dims=(-2,), lane_dims=(plgpu.Replicated(32),), vector_dim=-1
)
_CODES = plgpu.ShapeDtypeStruct((KEYS, DIM // 8), jnp.int32, plgpu.Layout.WGMMA_8BIT)  # words of 8: 4 a thread and key
_SCALES = plgpu.ShapeDtypeStruct(
    (KEYS, 4),
    jnp.int32,
    plgpu.Layout.TILED(
        plgpu.Tiling(((KEYS, 4), (WARP_KEYS, 4), (8, 4), (1,))), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
    ),
)
_E4M3_KEYS = plgpu.ShapeDtypeStruct((KEYS, DIM // 4), jnp.int32, plgpu.Layout.WGMMA_8BIT)  # words of 4
_KEYS = plgpu.ShapeDtypeStruct((KEYS, DIM // 2), jnp.bfloat16, plgpu.Layout.WGMMA)


def check_layout(layout: KeyLayout) -> None:
    """Raises NotImplementedError for keys that a tile cannot hold."""
    rule = f"keys of {DIM} dims with an E8M0 scale for 32 or an E4M3 scale for 16, got {layout}"
    check_rules({rule: layout.dim == DIM and SCALE_BLOCKS.get(layout.scale) == layout.scale_block})


def permute_dims[A: (jax.Array, np.ndarray)](x: A) -> A:
    """[..., 128] in the order in which tiles hold the dims."""
    # dim = (lane's 32, word's 8, half word, k step's half, nibble) -> (k step, nibble, lane, half word)
    parts = x.reshape(*x.shape[:-1], 4, 4, 2, 2, 2)
    lead = tuple(range(x.ndim - 1))
    order = [len(lead) + i for i in (1, 3, 4, 0, 2)]
    return parts.transpose(*lead, *order).reshape(x.shape)


@primitive
def load_words(ref, index: jax.Array, layout) -> jax.Array:
    """`ref[index]` of an int32 array in global memory, its axes merged; `index` [n] int32, one a thread in `layout`."""
    return ref[...].reshape(-1)[index]


@load_words.mosaic
def _(ref, index, layout):
    def emit(ref, index):
        place = mlir.at(mlir.global_pointer(ref), mlir.to_i64(mlir.scalar(index)), mlir.int_type())
        return [llvm.load(mlir.int_type(), place)]

    returns = plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout)
    return mlir.inline(emit, ref, (index, layout), returns=returns)


@primitive
def start_tile(staged, place: jax.Array, pools, rows: jax.Array) -> None:
    """Starts to copy a tile's codes and scales to shared memory; each thread copies what it reads back.

    staged: ([places, 64, 64], [places, 64, 4 or 8]) uint8 in shared memory, of which `place` is written.
    pools: codes [.., 64] and scales [.., 4 or 8] uint8 in global memory.
    rows: [4] int32 in layout PER_WARP, the row of each warp's first key, leading axes merged; its 16 keys stand
      together.
    """
    rows = (rows[:, None] + lax.iota(jnp.int32, WARP_KEYS)[None, :]).reshape(-1)
    for target, pool in zip(staged, pools, strict=True):
        target[place] = pool[...].reshape(-1, pool.shape[-1])[rows]


@start_tile.mosaic
def _(staged, place, pools, rows):
    width = pools[1].shape[-1]

    def emit(words, factors, place, codes, scales, rows):
        key, dims = _own_key()
        row = mlir.to_i64(arith.addi(mlir.scalar(rows), (key % WARP_KEYS).value))
        key = U32(mlir.scalar(place)) * KEYS + key
        for target, source, size, offset in ((words, codes, DIM // 2, dims * 16), (factors, scales, width, U32(0))):
            target = mlir.at(mlir.shared_pointer(target), (key * size + offset).value)
            source = mlir.at(mlir.global_pointer(source), _multiply_add(row, size, mlir.to_i64(offset.value)))
            held = min(size, 16)
            cache = nvvm.LoadCacheModifierKind.CG if held == 16 else nvvm.LoadCacheModifierKind.CA
            for below in (0, 8 * size):
                nvvm.cp_async_shared_global(mlir.at(target, below), mlir.at(source, below), held, cache)

    mlir.inline(emit, *staged, place, *pools, (rows, PER_WARP))


@primitive
def read_tile(staged, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A copied tile's words of 8 codes [64, 16] int32, and scale bytes of each 32 dims [64, 4] int32."""
    words, factors = (ref[place].astype(jnp.int32) for ref in staged)
    groups = factors.shape[1] // 4
    shifts = 8 * lax.iota(jnp.int32, 4)[None, None, :]
    words, factors = words.reshape(KEYS, 16, 4), factors.reshape(KEYS, 4, groups)
    return jnp.sum(words << shifts, axis=2), jnp.sum(factors << shifts[..., :groups], axis=2)


@read_tile.mosaic
def _(staged, place):
    groups = staged[1].shape[-1] // 4

    def emit(words, factors, place):
        key, dims = _own_key()
        key = U32(mlir.scalar(place)) * KEYS + key
        words = mlir.at(mlir.shared_pointer(words), (key * (DIM // 2) + dims * 16).value)
        factors = mlir.at(mlir.shared_pointer(factors), ((key * 4 + dims) * groups).value)
        quad, bits = mlir.vector_type(4, mlir.int_type()), mlir.int_type(8 * groups)
        found, scales = [], []
        for row in (0, 8):
            found += mlir.values(llvm.load(quad, mlir.at(words, row * DIM // 2), alignment=16))
            scale = llvm.load(bits, mlir.at(factors, row * groups * 4), alignment=groups)
            scales.append(arith.extui(mlir.int_type(), scale))
        return found, scales

    return mlir.inline(emit, *staged, place, returns=(_CODES, _SCALES))


def _own_key():
    """(first key of this thread in a tile, its 32 dims)."""
    thread = thread_ops.thread() % mlir.THREADS
    return (thread >> 5) * WARP_KEYS + (thread >> 2 & 7), thread & 3


@primitive
def unpack(tile: tuple[jax.Array, jax.Array], layout: KeyLayout) -> tuple[jax.Array, jax.Array]:
    """The keys of a loaded tile as the product's left operand, without the layout's `global_scale`.

    NVFP4: times 2**-SHIFT, exact, in two halves [64, 64] bfloat16 of the permuted dims. MXFP4: (E4M3 values, of which
    2**-6 are the key in units of its largest scale; each row's largest scale byte). A scale more than FARTHEST binades
    below the largest is taken as so far below: that changes a dim by less than 2**-12 of what the largest scale holds.
    """
    words, scales = tile
    codes = (words[:, :, None] >> (4 * lax.iota(jnp.int32, 8))[None, None, :]) & 15
    value = e2m1_value(codes).reshape(KEYS, -1, layout.scale_block)
    if layout.scale == "e8m0":
        largest = jnp.max(scales, axis=1, keepdims=True)
        below = jnp.minimum(largest - scales, FARTHEST)[:, :, None]
        value = jnp.where((below == FARTHEST) & (jnp.abs(value) == 0.5), 0.0, value)  # its table holds no 2**-7
        value = value * lax.bitcast_convert_type((127 + TOP - below) << 23, jnp.float32)
        return permute_dims(value.reshape(KEYS, DIM)), largest
    bits = (scales[:, :, None] >> (8 * lax.iota(jnp.int32, 2))[None, None, :]).astype(jnp.uint8)
    factor = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32).reshape(KEYS, -1)
    keys = permute_dims((value * (factor * 2.0**-SHIFT)[:, :, None]).reshape(KEYS, DIM)).astype(jnp.bfloat16)
    return keys[:, : DIM // 2], keys[:, DIM // 2 :]


@unpack.mosaic
def _(tile, layout):
    words, scales = tile
    emit, returns = (_e4m3_keys, (_E4M3_KEYS, _SCALES)) if layout.scale == "e8m0" else (_bf16_keys, (_KEYS, _KEYS))
    return mlir.inline(emit, (words, _CODES.layout), (scales, _SCALES.layout), returns=returns)


def _bf16_keys(words, scales):
    halves: list[list[Any]] = [[None] * 16, [None] * 16]
    pair_type = mlir.vector_type(2, ir.BF16Type.get())
    for row, (quad, scale) in enumerate(zip(words.registers.flat, mlir.values(scales), strict=True)):
        # E4M3's bits, moved, are a bfloat16 2**120 smaller; unpacked codes are 2**126 smaller.
        exact = [multiply((U32(scale) >> 8 * i & 0x7F) * 0x00100010, 0x7B807B80) for i in range(2)]
        factors = [multiply(x, (127 + 126 - SHIFT) * 0x00800080) for x in exact]
        for i, word in enumerate(mlir.values(quad)):
            for pair, bits in enumerate(e2m1_pairs(U32(word))):
                # The register's place in the operand of one of 8 steps of 16 dims.
                step, column = 2 * i + pair // 2, pair % 2
                value = multiply(bits, factors[i // 2])
                halves[step // 4][4 * (step % 4) + 2 * column + row] = mgpu.utils.bitcast(value.value, pair_type)
    return halves


def _e4m3_keys(words, scales):
    """A byte permutation looks four sizes up in a table, which holds the scale too; signs are put beside them."""
    first, second = map(U32, mlir.values(scales))
    both = first | second << 16
    for distance in (1, 2):
        other = U32(mgpu.utils.shfl_bfly(both.value, distance))
        both = thread_ops.pure("max.u16x2 $0, $1, $2;", both, other)
    largest = both & 0xFFFF, both >> 16
    held: list[Any] = [None] * 16
    for row, (quad, scale, top) in enumerate(zip(words.registers.flat, (first, second), largest, strict=True)):
        below = (top - scale).minimum(FARTHEST)
        # 0, 0.5, 1, 1.5 and 2, 3, 4, 6, times 2**TOP; a binade less is 8 less.
        low, high = U32(0x6C686000) - below * 0x08080800, U32(0x7C787470) - below * 0x08080808
        for i, word in enumerate(map(U32, mlir.values(quad))):
            sizes, left = word & 0x77777777, word << 4
            for half, (selector, order) in enumerate(((sizes, 0x5140), (sizes >> 16, 0x7362))):
                size = thread_ops.pure("prmt.b32 $0, $1, $2, $3;", low, high, selector)
                sign = thread_ops.pure("prmt.b32 $0, $1, $2, $3;", left, word, order) & 0x80808080
                held[4 * i + 2 * half + row] = (size | sign).value
    return held, [x.value for x in largest]


@primitive
def score(
    keys: tuple[jax.Array, jax.Array],
    *,
    queries,
    weights,
    token: jax.Array,
    out,
    row: jax.Array,
    first: jax.Array,
    block: jax.Array,
    factor: float,
) -> None:
    """out[row, first + s] = factor * sum_h weights[token, h] * relu(queries[token, h] . keys[s]) for a tile's keys.

    Args:
      keys: what `unpack` returned.
      queries, weights: what `query_operands` left in shared memory.
      token, row, first: int32 scalars.
      out: [T, E] float32 in global memory; entries past E are not written.
      block: [4] int32 in layout PER_WARP, negative where the warp's keys do not exist: their score is -inf.
      factor: positive.
    """
    scaled = queries.dtype == jnp.float8_e4m3fn
    tile = keys[0] if scaled else jnp.concatenate(keys, axis=1).astype(jnp.float32)
    dots = jnp.dot(tile, queries[pl.ds(token * HEADS, HEADS)].astype(jnp.float32).T, precision="highest")
    total = jnp.dot(jnp.maximum(dots, 0.0), weights[token], precision="highest") * factor
    total = total * lax.bitcast_convert_type(keys[1][:, 0] << 23, jnp.float32) if scaled else total
    total = jnp.where(jnp.repeat(block < 0, WARP_KEYS), -jnp.inf, total)
    for start in range(0, KEYS, WARP_KEYS):

        @pl.when(first + start < out.shape[1])
        def _(start=start):
            out[row, pl.ds(first + start, WARP_KEYS)] = total[start : start + WARP_KEYS]


@score.mosaic
def _(keys, *, queries, weights, token, out, row, first, block, factor):
    entries, scaled = out.shape[1], queries.dtype == jnp.float8_e4m3fn

    def emit(one, other, queries, weights, token, out, row, first, block):
        token, row, first, block = map(mlir.scalar, (token, row, first, block))
        lane, f32 = thread_ops.lane(), mlir.f32_type()
        registers = mlir.values(one) if scaled else [*one.registers.flat, *other.registers.flat]
        dots = _dots(registers, queries, token, "e4m3" if scaled else "bf16")
        place = U32(token) * HEADS + ((lane & 3) << 1)
        pointer = mlir.at(mlir.shared_pointer(weights), place.value, f32)
        sums = [mlir.f32(0.0), mlir.f32(0.0)]
        for i in range(HEADS // 8):
            pair = llvm.load(mlir.vector_type(2, f32), mlir.at(pointer, 8 * i, f32), alignment=8)
            for j in range(2):
                for half in range(2):
                    x = dots[4 * i + 2 * half + j]
                    # 2 * relu(x): Hopper adds at twice the rate of taking the larger.
                    weight = vector.extract(pair, [], [j])
                    sums[half] = math.fma(weight, arith.addf(x, math.absf(x)), sums[half])
        total = arith.mulf(_add_quads(sums, lane), mlir.f32(0.5 * factor))
        if scaled:
            even, odd = map(U32, mlir.values(other))
            total = arith.mulf(total, mgpu.utils.bitcast(((lane & 1).equals(1).where(odd, even) << 23).value, f32))
        missing = arith.cmpi(arith.CmpIPredicate.slt, block, mlir.i32(0))
        total = arith.select(missing, mlir.f32(-np.inf), total)
        first = (thread_ops.thread() % mlir.THREADS >> 5) * WARP_KEYS + U32(first)
        inside = U32(arith.cmpi(arith.CmpIPredicate.slt, first.value, mlir.i32(entries)))
        with thread_ops.when(inside & (lane & 2).equals(0)):
            key = (lane & 1) * 8 + (lane >> 2)
            offset = _multiply_add(mlir.to_i64(row), entries, mlir.to_i64((first + key).value))
            llvm.store(total, mlir.at(mlir.global_pointer(out), offset, f32))

    layouts = (_E4M3_KEYS, _SCALES) if scaled else (_KEYS, _KEYS)
    transforms = query_operands.transforms(queries.dtype)
    operands = (queries, plgpu.RefType(transforms)), weights, token, out, row, first, (block, PER_WARP)
    mlir.inline(emit, *((x, kind.layout) for x, kind in zip(keys, layouts, strict=True)), *operands)


def _add_quads(sums, lane):
    """Sums over the four lanes of a key: the first key's in the even lanes, the second's in the odd ones."""
    odd = (lane & 1) > 0
    mine, other = (arith.select(odd.value, x, y) for x, y in ((sums[1], sums[0]), sums))
    total = arith.addf(mine, mgpu.utils.shfl_bfly(other, 1))
    return arith.addf(total, mgpu.utils.shfl_bfly(total, 2))


def _dots(registers, queries, token, kind):
    """A tile's products with a token's queries, complete: 32 float32 values of [64 keys, 64 heads]."""
    size = dict(e4m3=1, bf16=2)[kind]
    registers = [mgpu.utils.bitcast(register, mlir.int_type()) for register in registers]
    address = llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(queries))
    address = _multiply_add(mlir.to_i64(token), HEADS * DIM * size, address)
    start = arith.shrui(arith.andi(address, mlir.i64(0x3FFFF)), mlir.i64(4))
    # From 8 heads to the next; 128-byte swizzle.
    descriptor = arith.ori(start, mlir.i64(1 << 62 | (1024 * size >> 4) << 32 | 1 << 16))
    sums, steps = ", ".join(f"${i}" for i in range(32)), len(registers) // 4
    lines = ["{ .reg .pred p; .reg .b64 d; setp.ne.b32 p, 0, 0; wgmma.fence.sync.aligned;"]
    for step in range(steps):
        a = ", ".join(f"${32 + 4 * step + i}" for i in range(4))
        # After 4 steps of 32 bytes the heads' next 128 bytes follow.
        lines += [
            f"add.s64 d, ${32 + 4 * steps}, {(step // 4 * 1024 + step % 4 * 32) >> 4};",
            f"wgmma.mma_async.sync.aligned.m64n64k{32 // size}.f32.{kind}.{kind} {{{sums}}}, {{{a}}}, d, p, 1, 1"
            + (", 0;" if kind == "bf16" else ";"),
        ]
        if step == 0:
            lines.append("setp.eq.b32 p, 0, 0;")
    lines.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }")
    return mlir.ptx("\n".join(lines), *registers, descriptor, results=[mlir.f32_type()] * 32)


def _multiply_add(x, factor, y):
    """x * factor + y of 64-bit integers."""
    return arith.addi(arith.muli(x, mlir.i64(factor)), y)
