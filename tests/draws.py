"""Random parameters with the same bits as in use, without a compiled program for each shape.

A number that JAX draws depends on the key and its index in the flattened array, not on the shape: programs of a few
sizes draw all arrays, and NumPy scales and moves the numbers.
"""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from dsv4_jax.nn import layers


LEAST_SIZE = 1 << 12
made_by_jax = layers.parameter


class Numbers(np.ndarray):
    """Numbers that convert Python's to their dtype, as JAX's do: NumPy would widen bfloat16."""

    def __rmul__(self, factor):
        return np.multiply(self.dtype.type(factor), self)

    def __radd__(self, term):
        return np.add(self.dtype.type(term), self)


def normal(key, shape, dtype):
    """Draws as `jax.random.normal` does; returns `Numbers` unless a program is traced."""
    if isinstance(key, jax.core.Tracer):
        return jax.random.normal(key, shape, dtype)
    size = math.prod(shape)
    drawn = jax.random.normal(key, (max(LEAST_SIZE, 1 << (size - 1).bit_length()),), dtype)
    return np.asarray(drawn)[:size].reshape(shape).view(Numbers)


def parameter(kind, rngs, shape, dtype, draw, axes=()):
    return made_by_jax(kind, rngs, shape, dtype, lambda *args: jnp.asarray(draw(*args), dtype), axes)


def draw_in_few_programs() -> None:
    """Lets `layers.normal` draw with `normal` from here on."""
    layers.jax = SimpleNamespace(**vars(jax) | {"random": SimpleNamespace(normal=normal)})
    layers.parameter = parameter
