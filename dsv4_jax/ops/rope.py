"""Rotary position embedding (RoPE) of a row's last channels, in interleaved pairs."""

import operator

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.quant import round_to
from pallas_kernels.formats.exact_math import cos_sin, product


def apply_rope(
    x: Float[Array, "T ... D"], positions: Int[Array, "T"], inv_freq: Float[Array, "P"], *, inverse: bool = False
) -> Float[Array, "T ... D"]:
    """Rotates pairs of adjacent channels, the last `2 * P` channels of `x`, by the angles `position * inv_freq`.

    The rotation is computed in float32 and rounded once, as in the released model (docs/dsv4.md 2.2).

    Args:
      x: [T, ..., D] rows, D >= 2 * P. Channels before the last 2 * P are returned unchanged.
      positions: [T] int32 absolute positions in tokens, not negative.
      inv_freq: [P] float32, radians per token; one for each pair of channels.
      inverse: whether to rotate by the negative angles, which undoes a rotation at the same position.

    Returns:
      [T, ..., D] in the dtype of x.
    """
    angle = _angles(x, positions, inv_freq)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    return _rotate(x, cos, -sin if inverse else sin, operator.mul)


def apply_rope_deterministic(
    x: Float[Array, "T ... D"], positions: Int[Array, "T"], inv_freq: Float[Array, "P"]
) -> Float[Array, "T ... D"]:
    """Computes `apply_rope` with the same bits on every backend, since it does not use the backend's cos and sin."""
    cos, sin = cos_sin(_angles(x, positions, inv_freq))
    return _rotate(x, cos, sin, product)


def _angles(x, positions, inv_freq):
    angle = positions.astype(jnp.float32)[:, None] * inv_freq[None, :]
    return angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), inv_freq.shape[0])


def _rotate(x, cos, sin, multiply):
    pairs = cos.shape[-1]
    head, tail = jnp.split(x, [x.shape[-1] - 2 * pairs], axis=-1)
    tail = tail.astype(jnp.float32).reshape(*tail.shape[:-1], pairs, 2)
    even = tail[..., 0]
    odd = tail[..., 1]
    rotated_even = multiply(even, cos) - multiply(odd, sin)
    rotated_odd = multiply(even, sin) + multiply(odd, cos)
    rotated = jnp.stack([rotated_even, rotated_odd], axis=-1).reshape(*x.shape[:-1], 2 * pairs)
    return jnp.concatenate([head, round_to(rotated, x.dtype)], axis=-1)
