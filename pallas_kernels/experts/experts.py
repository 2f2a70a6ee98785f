"""The sum over a token's experts, for few tokens: as long as reading the experts that are hit takes.

One launch sorts pairs of a token and an expert by expert. In the next, a block of threads takes a stretch of the tiles
of 64 rows of all experts that are hit, first of gate and up with SwiGLU, then of down, and multiplies them with up to 8
of an expert's tokens, which stay in shared memory while its tiles last: see `weight_stream`. Weights of down arrive
while blocks still wait for what enters it.
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
from pallas_kernels.common.checks import check_rules
from pallas_kernels.common.deterministic_math import round_bfloat16
from pallas_kernels.common.primitive import kernel, primitive
from pallas_kernels.common.stored_weights import COLUMNS, FP4, HALF, ROWS, SHIFT
from pallas_kernels.common.support import MULTIPROCESSORS, runs_all_blocks_at_once, traced_once
from pallas_kernels.common.thread_ops import U32
from pallas_kernels.common.weight_stream import FINISHES, Product, WeightStream
from pallas_kernels.experts import assignment
from pallas_kernels.experts.assignment import FIRST_PAIR, WORDS
from pallas_kernels.experts.expert_operands import check_operands


MOST_PAIRS = 1024  # that one block of threads sorts


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
      x: [T, D] bfloat16.
      selected: [T, k] int32, each token's experts, 0 .. E - 1; T * k up to 1024.
      weights: [T, k] float32, what w is.
      gate_up: codes [E, 2 * I, D / 2] uint8, two E2M1 codes in a byte, and scales [E, 2 * I, D / 32] uint8, E8M0; the
        gate's rows first. D and I are multiples of 512.
      down: codes [E, D, I / 2] and scales [E, D, I / 32].
      limit: of SwiGLU.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, k, D] bfloat16; each linear map is rounded to bfloat16, and so is what enters the last. The order of a sum
      depends on D and I alone.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, depth = x.shape
    rules, number, inner = check_operands(x, selected, weights, gate_up, down)
    pairs = selected.size
    check_rules(
        rules
        | {
            f"1 to {MOST_PAIRS} pairs of a token and an expert, got {pairs}": 0 < pairs <= MOST_PAIRS,
        }
    )
    selected, weights = selected.reshape(-1), weights.reshape(-1)
    p = ExpertsProblem(pairs, pairs // tokens, number, depth, inner, limit)
    table, counts = assignment.assign(selected, number, interpret=interpret)
    operands = [array.reshape(-1, array.shape[-1]) for array in (*gate_up, *down)]
    hidden, y = (jax.ShapeDtypeStruct((pairs, width), jnp.bfloat16) for width in (inner, depth))
    if interpret or not runs_all_blocks_at_once():
        # Blocks that may run one after the other do not wait for each other.
        up, down_ = (True, False), (False, True)
        (hidden,) = _launch(p, up, (hidden,), table, counts, weights, x, *operands, interpret=interpret)
        (y,) = _launch(p, down_, (y,), table, counts, weights, hidden, *operands, interpret=interpret)
    else:
        counts = jax.new_ref(counts)
        _, y = _launch(p, (True, True), (hidden, y), table, counts, weights, x, *operands, interpret=False)
    return y.reshape(tokens, -1, depth)


@dataclasses.dataclass(frozen=True)
class ExpertsProblem:
    """What is static about a call: `chosen` experts of a token, `depth` channels of it, `inner` ones of an expert."""

    pairs: int
    chosen: int
    experts: int
    depth: int
    inner: int
    limit: float

    @property
    def stream(self) -> WeightStream:
        matrices = (FP4, self.depth), (FP4, self.inner)
        return WeightStream(matrices, COLUMNS, weight_stream.most_segments(*matrices))

    @property
    def tiles(self) -> tuple[int, int]:
        """Of an expert: of gate and up, whose tiles are 32 channels of either, and of down."""
        return self.inner // HALF, self.depth // ROWS


def _launch(p, maps, out_type, table, counts, weights, x, *operands, interpret):
    """`maps`: whether it multiplies with gate and up, and with down."""
    workers = 3 if interpret else MULTIPROCESSORS
    # The most blocks of pairs of which a block of threads has tiles.
    most = [-(-table.shape[0] // workers) + 1] * sum(maps)
    run = kernel(
        functools.partial(_body, p, maps),
        out_type=out_type,
        kernel_name="experts",
        grid=(workers,),
        grid_names=("worker",),
        num_threads=weight_stream.WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=dict(
            tables=[plgpu.SMEM((size * WORDS,), jnp.int32) for size in most],
            factors=plgpu.SMEM((most[0] * COLUMNS,), jnp.float32) if maps[0] else None,
            ready=plgpu.Barrier(num_arrivals=weight_stream.WARPGROUPS),
            stream=p.stream.scratch(4 * WORDS * 2 * sum(most) + 2048, interpret=interpret),
        ),
        interpret=interpret,
    )
    return run(table.reshape(-1), counts, weights, x, *operands)


def _body(p, maps, table, counts, weights, x, *refs, tables, factors, ready, stream):
    *matrices, first_out = refs[:5]
    outs = (first_out, *refs[5:])
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    workers, blocks, both = lax.axis_size("worker"), counts[0], all(maps)
    todo = [i for i in range(2) if maps[i]]
    stretches = []
    for i in todo:
        total = blocks * p.tiles[i]
        first, end = (lax.div((worker + other) * total, jnp.int32(workers)) for other in range(2))
        stretches.append((first, end - first, lax.div(first, jnp.int32(p.tiles[i]))))

    @pl.when(warpgroup == FINISHES)
    def _():
        for (_, _, block), own in zip(stretches, tables, strict=True):
            assignment.load_blocks(table, block, own)

    clusters.sync_block(ready)

    @pl.when(warpgroup == FINISHES)
    def _():
        if factors is not None:
            assignment.load_weights(weights, tables[0], factors)

    def product(i, source, out, own, first, count, first_block):
        tiles, gated = p.tiles[i], i == 0
        each = jnp.int32(tiles)

        def block_of(n):
            """In this block's part of the table."""
            return lax.div(first + n, each) - first_block

        def rows_of(n):
            expert, tile = own[block_of(n) * WORDS], lax.rem(first + n, each)
            if gated:
                row = expert * (2 * p.inner) + tile * HALF
                return row, row + p.inner
            row = expert * p.depth + tile * ROWS
            return row, row + HALF

        def pairs_of(n):
            return own.at[pl.ds(block_of(n) * WORDS + FIRST_PAIR, COLUMNS)]

        def load_inputs(n, load):
            @pl.when((n == 0) | (lax.rem(first + n, each) == 0))
            def _():
                if both and not gated:
                    assignment.await_tiles(counts, first_block + block_of(n), p.tiles[0])
                load(source, pairs_of(n), p.chosen if gated else 1)

        def finish(n, sums):
            tile = lax.rem(first + n, each)
            if gated:
                own_factors = factors.at[pl.ds(block_of(n) * COLUMNS, COLUMNS)]
                store_gated(out, sums, pairs_of(n), tile, own_factors, p.limit)
            else:
                store_rows(out, sums, pairs_of(n), tile)
            if both and gated:
                assignment.announce(counts, first_block + block_of(n))

        codes, scales = matrices[2 * i : 2 * i + 2]
        depth = p.inner if i else p.depth
        return Product(FP4, codes, scales, count, depth, 0, gated, rows_of, load_inputs, finish)

    sources = (x, outs[0]) if both else (x,)
    products = [
        product(i, source, out, own, *stretch)
        for i, source, out, own, stretch in zip(todo, sources, outs, tables, stretches, strict=True)
    ]
    p.stream.run(warpgroup, products, **stream)


