"""A differentiable cache for training, which the model's modules use like the paged cache.

A batch consists of whole sequences of one length, so nothing is kept between calls. A mask in the form of a band says
which rows lie in a token's window, and a mask of positions says which entries the token sees. Attention is computed for
one block of queries at a time, which bounds the memory. The logits are those of a model with the paged cache.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsv4_jax import ops
from dsv4_jax.cache import Batch, CacheSchema
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_spec import LayerSpec
from dsv4_jax.ops import CompressorWeights
from dsv4_jax.ops.norm_rope import rms_normalize
from dsv4_jax.quant import KVFormat, LayerSlice, RowCodec, layer_value, round_to


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """Options and results of a forward pass in training, in place of the paged cache.

    Attributes:
      schema: shapes and format (static).
      select: bool; whether layers with an indexer attend only to the entries that it selects. If False, as in the first
        steps of a training, they attend to all entries.
      quantize: bool; whether rows, entries, keys and index queries are rounded by the format, with straight-through
        gradients.
      key: random key of dropout; None for no dropout.
      index_loss: float32 scalar, the loss of the indexers. An indexer's loss is the mean over tokens of KL(p || softmax
        of the index scores), where p is the attention to the entries, summed over heads. The losses of all layers with
        an indexer are added up. The gradient reaches the indexers only. A selection has no gradient.
      token_weights: [T] float32, weight of each token in the mean of `index_loss`.
      expert_load: [layers, E] share of each layer's (token, expert) pairs that went to each expert.
      passes: None, or for a multi-token-prediction block the windows [P, B, S, D] that it writes in its passes; see
        `draft_training.draft_losses`.
      pass_number: number of the block's pass (static).
      dropout: share of a block's output that is dropped (static).
    """

    schema: CacheSchema = dataclasses.field(metadata={"static": True})
    select: Any = True
    quantize: Any = False
    key: Any = None
    index_loss: Any = 0.0
    token_weights: Any = None
    expert_load: Any = None
    passes: Any = None
    pass_number: int = dataclasses.field(default=0, metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})

    @classmethod
    def make(
        cls, config: DSV4Config, rows: int, length: int, *, kv_format: str | KVFormat = "v4", dtype: Any = jnp.bfloat16
    ) -> "DenseCache":
        """Makes a cache for batches of `rows` sequences of `length` tokens.

        Raises:
          ValueError: the length is not a multiple of a layer's window.
        """
        for spec in config.layers:
            if length % (window := config.window(spec.layer)):
                raise ValueError(f"{length=} must be a multiple of layer {spec.layer}'s window, {window}")
        schema = CacheSchema(
            config, num_blocks=0, max_requests=rows, max_context=length, kv_format=kv_format, dtype=dtype
        )
        load = jnp.zeros((len(config.layers), config.n_routed_experts), jnp.float32)
        weights = jnp.ones(rows * length, jnp.float32)
        return cls(schema, index_loss=jnp.float32(0), token_weights=weights, expert_load=load)

    def begin_step(self, batch: Batch) -> "DenseCache":
        """Returns the cache unchanged, because nothing is kept between steps."""
        return self

    def dropped(self, y: Float[Array, "T D"], place: int | Int[Array, ""]) -> Float[Array, "T D"]:
        """Returns y, the output of a block (attention or experts), with dropout.

        `place` is the index of this output among those of all blocks of the model, so that each gets its own mask.
        """
        if self.key is None:
            return y
        kept = jax.random.bernoulli(jax.random.fold_in(self.key, place), 1 - self.dropout, y.shape)
        return jnp.where(kept, y * jnp.asarray(1 / (1 - self.dropout), y.dtype), jnp.zeros((), y.dtype))

    def with_load(self, layer: int | Int[Array, ""], experts: Int[Array, "T k"]) -> "DenseCache":
        """Returns the cache with a layer's load added to `expert_load`. `experts` are the experts of its tokens."""
        load = jnp.bincount(experts.reshape(-1), length=self.expert_load.shape[1]) / experts.size
        return dataclasses.replace(self, expert_load=self.expert_load.at[layer].add(load))

    def handle(self, layer: int | Int[Array, ""], batch: Batch, *, like: int | None = None) -> "DenseHandle":
        """Returns the view of one layer. If `layer` is traced, `like` is the index of a layer of the same kind."""
        return DenseHandle(self, batch, self.schema.layers[layer if like is None else like])


