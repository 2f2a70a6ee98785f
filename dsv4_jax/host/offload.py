"""Moves requests out of the cache into host memory or files, and back.

A request is saved as one safetensors file. Its metadata say which model, weights and cache format the bytes are for.
The metadata's `sha256` is the hash of the whole file, computed with the digit 0 in place of the hash's 64 digits.
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

from dsv4_jax.cache import CacheSchema, KVCache, PoolGroup
from dsv4_jax.cache.request_rows import RequestRows, read_request
from dsv4_jax.cache.serialization import named_leaves
from dsv4_jax.common.safetensors_header import DTYPES, TensorHeader, read_header, write_header
from dsv4_jax.common.sizes import readable_bytes
from dsv4_jax.common.summary import Summarized, Summary
from dsv4_jax.host.canary import check_blocks
from dsv4_jax.host.manager import KVCacheManager, TokenIds
from dsv4_jax.host.request_table import RequestState
from dsv4_jax.host.step_order import record_write
from pallas_kernels.runtime.atomic_write import atomic_write


FILE_FORMAT = "dsv4_jax request"
VERSION = "2"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_DIGEST = "0" * 64
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
        return sum(x.nbytes for x in jax.tree.leaves((self.rows, self.blocks)))

    def _summary(self) -> Summary:
        words = f"{self.length} tokens", readable_bytes(self.nbytes)
        return Summary(words, {"can be rewound to": f"{self.min_length} tokens"})


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
    numbers = devices.put((np.int32(slot), np.int32(state.length), np.int32(state.min_length)))
    rows = jax.device_get(read_request(cache, *numbers))
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
        new = devices.write_request(cache, slot, length, blocks, devices.put(rows), blocks, offloaded.blocks)
        # If this cache's rings have fewer spare rows than the request's earlier cache, it can be rewound less far.
        min_length = max(offloaded.min_length, length - (schema.max_query_tokens - 1))
        state = RequestState(length, min_length, min_length, blocks, weights=offloaded.weights)
        record_write(table, cache, new, {slot: state})
    return slot, new


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
    """Returns x [layers, n, width] with the shape of `struct`: drops its first rows, or puts zeros before them."""
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
    metadata = {"format": FILE_FORMAT, "version": VERSION, "sha256": _NO_DIGEST}
    metadata |= {"min_length": str(request.min_length), **request.identity}
    tensors = named_leaves(request.rows, request.blocks) | {"tokens": ids}
    header = write_header((TensorHeader(k, DTYPE_NAMES[x.dtype], x.shape) for k, x in tensors.items()), metadata)
    blob = b"".join([header, *(x.tobytes() for x in tensors.values())])
    digest = hashlib.sha256(blob).hexdigest()
    with atomic_write(Path(path)) as file:
        file.write(blob.replace(_NO_DIGEST.encode(), digest.encode(), 1))


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
    blob = path.read_bytes()
    try:
        stored, metadata = read_header(path)
    except ValueError as error:
        raise ValueError("this is no safetensors file, or it is damaged") from error
    if metadata.get("format") != FILE_FORMAT:
        raise ValueError("this is no saved request: its metadata do not say so")
    if (version := metadata.get("version")) != VERSION:
        raise ValueError(f"the file has version {version!r}, this package reads version {VERSION!r}")
    digest = str(metadata.get("sha256")).encode()
    if hashlib.sha256(blob.replace(digest, _NO_DIGEST.encode(), 1)).hexdigest().encode() != digest:
        raise ValueError("the file is damaged or was edited: its SHA-256 is not the one it was written with")
    schema = manager.schema
    check_identity(schema, key, metadata)
    content = np.frombuffer(blob, np.uint8)
    tensors = {
        name: content[byte_range].view(DTYPES[header.dtype]).reshape(header.shape)
        for name, (header, byte_range) in stored.items()
    }
    try:
        tokens = manager.check_ids(tensors.pop("tokens", np.zeros((), np.int32)), "tokens")
    except TypeError as error:
        raise ValueError(f"the file's {error}") from None
    rows, blocks, spare = _read_tensors(schema, manager.requests.blocks_for(len(tokens)), tensors)
    min_length = str(metadata.get("min_length"))
    lowest = max(0, len(tokens) - spare)
    if not re.fullmatch("[0-9]{1,10}", min_length) or not lowest <= int(min_length) <= len(tokens):
        raise ValueError(
            f"min_length is {min_length!r}, it must be from {lowest} to {len(tokens)}: its rings reach no further"
        )
    properties = identity(schema, key)
    return tokens, OffloadedRequest(len(tokens), int(min_length), rows, blocks, properties, manager.requests.weights)


def _read_tensors(schema, num_blocks, tensors):
    """Returns (`OffloadedRequest.rows`, `OffloadedRequest.blocks`, number of spare rows in each ring of the file).

    Axis 1 of a ring holds the rows that a step reads, and spare rows. The file's rings may have more or fewer spare
    rows than the rings of this cache. `tensors` is {name: array}.

    Raises:
      ValueError: a name, shape or dtype does not fit this cache, or the rings' numbers of spare rows differ.
    """
    structs = rows_struct(schema), blocks_struct(schema, num_blocks)
    rings = named_leaves(structs[0])
    expected = named_leaves(*structs)
    if expected.keys() != tensors.keys():
        raise ValueError(f"the file has other tensors than this cache: {sorted(expected.keys() ^ tensors.keys())}")
    spares = set()
    for name, struct in expected.items():
        x = tensors[name]
        shape = list(struct.shape)
        if name in rings and x.ndim > 1:
            num_read = shape[1] - (schema.max_query_tokens - 1)
            spares.add(x.shape[1] - num_read)
            shape[1] = max(x.shape[1], num_read)
        if (x.dtype, list(x.shape)) != (struct.dtype, shape):
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}, this cache has {struct.dtype} {shape}")
    if len(spares) != 1:
        raise ValueError(f"the file's rings have {sorted(spares)} spare rows: all must have the same number")
    return *jax.tree.unflatten(jax.tree.structure(structs), [tensors[name] for name in expected]), spares.pop()
