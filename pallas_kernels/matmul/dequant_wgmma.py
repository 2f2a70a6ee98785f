"""Products of stored weights with many inputs: in registers, where they are unpacked, the left operand of `wgmma`.

A tile of weights is 64 or 128 bytes of each row, in shared memory. A thread has the bytes of two rows that it
multiplies: of FP8 those of the columns which `wgmma` wants, in order; of FP4 four bytes of 16, so that a word is 8
columns with one scale, and inputs lie in the order of `permute_columns`. bfloat16 weights are loaded as they are.

As in `quantized_weights`, weights unpacked from FP8 and FP4 are 2**-32 of their values: exact for E8M0 scales from
2**-85 to 2**33.
"""

import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.matmul.quantized_weights import ROWS, SHIFT, WeightLayout
from pallas_kernels.mgpu import mlir, thread_ops
from pallas_kernels.mgpu.thread_ops import U32
from pallas_kernels.mgpu.unpack import e2m1_pairs, e2m1_value, multiply
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import primitive


CHUNK = 64  # columns of `wgmma`'s operands in shared memory


def code_transforms(layout: WeightLayout, bytes: int) -> tuple:
    """Of a tile of codes with so many bytes of a row."""
    return plgpu.TilingTransform((8, layout.elements(layout.columns(bytes)))), plgpu.SwizzleTransform(bytes)


