"""Checks that cached blocks and snapshots have not changed. For debugging, since it waits for the device."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.cache.checksums import checksum_blocks, checksum_rows
from dsv4_jax.cache.request_rows import RequestRows
from dsv4_jax.host.cache_devices import CacheDevices


class CacheCorruptionError(RuntimeError):
    """Bytes of the cache that must not change have changed; the message names request, layer and block."""


def block_sums(devices: CacheDevices, cache: KVCache, blocks: list[int]) -> np.ndarray:
    """Returns checksums of blocks, [layers, n] uint32."""
    sums = [jax.device_get(checksum_blocks(cache, devices.put(ids))) for _, ids in devices.block_chunks(blocks)]
    return np.concatenate(sums, axis=1)[:, : len(blocks)]


def snapshot_sums(schema: CacheSchema, rows: RequestRows) -> np.ndarray:
    """Returns checksums of a snapshot, [layers] uint32."""
    return jax.device_get(_checksum_rows(schema, rows))


def check_blocks(devices: CacheDevices, cache: KVCache, nodes: Iterable[Any], reader: str) -> None:
    """Compares `CachedBlock`s with the checksums that were taken when they were cached, and skips evicted ones.

    Raises CacheCorruptionError if bytes have changed. The message begins with `reader`, the name of the reader.
    """
    nodes = [node for node in nodes if node.alive and node.sums is not None]
    if not nodes:
        return
    have = block_sums(devices, cache, [node.block for node in nodes])
    for node, sums in zip(nodes, have.T, strict=True):
        if bad := np.flatnonzero(sums != node.sums).tolist():
            start = node.length - devices.schema.block_tokens
            raise CacheCorruptionError(
                f"{reader}: block {node.block} (tokens {start} to {node.length - 1}) "
                f"has changed in layer {bad[0]} since it was cached; layers with changes: {bad}"
            )


def check_snapshot(schema: CacheSchema, node: Any, reader: str) -> None:
    """Compares the snapshot of a `CachedBlock` with its checksums, if it has both; raises like `check_blocks`."""
    if node.snapshot is None or node.snapshot_sums is None:
        return
    if bad := np.flatnonzero(snapshot_sums(schema, node.snapshot) != node.snapshot_sums).tolist():
        raise CacheCorruptionError(
            f"{reader}: the snapshot at {node.length} tokens, behind block {node.block}, has changed in layer {bad[0]} "
            f"since it was taken; layers with changes: {bad}"
        )


_checksum_rows = jax.jit(checksum_rows, static_argnames="schema")