def whole_sequences(ids: Int[Array, "B S"]) -> Batch:
    """Returns the batch of whole sequences ids [B, S], where row b is request b."""
    rows, length = ids.shape
    return Batch(
        token_ids=ids.reshape(-1),
        positions=jnp.tile(jnp.arange(length, dtype=jnp.int32), rows),
        slots=jnp.repeat(jnp.arange(rows, dtype=jnp.int32), length),
        prefill=True,
    )


@dataclasses.dataclass(frozen=True)
class DenseHandle:
    """One layer of a `DenseCache`, with the methods of `LayerCacheHandle`.

    Attributes:
      cache: the DenseCache.
      batch: batch from `whole_sequences`.
      spec: description of what the layer stores.
      window: [B, S, D] rows of the tokens, once written.
      entries, keys: [B, E, D] compressed entries and index keys, once flushed.
      scores: a list with the index scores [T, E] of the last call of `indexer_topk`. `attend` needs them for the index
        loss. The list is changed in place, because `indexer_topk` returns no new handle.
    """

    cache: DenseCache
    batch: Batch
    spec: LayerSpec
    window: Any = None
    entries: Any = None
    keys: Any = None
    scores: list[Any] = dataclasses.field(default_factory=list)

    def write_swa(self, kv: Float[Array, "T D"]) -> "DenseHandle":
        return dataclasses.replace(self, window=self._rounded(self._rows(kv), self.cache.schema.window_codec))

    def norm_rope_append(
        self,
        q: Float[Array, "T H D"],
        kv: Float[Array, "T D"],
        weight: Float[Array, "D"] | LayerSlice,
        inv_freq: Float[Array, "P"],
        *,
        eps: float,
        norms_queries: bool = True,
    ) -> tuple[Float[Array, "T H D"], "DenseHandle"]:
        q, kv = ops.norm_rope(q, kv, weight, self.batch.positions, inv_freq, eps=eps, norms_queries=norms_queries)
        return q, self.write_swa(kv)

    def flush(
        self, kv: Float[Array, "T W"], gate: Float[Array, "T W"], weights: CompressorWeights, index: tuple | None = None
    ) -> "DenseHandle":
        entries = self._rounded(self._pool(kv, gate, weights), self._group.entry)
        keys = None if index is None else self._rounded_index(self._pool(*index), keys=True)
        return dataclasses.replace(self, entries=entries, keys=keys)

    def indexer_scores(
        self,
        q: Float[Array, "T H I"],
        weights: Float[Array, "T H"],
        inv_freq: Float[Array, "P"] | None = None,
        candidates: None = None,
    ) -> Float[Array, "T E"]:
        if inv_freq is not None:
            q = ops.apply_rope(q, jnp.maximum(self.batch.positions, 0), inv_freq)

        def score(block):
            q, weights = block
            dots = jax.nn.relu(_product("bqhd,bed->bqhe", q, self.keys))
            return jnp.einsum("bqh,bqhe->bqe", weights, dots, precision="highest")

        q = self._rounded_index(q, keys=False)
        scores = self._joined(jax.lax.map(jax.checkpoint(score), (self._blocks(q), self._blocks(weights))))
        positions = jnp.arange(scores.shape[1], dtype=jnp.int32)
        return jnp.where(self._visible(positions, scores.shape[2]), scores, -jnp.inf).reshape(-1, scores.shape[2])

    def indexer_topk(self, scores: Float[Array, "T E"], candidates: None = None) -> Int[Array, "T k"]:
        self.scores[:] = [scores]
        lengths = ops.valid_lengths(self.batch.positions, self.spec.compress_rate)
        k = self.cache.schema.config.topk(self.spec.layer)
        return ops.indexer_topk(jax.lax.stop_gradient(scores), lengths, k, implementation="xla")

    def attend(
        self,
        q: Float[Array, "T H D"],
        sinks: Float[Array, "H"] | LayerSlice,
        indices: Int[Array, "T K"] | None = None,
        inv_freq: Float[Array, "P"] | None = None,
    ) -> tuple[Float[Array, "T H D"], "DenseHandle"]:
        sinks = layer_value(sinks)
        window = self._window_size
        # In a later pass of a multi-token-prediction block, a token sees the rows that the first pass wrote for the
        # tokens of its window, and the rows that the later passes wrote for the token itself.
        passes = self.cache.passes
        number = self.cache.pass_number
        passes = None if passes is None else passes.at[number].set(self.window)
        first, *own = (self.window,) if passes is None else passes[: number + 1]
        before = jnp.pad(first, ((0, 0), (window, 0), (0, 0)))[:, :-window]
        band = jnp.concatenate([_stacked(before, window), _stacked(first, window)], axis=2)
        own = _stacked(jnp.stack(own, axis=2), window) if own else None
        number = jnp.arange(band.shape[0], dtype=jnp.int32)
        entries = self.entries
        scores = self.scores[0] if self.spec.selects else None

        @jax.checkpoint
        def block(inputs):
            number, kv, own, q, indices, scores, token_weights = inputs
            logits = _product("bqhd,bkd->bqhk", q, kv) * q.shape[-1] ** -0.5
            ahead = 0 if own is None else own.shape[2]
            logits = jnp.where(_band(window, number, ahead)[None, :, None, :], logits, -jnp.inf)
            if entries is not None:
                positions = number * window + jnp.arange(window, dtype=jnp.int32)
                visible = self._visible(positions, entries.shape[1])
                more = _product("bqhd,bed->bqhe", q, entries) * q.shape[-1] ** -0.5
                more = jnp.where(visible[None, :, None, :], more, -jnp.inf)
                logits = jnp.concatenate([logits, more], axis=-1)
                kv = jnp.concatenate([kv, entries], axis=1)
            if own is not None:
                more = _product("bqhd,bqed->bqhe", q, own) * q.shape[-1] ** -0.5
                logits = jnp.concatenate([logits, more], axis=-1)
            top = jnp.maximum(jnp.max(logits, axis=-1), sinks[None, None, :])
            top = jax.lax.stop_gradient(top)[..., None]
            weights = jnp.exp(logits - top)
            sink = jnp.exp(sinks[None, None, :, None] - top)
            loss = jnp.float32(0)
            if indices is not None:
                loss = _index_loss(weights[..., 2 * window :], jnp.sum(weights, axis=-1) + sink[..., 0], scores)
                loss = jnp.sum(loss * token_weights)
                chosen = _member(indices, weights.shape[-1] - 2 * window) | ~jnp.asarray(self.cache.select)
                chosen = jnp.pad(chosen, ((0, 0), (0, 0), (2 * window, 0)), constant_values=True)
                weights = jnp.where(chosen[:, :, None, :], weights, 0.0)
            total = jnp.sum(weights, axis=-1, keepdims=True) + sink
            weights = round_to(weights, q.dtype)
            out = _product("bqhk,bkd->bqhd", weights[..., : kv.shape[1]], kv)
            if own is not None:
                out += _product("bqhe,bqed->bqhd", weights[..., kv.shape[1] :], own)
            return round_to(out / total, q.dtype), loss

        token_weights = self.cache.token_weights
        blocks = (number, band, own, *map(self._blocks, (q, indices, scores, token_weights)))
        out, losses = jax.lax.map(block, blocks)
        loss = jnp.sum(losses) / jnp.sum(token_weights)
        cache = dataclasses.replace(self.cache, index_loss=self.cache.index_loss + loss, passes=passes)
        out = self._joined(out).reshape(q.shape)
        if inv_freq is not None:
            out = ops.apply_rope(out, self.batch.positions, inv_freq, inverse=True)
        return out, dataclasses.replace(self, cache=cache)

    # --- layouts: the model's [T, ...], rows [B, S, ...], blocks of queries [S / window, B, window, ...] ---

    def _rows(self, x):
        return x.reshape(-1, self.cache.schema.max_context, *x.shape[1:])

    def _blocks(self, x):
        return None if x is None else _stacked(self._rows(x), self._window_size)

    def _joined(self, x):
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])

    def _visible(self, positions, entries):
        """Returns [n, E] bool: whether the token at each of n positions sees each of the E = `entries` entries."""
        return jnp.arange(entries, dtype=jnp.int32)[None, :] < (positions[:, None] + 1) // self.spec.compress_rate

    # --- what is stored ---

    @property
    def _window_size(self) -> int:
        return self.cache.schema.config.window(self.spec.layer)

    @property
    def _group(self) -> Any:
        return self.cache.schema.groups[self.spec.group or ""]

    def _pool(self, kv, gate, weights):
        """Returns the entries [B, E, D] of all closed windows, like `ops.flush`, but in ordinary jax.numpy."""
        rate = self.spec.compress_rate
        weights = layer_value(weights)
        kv, gate = (self._rows(x) for x in (kv, gate))
        entries = kv.shape[1] // rate
        kv, gate = (x[:, : entries * rate].reshape(x.shape[0], entries, rate, -1) for x in (kv, gate))
        gate = gate + weights.position_bias[None, None]
        if self.spec.overlap:
            kv = _with_previous(kv, 0.0)
            gate = _with_previous(gate, -jnp.inf)
        dtype = self.cache.schema.dtype
        pooled = round_to(jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2), dtype).astype(jnp.float32)
        normed = round_to(weights.norm_weight[None, None, :] * rms_normalize(pooled, weights.eps), dtype)
        first_positions = jnp.tile(jnp.arange(entries, dtype=jnp.int32) * rate, normed.shape[0])
        flat = normed.reshape(-1, normed.shape[-1])
        return ops.apply_rope(flat, first_positions, weights.inv_freq).reshape(normed.shape)

    def _rounded(self, x, codec: RowCodec):
        """Returns rows x as the paged cache would return them after a store, if `quantize` is set; otherwise x."""
        return jnp.where(self.cache.quantize, codec.fake_quantize(x, x.dtype), x)

    def _rounded_index(self, x, *, keys):
        rounded = (self._group.key.fake_quantize if keys else self._group.key.round_query)(x)
        return jnp.where(self.cache.quantize, rounded.astype(x.dtype), x)


