"""Tiles of 64 rows of stored weights, streamed through shared memory and multiplied with a few inputs.

One warpgroup of a block copies, over the borders of tiles. Four multiply, each a quarter of every step's columns, and
hand their sums to the first of them. The inputs stay in shared memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import stored_weights, wgmma_results
from pallas_kernels.common.stored_weights import CHUNK, ROWS, SEGMENT, SEGMENTS, WeightLayout
from pallas_kernels.common.wgmma_results import TRANSFORMS


WARPGROUPS = SEGMENTS + 1
SHARED_BYTES = 220 << 10


@dataclasses.dataclass(frozen=True)
class WeightStream:
    """What is static.

    Attributes:
      layout: of the weights.
      tokens: columns of a product, a multiple of 8.
      steps: of a tile, over its columns.
      gated: the first 32 rows of a tile lie apart from its last 32, and a thread has the same row of both.
    """

    layout: WeightLayout
    tokens: int
    steps: int
    gated: bool = False

    def scratch(self, other_bytes: int, *, interpret: bool) -> dict[str, Any]:
        """Shared memory and barriers for `run`; a block uses `other_bytes` of shared memory for more."""
        inputs = (self.steps * self.layout.columns // CHUNK, self.tokens, CHUNK)
        used = other_bytes + 2 * inputs[0] * self.tokens * CHUNK + 4 * (SEGMENTS - 1) * ROWS * self.tokens
        scales = ROWS * self.layout.step_scales
        stages = min((SHARED_BYTES - used) // (ROWS * SEGMENT * SEGMENTS + scales), 12)
        sums = (ROWS, self.tokens) if interpret else (ROWS * self.tokens,)
        copies = (SEGMENTS + (scales > 0)) * (1 + self.gated)
        return dict(
            codes_tile=plgpu.SMEM((stages, SEGMENTS, ROWS, SEGMENT), jnp.uint8),
            scales_tile=plgpu.SMEM((stages, ROWS, 16), jnp.uint8) if scales else None,
            inputs=plgpu.SMEM(inputs, jnp.bfloat16, transforms=TRANSFORMS),
            sums=plgpu.SMEM((SEGMENTS - 1, *sums), jnp.float32),
            full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=SEGMENTS, num_barriers=stages),
            met=plgpu.Barrier(num_arrivals=SEGMENTS),
            left=plgpu.Barrier(num_arrivals=SEGMENTS - 1),
            taken=plgpu.Barrier(),
        )

    def run(
        self,
        warpgroup: jax.Array,
        tiles: jax.Array,
        codes: Any,
        scales: Any,
        *,
        first_step: jax.Array | int,
        rows_of: Callable[[jax.Array], tuple],
        load_inputs: Callable[[jax.Array, Callable[..., None]], None],
        finish: Callable[[jax.Array, jax.Array], None],
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
        """Multiplies `tiles` tiles; every warpgroup calls it.

        Args:
          warpgroup: this one's number: 0 to 3 multiply, 4 copies.
          tiles: how many.
          codes: [R, bytes of a row] uint8 in global memory.
          scales: in global memory; FP4: [R, columns / 32], FP8: [R / 128, columns / 128] uint8.
          first_step: of every tile.
          rows_of: tile -> where it begins in codes: one row, or where `gated` two.
          load_inputs: (tile, load) -> None; where a tile has other inputs than the last, calls `load(source, rows,
            divisor, column)`, see `stored_weights.load_inputs`, with the column of the weight's first.
          finish: (tile, sums [64, tokens] float32, 2**-32 of the products), in warpgroup 0.
          codes_tile, scales_tile, inputs, sums, full, free, met, left, taken: `scratch`.
        """
        stages, steps = codes_tile.shape[0], self.steps
        total = tiles * steps

        @pl.when(warpgroup == SEGMENTS)
        def _():
            @pl.loop(0, total)
            def _(i):
                stage, step = lax.rem(i, jnp.int32(stages)), first_step + lax.rem(i, jnp.int32(steps))

                @pl.when(i >= stages)
                def _():
                    plgpu.barrier_wait(free.at[stage])

                starts = rows_of(lax.div(i, jnp.int32(steps)))
                size = ROWS // len(starts)
                for part, row in enumerate(starts):
                    source, target = pl.ds(row, size), pl.ds(part * size, size)
                    for segment in range(SEGMENTS):
                        columns = pl.ds((step * SEGMENTS + segment) * SEGMENT, SEGMENT)
                        there = codes_tile.at[stage, segment, target]
                        plgpu.copy_gmem_to_smem(codes.at[source, columns], there, full.at[stage])
                    if scales_tile is not None:
                        there = scales_tile.at[stage, target]
                        plgpu.copy_gmem_to_smem(scales.at[source, pl.ds(step * 16, 16)], there, full.at[stage])

            # The interpreter wants every arrival waited for.
            @pl.loop(jnp.maximum(total - stages, 0), total)
            def _(i):
                plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])

        @pl.when(warpgroup < SEGMENTS)
        def _():
            @pl.loop(0, tiles)
            def _(tile):
                def load(source, rows, divisor=1, column=0):
                    _meet(met)
                    at = column + first_step * self.layout.columns
                    stored_weights.load_inputs(inputs, source, rows, divisor, at, warpgroup, self.layout)
                    _meet(met)

                load_inputs(tile, load)

                def add(j, acc):
                    stage, step = lax.rem(j, jnp.int32(stages)), lax.rem(j, jnp.int32(steps))
                    if scales_tile is None:
                        (row,) = rows_of(tile)
                        operand = scales[lax.div(row, jnp.int32(128)), 2 * (first_step + step) + warpgroup // 2]
                        operand = operand.astype(jnp.int32)
                    else:
                        operand = scales_tile.at[stage]
                    plgpu.barrier_wait(full.at[stage])
                    chunk = step * (self.layout.columns // CHUNK)
                    operands = codes_tile.at[stage, warpgroup], operand, inputs
                    acc = stored_weights.multiply_add(acc, *operands, chunk, warpgroup, self.layout, self.gated)
                    # Shared memory was read; bulk copies write it next.
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[stage])
                    return acc

                zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.tokens), jnp.float32), plgpu.Layout.WGMMA)
                acc = lax.fori_loop(tile * steps, (tile + 1) * steps, add, zeros)

                @pl.when(warpgroup > 0)
                def _():
                    @pl.when(tile > 0)
                    def _():
                        plgpu.barrier_wait(taken)

                    wgmma_results.put(sums.at[warpgroup - 1], acc, None)
                    plgpu.barrier_arrive(left)

                @pl.when(warpgroup == 0)
                def _():
                    plgpu.barrier_wait(left)
                    product = acc
                    for other in range(SEGMENTS - 1):
                        product = wgmma_results.add(product, sums.at[other])
                    plgpu.barrier_arrive(taken)
                    finish(tile, product)

            @pl.when((warpgroup > 0) & (tiles > 0))
            def _():
                plgpu.barrier_wait(taken)


def _meet(barrier):
    """Waits for the other multiplying warpgroups; orders their accesses to shared memory."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
