"""Weights in the release's storage on their way from shared memory into products: FP8, and FP4 with a scale for 32.

A warpgroup multiplies 64 rows, of which a thread has two. Four threads share a row: each takes 16 bytes of 64, so that
it holds whole scale blocks of FP4. `wgmma` wants other columns in that thread, but a sum does not depend on the order
of its terms: `load_inputs` reorders the inputs instead.

Unpacked weights are 2**-32 of their values, as bfloat16: exact for E8M0 scales from 2**-85 to 2**33.
"""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mlir_helpers as mlir, thread_ops
from pallas_kernels.common.primitive import primitive
from pallas_kernels.common.thread_ops import U32
from pallas_kernels.common.unpack import e2m1_pair, e2m1_value, e4m3_pair, multiply
from pallas_kernels.common.wgmma_results import TRANSFORMS


ROWS = 64  # of a tile
SEGMENT = 64  # bytes of a row that four threads share
SEGMENTS = 4  # of a step, one for each of the warpgroups that multiply
STEP_BYTES = SEGMENT * SEGMENTS
CHUNK = 64  # columns of `wgmma`'s operands in shared memory
SHIFT = 32
_WEIGHTS = plgpu.ShapeDtypeStruct((ROWS, CHUNK), jnp.bfloat16, plgpu.Layout.WGMMA)


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """How a matrix [out, in] is stored.

    Attributes:
      per_byte: columns in a byte: 1 of FP8, 2 of FP4, whose even columns are the low nibbles.
    """

    per_byte: int

    @property
    def columns(self) -> int:
        """Columns of a step."""
        return STEP_BYTES * self.per_byte

    @property
    def step_scales(self) -> int:
        """Scales of a row's step that travel with it: FP8 has one for 128 x 128 values."""
        return 16 if self.per_byte == 2 else 0

    @property
    def chunks(self) -> int:
        """64 columns each, of a segment."""
        return SEGMENT * self.per_byte // CHUNK


FP8, FP4 = WeightLayout(1), WeightLayout(2)


# --- inputs ---


@primitive
def load_inputs(tile, source, rows, divisor: int, column, group: jax.Array, layout: WeightLayout) -> None:
    """Copies rows of inputs to shared memory, by four warpgroups together, in the order in which weights are unpacked.

    A barrier has to follow; shows what it wrote to `wgmma`.

    Args:
      tile: [columns / 64, N, 64] bfloat16 with TRANSFORMS, N a multiple of 8.
      source: [.., columns] bfloat16 in global memory.
      rows: [N] int32 in shared memory: row n of the tile is row `rows[n] // divisor`; where negative, it stays. Or a
        number: that of rows, the first ones.
      column: the first one, a multiple of 64.
      group: number of the warpgroup, 0 .. 3, a scalar.
      layout: of the weights.
    """
    chunks, count, _ = tile.shape
    share = chunks // SEGMENTS
    for n in range(rows if isinstance(rows, int) else count):
        row = jnp.int32(n) if isinstance(rows, int) else rows[n]

        @pl.when(row >= 0)
        def _(n=n, row=row):
            values = source[lax.div(row, divisor), pl.ds(column, chunks * CHUNK)].reshape(chunks, CHUNK)
            for chunk in range(share):
                at = group * share + chunk
                tile[at, n] = values[at]


