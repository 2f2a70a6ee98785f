"""Shapes and bytes of every cache array: the only place that computes them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.config import CSA, HCA, SLIDING, DSV4Config
from dsv4_jax.quant import IndexRows, KVFormat, Rows, kv_format as as_kv_format


@dataclasses.dataclass(frozen=True)
class LayerCacheSchema:
    """What one layer keeps.

    Attributes:
      layer: number of the layer in the model.
      kind: its layer type, as in `DSV4Config.layer_types`.
      index: its row on axis 0 of the pools of its kind (rings: the layer number).
      compress_rate: tokens a compressed entry stands for; 0 = sliding window only.
    """

    layer: int
    kind: str
    index: int
    compress_rate: int


@dataclasses.dataclass(frozen=True)
class CacheSchema:
    """Geometry of a cache: true inputs as fields, everything else derived.

    Attributes:
      config: the model.
      kv_format: what the bytes mean.
      dtype: the model's dtype: RoPE dims of "plain" rows and all dense results.
      num_blocks: blocks in each compressed pool; one block id addresses all of them.
      max_requests: slots.
      max_context: tokens a request may hold.
      block_tokens: tokens a block stands for; a multiple of every compression rate of the model.
      max_query_tokens: tokens a request may bring to a decode step, and one more than it may rewind.
    """

    config: DSV4Config
    kv_format: KVFormat
    dtype: np.dtype
    num_blocks: int
    max_requests: int
    max_context: int
    block_tokens: int
    max_query_tokens: int

    @classmethod
    def from_config(
        cls,
        config: DSV4Config,
        *,
        num_blocks: int,
        max_requests: int,
        max_context: int,
        kv_format: str | KVFormat = "v4",
        dtype=jnp.bfloat16,
        block_tokens: int = 128,
        max_query_tokens: int = 1,
    ) -> "CacheSchema":
        """A checked schema.

        Raises:
          ValueError: a size is not positive, `block_tokens` is not a multiple of a compression rate, the context is
            longer than the model's, or the format does not fit the head dims.
        """
        sizes = dict(max_requests=max_requests, max_context=max_context)
        sizes |= dict(block_tokens=block_tokens, max_query_tokens=max_query_tokens)
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if num_blocks < 0:
            raise ValueError(f"{num_blocks=} must not be negative")
        if max_context > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ValueError(f"{max_context=} exceeds the model's max_position_embeddings={limit}")
        for rate in sorted({config.compress_rate(i) for i in range(config.num_hidden_layers)} - {0}):
            if block_tokens % rate:
                raise ValueError(f"{block_tokens=} must be a multiple of the compression rate {rate}")
        fmt = as_kv_format(kv_format, dtype)
        fmt.check(
            config.nope_head_dim, config.qk_rope_head_dim, config.index_head_dim if CSA in config.layer_types else None
        )
        return cls(config, fmt, np.dtype(dtype), num_blocks, max_requests, max_context, block_tokens, max_query_tokens)

    @functools.cached_property
    def layers(self) -> tuple[LayerCacheSchema, ...]:
        """What each layer of the model keeps, in their order."""
        kinds = self.config.layer_types
        return tuple(
            LayerCacheSchema(i, kind, kinds[:i].count(kind), self.config.compress_rate(i))
            for i, kind in enumerate(kinds)
        )

    def count(self, kind: str) -> int:
        """Layers of a kind."""
        return self.config.layer_types.count(kind)

    @property
    def max_blocks(self) -> int:
        """Blocks a request may hold."""
        return -(-self.max_context // self.block_tokens)

    def compress_rate(self, kind: str) -> int:
        """Tokens an entry of this kind of layer (CSA or HCA) stands for."""
        return {CSA: self.config.compress_rate_csa, HCA: self.config.compress_rate_hca}[kind]

    def entries_per_block(self, kind: str) -> int:
        """Entries of this kind of layer that a block holds."""
        return self.block_tokens // self.compress_rate(kind)

    # --- rings: the rows that must be there plus room to rewind max_query_tokens - 1 tokens ---

    @property
    def swa_ring(self) -> int:
        return self.config.sliding_window + self.max_query_tokens - 1

    def state_ring(self, kind: str) -> int:
        """CSA pools the previous window too."""
        rows = self.compress_rate(kind) * (2 if kind == CSA else 1)
        return rows + self.max_query_tokens - 1

    # --- arrays; None where the model has no such layer ---

    def entries_struct(self, kind: str) -> Rows | None:
        """Rows [layers, blocks, entries a block, ...]."""
        row = self.kv_format.row_struct(self.config.nope_head_dim, self.config.qk_rope_head_dim)
        return self._stack(kind, row, self.num_blocks, self.entries_per_block) if self.count(kind) else None

    def index_struct(self) -> IndexRows | None:
        """IndexRows [CSA layers, blocks, entries a block, ...]."""
        if not self.count(CSA):
            return None
        key = self.kv_format.index_struct(self.config.index_head_dim)
        return self._stack(CSA, key, self.num_blocks, self.entries_per_block)

    def swa_struct(self) -> Rows:
        """Rows [layers, slots, ring, ...], every layer."""
        row = self.kv_format.row_struct(self.config.nope_head_dim, self.config.qk_rope_head_dim)
        return _prepend(row, self.config.num_hidden_layers, self.max_requests, self.swa_ring)

    def state_struct(self, kind: str, *, index: bool = False) -> jax.ShapeDtypeStruct | None:
        """[layers, slots, ring, width] float32, of the KV compressor or (CSA) the indexer's."""
        if not self.count(kind):
            return None
        width = (self.config.index_head_dim if index else self.config.head_dim) * (2 if kind == CSA else 1)
        shape = (self.count(kind), self.max_requests, self.state_ring(kind), width)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def block_table_struct(self) -> jax.ShapeDtypeStruct:
        """[max_requests, max_blocks] int32."""
        return jax.ShapeDtypeStruct((self.max_requests, self.max_blocks), jnp.int32)

    def lengths_struct(self) -> jax.ShapeDtypeStruct:
        """[max_requests] int32."""
        return jax.ShapeDtypeStruct((self.max_requests,), jnp.int32)

    def _stack(self, kind, row, blocks, entries_per_block):
        return _prepend(row, self.count(kind), blocks, entries_per_block(kind))

    # --- bytes ---

    def pool_bytes(self) -> dict[str, int]:
        """Bytes of each part of the cache, by name; their sum is `memory_bytes()`."""
        parts = {
            "csa entries": self.entries_struct(CSA),
            "csa indexer keys": self.index_struct(),
            "hca entries": self.entries_struct(HCA),
            "sliding windows": self.swa_struct(),
            "csa states": [self.state_struct(CSA)] * 2,
            "csa indexer states": [self.state_struct(CSA, index=True)] * 2,
            "hca states": [self.state_struct(HCA)] * 2,
            "block table and lengths": [self.block_table_struct(), self.lengths_struct()],
        }
        return {name: _nbytes(part) for name, part in parts.items()}

    def memory_bytes(self) -> int:
        """Bytes of the whole cache, exactly those of the arrays `KVCache.zeros` allocates."""
        return sum(self.pool_bytes().values())

    @property
    def block_bytes(self) -> int:
        """Bytes one more block takes over all pools."""
        more = dataclasses.replace(self, num_blocks=self.num_blocks + 1)
        return more.memory_bytes() - self.memory_bytes()

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token costs in the compressed pools, amortised over a block."""
        return self.block_bytes / self.block_tokens

    @property
    def bytes_per_request(self) -> int:
        """Bytes a slot takes whatever its length: rings and compressor states, without its block-table row."""
        more = dataclasses.replace(self, max_requests=self.max_requests + 1)
        table = _nbytes([self.block_table_struct(), self.lengths_struct()]) // self.max_requests
        return more.memory_bytes() - self.memory_bytes() - table

    @property
    def dense_bytes_per_token(self) -> int:
        """For comparison: bytes a token would cost with one bfloat16 vector of keys and values a layer."""
        return self.config.num_hidden_layers * self.config.head_dim * 2


def compute_block_budget(config: DSV4Config, memory_bytes: int, **sizes) -> int:
    """Blocks that fit into `memory_bytes` beside the fixed part of every slot.

    Args:
      config: the model.
      memory_bytes: bytes for the whole cache.
      **sizes: as in `CacheSchema.from_config`, without `num_blocks`.

    Returns:
      The largest `num_blocks` whose schema's `memory_bytes()` does not exceed the budget.

    Raises:
      ValueError: the fixed part alone, or one block beside it, does not fit.
    """
    empty = CacheSchema.from_config(config, num_blocks=0, **sizes)
    fixed, block = empty.memory_bytes(), empty.block_bytes
    if memory_bytes < fixed + block:
        raise ValueError(
            f"{memory_bytes=} holds no block: {empty.max_requests} slots take {fixed} bytes "
            f"({empty.bytes_per_request} each) and a block takes {block}; raise memory or lower max_requests"
        )
    return (memory_bytes - fixed) // block if block else empty.max_requests * empty.max_blocks


def _prepend(struct, *leading):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((*leading, *s.shape), s.dtype), struct)


def _nbytes(tree):
    return sum(int(np.prod(s.shape, dtype=np.int64)) * np.dtype(s.dtype).itemsize for s in jax.tree.leaves(tree))


__all__ = ["CSA", "HCA", "SLIDING", "CacheSchema", "LayerCacheSchema", "compute_block_budget"]
