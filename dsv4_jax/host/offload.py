"""Moves requests out of the cache into host memory, and back."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.cache.request_rows import RequestRows, read_blocks, read_request
from dsv4_jax.common.sizes import readable_bytes
from dsv4_jax.common.summary import Summarized, Summary
from dsv4_jax.host.cache_devices import CacheDevices
from dsv4_jax.host.canary import check_blocks
from dsv4_jax.host.manager import KVCacheManager
from dsv4_jax.host.request_table import RequestState
from dsv4_jax.host.step_order import record_write


@dataclasses.dataclass(frozen=True, repr=False)
class OffloadedRequest(Summarized):
    """A request whose live bytes are in host memory.

    Attributes:
      length: number of tokens.
      min_length: the shortest length that the request can be rewound to.
      rows: rows of the request's slot, as NumPy arrays.
      blocks: {pool group: entries and keys [layers, blocks, entries per block, ...]}, as NumPy arrays.
      identity: properties that the resuming cache must share (see `identity`).
      weights: version of the weights that its first rows come from, as in `RequestState`.
    """

    length: int
    min_length: int
    rows: RequestRows
    blocks: dict[str, Any]
    identity: dict[str, str]
    weights: int = 0

    @property
    def nbytes(self) -> int:
        """The size of all arrays in bytes."""
        return sum(x.nbytes for x in jax.tree.leaves((self.rows, self.blocks)))

    def _summary(self) -> Summary:
        words = f"{self.length} tokens", readable_bytes(self.nbytes)
        return Summary(words, {"can be rewound to": f"{self.min_length} tokens"})


def capture(
    manager: KVCacheManager, cache: KVCache, slot: int, *, key: str = "", length: int | None = None
) -> OffloadedRequest:
    """Copies a request to host memory without ending it; reads the cache.

    Args:
      manager, cache, slot: as for `offload`.
      key: name of the model's weights.
      length: number of tokens of the copy, as in `KVCacheManager.fork`.

    Raises:
      ValueError, CacheCorruptionError: as for `offload`.
    """
    manager.check_cache(cache, slot)
    devices = manager.devices
    state = manager.requests.state(slot).shortened(length, slot)
    if not state.length:
        raise ValueError(f"slot {slot} holds no tokens yet: there is nothing to keep")
    check_blocks(devices, cache, state.cached_blocks, f"slot {slot}")
    numbers = devices.put((np.int32(slot), np.int32(state.length), np.int32(state.min_length)))
    rows = jax.device_get(read_request(cache, *numbers))
    blocks = state.blocks[: manager.requests.blocks_for(state.length)]
    chunks = [
        jax.device_get(read_blocks(cache, *devices.put((ids, np.int32(start), np.int32(state.length)))))
        for start, ids in devices.block_chunks(blocks)
    ]
    whole = jax.tree.map(lambda *pieces: np.concatenate(pieces, axis=1)[:, : len(blocks)], *chunks)
    return OffloadedRequest(state.length, state.min_length, rows, whole, identity(manager.schema, key), state.weights)


def offload(manager: KVCacheManager, cache: KVCache, slot: int) -> tuple[OffloadedRequest, KVCache]:
    """Moves a request to host memory and frees its slot and blocks.

    Args:
      manager, slot: the request, and the manager that admitted it.
      cache: after a step.

    Returns:
      (the offloaded request, for `resume`; the cache).

    Raises:
      ValueError: the slot is not admitted, it holds no tokens yet, or the cache belongs to another manager.
      CacheCorruptionError: a `PrefixCache` with `debug` found changed blocks.
    """
    offloaded = capture(manager, cache, slot)
    manager.release(slot)
    return offloaded, cache


def resume(
    manager: KVCacheManager,
    cache: KVCache,
    offloaded: OffloadedRequest,
    *,
    key: str = "",
    num_tokens: int | None = None,
) -> tuple[int, KVCache]:
    """Copies an offloaded request back, to any free slot and blocks of this cache or of one like it.

    The numbers of blocks and slots, the context and `max_query_tokens` may differ.

    Args:
      manager: manager of the cache.
      cache: the cache; donated.
      offloaded: result of `offload` or `capture`; it stays valid.
      key: name of the model's weights, as for `capture`.
      num_tokens: as in `KVCacheManager.admit`.

    Returns:
      (the slot, the cache).

    Raises:
      ValueError: the request belongs to another model, format or geometry, it is longer than `max_context`, or the
        cache belongs to another manager.
      CacheFullError: no slot is free, or too few blocks.
    """
    manager.check_cache(cache)
    schema = manager.schema
    table = manager.requests
    devices = manager.devices
    length = offloaded.length
    check_identity(schema, key, offloaded.identity)
    if length > schema.max_context:
        raise ValueError(f"the request holds {length} tokens, max_context={schema.max_context}")
    slot = table.find_slot(max(length, num_tokens or 0))
    with table.transaction({slot: table.blocks_for(length)}) as acquired:
        blocks = acquired[slot]
        rows = jax.tree.map(_fit, offloaded.rows, rows_struct(schema))
        chunks, rows = devices.put((row_chunks(devices, blocks, offloaded.blocks), rows))
        new = devices.write_request(cache, slot, length, blocks, rows, chunks)
        # This ring may be shorter, with fewer spare rows.
        min_length = max(offloaded.min_length, length - (schema.max_query_tokens - 1))
        state = RequestState(length, min_length, blocks, len(blocks), is_new=False, weights=offloaded.weights)
        record_write(table, cache, new, {slot: state})
    return slot, new


def identity(schema: CacheSchema, key: str) -> dict[str, str]:
    """Returns everything that decides a request's bytes, as {name: value}.

    The numbers of blocks and slots and the context length do not matter. `key` names the weights.
    """
    return {
        "key": key,
        "config": hashlib.sha256(repr(dataclasses.asdict(schema.config)).encode()).hexdigest(),
        "kv_format": repr(schema.kv_format),
        "dtype": schema.dtype.name,
        "block_tokens": str(schema.block_tokens),
    }


def fingerprint(schema: CacheSchema, key: str) -> bytes:
    """Returns a 16-byte hash of `identity`."""
    text = json.dumps(identity(schema, key), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def check_identity(schema: CacheSchema, key: str, have: Mapping[str, str]) -> None:
    """Raises ValueError unless the identity `have` of a request equals that of this cache."""
    for name, want in identity(schema, key).items():
        if have.get(name) != want:
            raise ValueError(f"the request was made with {name}={have.get(name)!r}, this cache has {name}={want!r}")


@functools.lru_cache
def rows_struct(schema: CacheSchema) -> RequestRows:
    """Shapes and dtypes of `OffloadedRequest.rows`."""
    return jax.eval_shape(lambda cache: read_request(cache, 0, 0, 0), KVCache.abstract(schema))


def blocks_struct(schema: CacheSchema, n: int) -> dict[str, Any]:
    """Shapes and dtypes of `OffloadedRequest.blocks` for `n` blocks."""
    pools = {name: group.paged for name, group in KVCache.abstract(schema).groups.items()}
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0], n, *x.shape[2:]), x.dtype), pools)


def row_chunks(devices: CacheDevices, blocks: Sequence[int], rows: Any) -> list[tuple[np.ndarray, Any]]:
    """Returns the arguments (ids, rows) of `write_blocks` that write `rows` [layers, n, ...] to `blocks` [n]."""
    chunks = devices.block_chunks(blocks)
    return [(ids, jax.tree.map(functools.partial(_slice, start=start, count=len(ids)), rows)) for start, ids in chunks]


def _slice(x, start, count):
    part = x[:, start : start + count]
    return np.pad(part, [(0, 0), (0, count - part.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _fit(x, struct):
    """Fits the newest rows of x [layers, n, width] to a ring of another size."""
    x = x[:, max(0, x.shape[1] - struct.shape[1]) :]
    return np.pad(x, [(0, 0), (struct.shape[1] - x.shape[1], 0), (0, 0)])
