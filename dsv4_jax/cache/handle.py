"""One layer's cache for one step, as attention code sees it."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsv4_jax import ops
from dsv4_jax.cache.batch import Batch
from dsv4_jax.cache.schema import CSA, HCA, SLIDING, LayerCacheSchema
from dsv4_jax.ops import ClassicalView, CompressorWeights, IndexerView, StateView, SWAView


if TYPE_CHECKING:
    from dsv4_jax.cache.pools import KVCache


POOL = {CSA: "csa", HCA: "hca"}
STATE = {CSA: "csa_state", HCA: "hca_state"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCacheHandle:
    """Reads and writes one layer for the tokens of one batch; immutable, allocates nothing.

    Methods that write return a new handle; `handle.cache` is the updated cache. A token's own window row and the
    entries it closes are visible to itself: write before you attend.

    Attributes:
      batch: the step's inputs.
      layer: the layer's schema (static).
      pending: [T, head_dim] window rows of a prefill step that are not in the ring yet, else None.
    """

    _cache: Any
    batch: Batch
    pending: Any
    layer: LayerCacheSchema = dataclasses.field(metadata=dict(static=True))

    @property
    def cache(self) -> "KVCache":
        """The cache with everything written through this handle."""
        return self._commit()._cache

    # --- writes ---

    def write_swa(self, kv: Float[Array, "T D"]) -> "LayerCacheHandle":
        """Stores the tokens' window rows.

        Args:
          kv: [T, head_dim] after norm and RoPE, model dtype. Padding tokens write nothing.
        """
        handle = dataclasses.replace(self, pending=kv)
        return handle if self.batch.prefill else handle._commit()

    def flush(
        self,
        kv: Float[Array, "T width"],
        gate: Float[Array, "T width"],
        weights: CompressorWeights,
        index: tuple[Float[Array, "T index"], Float[Array, "T index"], CompressorWeights] | None = None,
    ) -> "LayerCacheHandle":
        """Feeds the tokens to the compressor; windows that close become entries (see `ops.flush`).

        Args:
          kv: [T, head_dim] (HCA) or [T, 2 * head_dim] (CSA) float32 projections.
          gate: the same shape, pooling logits without position bias.
          weights: the compressor's other parameters.
          index: the same three of the indexer's compressor; CSA layers need it, others have none.

        Raises:
          ValueError: the layer has no compressor, or `index` is missing or superfluous.
        """
        self._require("flush", CSA, HCA)
        if (index is not None) != (self.layer.kind == CSA):
            raise ValueError(f"index={'given' if index else None} does not fit a layer of kind {self.layer.kind!r}")
        names, views = [STATE[self.layer.kind]], [self.read_classical_view()]
        inputs = [(kv, gate, weights)]
        if index is not None:
            names, views = [*names, "csa_index_state"], [*views, self.read_indexer_view()]
            inputs.append(index)
        done = ops.flush_together(
            [(self._state_view(name), view, *more) for name, view, more in zip(names, views, inputs, strict=True)],
            self.batch.slots,
            self.batch.positions,
            dtype=self._cache.schema.dtype,
            max_query_tokens=None if self.batch.prefill else self._cache.schema.max_query_tokens,
        )
        pool = getattr(self._cache, POOL[self.layer.kind])
        parts = {}
        for name, (state, view) in zip(names, done, strict=True):
            parts[name] = dataclasses.replace(getattr(self._cache, name), kv=state.kv, gate=state.gate)
            pool = dataclasses.replace(pool, **{"index" if isinstance(view, IndexerView) else "entries": view.rows})
        return self._with(**parts, **{POOL[self.layer.kind]: pool})

    def _state_view(self, name):
        state = getattr(self._cache, name)
        return StateView(state.kv, state.gate, self.layer.index, overlap=self.layer.kind == CSA)

    # --- reads ---

    def gather_swa_kv(self) -> tuple[Float[Array, "T W D"], Bool[Array, "T W"]]:
        """Each token's window, oldest first: (kv [T, W, head_dim] model dtype, valid [T, W])."""
        return ops.gather_swa_kv(
            self.read_swa_view(), self.batch.slots, self.batch.positions, new_kv=self.pending, dtype=self._dtype
        )

    def gather_compressed_kv(self, indices: Int[Array, "T K"]) -> tuple[Float[Array, "T K D"], Bool[Array, "T K"]]:
        """Entries by number, -1 = none: (kv [T, K, head_dim] model dtype, valid [T, K])."""
        return ops.gather_compressed_kv(self.read_classical_view(), indices, self.batch.slots, dtype=self._dtype)

    def gather_all_compressed_kv(self) -> tuple[Float[Array, "T E D"], Bool[Array, "T E"]]:
        """All entries visible to each token: (kv [T, E, head_dim] model dtype, valid [T, E])."""
        return ops.gather_all_compressed_kv(
            self.read_classical_view(), self.batch.slots, self.batch.positions, dtype=self._dtype
        )

    def indexer_scores(self, q: Float[Array, "T H I"], weights: Float[Array, "T H"]) -> Float[Array, "T E"]:
        """[T, E] float32 scores of every entry for every token (see `ops.indexer_scores`).

        Args:
          q: [T, index heads, index_head_dim] after RoPE.
          weights: [T, index heads] float32.
        """
        return ops.indexer_scores(self.read_indexer_view(), q, weights, self.batch.slots, self.batch.positions)

    def indexer_topk(self, scores: Float[Array, "T E"]) -> Int[Array, "T k"]:
        """[T, index_topk] int32 best entries of each token, ascending, -1 at the end (see `ops.indexer_topk`)."""
        return ops.indexer_topk(scores, self.valid_lengths(), self._cache.schema.config.index_topk)

    def valid_lengths(self) -> Int[Array, "T"]:
        """[T] int32 compressed entries visible to each token: `(position + 1) // rate`."""
        self._require("valid_lengths", CSA, HCA)
        return ops.valid_lengths(self.batch.positions, self.layer.compress_rate)

    def attend(
        self, q: Float[Array, "T H D"], sinks: Float[Array, "H"], indices: Int[Array, "T K"] | None = None
    ) -> tuple[Float[Array, "T H D"], "LayerCacheHandle"]:
        """Attention over the window and the compressed entries (see `ops.sparse_attention`).

        Args:
          q: [T, heads, head_dim] after norm and RoPE, model dtype.
          sinks: [heads] float32.
          indices: entries of each token (CSA), or None for all visible ones (HCA) or none (sliding).

        Returns:
          (out [T, heads, head_dim] in q's dtype before the inverse RoPE, the handle to go on with).
        """
        compressed = None if self.layer.kind == SLIDING else self.read_classical_view()
        out = ops.sparse_attention(
            q,
            sinks,
            self.read_swa_view(),
            compressed,
            indices,
            self.batch.slots,
            self.batch.positions,
            new_kv=self.pending,
        )
        if self.pending is None:
            return out, self
        # The ring is read above and written by the commit: tie the order down, or XLA copies the rings for the read.
        out, pending = jax.lax.optimization_barrier((out, self.pending))
        return out, dataclasses.replace(self, pending=pending)._commit()

    # --- views ---

    def read_swa_view(self) -> SWAView:
        """The layer's rings."""
        schema = self._cache.schema
        return SWAView(self._cache.swa.rows, self.layer.layer, schema.config.sliding_window, schema.kv_format)

    def read_classical_view(self) -> ClassicalView:
        """The layer's compressed entries behind the block table."""
        self._require("read_classical_view", CSA, HCA)
        pool = getattr(self._cache, POOL[self.layer.kind])
        return ClassicalView(pool.entries, *self._paging())

    def read_indexer_view(self) -> IndexerView:
        """The layer's indexer keys behind the block table."""
        self._require("read_indexer_view", CSA)
        return IndexerView(self._cache.csa.index, *self._paging())

    def _paging(self):
        return self.layer.index, self._cache.block_table, self.layer.compress_rate, self._cache.schema.kv_format

    @property
    def _dtype(self):
        return jnp.dtype(self._cache.schema.dtype)

    def _require(self, what, *kinds):
        if self.layer.kind not in kinds:
            raise ValueError(f"{what} needs a layer of kind {kinds}; layer {self.layer.layer} is {self.layer.kind!r}")

    def _with(self, **parts):
        return dataclasses.replace(self, _cache=dataclasses.replace(self._cache, **parts))

    def _commit(self):
        if self.pending is None:
            return self
        view = ops.append_swa(self.read_swa_view(), self.pending, self.batch.slots, self.batch.positions)
        swa = dataclasses.replace(self._cache.swa, rows=view.rows)
        return dataclasses.replace(self._with(swa=swa), pending=None)
