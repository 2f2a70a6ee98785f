"""Rotary position embedding on the last channels, interleaved pairs."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.quant import round_to
from pallas_kernels.formats.exact_math import cos_sin, product


def apply_rope(
    x: Float[Array, "T ... D"],
    positions: Int[Array, "T"],
    inv_freq: Float[Array, "P"],
    *,
    inverse: bool = False,
) -> Float[Array, "T ... D"]:
    """Rotates the last `2 * P` channels of `x` by `position * inv_freq`.

    The released model's convention (dsv4.md 2.2): pairs are `(x[2i], x[2i+1])`, the angle is the float32 product of
    position and frequency, maths in float32, one rounding to `x.dtype` at the end.

    Args:
      x: [T, ..., D] rows, D >= 2 * P; channels before the last 2 * P pass through unchanged.
      positions: [T] absolute positions in tokens, not negative.
      inv_freq: [P] radians per token.
      inverse: rotate by the negative angle (undoes a rotation at the same position).

    Returns:
      [T, ..., D] in `x.dtype`.
    """
    pairs = inv_freq.shape[0]
    angle = positions.astype(jnp.float32)[:, None] * inv_freq[None, :]
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), pairs)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if inverse:
        sin = -sin
    head, tail = jnp.split(x, [x.shape[-1] - 2 * pairs], axis=-1)
    tail = tail.astype(jnp.float32).reshape(*tail.shape[:-1], pairs, 2)
    even, odd = tail[..., 0], tail[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([head, round_to(turned.reshape(*x.shape[:-1], 2 * pairs), x.dtype)], axis=-1)


def apply_rope_deterministic(
    x: Float[Array, "T ... D"], positions: Int[Array, "T"], inv_freq: Float[Array, "P"]
) -> Float[Array, "T ... D"]:
    """`apply_rope` in arithmetic that is the same everywhere (cos and sin of the backends are not)."""
    pairs = inv_freq.shape[0]
    head, tail = jnp.split(x, [x.shape[-1] - 2 * pairs], axis=-1)
    angle = positions.astype(jnp.float32)[:, None] * inv_freq[None, :]
    cos, sin = cos_sin(angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), pairs))
    tail = tail.astype(jnp.float32).reshape(*tail.shape[:-1], pairs, 2)
    even, odd = tail[..., 0], tail[..., 1]
    turned = jnp.stack([product(even, cos) - product(odd, sin), product(odd, cos) + product(even, sin)], axis=-1)
    return jnp.concatenate([head, round_to(turned.reshape(*x.shape[:-1], 2 * pairs), x.dtype)], axis=-1)


__all__ = ["apply_rope", "apply_rope_deterministic"]
