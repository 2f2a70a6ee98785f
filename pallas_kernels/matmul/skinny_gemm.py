"""Tiles of 64 rows of stored weights, streamed through shared memory and multiplied with a few inputs.

One warpgroup of a block copies, over the borders of tiles and of matrices. Four multiply, each every fourth step of a
tile's columns, whether a step fits into one stage of shared memory or comes in several. One adds up their sums and
finishes the tile. The inputs stay in shared memory.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import quantized_weights, skinny_prologue
from pallas_kernels.matmul.quantized_weights import (
    COLUMNS,
    FP4,
    HALF,
    MULTIPLIERS,
    ROWS,
    SCALE_BYTES,
    SCALED,
    SEGMENT,
    SHIFT,
    UNIT,
    WeightLayout,
)
from pallas_kernels.mgpu import wgmma
from pallas_kernels.runtime.launch import primitive


COPIES, FINISHES = MULTIPLIERS, MULTIPLIERS + 1  # numbers of warpgroups
WARPGROUPS = MULTIPLIERS + 2
SHARED_BYTES = 224 << 10
MAX_STAGES = 32


@dataclasses.dataclass(frozen=True)
class Product:
    """Tiles of one matrix.

    Attributes:
      layout: how it is stored.
      codes: [R, elements of a row] of the layout's dtype in global memory.
      scales: in global memory; FP4: [R, columns / 32], or, of 256 columns, those of two rows in 16 bytes; FP8:
        [R / 128, columns / 128] uint8; bfloat16: None.
      tiles: how many.
      depth: columns that this block multiplies.
      first: of these.
      rows_of: tile -> where its two halves of 32 rows begin in codes.
      gated: a thread of `finish` has the same row of both halves.
      load_inputs: (tile, load) -> None; where a tile has other inputs than the last, calls `load(source, rows,
        divisor, column, norm, eps)`, see `skinny_prologue.load_inputs`; with a norm, of rows that are whole here.
      finish: (tile, sums [64, tokens] float32, 2**-32 of the products), in warpgroup FINISHES.
    """

    layout: WeightLayout
    codes: Any
    scales: Any
    tiles: jax.Array
    depth: int
    first: jax.Array | int
    gated: bool
    rows_of: Callable[[jax.Array], tuple[jax.Array, jax.Array]]
    load_inputs: Callable[[jax.Array, Callable[..., None]], None]
    finish: Callable[[jax.Array, jax.Array], None]


@dataclasses.dataclass(frozen=True)
class SkinnyGemm:
    """What is static.

    Attributes:
      matrices: layout and columns of each; FP4 is not beside bfloat16.
      tokens: columns of a product, a multiple of 8.
      segments: of a stage: 4, 2 or 1.
      places: for a tile's sums: 4, one for each warpgroup that multiplies, or 1, to which these add in turn: for more
        room. Their order is the same.
    """

    matrices: tuple[tuple[WeightLayout, int], ...]
    tokens: int
    segments: int
    places: int = MULTIPLIERS

    @property
    def depth(self) -> int:
        """The most columns."""
        return max(depth for _, depth in self.matrices)

    @property
    def layouts(self) -> set[WeightLayout]:
        return {layout for layout, _ in self.matrices}

    @property
    def parts(self) -> int:
        """Stages of a step. A tile has a multiple of four steps of as many segments as possible, or one or two."""
        return most_segments(*self.matrices) // self.segments

    @property
    def slots(self) -> int:
        """Tiles whose sums are kept."""
        return 2 if self.tokens == COLUMNS else 1

    def stages(self, other_bytes: int) -> int:
        """How many fit into shared memory, of which a block uses `other_bytes` for more.

        A multiple of what four steps take: a warpgroup always has the same stages.
        """
        used = other_bytes + 2 * self.depth * self.tokens + 4 * self.slots * self.places * ROWS * self.tokens
        stage = ROWS * (SEGMENT * self.segments + SCALE_BYTES * (FP4 in self.layouts))
        together = MULTIPLIERS * self.parts
        return min((SHARED_BYTES - used) // stage, MAX_STAGES) // together * together

    def scratch(self, other_bytes: int, *, interpret: bool) -> dict[str, Any]:
        """Shared memory and barriers for `run`; a block uses `other_bytes` of shared memory for more."""
        stages, scales = self.stages(other_bytes), FP4 in self.layouts
        # The same memory as arrays of each dtype: FP4's and FP8's codes lie alike. The interpreter takes any two writes
        # to such arrays for a race.
        kinds = {layout.dtype: layout for layout in self.layouts}
        codes = [
            plgpu.SMEM(
                (stages, ROWS, layout.elements(self.segments * layout.segment)), dtype, transforms=layout.transforms()
            )
            for dtype, layout in kinds.items()
        ]
        sums = (ROWS, self.tokens) if interpret else (ROWS * self.tokens,)
        return dict(
            codes_tile=plgpu.RefUnion(*codes) if len(codes) > 1 and not interpret else codes,
            scales_tile=plgpu.SMEM((stages, ROWS, SCALE_BYTES), jnp.uint8) if scales else None,
            inputs=plgpu.SMEM((self.tokens // COLUMNS, self.depth // UNIT, COLUMNS, UNIT), jnp.bfloat16),
            sums=plgpu.SMEM((self.slots, self.places, *sums), jnp.float32),
            full=plgpu.Barrier(num_arrivals=2 * (1 + scales), num_barriers=stages),
            free=plgpu.Barrier(num_barriers=stages),
            met=plgpu.Barrier(num_arrivals=MULTIPLIERS),
            left=plgpu.Barrier(num_arrivals=self.places, num_barriers=self.slots),
            # Behind these, the turns of warpgroups that add to one place.
            taken=plgpu.Barrier(num_barriers=self.slots * (MULTIPLIERS if self.places == 1 else 1)),
        )

    def run(
        self,
        warpgroup: jax.Array,
        products: Sequence[Product],
        *,
        codes_tile: Any,
        scales_tile: Any,
        inputs: Any,
        sums: Any,
        full: Any,
        free: Any,
        met: Any,
        left: Any,
        taken: Any,
    ) -> None:
        """Multiplies all tiles of the products, one after the other; every warpgroup calls it.

        Args:
          warpgroup: this one's number.
          products: what to multiply.
          codes_tile, scales_tile, inputs, sums, full, free, met, left, taken: `scratch`.
        """
        # Where tiles have four steps or more a warpgroup has the same stages as in what came before.
        steps = [product.depth // (self.segments * product.layout.segment) for product in products]
        assert all(n < MULTIPLIERS or not any(m % MULTIPLIERS for m in steps[:i]) for i, n in enumerate(steps))
        codes_tile = {ref.dtype: ref for ref in codes_tile}
        stages, slots = next(iter(codes_tile.values())).shape[0], self.slots

        @pl.when(warpgroup == COPIES)
        def _():
            before = jnp.int32(0)
            for product in products:
                columns = self.segments * product.layout.segment
                steps = product.depth // columns

                @pl.loop(0, product.tiles * steps)
                def _(i, product=product, columns=columns, steps=steps, before=before):
                    stage, step = lax.rem(before + i, jnp.int32(stages)), lax.rem(i, jnp.int32(steps))

                    @pl.when(before + i >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[stage])

                    starts = product.rows_of(lax.div(i, jnp.int32(steps)))
                    at = product.layout.elements(product.first + step * columns)
                    there = codes_tile[product.layout.dtype].at[stage]
                    self._copy(product, starts, at, there, full.at[stage], scales_tile, stage)

                before += product.tiles * steps

            # The interpreter wants every arrival waited for.
            @pl.loop(jnp.maximum(before - stages, 0), before)
            def _(i):
                plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])

        @pl.when(warpgroup < MULTIPLIERS)
        def _():
            before, done = jnp.int32(0), jnp.int32(0)
            for product in products:
                steps, layout = product.depth // (self.segments * product.layout.segment), product.layout
                codes = codes_tile[layout.dtype]

                def multiply_tile(
                    tile, scales, *, product=product, layout=layout, codes=codes, steps=steps, before=before, done=done
                ):
                    def load(source, rows, divisor=1, column=0, norm=(), eps=0.0):
                        if norm:
                            skinny_prologue.store_factors(norm[1], source, eps, warpgroup)
                        _meet(met)
                        at = column + product.first, product.depth
                        skinny_prologue.load_inputs(inputs, source, rows, divisor, *at, warpgroup, layout, norm)
                        _meet(met)

                    product.load_inputs(tile, load)
                    following = self._scales(product, jnp.minimum(tile + 1, product.tiles - 1))

                    # Stages take turns, so a warpgroup has the same ones also where a tile has fewer steps than four.
                    own, count, table = warpgroup, steps // MULTIPLIERS, ROWS * _scale_bytes(product) // SCALE_BYTES
                    if steps < MULTIPLIERS:
                        own = (warpgroup - before - tile * steps) & (MULTIPLIERS - 1)
                        count = (own < steps).astype(jnp.int32)

                    def add(i, acc):
                        parts = jnp.int32(self.parts)
                        step = (lax.div(i, parts) * MULTIPLIERS + own) * parts + lax.rem(i, parts)
                        stage = lax.rem(before + tile * steps + step, jnp.int32(stages))
                        plgpu.barrier_wait(full.at[stage])
                        operand = scales_tile.at[stage, pl.ds(0, table)] if layout.bits == 4 else scales
                        operands = codes.at[stage], operand, inputs, step
                        acc = quantized_weights.multiply_add(acc, *operands, layout, product.gated)
                        _release(free.at[stage])
                        return acc

                    zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.tokens), jnp.float32), plgpu.Layout.WGMMA)
                    acc = lax.fori_loop(0, count, add, zeros)
                    slot = lax.rem(done + tile, jnp.int32(slots))

                    @pl.when(done + tile >= slots)
                    def _():
                        plgpu.barrier_wait(taken.at[slot])

                    if self.places == 1:
                        turn = slots + slot * (MULTIPLIERS - 1) + warpgroup
                        _add_in_turn(sums.at[slot, 0], acc, warpgroup, taken, turn, left.at[slot])
                    else:
                        wgmma.put(sums.at[slot, warpgroup], acc)
                        plgpu.barrier_arrive(left.at[slot])
                    return following

                lax.fori_loop(0, product.tiles, multiply_tile, self._scales(product, jnp.int32(0)))
                before += product.tiles * steps
                done += product.tiles

            @pl.loop(jnp.maximum(done - slots, 0), done)
            def _(i):
                plgpu.barrier_wait(taken.at[lax.rem(i, jnp.int32(slots))])

        @pl.when(warpgroup == FINISHES)
        def _():
            done = jnp.int32(0)
            for product in products:

                @pl.loop(0, product.tiles)
                def _(tile, product=product, done=done):
                    slot = lax.rem(done + tile, jnp.int32(slots))
                    plgpu.barrier_wait(left.at[slot])
                    total = plgpu.layout_cast(jnp.zeros((ROWS, self.tokens), jnp.float32), plgpu.Layout.WGMMA)
                    for i in range(self.places):
                        total = wgmma.add(total, sums.at[slot, i])
                    plgpu.barrier_arrive(taken.at[slot])
                    # One scale for what finishes tiles of any layout.
                    product.finish(tile, total * 2.0**-SHIFT if product.layout.bits == 16 else total)

                done += product.tiles

    def _copy(self, product, starts, at, codes_there, full, scales_tile, stage):
        for half, row in enumerate(starts):
            source, target = pl.ds(pl.multiple_of(row, HALF), HALF), pl.ds(half * HALF, HALF)
            size = codes_there.shape[1]
            columns = pl.ds(pl.multiple_of(at, size), size)
            plgpu.copy_gmem_to_smem(product.codes.at[source, columns], codes_there.at[target], full)
            if product.layout.bits == 4:
                # A scale for 16 bytes.
                columns = pl.ds(lax.div(lax.div(at, 16), SCALE_BYTES) * SCALE_BYTES, SCALE_BYTES)
                lines = HALF * _scale_bytes(product) // SCALE_BYTES
                source = pl.ds(pl.multiple_of(lax.div(row, jnp.int32(HALF)) * lines, lines), lines)
                there = scales_tile.at[stage, pl.ds(half * lines, lines)]
                plgpu.copy_gmem_to_smem(product.scales.at[source, columns], there, full)
            elif scales_tile is not None:
                # Where FP4 is beside it: nothing is copied in place of its scales.
                plgpu.barrier_arrive(full)

    def _scales(self, product, tile):
        """FP8's scales of a tile."""
        if product.layout.bits != 8:
            return jnp.int32(0)
        rows = [lax.div(row, jnp.int32(SCALED)) for row in product.rows_of(tile)[: 1 + product.gated]]
        first = lax.div(jnp.int32(product.first), SCALED)
        return quantized_weights.load_scales(product.scales, rows, first)


