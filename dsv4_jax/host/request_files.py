"""Saves each request to a safetensors file and loads it if every byte is as it was written.

The metadata describe the bytes. `sha256` is the hash of the whole file, with zeros in place of the hash itself.
"""

import hashlib
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.common.safetensors_header import DTYPES, TensorHeader, read_header, write_header
from dsv4_jax.host.manager import KVCacheManager, TokenIds
from dsv4_jax.host.offload import (
    OffloadedRequest,
    blocks_struct,
    capture,
    check_identity,
    identity,
    resume,
    rows_struct,
)
from pallas_kernels.runtime.atomic_write import atomic_write


FORMAT = "dsv4_jax request"
VERSION = "2"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NO_DIGEST = "0" * 64


def save_request(
    path: str | Path, manager: KVCacheManager, cache: KVCache, slot: int, tokens: TokenIds, *, key: str = ""
) -> None:
    """Writes a request to one safetensors file without ending it. The file appears whole or not at all.

    Args:
      path: path of the file; an existing file is replaced.
      manager: manager of the cache.
      cache: the cache after a step; only read.
      slot: slot of the request.
      tokens: [n] ids of all its tokens.
      key: name of the model's weights; `load_request` must get the same.

    Raises:
      TypeError, ValueError: the slot is not admitted, it holds no tokens, or their number differs from `tokens`.
    """
    ids = manager.check_ids(tokens, "tokens")
    if len(ids) != (length := manager.length(slot)):
        raise ValueError(f"tokens has {len(ids)} ids, slot {slot} holds {length} tokens")
    request = capture(manager, cache, slot, key=key)
    metadata = {"format": FORMAT, "version": VERSION, "sha256": _NO_DIGEST}
    metadata |= {"min_length": str(request.min_length), **request.identity}
    tensors = named_leaves((request.rows, request.blocks)) | {"tokens": ids}
    header = write_header((TensorHeader(k, DTYPE_NAMES[x.dtype], x.shape) for k, x in tensors.items()), metadata)
    blob = b"".join([header, *(x.tobytes() for x in tensors.values())])
    digest = hashlib.sha256(blob).hexdigest()
    with atomic_write(Path(path)) as file:
        file.write(blob.replace(_NO_DIGEST.encode(), digest.encode(), 1))


def load_request(
    path: str | Path, manager: KVCacheManager, cache: KVCache, *, key: str = ""
) -> tuple[int, np.ndarray, KVCache]:
    """Reads a file of `save_request` into any free slot and blocks.

    Args:
      path: path of the file.
      manager: manager of the cache. Its sizes may differ from the writer's: `max_query_tokens`, blocks and slots.
      cache: the cache; donated.
      key: name of the model's weights.

    Returns:
      (the slot, tokens [n] int32, the cache): the request continues after its last token.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is of another kind or version, is damaged or edited, belongs to another model, format or
        geometry, or holds more than `max_context` tokens. Nothing was changed.
      CacheFullError: no slot is free, or too few blocks.
    """
    try:
        tokens, request = _parse(Path(path), manager, key)
        slot, cache = resume(manager, cache, request, key=key)
    except ValueError as error:
        error.add_note(f"while loading {path}")
        raise
    return slot, tokens, cache


def _parse(path, manager, key):
    blob = path.read_bytes()
    try:
        stored, metadata = read_header(path)
    except ValueError as error:
        raise ValueError("this is no safetensors file, or it is damaged") from error
    if metadata.get("format") != FORMAT:
        raise ValueError("this is no saved request: its metadata do not say so")
    if (version := metadata.get("version")) != VERSION:
        raise ValueError(f"the file has version {version!r}, this package reads version {VERSION!r}")
    digest = str(metadata.get("sha256")).encode()
    if hashlib.sha256(blob.replace(digest, _NO_DIGEST.encode(), 1)).hexdigest().encode() != digest:
        raise ValueError("the file is damaged or was edited: its SHA-256 is not the one it was written with")
    schema = manager.schema
    check_identity(schema, key, metadata)
    content = np.frombuffer(blob, np.uint8)
    tensors = {name: content[place].view(DTYPES[x.dtype]).reshape(x.shape) for name, (x, place) in stored.items()}
    tokens = tensors.pop("tokens", np.zeros((), np.int32))
    if tokens.dtype != np.int32 or tokens.ndim != 1:
        raise ValueError(f"tokens must be int32 [n], the file has {tokens.dtype} {list(tokens.shape)}")
    tokens = manager.check_ids(tokens, "tokens")
    rows, blocks, spare = _read_tensors(schema, manager.requests.blocks_for(len(tokens)), tensors)
    text = str(metadata.get("min_length"))
    least = max(0, len(tokens) - spare)
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= len(tokens):
        raise ValueError(
            f"min_length is {text!r}, it must be from {least} to {len(tokens)}: its rings reach no further"
        )
    properties = identity(schema, key)
    return tokens, OffloadedRequest(len(tokens), int(text), rows, blocks, properties, manager.requests.weights)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {name: array} of a tuple of pytrees, with names such as "swa.nope"."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path[1:], simple=True, separator="."): leaf for path, leaf in leaves}


def _read_tensors(schema, num_blocks, tensors):
    """Returns (rows, blocks, number of spare ring rows) from tensors by name.

    Rings may have another number of rows (axis 1) than this cache's: the rows that a step reads, and spare ones.
    """
    structs = rows_struct(schema), blocks_struct(schema, num_blocks)
    rings = named_leaves(structs[:1])
    want = named_leaves(structs)
    if want.keys() != tensors.keys():
        raise ValueError(f"the file has other tensors than this cache: {sorted(want.keys() ^ tensors.keys())}")
    spares = set()
    for name, struct in want.items():
        x = tensors[name]
        shape = list(struct.shape)
        if name in rings and x.ndim > 1:
            read = shape[1] - (schema.max_query_tokens - 1)
            spares.add(x.shape[1] - read)
            shape[1] = max(x.shape[1], read)
        if (x.dtype, list(x.shape)) != (struct.dtype, shape):
            raise ValueError(f"{name} is {x.dtype} {list(x.shape)}, this cache has {struct.dtype} {shape}")
    if len(spares) != 1:
        raise ValueError(f"the file's rings have {sorted(spares)} spare rows: all must have the same number")
    return *jax.tree.unflatten(jax.tree.structure(structs), [tensors[name] for name in want]), spares.pop()
