"""Conversion of global ids of slots and blocks to a device's local ids, and reductions over shards.

The functions are for code under `jax.shard_map`. In other code one shard holds everything: ids and arrays are returned
as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dsv4_jax.parallel.axis_rules import LogicalAxis, mesh_axes


def to_local_ids(numbers: Int[Array, "..."], axis: LogicalAxis, count: int) -> Int[Array, "..."]:
    """Converts global ids of slots or blocks to local ids, which begin at 0 on each device.

    Args:
      numbers: [...] int32 global ids; -1 = none.
      axis: logical axis of the ids, as in `axis_rules.RULES`, such as "slots".
      count: number of ids per device.

    Returns:
      [...] int32 local ids; -1 for ids of other devices and for -1.
    """
    if not (axes := _manual(axis)):
        return numbers
    local = numbers - count * jax.lax.axis_index(axes)
    return jnp.where((local >= 0) & (local < count), local, -1)


def all_reduce_bits(tree: Any, axis: LogicalAxis) -> Any:
    """Adds up the bits of arrays over shards, as integers.

    If only one shard holds a value and the others hold zeros in its place, all devices get this value bit for bit.

    Args:
      tree: pytree of arrays. For each element, all shards but one must hold zeros.
      axis: logical axis of the shards, as in `axis_rules.RULES`.

    Returns:
      The same pytree with the values on all devices.
    """
    if not (axes := _manual(axis)):
        return tree

    def total(x):
        """Returns the sum of the bits of one array."""
        return jax.lax.psum(x.view(f"uint{8 * x.dtype.itemsize}"), axes).view(x.dtype)

    return jax.tree.map(total, tree)


def is_sharded(axis: LogicalAxis) -> bool:
    """Returns whether a logical axis is sharded over devices by the `jax.shard_map` that is being traced."""
    return bool(_manual(axis))


def _manual(axis):
    """Returns the mesh axes that shard a logical axis and over which `jax.shard_map` maps ("manual" axes)."""
    return mesh_axes(axis, jax.sharding.get_abstract_mesh().manual_axes)
