"""Linear maps of few tokens, their weights in FP8 or bfloat16: as long as reading these takes.

The blocks of a cluster share a tile's columns, as many as it takes for their inputs to fit into shared memory. Each
sends its sums of a tile to one of them, which adds them up, in order, once all tiles are done.
"""

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.linear.spec import LinearSpec, kernel_outputs
from pallas_kernels.matmul import skinny_epilogue, skinny_gemm
from pallas_kernels.matmul.quantized_weights import BF16, FP8, HALF, MULTIPLIERS, ROWS, SCALED, SHIFT, WeightLayout
from pallas_kernels.matmul.skinny_gemm import FINISHES, Product, SkinnyGemm
from pallas_kernels.mgpu import barriers, transaction_barriers, wgmma
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.runtime.checks import check_array, check_rules
from pallas_kernels.runtime.hardware import MULTIPROCESSORS
from pallas_kernels.runtime.launch import interpreting, kernel, wait_for_inputs
from pallas_kernels.runtime.lowering_cache import cached_trace


MAX_STORED_TOKENS = 32
MAX_NORMED_TOKENS = 16  # with more, registers would not do
FEW_TOKENS = 16  # that there is room for whatever the number of columns
TOKENS = 8  # of a product at least
MIN_STAGES = 8  # two for each warpgroup that multiplies
# Blocks in a cluster, and how many of these clusters run at once: all blocks of one are in one part of the chip.
CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 32}


