"""Products of stored weights with many inputs: tiles of rows and inputs, streamed through shared memory.

One warpgroup of a block copies tiles of weights and inputs, over the borders of output tiles. The others each multiply
64 rows of the weights with the same inputs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul import dequant_epilogue, dequant_wgmma
from pallas_kernels.matmul.dequant_wgmma import code_transforms
from pallas_kernels.matmul.quantized_weights import ROWS, SCALE_BYTES, SHIFT, WeightLayout
from pallas_kernels.mgpu.wgmma import TRANSFORMS
from pallas_kernels.runtime.launch import interpreting


SHARED_BYTES = 225 << 10  # of tiles and what turns sums around
MAX_STAGES = 8
MAX_WIDE = 80  # inputs with which three steps of wide tiles fit
SCALES_STAGES = 3
# Registers of a thread that copies, and of one that multiplies, by the number of warpgroups that do. A multiprocessor
# has 512 for each thread of a warpgroup.
REGISTERS = {2: (40, 232), 4: (24, 112)}


class OutputTile(NamedTuple):
    """Where a tile's operands begin.

    Attributes:
      matrix: of the codes; where `gated` the gate's, which that of up follows.
      row: of the matrix.
      input: row of the inputs, a multiple of 8.
      column: of the inputs.
    """

    matrix: Any
    row: Any
    input: Any
    column: Any = 0


@dataclasses.dataclass(frozen=True)
class DequantGemm:
    """What is static.

    Attributes:
      layout: of the weights.
      depth: columns of the weights, a multiple of 64, of FP4 of 512, or 256.
      inputs: of a tile, a multiple of 16 up to 256.
      warpgroups: that multiply, 64 rows each: 2 or 4.
      gated: half of a tile's rows are the gate's, the others those of up, for the same channels.
      blocks: of a cluster, 1 or 2, along its axis "block". Their tiles have the same inputs, which each copies half of.
    """

    layout: WeightLayout
    depth: int
    inputs: int
    warpgroups: int
    gated: bool = False
    blocks: int = 1

    @property
    def rows(self) -> int:
        """Of a tile."""
        return ROWS * self.warpgroups

    @property
    def bytes(self) -> int:
        """Of a row of codes, in a step: where inputs are few a whole line of the L2 cache, which took 6% less time."""
        return 128 if self.layout.bits == 16 or self.layout.bits == 4 and self.inputs <= MAX_WIDE else 64

    @property
    def steps(self) -> int:
        """Of a tile, over its columns."""
        return self.depth // self.layout.columns(self.bytes)

    @property
    def scales(self) -> int:
        """FP4's of a row that travel together."""
        return min(SCALE_BYTES, self.depth // 32)

    @property
    def overlaps(self) -> bool:
        """Whether weights are unpacked beside the last step's products: where inputs are few, and registers enough.

        Not bfloat16: a step has one chunk, so its weights would be loaded into registers which products still read.
        """
        return self.warpgroups == 4 and self.layout.bits < 16

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers for `run`, and `staging` for `dequant_epilogue`."""
        width, parts = self.layout.columns(self.bytes), 1 + self.gated
        other = self.warpgroups * dequant_epilogue.STAGING_BYTES
        tables: dict[str, Any] = dict(scales_tile=None, scales_full=None, scales_free=None)
        if self.layout.bits == 4:
            shape = (SCALES_STAGES, parts, self.rows // parts * self.scales // SCALE_BYTES, SCALE_BYTES)
            other += math.prod(shape)
            tables = dict(
                scales_tile=plgpu.SMEM(shape, jnp.uint8),
                scales_full=plgpu.Barrier(num_barriers=SCALES_STAGES),
                scales_free=plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=SCALES_STAGES),
            )
        stages = min((SHARED_BYTES - other) // (self.rows * self.bytes + 2 * width * self.inputs), MAX_STAGES)
        free: Any = dict(num_arrivals=self.warpgroups, num_barriers=stages)
        if self.blocks > 1:
            free = plgpu.ClusterBarrier(collective_axes=("block",), **free)
        else:
            free = plgpu.Barrier(**free)
        codes = (stages, parts, self.rows // parts, self.layout.elements(width))
        transforms = code_transforms(self.layout, self.bytes)
        return tables | dict(
            codes_tile=plgpu.SMEM(codes, self.layout.dtype, transforms=transforms),
            inputs_tile=plgpu.SMEM((stages, self.inputs, width), jnp.bfloat16, transforms=TRANSFORMS),
            staging=plgpu.SMEM((self.warpgroups, dequant_epilogue.STAGING_BYTES), jnp.uint8),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            free=free,
        )

    def run(
        self,
        warpgroup: jax.Array,
        tiles: jax.Array,
        inputs: Any,
        codes: Any,
        scales: Any,
        *,
        locate: Callable[[jax.Array], OutputTile],
        finish: Callable[[jax.Array, jax.Array], None],
        codes_tile: Any,
        inputs_tile: Any,
        full: Any,
        free: Any,
        scales_tile: Any,
        scales_full: Any,
        scales_free: Any,
    ) -> None:
        """Multiplies `tiles` tiles; every warpgroup calls it.

        Args:
          warpgroup: this one's number: 0 and up multiply, the last one copies.
          tiles: how many; as many in the other block of the cluster.
          inputs: [.., width] bfloat16 in global memory; for FP4 with permuted columns.
          codes: [matrices, R, elements of a row] of the layout's dtype in global memory. Rows and inputs past the end
            count as zeros.
          scales: in global memory; FP4: [matrices, R, columns / 32], or, of 256 columns, those of two rows in 16
            bytes; FP8: [matrices, R / 128, columns / 128] uint8; bfloat16: None.
          locate: tile -> its place.
          finish: (tile, sums [64, inputs] float32, 2**-32 of the products), in each warpgroup that multiplies.
          codes_tile, inputs_tile, full, free, scales_tile, scales_full, scales_free: `scratch`.
        """
        stages, parts, rows, elements = codes_tile.shape
        width, steps = inputs_tile.shape[-1], self.steps
        # Of FP4, with a scale for 32 columns.
        shared = self.scales * 32 // width
        copying, multiplying = REGISTERS[self.warpgroups]
        together = "block" if self.blocks > 1 else None

        def turn(i, count):
            return lax.rem(i, jnp.int32(count))

        def release(i):
            if interpreting():
                # It takes no arrival for the end of reads before bulk copies' writes.
                plgpu.commit_smem()
            plgpu.barrier_arrive(free.at[turn(i, stages)])

        @pl.when(warpgroup == self.warpgroups)
        def _():
            plgpu.set_max_registers(copying, action="decrease")

            @pl.loop(0, tiles)
            def _(n):
                place = locate(n)
                source = codes.at[pl.ds(place.matrix, parts), pl.ds(place.row, rows)]

                @pl.loop(0, steps)
                def _(step):
                    i = n * steps + step
                    stage = turn(i, stages)

                    @pl.when(i >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[stage])

                    columns = pl.ds(place.column + step * width, width)
                    values = inputs.at[pl.ds(place.input, self.inputs), columns]
                    plgpu.copy_gmem_to_smem(values, inputs_tile.at[stage], full.at[stage], collective_axes=together)
                    values = source.at[:, :, pl.ds(step * elements, elements)]
                    plgpu.copy_gmem_to_smem(values, codes_tile.at[stage], full.at[stage])
                    if scales_tile is None:
                        return
                    number = lax.div(i, jnp.int32(shared))
                    slot = turn(number, SCALES_STAGES)

                    @pl.when(turn(i, shared) == 0)
                    def _():
                        @pl.when(number >= SCALES_STAGES)
                        def _():
                            plgpu.barrier_wait(scales_free.at[slot])

                        columns = pl.ds(lax.div(step, jnp.int32(shared)) * SCALE_BYTES, SCALE_BYTES)
                        lines = scales_tile.shape[2]
                        first = lax.div(place.row, jnp.int32(rows)) * lines
                        values = scales.at[pl.ds(place.matrix, parts), pl.ds(first, lines), columns]
                        plgpu.copy_gmem_to_smem(values, scales_tile.at[slot], scales_full.at[slot])

            # The interpreter wants every arrival waited for, and no block may end before the other of its cluster.
            last = tiles * steps
            for barriers, count, end in (free, stages, last), (scales_free, SCALES_STAGES, lax.div(last, shared)):
                if barriers is not None:

                    @pl.loop(jnp.maximum(end - count, 0), end)
                    def _(i, barriers=barriers, count=count):
                        plgpu.barrier_wait(barriers.at[turn(i, count)])

        @pl.when(warpgroup < self.warpgroups)
        def _():
            plgpu.set_max_registers(multiplying, action="increase")

            @pl.loop(0, tiles)
            def _(n):
                place = locate(n)

                def add(step, acc):
                    i = n * steps + step
                    stage, slot = turn(i, stages), turn(lax.div(i, jnp.int32(shared)), SCALES_STAGES)
                    at, table = jnp.int32(0), None
                    if self.layout.bits == 8:
                        row = jnp.minimum(lax.div(place.row, jnp.int32(128)), scales.shape[1] - 1)
                        column = lax.div(step * self.bytes, jnp.int32(128))
                        own = [scales[place.matrix + i, row, column].astype(jnp.int32) for i in range(parts)]
                        at = own[0] if parts == 1 else own[0] | own[1] << 8
                    elif self.layout.bits == 4:
                        at, table = turn(i, shared) * (self.scales // shared), scales_tile.at[slot]

                        @pl.when(turn(i, shared) == 0)
                        def _():
                            plgpu.barrier_wait(scales_full.at[slot])

                    plgpu.barrier_wait(full.at[stage])
                    operands = codes_tile.at[stage], table, at, inputs_tile.at[stage], warpgroup
                    acc = dequant_wgmma.multiply_tile(acc, *operands, self.layout, self.gated, not self.overlaps)
                    if self.overlaps:
                        pl.when(step > 0)(lambda: release(i - 1))
                    else:
                        release(i)
                    if scales_tile is not None:

                        @pl.when(turn(i, shared) == shared - 1)
                        def _():
                            plgpu.barrier_arrive(scales_free.at[slot])

                    return acc

                zeros = plgpu.layout_cast(jnp.zeros((ROWS, self.inputs), jnp.float32), plgpu.Layout.WGMMA)
                sums = lax.fori_loop(0, steps, add, zeros)
                if self.overlaps:
                    sums = dequant_wgmma.complete_sums(sums)
                    release((n + 1) * steps - 1)
                # One scale for what finishes tiles of any layout.
                finish(n, sums * 2.0**-SHIFT if self.layout.bits == 16 else sums)
