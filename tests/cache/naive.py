"""A naive model of requests: their token ids, and in plain NumPy every byte that these must have left in a cache.

What a token brings to a layer depends on its id alone here, so ids stand for everything. Nothing in this file knows of
slots that move, shared blocks, snapshots or files.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.config import CSA, HCA
from tests.cache.reference import Inputs, random_token, random_weights, store_entry, store_row


STATES = {"csa_state": (CSA, False), "csa_index_state": (CSA, True), "hca_state": (HCA, False)}
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
        self.layers = {kind: [x for x in schema.layers if x.kind == kind] for kind in (CSA, HCA)}
        self._entries = {}

    def states(self, name: str, ids: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(kv, gate) [layers, n, width] of tokens."""
        kind, index = STATES[name]
        rate = self.schema.compress_rate(kind)
        pairs = []
        for layer in self.layers[kind]:
            x, weights = self.inputs[layer.layer], self.weights[layer.layer][index]
            kv, gate = (x.index_kv, x.index_gate) if index else (x.kv, x.gate)
            pairs.append((kv[ids], gate[ids] + weights.position_bias[positions % rate]))
        return tuple(np.stack(part) for part in zip(*pairs, strict=True))

    def entries(self, kind: str, ids: np.ndarray, start: int) -> list:
        """What windows `start` and later of a request with these ids leave: a PagedKVPool-like tuple of leaves each."""
        rate = self.schema.compress_rate(kind)
        reach = rate * (2 if kind == CSA else 1)
        keys = []
        for end in range((start + 1) * rate, len(ids) + 1, rate):
            window = np.full((reach,), -1, np.int32)
            own = ids[max(0, end - reach) : end]
            window[reach - len(own) :] = own
            keys.append((kind, end - reach, window.tobytes()))
        missing = list(dict.fromkeys(key for key in keys if key not in self._entries))
        if len(self._entries) > 100_000:
            self._entries = {key: self._entries[key] for key in keys if key in self._entries}
        for at in range(0, len(missing), AT_ONCE):
            some = missing[at : at + AT_ONCE]
            padded = [*some, *[some[0]] * (AT_ONCE - len(some))]
            windows = np.stack([np.frombuffer(key[2], np.int32) for key in padded])
            firsts = np.array([key[1] for key in padded], np.int32)
            leaves = [np.asarray(x) for x in jax.tree.leaves(self._pool(kind, windows, firsts))]
            for i, key in enumerate(some):
                self._entries[key] = tuple(x[:, i] for x in leaves)
        return [self._entries[key] for key in keys]

    def _pool(self, kind, windows, firsts):
        """Leaves [layers, n, ...] of the windows' entries, in the order of the leaves of the cache's pool."""
        layers = []
        for layer in self.layers[kind]:
            x, both = self.inputs[layer.layer], []
            for index, weights in enumerate(self.weights[layer.layer]):
                kv, gate = (x.index_kv, x.index_gate) if index else (x.kv, x.gate)
                both.append(_store(kv[windows], gate[windows], firsts, weights, self.schema, kind, bool(index)))
            layers.append(both)
        return jax.tree.map(lambda *rows: np.stack(rows), *layers)


@functools.partial(jax.jit, static_argnames=("schema", "kind", "index"))
def _store(kv, gate, firsts, weights, schema, kind, index):
    def one(kv, gate, first):
        return store_entry(kv, gate, first, weights, schema, kind, index)[0]

    return jax.vmap(one)(kv, gate, firsts)


@functools.partial(jax.jit, donate_argnames="cache")
def run_step(cache: KVCache, batch, inputs: list[Inputs], weights) -> KVCache:
    """Writes every layer as a model would. Padding tokens bring NaN."""
    cache = cache.begin_step(batch)
    real = (batch.slots >= 0)[:, None]
    for layer, (table, parts) in enumerate(zip(inputs, weights, strict=True)):
        x = jax.tree.map(lambda rows: jnp.where(real, rows[batch.token_ids], jnp.nan), table)
        handle = cache.handle(layer, batch).write_swa(x.window)
        if parts:
            index = (x.index_kv, x.index_gate, parts[1]) if len(parts) == 2 else None
            handle = handle.flush(x.kv, x.gate, parts[0], index=index)
        cache = handle.cache
    return cache


@dataclasses.dataclass
class NaiveRequest:
    """One request: its ids, how far back its rings reach, and the entries of its windows."""

    tables: Tables
    ids: list[int] = dataclasses.field(default_factory=list)
    floor: int = 0
    entries: dict[str, list] = dataclasses.field(default_factory=lambda: {CSA: [], HCA: []})

    def copy(self) -> "NaiveRequest":
        entries = {kind: list(entries) for kind, entries in self.entries.items()}
        return dataclasses.replace(self, ids=list(self.ids), entries=entries)

    def extend(self, ids) -> None:
        self.ids += [int(i) for i in ids]
        self.floor = max(self.floor, len(self.ids) - (self.tables.schema.max_query_tokens - 1))
        array = np.array(self.ids, np.int32)
        for kind, entries in self.entries.items():
            if self.tables.layers[kind]:
                entries += self.tables.entries(kind, array, len(entries))

    def cut(self, length: int) -> None:
        del self.ids[length:]
        for kind, entries in self.entries.items():
            if self.tables.layers[kind]:
                del entries[length // self.tables.schema.compress_rate(kind) :]

    def differing_bytes(self, pools: KVCache, slot: int, blocks: np.ndarray) -> dict[str, int]:
        """By part of the cache how many live bytes are not what they must be; `pools` in NumPy."""
        schema, length = self.tables.schema, len(self.ids)
        ids, wrong = np.array(self.ids, np.int32), {}

        def compare(name, have, want):
            if have.tobytes() != want.tobytes():
                pair = [np.ascontiguousarray(x).view(np.uint8) for x in (have, want)]
                wrong[name] = wrong.get(name, 0) + int((pair[0] != pair[1]).sum())

        at = np.arange(max(0, self.floor - schema.config.sliding_window), length)
        for have, want in zip(jax.tree.leaves(pools.swa), jax.tree.leaves(self.tables.windows), strict=True):
            compare("swa", have[:, slot, at % schema.swa_ring], want[:, ids[at]])
        for name, (kind, _) in STATES.items():
            if (state := getattr(pools, name)) is None:
                continue
            rate, ring = schema.compress_rate(kind), schema.state_ring(kind)
            opened = self.floor // rate * rate
            spans = [(opened, slice(None))]
            if kind == CSA:  # the window before: its first half of the channels is pooled once more
                spans.append((max(0, opened - rate), slice(state.kv.shape[-1] // 2)))
            for first, channels in spans:
                at = np.arange(first, length)
                for have, want in zip((state.kv, state.gate), self.tables.states(name, ids[at], at), strict=True):
                    compare(name, have[:, slot, at % ring, channels], want[..., channels])
        for kind, name in ((CSA, "csa"), (HCA, "hca")):
            if not (entries := self.entries[kind]):
                continue
            number = np.arange(len(entries))
            block, row = np.divmod(number, schema.entries_per_block(kind))
            for i, have in enumerate(jax.tree.leaves(getattr(pools, name))):
                compare(name, have[:, blocks[block], row], np.stack([entry[i] for entry in entries], axis=1))
        return wrong
