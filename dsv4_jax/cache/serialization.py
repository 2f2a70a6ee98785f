"""Registers `KVCache` for `flax.serialization.to_bytes(cache)` and `flax.serialization.from_bytes(cache, data)`."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import serialization

from dsv4_jax.cache.pools import KVCache


def named_leaves(*trees: Any) -> dict[str, Any]:
    """Returns {name: array} of the leaves of pytrees. A name is a path in its tree, such as "swa.nope"."""
    leaves = jax.tree.leaves_with_path(trees)
    return {jax.tree_util.keystr(path[1:], simple=True, separator="."): leaf for path, leaf in leaves}


def leaf_types(tree: Any) -> dict[str, str]:
    """Returns {name: dtype and shape as text, such as "uint8[2, 8]"} of the leaves of a pytree."""
    leaves = named_leaves(tree).items()
    return {name: f"{getattr(x, 'dtype', type(x).__name__)}{list(np.shape(x))}" for name, x in leaves}


def _to_state(cache):
    """Returns {name: array} of the cache without `mailboxes` and `expert_counts`, which are not stored."""
    return named_leaves(dataclasses.replace(cache, mailboxes=None, expert_counts=None))


def _from_state(cache, state):
    """Returns the cache with the arrays of `state`. Raises ValueError if an array is missing, extra or does not fit."""
    types_of_stored = leaf_types(state)
    types_of_mine = leaf_types(_to_state(cache))
    for name in sorted(types_of_stored | types_of_mine):
        stored, mine = (types.get(name, "nothing") for types in (types_of_stored, types_of_mine))
        if stored != mine:
            raise ValueError(
                f"the stored cache has {stored} as {name}, this one {mine}: it is of another geometry or format"
            )
    restored = [state.get(name, leaf) for name, leaf in named_leaves(cache).items()]
    return jax.tree.unflatten(jax.tree.structure(cache), restored)


serialization.register_serialization_state(KVCache, _to_state, _from_state)
