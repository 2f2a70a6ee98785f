"""Slots and blocks that are numbered through over the parts of a mesh, where a device holds only its own.

For functions that run on every device, under `jax.shard_map`; elsewhere there is one part, which holds everything.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dsv4_jax.parallel.axis_rules import LogicalAxis, mesh_axes


def to_local_ids(numbers: Int[Array, "..."], axis: LogicalAxis, count: int) -> Int[Array, "..."]:
    """What this device calls the slots or blocks that all parts together call `numbers`; -1 for those of other parts.

    Args:
      numbers: [...] int32; -1 = none.
      axis: the logical axis that they number, as in `axis_rules.RULES`.
      count: how many of them a device holds.
    """
    if not (axes := _manual(axis)):
        return numbers
    own = numbers - count * jax.lax.axis_index(axes)
    return jnp.where((own >= 0) & (own < count), own, -1)


def all_reduce_bits(tree: Any, axis: LogicalAxis) -> Any:
    """The bits that one part has, on all devices, where those of all other parts are zeros."""
    if not (axes := _manual(axis)):
        return tree

    def total(x):
        if x.dtype == bool:
            return jax.lax.psum(x.astype(jnp.int32), axes) > 0
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        return jax.lax.bitcast_convert_type(jax.lax.psum(bits, axes), x.dtype)

    return jax.tree.map(total, tree)


def is_sharded(axis: LogicalAxis) -> bool:
    """Whether other devices have other parts of a dimension."""
    return bool(_manual(axis))


def _manual(axis):
    """The axes of the mesh that cut a logical axis here."""
    return mesh_axes(axis, jax.sharding.get_abstract_mesh().manual_axes)
