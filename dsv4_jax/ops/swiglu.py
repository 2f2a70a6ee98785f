"""SwiGLU with a limit."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swiglu(gate: Float[Array, "T n"], up: Float[Array, "T n"], limit: float) -> Float[Array, "T n"]:
    """`silu(min(gate, limit)) * clip(up, -limit, limit)` of [T, n] values, in float32, not rounded."""
    clamped = jnp.minimum(gate.astype(jnp.float32), limit)
    return jax.nn.silu(clamped) * jnp.clip(up.astype(jnp.float32), -limit, limit)