@primitive
def store_gated(out, sums: jax.Array, pairs, tile: jax.Array, weights, limit: float) -> None:
    """Writes 32 channels of SwiGLU times the routing weight, rounded: sums [64, N] of gate and up, times 2**-32.

    `out`: [P, I] bfloat16 in global memory; `pairs`: [N] int32 and their `weights`: [N] float32, in shared memory.
    """
    sums = (sums * 2.0**SHIFT).reshape(ROWS // 16, 2, 8, -1)
    gate, up = (round_bfloat16(sums[:, half]).reshape(HALF, -1).T for half in range(2))
    value = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    for n in range(value.shape[0]):
        pair = pairs[n]

        @pl.when(pair >= 0)
        def _(n=n, pair=pair):
            out[pair, pl.ds(tile * HALF, HALF)] = (value[n] * weights[n]).astype(jnp.bfloat16)


@store_gated.mosaic
def _(out, sums, pairs, tile, weights, limit):
    def emit(out, sums, pairs, tile, weights):
        bf16, f32 = ir.BF16Type.get(), mlir.f32_type()
        low, high = mlir.f32(-limit), mlir.f32(limit)

        def rounded(x):
            return arith.extf(f32, arith.truncf(bf16, arith.mulf(x, mlir.f32(2.0**SHIFT))))

        def store(place, column, values):
            gate, up = map(rounded, values)
            gate = arith.minimumf(gate, high)
            up = arith.minimumf(arith.maximumf(up, low), high)
            silu = arith.divf(gate, arith.addf(mlir.f32(1.0), math.exp(arith.negf(gate))))
            weight = thread_ops.as_float(thread_ops.load(thread_ops.shared(weights) + (column << 2)))
            value = arith.mulf(arith.mulf(silu, up), weight)
            llvm.store(arith.truncf(bf16, value), place, alignment=2)

        _each_column(out, sums, pairs, U32(mlir.scalar(tile)) * HALF, gated=True, store=store)

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

        def store(place, _, values):
            for half, value in enumerate(values):
                value = arith.truncf(bf16, arith.mulf(value, mlir.f32(2.0**SHIFT)))
                llvm.store(value, mlir.at(place, 2 * 8 * half), alignment=2)

        _each_column(out, sums, pairs, U32(mlir.scalar(tile)) * ROWS, gated=False, store=store)

    mlir.inline(emit, out, sums, pairs, tile, layout=lambda _: plgpu.Layout.WGMMA)


def _each_column(out, sums, pairs, channel, *, gated, store):
    """Calls `store(place in out, column, both rows' sums)` for each of a thread's columns that is a pair's."""
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
                store(place, column, (held[n + i], held[n + 2 + i]))
