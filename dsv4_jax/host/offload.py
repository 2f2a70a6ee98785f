"""Requests outside the cache: in host memory and in files."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from dsv4_jax.cache import KVCache
from dsv4_jax.cache.requests import RequestRows
from dsv4_jax.host.manager import KVCacheManager, TokenIds


@dataclasses.dataclass(frozen=True)
class OffloadedRequest:
    """All live bytes of a request, in host memory.

    Attributes:
      length: tokens it holds.
      floor: the shortest length it can be rewound to for free.
      rows: what its slot held, as NumPy arrays.
      blocks: for "csa" and "hca" a PagedKVPool [layers, blocks, entries a block, ...] of NumPy arrays, in order.
      identity: what must agree for it to be resumed.
    """

    length: int
    floor: int
    rows: RequestRows
    blocks: dict[str, Any]
    identity: dict[str, str]


def offload(manager: KVCacheManager, cache: KVCache, slot: int) -> tuple[OffloadedRequest, KVCache]:
    """Moves a request to host memory; its slot and blocks are free."""
    raise NotImplementedError


def resume(manager: KVCacheManager, cache: KVCache, offloaded: OffloadedRequest) -> tuple[int, KVCache]:
    """Brings an offloaded request back, into any free slot and blocks: (slot, cache); the cache is donated."""
    raise NotImplementedError


def save_request(
    path: str | Path, manager: KVCacheManager, cache: KVCache, slot: int, tokens: TokenIds, *, key: str = ""
) -> None:
    """Writes a request to one safetensors file; it goes on. `key` names the model's weights."""
    raise NotImplementedError


def load_request(
    path: str | Path, manager: KVCacheManager, cache: KVCache, *, key: str = ""
) -> tuple[int, np.ndarray, KVCache]:
    """Reads what `save_request` wrote: (slot, tokens [n] int32, cache); the cache is donated."""
    raise NotImplementedError
