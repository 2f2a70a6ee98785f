"""A naive model of the cache: what every byte must be, from plain lists of what each request's tokens brought."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax import ops
from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.ops import ClassicalView, CompressorWeights, IndexerView, StateView


class Inputs(NamedTuple):
    """What tokens bring to one layer; [width] for one token, [T, width] for a call."""

    window: Any
    kv: Any = None
    gate: Any = None
    index_kv: Any = None
    index_gate: Any = None


class Reads(NamedTuple):
    """What a token sees of one layer: dense rows and their masks."""

    window: Any
    window_valid: Any
    entries: Any = None
    entries_valid: Any = None


def random_weights(schema: CacheSchema, rng: np.random.Generator) -> list[tuple[CompressorWeights, ...]]:
    """For each layer the weights of its compressors: none, the main one, or the main one and the indexer's."""
    config = schema.config

    def weights(layer, dim):
        width = dim * (2 if layer.overlap else 1)
        bias = rng.standard_normal((layer.compress_rate, width)).astype(np.float32)
        norm = rng.uniform(0.5, 1.5, dim).astype(np.float32)
        return CompressorWeights(bias, norm, config.inv_freq(layer.layer), config.rms_norm_eps)

    return [tuple(weights(layer, dim) for dim in compressor_dims(config, layer)) for layer in schema.layers]


def compressor_dims(config, layer):
    """What the compressors of a layer make vectors of: entries, and where they have one of their own index keys."""
    return (config.head_dim, config.index_head_dim)[: layer.owner + (layer.owner and layer.key_compressor)]


def random_token(schema: CacheSchema, rng: np.random.Generator) -> tuple[Inputs, ...]:
    """One token's inputs to every layer; magnitudes differ a lot between tokens, so that scales do."""
    config = schema.config

    def vector(width):
        return (rng.standard_normal(width) * 2.0 ** rng.integers(-6, 7)).astype(np.float32)

    def inputs(layer):
        widths = [dim * (1 + layer.overlap) for dim in compressor_dims(config, layer)]
        pairs = [(vector(width), 2 * rng.standard_normal(width).astype(np.float32)) for width in widths]
        return Inputs(vector(config.head_dim).astype(schema.dtype), *(x for pair in pairs for x in pair))

    return tuple(inputs(layer) for layer in schema.layers)


def poisoned_cache(schema: CacheSchema) -> KVCache:
    """A cache whose every pool byte is 0xFF (NaN as e4m3, bfloat16 and float32) and that holds no request."""
    empty = KVCache.zeros(schema)
    poisoned = jax.tree.map(
        lambda x: jnp.asarray(np.full(x.nbytes, 0xFF, np.uint8).view(x.dtype).reshape(x.shape)), empty
    )
    return dataclasses.replace(poisoned, block_table=empty.block_table, lengths=empty.lengths)


@dataclasses.dataclass
class Request:
    """One request: its tokens' inputs, the dense values of what they left in each layer, and its blocks in order."""

    tokens: list = dataclasses.field(default_factory=list)
    windows: list = dataclasses.field(default_factory=list)  # by token, then layer
    entries: dict = dataclasses.field(default_factory=dict)  # by layer, then entry
    blocks: list = dataclasses.field(default_factory=list)
    started: bool = False


