"""Products of quantized weights with many inputs, by the instruction `wgmma` with unpacked weights in registers.

A tile of weights is 32, 64 or 128 bytes of each row, in shared memory. A thread unpacks weights of the two rows that it
multiplies:

  * FP8: the columns that `wgmma` expects in the thread.
  * FP4: four consecutive bytes of every 16 bytes of a row. These are 8 columns with one scale, but `wgmma` expects
    other columns in the thread. Therefore the columns of the inputs are permuted in the same way (`permute_columns`).
  * bfloat16: the columns that `wgmma` expects, which `ldmatrix` loads; there is nothing to unpack.
"""

import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import llvm

from pallas_kernels.matmul import quantized_weights
from pallas_kernels.matmul.quantized_weights import HALF, ROWS, SHIFT, WeightLayout, decode_scales, power_pair
from pallas_kernels.mgpu import mlir, thread_ops, wgmma
from pallas_kernels.mgpu.bfloat16_words import e2m1_pairs, e4m3_pairs, multiply
from pallas_kernels.mgpu.mlir import Scalar
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import primitive


CHUNK = 64  # number of columns of `wgmma`'s operands in shared memory


def code_transforms(layout: WeightLayout, row_bytes: int) -> tuple[Any, ...]:
    """Returns the tiling and the swizzle of weights in shared memory, for `row_bytes` bytes of each row."""
    return plgpu.TilingTransform((8, layout.elements(layout.columns(row_bytes)))), plgpu.SwizzleTransform(row_bytes)


