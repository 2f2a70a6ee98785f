"""Frozen dataclasses that are pytrees, such as a kernel's operands, and functions of the leaves of pytrees."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, dataclass_transform

import jax


def static_field(**options):
    """Declares a field of a `pytree_dataclass` that belongs to the structure of the pytree, not to its leaves."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static_field))
def pytree_dataclass[T](cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass, and a pytree whose children are all fields except static fields."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def total_bytes(tree: Any) -> int:
    """Returns the size in bytes of all arrays of a pytree, or of the arrays that `jax.ShapeDtypeStruct` describes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {name: array} of the leaves of a pytree. A name is a path in the tree, such as "swa.nope"."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def leaf_types(tree: Any) -> dict[str, str]:
    """Returns {name: dtype and shape as text, such as "uint8[2, 8]"} of the leaves of a pytree."""
    leaves = named_leaves(tree).items()
    return {name: f"{getattr(x, 'dtype', type(x).__name__)}{list(getattr(x, 'shape', ()))}" for name, x in leaves}


def on_leaves(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], is_wanted: Callable[[Any], bool]
) -> tuple[Callable, list[Any]]:
    """Binds the arguments of a function, except those leaves of the arguments for which `is_wanted` is true.

    Args:
      function: function to bind arguments to.
      args, kwargs: arguments of `function`, which may be pytrees.
      is_wanted: predicate of a leaf. If true, the leaf is not bound.

    Returns:
      (call, wanted). `wanted` is the list of the leaves that are not bound, and `call(*wanted)` computes
      `function(*args, **kwargs)`.
    """
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_wanted)
    places = [i for i, leaf in enumerate(leaves) if is_wanted(leaf)]

    def call(*values):
        merged = list(leaves)
        for i, value in zip(places, values, strict=True):
            merged[i] = value
        args, kwargs = jax.tree.unflatten(structure, merged)
        return function(*args, **kwargs)

    return call, [leaves[i] for i in places]
