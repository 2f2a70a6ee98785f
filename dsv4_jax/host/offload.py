"""Moves requests out of the cache into host memory or files, and back.

A request is saved as one safetensors file, see `FileLayout`. The file's metadata name the model, the weights and the
cache format, and hold the numbers that determine the shapes of its arrays.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import CacheSchema, KVCache, PoolGroup, RequestRows, read_request
from dsv4_jax.common.safetensors_header import read_header
from dsv4_jax.common.sizes import readable_bytes
from dsv4_jax.common.summary import Summarized
from dsv4_jax.host.canary import check_blocks
from dsv4_jax.host.file_layout import FileLayout
from dsv4_jax.host.manager import KVCacheManager, TokenIds
from dsv4_jax.host.request_table import RequestState
from dsv4_jax.host.step_order import record_write
from pallas_kernels.runtime.atomic_write import atomic_write
from pallas_kernels.runtime.pytrees import total_bytes


FILE_FORMAT = "dsv4_jax request"
VERSION = "3"
_MAX_NUMBER = 2**30  # maximum of the numbers in a file, with which no axis of an array reaches 2**31
# `identity` hashes these fields of the configuration even if they have default values. Other fields with a default are
# hashed only if they have another value, so that a new field leaves the identities of earlier models as they are.
_ALWAYS_HASHED = frozenset(
    "bos_token_id eos_token_id num_nextn_predict_layers tie_word_embeddings dspark layer compress_rate overlap group "
    "index owner keys key_compressor selection window index_topk".split()
)


@dataclasses.dataclass(frozen=True, repr=False)
class OffloadedRequest(Summarized):
    """A copy of a request in host memory: all its bytes that a later step can read.

    Attributes:
      length: number of tokens of the request.
      min_length: the shortest length that the request can be rewound to.
      rows: rows of the request's slot, as NumPy arrays.
      blocks: {name of a pool group: entries and keys [layers, blocks, entries per block, ...]}, as NumPy arrays.
      identity: properties that a cache must share to take the request, see the function `identity`.
      weights: version of the weights that computed the request's first rows, see `RequestTable.weights`.
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
        return total_bytes((self.rows, self.blocks))

    def _summary(self) -> dict[str, Any]:
        return {"length": self.length, "min_length": self.min_length, "size": readable_bytes(self.nbytes)}


def capture(
    manager: KVCacheManager, cache: KVCache, slot: int, *, key: str = "", length: int | None = None
) -> OffloadedRequest:
    """Copies a request to host memory without ending it. The cache is only read.

    Args:
      manager: the manager that admitted the request.
      cache: the cache after a step.
      slot: slot of the request.
      key: name of the model's weights; `resume` must get the same name.
      length: number of tokens of the copy: all (None), or one less.

    Raises:
      ValueError: as for `offload`, or `length` is neither the request's length nor one less, or the slot never ran the
        newest token, see `KVCacheManager.fork`.
      CacheCorruptionError: as for `offload`.
    """
    manager.check_cache(cache, slot)
    devices = manager.devices
    state = manager.requests.state(slot).shortened(length, slot)
    if not state.length:
        raise ValueError(f"slot {slot} holds no tokens yet: there is nothing to keep")
    check_blocks(devices, cache, state.cached_blocks, f"slot {slot}")
    scalars = devices.put((np.int32(slot), np.int32(state.length), np.int32(state.min_length)))
    rows = jax.device_get(read_request(cache, *scalars))
    blocks = devices.read_blocks(cache, state.blocks[: manager.requests.blocks_for(state.length)], state.length)
    return OffloadedRequest(state.length, state.min_length, rows, blocks, identity(manager.schema, key), state.weights)