def permute_columns(x: jax.Array) -> jax.Array:
    """Reorders the columns of inputs x [.., columns], in groups of 32, to the order of unpacked FP4 weights."""
    # The axes of 32 columns are (thread of four, half of a word, k step of 16 columns, half of the step). They are
    # reordered to (k step, half of the step, thread, half of a word).
    *lead, columns = x.shape
    parts = x.reshape(*lead, columns // 32, 4, 2, 2, 2)
    order = [len(lead) + i for i in (0, 3, 4, 1, 2)]
    return parts.transpose(*range(len(lead)), *order).reshape(x.shape)


@primitive
def multiply_tile(
    acc: jax.Array, codes_smem, scales_smem, scale_at, inputs_smem, warpgroup, layout, gated: bool, complete=True
) -> jax.Array:
    """Returns acc + weights @ inputs.T of a tile, [64, N] float32, with FP8 and FP4 weights scaled by 2**-32.

    The R rows of a tile are divided among all warpgroups that multiply. Warpgroup w multiplies the 64 rows from
    `64 * w` on. If gated, it multiplies 32 rows of the gate, from `32 * w` on, and 32 rows of the up projection, from
    `R / 2 + 32 * w` on. A thread then gets the sums of a gate row and of its up row, see `interleave_halves`.

    Args:
      acc: [64, N] float32 sums to add to.
      codes_smem: [1, R, n], or if gated [2, R / 2, n], weights or codes. A row of bfloat16 has 128 bytes. If the codes
        have twice as many columns as `inputs_smem`, they are two consecutive tiles, of which `scale_at` selects one.
      scales_smem: None unless the weights are FP4. FP4: [1, lines, scales of a line] uint8, or if gated [2, ..], with
        16, 8 or all scales of each row. A scale is for 32 columns.
      scale_at: int32 scalar, one of these:
        * FP4: index of the tile's first scale among the scales of a row in `scales_smem`.
        * FP8: the tile's scale; if gated, the gate's scale plus 256 times the up projection's scale.
        * FP8 with blocks of 32 x 32 values: four bytes, one for each block. The two low bytes are for the two blocks in
          the warpgroup's first 32 rows, from left to right. The two high bytes are for those in its other 32 rows.
        * bfloat16: not used.
      inputs_smem: [N, columns] bfloat16 with `TRANSFORMS`.
      warpgroup: int32 scalar, index w of this warpgroup.
      layout: storage of the weights.
      gated: whether half of the rows are the gate's.
      complete: whether to wait for all products. If not, the products of the last 64 columns may still run, and
        `complete_sums` has to follow the last tile.
    """
    rows = codes_smem.shape[0] * codes_smem.shape[1]
    first_row = HALF * warpgroup if gated else ROWS * warpgroup
    halves = first_row, first_row + (rows // 2 if gated else HALF)

    def own_rows(array):
        array = array.reshape(rows, -1)
        return jnp.concatenate([lax.dynamic_slice_in_dim(array, row, HALF) for row in halves])

    values = quantized_weights.decode(own_rows(codes_smem[...]), layout)
    columns = inputs_smem.shape[1]
    if layout.bits == 4:
        first_column = lax.rem(scale_at * 32, values.shape[1])
        values = lax.dynamic_slice_in_dim(values, first_column, columns, axis=1)
        exponents = lax.dynamic_slice_in_dim(own_rows(scales_smem[...]), scale_at, values.shape[1] // 32, axis=1)
        values = permute_columns(values * jnp.repeat(decode_scales(exponents.astype(jnp.int32)), 32, axis=1))
    elif layout.bits == 8:
        row_bits, column_bits = (16, 8) if layout.has_small_blocks else (8 * gated, 0)
        shift = (lax.iota(jnp.int32, ROWS) // HALF * row_bits)[:, None]
        shift = shift + (lax.iota(jnp.int32, columns) // HALF * column_bits)[None, :]
        values *= decode_scales((scale_at >> shift) & 255)
    products = jnp.dot(values, inputs_smem[...].astype(jnp.float32).T, precision="highest")
    return acc + (quantized_weights.interleave_halves(products) if gated else products)


@multiply_tile.mosaic
def _multiply_tile_mosaic(acc, codes_smem, scales_smem, scale_at, inputs_smem, warpgroup, layout, gated, complete=True):
    chunks = inputs_smem.shape[1] // CHUNK
    matrices, matrix_rows, width = codes_smem.shape
    rows = matrices * matrix_rows
    row_bytes = width * codes_smem.dtype.itemsize
    unpacker = {4: _fp4_unpacker, 8: _fp8_unpacker, 16: _bf16_loader}[layout.bits]

    def emit(acc, codes, scale_at, inputs, warpgroup, *scales):
        thread = mlir.thread()
        row_distance = rows // 2 if gated else 8  # from the thread's first row to its second row
        lane = thread % 32
        warp_row = lane >> 2
        row_offset = (lane & 3) * layout.columns(2)  # offset in bytes in the row
        if layout.bits == 16:  # in `ldmatrix`, a thread gives the address of one row and receives values of other rows
            warp_row = (lane & 7) + ((lane >> 3) & 1) * row_distance
            row_offset = (lane >> 4) << 4
        first_row = (thread >> 5) * (8 if gated else 16) + warp_row
        first_row = first_row + warpgroup * (HALF if gated else ROWS)  # index of the thread's first row in the tile
        # The swizzle permutes 16-byte pieces: a piece's index in a row is XORed with the index of its 128-byte line.
        swizzle = ((first_row * row_bytes) >> 7) & (row_bytes // 16 - 1)
        if layout.columns(row_bytes) > chunks * CHUNK:
            # `codes` holds two tiles side by side. A scale belongs to 16 bytes of a row, so the tile's first byte in
            # a row is 16 times `scale_at`, the index of the tile's first scale.
            row_offset = row_offset ^ ((scale_at << 4) & (row_bytes - 1))
        place = thread_ops.shared(codes) + first_row * row_bytes + ((swizzle << 4) ^ row_offset)
        # `row_scales` is the argument `scales` of the unpacker, for the two rows of this thread.
        if scales:
            (table,) = scales
            size = math.prod(table.type.shape) // rows  # number of scales of a row
            # A step of a single chunk needs only two scales of a row, 2 bytes at an even address.
            kind = "u16" if chunks == 1 else "u32"
            row_scales = thread_ops.shared(table) + first_row * size + scale_at, row_distance * size, kind
        else:
            # Here `scale_at` is no index but holds scales. If gated, a thread has a gate's row and an up row. Otherwise
            # both rows of a thread have the same scales. With small blocks, these are the scales of one half of the
            # warpgroup's rows, whose bytes are shifted to the lower end of `word`.
            blocks = 1 + layout.has_small_blocks  # number of scales of a row
            word = scale_at >> ((thread >> 6) << 4) if layout.has_small_blocks and not gated else scale_at
            row_scales = [[(word >> (8 * (blocks * half + i))) & 255 for i in range(blocks)] for half in (0, gated)]
        unpack = unpacker(place, row_distance * row_bytes, row_scales)
        sums = mlir.values(acc)
        inputs_address = Scalar(llvm.ptrtoint(mlir.int_type(64), mlir.shared_pointer(inputs)))
        for chunk in range(chunks):
            weights = [x for step in unpack(chunk) for x in step]
            sums = _multiply(sums, weights, inputs_address, chunk, chunks)
            # While these products run, the next chunk is unpacked into the registers of the previous chunk's weights.
            sums = _wait(sums, pending=1) if chunk < chunks - 1 or not complete else sums
        return _wait(sums, pending=0) if complete else sums

    codes = codes_smem, plgpu.RefType(code_transforms(layout, row_bytes))
    inputs = inputs_smem, plgpu.RefType(TRANSFORMS)
    operands = acc, codes, scale_at, inputs, warpgroup, *([] if scales_smem is None else [scales_smem])
    return mlir.inline(emit, *operands, layout=wgmma.layout, returns=acc)


@primitive
def complete_sums(acc: jax.Array) -> jax.Array:
    """Waits for all products of `multiply_tile` with `complete=False`, and returns the sums acc [64, N]."""
    return acc


@mlir.emits(complete_sums, layout=wgmma.layout, returns=lambda acc: acc)
def _(acc):
    return _wait(mlir.values(acc), pending=0)


def _wait(values, pending):
    """Waits for all products except those of the `pending` newest chunks of 64 columns, and returns the sums `values`.

    Code that uses the returned values cannot be moved before the wait.
    """
    code = f"wgmma.wait_group.sync.aligned {pending};"
    return mlir.ptx(code, results=[x.type for x in values], in_out=values)


def _load(address: Scalar, offset: int, kind: str = "u32") -> Scalar:
    if kind == "u32":
        return thread_ops.ptx(f"ld.shared.u32 $0, [$1 + {offset}];", address)
    return thread_ops.ptx(f"{{ .reg .{kind} s; ld.shared.{kind} s, [$1 + {offset}]; cvt.u32.{kind} $0, s; }}", address)


def _permute_bytes(x: Scalar, y: Scalar | int, selector: int) -> Scalar:
    return thread_ops.pure(f"prmt.b32 $0, $1, $2, {selector:#06x};", x, y)


def _fp8_unpacker(place, other, scales):
    """Returns a function that unpacks a chunk of 64 columns of FP8 weights.

    Args:
      place: address of the thread's first bytes in shared memory.
      other: distance in bytes from the thread's first row to its second row.
      scales: two lists of E8M0 scales, for the two rows: one scale, or a scale for each 32 columns.

    Returns:
      A function that maps the index of a chunk to [4][4] registers of `wgmma`'s left operand, four for each k step of
      16 columns.
    """
    factors = [[power_pair(x + (120 - SHIFT)) for x in row] for row in scales]

    def unpack(chunk):
        steps: list[list[Any]] = [[None] * 4 for _ in range(4)]
        for step in range(4):
            step_place = place ^ ((4 * chunk + step) << 4)
            for half in range(2):
                low = _load(step_place, half * other, "u16")  # columns 2j and 2j + 1 of thread j of a quad
                high = _load(step_place, half * other + 8, "u16")  # columns 2j + 8 and 2j + 9
                # `e4m3_pairs` pairs bytes 0 and 2, here the codes in `low`, and bytes 1 and 3, the codes in `high`.
                word = _permute_bytes(low, high, 0x5140)
                for pair, x in enumerate(e4m3_pairs(word)):
                    steps[step][2 * pair + half] = multiply(x, factors[half][step * len(factors[half]) // 4])
        return steps

    return unpack


def _fp4_unpacker(place, other, scales):
    """Returns a function that unpacks a chunk of FP4 weights, see `_fp8_unpacker`.

    `scales` is (address, distance, kind): the address of the first scale of the thread's first row, the distance in
    bytes to the first scale of the thread's second row, and the PTX type of a load of scales, "u16" or "u32".
    """
    scale_place, other_scales, kind = scales

    def unpack(chunk):
        steps: list[list[Any]] = [[None] * 4 for _ in range(4)]
        for half in range(2):
            exponents = _load(scale_place, half * other_scales + chunk // 2 * 4, kind) + (126 - SHIFT) * 0x01010101
            for block in range(2):
                number = 2 * chunk + block  # index of the block of 32 columns, 16 bytes, with one scale
                # `factor` holds two equal bfloat16, whose exponent bits are byte `number % 4` of `exponents`.
                factor = _permute_bytes(exponents, 0, 0x4040 | (number % 4) * 0x0101) << 7
                word = _load(place ^ (number << 4), half * other)
                for pair, value in enumerate(e2m1_pairs(word)):
                    steps[2 * block + pair // 2][2 * (pair % 2) + half] = multiply(value, factor)
        return steps

    return unpack


def _bf16_loader(place, *_):
    """Returns a function that loads a chunk of bfloat16 weights, see `_fp8_unpacker`.

    `place` is the address of the 16 bytes of chunk 0 that this thread gives to `ldmatrix`.
    """
    code = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"

    def load(chunk):
        places = (place ^ ((4 * chunk + step) << 5) for step in range(4))
        return [thread_ops.ptx_words(4, code, step_place) for step_place in places]

    return load


def _multiply(sums, weights, inputs, chunk, chunks):
    """Starts to add the products of a chunk of 64 columns to the sums.

    Args:
      sums: this thread's N / 2 float32 sums.
      weights: 16 registers of unpacked weights, four for each k step.
      inputs: 64-bit address of the inputs [N / 8, chunks, 8, 64] bfloat16 in shared memory.
      chunk: index of the chunk.
      chunks: number of chunks of the inputs.

    Returns:
      The new sums, which are valid after `_wait`.
    """
    size = len(sums)
    address = inputs + chunk * 1024
    address = (address & 0x3FFFF) >> 4
    # The matrix descriptor of the inputs. Its lowest bits are the address, in units of 16 bytes. Bits 32 and up are the
    # stride between groups of 8 rows, in the same units. Bits 62 and up select the 128-byte swizzle. Bits 16 and up are
    # a stride that is not used with this swizzle.
    descriptor = address | ((1 << 62) | ((chunks * 1024 >> 4) << 32) | (1 << 16))
    registers = ", ".join(f"${i}" for i in range(size))
    lines = ["{ .reg .pred p; .reg .b64 d; setp.eq.b32 p, 0, 0; wgmma.fence.sync.aligned;"]
    for step in range(4):
        a = ", ".join(f"${size + 4 * step + i}" for i in range(4))
        lines += [
            f"add.s64 d, ${size + 16}, {(step * 32) >> 4};",
            f"wgmma.mma_async.sync.aligned.m64n{2 * size}k16.f32.bf16.bf16 {{{registers}}}, {{{a}}}, d, p, 1, 1, 0;",
        ]
    lines.append("wgmma.commit_group.sync.aligned; }")
    results = [mlir.f32_type()] * size
    return mlir.ptx("\n".join(lines), *weights, descriptor, results=results, in_out=sums)
