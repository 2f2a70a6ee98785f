"""The geometry of the KV cache. All shapes and sizes in bytes of its arrays are computed here."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.common.arguments import check_whole
from dsv4_jax.common.sizes import readable_bytes
from dsv4_jax.config import DSV4Config
from dsv4_jax.config.layer_spec import LayerSpec
from dsv4_jax.quant import IndexRows, KeyCodec, RowCodec, Rows, kv_format as as_kv_format
from pallas_kernels.runtime.pytrees import pytree_dataclass, total_bytes


MAX_INT32 = 2**31 - 1  # ids, positions and lengths are int32 on the device


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """Description of a pool group: the layers whose compressed entries share stacked arrays, since their shapes agree.

    Attributes:
      name: name of the group, as in `LayerSpec.group`.
      layers: indices of the layers that store entries in the group, in the order of axis 0 of its arrays.
      compress_rate: number of tokens per entry.
      overlap: whether an entry pools its own window of tokens and the previous one.
      entry: codec of the entries.
      key: codec of the index keys, one for each entry; None = no keys.
      key_compressor: whether the keys have a compressor of their own.
    """

    name: str
    layers: tuple[int, ...]
    compress_rate: int
    overlap: bool
    entry: RowCodec
    key: KeyCodec | None
    key_compressor: bool

    @property
    def pooled_rows(self) -> int:
        """The number of tokens that are pooled to an entry."""
        return self.compress_rate * (1 + self.overlap)


@pytree_dataclass
class CompressorState:
    """A compressor's projections of recent tokens, for entries that are not complete yet.

    The projections lie in a ring buffer: a token's row is `position % ring`.

    Attributes:
      kv: [layers, slots, ring, width] float32 values to pool.
      gate: [layers, slots, ring, width] float32 pooling logits with the position bias; -inf in rows never written.
    """

    kv: Any
    gate: Any


@pytree_dataclass
class PoolGroup:
    """The arrays of one `GroupSpec`, with layers stacked on axis 0. A field that is None is absent, or not set.

    Attributes:
      entries: Rows [layers, blocks, entries per block, ...], the compressed entries.
      keys: IndexRows [layers, blocks, entries per block, ...], the index keys; None if the layers have none.
      state: CompressorState of the entries' compressor; None if an entry is a single token.
      key_state: CompressorState of the keys' compressor; None if there is none.
    """

    entries: Rows | None = None
    keys: IndexRows | None = None
    state: CompressorState | None = None
    key_state: CompressorState | None = None

    @property
    def paged(self) -> "PoolGroup":
        """The group with only the pools that are paged in blocks."""
        return PoolGroup(self.entries, self.keys)

    @property
    def by_slot(self) -> "PoolGroup":
        """The group with only the states, which are addressed by slot."""
        return PoolGroup(state=self.state, key_state=self.key_state)


@dataclasses.dataclass(frozen=True)
class CacheSchema:
    """The geometry of a cache. The fields are inputs, from which properties derive all shapes and sizes.

    Attributes:
      config: configuration of the model.
      num_blocks: number of blocks in each pool of compressed entries. A block id is valid in all pools.
      max_requests: number of slots, each for one request.
      max_context: largest number of tokens in a request.
      block_tokens: number of tokens per block; a multiple of every compression rate of the model.
      kv_format: byte format of the rows, a `KVFormat`. The argument may be its name: "v4", "v41", "per_entry" or
        "plain", see `quant.formats`. None = the format of the model's release, `config.kv_format`.
      dtype: dtype of the model's activations. Rows in the format "plain" and all dequantized rows have it.
      max_query_tokens: largest number of tokens of a request in a decode step. A request can be rewound by at most
        `max_query_tokens - 1` tokens.
      context_parallel: whether blocks are sharded along the mesh axis "model" (context parallelism), or replicated.

    Raises:
      TypeError: a size is not a whole number.
      ValueError: a size is out of range, `block_tokens` is not a multiple of a compression rate, `max_context` exceeds
        the model's context, or the format does not fit the head dims.
    """

    config: DSV4Config
    num_blocks: int
    max_requests: int
    max_context: int
    block_tokens: int = 128
    kv_format: Any = None
    dtype: Any = jnp.bfloat16
    max_query_tokens: int = 1
    context_parallel: bool = False

    def __post_init__(self):
        for name in ("num_blocks", "max_requests", "max_context", "block_tokens", "max_query_tokens"):
            value = check_whole(name, getattr(self, name), int(name != "num_blocks"), MAX_INT32)
            object.__setattr__(self, name, value)
        if self.max_context > (limit := self.config.max_position_embeddings):
            raise ValueError(f"max_context={self.max_context} exceeds the model's max_position_embeddings={limit}")
        name = self.config.kv_format if self.kv_format is None else self.kv_format
        object.__setattr__(self, "kv_format", as_kv_format(name, self.dtype))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        for rate in sorted({group.compress_rate for group in self.groups.values()}):
            if self.block_tokens % rate:
                raise ValueError(f"block_tokens={self.block_tokens} must be a multiple of the compression rate {rate}")
        size = self.config.candidate_block_size
        for spec in self.layers:
            if self.context_parallel and spec.makes_candidates and self.block_tokens // spec.compress_rate % size:
                raise ValueError(
                    f"block_tokens={self.block_tokens} must hold whole candidate blocks of {size} entries of "
                    f"{spec.compress_rate} tokens (candidate_block_size) if context_parallel is True"
                )
        _ = self.window_codec  # raises for head dims that do not fit, also in a model without compressed entries

    def check_config(self, config: DSV4Config) -> None:
        """Raises ValueError, which names the fields that differ, if a model with `config` cannot use this cache."""
        if differences := _config_differences(self.config, config, "model"):
            raise ValueError(
                f"the cache was made for another model: {differences}; make its manager with the model's config"
            )

    def differences(self, other: "CacheSchema", name: str) -> str:
        """Returns text about how `other`, which the text calls `name`, differs from this schema; empty if equal."""
        if self == other:
            return ""
        fields = [f.name for f in dataclasses.fields(self) if f.name != "config"]
        differences = _differences(self, other, fields, name), _config_differences(self.config, other.config, name)
        return "; ".join(filter(None, differences))

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The specs of the model's layers in their order."""
        return self.config.layers

    @functools.cached_property
    def groups(self) -> dict[str, GroupSpec]:
        """The pool groups, sorted by name."""
        config = self.config
        groups = {}
        for name in sorted({spec.group for spec in self.layers if spec.group is not None}):
            owners = [spec for spec in self.layers if spec.group == name and spec.owner]
            spec = owners[0]
            layers = tuple(owner.layer for owner in owners)
            entry = self.kv_format.entries(config.nope_head_dim, config.qk_rope_head_dim)
            key = self.kv_format.keys(config.index_head_dim) if spec.keys else None
            groups[name] = GroupSpec(name, layers, spec.compress_rate, spec.overlap, entry, key, spec.key_compressor)
        return groups

    @functools.cached_property
    def window_codec(self) -> RowCodec:
        """The codec of rows of the sliding window."""
        return self.kv_format.window(self.config.nope_head_dim, self.config.qk_rope_head_dim)

    @property
    def max_blocks(self) -> int:
        """The largest number of blocks in a request."""
        return -(-self.max_context // self.block_tokens)

    def entries_per_block(self, group: str) -> int:
        """Returns the number of a group's entries per block."""
        return self.block_tokens // self.groups[group].compress_rate

    @property
    def block_axis(self) -> tuple[str, ...]:
        """The logical axes of the pools' block dimension, as in `parallel.axis_rules.RULES`."""
        return ("blocks", "context") if self.context_parallel else ("blocks",)

    # --- sizes of ring buffers: the rows that a step reads, and max_query_tokens - 1 spare rows for rewinding ---

    @property
    def max_window(self) -> int:
        """The number of tokens in the longest sliding window of a layer. The rings of all layers fit this window."""
        return max(self.config.window(spec.layer) for spec in self.layers)

    @property
    def swa_ring(self) -> int:
        """The number of rows in the ring of a sliding window, with the spare rows that draft layers need."""
        drafts = self.config.drafts
        spare = self.max_query_tokens - 1
        return self.max_window + spare + (0 if drafts is None else drafts.spare_rows(spare))

    def state_ring(self, group: str) -> int:
        """Returns the number of rows in the ring of a compressor state of the group."""
        return self.groups[group].pooled_rows + self.max_query_tokens - 1

    @property
    def ngram_context(self) -> int:
        """The number of earlier tokens in the longest n-gram that ends with a token; 0 without Engram."""
        return self.config.engram.max_ngram_size - 1 if self.config.engram else 0

    # --- arrays ---

    def group_structs(self, group: str) -> PoolGroup:
        """Returns a group with `jax.ShapeDtypeStruct` leaves. States are None if an entry is a single token."""
        spec = self.groups[group]
        layers = len(spec.layers)
        width = 1 + spec.overlap

        def paged(codec):
            """Returns the structs of a pool of entries or keys; None without a codec."""
            return codec and _prepend(codec.struct, layers, self.num_blocks, self.entries_per_block(group))

        def state(codec):
            """Returns the structs of the state of the compressor that makes rows of `codec`; None if there is none."""
            if codec is None or spec.pooled_rows == 1:
                return None
            shape = (layers, self.max_requests, self.state_ring(group), codec.dim * width)
            return CompressorState(*(jax.ShapeDtypeStruct(shape, jnp.float32),) * 2)

        key_state = state(spec.key) if spec.key_compressor else None
        return PoolGroup(paged(spec.entry), paged(spec.key), state(spec.entry), key_state)

    def slot_structs(self) -> dict[str, Any]:
        """Returns {field of `KVCache`: structs} of arrays outside groups; None for an array that the model lacks."""
        config = self.config
        slots = self.max_requests
        struct = jax.ShapeDtypeStruct
        shape = (1, slots, self.max_query_tokens, config.hc_mult * config.hidden_size)
        keeps_streams = config.drafts is not None and config.drafts.keeps_streams
        # A copy of a request may run the newest token again. The ring has a row for it besides the rows that it reads,
        # so that it overwrites none of them.
        ngram_ring = self.ngram_context + self.max_query_tokens
        return {
            "swa": _prepend(self.window_codec.struct, len(self.layers), slots, self.swa_ring),
            "streams": struct(shape, self.dtype) if keeps_streams else None,
            "ngram_ids": struct((1, slots, ngram_ring, 1), jnp.int32) if config.engram else None,
            "block_table": struct((slots, self.max_blocks), jnp.int32),
            "lengths": struct((slots,), jnp.int32),
        }

    # --- bytes ---

    def block_bytes_by_pool(self) -> dict[str, int]:
        """Returns {name: bytes} of the pools that are paged in blocks."""
        return dict(self._bytes_by_pool[0])

    def slot_bytes_by_pool(self) -> dict[str, int]:
        """Returns {name: bytes} of the arrays that have a fixed size per slot."""
        return dict(self._bytes_by_pool[1])

    # The sizes are computed once, because an engine asks for them at every step.
    @functools.cached_property
    def _bytes_by_pool(self):
        """({name: bytes} of the pools that are paged in blocks, {name: bytes} of the arrays per slot)."""
        paged = {}
        states = {}
        for name in self.groups:
            group = self.group_structs(name)
            paged |= {f"{name} entries": group.entries, f"{name} indexer keys": group.keys}
            states |= {f"{name} states": group.state, f"{name} indexer states": group.key_state}
        structs = self.slot_structs()
        rings = {
            "sliding windows": structs["swa"],
            "residual streams": structs["streams"],
            "n-gram ids": structs["ngram_ids"],
        }
        tables = {"block table and lengths": [structs["block_table"], structs["lengths"]]}
        return _nbytes(paged), _nbytes(rings | states | tables)

    def pool_bytes(self) -> dict[str, int]:
        """Returns {name: bytes} of all arrays; the sum is `memory_bytes()`."""
        return self.block_bytes_by_pool() | self.slot_bytes_by_pool()

    def memory_bytes(self) -> int:
        """Returns the exact size in bytes of the arrays that `KVCache.zeros` allocates."""
        return sum(self.pool_bytes().values())

    def summary(self) -> dict[str, Any]:
        """Returns the geometry as {name: value} for a repr."""
        names = "max_requests", "max_context", "num_blocks", "block_tokens"
        sizes = {name: getattr(self, name) for name in names}
        return {
            "layers": len(self.layers),
            **sizes,
            "format": self.kv_format.name,
            "memory": readable_bytes(self.memory_bytes()),
        }

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in all pools together."""
        return sum(dataclasses.replace(self, num_blocks=1).block_bytes_by_pool().values())

    @property
    def bytes_per_token(self) -> float:
        """The bytes per token in the pools of compressed entries: `block_bytes / block_tokens`."""
        return self.block_bytes / self.block_tokens

    @property
    def bytes_per_request(self) -> int:
        """The bytes of one slot in all arrays of fixed size per slot, without the block table."""
        pools = dataclasses.replace(self, max_requests=1).slot_bytes_by_pool()
        return sum(pools.values()) - pools["block table and lengths"]

    @property
    def dense_bytes_per_token(self) -> int:
        """The bytes per token of an uncompressed cache with one bfloat16 vector per layer, for comparison."""
        return self.config.num_hidden_layers * self.config.head_dim * 2


def compute_block_budget(config: DSV4Config, memory_bytes: int, devices: int = 1, **sizes) -> int:
    """Computes the number of blocks on a device for which its part of a cache fits into `memory_bytes`.

    Args:
      config: configuration of the model.
      memory_bytes: budget for the whole cache of a device, in bytes.
      devices: number of devices among which blocks are divided. Each device holds the rows of all slots.
      **sizes: the other fields of `CacheSchema`, without `num_blocks`.

    Returns:
      The largest `num_blocks` for which `CacheSchema.memory_bytes()` is within the budget, but at most a device's
      blocks if the requests in all slots have the maximum length.

    Raises:
      ValueError: the fixed bytes of all slots and one block exceed the budget.
    """
    empty = CacheSchema(config, num_blocks=0, **sizes)
    fixed_bytes = empty.memory_bytes()
    bytes_per_block = empty.block_bytes
    if memory_bytes < fixed_bytes + bytes_per_block:
        raise ValueError(
            f"memory={memory_bytes} holds no block: {empty.max_requests} slots take {fixed_bytes} bytes "
            f"({empty.bytes_per_request} each) and a block takes {bytes_per_block}; raise memory or lower max_requests"
        )
    full_blocks = -(-empty.max_requests * empty.max_blocks // devices)
    return min(full_blocks, (memory_bytes - fixed_bytes) // bytes_per_block) if bytes_per_block else full_blocks


# A cache and a model that uses the cache must agree in these fields of a DSV4Config, and in `layers`.
_CONFIG_FIELDS = (
    "vocab_size", "num_hidden_layers", "head_dim", "qk_rope_head_dim", "sliding_window", "index_head_dim", "index_topk",
    "engram", "candidate_topk_blocks", "candidate_block_size",
)  # fmt: skip


def _config_differences(mine, other, name):
    """Returns text about how `other` differs from `mine` in the fields that a cache depends on; empty if it does not.

    `name` is the name of `other` in the text.
    """
    differences = _differences(mine, other, _CONFIG_FIELDS, name)
    if differences or mine.layers == other.layers:
        return differences
    a, b = next(pair for pair in itertools.zip_longest(mine.layers, other.layers) if pair[0] != pair[1])
    return f"a layer is {b} in the {name}, {a} in the cache"


def _differences(mine, other, fields, name):
    """Returns text about the fields in which `other`, which the text calls `name`, differs from `mine`."""
    pairs = {field: (getattr(other, field), getattr(mine, field)) for field in fields}
    return "; ".join(f"{field} is {a} in the {name}, {b} in the cache" for field, (a, b) in pairs.items() if a != b)


def _prepend(struct, *leading):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct((*leading, *s.shape), s.dtype), struct)


def _nbytes(pools: dict[str, Any]) -> dict[str, int]:
    """Returns {name: bytes} of pools; a pool without arrays is left out."""
    return {name: total_bytes(pool) for name, pool in pools.items() if jax.tree.leaves(pool)}
