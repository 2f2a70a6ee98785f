"""Checks that cached blocks and snapshots have not changed. For debugging, since it copies them to the host."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.cache.request_rows import RequestRows
from dsv4_jax.host.cache_devices import CacheDevices


class CacheCorruptionError(RuntimeError):
    """Bytes of the cache that must not change have changed; the message names request, layer and block."""


def block_sums(devices: CacheDevices, cache: KVCache, blocks: Sequence[int]) -> list[list[int]]:
    """Returns the checksums of full blocks: for each block, one for each layer of the model."""
    schema = devices.schema
    pools = devices.read_blocks(cache, blocks, len(blocks) * schema.block_tokens)
    leaves = [(schema.groups[name].layers, x) for name, group in pools.items() for x in jax.tree.leaves(group)]
    return [_layer_sums(schema, [(layers, x[:, i]) for layers, x in leaves]) for i in range(len(blocks))]


def snapshot_sums(schema: CacheSchema, rows: RequestRows) -> list[int]:
    """Returns the checksums of a snapshot, one for each layer of the model."""
    rows = jax.device_get(rows)
    last = len(schema.layers) - 1
    states = [(schema.groups[name].layers, group) for name, group in rows.groups.items()]
    return _layer_sums(schema, [(range(last + 1), rows.swa), ([last], rows.streams), *states])


def check_blocks(devices: CacheDevices, cache: KVCache, nodes: Iterable[Any], reader: str) -> None:
    """Compares `CachedBlock`s with the checksums that were taken when they were cached, and skips evicted ones.

    Raises CacheCorruptionError if bytes have changed. The message begins with `reader`, the name of the reader.
    """
    nodes = [node for node in nodes if node.alive and node.sums is not None]
    if not nodes:
        return
    sums = block_sums(devices, cache, [node.block for node in nodes])
    for node, now in zip(nodes, sums, strict=True):
        start = node.length - devices.schema.block_tokens
        what = f"block {node.block} (tokens {start} to {node.length - 1})"
        _check(reader, what, "it was cached", node.sums, now)


def check_snapshot(schema: CacheSchema, node: Any, reader: str) -> None:
    """Compares the snapshot of a `CachedBlock` with its checksums, if it has both; raises like `check_blocks`."""
    if node.snapshot is not None and node.snapshot_sums is not None:
        what = f"the snapshot at {node.length} tokens, behind block {node.block},"
        _check(reader, what, "it was taken", node.snapshot_sums, snapshot_sums(schema, node.snapshot))


def _check(reader, what, since, before, now):
    changed = [layer for layer, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
    if changed:
        raise CacheCorruptionError(
            f"{reader}: {what} has changed in layer {changed[0]} since {since}; layers with changes: {changed}"
        )


def _layer_sums(schema, parts):
    """Returns one checksum for each layer of the model, of parts (numbers of layers, arrays [layers, ...])."""
    sums = [0] * len(schema.layers)
    for layers, tree in parts:
        for array in jax.tree.leaves(tree):
            for layer, row in zip(layers, array, strict=True):
                sums[layer] = zlib.crc32(row.tobytes(), sums[layer])
    return sums
