"""Checks that the blocks and snapshots of a prefix cache have not changed since they were cached.

A check copies the bytes to the host and compares their checksums, so it is meant for debugging. A snapshot holds the
rows of a request's slot at a block boundary, see `PrefixCache`.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from dsv4_jax.cache import CacheSchema, KVCache, RequestRows
from dsv4_jax.host.cache_devices import CacheDevices


class CacheCorruptionError(RuntimeError):
    """Bytes of the prefix cache changed after they were cached; the message names the reader, layer and block."""


def block_sums(devices: CacheDevices, cache: KVCache, blocks: Sequence[int]) -> list[list[int]]:
    """Returns the CRC-32 checksums [block][layer of the model] of full blocks, whose entries it copies to the host."""
    schema = devices.schema
    pools = devices.read_blocks(cache, blocks, len(blocks) * schema.block_tokens)
    return [_layer_sums(schema, jax.tree.map(lambda x, i=i: x[:, i], pools)) for i in range(len(blocks))]


def snapshot_sums(schema: CacheSchema, rows: RequestRows) -> list[int]:
    """Returns the CRC-32 checksums of a snapshot, one for each layer of the model."""
    rows = jax.device_get(rows)
    last = len(schema.layers) - 1
    return _layer_sums(schema, rows.groups, (range(last + 1), rows.swa), ([last], (rows.streams, rows.ngram_ids)))


def check_blocks(devices: CacheDevices, cache: KVCache, nodes: Iterable[Any], reader: str) -> None:
    """Compares blocks of the prefix cache with the checksums that were taken when they were cached.

    Args:
      devices: transfers from the devices that hold the cache.
      cache: the cache; only read.
      nodes: the `CachedBlock` objects to check. Evicted blocks and blocks without checksums are skipped.
      reader: name of the reader of the blocks, such as "slot 3", with which the error's message begins.

    Raises:
      CacheCorruptionError: the bytes of a block have changed.
    """
    nodes = [node for node in nodes if node.alive and node.sums is not None]
    if not nodes:
        return
    sums = block_sums(devices, cache, [node.block for node in nodes])
    for node, new_sums in zip(nodes, sums, strict=True):
        start = node.length - devices.schema.block_tokens
        what = f"block {node.block} (tokens {start} to {node.length - 1})"
        _check(reader, what, "it was cached", node.sums, new_sums)


def check_snapshot(schema: CacheSchema, node: Any, reader: str) -> None:
    """Compares the snapshot of a `CachedBlock` with its checksums. Does nothing if the node has no snapshot or no sums.

    `reader` and the error CacheCorruptionError are as for `check_blocks`.
    """
    if node.snapshot is not None and node.snapshot_sums is not None:
        what = f"the snapshot at {node.length} tokens, behind block {node.block},"
        _check(reader, what, "it was taken", node.snapshot_sums, snapshot_sums(schema, node.snapshot))


def _check(reader, what, since, before, now):
    """Raises CacheCorruptionError if the lists `before` and `now`, a checksum for each layer, differ."""
    changed = [layer for layer, (old, new) in enumerate(zip(before, now, strict=True)) if old != new]
    if changed:
        raise CacheCorruptionError(
            f"{reader}: {what} has changed in layer {changed[0]} since {since}; layers with changes: {changed}"
        )


def _layer_sums(schema, groups, *others):
    """Returns a CRC-32 checksum for each layer of the model.

    `groups` is {name of a pool group: pytree}, and `others` are pairs (layers, pytree). `layers` holds the indices of n
    layers of the model, and the pytree has arrays [n, ...] with a row for each of these layers.
    """
    sums = [0] * len(schema.layers)
    parts = [(schema.groups[name].layers, group) for name, group in groups.items()]
    for layers, tree in (*others, *parts):
        for array in jax.tree.leaves(tree):
            for layer, row in zip(layers, array, strict=True):
                sums[layer] = zlib.crc32(row.tobytes(), sums[layer])
    return sums
