"""Sums and joins over the devices that cut a model between them."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dsv4_jax.quant import round_to


MODEL_AXIS = "model"


def all_reduce(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The sum of what each device of the "model" axis has; x itself outside of `jax.shard_map` over such a mesh.

    The sum is taken in float32 and rounded once. All devices get the same bits.

    Args:
      x: [...] of each device, any floating dtype.

    Returns:
      [...] in x's dtype.
    """
    return round_to(jax.lax.psum(x.astype(jnp.float32), MODEL_AXIS), x.dtype) if _is_cut() else x


def all_gather(x: Float[Array, "... n"]) -> Float[Array, "... m"]:
    """What the devices of the "model" axis have, side by side on the last axis; x itself where there is no such axis.

    Args:
      x: [..., n] of each device.

    Returns:
      [..., devices * n].
    """
    return jax.lax.all_gather(x, MODEL_AXIS, axis=x.ndim - 1, tiled=True) if _is_cut() else x


def model_index() -> jax.Array | int:
    """Which device of the "model" axis this one is; 0 where there is no such axis."""
    return jax.lax.axis_index(MODEL_AXIS) if _is_cut() else 0


def _is_cut():
    return MODEL_AXIS in jax.sharding.get_abstract_mesh().manual_axes
