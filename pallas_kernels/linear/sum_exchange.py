"""The addition of the partial sums of a cluster's blocks. Each block multiplies some columns of a tile (split-K).

The `splits` blocks of a cluster own its tiles in turns: block `n % splits` owns tile n. Each block sends its partial
sums of a tile to the tile's owner. When all blocks' sums have arrived, one warpgroup of the owner adds them up, in
the order of blocks. Interpreted blocks exchange their sums through global memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mgpu import barriers, transaction_barriers, wgmma
from pallas_kernels.mgpu.mlir import THREADS
from pallas_kernels.runtime.launch import interpreting


@dataclasses.dataclass(frozen=True)
class SumExchange:
    """Static description of an exchange. Within a kernel, `start` adds the references `inbox` and `inbox_full`."""

    splits: int  # number of blocks of a cluster, along the cluster's axis "split"
    tiles: int  # largest number of tiles of a cluster
    shape: tuple[int, int]  # (rows, tokens) of a tile's sums
    # The sums that this block receives from each block of the cluster, [owned tiles, splits, ..] float32 in shared
    # memory. An interpreted kernel has the inboxes of all blocks of the cluster in one array in global memory, with the
    # receiving block as its first axis.
    inbox: Any = None
    inbox_full: Any = None  # transaction barrier of all sums that this block receives; interpreted, a cluster barrier

    @property
    def owned(self) -> int:
        """The largest number of tiles that a block owns."""
        return -(-self.tiles // self.splits)

    @property
    def tile_bytes(self) -> int:
        """The number of bytes of a tile's sums from all blocks."""
        return self.splits * 4 * self.shape[0] * self.shape[1]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of shared memory that the exchange needs in a block."""
        return self.owned * self.tile_bytes if self.splits > 1 else 0

    def types(self, workers: int, *, interpret: bool) -> tuple[list[jax.ShapeDtypeStruct], tuple[Any, Any] | None]:
        """Returns the types that the kernel has to allocate.

        Args:
          workers: number of clusters.
          interpret: whether the kernel is interpreted.

        Returns:
          (out_types, scratch). `out_types` are the types of outputs that the kernel has to append to its own outputs.
          `scratch` is the scratch types (barrier, inbox). If `splits` is 1, `out_types` is empty and `scratch` is None.
        """
        if self.splits == 1:
            return [], None
        if interpret:
            shape = (workers, self.splits, self.owned, self.splits, *self.shape)
            barrier = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=1)
            return [jax.ShapeDtypeStruct(shape, jnp.float32)], (barrier, None)
        inbox = plgpu.SMEM((self.owned, self.splits, self.shape[0] * self.shape[1]), jnp.float32)
        return [], (transaction_barriers.scratch_type(1), inbox)

    def start(self, scratch: tuple[Any, Any], outs_gmem) -> "SumExchange":
        """Initializes the exchange within a kernel, and returns a copy of it that holds the kernel's references.

        All warpgroups call `start`, then `barriers.wait_cluster` once. For the warpgroup that sends sums, `send` makes
        the call of `wait_cluster`, before it sends the sums of tile 0.

        Args:
          scratch: references to the scratch of `types`.
          outs_gmem: references to the outputs of the kernel.
        """
        full, inbox = scratch
        if interpreting():
            inbox = outs_gmem[-1].at[lax.axis_index("worker")]
        else:
            transaction_barriers.start(full)
        return dataclasses.replace(self, inbox=inbox, inbox_full=full)

    def send(self, n: jax.Array, sums: jax.Array) -> None:
        """Sends this block's partial sums [rows, tokens] float32 of the cluster's tile `n` to the tile's owner."""
        # Before a block sends the sums of its first tile, it waits until the other blocks of the cluster run.
        pl.when(n == 0)(lambda: barriers.wait_cluster(None))
        splits = jnp.int32(self.splits)
        split = lax.axis_index("split")
        owner = lax.rem(n, splits)
        slot = lax.div(n, splits)
        if interpreting():
            wgmma.put(self.inbox.at[owner, slot, split], sums)
        else:
            wgmma.send(self.inbox.at[slot, split], sums, owner, self.inbox_full.at[0])

    def add_up(self, tiles: jax.Array, store: Callable[[jax.Array, jax.Array], None]) -> None:
        """Waits for the partial sums of the tiles that this block owns, and adds them up.

        Args:
          tiles: int32 scalar, number of tiles of the cluster.
          store: function called with the index of each owned tile and the tile's total [rows, tokens] float32.
        """
        split = lax.axis_index("split")
        if interpreting():
            barriers.arrive_cluster(self.inbox_full)
            barriers.wait_cluster(self.inbox_full)
        else:
            owned = lax.div(tiles - split + (self.splits - 1), self.splits)
            transaction_barriers.arrive(self.inbox_full.at[0], owned * (self.tile_bytes // THREADS))
            transaction_barriers.wait(self.inbox_full.at[0], jnp.int32(0))
        for slot in range(self.owned):
            n = slot * self.splits + split
            pl.when(n < tiles)(lambda slot=slot, n=n: store(n, self._total(split, slot)))

    def _total(self, split, slot):
        total = wgmma.zeros(self.shape)
        sums = self.inbox.at[split, slot] if interpreting() else self.inbox.at[slot]
        for block in range(self.splits):
            total = wgmma.add(total, sums.at[block])
        return total
