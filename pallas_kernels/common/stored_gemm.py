"""Products of stored weights with many inputs: tiles of rows and inputs, streamed through shared memory.

One warpgroup of a block copies tiles of weights and inputs, over the borders of output tiles. The others each multiply
64 rows of the weights with the same inputs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import column_stores, mixed_products
from pallas_kernels.common.mixed_products import BYTES, CHUNK, CODE_TRANSFORMS
from pallas_kernels.common.primitive import interpreting
from pallas_kernels.common.stored_weights import ROWS, WeightLayout
from pallas_kernels.common.wgmma_results import TRANSFORMS


SHARED_BYTES = 225 << 10
MOST_STAGES = 8
# Registers of a thread that copies, and of one that multiplies, by the number of warpgroups that do. A multiprocessor
# has 512 for each thread of a warpgroup.
REGISTERS = {2: (40, 232), 4: (24, 112)}


class OutputTile(NamedTuple):
    """Where a tile's operands begin.

    Attributes:
      rows: of the codes, one number; or, where `gated`, the gate's and that of up.
      input: row of the inputs.
      column: of the inputs.
    """

    rows: tuple
    input: Any
    column: Any = 0


@dataclasses.dataclass(frozen=True)
class StoredGemm:
    """What is static.

    Attributes:
      layout: of the weights.
      depth: columns of the weights, a multiple of 64, of FP4 of 512.
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
    def steps(self) -> int:
        """Of a tile, over its columns."""
        return self.depth // (BYTES * self.layout.per_byte)

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers for `run`, and `staging` for `column_stores`."""
        scales = self.layout.per_byte == 2
        chunks = BYTES * self.layout.per_byte // CHUNK
        stage = self.rows * (BYTES + 16 * scales) + 2 * chunks * self.inputs * CHUNK
        staging = self.warpgroups * column_stores.STAGING_BYTES
        stages = min((SHARED_BYTES - staging) // stage, MOST_STAGES)
        copies = chunks + (1 + scales) * (1 + self.gated)
        free: Any = dict(num_arrivals=self.warpgroups, num_barriers=stages)
        if self.blocks > 1:
            free = plgpu.ClusterBarrier(collective_axes=("block",), **free)
        else:
            free = plgpu.Barrier(**free)
        return dict(
            codes_tile=plgpu.SMEM((stages, self.rows, BYTES), jnp.uint8, transforms=CODE_TRANSFORMS),
            scales_tile=plgpu.SMEM((stages, self.rows, 16), jnp.uint8) if scales else None,
            inputs_tile=plgpu.SMEM((stages, chunks, self.inputs, CHUNK), jnp.bfloat16, transforms=TRANSFORMS),
            staging=plgpu.SMEM((self.warpgroups, column_stores.STAGING_BYTES), jnp.uint8),
            full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
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
        scales_tile: Any,
        inputs_tile: Any,
        full: Any,
        free: Any,
    ) -> None:
        """Multiplies `tiles` tiles; every warpgroup calls it.

        Args:
          warpgroup: this one's number: 0 and up multiply, the last one copies.
          tiles: how many; as many in the other block of the cluster.
          inputs: [.., width] bfloat16 in global memory; for FP4 with permuted columns.
          codes: [R, bytes of a row] uint8 in global memory. Rows and inputs past the end count as zeros.
          scales: in global memory; FP4: [R, columns / 32], FP8: [R / 128, columns / 128] uint8.
          locate: tile -> its place.
          finish: (tile, sums [64, inputs] float32, 2**-32 of the products), in each warpgroup that multiplies.
          codes_tile, scales_tile, inputs_tile, full, free: `scratch`.
        """
        stages, chunks, *_ = inputs_tile.shape
        steps = self.steps
        copying, multiplying = REGISTERS[self.warpgroups]
        together = "block" if self.blocks > 1 else None

        @pl.when(warpgroup == self.warpgroups)
        def _():
            plgpu.set_max_registers(copying, action="decrease")

            @pl.loop(0, tiles)
            def _(n):
                place = locate(n)

                @pl.loop(0, steps)
                def _(step):
                    i = n * steps + step
                    stage = lax.rem(i, jnp.int32(stages))

                    @pl.when(i >= stages)
                    def _():
                        plgpu.barrier_wait(free.at[stage])

                    for chunk in range(chunks):
                        columns = pl.ds(place.column + (step * chunks + chunk) * CHUNK, CHUNK)
                        source = inputs.at[pl.ds(place.input, self.inputs), columns]
                        there = inputs_tile.at[stage, chunk]
                        plgpu.copy_gmem_to_smem(source, there, full.at[stage], collective_axes=together)
                    size = self.rows // len(place.rows)
                    for part, row in enumerate(place.rows):
                        source, target = pl.ds(row, size), pl.ds(part * size, size)
                        there = codes_tile.at[stage, target]
                        plgpu.copy_gmem_to_smem(codes.at[source, pl.ds(step * BYTES, BYTES)], there, full.at[stage])
                        if scales_tile is not None:
                            columns = pl.ds(lax.div(step, jnp.int32(4)) * 16, 16)
                            there = scales_tile.at[stage, target]
                            plgpu.copy_gmem_to_smem(scales.at[source, columns], there, full.at[stage])

            # The interpreter wants every arrival waited for.
            @pl.loop(jnp.maximum(tiles * steps - stages, 0), tiles * steps)
            def _(i):
                plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(stages))])

        @pl.when(warpgroup < self.warpgroups)
        def _():
            plgpu.set_max_registers(multiplying, action="increase")

            @pl.loop(0, tiles)
            def _(n):
                place = locate(n)

                def add(step, acc):
                    stage = lax.rem(n * steps + step, jnp.int32(stages))
                    if scales_tile is None:
                        block = lax.div(step * BYTES, jnp.int32(128))
                        row = jnp.minimum(lax.div(place.rows[0], jnp.int32(128)), scales.shape[0] - 1)
                        at = scales[row, block].astype(jnp.int32)
                        table = None
                    else:
                        at, table = lax.rem(step, jnp.int32(4)) * 4, scales_tile.at[stage]
                    plgpu.barrier_wait(full.at[stage])
                    operands = codes_tile.at[stage], table, at, inputs_tile.at[stage], warpgroup
                    acc = mixed_products.multiply_tile(acc, *operands, self.layout, self.gated)
                    if interpreting():
                        # It takes no arrival for the end of reads before bulk copies' writes.
                        plgpu.commit_smem()
                    plgpu.barrier_arrive(free.at[stage])
                    return acc

                zeros = jnp.zeros((ROWS, self.inputs), jnp.float32)
                finish(n, lax.fori_loop(0, steps, add, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)))
