"""A naive model of requests: their token ids, and in plain NumPy every byte that these must have left in a cache.

What a token brings to a layer depends on its id alone here, so ids stand for everything. Nothing in this file knows of
slots that move, shared blocks, snapshots or files.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.cache.newest_tokens import advance_ngrams
from dsv4_jax.parallel.sharded_step import sharded_step
from tests.cache.reference import Inputs, keys_of, random_token, random_weights, store_entry, store_row


AT_ONCE = 32  # windows in a call


class Tables:
    """What each id brings to each layer, and what the format stores of it."""

    def __init__(self, schema: CacheSchema, seed: int):
        rng = np.random.default_rng(seed)
        self.schema = schema
        self.weights = random_weights(schema, rng)
        tokens = [random_token(schema, rng) for _ in range(schema.config.vocab_size)]
        self.inputs = jax.tree.map(lambda *rows: np.stack(rows), *tokens)  # by layer: Inputs [ids, width]
        stored = [jax.vmap(lambda row: store_row(row, schema)[0])(x.window) for x in self.inputs]
        self.windows = jax.tree.map(lambda *rows: np.stack(rows), *stored)  # Rows [layers, ids, ...]
        # By group, and by compressor of the group: that of the entries, then that of the keys.
        self._states = {
            name: [self._stack(spec.layers, index) for index in range(1 + spec.key_compressor)]
            for name, spec in schema.groups.items()
        }
        self.no_entries = {
            name: [np.zeros((x.shape[0], 0, *x.shape[3:]), x.dtype) for x in jax.tree.leaves(group.paged)]
            for name, group in KVCache.abstract(schema).groups.items()
        }
        self._entries = {}
        self.token_map = rng.permutation(schema.config.vocab_size).astype(np.int32)

    def ngrams(self, ids: list[int], at: list[int]) -> np.ndarray:
        """[n, max_ngram_size] compressed ids of the n-grams that end at positions of a request."""
        engram = self.schema.config.engram
        padded = [engram.pad_token_id] * (engram.max_ngram_size - 1) + ids
        return self.token_map[[padded[t : t + engram.max_ngram_size][::-1] for t in at]]

    def _stack(self, layers, index):
        """(kv [layers, ids, width], gate likewise, position bias [layers, rate, width])."""
        parts = []
        for layer in layers:
            x = self.inputs[layer]
            kv, gate = (x.index_kv, x.index_gate) if index else (x.kv, x.gate)
            parts.append((kv, gate, self.weights[layer][index].position_bias))
        return [np.stack(part) for part in zip(*parts, strict=True)]

    def states(self, group: str, index: int, ids: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(kv, gate) [layers, n, width] of tokens."""
        kv, gate, bias = self._states[group][index]
        return kv[:, ids], gate[:, ids] + bias[:, positions % bias.shape[1]]

    def entries(self, group: str, ids: np.ndarray, start: int) -> list[np.ndarray]:
        """What windows `start` and later of a request leave, for each leaf of the cache's pool [layers, n, ...]."""
        rate = self.schema.groups[group].compress_rate
        reach = self.schema.groups[group].pooled_rows
        keys = []
        for end in range((start + 1) * rate, len(ids) + 1, rate):
            window = np.full((reach,), -1, np.int32)
            own = ids[max(0, end - reach) : end]
            window[reach - len(own) :] = own
            keys.append((group, end - reach, window.tobytes()))
        missing = list(dict.fromkeys(key for key in keys if key not in self._entries))
        if len(self._entries) > 100_000:
            self._entries = {key: self._entries[key] for key in keys if key in self._entries}
        for at in range(0, len(missing), AT_ONCE):
            some = missing[at : at + AT_ONCE]
            padded = [*some, *[some[0]] * (AT_ONCE - len(some))]
            windows = np.stack([np.frombuffer(key[2], np.int32) for key in padded])
            firsts = np.array([key[1] for key in padded], np.int32)
            leaves = [np.asarray(x) for x in jax.tree.leaves(self._pool(group, windows, firsts))]
            for i, key in enumerate(some):
                self._entries[key] = tuple(x[:, i] for x in leaves)
        if not keys:
            return self.no_entries[group]
        return [np.stack(leaf, axis=1) for leaf in zip(*(self._entries[key] for key in keys), strict=True)]

    def _pool(self, group, windows, firsts):
        """Leaves [layers, n, ...] of the windows' entries, in the order of the leaves of the cache's pool."""
        layers = []
        for layer in self.schema.groups[group].layers:
            x = self.inputs[layer]
            both = []
            for index, weights in enumerate(self.weights[layer]):
                kv, gate = (x.index_kv, x.index_gate) if index else (x.kv, x.gate)
                both.append(_store(kv[windows], gate[windows], firsts, weights, self.schema, group, bool(index)))
            spec = self.schema.layers[layer]
            if spec.keys and not spec.key_compressor:
                both.append(_store(x.kv[windows], x.gate[windows], firsts, weights, self.schema, group, True))
            layers.append(both)
        return jax.tree.map(lambda *rows: np.stack(rows), *layers)