@load_inputs.mosaic
def _(tile, source, rows, divisor, column, group, layout):
    chunks, count, _ = tile.shape
    columns = chunks * CHUNK

    def emit(tile, source, column, group, *table):
        thread = U32(mlir.thread()) + U32(mlir.scalar(group)) * mlir.THREADS
        there, width = mlir.shared_pointer(tile), ir.MemRefType(source.type).shape[1]
        base = mlir.at(mlir.global_pointer(source), mlir.to_i64(mlir.scalar(column)), ir.BF16Type.get())

        def copy_row(n):
            row = thread_ops.load(thread_ops.shared(table[0]) + (n << 2)) if table else n

            def copy(i):
                """8 columns, which a thread of the product has in one or two words."""
                eight = thread + i * (SEGMENTS * mlir.THREADS)
                offset = arith.muli(mlir.to_i64((row // divisor).value), mlir.i64(2 * width))
                offset = arith.addi(offset, arith.extui(mlir.int_type(64), (eight << 4).value))
                load = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
                words = [U32(x) for x in mlir.ptx(load, mlir.at(base, offset), results=[mlir.int_type()] * 4)]
                for chunk, column, pair in _placed(eight, words, layout):
                    # 8 x 64 values are a tile of the 128-byte swizzle.
                    line = n & 7
                    place = (chunk * count + n - line) * (2 * CHUNK) + line * (2 * CHUNK)
                    place = place + (((column >> 3) ^ line) << 4) + ((column & 7) << 1)
                    llvm.store(pair.value, mlir.at(there, place.value), alignment=4)

            with thread_ops.when(U32(arith.cmpi(arith.CmpIPredicate.sge, row.value, mlir.i32(0)))):
                full, rest = divmod(columns // 8, SEGMENTS * mlir.THREADS)
                for i in range(full):
                    copy(i)
                if rest:
                    with thread_ops.when(thread < rest):
                        copy(full)

        thread_ops.loop(count if table else rows, copy_row)
        mlir.ptx("fence.proxy.async.shared::cta;")

    table = [] if isinstance(rows, int) else [rows]
    mlir.inline(emit, (tile, plgpu.RefType(TRANSFORMS)), source, jnp.int32(column), group, *table)


def _placed(eight, words, layout):
    """(64 columns, column of these, pair of values) of the columns `8 * eight ..`: where the product reads them."""
    if layout.per_byte == 2:
        # (thread's 32, word's 8, half word, k step's half, nibble) -> (k step, nibble, thread, half word)
        thread, word = (eight >> 2) & 3, eight & 3
        chunk = ((eight >> 4) << 1) + (word >> 1)
        for pair in range(4):
            column = ((word & 1) << 5) + (pair // 2 * 16 + pair % 2 * 8) + (thread << 1)
            yield chunk, column, _halves(words[pair // 2], words[2 + pair // 2], pair % 2)
    else:
        # (thread's 16, k step, byte's high bit, low bit) -> (k step, low bit, thread, high bit)
        thread, step = (eight >> 1) & 3, (eight & 1) << 1
        for i in range(4):
            column = ((step + i // 2) << 4) + i % 2 * 8 + (thread << 1)
            yield eight >> 3, column, _halves(words[i // 2 * 2], words[i // 2 * 2 + 1], i % 2)


def _halves(x, y, high):
    """The low or the high halves of two words, x's first."""
    return thread_ops.ptx(f"prmt.b32 $0, $1, $2, {'0x7632' if high else '0x5410'};", x, y)


# --- products ---


@primitive
def multiply_add(
    acc: jax.Array, codes, scales, inputs, first: jax.Array, group: jax.Array, layout: WeightLayout, gated: bool
) -> jax.Array:
    """acc + weights @ inputs over a warpgroup's segment of a step: [64, N] float32, 2**-32 of the products.

    Args:
      codes: [64, 64] uint8 in shared memory.
      scales: of FP4 [64, 16] uint8 in shared memory, those of the whole step; of FP8 one, an int32 scalar.
      inputs: what `load_inputs` left.
      first: the step's first 64 columns.
      group: number of the warpgroup.
      layout: of the weights.
      gated: rows i and 32 + i of the weights meet in a thread: they are rows 16 * (i // 8) + i % 8, and 8 more, of the
        sums.
    """
    values = codes[...]
    if layout.per_byte == 2:
        values = values.astype(jnp.int32)
        values = e2m1_value(jnp.stack([values & 15, values >> 4], axis=-1)).reshape(ROWS, -1)
        factors = scales[...].reshape(ROWS, SEGMENTS, 4)[:, group].astype(jnp.int32)
        factors = jnp.repeat(lax.bitcast_convert_type((factors - SHIFT) << 23, jnp.float32), 32, axis=1)
    else:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn).astype(jnp.float32)
        factors = lax.bitcast_convert_type((scales - SHIFT) << 23, jnp.float32)
    start = first + group * layout.chunks
    x = jnp.concatenate([inputs[start + i] for i in range(layout.chunks)], axis=1).astype(jnp.float32)
    products = jnp.dot(values * factors, x.T, precision="highest")
    if gated:
        products = products.reshape(2, 4, 8, -1).transpose(1, 0, 2, 3).reshape(ROWS, -1)
    return acc + products


@multiply_add.mosaic
def _(acc, codes, scales, inputs, first, group, layout, gated):
    start = first + group * layout.chunks

    def add_products(ref):
        for i, weights in enumerate(_unpack(codes, scales, group, layout, gated)):
            plgpu.wgmma(ref, weights, inputs.at[start + i].transpose((1, 0)))

    run: Any = pl.run_state(add_products)
    return run(plgpu.ACC.init(acc))


def _unpack(codes, scales, group, layout, gated):
    """The weights of a segment, as many [64, 64] as it has chunks."""

    def emit(codes, scales, group):
        thread = U32(mlir.thread())
        line = (thread >> 5) * (8 if gated else 16) + (thread % 32 >> 2)
        inner = thread & 3
        found: list[list[Any]] = [[None] * 16 for _ in range(layout.chunks)]
        pair_type = mlir.vector_type(2, ir.BF16Type.get())
        for half in range(2):
            row = line + half * (ROWS // 2 if gated else 8)
            address = thread_ops.shared(codes) + row * SEGMENT + inner * 16
            words = thread_ops.load_vector(address)
            if layout.per_byte == 2:
                place = thread_ops.shared(scales) + row * 16 + U32(mlir.scalar(group)) * 4 + inner
                scale = thread_ops.ptx("{ .reg .u16 s; ld.shared.u8 s, [$1]; cvt.u32.u16 $0, s; }", place)
                factor = _factor(scale + (126 - SHIFT))
                pairs = [[e2m1_pair(word, pair) for pair in range(4)] for word in words]
                order = [(2 * i + pair // 2, pair % 2, pairs[i][pair]) for i in range(4) for pair in range(4)]
            else:
                factor = _factor(U32(mlir.scalar(scales)) + (120 - SHIFT))
                order = [(i, pair, e4m3_pair(words[i], pair)) for i in range(4) for pair in range(2)]
            for step, column, bits in order:
                value = multiply(bits, factor)
                found[step // 4][4 * (step % 4) + 2 * column + half] = mgpu.utils.bitcast(value.value, pair_type)
        return found

    return mlir.inline(emit, codes, scales, group, returns=(_WEIGHTS,) * layout.chunks)


def _factor(exponent):
    """A pair of bfloat16 powers of two; the exponent is at most 254."""
    return U32(arith.minsi(exponent.value, mlir.i32(254))) * 0x00800080