class ReferenceCache:
    """Mirrors a cache byte by byte; every token, row and window is handled alone, in order."""

    def __init__(self, cache: KVCache, weights: list[tuple[CompressorWeights, ...]]):
        self.schema = cache.schema
        self.weights = weights
        self.pools = jax.tree.map(np.array, cache)
        self.requests: dict[int, Request] = {}

    def admit(self, slot: int) -> None:
        assert slot not in self.requests
        self.requests[slot] = Request()

    def release(self, slot: int) -> None:
        del self.requests[slot]

    def rewind(self, slot: int, count: int) -> None:
        request = self.requests[slot]
        length = len(request.tokens) - count
        del request.tokens[length:], request.windows[length:]
        for layer, entries in request.entries.items():
            del entries[length // self.schema.layers[layer].compress_rate :]

    def step(self, tokens: dict[int, list[tuple[Inputs, ...]]], new_blocks: list[list[int]]) -> list[tuple[Reads, ...]]:
        """Takes the tokens of each slot; returns what each of them sees of every layer right after it."""
        for slot in tokens:
            if not self.requests[slot].started:
                self.pools.block_table[slot] = -1
                self.requests[slot].started = True
        for slot, index, block in new_blocks:
            assert slot in tokens and index == len(self.requests[slot].blocks)
            assert all(block not in request.blocks for request in self.requests.values())
            self.requests[slot].blocks.append(block)
            self.pools.block_table[slot, index] = block
        reads = []
        for slot, new in tokens.items():
            for token in new:
                self._take(slot, token)
                reads.append(tuple(self._read(slot, layer) for layer in self.schema.layers))
            self.pools.lengths[slot] = len(self.requests[slot].tokens)
        return reads

    def _take(self, slot, token):
        request = self.requests[slot]
        schema = self.schema
        position = len(request.tokens)
        request.tokens.append(token)
        request.windows.append([])
        for layer, inputs in zip(schema.layers, token, strict=True):
            stored, dense = store_row(inputs.window, schema)
            _put(self.pools.swa, stored, layer.layer, slot, position % schema.swa_ring)
            request.windows[position].append(np.asarray(dense))
            if layer.owner:
                group = self.pools.groups[layer.group]
                self._compress(slot, layer, group.state, group.entries, index=False)
                if layer.key_compressor:
                    self._compress(slot, layer, group.key_state, group.keys, index=True)

    def _compress(self, slot, layer, state, pool, index):
        """The newest token's state row, and the entry of the window that it closes."""
        request = self.requests[slot]
        schema = self.schema
        rate = layer.compress_rate
        weights = self.weights[layer.layer][index]
        position = len(request.tokens) - 1
        row = layer.index, slot, position % schema.state_ring(layer.group)
        kv, gate = (x[0] for x in self._stream(request, layer, position, position + 1, index))
        state.kv[row] = kv
        state.gate[row] = gate + weights.position_bias[position % rate]
        if (position + 1) % rate:
            return
        first = position + 1 - schema.groups[layer.group].pooled_rows
        kv, gate = self._stream(request, layer, max(first, 0), position + 1, index)
        padding = ((max(-first, 0), 0), (0, 0))
        stored, dense = store_entry(
            np.pad(kv, padding), np.pad(gate, padding), first, weights, schema, layer.group, index
        )
        exact = entry_formula(kv, gate, max(first, 0), weights, schema, layer.group, index)
        check_near(np.asarray(dense, np.float64), exact, schema, index)
        block = request.blocks[position // schema.block_tokens]
        _put(pool, stored, layer.index, block, position % schema.block_tokens // rate)
        if not index:
            request.entries.setdefault(layer.layer, []).append(np.asarray(dense))

    def _stream(self, request, layer, start, stop, index):
        inputs = [token[layer.layer] for token in request.tokens[start:stop]]
        pairs = [(x.index_kv, x.index_gate) if index else (x.kv, x.gate) for x in inputs]
        return (np.stack(part) for part in zip(*pairs, strict=True))

    def _read(self, slot, layer):
        request = self.requests[slot]
        schema = self.schema
        window = schema.config.window(layer.layer)
        reads = _padded([rows[layer.layer] for rows in request.windows[-window:]], window, schema, front=True)
        if layer.group is None:
            return Reads(*reads)
        most = schema.max_blocks * schema.entries_per_block(layer.group)
        owner = schema.groups[layer.group].layers[layer.index]
        return Reads(*reads, *_padded(request.entries.get(owner, []), most, schema, front=False))


def _padded(rows, count, schema, front):
    """(rows [count, D] with zeros where there is none, valid [count])."""
    missing = count - len(rows)
    around = (missing, 0) if front else (0, missing)
    dense = np.stack(rows) if rows else np.zeros((0, schema.config.head_dim), schema.dtype)
    return np.pad(dense, (around, (0, 0))), np.pad(np.ones(len(rows), bool), around)


def _put(pool, values, *index):
    for array, value in zip(jax.tree.leaves(pool), jax.tree.leaves(values), strict=True):
        array[index] = value


@functools.partial(jax.jit, static_argnames="schema")
def store_row(row, schema):
    """(what the format stores for one window row [D], what it reads back)."""
    rows = schema.window_codec.encode(row)
    return rows, schema.window_codec.decode(rows, schema.dtype)


@functools.partial(jax.jit, static_argnames=("schema", "group", "index"))
def store_entry(kv, gate, first, weights, schema, group, index):
    """(what is stored for one window [rows, width] that starts at `first`, what is read back): flush of it alone."""
    spec = schema.groups[group]
    rate = schema.groups[group].compress_rate
    codec = spec.key if index else spec.entry
    most = schema.entries_per_block(group)
    rows = jax.tree.map(lambda s: jnp.zeros((1, 1, most, *s.shape), s.dtype), codec.struct)
    table = jnp.zeros((1, schema.max_blocks), jnp.int32)
    view = (IndexerView if index else ClassicalView)(rows, 0, table, rate, codec)
    nothing = jnp.full((1, 1, *kv.shape), jnp.nan)
    positions = first + jnp.arange(kv.shape[0], dtype=jnp.int32)
    slots = jnp.where(positions >= 0, 0, -1)
    state = StateView(nothing, nothing, 0, rate, spec.overlap)
    tokens = slots, jnp.maximum(positions, -1)
    if index and not spec.key_compressor:
        closed, _ = ops.pool_windows(state, kv, gate, weights, *tokens, dtype=schema.dtype)
        view = ops.write_entries(view, keys_of(closed, schema), weights.inv_freq)
    else:
        compressor = ops.CompressorInputs(state, view, kv, gate, weights)
        ((_, view),) = ops.flush([compressor], *tokens, dtype=schema.dtype)
    stored = jax.tree.map(lambda pool: pool[0, 0, positions[-1] // rate % pool.shape[2]], view.rows)
    return stored, codec.decode(stored) if index else codec.decode(stored, schema.dtype)


def keys_of(closed, schema):
    """The index keys that stand in for those that a model makes from pooled vectors: their last channels."""
    return dataclasses.replace(closed, values=closed.values[:, -schema.config.index_head_dim :])


def entry_formula(kv, gate, first, weights, schema, group, index):
    """One entry by dsv4.md 3.1 in float64, rounded where the released model rounds, before quantization."""
    rate = schema.groups[group].compress_rate
    overlap = schema.groups[group].overlap
    bias, norm, inv_freq = (
        np.asarray(x, np.float64) for x in (weights.position_bias, weights.norm_weight, weights.inv_freq)
    )
    kv = kv.astype(np.float64)
    gate = gate + bias[(first + np.arange(len(gate))) % rate]
    dim = norm.shape[0]
    if overlap:  # the first half of the channels of the previous window, the second half of this one
        own = (np.arange(len(kv)) >= len(kv) - rate)[:, None]
        kv, gate = (np.where(own, x[:, dim:], x[:, :dim]) for x in (kv, gate))
    weight = np.exp(gate - gate.max(0))
    pooled = ((weight / weight.sum(0)) * kv).sum(0).astype(schema.dtype).astype(np.float64)
    entry = norm * pooled / np.sqrt((pooled * pooled).mean() + weights.eps)
    angle = (first + len(kv) - rate) * inv_freq
    turned = (entry[dim - 2 * len(angle) :: 2] + 1j * entry[dim - 2 * len(angle) + 1 :: 2]) * np.exp(1j * angle)
    entry[dim - 2 * len(angle) :: 2] = turned.real
    entry[dim - 2 * len(angle) + 1 :: 2] = turned.imag
    if index and schema.kv_format.name == "v4":
        hadamard = np.ones((1, 1))
        while len(hadamard) < dim:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        entry = hadamard @ entry / np.sqrt(dim)
    return entry


def check_near(stored, exact, schema, index):
    """Half a grid step of the format beside what float32 maths and three roundings to the model's dtype move."""
    moved = 1e-5 if schema.dtype == np.float32 else 2**-6
    tolerance = moved * (1 + np.abs(exact))
    if schema.kv_format.name != "plain":
        # E2M1: half of steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6; the power-of-two scale is at most amax / 3.
        # The E4M3 scales of "v41" are smaller: at most 17 / 16 * amax / 6.
        is_fp4 = index or schema.kv_format.name == "v41"
        top = np.abs(exact).max() / 3 if is_fp4 else 0.0
        step = np.maximum(np.abs(exact), top) / 4 if is_fp4 else np.abs(exact) / 16
        tolerance = tolerance + step
    worst = np.max(np.abs(stored - exact) - tolerance)
    assert worst <= 0, f"an entry is {worst} further from the formula than its format's grid allows"
