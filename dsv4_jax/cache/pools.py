"""The cache: a handful of stacked arrays in one immutable pytree.

Fields that hold arrays are `Any`: jax puts shapes, tracers and specs in their place.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.schema import CSA, HCA, CacheSchema
from dsv4_jax.ops.views import run_bounds
from dsv4_jax.quant import IndexRows, Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKVPool:
    """Compressed entries of all layers of a kind.

    Attributes:
      entries: Rows [layers, blocks, entries a block, ...].
      index: IndexRows [layers, blocks, entries a block, ...] (CSA), else None.
    """

    entries: Rows
    index: IndexRows | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SWAPool:
    """Sliding-window rings of every layer.

    Attributes:
      rows: Rows [layers, slots, ring, ...]; a token's row is `position % ring`.
    """

    rows: Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CompressorState:
    """What recent tokens bring to windows still open; row `position % ring`.

    Attributes:
      kv: [layers, slots, ring, width] float32.
      gate: the same shape; -inf where never written.
    """

    kv: Any
    gate: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """DeepSeek-V4's whole cache. Donate it to the step and keep what the step returns.

    Attributes:
      csa, hca: paged pools; None where the model has no such layer.
      swa: sliding-window rings.
      csa_state, csa_index_state, hca_state: compressor states; None likewise.
      block_table: [slots, max_blocks] int32, -1 = none; one table for all pools of all layers.
      lengths: [slots] int32 tokens held.
      schema: the geometry (static).
    """

    csa: PagedKVPool | None
    hca: PagedKVPool | None
    swa: SWAPool
    csa_state: CompressorState | None
    csa_index_state: CompressorState | None
    hca_state: CompressorState | None
    block_table: Any
    lengths: Any
    schema: CacheSchema = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def abstract(cls, schema: CacheSchema) -> "KVCache":
        """The cache with `jax.ShapeDtypeStruct` leaves: shapes and bytes without memory."""

        def paged(kind, index):
            entries = schema.entries_struct(kind)
            return None if entries is None else PagedKVPool(entries, index)

        def state(struct):
            return None if struct is None else CompressorState(struct, struct)

        return cls(
            csa=paged(CSA, schema.index_struct()),
            hca=paged(HCA, None),
            swa=SWAPool(schema.swa_struct()),
            csa_state=state(schema.state_struct(CSA)),
            csa_index_state=state(schema.state_struct(CSA, index=True)),
            hca_state=state(schema.state_struct(HCA)),
            block_table=schema.block_table_struct(),
            lengths=schema.lengths_struct(),
            schema=schema,
        )

    @classmethod
    def zeros(cls, schema: CacheSchema) -> "KVCache":
        """An empty cache: zeros, gates at -inf, no block in the table."""
        cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), cls.abstract(schema))
        empty = {
            # With a dtype of its own: a weakly typed array would be another program's argument than the next step's.
            name: dataclasses.replace(state, gate=jnp.full(state.gate.shape, -jnp.inf, jnp.float32))
            for name, state in cache._states().items()
        }
        return dataclasses.replace(cache, block_table=jnp.full(cache.block_table.shape, -1, jnp.int32), **empty)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def handle(self, layer: int, batch: Batch) -> LayerCacheHandle:
        """One layer's view for one step; allocates nothing."""
        return LayerCacheHandle(_cache=self, batch=batch, layer=self.schema.layers[layer], pending=None)

    def begin_step(self, batch: Batch) -> "KVCache":
        """Applies what the host decided for this step: new requests, new blocks, new lengths."""
        slots = self.block_table.shape[0]

        def past_end(index, keep):
            return jnp.where(keep & (index >= 0), index, slots)

        reset = past_end(batch.reset_slots, True)
        table = self.block_table.at[reset].set(-1, mode="drop")
        slot, index, block = batch.new_blocks.T
        table = table.at[past_end(slot, True), index].set(block, mode="drop")
        lengths = self.lengths.at[reset].set(0, mode="drop")
        last = run_bounds(batch.slots)[1] == jnp.arange(1, batch.slots.shape[0] + 1, dtype=jnp.int32)
        lengths = lengths.at[past_end(batch.slots, last & (batch.positions >= 0))].set(batch.positions + 1, mode="drop")
        return dataclasses.replace(self, block_table=table, lengths=lengths)

    def reset_slots(self, slots: Int[Array, "n"]) -> "KVCache":
        """Wipes slots: no blocks, length 0, rings and states as in an empty cache. -1 wipes nothing.

        Steps do not need it: rows are addressed by position, so a new request never reads a row it has not written.

        Args:
          slots: [n] int32.
        """
        slots = jnp.where(slots >= 0, slots, self.block_table.shape[0])

        def fill(value):
            return lambda pool: pool.at[:, slots].set(jnp.asarray(value, pool.dtype), mode="drop")

        states = {
            name: CompressorState(fill(0)(state.kv), fill(-jnp.inf)(state.gate))
            for name, state in self._states().items()
        }
        return dataclasses.replace(
            self,
            swa=jax.tree.map(fill(0), self.swa),
            block_table=self.block_table.at[slots].set(-1, mode="drop"),
            lengths=self.lengths.at[slots].set(0, mode="drop"),
            **states,
        )

    def _states(self) -> dict[str, CompressorState]:
        names = ("csa_state", "csa_index_state", "hca_state")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def init_cache(schema: CacheSchema) -> KVCache:
    """An empty cache for a schema; the same as `KVCache.zeros`."""
    return KVCache.zeros(schema)
