"""Rotary position embedding (RoPE) of the last channels, in interleaved pairs."""

import operator

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsv4_jax.quant import round_to
from pallas_kernels.formats.exact_math import cos_sin, product


def apply_rope(
    x: Float[Array, "T ... D"], positions: Int[Array, "T"], inv_freq: Float[Array, "P"], *, inverse: bool = False
) -> Float[Array, "T ... D"]:
    """Rotates the last `2 * P` channels of `x` by `position * inv_freq`.

    Follows the released model (dsv4.md 2.2): pairs are `(x[2i], x[2i+1])`, the computation is in float32, and results
    are rounded once, to x's dtype.

    Args:
      x: [T, ..., D] rows, D >= 2 * P; channels before the last 2 * P pass through unchanged.
      positions: [T] absolute positions in tokens, not negative.
      inv_freq: [P] radians per token.
      inverse: rotate by the negative angle, which undoes a rotation at the same position.
    """
    angle = _angles(x, positions, inv_freq)
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    return _rotate(x, cos, -sin if inverse else sin, operator.mul)


def apply_rope_deterministic(
    x: Float[Array, "T ... D"], positions: Int[Array, "T"], inv_freq: Float[Array, "P"]
) -> Float[Array, "T ... D"]:
    """Computes `apply_rope` with the same bits on every backend, whose cos and sin differ."""
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
