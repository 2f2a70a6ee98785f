"""Rotary position embedding (RoPE) of a row's last channels, in interleaved pairs."""

import operator

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
    deterministic: bool = False,
) -> Float[Array, "T ... D"]:
    """Rotates pairs of adjacent channels, the last `2 * P` channels of `x`, by the angles `position * inv_freq`.

    The rotation is computed in float32 and rounded once, as in the released model (docs/dsv4.md 2.2).

    Args:
      x: [T, ..., D] rows, D >= 2 * P. Channels before the last 2 * P are returned unchanged.
      positions: [T] int32 absolute positions in tokens, not negative.
      inv_freq: [P] float32, radians per token; one for each pair of channels.
      inverse: whether to rotate by the negative angles, which undoes a rotation at the same position.
      deterministic: whether to compute the same bits on every backend, without the backend's cos and sin.

    Returns:
      [T, ..., D] in the dtype of x.
    """
    pairs = inv_freq.shape[0]
    angle = positions.astype(jnp.float32)[:, None] * inv_freq[None, :]
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), pairs)
    cos, sin = cos_sin(angle) if deterministic else (jnp.cos(angle), jnp.sin(angle))
    sin = -sin if inverse else sin
    multiply = product if deterministic else operator.mul
    head, tail = jnp.split(x, [x.shape[-1] - 2 * pairs], axis=-1)
    tail = tail.astype(jnp.float32).reshape(*tail.shape[:-1], pairs, 2)
    even = tail[..., 0]
    odd = tail[..., 1]
    rotated_even = multiply(even, cos) - multiply(odd, sin)
    rotated_odd = multiply(even, sin) + multiply(odd, cos)
    rotated = jnp.stack([rotated_even, rotated_odd], axis=-1).reshape(*x.shape[:-1], 2 * pairs)
    return jnp.concatenate([head, round_to(rotated, x.dtype)], axis=-1)
