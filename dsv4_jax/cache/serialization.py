"""Serialization of a cache by Flax: `flax.serialization.to_bytes(cache)` and `from_bytes(cache, data)`."""

import dataclasses
from typing import Any

import jax
from flax import serialization

from dsv4_jax.cache.pools import CompressorState, KVCache, PoolGroup
from dsv4_jax.quant import IndexRows, Rows


def _parts(tree: Any) -> dict[str, Any]:
    """Returns the fields that hold the cache's contents; all others come from the target."""
    fields = (field.name for field in dataclasses.fields(tree) if not field.metadata.get("static"))
    others = "mailboxes", "expert_counts"
    return {name: part for name in fields if name not in others and (part := getattr(tree, name)) is not None}


def _to_state(tree):
    return {name: serialization.to_state_dict(part) for name, part in _parts(tree).items()}


def _from_state(tree, state):
    parts = _parts(tree)
    if parts.keys() != state.keys():
        raise ValueError(f"the stored cache has the parts {sorted(state)} where this one has {sorted(parts)}")
    return dataclasses.replace(
        tree, **{name: serialization.from_state_dict(part, state[name], name=name) for name, part in parts.items()}
    )


def _cache_from_state(cache, state):
    restored = _from_state(cache, state)
    for (path, mine), stored in zip(jax.tree.leaves_with_path(cache), jax.tree.leaves(restored), strict=True):
        if (mine.shape, mine.dtype) != (stored.shape, stored.dtype):
            raise ValueError(
                f"the stored cache has {stored.dtype}{list(stored.shape)} as {jax.tree_util.keystr(path)}, this one "
                f"{mine.dtype}{list(mine.shape)}: it is of another geometry or format"
            )
    return restored


for _type in (PoolGroup, CompressorState, Rows, IndexRows):
    serialization.register_serialization_state(_type, _to_state, _from_state)
serialization.register_serialization_state(KVCache, _to_state, _cache_from_state)
