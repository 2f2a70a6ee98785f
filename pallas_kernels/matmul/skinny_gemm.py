"""Skinny GEMM: sums[r, n] = sum_k W[r, k] * x[n, k] for few inputs x, with W quantized in global memory.

The kernel is bound by the bandwidth of reading W once. The caller gives each block a list of `Product` objects, which
describe tiles of 64 rows of a matrix. The columns of a tile are split into steps, and a step into one or several stages
of a ring in shared memory. The inputs stay in shared memory.

    warpgroup   role        does                                            waits for       signals
    0..3        multiply    loads inputs, multiplies every fourth step      weights_full    weights_empty
                            of a tile, stores its partial sums              sums_empty      sums_full
    4           load        copies weights, without a pause between tiles   weights_empty   weights_full
    5           epilogue    adds a tile's four partial sums in order and    sums_full       sums_empty
                            finishes the tile

A matrix of short rows has too few steps for four warpgroups. Its tiles have 256 rows (`Product.whole_rows`). Each
warpgroup multiplies 64 whole rows of a tile, so there are no partial sums to add.

FP4's scales are copied with the codes of a stage if bulk copies can address them. Otherwise all scales of a tile are
copied together to a separate ring, with the barriers tile_scales_empty and tile_scales_full.

The multiplying warpgroups synchronize at `inputs_ready` before and after they load inputs. If shared memory is short,
they add their partial sums in one place, one warpgroup after the other. The order in which products are added depends
on the shape and the storage of W alone, so the bits of an input's sums do not depend on the other inputs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import skinny_mma, skinny_prologue
from pallas_kernels.matmul.quantized_weights import FP4, HALF, ROWS, SCALE_BYTES, SHIFT, WeightLayout
from pallas_kernels.matmul.skinny_mma import COLUMNS, MULTIPLIERS, UNIT, StageFormat
from pallas_kernels.mgpu import barriers, wgmma
from pallas_kernels.runtime.hardware import SHARED_BYTES


LOAD = MULTIPLIERS
EPILOGUE = MULTIPLIERS + 1  # LOAD and EPILOGUE are indices of warpgroups
WARPGROUPS = MULTIPLIERS + 2  # number of warpgroups of a block
STAGING_BYTES = SHARED_BYTES - (2 << 10)  # shared memory of a block for stages, inputs, sums and the caller's arrays
MAX_STAGES = 32
TILE_SCALES_BYTES = 8 << 10  # bytes of shared memory for FP4 scales of whole tiles; more if two tiles need more


@dataclasses.dataclass(frozen=True)
class Product:
    """The tiles of one matrix that a block multiplies, with functions that find rows, load inputs and store sums."""

    layout: WeightLayout
    codes_gmem: Any  # [R, elements of a row] of the layout's dtype: bfloat16 weights, or codes of FP8 or FP4
    # E8M0 scales, uint8, or None for bfloat16:
    #   * FP8: [R / block, columns / block].
    #   * FP4: [R, columns / 32].
    #   * FP4 with 8 scales in a weight row: [R / 2, 16], with the scales of two weight rows in a line.
    #   * FP4 if all scales of a tile are copied together: [lines, `WeightLayout.scale_line`].
    scales_gmem: Any
    tiles: jax.Array  # int32 scalar, number of tiles
    depth: int  # number of columns that this block multiplies
    first_column: jax.Array | int  # index of the first of these columns
    gated: bool  # whether one thread gets the sums of row i of a tile's first half and of row i of its second half
    # Maps the index of a tile to the first row index of each half. A half is 32 consecutive rows of the matrix. With
    # `whole_rows`, the halves are those of the first 64 rows.
    rows_of: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    # Loads the inputs of a tile, or does nothing if the previous tile has the same inputs. It is called with the index
    # of the tile and with a function `load(source, rows, divisor, column, norm, eps)` that loads inputs. The arguments
    # of `load` are those of `skinny_prologue.load_inputs`, except that `column` counts from `first_column` and `eps` is
    # the epsilon of the norm.
    load_inputs: Callable[[jax.Array, Callable[..., None]], None]
    # Stores the sums of a tile. The epilogue calls it with the index of the tile and with sums [64, tokens] float32,
    # which are 2**-32 times the sums of products. With `whole_rows`, it is called for each quarter of a tile, 64 rows:
    # quarter i of tile n has the index 4 * n + i.
    finish: Callable[[jax.Array, jax.Array], None]
    # Whether tiles have 256 consecutive rows, of which each warpgroup multiplies 64. If so, `SkinnyGemm.short_rows`
    # contains `depth`.
    whole_rows: bool = False

    @property
    def scale_bytes(self) -> int:
        """The number of FP4 scales of a row that one copy brings, 16 or 8."""
        return min(SCALE_BYTES, self.depth // 32)

    @property
    def copies_all_scales(self) -> bool:
        """Whether all FP4 scales of a tile are copied together, to a separate ring."""
        return self.layout.copies_all_scales(self.depth)

    @property
    def rows(self) -> int:
        """The number of rows of a tile."""
        return MULTIPLIERS * ROWS if self.whole_rows else ROWS


class SkinnyScratch(NamedTuple):
    """Shared memory and barriers of a skinny GEMM: types to allocate outside the kernel, references inside it."""

    # Weights or codes: a list of arrays [stages, rows, elements] with at least 64 rows, one for each dtype and number
    # of elements in `SkinnyGemm.row_bytes`. On a GPU the arrays are views of the same memory.
    codes_smem: Any
    weights_empty: Any  # a barrier for each stage
    weights_full: Any  # a barrier for each stage
    inputs_smem: Any  # [tokens / 8, columns / 32, 8, 32] bfloat16, in the order of `skinny_prologue.load_inputs`
    sums_full: Any  # a barrier for each slot of `sums_smem`
    inputs_ready: Any  # one barrier at which the multiplying warpgroups meet
    scales_smem: Any  # [stages, 64, 16] uint8 scales of FP4 that are copied with codes; None if there are none
    # [slots, places, 64 * tokens] float32 (interpreted, [.., 64, tokens]). A slot holds the sums of one tile. It has a
    # place for the (partial) sums of each warpgroup, or a single place to which all warpgroups add.
    sums_smem: Any
    sums_empty: Any  # a barrier for each slot of `sums_smem`
    # Barriers that order the additions to a slot's only place; None if a slot has a place for each warpgroup. Without
    # `takes_turns` the order is 0, 1, 2, 3, and a slot has three barriers: warpgroup w signals barrier w, and warpgroup
    # w + 1 waits there. With `takes_turns` the order changes from tile to tile, and a slot has four barriers: warpgroup
    # w waits at barrier w, which the preceding warpgroup in the order signals.
    turns: Any
    # [slots, lines, scales of a line] uint8, all FP4 scales of a tile in each slot, row after row. None if
    # `WeightLayout.copies_all_scales` is False for all matrices.
    tile_scales_smem: Any
    tile_scales_empty: Any  # a barrier for each slot of `tile_scales_smem`
    tile_scales_full: Any  # a barrier for each slot of `tile_scales_smem`

    def codes(self, layout: WeightLayout, columns: int):
        """Returns the array of `codes_smem` whose stages have `columns` columns of weights in this layout."""
        row = layout.dtype, layout.elements(columns)
        return next(ref for ref in self.codes_smem if (ref.dtype, ref.shape[2]) == row)


@dataclasses.dataclass(frozen=True)
class SkinnyGemm:
    """Static description of a skinny GEMM."""

    # (layout, number of columns) of each matrix that a block multiplies. FP4 and bfloat16 cannot be combined.
    matrices: tuple[tuple[WeightLayout, int], ...]
    tokens: int  # number of inputs, a multiple of 8
    segments: int  # number of segments in a stage, 4, 2 or 1; a segment is 64 bytes of each row
    step_segments: int  # number of segments of a step, a multiple of `segments`; see `most_segments`
    places: int = MULTIPLIERS  # number of places for a tile's partial sums: one for each warpgroup, or 1 to save memory
    max_stages: int = MAX_STAGES  # largest number of stages of weights in shared memory
    short_rows: tuple[int, ...] = ()  # numbers of columns of the FP4 matrices whose products have `whole_rows`

    @property
    def depth(self) -> int:
        """The number of columns of the widest matrix, rounded up to whole steps."""
        return max((*self.short_rows, *(self.padded(*matrix) for matrix in self.matrices)))

    @property
    def row_bytes(self) -> dict[tuple[jnp.dtype, int], int]:
        """The number of bytes of a stage's row, for each (dtype, number of elements) that such a row can have."""
        columns = [(layout, self.segments * layout.segment) for layout, _ in self.matrices]
        columns += [(FP4, self.row_columns(depth)) for depth in self.short_rows]
        rows = [(layout.dtype, layout.elements(count)) for layout, count in columns]
        return {(dtype, elements): dtype.itemsize * elements for dtype, elements in rows}

    @property
    def stage_bytes(self) -> int:
        """The number of bytes of a stage's weights: room for 64 rows, and a multiple of each number in `row_bytes`."""
        sizes = self.row_bytes.values()
        unit = math.lcm(*sizes)
        return -(-ROWS * max(sizes) // unit) * unit

    @property
    def stages_per_step(self) -> int:
        return self.step_segments // self.segments

    @property
    def takes_turns(self) -> bool:
        """Whether, for at least one matrix, the number of steps of a tile is not a multiple of four."""
        steps = (self.padded(*matrix) // (self.step_segments * matrix[0].segment) for matrix in self.matrices)
        return any(count % MULTIPLIERS for count in steps)

    @property
    def has_stage_scales(self) -> bool:
        """Whether a matrix has FP4 scales that are copied to the same stages as the codes."""
        fp4 = [depth for layout, depth in self.matrices if layout.bits == 4]
        return not all(FP4.copies_all_scales(depth) for depth in (*fp4, *self.short_rows))

    @property
    def tile_scales(self) -> tuple[int, int, int]:
        """The shape of `SkinnyScratch.tile_scales_smem`: (slots, lines, scales of a line). Zeros without this array."""
        tiles = [(layout, depth, ROWS) for layout, depth in self.matrices]
        tiles += [(FP4, depth, MULTIPLIERS * ROWS) for depth in self.short_rows]
        for layout, depth, rows in tiles:
            if layout.copies_all_scales(depth):
                line = layout.scale_line(depth)
                num_bytes = rows * depth // 32
                return max(2, TILE_SCALES_BYTES // num_bytes), num_bytes // line, line
        return 0, 0, 0

    @property
    def slots(self) -> int:
        """The number of tiles whose sums shared memory holds at a time."""
        return 2 if self.tokens == COLUMNS else 1

    def padded(self, layout: WeightLayout, depth: int) -> int:
        """Returns the number of columns `depth`, rounded up to whole steps. Columns from `depth` on are zeros."""
        step = self.step_segments * layout.segment
        return -(-depth // step) * step

    def stage_format(self, layout: WeightLayout, gated: bool = False, row_scales: int = 0) -> StageFormat:
        """Returns the format of the stages of a matrix."""
        has_tiles = all(self.padded(*matrix) == matrix[1] for matrix in self.matrices) and len(self.row_bytes) == 1
        return StageFormat(layout, gated, self.step_segments, row_scales, has_tiles)

    def row_columns(self, depth: int) -> int:
        """Returns the number of columns of a stage for a matrix in `short_rows` with `depth` columns.

        A row is divided into equal parts, one for each stage. A part is as large as fits into a stage, and a multiple
        of half a segment.
        """
        half_segment = FP4.segment // 2
        halves = depth // half_segment
        return half_segment * max(n for n in range(1, 2 * self.segments + 1) if halves % n == 0)

    def columns(self, product: Product) -> int:
        """Returns the number of columns of a tile. Columns from `product.depth` on are zeros."""
        return product.depth if product.whole_rows else self.padded(product.layout, product.depth)

    def stage_columns(self, product: Product) -> int:
        if product.whole_rows:
            return self.row_columns(product.depth)
        return self.segments * product.layout.segment

    def tile_stages(self, product: Product) -> int:
        """Returns the number of stages of a tile."""
        return self.columns(product) // self.stage_columns(product) * (product.rows // ROWS)

    def tile_steps(self, product: Product) -> int:
        """Returns the number of steps of a tile."""
        return self.tile_stages(product) // self.stages_per_step

    def stages(self, other_bytes: int) -> int:
        """Returns the number of stages that fit into shared memory beside `other_bytes` bytes of the caller's arrays.

        The result is a multiple of the number of stages in four steps, so that each stage of the ring is always read by
        the same warpgroup.
        """
        used = other_bytes + 2 * self.depth * self.tokens + 4 * self.slots * self.places * ROWS * self.tokens
        used += math.prod(self.tile_scales)
        stage = self.stage_bytes + ROWS * SCALE_BYTES * self.has_stage_scales
        together = MULTIPLIERS * self.stages_per_step
        return min((STAGING_BYTES - used) // stage, self.max_stages) // together * together

    def scratch(self, other_bytes: int, *, interpret: bool) -> SkinnyScratch:
        """Returns the scratch types for `run`. The caller's own arrays take `other_bytes` bytes of shared memory."""
        stages = self.stages(other_bytes)
        has_scales = self.has_stage_scales
        scale_slots = self.tile_scales[0]
        tile_barriers = functools.partial(plgpu.Barrier, num_barriers=scale_slots)
        # Arrays of different kinds of rows share their memory. FP4 and FP8 even share an array if their rows have the
        # same number of bytes. The interpreter gets separate arrays, because it reports writes to two arrays of a
        # `RefUnion` as a race.
        codes = []
        for (dtype, elements), row_bytes in self.row_bytes.items():
            transforms = self.stage_format(self.matrices[0][0]).transforms(elements)
            shape = stages, self.stage_bytes // row_bytes, elements
            codes.append(plgpu.SMEM(shape, dtype, transforms=transforms))
        turn_barriers = MULTIPLIERS if self.takes_turns else MULTIPLIERS - 1
        sums_shape = (ROWS, self.tokens) if interpret else (ROWS * self.tokens,)
        return SkinnyScratch(
            codes_smem=plgpu.RefUnion(*codes) if len(codes) > 1 and not interpret else codes,
            weights_empty=plgpu.Barrier(num_barriers=stages),
            weights_full=plgpu.Barrier(num_arrivals=2 * (1 + has_scales), num_barriers=stages),
            inputs_smem=plgpu.SMEM((self.tokens // COLUMNS, self.depth // UNIT, COLUMNS, UNIT), jnp.bfloat16),
            sums_full=plgpu.Barrier(num_arrivals=self.places, num_barriers=self.slots),
            inputs_ready=plgpu.Barrier(num_arrivals=MULTIPLIERS),
            scales_smem=plgpu.SMEM((stages, ROWS, SCALE_BYTES), jnp.uint8) if has_scales else None,
            sums_smem=plgpu.SMEM((self.slots, self.places, *sums_shape), jnp.float32),
            sums_empty=plgpu.Barrier(num_barriers=self.slots),
            turns=plgpu.Barrier(num_barriers=self.slots * turn_barriers) if self.places == 1 else None,
            tile_scales_smem=plgpu.SMEM(self.tile_scales, jnp.uint8) if scale_slots else None,
            tile_scales_empty=tile_barriers(num_arrivals=MULTIPLIERS) if scale_slots else None,
            tile_scales_full=tile_barriers() if scale_slots else None,
        )

    def run(self, warpgroup: jax.Array, products: Sequence[Product], refs: SkinnyScratch) -> None:
        """Multiplies all tiles of the products, one after the other. Every warpgroup calls `run` with its index."""
        pl.when(warpgroup == LOAD)(lambda: _load_weights(self, products, refs))
        pl.when(warpgroup < MULTIPLIERS)(lambda: _multiply(self, products, refs, warpgroup))
        pl.when(warpgroup == EPILOGUE)(lambda: _finish_tiles(self, products, refs))


def most_segments(*matrices: tuple[WeightLayout, int]) -> int:
    """Returns the number of segments in a step, 4, 2 or 1. A segment is 64 bytes of each row.

    The result is the largest number with which the number of steps of each matrix is a multiple of four. If there is no
    such number, it is the largest with which each matrix has a whole number of steps, or else 2. With bfloat16, the
    result is at least 2, see `WeightLayout.min_segments`.

    Any whole number of steps is enough in two cases:

      * A matrix is FP4. Each FP4 stage takes extra time, so a few large stages are faster than many small ones, even if
        the warpgroups then get different numbers of stages.
      * A matrix is FP8 with a scale for each 32 columns. A thread block of a cluster may multiply any number of
        segments of its rows.

    Args:
      matrices: (layout, number of columns) of each matrix.
    """
    whole_steps = any(layout.bits == 4 or layout.has_small_blocks for layout, _ in matrices)
    min_segments = max(layout.min_segments for layout, _ in matrices)
    for together in (1,) if whole_steps else (MULTIPLIERS, 1):
        for n in (4, 2, 1):
            if n >= min_segments and not any(depth % (layout.segment * n * together) for layout, depth in matrices):
                return n
    return 2


@jax.named_scope("load_weights")
def _load_weights(gemm, products, refs):
    copied = jnp.int32(0)
    for product in products:
        copy_stage = functools.partial(_copy_stage, gemm, product, refs, copied)
        pl.loop(0, product.tiles * gemm.tile_stages(product))(copy_stage)
        copied += product.tiles * gemm.tile_stages(product)
    barriers.wait_for_last(refs.weights_empty, copied)
    for product in products:
        if product.copies_all_scales:
            barriers.wait_for_last(refs.tile_scales_empty, product.tiles)


def _copy_stage(gemm, product, refs, before, i):
    """Copies the weights of stage `i` of a product to the ring in shared memory.

    A stage holds some columns of 64 rows: two halves of 32 consecutive rows or, with `whole_rows`, 64 consecutive rows.
    FP4 scales are copied with the codes. If `product.copies_all_scales`, the first stage of a tile copies all scales of
    the tile instead.

    Args:
      gemm: the SkinnyGemm.
      product: the Product whose weights are copied.
      refs: references to the shared memory and the barriers.
      before: number of stages of the earlier products.
      i: index of the stage, counted over all tiles of the product.
    """
    tile_stages = gemm.tile_stages(product)
    columns = gemm.stage_columns(product)
    codes_smem = refs.codes(product.layout, columns)
    stage = barriers.turn(refs.weights_full, before + i)
    stage_of_tile = lax.rem(i, tile_stages)
    barriers.wait_empty(refs.weights_empty, before + i)

    first_rows = product.rows_of(lax.div(i, tile_stages))
    if product.copies_all_scales:
        copy_tile_scales = functools.partial(_copy_tile_scales, product, refs, lax.div(i, tile_stages), first_rows[0])
        pl.when(stage_of_tile == 0)(copy_tile_scales)
    pieces = [(0, first_rows[0], HALF), (HALF, first_rows[1], HALF)]  # (place in the stage, first row, number of rows)
    if product.whole_rows:
        # Four consecutive stages hold the same columns, of 64 rows each, for the four warpgroups.
        pieces = [(0, first_rows[0] + (stage_of_tile & (MULTIPLIERS - 1)) * ROWS, ROWS)]
        stage_of_tile = lax.div(stage_of_tile, MULTIPLIERS)  # from here on, the index among a row's stages
    column = product.layout.elements(product.first_column + stage_of_tile * columns)
    full = refs.weights_full.at[stage]
    size = codes_smem.shape[2]

    # The barrier expects the same number of arrivals for every product: one for each half of the codes and, if the
    # block has scales in stages, one for each half of the scales. Each copy is one arrival.
    arrivals = 4 if gemm.has_stage_scales else 2
    for place, row, count in pieces:
        source = pl.ds(pl.multiple_of(row, HALF), count), pl.ds(pl.multiple_of(column, size), size)
        plgpu.copy_gmem_to_smem(product.codes_gmem.at[source], codes_smem.at[stage].at[pl.ds(place, count)], full)
        arrivals -= 1
        if product.layout.bits == 4 and not product.copies_all_scales:
            # A scale belongs to 16 bytes of codes, 32 columns.
            scale_columns = pl.ds(lax.div(lax.div(column, 16), SCALE_BYTES) * SCALE_BYTES, SCALE_BYTES)
            lines = HALF * product.scale_bytes // SCALE_BYTES
            source = pl.ds(pl.multiple_of(lax.div(row, HALF) * lines, lines), count // HALF * lines), scale_columns
            target = refs.scales_smem.at[stage, pl.ds(place // HALF * lines, count // HALF * lines)]
            plgpu.copy_gmem_to_smem(product.scales_gmem.at[source], target, full)
            arrivals -= 1
    # The missing arrivals are those of copies that this product does not need.
    for _ in range(arrivals):
        plgpu.barrier_arrive(full)


def _copy_tile_scales(product, refs, tile, row):
    """Starts to copy all FP4 scales of a tile to its slot of `tile_scales_smem`, once the slot is free.

    Args:
      product: the product.
      refs: references to the shared memory and the barriers.
      tile: index of the tile in the product.
      row: index of the tile's first weight row in the matrix.
    """
    barriers.wait_empty(refs.tile_scales_empty, tile)
    slot = barriers.turn(refs.tile_scales_full, tile)
    lines = product.depth // product.layout.scale_line(product.depth)  # number of lines of 32 weight rows
    source = product.scales_gmem.at[pl.ds(lax.div(row, HALF) * lines, product.rows // HALF * lines), :]
    plgpu.copy_gmem_to_smem(source, refs.tile_scales_smem.at[slot], refs.tile_scales_full.at[slot])


@jax.named_scope("multiply")
def _multiply(gemm, products, refs, warpgroup):
    copied = jnp.int32(0)
    done_tiles = jnp.int32(0)
    take_turns = False
    # At most one product may have `copies_all_scales`, because the index of a tile in its product selects the slot of
    # the ring. This product must not be gated, because the scales of a tile are copied from consecutive lines.
    assert [product.gated for product in products if product.copies_all_scales] in ([], [False])
    for product in products:
        take_turns |= gemm.tile_steps(product) % MULTIPLIERS > 0
        steps = Steps(gemm, product, warpgroup, copied, take_turns)
        multiply_tile = functools.partial(_multiply_tile, steps, refs, done_tiles)
        lax.fori_loop(0, product.tiles, multiply_tile, _load_scales(steps, jnp.int32(0)))
        copied += product.tiles * gemm.tile_stages(product)
        done_tiles += product.tiles
    barriers.wait_for_last(refs.sums_empty, done_tiles)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of a product's tiles that a warpgroup multiplies.

    Warpgroup w of the four multiplies steps w, w + 4, .. of each tile, if a tile's number of steps is a multiple of
    four. Otherwise the warpgroups take turns: the block counts the steps of all its tiles, and step n belongs to
    warpgroup n % 4. Either way, each stage of the ring is read by only one of the warpgroups.

    With `Product.whole_rows`, steps w, w + 4, .. cover the w-th 64 rows of a tile, from left to right.
    """

    gemm: SkinnyGemm
    product: Product
    warpgroup: jax.Array  # int32 scalar, index of the warpgroup
    copied: jax.Array  # int32 scalar, number of stages of the block's earlier products
    take_turns: bool  # whether a tile's number of steps is not a multiple of four, in this product or an earlier one

    def first(self, tile: jax.Array) -> jax.Array:
        """Returns the index of the warpgroup's first step in a tile: 0 to 3, even if the tile has fewer steps."""
        if not self.take_turns:
            return self.warpgroup
        per_step = self.gemm.stages_per_step
        copied_steps = self.copied if per_step == 1 else lax.div(self.copied, per_step)
        return (self.warpgroup - copied_steps - tile * self.gemm.tile_steps(self.product)) & (MULTIPLIERS - 1)

    def count_stages(self, first: jax.Array) -> jax.Array | int:
        """Returns the number of stages of the warpgroup's steps in a tile. `first` is the index of the first step."""
        steps = self.gemm.tile_steps(self.product)
        if not self.take_turns:
            return self.gemm.tile_stages(self.product) // MULTIPLIERS
        count = (first < steps % MULTIPLIERS).astype(jnp.int32)
        if steps >= MULTIPLIERS:
            count += steps // MULTIPLIERS
        return count if self.gemm.stages_per_step == 1 else count * self.gemm.stages_per_step

    def index_of(self, i: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Finds the i-th of the stages that the warpgroup multiplies in a tile.

        Args:
          i: index of the stage among the warpgroup's stages of the tile.
          first: index of the warpgroup's first step in the tile, from `self.first`.

        Returns:
          (index of the stage among all stages of the tile, index among the stages that cover a row from left to right).
        """
        if self.product.whole_rows:
            return i * MULTIPLIERS + first, i
        per_step = self.gemm.stages_per_step
        index = (lax.div(i, per_step) * MULTIPLIERS + first) * per_step + lax.rem(i, per_step)
        return index, index

    def place(self, first: jax.Array) -> jax.Array:
        """Returns the place of this warpgroup's partial sum in the order of addition.

        In a tile of more than two steps, this is the index `first` of the warpgroup's first step, so that the bits of
        the sum do not depend on which warpgroup multiplies which steps. In a smaller tile, it is the index of the
        warpgroup, because a sum of two terms has the same bits in any order.
        """
        return first if self.gemm.tile_steps(self.product) > 2 else self.warpgroup


def _multiply_tile(steps, refs, done, tile, scales):
    """Multiplies a warpgroup's steps of a tile and stores the partial sums in shared memory.

    Args:
      steps: the warpgroup's steps of the product.
      refs: references to the shared memory and the barriers.
      done: number of tiles of the earlier products.
      tile: index of the tile in this product.
      scales: FP8 scales of the tile, from `_load_scales`.

    Returns:
      FP8 scales of the next tile, which load while this tile is multiplied.
    """
    gemm = steps.gemm
    product = steps.product
    warpgroup = steps.warpgroup

    def load(source_gmem, rows, divisor=1, column=0, norm=(), eps=0.0):
        """Loads the inputs of this tile and of later tiles with the same inputs, see `Product.load_inputs`."""
        if norm:
            _, factors_smem = norm
            skinny_prologue.store_factors(factors_smem, source_gmem, eps, warpgroup)
        barriers.meet(refs.inputs_ready)  # the factors are stored, and no warpgroup reads the previous inputs any more
        skinny_prologue.load_inputs(
            refs.inputs_smem,
            source_gmem,
            rows,
            divisor,
            column + product.first_column,
            (product.depth, gemm.columns(product)),
            warpgroup,
            product.layout,
            gemm.stage_columns(product),
            norm,
        )
        barriers.meet(refs.inputs_ready)  # the inputs are stored

    product.load_inputs(tile, load)
    next_scales = _load_scales(steps, jnp.minimum(tile + 1, product.tiles - 1))
    acc, place = _multiply_steps(steps, refs, tile, scales)
    slot = barriers.turn(refs.sums_full, done + tile)
    barriers.wait_empty(refs.sums_empty, done + tile)
    if gemm.places == 1:
        _add_in_turn(steps, refs, acc, place, slot)
    else:
        wgmma.put(refs.sums_smem.at[slot, place], acc)
        plgpu.barrier_arrive(refs.sums_full.at[slot])
    return next_scales


def _multiply_steps(steps, refs, tile, scales):
    """Multiplies a warpgroup's steps of a tile. The arguments are those of `_multiply_tile`.

    FP8 scales are in the argument `scales`. FP4 scales are in the same stages as the codes or, if
    `product.copies_all_scales`, in a slot of `refs.tile_scales_smem`.

    Returns:
      (the warpgroup's partial sums [64, tokens], their place in the order of addition).
    """
    gemm = steps.gemm
    product = steps.product
    layout = product.layout
    tile_stages = gemm.tile_stages(product)
    codes_smem = refs.codes(layout, gemm.stage_columns(product))
    scale_lines = ROWS * product.scale_bytes // SCALE_BYTES  # number of lines of FP4 scales in a stage
    first_step = steps.first(tile)
    count = steps.count_stages(first_step)

    # `row_scales` is the number of scales of a row if all scales of the tile are copied together, otherwise 0.
    row_scales = product.depth // 32 if product.copies_all_scales else 0
    stage_format = gemm.stage_format(layout, product.gated, row_scales)
    scales_slot = barriers.turn(refs.tile_scales_full, tile) if row_scales else None
    if row_scales:
        plgpu.barrier_wait(refs.tile_scales_full.at[scales_slot])
        # A slot has the scales of the whole tile; `lines` is the number of lines of the 64 rows of a warpgroup.
        lines = refs.tile_scales_smem.shape[1] * ROWS // product.rows
        first_line = first_step * lines if product.whole_rows else 0
        scales = refs.tile_scales_smem.at[scales_slot, pl.ds(first_line, lines)]

    def add_stage(i, acc):
        index, row_stage = steps.index_of(i, first_step)
        stage = barriers.turn(refs.weights_full, steps.copied + tile * tile_stages + index)
        plgpu.barrier_wait(refs.weights_full.at[stage])
        has_stage_scales = layout.bits == 4 and not row_scales
        operand = refs.scales_smem.at[stage, pl.ds(0, scale_lines)] if has_stage_scales else scales
        operands = codes_smem.at[stage, pl.ds(0, ROWS)], operand, refs.inputs_smem, row_stage
        acc = skinny_mma.multiply_add(acc, *operands, stage_format)
        barriers.release(refs.weights_empty.at[stage])
        return acc

    acc = lax.fori_loop(0, count, add_stage, wgmma.zeros((ROWS, gemm.tokens)))
    if row_scales:
        barriers.release(refs.tile_scales_empty.at[scales_slot])
    return acc, steps.place(first_step)


def _load_scales(steps, tile):
    """Returns the FP8 scales of a tile, see `skinny_mma.load_scales`, or 0 if the weights are not FP8."""
    product = steps.product
    layout = product.layout
    if layout.bits != 8:
        return jnp.int32(0)
    halves = 2 if layout.has_small_blocks else 1 + product.gated
    rows = [lax.div(row, layout.block) for row in product.rows_of(tile)[:halves]]
    first_block = lax.div(jnp.int32(product.first_column), layout.block)
    if not layout.has_small_blocks:
        return skinny_mma.load_scales(product.scales_gmem, rows, first_block)
    step_segments = steps.gemm.step_segments
    first_block += steps.first(tile) * (step_segments * layout.segment // layout.block)
    return skinny_mma.load_scales(product.scales_gmem, rows, first_block, step_segments)


def _add_in_turn(steps, refs, acc, turn, slot):
    """Adds a warpgroup's partial sums to a slot of `sums_smem`, when the warpgroups with lower turns have done so.

    `turn` is the warpgroup's place in the order of addition, 0 to 3.
    """
    place = refs.sums_smem.at[slot, 0]
    takes_turns = steps.gemm.takes_turns
    if takes_turns:
        # The order of the warpgroups changes from tile to tile. If warpgroups shared a barrier, each would have to wait
        # for all arrivals there, also for those that are meant for others. So each warpgroup waits at a barrier of its
        # own, and signals the barrier of the next warpgroup in the order.
        next_barrier = slot * MULTIPLIERS + ((steps.warpgroup + 1) & (MULTIPLIERS - 1))
    else:
        next_barrier = slot * (MULTIPLIERS - 1) + turn
    pl.when(turn == 0)(lambda: wgmma.put(place, acc))

    @pl.when(turn > 0)
    def _():
        own_barrier = slot * MULTIPLIERS + steps.warpgroup if takes_turns else next_barrier - 1
        plgpu.barrier_wait(refs.turns.at[own_barrier])
        wgmma.add_to(place, acc)

    pl.when(turn < MULTIPLIERS - 1)(lambda: plgpu.barrier_arrive(refs.turns.at[next_barrier]))
    pl.when(turn == MULTIPLIERS - 1)(lambda: plgpu.barrier_arrive(refs.sums_full.at[slot]))


@jax.named_scope("finish_tiles")
def _finish_tiles(gemm, products, refs):
    done_tiles = jnp.int32(0)
    for product in products:
        pl.loop(0, product.tiles)(functools.partial(_finish_tile, gemm, product, refs, done_tiles))
        done_tiles += product.tiles


def _finish_tile(gemm, product, refs, done, tile):
    slot = barriers.turn(refs.sums_full, done + tile)
    plgpu.barrier_wait(refs.sums_full.at[slot])
    zeros = wgmma.zeros((ROWS, gemm.tokens))
    if product.whole_rows:

        @pl.loop(0, MULTIPLIERS)
        def _(i):
            product.finish(tile * MULTIPLIERS + i, wgmma.add(zeros, refs.sums_smem.at[slot, i]))

        plgpu.barrier_arrive(refs.sums_empty.at[slot])
        return
    total = zeros
    for i in range(gemm.places):
        total = wgmma.add(total, refs.sums_smem.at[slot, i])
    plgpu.barrier_arrive(refs.sums_empty.at[slot])
    # `finish` expects the sums times 2**-32. Sums of unpacked FP8 and FP4 weights have this factor already.
    product.finish(tile, total * 2.0**-SHIFT if product.layout.bits == 16 else total)
