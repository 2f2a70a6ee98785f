"""The addition of the sums of a cluster's blocks, which share the columns of its tiles.

A block owns every `splits`-th tile of the cluster. Each block sends its sums of a tile to the owner, one of whose
warpgroups adds them up, in the blocks' order, once all have come. Interpreted blocks meet in global memory.
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
    """Description of an exchange; `start` returns it with its references."""

    splits: int  # blocks of a cluster, along its axis "split"
    tiles: int  # largest number of tiles of a cluster
    shape: tuple[int, int]  # (rows, tokens) of a tile's sums
    inbox: Any = None  # [owned tiles, splits, ..] float32, the sums that come; in the interpreter, those of each owner
    inbox_full: Any = None  # transaction barrier of all sums that come; in the interpreter, a barrier of the cluster

    @property
    def owned(self) -> int:
        """The largest number of tiles that a block owns."""
        return -(-self.tiles // self.splits)

    @property
    def tile_bytes(self) -> int:
        """The number of bytes of all blocks' sums of a tile."""
        return self.splits * 4 * self.shape[0] * self.shape[1]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of shared memory."""
        return self.owned * self.tile_bytes if self.splits > 1 else 0

    def types(self, workers: int, *, interpret: bool) -> tuple[list[jax.ShapeDtypeStruct], tuple[Any, Any] | None]:
        """Returns the types of the kernel's last outputs, and of scratch: (barrier, place for sums), or None."""
        if self.splits == 1:
            return [], None
        if interpret:
            shape = (workers, self.splits, self.owned, self.splits, *self.shape)
            barrier = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=1)
            return [jax.ShapeDtypeStruct(shape, jnp.float32)], (barrier, None)
        inbox = plgpu.SMEM((self.owned, self.splits, self.shape[0] * self.shape[1]), jnp.float32)
        return [], (transaction_barriers.scratch_type(1), inbox)

    def start(self, scratch: tuple[Any, Any], outs_gmem) -> "SumExchange":
        """Begins within a kernel. All warpgroups call it, and `barriers.wait_cluster` before they use the barrier."""
        full, inbox = scratch
        if interpreting():
            inbox = outs_gmem[-1].at[lax.axis_index("worker")]
        else:
            transaction_barriers.start(full)
        return dataclasses.replace(self, inbox=inbox, inbox_full=full)

    def send(self, n: jax.Array, sums: jax.Array) -> None:
        """Sends the sums of the cluster's tile `n` to its owner."""
        # A block sends to another one once that one runs.
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
        """Waits for the sums of the cluster's `tiles`, and calls `store(n, total)` for those that this block owns."""
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
