"""The sum over a token's experts, for few tokens: as long as reading the experts that are hit takes.

Two launches: gate and up with SwiGLU, then down. In both, a block of threads takes a stretch of the tiles of 64 rows of
all experts that are hit, and multiplies it with up to 8 of an expert's tokens, which stay in shared memory while its
tiles last: see `weight_stream`.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math

from pallas_kernels.common import clusters, mlir_helpers as mlir, thread_ops, weight_stream
from pallas_kernels.common.checks import check_array, check_rules
from pallas_kernels.common.deterministic_math import round_bfloat16
from pallas_kernels.common.primitive import kernel, primitive
from pallas_kernels.common.stored_weights import FP4, ROWS, SEGMENTS, SHIFT
from pallas_kernels.common.support import MULTIPROCESSORS, traced_once
from pallas_kernels.common.thread_ops import U32
from pallas_kernels.common.weight_stream import WeightStream
from pallas_kernels.experts.assignment import assign, most_blocks


COLUMNS = 8  # tokens of an expert at a time, the fewest of `wgmma`
CHANNELS = ROWS // 2  # of a tile of gate and up


@traced_once("limit")
def experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: tuple[jax.Array, jax.Array],
    down: tuple[jax.Array, jax.Array],
    *,
    limit: float,
    interpret: bool = False,
) -> jax.Array:
    """What each of a token's experts makes of it: `down_e(w * silu(min(gate_e(x), limit)) * clip(up_e(x), +-limit))`.

    Args:
      x: [T, D] bfloat16, T up to 8.
      selected: [T, k] int32, each token's experts, 0 .. E - 1, none of which may have more than 8 pairs: with more, it
        would have several blocks of pairs, and `assign` sorts pairs into blocks in another order in every launch.
      weights: [T, k] float32, what w is.
      gate_up: codes [E, 2 * I, D / 2] uint8, two E2M1 codes in a byte, and scales [E, 2 * I, D / 32] uint8, E8M0; the
        gate's rows first. D and I are multiples of 512.
      down: codes [E, D, I / 2] and scales [E, D, I / 32].
      limit: of SwiGLU.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, k, D] bfloat16; each linear map is rounded to bfloat16, and so is what enters the last.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, depth = x.shape
    check_array("x", x, jnp.bfloat16, None, None)
    check_array("selected", selected, jnp.int32, tokens, None)
    check_array("weights", weights, jnp.float32, *selected.shape)
    number, inner = gate_up[0].shape[0], 2 * down[0].shape[-1]
    for name, (codes, scales), rows, columns in (("gate_up", gate_up, 2 * inner, depth), ("down", down, depth, inner)):
        check_array(f"{name}'s codes", codes, jnp.uint8, number, rows, columns // 2)
        check_array(f"{name}'s scales", scales, jnp.uint8, number, rows, columns // 32)
    pairs = selected.size
    check_rules(
        {
            f"channels in multiples of {FP4.columns}, got {depth} and {inner}": not (
                depth % FP4.columns or inner % FP4.columns
            ),
            f"1 to {COLUMNS} tokens, got {tokens}": 0 < tokens <= COLUMNS,
        }
    )
    selected, weights = selected.reshape(-1), weights.reshape(-1)
    first = ExpertsProblem(pairs, pairs // tokens, number, depth, inner, True, limit)
    second = dataclasses.replace(first, divisor=1, depth=inner, width=depth, gated=False)
    hidden = _launch(first, selected, weights, x, *gate_up, interpret=interpret)
    return _launch(second, selected, weights, hidden, *down, interpret=interpret).reshape(tokens, -1, depth)


@dataclasses.dataclass(frozen=True)
class ExpertsProblem:
    """What is static about a launch.

    `divisor`: pairs that share a row of the input. `width`: of the output. A tile is two groups of 32 rows: where
    `gated`, rows of the gate and those of up for the same channels, otherwise consecutive rows.
    """

    pairs: int
    divisor: int
    experts: int
    depth: int
    width: int
    gated: bool
    limit: float

    @property
    def tiles(self) -> int:
        """Of an expert."""
        return self.width // (CHANNELS if self.gated else ROWS)

    @property
    def stream(self) -> WeightStream:
        return WeightStream(FP4, COLUMNS, self.depth // FP4.columns, self.gated)

    def groups(self, expert, tile):
        """The first rows of a tile's groups."""
        if self.gated:
            row = expert * (2 * self.width) + tile * CHANNELS
            return row, row + self.width
        return (expert * self.width + tile * ROWS,)


def _launch(p, selected, weights, x, codes, scales, *, interpret):
    blocks, numbers = most_blocks(p.pairs, p.experts, COLUMNS), -(-p.experts // mlir.THREADS) * mlir.THREADS
    tables = dict(
        count=plgpu.SMEM((1,), jnp.int32),
        owners=plgpu.SMEM((blocks,), jnp.int32),
        rows=plgpu.SMEM((blocks * COLUMNS,), jnp.int32),
        scratch=plgpu.SMEM((2 * numbers + 4,), jnp.int32),
        ready=plgpu.Barrier(num_arrivals=weight_stream.WARPGROUPS),
    )
    table_bytes = 4 * (blocks * (COLUMNS + 1) + 2 * numbers) + 4096
    run = kernel(
        functools.partial(_body, p),
        out_type=jax.ShapeDtypeStruct((p.pairs, p.width), jnp.bfloat16),
        kernel_name="experts_gate_up" if p.gated else "experts_down",
        grid=(3 if interpret else MULTIPROCESSORS,),
        grid_names=("worker",),
        num_threads=weight_stream.WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=tables | p.stream.scratch(table_bytes, interpret=interpret),
        interpret=interpret,
    )
    return run(selected, weights, x, *(array.reshape(-1, array.shape[-1]) for array in (codes, scales)))


def _body(p, selected, weights, x, codes, scales, out, *, count, owners, rows, scratch, ready, **streamed):
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    workers, tiles = jnp.int32(lax.axis_size("worker")), jnp.int32(p.tiles)

    @pl.when(warpgroup == SEGMENTS)
    def _():
        assign(selected, count, owners, rows, scratch)

    clusters.sync_block(ready)
    total = count[0] * p.tiles
    first, end = lax.div(worker * total, workers), lax.div((worker + 1) * total, workers)

    def rows_of(n):
        return p.groups(owners[lax.div(first + n, tiles)], lax.rem(first + n, tiles))

    def pairs_of(n):
        return rows.at[pl.ds(lax.div(first + n, tiles) * COLUMNS, COLUMNS)]

    def load_inputs(n, load):
        @pl.when((n == 0) | (lax.rem(first + n, tiles) == 0))
        def _():
            load(x, pairs_of(n), p.divisor)

    def finish(n, sums):
        tile = lax.rem(first + n, tiles)
        if p.gated:
            store_gated(out, sums, pairs_of(n), tile, weights, p.limit)
        else:
            store_rows(out, sums, pairs_of(n), tile)

    options = dict(first_step=0, rows_of=rows_of, load_inputs=load_inputs, finish=finish)
    p.stream.run(warpgroup, end - first, codes, scales, **options, **streamed)


@primitive
def store_gated(out, sums: jax.Array, pairs, tile: jax.Array, weights, limit: float) -> None:
    """Writes 32 channels of SwiGLU times the routing weight, rounded: sums [64, N] of gate and up, times 2**-32.

    `out`: [P, I] bfloat16 and `weights`: [P] float32, in global memory; `pairs`: [N] int32 in shared memory.
    """
    sums = (sums * 2.0**SHIFT).reshape(ROWS // 16, 2, 8, -1)
    gate, up = (round_bfloat16(sums[:, half]).reshape(CHANNELS, -1).T for half in range(2))
    value = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    for n in range(value.shape[0]):
        pair = pairs[n]

        @pl.when(pair >= 0)
        def _(n=n, pair=pair):
            out[pair, pl.ds(tile * CHANNELS, CHANNELS)] = (value[n] * weights[pair]).astype(jnp.bfloat16)


@store_gated.mosaic
def _(out, sums, pairs, tile, weights, limit):
    def emit(out, sums, pairs, tile, weights):
        bf16, f32 = ir.BF16Type.get(), mlir.f32_type()
        low, high = mlir.f32(-limit), mlir.f32(limit)

        def rounded(x):
            return arith.extf(f32, arith.truncf(bf16, arith.mulf(x, mlir.f32(2.0**SHIFT))))

        def store(place, pair, values):
            gate, up = map(rounded, values)
            gate = arith.minimumf(gate, high)
            up = arith.minimumf(arith.maximumf(up, low), high)
            silu = arith.divf(gate, arith.addf(mlir.f32(1.0), math.exp(arith.negf(gate))))
            weight = llvm.load(f32, mlir.at(mlir.global_pointer(weights), mlir.to_i64(pair.value), f32))
            value = arith.mulf(arith.mulf(silu, up), weight)
            llvm.store(arith.truncf(bf16, value), place, alignment=2)

        _each_column(out, sums, pairs, U32(mlir.scalar(tile)) * CHANNELS, gated=True, store=store)

    mlir.inline(emit, out, sums, pairs, tile, weights, layout=lambda _: plgpu.Layout.WGMMA)


@primitive
def store_rows(out, sums: jax.Array, pairs, tile: jax.Array) -> None:
    """Writes 64 channels of the pairs' products, rounded: sums [64, N] times 2**-32. See `store_gated`."""
    value = (sums * 2.0**SHIFT).astype(jnp.bfloat16).T
    for n in range(value.shape[0]):
        pair = pairs[n]

        @pl.when(pair >= 0)
        def _(n=n, pair=pair):
            out[pair, pl.ds(tile * ROWS, ROWS)] = value[n]


@store_rows.mosaic
def _(out, sums, pairs, tile):
    def emit(out, sums, pairs, tile):
        bf16 = ir.BF16Type.get()

        def store(place, pair, values):
            for half, value in enumerate(values):
                value = arith.truncf(bf16, arith.mulf(value, mlir.f32(2.0**SHIFT)))
                llvm.store(value, mlir.at(place, 2 * 8 * half), alignment=2)

        _each_column(out, sums, pairs, U32(mlir.scalar(tile)) * ROWS, gated=False, store=store)

    mlir.inline(emit, out, sums, pairs, tile, layout=lambda _: plgpu.Layout.WGMMA)


def _each_column(out, sums, pairs, channel, *, gated, store):
    """Calls `store(place in out, pair, both rows' sums)` for each of a thread's columns that is a pair's."""
    thread = U32(mlir.thread())
    row = (thread >> 5) * (8 if gated else 16) + (thread % 32 >> 2)
    width = ir.MemRefType(out.type).shape[1]
    held = mlir.values(sums)
    for n in range(0, len(held), 4):
        for i in range(2):
            column = ((thread & 3) << 1) + (2 * n + i)
            pair = thread_ops.load(thread_ops.shared(pairs) + (column << 2))
            with thread_ops.when(U32(arith.cmpi(arith.CmpIPredicate.sge, pair.value, mlir.i32(0)))):
                offset = arith.muli(mlir.to_i64(pair.value), mlir.i64(width))
                offset = arith.addi(offset, mlir.to_i64((channel + row).value))
                place = mlir.at(mlir.global_pointer(out), offset, ir.BF16Type.get())
                store(place, pair, (held[n + i], held[n + 2 + i]))
