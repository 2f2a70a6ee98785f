"""Linear maps of few tokens whose weights stay in FP8: as long as reading these takes.

The blocks of a cluster share a tile's columns, as many as it takes for their inputs to fit into shared memory. Each
sends its sums of a tile to one of them, which adds them up, in order, once all tiles are done.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import clusters, stream_stores, weight_stream, wgmma_results
from pallas_kernels.common.checks import check_array, check_rules
from pallas_kernels.common.primitive import interpreting, kernel
from pallas_kernels.common.stored_weights import FP8, HALF, ROWS, SCALED, SHIFT
from pallas_kernels.common.support import MULTIPROCESSORS, traced_once
from pallas_kernels.common.weight_stream import FINISHES, Product, WeightStream


MOST_STORED_TOKENS = 32
LEAST_COLUMNS = 256  # four steps of the fewest bytes
FEW_TOKENS = 16  # that there is room for whatever the number of columns
TOKENS = 8  # of a product at least
LEAST_STAGES = 8  # two for each warpgroup that multiplies
# Blocks in a cluster, and how many of these clusters run at once: all blocks of one are in one part of the chip.
CLUSTERS = {1: MULTIPROCESSORS, 2: MULTIPROCESSORS // 2, 4: 32}


@traced_once("parts", "groups", "limit")
def stored_linear(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    parts: tuple[tuple[int, bool], ...],
    groups: int = 1,
    limit: float | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """`x @ weight.T`, or that of groups of channels, as an array for each part of the weight's rows; or SwiGLU of two.

    Args:
      x: [T, groups * K] bfloat16, T up to 32.
      codes: [groups * M, K] uint8, E4M3 bits, K a multiple of 256.
      scales: [groups * M / 128, K / 128] uint8, E8M0 bits, one for 128 x 128 codes.
      parts: (rows, whether sums are rounded to bfloat16) one below the other; rows are multiples of 64.
      groups: matrices one below the other, each for its K columns of x; M a multiple of 128.
      limit: None, or of SwiGLU, of two equal parts that are rounded: the gate's rows and those of up, multiples of 128.
      interpret: run on the CPU, interpreted, with the race detector on.

    Returns:
      [T, rows] float32 or bfloat16 of each part: float32 sums, in an order that depends on the weight's shape alone.
      With a limit, [T, rows] bfloat16 of `silu(min(gate, limit)) * clip(up, -limit, limit)`.

    Raises:
      NotImplementedError: a shape or dtype is not one of these.
    """
    tokens, (rows, depth) = x.shape[0], codes.shape
    check_array("x", x, jnp.bfloat16, None, groups * depth)
    check_array("codes", codes, jnp.uint8, rows, depth)
    check_array("scales", scales, jnp.uint8, -(-rows // SCALED), -(-depth // SCALED))
    sizes = [size for size, _ in parts]
    check_rules(
        {
            f"parts of a multiple of {ROWS} rows, got {sizes}": not any(size % ROWS for size in sizes),
            f"groups of a multiple of {SCALED} rows, got {groups} groups of {rows} rows": groups == 1
            or rows % (groups * SCALED) == 0,
            f"columns in multiples of {LEAST_COLUMNS}, got {depth}": depth % LEAST_COLUMNS == 0,
            f"1 to {MOST_STORED_TOKENS} tokens, got {tokens}": 0 < tokens <= MOST_STORED_TOKENS,
            f"gate and up of a multiple of {SCALED} rows, got {sizes}": limit is None or sizes[0] % SCALED == 0,
        }
    )
    assert sum(sizes) == rows
    p = _problem(tokens, rows, depth, groups, parts, limit, interpret)
    if p is None:
        if tokens <= FEW_TOKENS:
            raise NotImplementedError(f"the kernel takes fewer columns, got {depth}")
        options = dict(parts=parts, groups=groups, limit=limit, interpret=interpret)
        halves = [stored_linear(half, codes, scales, **options) for half in (x[:FEW_TOKENS], x[FEW_TOKENS:])]
        return tuple(jnp.concatenate(pair) for pair in zip(*halves, strict=True))
    outs = parts if limit is None else parts[:1]
    out_type = [jax.ShapeDtypeStruct((tokens, size), jnp.bfloat16 if low else jnp.float32) for size, low in outs]
    scratch = p.stream.scratch(p.inbox_bytes + 2048, interpret=interpret)
    if p.splits > 1 and interpret:
        # Interpreted blocks meet in global memory.
        shape = (p.workers, p.splits, p.owned, p.splits, ROWS, p.stream.tokens)
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        scratch |= dict(cluster=plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=1))
    elif p.splits > 1:
        scratch |= dict(inbox=plgpu.SMEM((p.owned, p.splits, ROWS * p.stream.tokens), jnp.float32))
    run = kernel(
        functools.partial(_body, p),
        out_type=out_type,
        kernel_name="stored_linear",
        grid=(p.workers,),
        grid_names=("worker",),
        cluster=(p.splits,),
        cluster_names=("split",),
        num_threads=weight_stream.WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        interpret=interpret,
    )
    return tuple(run(x, codes, scales)[: len(outs)])


@dataclasses.dataclass(frozen=True)
class StoredLinearProblem:
    """What is static about a call: `workers` clusters of `splits` blocks take a stretch of `tiles` of 64 rows each.

    `group`: tiles of a group, which has inputs of its own.
    """

    stream: WeightStream
    tokens: int
    group: int
    tiles: int
    splits: int
    workers: int
    parts: tuple[tuple[int, bool], ...]
    limit: float | None

    @property
    def owned(self) -> int:
        """Tiles that a block adds up."""
        return math.ceil(math.ceil(self.tiles / self.workers) / self.splits)

    @property
    def inbox_bytes(self) -> int:
        return 4 * self.owned * self.splits * ROWS * self.stream.tokens if self.splits > 1 else 0

    @property
    def depth(self) -> int:
        """Columns of the weight."""
        return self.splits * self.stream.depths[0]


def _problem(tokens, rows, depth, groups, parts, limit, interpret):
    """The fewest blocks in a cluster with which all have work, and there is room for 16 tokens; None: not for more."""
    tiles, columns = rows // ROWS, -(-tokens // TOKENS) * TOKENS
    fits = None
    for splits, most in CLUSTERS.items():
        if depth % (LEAST_COLUMNS * splits) or (splits > 1 and interpret and splits > 2):
            continue
        workers = min(tiles, 2 if interpret else most)
        own = (depth // splits,)
        most_segments = weight_stream.most_segments(FP8, *own)

        def with_room(columns, own=own, most_segments=most_segments, workers=workers, splits=splits):
            """The problem with so many columns, with the largest stages of which there are enough."""
            for segments in (x for x in (4, 2, 1) if x <= most_segments):
                stream = WeightStream(FP8, columns, own, segments)
                p = StoredLinearProblem(stream, tokens, tiles // groups, tiles, splits, workers, parts, limit)
                if stream.stages(p.inbox_bytes + 2048) >= LEAST_STAGES:
                    return p
            return None

        if with_room(FEW_TOKENS) is None:
            continue
        fits = with_room(columns)
        if interpret or 2 * workers * splits > MULTIPROCESSORS:
            break
    return fits


def _body(p, x, codes, scales, *outs, inbox: Any = None, cluster: Any = None, **streamed):
    worker, split, warpgroup = (lax.axis_index(name) for name in ("worker", "split", "warpgroup"))
    workers = jnp.int32(p.workers)
    first, end = lax.div(worker * p.tiles, workers), lax.div((worker + 1) * p.tiles, workers)
    shared = p.splits > 1
    if shared:
        # A block writes to another one's memory once that one runs.
        clusters.arrive(None)

    def box(owner, slot, block):
        return outs[-1].at[worker, owner, slot, block] if interpreting() else inbox.at[slot, block]

    def load_inputs(n, load):
        @pl.when((n == 0) | (lax.rem(first + n, jnp.int32(p.group)) == 0))
        def _():
            load(x, p.tokens, column=lax.div(first + n, jnp.int32(p.group)) * p.depth)

    def finish(n, sums):
        if not shared:
            _store(p, outs, first + n, sums)
            return

        @pl.when(n == 0)
        def _():
            clusters.wait(None)

        owner, slot = lax.rem(n, jnp.int32(p.splits)), lax.div(n, jnp.int32(p.splits))
        wgmma_results.put(box(owner, slot, split), sums, owner)

    gated = p.limit is not None

    def rows_of(n):
        row = (first + n) * (HALF if gated else ROWS)
        return row, row + (p.parts[0][0] if gated else HALF)

    start = split * p.stream.depths[0]
    product = Product(codes, scales, end - first, p.stream.depths[0], start, gated, rows_of, load_inputs, finish)
    p.stream.run(warpgroup, [product], **streamed)
    if not shared:
        return

    @pl.when(warpgroup != FINISHES)
    def _():
        clusters.wait(None)
        clusters.arrive(None)
        clusters.wait(None)

    @pl.when(warpgroup == FINISHES)
    def _():
        clusters.arrive(cluster)
        clusters.wait(cluster)
        for slot in range(p.owned):
            n = slot * p.splits + split

            @pl.when(n < end - first)
            def _(slot=slot, n=n):
                zeros = jnp.zeros((ROWS, p.stream.tokens), jnp.float32)
                total = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
                for block in range(p.splits):
                    total = wgmma_results.add(total, box(split, slot, block))
                _store(p, outs, first + n, total)


def _store(p, outs, tile, sums):
    """Writes 64 rows of the product to the part that they are of, or SwiGLU of them."""
    if p.limit is not None:
        stream_stores.store_swiglu(outs[0], sums, tile, p.limit)
        return
    row, start, sums = tile * ROWS, 0, sums * 2.0**SHIFT
    for out, (size, _) in zip(outs, p.parts, strict=False):

        @pl.when((row >= start) & (row < start + size))
        def _(out=out, start=start):
            wgmma_results.store(out.at[:, pl.ds(row - start, ROWS)], sums, transposed=True)

        start += size