def offload(manager: KVCacheManager, cache: KVCache, slot: int) -> tuple[OffloadedRequest, KVCache]:
    """Moves a request to host memory and frees its slot and blocks.

    Args:
      manager: the manager that admitted the request.
      cache: the cache after a step; only read.
      slot: slot of the request.

    Returns:
      (the offloaded request, for `resume` with the default `key`; the same cache).

    Raises:
      RuntimeError: the cache was donated.
      ValueError: the slot is not admitted, its request holds no tokens yet, or the cache belongs to another manager or
        lacks tokens of the request.
      CacheCorruptionError: a `PrefixCache` with `debug` has checksums of the request's blocks, and a block has changed.
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
    """Copies an offloaded request to a free slot and free blocks of the same cache or of another one.

    Another cache must be for the same model and have the same format and `block_tokens`. Its numbers of blocks and
    slots, `max_context` and `max_query_tokens` may differ.

    Args:
      manager: manager of the cache.
      cache: the cache; donated.
      offloaded: result of `offload` or `capture`; it stays valid.
      key: name of the model's weights, as for `capture`.
      num_tokens: number of tokens that the request will hold in the end; None = the request's length. A shard with room
        for them is preferred.

    Returns:
      (the slot, the cache).

    Raises:
      RuntimeError: the cache was donated.
      ValueError: the request belongs to another model, key, format or `block_tokens`, it is longer than `max_context`,
        or the cache belongs to another manager.
      CacheFullError: no slot is free, or too few blocks are free.
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
        new_cache = devices.write_request(cache, slot, length, blocks, devices.put(rows), blocks, offloaded.blocks)
        # If this cache's rings have fewer spare rows than those of the request's earlier cache, the request can be
        # rewound less far.
        min_length = max(offloaded.min_length, length - (schema.max_query_tokens - 1))
        state = RequestState(length, min_length, min_length, blocks, weights=offloaded.weights)
        record_write(table, cache, new_cache, {slot: state})
    return slot, new_cache


def identity(schema: CacheSchema, key: str) -> dict[str, str]:
    """Returns the properties of a cache that a request's bytes depend on, as {name: value}.

    The number of blocks, the number of slots, `max_context` and `max_query_tokens` are not among these properties.

    Args:
      schema: geometry of the cache.
      key: name of the model's weights.
    """
    return {
        "key": key,
        "config": hashlib.sha256(repr(_hashed(schema.config)).encode()).hexdigest(),
        "kv_format": repr(schema.kv_format),
        "dtype": schema.dtype.name,
        "block_tokens": str(schema.block_tokens),
    }


def _hashed(value):
    """Returns a dataclass as a dictionary of the fields that are hashed; other values as they are."""
    if isinstance(value, tuple):
        return tuple(_hashed(item) for item in value)
    if not dataclasses.is_dataclass(value):
        return value
    return {
        field.name: _hashed(content)
        for field in dataclasses.fields(value)
        if (content := getattr(value, field.name)) != field.default or field.name in _ALWAYS_HASHED
    }


def check_identity(schema: CacheSchema, key: str, have: Mapping[str, str]) -> None:
    """Raises ValueError if `have`, the `identity` of a request, differs from the identity of this cache."""
    for name, want in identity(schema, key).items():
        if have.get(name) != want:
            raise ValueError(f"the request was made with {name}={have.get(name)!r}, this cache has {name}={want!r}")


@functools.lru_cache
def rows_struct(schema: CacheSchema, *, boundary: bool = False) -> RequestRows:
    """Returns the shapes and dtypes of `OffloadedRequest.rows` for a cache, as `jax.ShapeDtypeStruct` objects.

    With `boundary`, returns those of a snapshot, see `read_request`.
    """
    return jax.eval_shape(lambda cache: read_request(cache, 0, 0, 0, boundary=boundary), KVCache.abstract(schema))


def blocks_struct(schema: CacheSchema, n: int) -> dict[str, PoolGroup]:
    """Returns the shapes and dtypes of `OffloadedRequest.blocks` with `n` blocks, as `jax.ShapeDtypeStruct` objects."""
    return KVCache.abstract(dataclasses.replace(schema, num_blocks=n)).paged


def _fit(x, struct):
    """Returns `x`, [layers, n, width], with the n of `struct`: drops each layer's first rows, or puts zeros before."""
    x = x[:, max(0, x.shape[1] - struct.shape[1]) :]
    return np.pad(x, [(0, 0), (struct.shape[1] - x.shape[1], 0), (0, 0)])


# --- files ---


