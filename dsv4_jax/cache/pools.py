"""The KV cache of a whole model: an immutable pytree of arrays, each stacked over layers.

Fields for arrays have the type `Any`, because JAX transformations also store shapes, tracers and shardings in them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int

from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.handle import LayerCacheHandle
from dsv4_jax.cache.schema import CacheSchema, PoolGroup
from dsv4_jax.common.arguments import check_whole
from dsv4_jax.common.sizes import readable_bytes
from dsv4_jax.common.summary import Summarized
from dsv4_jax.ops.append_swa import append_swa
from dsv4_jax.ops.views import DROP, SWAView, int_range, run_bounds
from dsv4_jax.parallel.axis_rules import named_sharding
from dsv4_jax.parallel.mailboxes import mailbox_sharding, make_mailboxes
from dsv4_jax.parallel.sharded_step import check_within_shard_map
from dsv4_jax.quant import FakeQuantFormat, PlainFormat, Rows
from pallas_kernels.runtime.pytrees import leaf_types, named_leaves, pytree_dataclass, static_field, total_bytes


@pytree_dataclass
class KVCache(Summarized):
    """The KV cache of a model. Donate it to the step, and use the cache that the step returns afterwards.

    Attributes:
      groups: {name: PoolGroup} of compressed entries, as in `CacheSchema.groups`. DeepSeek-V4 has "csa4", with an entry
        for 4 tokens, and "hca128", with an entry for 128.
      swa: Rows [layers, slots, ring, ...], the sliding windows as ring buffers; a token's row is `position % ring`.
      streams: [1, slots, ring, hc_mult * hidden] in the model's dtype, residual streams of each request's newest
        tokens, from which MTP drafts start. None if no draft layers need them.
      ngram_ids: [1, slots, ring, 1] int32, compressed ids of each request's newest tokens, of which Engram's n-grams
        are made, see `cache.newest_tokens`. None without Engram.
      block_table: [slots, max_blocks] int32, block ids, -1 = none. All pools of all layers share this table.
      lengths: [slots] int32, number of tokens in each slot.
      schema: geometry of the cache (static).
      mailboxes: addresses of the buffers for all-reduce between GPUs (see `parallel.mailboxes`), or None. They are not
        part of the cache's contents.
      expert_counts: [2, layers, E] int32 counts since `with_expert_counts` for each of E experts. Index 0 of axis 0 is
        the number of tokens that selected the expert, index 1 the number of steps with such a token. None if steps do
        not count.
    """

    groups: dict[str, PoolGroup]
    swa: Rows
    streams: Any
    ngram_ids: Any
    block_table: Any
    lengths: Any
    schema: CacheSchema = static_field()
    mailboxes: Any = None
    expert_counts: Any = None

    @classmethod
    def abstract(cls, schema: CacheSchema, mesh: Mesh | None = None) -> "KVCache":
        """Makes a cache with `jax.ShapeDtypeStruct` leaves instead of arrays, with shardings if a mesh is given."""
        groups = {name: schema.group_structs(name) for name in schema.groups}
        cache = cls(groups=groups, **schema.slot_structs(), schema=schema)
        if mesh is None:
            return cache
        return jax.tree.map(lambda x, where: x.update(sharding=where), cache, cache.shardings(mesh))

    @classmethod
    def zeros(cls, schema: CacheSchema, mesh: Mesh | None = None) -> "KVCache":
        """Makes an empty cache on the default device or a mesh: zeros, but -inf in gates and -1 in the block table."""

        def full(path, struct):
            """Makes the empty array at `path`."""
            # The dtype is explicit, because a step would be compiled once more for weakly typed arrays.
            return jnp.full(struct.shape, _empty_value(path), struct.dtype, device=struct.sharding)

        return jax.tree.map_with_path(full, cls.abstract(schema, mesh)).with_mailboxes(mesh)

    def with_mailboxes(self, mesh: Mesh | None) -> "KVCache":
        """Returns the cache with the `mailboxes` of a mesh; without a mesh, returns the cache itself."""
        return self if mesh is None else dataclasses.replace(self, mailboxes=make_mailboxes(mesh))

    def shardings(self, mesh: Mesh) -> "KVCache":
        """Returns a cache with a `NamedSharding` in the place of each array, as `jax.device_put` takes them."""

        def place(path, x):
            """Returns the sharding of the array at `path`."""
            if path[0].name == "mailboxes":
                return mailbox_sharding(mesh)
            return named_sharding(self._axes(path), mesh, x.ndim)

        return jax.tree.map_with_path(place, self)

    def _axes(self, path) -> tuple[Any, ...]:
        """Returns the leading logical axes of the array at `path` in the pytree, see `parallel.axis_rules`."""
        names = [getattr(key, "name", None) for key in path]
        if names[0] in ("mailboxes", "expert_counts"):
            return ()
        if names[0] in ("block_table", "lengths"):
            return ("slots",)
        is_paged = "entries" in names or "keys" in names
        return None, self.schema.block_axis if is_paged else "slots"

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        return total_bytes(self)

    def _summary(self) -> dict[str, Any]:
        arrays = [x for x in jax.tree.leaves(self) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
        gone = {"donated": "go on with what the step returned"} if any(x.is_deleted() for x in arrays) else {}
        pools = {name: readable_bytes(count) for name, count in self.schema.pool_bytes().items()}
        return gone | self.schema.summary() | pools

    def with_expert_counts(self) -> "KVCache":
        """Returns the cache with `expert_counts` set to zeros, so that steps count the experts that they use.

        Raises:
          ValueError: the cache is sharded over a mesh.
        """
        if isinstance(self.lengths.sharding, NamedSharding):
            raise ValueError("experts are counted on one device; the cache lies on a mesh")
        shape = 2, len(self.schema.layers), self.schema.config.n_routed_experts
        is_committed = isinstance(self.lengths, jax.Array) and self.lengths.committed
        where = self.lengths.sharding if is_committed else None
        return dataclasses.replace(self, expert_counts=jnp.zeros(shape, jnp.int32, device=where))

    @property
    def paged(self) -> dict[str, PoolGroup]:
        """{name: PoolGroup} with only the pools that are paged in blocks."""
        return {name: group.paged for name, group in self.groups.items()}

    def with_groups(self, new: dict[str, PoolGroup]) -> "KVCache":
        """Returns the cache with the fields of its groups replaced by the fields of `new` that are not None."""
        groups = dict(self.groups)
        for name, group in new.items():
            parts = {field: part for field, part in vars(group).items() if part is not None}
            groups[name] = dataclasses.replace(groups[name], **parts)
        return dataclasses.replace(self, groups=groups)

    def fake_quantized(self) -> "KVCache":
        """Returns the cache in `FakeQuantFormat`, with the same values, so that gradients pass through its rows.

        A cache whose format has gradients already, "plain" or `FakeQuantFormat`, is returned as it is.
        """
        stored = self.schema.kv_format
        if isinstance(stored, PlainFormat | FakeQuantFormat):
            return self
        schema: Any = dataclasses.replace(self.schema, kv_format=FakeQuantFormat(stored))
        groups = {}
        for name, spec in schema.groups.items():  # the codecs are FakeQuantRows and FakeQuantKeys
            group = self.groups[name]
            groups[name] = PoolGroup(spec.entry.convert(group.entries), spec.key and spec.key.convert(group.keys))
        new = self.with_groups(groups)
        return dataclasses.replace(new, swa=schema.window_codec.convert(self.swa), schema=schema)

    def write_windows(self, rows: Mapping[int, Float[Array, "T D"]], batch: Batch) -> "KVCache":
        """Stores window rows of several layers in one launch, like `LayerCacheHandle.write_swa` for each layer.

        Args:
          rows: {index of a layer: [T, head_dim] rows in the model's dtype, after norm and RoPE}.
          batch: positions and slots of the T tokens. Padding tokens write nothing.
        """
        num_slots = jax.tree.leaves(self.swa)[0].shape[1]
        # The rings of all layers are reshaped to one layer with more slots, so that one `append_swa` writes them all.
        slots = [jnp.where(batch.slots >= 0, batch.slots + layer * num_slots, -1) for layer in rows]
        merged = jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), self.swa)
        view = SWAView(merged, 0, self.schema.max_window, self.schema.window_codec)
        positions = jnp.tile(batch.positions, len(rows))
        view = append_swa(view, jnp.concatenate(list(rows.values())), jnp.concatenate(slots), positions)
        swa = jax.tree.map(lambda x, old: x.reshape(old.shape), view.rows, self.swa)
        return dataclasses.replace(self, swa=swa)

    def handle(self, layer: int | Int[Array, ""], batch: Batch, *, like: int | None = None) -> LayerCacheHandle:
        """Returns the handle by which a layer reads and writes the cache in one step. Call `begin_step` first.

        Args:
          layer: index of the layer, an int or a traced scalar, as in a `jax.lax.scan` over stacked layers of one kind.
          batch: inputs of the step.
          like: if `layer` is traced, the index of some layer of the same kind (`LayerSpec.kind`). None if all layers
            of the model are of one kind.

        Raises:
          TypeError: `layer` is not a whole number.
          ValueError: there is no such layer, `layer` is traced and its kind unknown, or the batch belongs to another
            cache.
        """
        self._check_batch(batch)
        layers = self.schema.layers
        traced = None
        if isinstance(layer, jax.core.Tracer) and jnp.issubdtype(layer.dtype, jnp.integer) and layer.ndim == 0:
            if like is None and (other_kinds := [spec for spec in layers if spec.kind != layers[0].kind]):
                raise ValueError(
                    f"layer is traced and the model's layers are of several kinds: layer 0 is {layers[0]}, layer "
                    f"{other_kinds[0].layer} is {other_kinds[0]}; give like=, the number of any layer of the kind that "
                    "is meant"
                )
            traced = layer
            layer = like or 0
        spec = layers[check_whole("layer" if traced is None else "like", layer, 0, len(layers) - 1)]
        return LayerCacheHandle(_cache=self, batch=batch, pending=None, spec=spec, layer=traced)

    def begin_step(self, batch: Batch) -> "KVCache":
        """Returns the cache with the batch's new requests, new blocks and new lengths in `block_table` and `lengths`.

        Raises:
          ValueError: the batch belongs to another cache, its `is_image` or `adapters` has a wrong shape, or the cache
            is sharded over a mesh and this code does not run under `jax.shard_map`.
        """
        self._check_batch(batch)
        check_within_shard_map("the cache", self.lengths)
        table = self.block_table
        lengths = self.lengths
        if batch.reset_slots is not None:
            table = table.at[batch.reset_slots].set(-1, **DROP)
            lengths = lengths.at[batch.reset_slots].set(0, **DROP)
        if batch.new_blocks is not None:
            slot, index, block = batch.new_blocks.T
            table = table.at[slot, index].set(block, **DROP)
        last = run_bounds(batch.slots)[1] == int_range(1, batch.slots.shape[0] + 1)
        slots = jnp.where(last & (batch.positions >= 0), batch.slots, -1)
        lengths = lengths.at[slots].set(batch.positions + 1, **DROP)
        return dataclasses.replace(self, block_table=table, lengths=lengths)

    def _check_batch(self, batch):
        if batch.schema is not None and (differences := self.schema.differences(batch.schema, "batch")):
            raise ValueError(f"the batch is of a manager of another cache: {differences}")
        for name, expected in {"is_image": batch.positions.shape, "adapters": self.lengths.shape}.items():
            array = getattr(batch, name)
            if array is not None and (shape := getattr(array, "shape", None)) != expected:
                raise ValueError(f"batch.{name} must be an array of shape {expected}, got {shape}")

    def reset_slots(self, slots: Int[Array, "n"]) -> "KVCache":
        """Empties slots: no blocks, length 0, and empty rings and compressor states.

        Steps do not need this method: they address rows by position, so a new request reads only rows that it has
        written.

        Args:
          slots: [n] int32, the slots to empty; -1 = none.

        Raises:
          ValueError: the cache is sharded over a mesh and this code does not run under `jax.shard_map`.
        """
        check_within_shard_map("the cache", self.lengths)

        def wipe(path, x):
            """Empties the slots in the array at `path`."""
            axes = self._axes(path)
            if "slots" not in axes:
                return x
            index = slots if axes[0] == "slots" else (slice(None), slots)
            empty = jnp.asarray(_empty_value(path), x.dtype)
            return x.at[index].set(empty, **DROP)

        return jax.tree.map_with_path(wipe, self)


@jax.named_scope("router")
def count_experts(cache: Any, experts: Int[Array, "L T k"], layers: tuple[int, ...]) -> Any:
    """Returns the cache with a step's experts added to `expert_counts`, which it must have, see `KVCache`.

    Args:
      cache: the cache.
      experts: [L, T, k] int32 experts of each token; -1 = padding, which is not counted.
      layers: indices of the L layers on axis 0 of `experts`, in any order.
    """
    counts = cache.expert_counts
    rows = jnp.array(layers, jnp.int32)[:, None, None]
    tokens = jnp.zeros_like(counts[0]).at[rows, experts].add(1, **DROP)
    return dataclasses.replace(cache, expert_counts=counts + jnp.stack([tokens, (tokens > 0).astype(jnp.int32)]))


def _empty_value(path):
    """Returns the value of all elements of the array at `path` in an empty cache."""
    return {"gate": -jnp.inf, "block_table": -1}.get(path[-1].name, 0)


def init_cache(schema: CacheSchema) -> KVCache:
    """Makes an empty cache for a schema, like `KVCache.zeros`."""
    return KVCache.zeros(schema)


# --- `flax.serialization.to_bytes(cache)` and `flax.serialization.from_bytes(cache, data)` ---


def _to_state(cache):
    """Returns {name: array} of the cache without `mailboxes` and `expert_counts`, which are not stored."""
    return named_leaves(dataclasses.replace(cache, mailboxes=None, expert_counts=None))


def _from_state(cache, state):
    """Returns the cache with the arrays of `state`. Raises ValueError if an array is missing, extra or does not fit."""
    types_of_stored = leaf_types(state)
    types_of_mine = leaf_types(_to_state(cache))
    for name in sorted(types_of_stored | types_of_mine):
        stored, mine = (types.get(name, "nothing") for types in (types_of_stored, types_of_mine))
        if stored != mine:
            raise ValueError(
                f"the stored cache has {stored} as {name}, this one {mine}: it is of another geometry or format"
            )
    restored = [state.get(name, leaf) for name, leaf in named_leaves(cache).items()]
    return jax.tree.unflatten(jax.tree.structure(cache), restored)


serialization.register_serialization_state(KVCache, _to_state, _from_state)