@cached_trace("spec", "swiglu_limit", "eps")
def quantized_linear(
    x: jax.Array,
    weights: tuple[jax.Array | tuple[jax.Array, jax.Array], ...],
    norm: jax.Array | None = None,
    *,
    spec: LinearSpec,
    swiglu_limit: float | None = None,
    eps: float = 0.0,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes `x @ weight.T` and splits it into the spec's outputs, or returns the SwiGLU of its two outputs.

    Args:
      x: [T, num_groups * K] bfloat16, T up to 32.
      weights: matrices with equally many columns, one below the other. Each is [M, K] bfloat16, or a pair of codes
        [M, K] uint8, E4M3 bits, and scales [M / 128, K / 128] uint8, E8M0 bits, one for 128 x 128 codes. K is a
        multiple of 256.
      norm: [K] float32 weight of an RMS norm of the rows of x, which are rounded after it, or None. T is up to 16.
      spec: outputs in float32 or bfloat16, each within one weight, whose sizes are multiples of 64. Groups have a
        multiple of 128 rows of the only weight.
      swiglu_limit: limit of SwiGLU, or None. If given, the spec has two bfloat16 outputs, the gate and the up
        projection, whose sizes are one multiple of 128.
      eps: number that the norm adds to the mean square.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, size] of each output: float32 sums, in an order that depends on the weights' shapes alone. With a limit, one
      [T, size] bfloat16 array, `silu(min(gate, limit)) * clip(up, -limit, limit)`.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, groups = x.shape[0], spec.num_groups
    depth = x.shape[1] // groups
    check_array("x", x, jnp.bfloat16, None, groups * depth)
    pairs = [weight if isinstance(weight, tuple) else (weight, None) for weight in weights]
    for codes, scales in pairs:
        check_array("weight" if scales is None else "codes", codes, _layout(scales).dtype, None, depth)
        if scales is not None:
            check_array("scales", scales, jnp.uint8, -(-codes.shape[0] // SCALED), -(-depth // SCALED))
    matrices = tuple((_layout(scales), codes.shape[0]) for codes, scales in pairs)
    rows = sum(rows for _, rows in matrices)
    outputs = kernel_outputs(spec, rows)
    sizes = [size for size, _ in outputs]
    least = _least_columns(matrices)
    check_rules(
        {
            f"outputs of a multiple of {ROWS} rows, got {sizes}": not any(size % ROWS for size in sizes),
            f"groups of a multiple of {SCALED} rows, got {groups} groups of {rows} rows": groups == 1
            or rows % (groups * SCALED) == 0,
            f"columns in multiples of {least}, got {depth}": depth % least == 0,
            f"1 to {MAX_STORED_TOKENS} tokens, got {tokens}": 0 < tokens <= MAX_STORED_TOKENS,
            f"gate and up of a multiple of {SCALED} rows, got {sizes}": swiglu_limit is None or sizes[0] % SCALED == 0,
        }
    )
    assert len(matrices) == 1 or groups == 1 and swiglu_limit is None
    if norm is not None:
        check_array("norm", norm, jnp.float32, depth)
        check_rules({f"a norm of up to {MAX_NORMED_TOKENS} tokens, got {tokens}": tokens <= MAX_NORMED_TOKENS})
        assert groups == 1
    p = _problem(tokens, matrices, depth, groups, outputs, swiglu_limit, eps, interpret)
    if p is None:
        if tokens <= FEW_TOKENS:
            raise NotImplementedError(f"the kernel takes fewer columns, got {depth}")
        options = dict(spec=spec, swiglu_limit=swiglu_limit, eps=eps, interpret=interpret)
        halves = [quantized_linear(half, weights, norm, **options) for half in (x[:FEW_TOKENS], x[FEW_TOKENS:])]
        return tuple(jnp.concatenate(pair) for pair in zip(*halves, strict=True))
    outputs = outputs if swiglu_limit is None else outputs[:1]
    out_type = [jax.ShapeDtypeStruct((tokens, size), dtype) for size, dtype in outputs]
    scratch = p.stream.scratch(p.inbox_bytes + 2048, interpret=interpret)
    if norm is not None:
        scratch |= dict(factors=plgpu.SMEM((p.stream.tokens,), jnp.float32))
    if p.splits > 1 and interpret:
        # Interpreted blocks meet in global memory.
        shape = (p.workers, p.splits, p.owned, p.splits, ROWS, p.stream.tokens)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        scratch |= dict(cluster=plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=1))
    elif p.splits > 1:
        inbox = plgpu.SMEM((p.owned, p.splits, ROWS * p.stream.tokens), jnp.float32)
        scratch |= dict(inbox=inbox, filled=transaction_barriers.scratch_type(1))
    run = kernel(
        functools.partial(_body, p),
        out_type=out_type,
        kernel_name="quantized_linear",
        grid=(p.workers,),
        grid_names=("worker",),
        cluster=(p.splits,),
        cluster_names=("split",),
        num_threads=skinny_gemm.WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        waits_in_body=True,
        interpret=interpret,
    )
    return tuple(run(x, pairs, *([] if norm is None else [norm]))[: len(outputs)])


def _layout(scales):
    return BF16 if scales is None else FP8


def _least_columns(matrices):
    """Four steps of the fewest bytes; they are the same for all matrices."""
    layouts = [layout for layout, _ in matrices]
    return MULTIPLIERS * max(layout.segment for layout in layouts) * max(layout.least_segments for layout in layouts)


@dataclasses.dataclass(frozen=True)
class QuantizedLinearProblem:
    """What is static about a call: `workers` clusters of `splits` blocks take a stretch of the tiles of 64 rows each.

    `matrices`: layout and tiles of each; `group`: tiles of a group, which has inputs of its own.
    """

    stream: SkinnyGemm
    tokens: int
    group: int
    matrices: tuple[tuple[WeightLayout, int], ...]
    splits: int
    workers: int
    outputs: tuple[tuple[int, jnp.dtype], ...]
    limit: float | None
    eps: float

    @property
    def owned(self) -> int:
        """Tiles that a block adds up, at most."""
        stretches = itertools.pairwise(self.first_tile(worker) for worker in range(self.workers + 1))
        return math.ceil(max(end - first for first, end in stretches) / self.splits)

    @property
    def inbox_bytes(self) -> int:
        return 4 * self.owned * self.splits * ROWS * self.stream.tokens if self.splits > 1 else 0

    @property
    def depth(self) -> int:
        """Columns of the weight."""
        return self.splits * self.stream.depth

    def first_tile(self, worker: Any) -> Any:
        """Where a cluster's stretch begins: all of them read as many bytes, but for a part of a tile."""
        clip, divide = (jnp.clip, lax.div) if isinstance(worker, jax.Array) else (np.clip, operator.floordiv)
        bits = [layout.bits * tiles for layout, tiles in self.matrices]
        begin, found = divide(worker * sum(bits), np.int32(self.workers)), 0
        for (layout, tiles), size in zip(self.matrices, bits, strict=True):
            found += clip(divide(begin, np.int32(layout.bits)), 0, tiles)
            begin -= size
        return found


def _problem(tokens, matrices, depth, groups, outputs, limit, eps, interpret):
    """The fewest blocks in a cluster with which all have work, and there is room for 16 tokens; None: not for more."""
    columns, matrices = -(-tokens // TOKENS) * TOKENS, tuple((layout, rows // ROWS) for layout, rows in matrices)
    tiles = sum(tiles for _, tiles in matrices)
    fits = None
    for splits, most in CLUSTERS.items():
        if depth % (_least_columns(matrices) * splits) or (splits > 1 and interpret and splits > 2):
            continue
        workers = min(tiles, 2 if interpret else most)
        own = tuple((layout, depth // splits) for layout, _ in matrices)
        most_segments = skinny_gemm.most_segments(*own)
        least_segments = max(layout.least_segments for layout, _ in own)

        def with_room(columns, own=own, segments=(least_segments, most_segments), workers=workers, splits=splits):
            """The problem with so many columns, with the largest stages of which there are enough."""
            stages = [x for x in (4, 2, 1) if segments[0] <= x <= segments[1]]
            for places, stage in itertools.product((MULTIPLIERS, 1), stages):
                stream = SkinnyGemm(own, columns, stage, places)
                p = QuantizedLinearProblem(
                    stream, tokens, tiles // groups, matrices, splits, workers, outputs, limit, eps
                )
                if stream.stages(p.inbox_bytes + 2048) >= MIN_STAGES:
                    return p
            return None

        few = with_room(FEW_TOKENS)
        if few is None or few.stream.places == 1:
            continue
        fits = with_room(columns)
        if interpret or 2 * workers * splits > MULTIPROCESSORS:
            break
    return fits


def _body(p, x, weights, *outs, inbox: Any = None, filled=None, cluster=None, factors: Any = None, **streamed):
    worker, split, warpgroup = (lax.axis_index(name) for name in ("worker", "split", "warpgroup"))
    first, end = p.first_tile(worker), p.first_tile(worker + 1)
    shared, norm = p.splits > 1, ()
    # Weights are no kernel's results: they are copied while the kernel before ends.
    pl.when(warpgroup != skinny_gemm.COPIES)(wait_for_inputs)
    if factors is not None:
        norm, outs = (outs[0], factors), outs[1:]
    if filled is not None:
        transaction_barriers.start(filled)

    def box(owner, slot, block):
        return outs[-1].at[worker, owner, slot, block] if interpreting() else inbox.at[slot, block]

    def load_inputs(tile, load):
        @pl.when((tile == first) | (lax.rem(tile, jnp.int32(p.group)) == 0))
        def _():
            load(x, p.tokens, column=lax.div(tile, jnp.int32(p.group)) * p.depth, norm=norm, eps=p.eps)

    def finish(tile, sums):
        if not shared:
            _store(p, outs, tile, sums)
            return

        n = tile - first

        @pl.when(n == 0)
        def _():
            # A block sends to another one once that one runs.
            barriers.wait_cluster(None)

        owner, slot = lax.rem(n, jnp.int32(p.splits)), lax.div(n, jnp.int32(p.splits))
        if filled is None:
            wgmma.put(box(owner, slot, split), sums)
        else:
            wgmma.send(box(owner, slot, split), sums, owner, filled.at[0])

    gated = p.limit is not None

    def product(above, codes, scales, layout, tiles):
        """Of the block's tiles of a weight, `above` which there are so many tiles of others."""
        begin, last = (jnp.clip(tile - above, 0, tiles) for tile in (first, end))
        count = last - begin

        def rows_of(n):
            # Also of a weight of which the block has none.
            row = jnp.minimum(begin + n, tiles - 1) * (HALF if gated else ROWS)
            return row, row + (p.outputs[0][0] if gated else HALF)

        def of_all(function):
            return lambda n, other: function(above + begin + n, other)

        depth, functions = p.stream.depth, (rows_of, of_all(load_inputs), of_all(finish))
        return Product(layout, codes, scales, count, depth, split * depth, gated, *functions)

    products, above = [], 0
    for (codes, scales), (layout, tiles) in zip(weights, p.matrices, strict=True):
        products.append(product(above, codes, scales, layout, tiles))
        above += tiles
    p.stream.run(warpgroup, products, **streamed)
    if not shared:
        return

    @pl.when(warpgroup != FINISHES)
    def _():
        barriers.wait_cluster(None)

    @pl.when(warpgroup == FINISHES)
    def _():
        if filled is None:
            barriers.arrive_cluster(cluster)
            barriers.wait_cluster(cluster)
        else:
            own = lax.div(end - first - split + (p.splits - 1), jnp.int32(p.splits))
            transaction_barriers.arrive(filled.at[0], own * (p.splits * 4 * ROWS * p.stream.tokens // THREADS))
            transaction_barriers.wait(filled.at[0], jnp.int32(0))
        for slot in range(p.owned):
            n = slot * p.splits + split

            @pl.when(n < end - first)
            def _(slot=slot, n=n):
                zeros = jnp.zeros((ROWS, p.stream.tokens), jnp.float32)
                total = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                for block in range(p.splits):
                    total = wgmma.add(total, box(split, slot, block))
                _store(p, outs, first + n, total)


def _store(p, outs, tile, sums):
    """Writes 64 rows of the product to the output that has them, or SwiGLU of them."""
    if p.limit is not None:
        skinny_epilogue.store_swiglu(outs[0], sums, tile, p.limit)
        return
    row, start, sums = tile * ROWS, 0, sums * 2.0**SHIFT
    for out, (size, _) in zip(outs, p.outputs, strict=False):

        @pl.when((row >= start) & (row < start + size))
        def _(out=out, start=start):
            wgmma.store(out.at[:, pl.ds(row - start, ROWS)], sums, transposed=True)

        start += size
