"""Conversion of global ids of slots and blocks to a device's local ids, and reductions over shards.

For functions under `jax.shard_map`. Elsewhere one shard holds everything and ids stay as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from dsv4_jax.parallel.axis_rules import LogicalAxis, mesh_axes


def to_local_ids(numbers: Int[Array, "..."], axis: LogicalAxis, count: int) -> Int[Array, "..."]:
    """Converts global ids of slots or blocks, [...] int32, to this device's ids; others, and -1 for none, become -1.

    `axis` is the logical axis of the ids, as in `axis_rules.RULES`, and `count` the number of ids per device.
    """
    if not (axes := _manual(axis)):
        return numbers
    local = numbers - count * jax.lax.axis_index(axes)
    return jnp.where((local >= 0) & (local < count), local, -1)


def all_reduce_bits(tree: Any, axis: LogicalAxis) -> Any:
    """Broadcasts exact bits from the shard that holds them to all devices; other shards must hold zeros."""
    if not (axes := _manual(axis)):
        return tree

    def total(x):
        if x.dtype == bool:
            return jax.lax.psum(x.astype(jnp.int32), axes) > 0
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        return jax.lax.bitcast_convert_type(jax.lax.psum(bits, axes), x.dtype)

    return jax.tree.map(total, tree)


def is_sharded(axis: LogicalAxis) -> bool:
    """Whether a logical axis is sharded over devices here."""
    return bool(_manual(axis))


def _manual(axis):
    """Returns the manual mesh axes that shard a logical axis."""
    return mesh_axes(axis, jax.sharding.get_abstract_mesh().manual_axes)
