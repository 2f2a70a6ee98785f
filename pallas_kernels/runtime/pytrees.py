"""Frozen dataclasses that are pytrees, such as the operands of a kernel."""

import dataclasses
from typing import Any, dataclass_transform

import jax


def static_field(**options: Any) -> Any:
    """Declares a field that belongs to the structure of a pytree and not to its leaves."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static_field))
def pytree_dataclass[T](cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass and a pytree of its fields, except those that are static."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