@primitive
def _release(barrier) -> None:
    """Tells the copying warpgroup that a stage was read."""
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


# What was read is in registers, and was used: no fence has to keep a bulk copy from passing it.
_release.mosaic(lambda barrier: plgpu.barrier_arrive(barrier))


def _add_in_turn(place, acc, warpgroup, turns, turn, left):
    """Adds up what the multiplying warpgroups have, in their order."""

    @pl.when(warpgroup == 0)
    def _():
        wgmma.put(place, acc)

    @pl.when(warpgroup > 0)
    def _():
        plgpu.barrier_wait(turns.at[turn - 1])
        wgmma.add_to(place, acc)

    @pl.when(warpgroup < MULTIPLIERS - 1)
    def _():
        plgpu.barrier_arrive(turns.at[turn])

    @pl.when(warpgroup == MULTIPLIERS - 1)
    def _():
        plgpu.barrier_arrive(left)


def _meet(barrier):
    """Waits for the other multiplying warpgroups; orders their accesses to shared memory."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _scale_bytes(product):
    """FP4's scales of a row that travel together."""
    return min(SCALE_BYTES, product.depth // 32)


def most_segments(*matrices: tuple[WeightLayout, int]) -> int:
    """The most segments of a step with which matrices, layout and columns, have a multiple of four steps.

    Or, where one has too few columns, whole steps.
    """
    for together in (MULTIPLIERS, 1):
        for n in (4, 2, 1):
            if not any(depth % (layout.segment * n * together) for layout, depth in matrices):
                return n
    raise ValueError(f"columns in multiples of a segment's are streamed, got {matrices}")
