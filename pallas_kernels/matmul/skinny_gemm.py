"""Skinny GEMM: sums[r, n] = sum_k W[r, k] * x[n, k] for few inputs x, with W quantized in global memory.

The time is that of reading W once. The calling kernel gives each block a list of products, tiles of 64 rows of a
matrix. The columns of a tile come in steps, and a step in one or several stages of shared memory. The inputs stay in
shared memory.

    warpgroup   role        does                                            waits for       signals
    0..3        multiply    loads inputs, multiplies every fourth step      weights_full    weights_empty
                            of a tile, and leaves its sums                  sums_empty      sums_full
    4           load        copies weights, over the borders of tiles       weights_empty   weights_full
    5           epilogue    adds a tile's four sums in order, finishes it   sums_full       sums_empty

The multiplying warpgroups meet at `inputs_ready` before and after they load inputs. Where shared memory is short they
add to one place for sums, in turns. The order of a sum depends on the shape and storage of W alone, so an input's bits
do not depend on the others.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import skinny_mma, skinny_prologue
from pallas_kernels.matmul.quantized_weights import FP4, HALF, ROWS, SCALE_BYTES, SCALED, SEGMENT, SHIFT, WeightLayout
from pallas_kernels.matmul.skinny_mma import COLUMNS, MULTIPLIERS, UNIT
from pallas_kernels.mgpu import barriers, wgmma
from pallas_kernels.runtime.hardware import SHARED_BYTES


LOAD = MULTIPLIERS
EPILOGUE = MULTIPLIERS + 1  # numbers of warpgroups
WARPGROUPS = MULTIPLIERS + 2
STAGING_BYTES = SHARED_BYTES - (2 << 10)
MAX_STAGES = 32


@dataclasses.dataclass(frozen=True)
class Product:
    """Tiles of one matrix that a block multiplies.

    `load_inputs` gets a function `load(source, rows, divisor, column, norm, eps)`, see `skinny_prologue.load_inputs`,
    which it calls if a tile has other inputs than the tile before. The epilogue calls `finish` with the sums of a tile,
    [64, tokens] float32, 2**-32 of the products.
    """

    layout: WeightLayout
    codes_gmem: Any  # [R, elements of a row] of the layout's dtype
    # FP4: [R, columns / 32] uint8, or, if a row has 8 scales, those of two rows in 16 bytes;
    # FP8: [R / 128, columns / 128] uint8; bfloat16: None.
    scales_gmem: Any
    tiles: jax.Array  # number of tiles
    depth: int  # columns that this block multiplies
    first_column: jax.Array | int
    gated: bool  # whether `finish` finds the same row of both halves of a tile in one thread
    rows_of: Callable[[jax.Array], tuple[jax.Array, jax.Array]]  # where the two halves of 32 rows of a tile begin
    load_inputs: Callable[[jax.Array, Callable[..., None]], None]
    finish: Callable[[jax.Array, jax.Array], None]

    @property
    def scale_bytes(self) -> int:
        """The number of FP4's scales of a row that travel together."""
        return min(SCALE_BYTES, self.depth // 32)


class SkinnyScratch(NamedTuple):
    """Shared memory and barriers of a skinny GEMM: the types to allocate, and within the kernel the references."""

    codes_smem: Any  # stages of weights, one array for each dtype
    weights_empty: Any
    weights_full: Any
    inputs_smem: Any  # inputs, in the order of `skinny_prologue`
    sums_full: Any
    inputs_ready: Any
    scales_smem: Any  # stages of FP4's scales, or None
    sums_smem: Any
    sums_empty: Any
    turns: Any  # barriers of warpgroups that add to one place, three for each tile, or None

    def codes(self, layout: WeightLayout):
        """Returns the stages of weights as an array for a layout."""
        return next(ref for ref in self.codes_smem if ref.dtype == layout.dtype)


@dataclasses.dataclass(frozen=True)
class SkinnyGemm:
    """Static description of a skinny GEMM."""

    matrices: tuple[tuple[WeightLayout, int], ...]  # and numbers of columns; FP4 cannot be beside bfloat16
    tokens: int  # number of inputs, a multiple of 8
    segments: int  # segments of a stage: 4, 2 or 1
    places: int = MULTIPLIERS  # places for a tile's sums: 4, one for each multiplying warpgroup, or 1 to save memory
    max_stages: int = MAX_STAGES  # largest number of stages of weights in shared memory

    @property
    def depth(self) -> int:
        """The largest number of columns."""
        return max(depth for _, depth in self.matrices)

    @property
    def layouts(self) -> set[WeightLayout]:
        return {layout for layout, _ in self.matrices}

    @property
    def stages_per_step(self) -> int:
        """The number of stages of a step: a tile has a multiple of four steps that are as long as possible."""
        return most_segments(*self.matrices) // self.segments

    @property
    def slots(self) -> int:
        """The number of tiles whose sums are kept."""
        return 2 if self.tokens == COLUMNS else 1

    def stage_columns(self, product: Product) -> int:
        return self.segments * product.layout.segment

    def tile_stages(self, product: Product) -> int:
        """Returns the number of stages of a tile."""
        return product.depth // self.stage_columns(product)

    def stages(self, other_bytes: int) -> int:
        """Returns the number of stages that fit into shared memory, of which a block uses `other_bytes` for more.

        It is a multiple of the stages of four steps, so that a warpgroup always has the same stages.
        """
        used = other_bytes + 2 * self.depth * self.tokens + 4 * self.slots * self.places * ROWS * self.tokens
        stage = ROWS * (SEGMENT * self.segments + SCALE_BYTES * (FP4 in self.layouts))
        together = MULTIPLIERS * self.stages_per_step
        return min((STAGING_BYTES - used) // stage, self.max_stages) // together * together

    def scratch(self, other_bytes: int, *, interpret: bool) -> SkinnyScratch:
        """Returns the types of scratch for `run`; a block uses `other_bytes` of shared memory for more."""
        stages = self.stages(other_bytes)
        has_scales = FP4 in self.layouts
        # The same memory as arrays of each dtype: FP4's and FP8's codes lie alike. The interpreter takes any two writes
        # to such arrays for a race.
        kinds = {layout.dtype: layout for layout in self.layouts}
        codes = []
        for dtype, layout in kinds.items():
            shape = stages, ROWS, layout.elements(self.segments * layout.segment)
            codes.append(plgpu.SMEM(shape, dtype, transforms=skinny_mma.code_transforms(shape[2])))
        sums = (ROWS, self.tokens) if interpret else (ROWS * self.tokens,)
        return SkinnyScratch(
            codes_smem=plgpu.RefUnion(*codes) if len(codes) > 1 and not interpret else codes,
            weights_empty=plgpu.Barrier(num_barriers=stages),
            weights_full=plgpu.Barrier(num_arrivals=2 * (1 + has_scales), num_barriers=stages),
            inputs_smem=plgpu.SMEM((self.tokens // COLUMNS, self.depth // UNIT, COLUMNS, UNIT), jnp.bfloat16),
            sums_full=plgpu.Barrier(num_arrivals=self.places, num_barriers=self.slots),
            inputs_ready=plgpu.Barrier(num_arrivals=MULTIPLIERS),
            scales_smem=plgpu.SMEM((stages, ROWS, SCALE_BYTES), jnp.uint8) if has_scales else None,
            sums_smem=plgpu.SMEM((self.slots, self.places, *sums), jnp.float32),
            sums_empty=plgpu.Barrier(num_barriers=self.slots),
            turns=plgpu.Barrier(num_barriers=self.slots * (MULTIPLIERS - 1)) if self.places == 1 else None,
        )

    def run(self, warpgroup: jax.Array, products: Sequence[Product], refs: SkinnyScratch) -> None:
        """Multiplies all tiles of the products, one after the other. Every warpgroup calls it with its number."""
        # If tiles have four steps or more, a warpgroup has the same stages as in the products before.
        stages = [self.tile_stages(product) for product in products]
        assert all(n < MULTIPLIERS or not any(m % MULTIPLIERS for m in stages[:i]) for i, n in enumerate(stages))
        pl.when(warpgroup == LOAD)(lambda: _load_weights(self, products, refs))
        pl.when(warpgroup < MULTIPLIERS)(lambda: _multiply(self, products, refs, warpgroup))
        pl.when(warpgroup == EPILOGUE)(lambda: _finish_tiles(self, products, refs))


def most_segments(*matrices: tuple[WeightLayout, int]) -> int:
    """Returns the largest number of segments of a step with which every matrix has a multiple of four steps.

    If one has too few columns, it is that with which every matrix has whole steps.
    """
    for together in (MULTIPLIERS, 1):
        for n in (4, 2, 1):
            if not any(depth % (layout.segment * n * together) for layout, depth in matrices):
                return n
    raise ValueError(f"matrices want columns in multiples of a segment, got {matrices}")


@jax.named_scope("load_weights")
def _load_weights(gemm, products, refs):
    copied = jnp.int32(0)
    for product in products:
        copy_stage = functools.partial(_copy_stage, gemm, product, refs, copied)
        pl.loop(0, product.tiles * gemm.tile_stages(product))(copy_stage)
        copied += product.tiles * gemm.tile_stages(product)
    barriers.wait_for_last(refs.weights_empty, copied)


def _copy_stage(gemm, product, refs, before, i):
    """Copies stage `i` of a product; `before` stages of other products came before."""
    tile_stages = gemm.tile_stages(product)
    codes_smem = refs.codes(product.layout)
    stage = barriers.turn(refs.weights_full, before + i)
    step = lax.rem(i, tile_stages)
    barriers.wait_empty(refs.weights_empty, before + i)
    starts = product.rows_of(lax.div(i, tile_stages))
    column = product.layout.elements(product.first_column + step * gemm.stage_columns(product))
    full = refs.weights_full.at[stage]
    size = codes_smem.shape[2]
    for half, row in enumerate(starts):
        source = pl.ds(pl.multiple_of(row, HALF), HALF)
        columns = pl.ds(pl.multiple_of(column, size), size)
        target = codes_smem.at[stage].at[pl.ds(half * HALF, HALF)]
        plgpu.copy_gmem_to_smem(product.codes_gmem.at[source, columns], target, full)
        if product.layout.bits == 4:
            # A scale for 16 bytes.
            columns = pl.ds(lax.div(lax.div(column, 16), SCALE_BYTES) * SCALE_BYTES, SCALE_BYTES)
            lines = HALF * product.scale_bytes // SCALE_BYTES
            source = pl.ds(pl.multiple_of(lax.div(row, HALF) * lines, lines), lines)
            target = refs.scales_smem.at[stage, pl.ds(half * lines, lines)]
            plgpu.copy_gmem_to_smem(product.scales_gmem.at[source, columns], target, full)
        elif refs.scales_smem is not None:
            # Nothing is copied in place of the scales of another product's FP4.
            plgpu.barrier_arrive(full)


@jax.named_scope("multiply")
def _multiply(gemm, products, refs, warpgroup):
    copied = jnp.int32(0)
    done_tiles = jnp.int32(0)
    for product in products:
        multiply_tile = functools.partial(_multiply_tile, gemm, product, refs, warpgroup, copied, done_tiles)
        lax.fori_loop(0, product.tiles, multiply_tile, _load_scales(product, jnp.int32(0)))
        copied += product.tiles * gemm.tile_stages(product)
        done_tiles += product.tiles
    barriers.wait_for_last(refs.sums_empty, done_tiles)


def _multiply_tile(gemm, product, refs, warpgroup, copied, done, tile, scales):
    """Leaves a warpgroup's sums of a tile in shared memory; takes the tile's FP8 scales, and returns the next tile's.

    The products before have `copied` stages and `done` tiles.
    """

    def load(source_gmem, rows, divisor=1, column=0, norm=(), eps=0.0):
        if norm:
            skinny_prologue.store_factors(norm[1], source_gmem, eps, warpgroup)
        _meet(refs.inputs_ready)
        columns = column + product.first_column, product.depth
        sources = source_gmem, rows, divisor
        skinny_prologue.load_inputs(refs.inputs_smem, *sources, *columns, warpgroup, product.layout, norm)
        _meet(refs.inputs_ready)

    product.load_inputs(tile, load)
    next_scales = _load_scales(product, jnp.minimum(tile + 1, product.tiles - 1))
    acc = _multiply_steps(gemm, product, refs, warpgroup, copied, tile, scales)
    slot = barriers.turn(refs.sums_full, done + tile)
    barriers.wait_empty(refs.sums_empty, done + tile)
    if gemm.places == 1:
        _add_in_turn(refs, acc, warpgroup, slot)
    else:
        wgmma.put(refs.sums_smem.at[slot, warpgroup], acc)
        plgpu.barrier_arrive(refs.sums_full.at[slot])
    return next_scales


def _multiply_steps(gemm, product, refs, warpgroup, copied, tile, scales):
    """Returns the sums of a tile over a warpgroup's steps. See `_multiply_tile`."""
    layout = product.layout
    tile_stages = gemm.tile_stages(product)
    codes_smem = refs.codes(product.layout)
    # Stages take turns, so a warpgroup has the same ones also where a tile has fewer steps than four.
    first_step = warpgroup
    count = tile_stages // MULTIPLIERS
    scale_lines = ROWS * product.scale_bytes // SCALE_BYTES
    if tile_stages < MULTIPLIERS:
        first_step = (warpgroup - copied - tile * tile_stages) & (MULTIPLIERS - 1)
        count = (first_step < tile_stages).astype(jnp.int32)

    def add_stage(i, acc):
        per_step = gemm.stages_per_step
        step = (lax.div(i, per_step) * MULTIPLIERS + first_step) * per_step + lax.rem(i, per_step)
        stage = barriers.turn(refs.weights_full, copied + tile * tile_stages + step)
        plgpu.barrier_wait(refs.weights_full.at[stage])
        operand = refs.scales_smem.at[stage, pl.ds(0, scale_lines)] if layout.bits == 4 else scales
        operands = codes_smem.at[stage], operand, refs.inputs_smem, step
        acc = skinny_mma.multiply_add(acc, *operands, layout, product.gated)
        barriers.release(refs.weights_empty.at[stage])
        return acc

    return lax.fori_loop(0, count, add_stage, wgmma.zeros((ROWS, gemm.tokens)))


def _load_scales(product, tile):
    """Returns FP8's scales of a tile."""
    if product.layout.bits != 8:
        return jnp.int32(0)
    rows = [lax.div(row, SCALED) for row in product.rows_of(tile)[: 1 + product.gated]]
    first_block = lax.div(jnp.int32(product.first_column), SCALED)
    return skinny_mma.load_scales(product.scales_gmem, rows, first_block)


def _add_in_turn(refs, acc, warpgroup, slot):
    """Adds up the sums of the multiplying warpgroups in one place, in their order."""
    place = refs.sums_smem.at[slot, 0]
    turn = slot * (MULTIPLIERS - 1) + warpgroup
    pl.when(warpgroup == 0)(lambda: wgmma.put(place, acc))

    @pl.when(warpgroup > 0)
    def _():
        plgpu.barrier_wait(refs.turns.at[turn - 1])
        wgmma.add_to(place, acc)

    pl.when(warpgroup < MULTIPLIERS - 1)(lambda: plgpu.barrier_arrive(refs.turns.at[turn]))
    pl.when(warpgroup == MULTIPLIERS - 1)(lambda: plgpu.barrier_arrive(refs.sums_full.at[slot]))


@jax.named_scope("finish_tiles")
def _finish_tiles(gemm, products, refs):
    done_tiles = jnp.int32(0)
    for product in products:
        pl.loop(0, product.tiles)(functools.partial(_finish_tile, gemm, product, refs, done_tiles))
        done_tiles += product.tiles


def _finish_tile(gemm, product, refs, done, tile):
    slot = barriers.turn(refs.sums_full, done + tile)
    plgpu.barrier_wait(refs.sums_full.at[slot])
    total = wgmma.zeros((ROWS, gemm.tokens))
    for i in range(gemm.places):
        total = wgmma.add(total, refs.sums_smem.at[slot, i])
    plgpu.barrier_arrive(refs.sums_empty.at[slot])
    # The epilogues expect the scale of unpacked FP8 and FP4.
    product.finish(tile, total * 2.0**-SHIFT if product.layout.bits == 16 else total)


def _meet(barrier):
    """Waits for the other multiplying warpgroups; orders their accesses to shared memory."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