def _product(spec, x, y):
    """Computes an einsum with float32 sums. y is cast to the dtype of x, which does not change y's values."""
    # Products of bfloat16 values are exact; those of float32 need the highest precision.
    precision = "highest" if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def _stacked(rows, window):
    """Reshapes [B, S, ...] to [S / window, B, window, ...]."""
    return jnp.moveaxis(rows.reshape(rows.shape[0], -1, window, *rows.shape[2:]), 1, 0)


def _band(window, number, ahead):
    """Returns [window, 2 * window] bool: whether each row lies in the window of each token of a block of queries.

    The rows are those of the preceding block, then those of this block, whose index is `number`. The window of a token
    is that of the position `ahead` tokens later. The positions in between have no rows.
    """
    token = np.arange(window)[:, None]
    row = np.arange(2 * window)[None, :]
    return jnp.asarray((token + ahead < row) & (row <= token + window)) & ((number > 0) | jnp.asarray(row >= window))


def _with_previous(x, empty):
    """Returns the rows of overlapping windows, [B, E, 2 * rate, D], from x [B, E, rate, 2 * D].

    A window consists of the first D channels of the preceding window's rows, then the last D channels of its own rows.
    `empty` takes the place of the rows that precede the first window.
    """
    first, second = jnp.split(x, 2, axis=-1)
    before = jnp.pad(first[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=empty)
    return jnp.concatenate([before, second], axis=2)


def _member(indices, count):
    """Returns a bool mask [B, q, count] that is True at the given indices [B, q, k]; -1 = none."""
    rows = indices.reshape(-1, indices.shape[-1])
    mask = jnp.zeros((rows.shape[0], count), bool)
    mask = mask.at[jnp.arange(rows.shape[0])[:, None], jnp.where(rows < 0, count, rows)].set(True, mode="drop")
    return mask.reshape(*indices.shape[:-1], count)


def _index_loss(weights, total, scores):
    """Returns KL(p || softmax(scores)) for each token, 0 if the token sees no entry.

    p is the attention to the entries, summed over heads and divided by its sum over entries.

    Args:
      weights: [B, q, H, E] softmax weights of the entries before the division by their sum.
      total: [B, q, H] sum of all softmax weights, including those of window rows and the sink.
      scores: [B, q, E] index scores; -inf for entries that a token does not see.
    """
    attention = jax.lax.stop_gradient(jnp.sum(weights / total[..., None], axis=2))
    mass = jnp.sum(attention, axis=-1, keepdims=True)
    p = attention / jnp.where(mass > 0, mass, 1.0)
    # A finite number takes the place of -inf, so that a row without visible entries has no NaN gradient.
    log_q = jax.nn.log_softmax(jnp.where(jnp.isfinite(scores), scores, -1e30), axis=-1)
    return jnp.sum(jnp.where(p > 0, p * (jnp.log(jnp.where(p > 0, p, 1.0)) - log_q), 0.0), axis=-1)
