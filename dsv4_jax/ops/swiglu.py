"""SwiGLU with a limit."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "T n"], up: Float[Array, "T n"], limit: float) -> Float[Array, "T n"]:
    """Computes `silu(min(gate, limit)) * clip(up, -limit, limit)` in float32, without rounding.

    Args:
      gate: [T, n] products with the gate matrix.
      up: [T, n] products with the up matrix.
      limit: largest value of gate, and of up's absolute value.
    """
    clamped = jnp.minimum(gate.astype(jnp.float32), limit)
    return jax.nn.silu(clamped) * jnp.clip(up.astype(jnp.float32), -limit, limit)
