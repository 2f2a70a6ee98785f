"""The cache: a handful of stacked arrays in one immutable pytree.

Fields that hold arrays are `Any`: jax puts shapes, tracers and specs in their place.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Int

from dsv4_jax.arguments import check_whole
from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.schema import CacheSchema
from dsv4_jax.ops.views import run_bounds
from dsv4_jax.parallel.axis_rules import named_sharding
from dsv4_jax.parallel.mailboxes import mailbox_sharding, make_mailboxes
from dsv4_jax.quant import IndexRows, Rows
from dsv4_jax.sizes import readable_bytes
from dsv4_jax.summary import Summarised, Summary


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
class PoolGroup:
    """What the layers of one `GroupSpec` store, stacked on axis 0.

    Attributes:
      entries: Rows [layers, blocks, entries a block, ...].
      keys: IndexRows [layers, blocks, entries a block, ...], or None.
      state: CompressorState of the entries' compressor, or None where windows are single tokens.
      key_state: CompressorState of the keys' compressor, or None.
    """

    entries: Rows | None = None
    keys: IndexRows | None = None
    state: CompressorState | None = None
    key_state: CompressorState | None = None

    @property
    def paged(self) -> "PoolGroup":
        """The pools that are paged in blocks, alone."""
        return PoolGroup(self.entries, self.keys)

    @property
    def by_slot(self) -> "PoolGroup":
        """The states, which a request has in its slot, alone."""
        return PoolGroup(state=self.state, key_state=self.key_state)

    def like(self, other: "PoolGroup") -> "PoolGroup":
        """The parts that `other` has, alone."""
        return PoolGroup(**{name: getattr(self, name) for name, part in vars(other).items() if part is not None})

    def replace(self, new: "PoolGroup") -> "PoolGroup":
        """The group with the parts that `new` has."""
        return dataclasses.replace(self, **{name: part for name, part in vars(new).items() if part is not None})

    def map_states(self, change: Callable[[CompressorState], CompressorState]) -> "PoolGroup":
        """The group with changed states."""
        states = {name: state for name, state in vars(self.by_slot).items() if state is not None}
        return dataclasses.replace(self, **{name: change(state) for name, state in states.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class KVCache(Summarised):
    """The whole cache of a model. Donate it to the step and keep what the step returns.

    Attributes:
      groups: PoolGroup by name, as in `CacheSchema.groups`; "csa" and "hca" of DeepSeek-V4.
      swa: Rows [rings, slots, ring, ...], the sliding windows; a token's row is `position % ring`.
      streams: [1, slots, ring, streams * hidden] in the model's dtype, the residual streams of the last tokens, which
        drafts begin with; None where nothing makes drafts.
      block_table: [slots, max_blocks] int32, -1 = none; one table for all pools of all layers.
      lengths: [slots] int32 tokens held.
      schema: the geometry (static).
      mailboxes: where the GPUs of a mesh leave each other what they add up, see `parallel.mailboxes`; None where there
        are none. It is no part of what the cache holds.
    """

    groups: dict[str, PoolGroup]
    swa: Rows
    streams: Any
    block_table: Any
    lengths: Any
    schema: CacheSchema = dataclasses.field(metadata=dict(static=True))
    mailboxes: Any = None

    @classmethod
    def abstract(cls, schema: CacheSchema, mesh: Mesh | None = None) -> "KVCache":
        """The cache with `jax.ShapeDtypeStruct` leaves: shapes and bytes without memory, and places on a mesh."""

        def state(struct):
            return None if struct is None else CompressorState(struct, struct)

        cache = cls(
            groups={
                name: PoolGroup(
                    schema.entries_struct(name),
                    schema.keys_struct(name),
                    state(schema.state_struct(name)),
                    state(schema.state_struct(name, keys=True)),
                )
                for name in schema.groups
            },
            swa=schema.swa_struct(),
            streams=schema.streams_struct(),
            block_table=schema.block_table_struct(),
            lengths=schema.lengths_struct(),
            schema=schema,
        )
        if mesh is None:
            return cache
        return jax.tree.map(lambda x, where: x.update(sharding=where), cache, cache.shardings(mesh))

    @classmethod
    def zeros(cls, schema: CacheSchema, mesh: Mesh | None = None) -> "KVCache":
        """An empty cache, on the default device or on a mesh: zeros, gates at -inf, no block in the table."""
        abstract = cls.abstract(schema, mesh)

        def full(struct, value):
            # With a dtype of its own: a weakly typed array would be another program's argument than the next step's.
            return jnp.full(struct.shape, value, struct.dtype, device=struct.sharding)

        def empty(struct):
            return CompressorState(full(struct.kv, 0), full(struct.gate, -jnp.inf))

        groups = {name: group.map_states(empty) for name, group in abstract.groups.items()}
        filled = dataclasses.replace(abstract, groups=groups, block_table=full(abstract.block_table, -1))
        cache = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else full(x, 0), filled)
        return cache if mesh is None else dataclasses.replace(cache, mailboxes=make_mailboxes(mesh))

    def shardings(self, mesh: Mesh) -> "KVCache":
        """Where each array belongs on a mesh: the cache with `NamedSharding` leaves, as `jax.device_put` takes them."""
        by_slot, paged = (None, "slots"), (None, self.schema.block_axis)

        def place(axes, tree):
            # Of full length, as steps return them: a shorter one would be another program's argument.
            return jax.tree.map(lambda x: named_sharding((*axes, *[None] * (x.ndim - len(axes))), mesh), tree)

        groups = {
            name: place(paged, group.paged).replace(place(by_slot, group.by_slot))
            for name, group in self.groups.items()
        }
        return KVCache(
            groups=groups,
            swa=place(by_slot, self.swa),
            streams=place(by_slot, self.streams),
            block_table=place(by_slot[1:], self.block_table),
            lengths=place(by_slot[1:], self.lengths),
            schema=self.schema,
            mailboxes=jax.tree.map(lambda _: mailbox_sharding(mesh), self.mailboxes),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self))

    def _summary(self) -> Summary:
        arrays = [x for x in jax.tree.leaves(self) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
        gone = ("donated: go on with what the step returned",) if any(x.is_deleted() for x in arrays) else ()
        rows = {name: readable_bytes(count) for name, count in self.schema.pool_bytes().items()}
        return Summary(self.schema.words() + gone, rows)

    def with_groups(self, new: dict[str, PoolGroup]) -> "KVCache":
        """The cache with the parts of its groups that `new` has."""
        groups = {name: group.replace(new.get(name, PoolGroup())) for name, group in self.groups.items()}
        return dataclasses.replace(self, groups=groups)

    def handle(self, layer: int, batch: Batch) -> LayerCacheHandle:
        """One layer's view for one step, of the cache that `begin_step` returned; allocates nothing.

        Raises:
          TypeError: `layer` is no whole number.
          ValueError: there is no such layer, or the batch is of a manager of another cache.
        """
        check_whole("layer", layer, 0, len(self.schema.layers) - 1)
        self._check_batch(batch)
        return LayerCacheHandle(_cache=self, batch=batch, pending=None, spec=self.schema.layers[layer])

    def begin_step(self, batch: Batch) -> "KVCache":
        """Applies what the host decided for this step: new requests, new blocks, new lengths.

        Raises:
          ValueError: the batch is of a manager of another cache.
        """
        self._check_batch(batch)
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

    def _check_batch(self, batch):
        if batch.schema is not None and (found := self.schema.differences(batch.schema, "batch")):
            raise ValueError(f"the batch is of a manager of another cache: {found}")

    def reset_slots(self, slots: Int[Array, "n"]) -> "KVCache":
        """Wipes slots ([n] int32): no blocks, length 0, rings and states as in an empty cache. -1 wipes nothing.

        Steps do not need it: rows are addressed by position, so a new request never reads a row it has not written.
        """
        slots = jnp.where(slots >= 0, slots, self.block_table.shape[0])

        def fill(value):
            return lambda pool: pool.at[:, slots].set(jnp.asarray(value, pool.dtype), mode="drop")

        def wipe(state):
            return CompressorState(fill(0)(state.kv), fill(-jnp.inf)(state.gate))

        return dataclasses.replace(
            self,
            groups={name: group.map_states(wipe) for name, group in self.groups.items()},
            swa=jax.tree.map(fill(0), self.swa),
            streams=jax.tree.map(fill(0), self.streams),
            block_table=self.block_table.at[slots].set(-1, mode="drop"),
            lengths=self.lengths.at[slots].set(0, mode="drop"),
        )


def init_cache(schema: CacheSchema) -> KVCache:
    """An empty cache for a schema; the same as `KVCache.zeros`."""
    return KVCache.zeros(schema)
