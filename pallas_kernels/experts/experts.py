"""The sum over a token's experts, for few tokens: as long as reading the experts that are hit takes.

The router, or a launch of its own, groups pairs of a token and an expert by expert. In the next, a block of threads
takes a stretch of the tiles of 64 rows of all experts that are hit, first of gate and up with SwiGLU, then of down, and
multiplies them with up to 8 of an expert's tokens, which stay in shared memory while its tiles last: see
`skinny_gemm`. Weights of down arrive while blocks still wait for what enters it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.experts import routing_tables
from pallas_kernels.experts.expert_operands import check_operands, check_shared
from pallas_kernels.matmul import skinny_epilogue, skinny_gemm
from pallas_kernels.matmul.quantized_weights import COLUMNS, FP8, HALF, ROWS, WeightLayout
from pallas_kernels.matmul.routing import FIRST_PAIR, WORDS, counts_size, most_blocks
from pallas_kernels.matmul.skinny_gemm import FINISHES, Product, SkinnyGemm
from pallas_kernels.mgpu import barriers
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS, runs_all_blocks_at_once
from pallas_kernels.runtime.launch import interpreting, kernel
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_PAIRS = 1024  # that one block of threads sorts
MAX_SHARED_TOKENS = COLUMNS


@cached_trace("limit")
def experts(
    x: jax.Array,
    selected: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array | tuple[jax.Array, jax.Array],
    down: jax.Array | tuple[jax.Array, jax.Array],
    grouped: tuple[jax.Array, jax.Array] | None = None,
    shared: tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]] | None = None,
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
      shared: None, or of an expert that all tokens share, of up to 8 tokens, gate and up and down: codes [2 * S, D] and
        [D, S] uint8, E4M3 bits, and scales [2 * S / 128, D / 128] and [D / 128, S / 128] uint8, E8M0 bits; S is a
        multiple of 256. The others' are FP4 then, and I a multiple of 512.
      limit: of SwiGLU.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, k, D] bfloat16; each linear map is rounded to bfloat16, and so is what enters the last. Unspecified for pairs
      that have no expert. With a shared expert [T, D] bfloat16: the sum over the pairs that have an expert, in their
      order, and the shared one, in float32, rounded. The order of a product's sums depends on the weights' shapes and
      storage alone.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, depth = x.shape
    layout, number, inner, *matrices = check_operands(x, selected, weights, gate_up, down)
    pairs = selected.size
    check_rules({f"1 to {MAX_PAIRS} pairs of a token and an expert, got {pairs}": 0 < pairs <= MAX_PAIRS})
    selected, weights = selected.reshape(-1), weights.reshape(-1)
    if shared is not None:
        check_shared(tokens, depth, inner, layout, *shared)
    shared_inner = 0 if shared is None else shared[1][0].shape[1]
    p = ExpertsProblem(layout, pairs, pairs // tokens, number, depth, inner, shared_inner, limit)
    table, counts = grouped or routing_tables.assign(selected, number, depth, interpret=interpret)
    check_array("grouped pairs", table, jnp.int32, p.blocks * WORDS)
    check_array("grouped pairs' counts", counts, jnp.int32, counts_size(p.blocks, depth))
    operands = jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]), matrices), shared or ()
    rows = (pairs, tokens) if shared else (pairs,)
    hidden, y = (
        [jax.ShapeDtypeStruct((count, width), jnp.bfloat16) for count, width in zip(rows, widths, strict=False)]
        for widths in ((inner, shared_inner), (depth, depth))
    )
    if shared and not interpret:
        y.append(jax.ShapeDtypeStruct((tokens, depth), jnp.bfloat16))
    counts = jax.new_ref(counts)
    launch = functools.partial(_launch, p, interpret=interpret)
    arrays = selected, table, counts, weights, operands
    if interpret or not runs_all_blocks_at_once():
        # Blocks that may run one after the other do not wait for each other.
        up, down_ = (True, False), (False, True)
        (hidden,) = launch(up, (hidden,), [x] * len(rows), *arrays)
        (y,) = launch(down_, (y,), hidden, *arrays)
    else:
        _, y = launch((True, True), (hidden, y), [x] * len(rows), *arrays)
    if not shared:
        return y[0].reshape(tokens, -1, depth)
    return _total(y[0], y[1], selected, number) if interpret else y[-1]


def _total(terms, last, selected, experts):
    """What `routing_tables.add_up` makes of all tiles."""
    here = (selected >= 0) & (selected < experts)
    terms = jnp.where(here[:, None], terms.astype(jnp.float32), 0.0).reshape(len(last), -1, last.shape[1])
    total = functools.reduce(jnp.add, [terms[:, j] for j in range(terms.shape[1])])
    return (total + last.astype(jnp.float32)).astype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class ExpertsProblem:
    """What is static about a call: `chosen` experts of a token, `depth` channels of it, `inner` ones of an expert.

    `shared`: channels of the expert that all tokens share, 0 where there is none.
    """

    layout: WeightLayout
    pairs: int
    chosen: int
    experts: int
    depth: int
    inner: int
    shared: int
    limit: float

    @property
    def stream(self) -> SkinnyGemm:
        matrices = (self.layout, self.depth), (self.layout, self.inner)
        if self.shared:
            matrices += (FP8, self.depth), (FP8, self.shared)
        return SkinnyGemm(matrices, COLUMNS, skinny_gemm.most_segments(*matrices))

    @property
    def tiles(self) -> tuple[int, int]:
        """Of an expert: of gate and up, whose tiles are 32 channels of either, and of down."""
        return self.inner // HALF, self.depth // ROWS

    @property
    def shared_tiles(self) -> tuple[int, int]:
        """Likewise, of the shared expert."""
        return self.shared // HALF, self.depth // ROWS if self.shared else 0

    @property
    def blocks(self) -> int:
        """Of pairs, at most; the number behind theirs is the shared expert's."""
        return most_blocks(self.pairs, self.experts)

    def first_tiles(self, blocks: Any, i: int, worker: Any, workers: int) -> tuple[Any, Any]:
        """Where a block of threads' tiles of map `i` begin, those of so many blocks of pairs and of the shared expert.

        The shared expert's tiles, which are larger, are spread over all blocks of threads. With the others each has as
        many bytes to read as any, but for a part of a tile.
        """
        workers, tiles, shared = jnp.int32(workers), blocks * self.tiles[i], self.shared_tiles[i]
        evenly = lax.div(worker * tiles, workers)
        if not shared:
            return evenly, jnp.int32(0)
        bits, larger = self.layout.bits, FP8.bits
        first, total = lax.div(worker * shared, workers), bits * tiles + larger * shared
        rest = lax.div(worker * total, workers) - larger * first + bits // 2
        # Where it is less than a shared expert's tile for each, who has one of these cannot have less of the others.
        balanced = total >= larger * workers
        return jnp.where(balanced, jnp.clip(lax.div(rest, jnp.int32(bits)), 0, tiles), evenly), first

    def most_blocks(self, i: int, workers: int) -> int:
        """The most blocks of pairs of which a block of threads has tiles of map `i`."""
        tiles = -(-self.blocks * self.tiles[i] // workers)
        if self.shared:
            tiles += -(-FP8.bits * self.shared_tiles[i] // (self.layout.bits * workers)) + 1
        return -(-tiles // self.tiles[i]) + 1


def _launch(p, maps, out_type, inputs, selected, table, counts, weights, operands, *, interpret):
    """Outputs of the experts, and of the shared one, of each map.

    `maps`: whether it multiplies with gate and up, and with down; `inputs`: of the experts, and of the shared one.
    """
    workers = 3 if interpret else MULTIPROCESSORS
    most = [p.most_blocks(i, workers) for i in range(2) if maps[i]]
    run = kernel(
        functools.partial(_body, p, maps),
        out_type=[out for outs in out_type for out in outs],
        kernel_name="experts",
        grid=(workers,),
        grid_names=("worker",),
        num_threads=skinny_gemm.WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=dict(
            tables=[plgpu.SMEM((size * WORDS,), jnp.int32) for size in most],
            factors=plgpu.SMEM((most[0] * COLUMNS,), jnp.float32) if maps[0] else None,
            scratch=plgpu.SMEM((4,), jnp.int32),
            ready=plgpu.Barrier(num_arrivals=skinny_gemm.WARPGROUPS),
            stream=p.stream.scratch(4 * WORDS * 2 * sum(most) + 2048, interpret=interpret),
        ),
        interpret=interpret,
    )
    return _by_map(run(selected, table, counts, weights, inputs, operands), maps, len(inputs))


def _by_map(outs, maps, each):
    """What is of the first map, and what is of the second; the latter may have more."""
    return [outs[:each], outs[each:]] if all(maps) else [outs]


def _body(p, maps, selected, table, counts, weights, inputs, matrices, *outs, tables, factors, ready, scratch, stream):
    worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
    workers, blocks, both = lax.axis_size("worker"), counts[0], all(maps)
    todo = [i for i in range(2) if maps[i]]
    stretches, shared_stretches = [], []
    for i in todo:
        (first, shared_first), (end, shared_end) = (p.first_tiles(blocks, i, worker + n, workers) for n in range(2))
        stretches.append((first, end - first, lax.div(first, jnp.int32(p.tiles[i]))))
        shared_stretches.append((shared_first, shared_end - shared_first))

    @pl.when(warpgroup == FINISHES)
    def _():
        for (_, _, block), own in zip(stretches, tables, strict=True):
            routing_tables.load_blocks(table, block, own)

    barriers.sync_block(ready)

    @pl.when(warpgroup == FINISHES)
    def _():
        if factors is not None:
            routing_tables.load_weights(weights, tables[0], factors)

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
                    routing_tables.await_tiles(counts, first_block + block_of(n), p.tiles[0])
                load(source, pairs_of(n), p.chosen if gated else 1)

        def finish(n, sums):
            tile = lax.rem(first + n, each)
            if gated:
                own_factors = factors.at[pl.ds(block_of(n) * COLUMNS, COLUMNS)]
                skinny_epilogue.store_swiglu(out, sums, tile, p.limit, pairs_of(n), own_factors)
            else:
                skinny_epilogue.store_rows(out, sums, tile, pairs_of(n))
                add_up(tile)
            if both and gated:
                routing_tables.announce(counts, first_block + block_of(n))

        depth, (codes, scales) = p.inner if i else p.depth, matrices[0][i]
        return Product(p.layout, codes, scales, count, depth, 0, gated, rows_of, load_inputs, finish)

    def shared_product(i, source, out, first, count):
        tiles, gated = p.shared_tiles, i == 0

        def rows_of(n):
            # Also of a block of threads that has no tile.
            row = jnp.minimum(first + n, tiles[i] - 1) * (HALF if gated else ROWS)
            return row, row + (p.shared if gated else HALF)

        def load_inputs(n, load):
            @pl.when(n == 0)
            def _():
                if both and not gated:
                    routing_tables.await_tiles(counts, jnp.int32(p.blocks), tiles[0])
                load(source, p.pairs // p.chosen)

        def finish(n, sums):
            if gated:
                skinny_epilogue.store_swiglu(out, sums, first + n, p.limit)
            else:
                skinny_epilogue.store_rows(out, sums, first + n)
                add_up(first + n)
            if both and gated:
                routing_tables.announce(counts, jnp.int32(p.blocks))

        depth, (codes, scales) = p.shared if i else p.depth, matrices[1][i]
        return Product(FP8, codes, scales, count, depth, 0, gated, rows_of, load_inputs, finish)

    outs, products = _by_map(outs, maps, len(inputs)), []

    def add_up(tile):
        if p.shared and not interpreting():
            terms, last, total = outs[-1]
            arrays = total, terms, last, selected, counts
            routing_tables.add_up(*arrays, 2 + p.blocks, tile, p.experts, scratch)

    for n, i in enumerate(todo):
        sources = inputs if n == 0 else outs[0]
        products.append(product(i, sources[0], outs[n][0], tables[n], *stretches[n]))
        if p.shared:
            products.append(shared_product(i, sources[1], outs[n][1], *shared_stretches[n]))
    p.stream.run(warpgroup, products, **stream)