def permute_columns(x: jax.Array) -> jax.Array:
    """[.., columns] in the order in which FP4 is unpacked: each 32 columns change places among themselves."""
    # column = (thread's 8, half word, k step, k step's half) -> (k step, k step's half, thread, half word)
    *lead, columns = x.shape
    parts = x.reshape(*lead, columns // 32, 4, 2, 2, 2)
    order = [len(lead) + i for i in (0, 3, 4, 1, 2)]
    return parts.transpose(*range(len(lead)), *order).reshape(x.shape)


@primitive
def multiply_tile(
    acc: jax.Array,
    codes,
    scales,
    at: jax.Array,
    inputs,
    group: jax.Array,
    layout: WeightLayout,
    gated: bool,
    complete: bool = True,
) -> jax.Array:
    """acc + weights @ inputs of a tile: [64, N] float32, 2**-32 of the products of FP8 and FP4.

    Args:
      codes: [1, R, n], or where `gated` [2, R / 2, n], of the layout's dtype in shared memory with `code_transforms`,
        rows of all warpgroups that multiply; of bfloat16 128 bytes of each.
      scales: of FP4 [.., .., 16] uint8 in shared memory, among them the tile's: 16 of a row or 8. Otherwise None.
      at: int32 scalar; of FP4 the place of the tile's first scale in a row, of FP8 the tile's scale; where `gated` that
        of the other rows times 256 is added to it.
      inputs: [N, columns] bfloat16 in shared memory with TRANSFORMS.
      group: number of the warpgroup, which has rows `64 * group ..`; or, where `gated`, 32 rows from `32 * group` on
        and the 32 that are R / 2 further.
      layout: of the weights.
      gated: the two 32 rows meet in a thread: they are rows 16 * (i // 8) + i % 8, and 8 more, of the sums.
      complete: otherwise the tile's last 64 columns may still be multiplied, none before, and `complete_sums` has to
        follow what adds up tiles.
    """
    rows, half = codes.shape[0] * codes.shape[1], ROWS // 2
    starts = (half * group, rows // 2 + half * group) if gated else (ROWS * group, ROWS * group + half)

    def own(array):
        array = array.reshape(rows, -1)
        return jnp.concatenate([lax.dynamic_slice_in_dim(array, start, half) for start in starts])

    values = own(codes[...])
    if layout.bits == 16:
        values = values.astype(jnp.float32)
    elif layout.bits == 4:
        values = values.astype(jnp.int32)
        values = e2m1_value(jnp.stack([values & 15, values >> 4], axis=-1)).reshape(ROWS, -1)
        factors = lax.dynamic_slice_in_dim(own(scales[...]), at, values.shape[1] // 32, axis=1).astype(jnp.int32)
        factors = jnp.repeat(lax.bitcast_convert_type((factors - SHIFT) << 23, jnp.float32), 32, axis=1)
        values = permute_columns(values * factors)
    else:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
        exponents = (at >> lax.iota(jnp.int32, ROWS) // half * (8 * gated) & 255)[:, None]
        values = values * lax.bitcast_convert_type((exponents - SHIFT) << 23, jnp.float32)
    products = jnp.dot(values, inputs[...].astype(jnp.float32).T, precision="highest")
    if gated:
        products = products.reshape(2, 4, 8, -1).transpose(1, 0, 2, 3).reshape(ROWS, -1)
    return acc + products


@multiply_tile.mosaic
def _(acc, codes, scales, at, inputs, group, layout, gated, complete=True):
    chunks, (parts, rows, width) = inputs.shape[1] // CHUNK, codes.shape
    rows, bytes = rows * parts, width * codes.dtype.itemsize
    unpacker = {4: _fp4_unpacker, 8: _fp8_unpacker, 16: _bf16_loader}[layout.bits]

    def emit(acc, codes, at, inputs, group, *scales):
        thread, at = U32(mlir.thread()), U32(mlir.scalar(at))
        other, lane = rows // 2 if gated else 8, thread % 32
        row, part = lane >> 2, (lane & 3) * layout.columns(2)
        if layout.bits == 16:  # of `ldmatrix`, whose threads have other values than those whose places they give
            row, part = (lane & 7) + (lane >> 3 & 1) * other, lane >> 4 << 4
        line = (thread >> 5) * (8 if gated else 16) + row
        line = line + U32(mlir.scalar(group)) * (ROWS // 2 if gated else ROWS)
        # The swizzle exchanges 16 bytes at a time: 128 bytes of each row, or of two rows, with 8 of them.
        swizzle = line * bytes >> 7 & (bytes // 16 - 1)
        place = thread_ops.shared(codes) + line * bytes + (swizzle << 4 ^ part)
        scale_place = []
        for table in scales:
            size = math.prod(ir.MemRefType(table.type).shape) // rows  # of a row
            scale_place = [(thread_ops.shared(table) + line * size + at, other * size)]
        factors = [at & 255, at >> (8 if gated else 0) & 255]
        unpack = unpacker(place, other * bytes, *(scale_place or [factors]))
        sums = mlir.values(acc)
        start = llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(inputs))
        for chunk in range(chunks):
            weights = [x.value for step in unpack(chunk) for x in step]
            sums = _multiply(sums, weights, start, chunk, chunks)
            # The next weights are unpacked beside these products, into registers which those before them read.
            sums = _wait(sums, pending=1) if chunk < chunks - 1 or not complete else sums
        return _wait(sums, pending=0) if complete else sums

    operands = [] if scales is None else [scales]
    places = (codes, plgpu.RefType(code_transforms(layout, bytes))), at, (inputs, plgpu.RefType(TRANSFORMS)), group
    return mlir.inline(emit, acc, *places, *operands, layout=lambda _: plgpu.Layout.WGMMA, returns=acc)


@primitive
def complete_sums(acc: jax.Array) -> jax.Array:
    """The sums, once `wgmma` has written them."""
    return acc


@complete_sums.mosaic
def _(acc):
    def emit(acc):
        return _wait(mlir.values(acc), pending=0)

    return mlir.inline(emit, acc, layout=lambda _: plgpu.Layout.WGMMA, returns=acc)


def _wait(values, pending):
    """Waits for products, but for the last `pending` times 64 columns; the values stay on their side of it."""
    code = f"wgmma.wait_group.sync.aligned {pending};"
    return mlir.ptx(code, results=[x.type for x in values], in_out=values)


def _load(address: U32, offset: int, kind: str = "u32") -> U32:
    if kind == "u32":
        return thread_ops.ptx(f"ld.shared.u32 $0, [$1 + {offset}];", address)
    return thread_ops.ptx(f"{{ .reg .{kind} s; ld.shared.{kind} s, [$1 + {offset}]; cvt.u32.{kind} $0, s; }}", address)


def _permute_bytes(x: U32, y: U32 | int, selector: int) -> U32:
    operands = x.value, U32(y).value
    code = f"prmt.b32 $0, $1, $2, {selector:#06x};"
    return U32(mlir.ptx(code, *operands, results=mlir.int_type(), pure=True))


def _fp8_unpacker(place, other, scales):
    """chunk -> registers of the left operand for each step of 16 columns.

    place: address of the thread's first bytes; `other`: how far its other row is; `scales`: of both.
    """
    factors = [U32(arith.minsi((x + (120 - SHIFT)).value, mlir.i32(254))) * 0x00800080 for x in scales]

    def unpack(chunk):
        steps: list[list[Any]] = [[None] * 4 for _ in range(4)]
        for step in range(4):
            here = place ^ (4 * chunk + step << 4)
            for half in range(2):
                low, high = (_load(here, half * other + 8 * i, "u16") for i in range(2))
                # Bytes 0 and 2 are columns 2i and 2i + 1; 1 and 3 those 8 further on.
                word = _permute_bytes(low, high, 0x5140)
                for pair, x in enumerate((word << 8, word)):
                    steps[step][2 * pair + half] = multiply(x & 0x80008000 | x >> 4 & 0x07F007F0, factors[half])
        return steps

    return unpack


def _fp4_unpacker(place, other, scales):
    """See `_fp8_unpacker`."""
    scale_place, other_scales = scales

    def unpack(chunk):
        steps: list[list[Any]] = [[None] * 4 for _ in range(4)]
        for half in range(2):
            exponents = _load(scale_place, half * other_scales + chunk // 2 * 4) + (126 - SHIFT) * 0x01010101
            for block in range(2):
                at = 2 * chunk + block
                factor = _permute_bytes(exponents, 0, 0x4040 | at % 4 * 0x0101) << 7
                word = _load(place ^ (at << 4), half * other)
                for pair, value in enumerate(e2m1_pairs(word)):
                    steps[2 * block + pair // 2][2 * (pair % 2) + half] = multiply(value, factor)
        return steps

    return unpack


def _bf16_loader(place, *_):
    """See `_fp8_unpacker`; `place`: of 16 bytes that `ldmatrix` takes from this thread."""
    code = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"

    def load(chunk):
        places = (place ^ (4 * chunk + step << 5) for step in range(4))
        return [[U32(x) for x in mlir.ptx(code, at.value, results=[mlir.int_type()] * 4)] for at in places]

    return load


def _multiply(sums, weights, inputs, chunk, chunks):
    """Starts to add products of 64 columns to the sums; `inputs`: address of [N / 8, chunks, 8, 64] bfloat16."""
    size = len(sums)
    start = arith.addi(inputs, mlir.i64(chunk * 1024))
    start = arith.shrui(arith.andi(start, mlir.i64(0x3FFFF)), mlir.i64(4))
    # From 8 rows to the next; 128-byte swizzle.
    descriptor = arith.ori(start, mlir.i64(1 << 62 | (chunks * 1024 >> 4) << 32 | 1 << 16))
    held = ", ".join(f"${i}" for i in range(size))
    lines = ["{ .reg .pred p; .reg .b64 d; setp.eq.b32 p, 0, 0; wgmma.fence.sync.aligned;"]
    for step in range(4):
        a = ", ".join(f"${size + 4 * step + i}" for i in range(4))
        lines += [
            f"add.s64 d, ${size + 16}, {step * 32 >> 4};",
            f"wgmma.mma_async.sync.aligned.m64n{2 * size}k16.f32.bf16.bf16 {{{held}}}, {{{a}}}, d, p, 1, 1, 0;",
        ]
    lines.append("wgmma.commit_group.sync.aligned; }")
    results = [mlir.f32_type()] * size
    return mlir.ptx("\n".join(lines), *weights, descriptor, results=results, in_out=sums)
