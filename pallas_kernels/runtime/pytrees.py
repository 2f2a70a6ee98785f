"""Pytrees of arrays: frozen dataclasses, such as the operands of a kernel, and functions of their leaves."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, dataclass_transform

import jax


def static_field(**options):
    """Declares a field that belongs to the structure of a pytree and not to its leaves."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static_field))
def pytree_dataclass[T](cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass and a pytree of its fields, except those that are static."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def on_leaves(
    function: Callable, args: Sequence[Any], kwargs: Mapping[str, Any], is_wanted: Callable[[Any], bool]
) -> tuple[Callable, list[Any]]:
    """Returns the function of only those leaves of its arguments that are wanted, and these leaves."""
    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_wanted)
    places = [i for i, leaf in enumerate(leaves) if is_wanted(leaf)]

    def call(*values):
        merged = list(leaves)
        for i, value in zip(places, values, strict=True):
            merged[i] = value
        args, kwargs = jax.tree.unflatten(structure, merged)
        return function(*args, **kwargs)

    return call, [leaves[i] for i in places]
