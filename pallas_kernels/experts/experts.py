"""The sum over a token's experts, for few tokens: as long as reading the experts that are hit takes.

The router, or a launch of its own, groups pairs of a token and an expert by expert. In the next, a block of threads
takes a stretch of the tiles of 64 rows of all experts that are hit, first of gate and up with SwiGLU, then of down, and
multiplies them with up to 8 of an expert's tokens, which stay in shared memory while its tiles last: see
`weight_stream`. Weights of down arrive while blocks still wait for what enters it.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import clusters, stream_stores, weight_stream
from pallas_kernels.common.checks import check_array, check_rules
from pallas_kernels.common.expert_blocks import FIRST_PAIR, WORDS, most_blocks
from pallas_kernels.common.primitive import kernel
from pallas_kernels.common.stored_weights import COLUMNS, HALF, ROWS, WeightLayout
from pallas_kernels.common.support import MULTIPROCESSORS, runs_all_blocks_at_once, traced_once
from pallas_kernels.common.weight_stream import FINISHES, Product, WeightStream
from pallas_kernels.experts import assignment
from pallas_kernels.experts.expert_operands import check_operands


MOST_PAIRS = 1024  # that one block of threads sorts


@traced_once("limit")
def experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | tuple[jax.Array, jax.Array],
    down: jax.Array | tuple[jax.Array, jax.Array],
    grouped: tuple[jax.Array, jax.Array] | None = None,
    *,
    limit: float,
    interpret: bool = False,
) -> jax.Array:
    """What each of a token's experts makes of it: `down_e(w * silu(min(gate_e(x), limit)) * clip(up_e(x), +-limit))`.

    Args:
      x: [T, D] bfloat16.
      selected: [T, k] int32, each token's experts, 0 .. E - 1; T * k up to 1024. A pair with another number has no
        expert here.
      weights: [T, k] float32, what w is.
      gate_up: [E, 2 * I, D] bfloat16, the gate's rows first; or codes [E, 2 * I, D / 2] uint8, two E2M1 codes in a
        byte, and scales [E, 2 * I, D / 32] uint8, E8M0. D and I are multiples of 512, of bfloat16 of 256; I may be 256.
      down: [E, D, I] bfloat16; or codes [E, D, I / 2] and scales [E, D, I / 32].
      grouped: what `router` returned with `selected`, or None: pairs are sorted here.
      limit: of SwiGLU.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, k, D] bfloat16; each linear map is rounded to bfloat16, and so is what enters the last. Unspecified for pairs
      that have no expert. The order of a sum depends on the weights' shapes and storage alone.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, depth = x.shape
    layout, number, inner, *matrices = check_operands(x, selected, weights, gate_up, down)
    pairs = selected.size
    check_rules({f"1 to {MOST_PAIRS} pairs of a token and an expert, got {pairs}": 0 < pairs <= MOST_PAIRS})
    selected, weights = selected.reshape(-1), weights.reshape(-1)
    p = ExpertsProblem(layout, pairs, pairs // tokens, number, depth, inner, limit)
    table, counts = grouped or assignment.assign(selected, number, interpret=interpret)
    blocks = most_blocks(pairs, number)
    check_array("grouped pairs", table, jnp.int32, blocks * WORDS)
    check_array("grouped pairs' counts", counts, jnp.int32, 1 + blocks)
    operands = jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]), matrices)
    hidden, y = (jax.ShapeDtypeStruct((pairs, width), jnp.bfloat16) for width in (inner, depth))
    if interpret or not runs_all_blocks_at_once():
        # Blocks that may run one after the other do not wait for each other.
        up, down_ = (True, False), (False, True)
        (hidden,) = _launch(p, up, (hidden,), table, counts, weights, x, operands, interpret=interpret)
        (y,) = _launch(p, down_, (y,), table, counts, weights, hidden, operands, interpret=interpret)
    else:
        counts = jax.new_ref(counts)
        _, y = _launch(p, (True, True), (hidden, y), table, counts, weights, x, operands, interpret=False)
    return y.reshape(tokens, -1, depth)


@dataclasses.dataclass(frozen=True)
class ExpertsProblem:
    """What is static about a call: `chosen` experts of a token, `depth` channels of it, `inner` ones of an expert."""

    layout: WeightLayout
    pairs: int
    chosen: int
    experts: int
    depth: int
    inner: int
    limit: float

    @property
    def stream(self) -> WeightStream:
        matrices = (self.layout, self.depth), (self.layout, self.inner)
        return WeightStream(matrices, COLUMNS, weight_stream.most_segments(*matrices))

    @property
    def tiles(self) -> tuple[int, int]:
        """Of an expert: of gate and up, whose tiles are 32 channels of either, and of down."""
        return self.inner // HALF, self.depth // ROWS


def _launch(p, maps, out_type, table, counts, weights, x, operands, interpret):
    """`maps`: whether it multiplies with gate and up, and with down."""
    workers = 3 if interpret else MULTIPROCESSORS
    # The most blocks of pairs of which a block of threads has tiles.
    most = [-(-table.shape[0] // (WORDS * workers)) + 1] * sum(maps)
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
    return run(table, counts, weights, x, operands)


def _body(p, maps, table, counts, weights, x, matrices, *outs, tables, factors, ready, stream):
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
                stream_stores.store_swiglu(out, sums, tile, p.limit, pairs_of(n), own_factors)
            else:
                stream_stores.store_rows(out, sums, tile, pairs_of(n))
            if both and gated:
                assignment.announce(counts, first_block + block_of(n))

        depth, (codes, scales) = p.inner if i else p.depth, matrices[i]
        return Product(p.layout, codes, scales, count, depth, 0, gated, rows_of, load_inputs, finish)

    sources = (x, outs[0]) if both else (x,)
    products = [
        product(i, source, out, own, *stretch)
        for i, source, out, own, stretch in zip(todo, sources, outs, tables, stretches, strict=True)
    ]
    p.stream.run(warpgroup, products, **stream)
