"""The handle through which attention code reads and writes one layer of the cache."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax import ops
from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.schema import CompressorState, PoolGroup
from dsv4_jax.common.summary import Summarized
from dsv4_jax.config.layer_spec import LayerSpec
from dsv4_jax.ops import ClassicalView, ClosedWindows, CompressorWeights, IndexerView, StateView, SWAView
from dsv4_jax.ops.context_parallel import topk_of_shards
from dsv4_jax.ops.views import int_range, tiles
from dsv4_jax.parallel.local_ids import all_reduce_bits, is_sharded, to_local_ids
from dsv4_jax.quant import LayerSlice
from pallas_kernels.runtime.pytrees import pytree_dataclass, static_field


# At most this number of scores, one for each token and entry, is in memory at once. The scores take 256 MiB, and XLA
# takes several times this memory to select the highest ones.
MAX_SCORES = 1 << 26


@pytree_dataclass
class LayerCacheHandle(Summarized):
    """Reads and writes one layer of the cache for the tokens of one batch. A handle is immutable and allocates nothing.

    Methods that write return a new handle, whose `cache` is the updated cache. A token sees its own window row and the
    compressed entry whose window of tokens it closes, so call the methods that write before `attend`.

    Methods raise ValueError for queries, sinks, rows, projections or indices of a wrong shape, and if they need entries
    or index keys that the layer lacks. Methods that write raise TypeError for rows of a wrong dtype.

    Attributes:
      batch: inputs of the step.
      pending: [T, head_dim] window rows of a prefill step that are not in the ring yet, or None.
      spec: spec of the layer (static). If `layer` is traced, it is the spec of some layer of the same kind.
      layer: [] int32, index of the layer if it is traced, as in a loop over layers; else None.
    """

    _cache: Any
    batch: Batch
    pending: Any
    spec: LayerSpec = static_field()
    layer: Any = None

    @property
    def cache(self) -> Any:
        """The `KVCache` with all writes of this handle."""
        return self._commit()._cache

    def _summary(self) -> dict[str, Any]:
        spec = self.spec
        config = self._schema.config
        items: dict[str, Any] = {
            "layer": spec.layer if self.layer is None else f"traced, like {spec.layer}",
            "window": f"{config.window(spec.layer)} tokens",
        }
        if spec.group is not None:
            items[spec.group] = f"entries of {spec.compress_rate} tokens"
        if spec.selection is not None:
            items["selected entries"] = config.topk(spec.selection)
        return items

    # --- writes ---

    def write_swa(self, kv: Float[Array, "T D"]) -> "LayerCacheHandle":
        """Stores the tokens' window rows. In a prefill step, only `attend` or `cache` writes these rows to the ring.

        Args:
          kv: [T, head_dim] in the model's dtype, after norm and RoPE. Padding tokens write nothing.
        """
        self._check_shape("kv", kv, self._schema.window_codec.dim)
        self._check_dtype("kv", kv)
        handle = dataclasses.replace(self, pending=kv)
        return handle if self.batch.prefill else handle._commit()

    def norm_rope_append(
        self,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T D"],
        weight: Float[Array, "D"] | LayerSlice,
        inv_freq: Float[Array, "P"],
        *,
        eps: float,
        norms_queries: bool = True,
    ) -> tuple[Float[Array, "T H D"], "LayerCacheHandle"]:
        """Applies RMS norm and RoPE to queries and window rows (see `ops.norm_rope`), and stores the rows.

        Args:
          q: [T, heads, head_dim] in the model's dtype, queries of this device's heads.
          kv: [T, head_dim] in the model's dtype, window rows. Padding tokens write nothing.
          weight: [head_dim] float32, weight of the rows' norm; the queries' norm has no weight.
          inv_freq: [P] float32, radians per token, by which the last 2 * P channels are rotated.
          eps: constant that is added to the mean square.
          norms_queries: whether queries are normed.

        Returns:
          (queries in q's dtype, new handle).
        """
        batch = self.batch
        dim = self._schema.window_codec.dim
        self._check_shape("q", q, None, dim)
        self._check_shape("kv", kv, dim)
        self._check_dtype("kv", kv)
        if batch.prefill:
            arrays = q, kv, weight, jnp.maximum(batch.positions, 0), inv_freq
            q, kv = ops.norm_rope(*arrays, eps=eps, norms_queries=norms_queries)
            return q, self.write_swa(kv)
        arrays = q, kv, weight, batch.slots, batch.positions, inv_freq
        q, view = ops.norm_rope_append(self.read_swa_view(), *arrays, eps=eps, norms_queries=norms_queries)
        return q, self._with_swa(view)

    def flush(
        self,
        kv: Float[Array, "T width"],
        gate: Float[Array, "T width"] | None,
        weights: CompressorWeights,
        index: tuple[Float[Array, "T index"], Float[Array, "T index"] | None, CompressorWeights] | None = None,
    ) -> "LayerCacheHandle":
        """Feeds the tokens to the compressor, and stores an entry for each compression window that they complete.

        The formulas are at `ops.flush`.

        Args:
          kv: [T, head_dim] float32 projections, or [T, 2 * head_dim] if the windows of entries overlap.
          gate: float32 pooling logits without position bias, with kv's shape; None if a window is a single token.
          weights: the compressor's other parameters.
          index: (kv, gate, weights) of the compressor of index keys, with index_head_dim in place of head_dim. Required
            if the layer has such a compressor, otherwise None.

        Raises:
          ValueError: the layer stores no entries, `index` is missing or superfluous, or a shape is wrong.
        """
        self._require("stores entries", self.spec.owner)
        if (index is not None) != self.spec.key_compressor:
            needed = "a" if self.spec.key_compressor else "no"
            state = "missing" if index is None else "given"
            raise ValueError(f"index is {state}, but layer {self.spec.layer} has {needed} compressor of index keys")
        self._check_windows("", kv, gate, weights)
        if index is not None:
            self._check_windows("index ", *index, keys=True)
        compressors = [ops.CompressorInputs(self._state_view(), self.read_classical_view(), kv, gate, weights)]
        if index is not None:
            compressors.append(ops.CompressorInputs(self._state_view(keys=True), self.read_indexer_view(), *index))
        (state, entries), *key_results = ops.flush(compressors, *self._places, **self._flush_options)
        handle = self._with_group(entries=entries.rows, state=_stored(state))
        for state, keys in key_results:
            handle = handle._with_group(keys=keys.rows, key_state=_stored(state))
        return handle

    def pool_windows(
        self,
        kv: Float[Array, "T width"],
        gate: Float[Array, "T width"] | None,
        weights: CompressorWeights,
    ) -> tuple[ClosedWindows, "LayerCacheHandle"]:
        """Runs the first half of `flush`: pools each completed window to a vector, and stores the tokens' state rows.

        This method is for models that make index keys from the pooled vectors. See `ops.pool_windows`.

        Args:
          kv, gate, weights: as for `flush`. `gate` is None if a window is a single token.

        Returns:
          (pooled vectors of the completed windows, after the RMS norm and before RoPE; new handle).

        Raises:
          ValueError: the layer stores no entries, or a shape is wrong.
        """
        self._require("stores entries", self.spec.owner)
        self._check_windows("", kv, gate, weights)
        arrays = self._state_view(), kv, gate, weights, *self._places
        closed, state = ops.pool_windows(*arrays, **self._flush_options)
        return closed, self._with_group(state=_stored(state))

    def write_entries(self, closed: ClosedWindows, inv_freq: Float[Array, "P"]) -> "LayerCacheHandle":
        """Runs the second half of `flush`: rotates, quantizes and stores entries (see `ops.write_entries`).

        Args:
          closed: windows with values [n, head_dim] in the model's dtype, as `pool_windows` returns them.
          inv_freq: [P] float32, radians per token.

        Raises:
          ValueError: the layer stores no entries.
        """
        self._require("stores entries", self.spec.owner)
        self._check_dtype("closed.values", closed.values)
        return self._with_group(entries=ops.write_entries(self.read_classical_view(), closed, inv_freq).rows)

    def write_keys(self, closed: ClosedWindows, inv_freq: Float[Array, "P"]) -> "LayerCacheHandle":
        """Rotates, quantizes and stores the index keys of completed windows.

        Args:
          closed: windows with values [n, index_head_dim] in the model's dtype, the keys.
          inv_freq: [P] float32, radians per token.

        Raises:
          ValueError: the layer stores no index keys.
        """
        self._require("stores index keys", self.spec.owner and self.spec.keys)
        self._check_dtype("closed.values", closed.values)
        return self._with_group(keys=ops.write_entries(self.read_indexer_view(), closed, inv_freq).rows)

    # --- reads ---

    def gather_swa_kv(self) -> tuple[Float[Array, "T W D"], Bool[Array, "T W"]]:
        """Reads the W window rows of each token, from the oldest one to the token's own.

        Returns:
          (kv [T, W, head_dim] in the model's dtype, zeros where not valid; valid [T, W] bool).
        """
        return ops.gather_swa_kv(self.read_swa_view(), *self._places, new_kv=self.pending, dtype=self._dtype)

    def gather_compressed_kv(self, indices: Int[Array, "T K"]) -> tuple[Float[Array, "T K D"], Bool[Array, "T K"]]:
        """Reads the compressed entries with the given indices.

        Args:
          indices: [T, K] int32 indices of entries within each token's request; -1 = none.

        Returns:
          (kv [T, K, head_dim] in the model's dtype, zeros where not valid; valid [T, K] bool).
        """
        view = self.read_classical_view()
        self._check_shape("indices", indices, None)
        rows = ops.gather_compressed_kv(view, indices, self.batch.slots, dtype=self._dtype)
        return self._reduce_rows(rows)

    def gather_all_compressed_kv(self) -> tuple[Float[Array, "T E D"], Bool[Array, "T E"]]:
        """Reads all compressed entries that each token sees.

        Returns:
          (kv [T, E, head_dim] in the model's dtype, zeros where not valid; valid [T, E] bool), E = the largest number
          of entries of a request.
        """
        view = self.read_classical_view()
        return self._reduce_rows(ops.gather_all_compressed_kv(view, *self._places, dtype=self._dtype))

    def indexer_scores(
        self,
        q: Float[Array, "T H I"],
        weights: Float[Array, "T H"],
        inv_freq: Float[Array, "P"] | None = None,
        candidates: Int[Array, "T B"] | None = None,
    ) -> Float[Array, "T E"]:
        """Computes the lightning indexer's score of each visible entry (see `ops.indexer_scores`).

        Args:
          q: [T, index heads, index_head_dim] index queries.
          weights: [T, index heads] float32 head weights.
          inv_freq: [P] float32, radians per token, by which q is rotated; None if q is rotated already.
          candidates: [T, B] int32 blocks of entries, see `candidate_blocks`; None = no restriction.

        Returns:
          [T, E] float32 scores, E = the largest number of entries of a request. Scores past the visible entries are
          unspecified. With context parallelism, entries that lie on other devices score -inf. With candidates, only
          entries in these blocks are scored, and the result is [T, B * `candidate_block_size`].
        """
        view = self.read_indexer_view()
        self._check_shape("q", q, None, view.codec.dim)
        self._check_shape("weights", weights, q.shape[1])
        options = {"candidates": candidates, "block_size": self._schema.config.candidate_block_size}
        return ops.indexer_scores(view, q, weights, *self._places, inv_freq=inv_freq, **options)

    def indexer_topk(
        self, scores: Float[Array, "T E"], candidates: Int[Array, "T B"] | None = None
    ) -> Int[Array, "T k"]:
        """Selects the entries with the highest scores for each token (see `ops.indexer_topk`).

        Args:
          scores: [T, E] float32 result of `indexer_scores`.
          candidates: as given to `indexer_scores`.

        Returns:
          [T, topk] int32 indices of entries in ascending order, then -1 if fewer than topk entries are visible.
        """
        k = self._schema.config.topk(self.spec.layer)
        lengths = self.valid_lengths()
        if candidates is None:
            return self._topk(scores, lengths, k)
        size = self._schema.config.candidate_block_size
        chosen = self._topk(scores, ops.candidate_lengths(lengths, candidates.shape[1], size), k)
        return ops.entries_at(chosen, candidates, size)

    def by_tiles(self, function: Callable[..., Any], *arrays: Any, candidates: Int[Array, "T B"] | None = None) -> Any:
        """Calls `function(handle, *arrays, candidates)`, in tiles of tokens if there are more than `MAX_SCORES` scores.

        Tiles bound the memory of a long chunk's scores in a long context.

        Args:
          function: function that reads the cache through a handle and writes nothing. It returns a pytree of arrays
            with a row for each token. A token's row must not depend on other tokens.
          arrays: pytrees of arrays with a row for each token of the batch.
          candidates: as for `indexer_scores`.

        Returns:
          The result of `function` for all tokens.
        """
        arrays = *arrays, candidates
        tokens = self.batch.slots.shape[0]
        num_scores = self.read_indexer_view().max_entries
        if candidates is not None:
            num_scores = candidates.shape[1] * self._schema.config.candidate_block_size
        tile_size = max(1, MAX_SCORES // num_scores)
        if tokens <= tile_size:
            return function(self, *arrays)

        def split(x):
            """Divides x [tokens, ...] into tiles: [tiles, tile_size, ...]."""
            # The last tile is filled up with padding tokens, whose position and slot are -1.
            return tiles(x, tile_size, 0 if jnp.issubdtype(x.dtype, jnp.floating) else -1)

        def run(tile):
            """Calls `function` with the batch and the arrays of one tile."""
            per_token, arrays = tile
            batch = dataclasses.replace(self.batch, **per_token)
            return function(dataclasses.replace(self, batch=batch, pending=None), *arrays)

        per_token = {name: getattr(self.batch, name) for name in ("token_ids", "positions", "slots")}
        results = jax.lax.map(run, jax.tree.map(split, (per_token, arrays)))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:tokens], results)

    def candidate_blocks(self, scores: Float[Array, "T E"]) -> Int[Array, "T B"] | None:
        """Chooses the blocks of entries to which the selections of later layers are restricted (V4.1).

        Args:
          scores: [T, E] float32 result of `indexer_scores`, without candidates.

        Returns:
          [T, candidate_topk_blocks] int32 indices of blocks in ascending order, then -1. None if the longest request
          has no more blocks than this, so that later layers need no restriction.
        """
        config = self._schema.config
        size = config.candidate_block_size
        if scores.shape[1] <= config.candidate_topk_blocks * size:
            return None
        return ops.candidate_blocks(scores, self.valid_lengths(), config.candidate_topk_blocks, size, self._topk)

    @property
    def _topk(self):
        return topk_of_shards if self._is_sharded else ops.indexer_topk

    def valid_lengths(self) -> Int[Array, "T"]:
        """Returns the number of visible entries of each token, `(position + 1) // rate`, [T] int32."""
        self._require("attends to entries", self.spec.group is not None)
        return ops.valid_lengths(self.batch.positions, self.spec.compress_rate)

    def attend(
        self,
        q: Float[Array, "T H D"],
        sinks: Float[Array, "H"] | LayerSlice,
        indices: Int[Array, "T K"] | None = None,
        inv_freq: Float[Array, "P"] | None = None,
    ) -> tuple[Float[Array, "T H D"], "LayerCacheHandle"]:
        """Computes attention over the window and the compressed entries (see `ops.sparse_attention`).

        Args:
          q: [T, heads, head_dim] in the model's dtype, queries of this device's heads after norm and RoPE.
          sinks: [heads] float32 sink logits.
          indices: [T, K] int32 entries that each token attends to, -1 = none; None = all visible entries.
          inv_freq: [P] float32, radians per token, by which the output is rotated back; None = no rotation.

        Returns:
          (output [T, heads, head_dim] in q's dtype, new handle).
        """
        self._check_shape("q", q, None, self._schema.window_codec.dim)
        self._check_shape("sinks", sinks, rows=q.shape[1])
        if indices is not None:
            self._check_shape("indices", indices, None)
        compressed = None if self.spec.group is None else self.read_classical_view()
        kv = ops.AttentionKV(self.read_swa_view(), compressed, indices, self.pending)
        positions = self.batch.positions
        draft_block = self.batch.draft_block
        if draft_block:
            # Every token of a block sees the rows that the block's last token sees, so attention gets the position of
            # the last token. RoPE below rotates by the token's own position.
            offsets = int_range(positions.shape[0]) % draft_block
            positions = jnp.where(positions >= 0, positions + (draft_block - 1) - offsets, -1)
        out = ops.sparse_attention(
            q,
            sinks,
            kv,
            self.batch.slots,
            positions,
            inv_freq=None if draft_block else inv_freq,
            context_parallel=compressed is not None and self._is_sharded,
        )
        if draft_block and inv_freq is not None:
            out = ops.apply_rope(out, jnp.maximum(self.batch.positions, 0), inv_freq, inverse=True)
        if self.pending is None:
            return out, self
        # The barrier orders the read above before `_commit`'s write. Otherwise XLA copies the rings.
        out, pending = jax.lax.optimization_barrier((out, self.pending))
        return out, dataclasses.replace(self, pending=pending)._commit()

    # --- views ---

    def read_swa_view(self) -> SWAView:
        """Returns a view of the layer's window rings."""
        schema = self._schema
        window = schema.config.window(self.spec.layer) + self.batch.draft_block
        layer = self.spec.layer if self.layer is None else self.layer
        return SWAView(self._cache.swa, layer, window, schema.window_codec)

    def read_classical_view(self) -> ClassicalView:
        """Returns a view of the layer's compressed entries through the block table."""
        self._require("attends to entries", self.spec.group is not None)
        return ClassicalView(self._group.entries, *self._paging(), self._group_spec.entry)

    def read_indexer_view(self) -> IndexerView:
        """Returns a view of the layer's index keys, one for each entry, through the block table."""
        self._require("has index keys", self.spec.keys)
        return IndexerView(self._group.keys, *self._paging(), self._group_spec.key)

    @property
    def _schema(self):
        return self._cache.schema

    @property
    def _places(self):
        """The slots and positions of the batch's tokens, as ops take them."""
        return self.batch.slots, self.batch.positions

    def _paging(self):
        table = self._cache.block_table
        if self._is_sharded:
            table = to_local_ids(table, "context", jax.tree.leaves(self._group.paged)[0].shape[1])
        return self._row, table, self.spec.compress_rate

    def _reduce_rows(self, rows):
        """Exchanges gathered rows (kv, valid) between devices, so that a row is valid if any device holds it."""
        if not self._is_sharded:
            return rows
        kv, valid = rows
        return all_reduce_bits((jnp.where(valid[..., None], kv, jnp.zeros((), kv.dtype)), valid), "context")

    @property
    def _is_sharded(self):
        """Whether this code runs under `jax.shard_map` with the cache's blocks sharded over devices."""
        return self._schema.context_parallel and is_sharded("context")

    def _state_view(self, *, keys=False):
        state = self._group.key_state if keys else self._group.state
        arrays = (None, None) if state is None else (state.kv, state.gate)
        return StateView(*arrays, self._row, self.spec.compress_rate, self.spec.overlap)

    @property
    def _row(self):
        """The layer's row on axis 0 of its group's pools."""
        if self.layer is None:
            return self.spec.index
        return jnp.asarray([spec.index for spec in self._schema.layers], jnp.int32)[self.layer]

    @property
    def _group(self):
        return self._cache.groups[self.spec.group]

    @property
    def _group_spec(self):
        return self._schema.groups[self.spec.group]

    @property
    def _flush_options(self):
        schema = self._schema
        return {"dtype": schema.dtype, "max_query_tokens": None if self.batch.prefill else schema.max_query_tokens}

    @property
    def _dtype(self):
        return self._schema.dtype

    def _require(self, what, holds):
        if not holds:
            raise ValueError(f"this needs a layer that {what}; layer {self.spec.layer} does not: {self.spec}")

    def _check_shape(self, name, x, *dims, rows=None):
        """Raises ValueError unless x is [T, *dims], or [rows, *dims] if `rows` is given. None in `dims` = any size."""
        expected = (len(self.batch.slots) if rows is None else rows, *dims)
        if x.ndim != len(expected) or any(n not in (None, m) for n, m in zip(expected, x.shape, strict=True)):
            sizes = ", ".join("any" if n is None else str(n) for n in expected)
            raise ValueError(f"{name} has shape {list(x.shape)}, layer {self.spec.layer} takes [{sizes}] in this step")

    def _check_dtype(self, name, x):
        """Raises TypeError unless x has the dtype of the cache, because a conversion would round x silently."""
        if x.dtype != self._dtype:
            hint = f", or make the cache with dtype={x.dtype}" if x.dtype in (jnp.float32, jnp.bfloat16) else ""
            raise TypeError(f"{name} has dtype {x.dtype}, the cache takes {self._dtype}: convert the rows{hint}")

    def _check_windows(self, prefix, kv, gate, weights, *, keys=False):
        """Raises ValueError unless kv, gate and weights have the shapes that the layer's compressor takes."""
        spec = self._group_spec
        dim = (spec.key if keys else spec.entry).dim
        width = dim * (1 + spec.overlap)
        self._check_shape(f"{prefix}kv", kv, width)
        if gate is None and spec.pooled_rows > 1:
            raise ValueError(f"{prefix}gate is None, but layer {self.spec.layer} pools {spec.pooled_rows} tokens")
        if gate is not None:
            self._check_shape(f"{prefix}gate", gate, width)
        if weights.position_bias is not None:
            self._check_shape(f"{prefix}weights.position_bias", weights.position_bias, width, rows=spec.compress_rate)
        self._check_shape(f"{prefix}weights.norm_weight", weights.norm_weight, rows=dim)

    def _with_group(self, **pools):
        """Returns a handle with new pools of the layer's group; pools that are None stay as they are."""
        return dataclasses.replace(self, _cache=self._cache.with_groups({self.spec.group: PoolGroup(**pools)}))

    def _commit(self):
        if self.pending is None:
            return self
        return self._with_swa(ops.append_swa(self.read_swa_view(), self.pending, *self._places))

    def _with_swa(self, view):
        return dataclasses.replace(self, _cache=dataclasses.replace(self._cache, swa=view.rows), pending=None)


def _stored(view):
    """Returns the CompressorState of a StateView; None if a compression window is one token, which needs no state."""
    return None if view.kv is None else CompressorState(view.kv, view.gate)