@functools.partial(jax.jit, static_argnames=("schema", "group", "index"))
def _store(kv, gate, firsts, weights, schema, group, index):
    def one(kv, gate, first):
        return store_entry(kv, gate, first, weights, schema, group, index)[0]

    return jax.vmap(one)(kv, gate, firsts)


@functools.partial(jax.jit, donate_argnames="cache")
@sharded_step
def run_step(tables: tuple[list[Inputs], Any, Any], cache: KVCache, batch) -> tuple[Any, KVCache]:
    """Writes every layer as a model would; returns the tokens' n-grams, too. Padding tokens bring NaN."""
    cache = cache.begin_step(batch)
    inputs, weights, token_map = tables
    ngrams = None
    if cache.schema.config.engram is not None:
        ngrams, cache = advance_ngrams(cache, batch, token_map)
    real = (batch.slots >= 0)[:, None]
    for layer, (table, parts) in enumerate(zip(inputs, weights, strict=True)):
        x = jax.tree.map(lambda rows: jnp.where(real, rows[batch.token_ids], jnp.nan), table)
        handle = cache.handle(layer, batch).write_swa(x.window)
        spec = cache.schema.layers[layer]
        if parts and spec.keys and not spec.key_compressor:
            closed, handle = handle.pool_windows(x.kv, x.gate, parts[0])
            keys = keys_of(closed, cache.schema)
            handle = handle.write_entries(closed, parts[0].inv_freq).write_keys(keys, parts[0].inv_freq)
        elif parts:
            index = (x.index_kv, x.index_gate, parts[1]) if len(parts) == 2 else None
            handle = handle.flush(x.kv, x.gate, parts[0], index=index)
        cache = handle.cache
    return ngrams, cache


@dataclasses.dataclass
class NaiveRequest:
    """One request: its ids, how far back its rings reach, and the entries of its windows."""

    tables: Tables
    ids: list[int] = dataclasses.field(default_factory=list)
    min_length: int = 0
    entries: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.entries = self.entries or dict(self.tables.no_entries)

    def copy(self) -> "NaiveRequest":
        return dataclasses.replace(self, ids=list(self.ids), entries=dict(self.entries))

    def extend(self, ids) -> None:
        self.ids += [int(i) for i in ids]
        self.min_length = max(self.min_length, len(self.ids) - (self.tables.schema.max_query_tokens - 1))
        for group, old in self.entries.items():
            new = self.tables.entries(group, np.array(self.ids, np.int32), old[0].shape[1])
            self.entries[group] = [np.concatenate(pair, axis=1) for pair in zip(old, new, strict=True)]

    def cut(self, length: int) -> None:
        del self.ids[length:]
        for group, old in self.entries.items():
            self.entries[group] = [x[:, : length // self.tables.schema.groups[group].compress_rate] for x in old]

    def differing_bytes(self, pools: KVCache, slot: int, blocks: np.ndarray) -> tuple[dict[str, int], int]:
        """(by part of the cache how many live bytes are not what they must be, all live bytes); `pools` in NumPy."""
        schema = self.tables.schema
        length = len(self.ids)
        ids = np.array(self.ids, np.int32)
        wrong = {}
        compared = 0

        def compare(name, have, want):
            nonlocal compared
            compared += want.nbytes
            assert (have.dtype, have.shape) == (want.dtype, want.shape)
            if have.tobytes() != want.tobytes():
                pair = [np.ascontiguousarray(x).view(np.uint8) for x in (have, want)]
                wrong[name] = wrong.get(name, 0) + int((pair[0] != pair[1]).sum())

        at = np.arange(max(0, self.min_length - schema.max_window), length)
        for have, want in zip(jax.tree.leaves(pools.swa), jax.tree.leaves(self.tables.windows), strict=True):
            compare("swa", have[:, slot, at % schema.swa_ring], want[:, ids[at]])
        if schema.config.engram is not None:
            at = np.arange(max(0, self.min_length - schema.config.engram.max_ngram_size + 1), length)
            have = pools.ngram_ids[:, slot, at % pools.ngram_ids.shape[2]]
            compare("n-gram ids", have, self.tables.token_map[ids[at]][None, :, None])
        for name, spec in schema.groups.items():
            group = pools.groups[name]
            rate = spec.compress_rate
            ring = schema.state_ring(name)
            opened = self.min_length // rate * rate
            for index, state in enumerate(filter(None, (group.state, group.key_state))):
                spans = [(opened, slice(None))]
                if spec.overlap:  # the window before: its first half of the channels is pooled once more
                    spans.append((max(0, opened - rate), slice(state.kv.shape[-1] // 2)))
                for first, channels in spans:
                    at = np.arange(first, length)
                    wants = self.tables.states(name, index, ids[at], at)
                    for have, want in zip((state.kv, state.gate), wants, strict=True):
                        compare(f"{name} state {index}", have[:, slot, at % ring, channels], want[..., channels])
            leaves = self.entries[name]
            block, row = np.divmod(np.arange(leaves[0].shape[1]), schema.entries_per_block(name))
            for have, want in zip(jax.tree.leaves(group.paged), leaves, strict=True):
                compare(name, have[:, blocks[block], row], want)
        return wrong, compared