def save_request(
    path: str | Path, manager: KVCacheManager, cache: KVCache, slot: int, tokens: TokenIds, *, key: str = ""
) -> None:
    """Writes a request to one safetensors file without ending it. The file appears whole or not at all.

    Args:
      path: path of the file; an existing file is replaced.
      manager: manager of the cache.
      cache: the cache after a step; only read.
      slot: slot of the request.
      tokens: [n] ids of all tokens that the request holds.
      key: name of the model's weights; `load_request` must get the same name.

    Raises:
      TypeError, ValueError: the ids are bad, the slot is not admitted, or the request does not hold `n` tokens.
      RuntimeError, ValueError, CacheCorruptionError: as for `offload`.
      OSError: the file cannot be written.
    """
    ids = manager.check_ids(tokens, "tokens")
    if len(ids) != (length := manager.length(slot)):
        raise ValueError(f"tokens has {len(ids)} ids, slot {slot} holds {length} tokens")
    request = capture(manager, cache, slot, key=key)
    layout = _file_layout(manager.schema, key, length, request.min_length)
    with atomic_write(Path(path)) as file:
        file.writelines(layout.pack([b""], {"rows": request.rows, "blocks": request.blocks, "tokens": ids[None]}))


def load_request(
    path: str | Path, manager: KVCacheManager, cache: KVCache, *, key: str = ""
) -> tuple[int, np.ndarray, KVCache]:
    """Reads a request from a file of `save_request` into a free slot and free blocks.

    Args:
      path: path of the file.
      manager: manager of the cache. The request may come from a cache with other numbers of blocks and slots, another
        `max_context` and another `max_query_tokens`.
      cache: the cache; donated.
      key: name of the model's weights, as for `save_request`.

    Returns:
      (the slot, [n] int32 ids of the tokens that the request holds, the cache).

    Raises:
      OSError: the file cannot be read.
      RuntimeError: the cache was donated.
      ValueError: the file is of another kind or version, is damaged or edited, belongs to another model, key, format or
        `block_tokens`, or holds more than `max_context` tokens. Nothing was changed.
      CacheFullError: no slot is free, or too few blocks are free.
    """
    try:
        tokens, request = _parse(Path(path), manager, key)
        slot, cache = resume(manager, cache, request, key=key)
    except ValueError as error:
        error.add_note(f"while loading {path}")
        raise
    return slot, tokens, cache


def _parse(path, manager, key):
    """Returns (token ids, `OffloadedRequest`) of a file. Raises ValueError if this cache cannot take the request."""
    try:
        metadata = read_header(path)[1]
    except ValueError as error:
        raise ValueError("this is no safetensors file, or it is damaged") from error
    if metadata.get("format") != FILE_FORMAT:
        raise ValueError("this is no saved request: its metadata do not say so")
    if (version := metadata.get("version")) != VERSION:
        raise ValueError(f"the file has version {version!r}, this package reads version {VERSION!r}")
    check_identity(manager.schema, key, metadata)

    def number(name, least, most):
        text = str(metadata.get(name))
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
            raise ValueError(f"{name} is {text!r}, it must be from {least} to {most}")
        return int(text)

    length = number("length", 1, _MAX_NUMBER)
    max_query_tokens = number("max_query_tokens", 1, _MAX_NUMBER)
    min_length = number("min_length", max(0, length - (max_query_tokens - 1)), length)
    schema = dataclasses.replace(manager.schema, max_query_tokens=max_query_tokens)
    layout = _file_layout(schema, key, length, min_length)
    content = np.fromfile(path, np.uint8) if path.stat().st_size == layout.nbytes else None
    if content is None or not layout.is_valid(b"", content):
        raise ValueError("the file is damaged or was edited: its header or its SHA-256 is not what it was written with")
    arrays = layout.unpack(content[None])
    tokens = manager.check_ids(arrays.pop("tokens")[0], "tokens")
    weights = manager.requests.weights
    return tokens, OffloadedRequest(length, min_length, **arrays, identity=identity(schema, key), weights=weights)


def _file_layout(schema, key, length, min_length):
    """Returns the layout of the file of a request of `length` tokens."""
    metadata = {
        "format": FILE_FORMAT,
        "version": VERSION,
        **identity(schema, key),
        "length": str(length),
        "min_length": str(min_length),
        "max_query_tokens": str(schema.max_query_tokens),
    }
    struct = {
        "rows": rows_struct(schema),
        "blocks": blocks_struct(schema, -(-length // schema.block_tokens)),
        "tokens": jax.ShapeDtypeStruct((1, length), np.int32),
    }
    return FileLayout("request", struct, metadata)
