"""Parameters that tests draw have the bits of those that users draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.nn import layers


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 33, 65)])
def test_bits_are_those_of_jax(shape, dtype):
    rngs = nnx.Rngs(7)
    found = layers.normal(layers.StackedRngs(rngs, shape[0]), shape[1:], dtype, mean=1.0, std=0.3).get_value()
    expected = 1.0 + 0.3 * jax.random.normal(nnx.Rngs(7).params(), shape, dtype)
    assert isinstance(found, jax.Array) and found.dtype == dtype and not found.aval.weak_type
    np.testing.assert_array_equal(found, expected)
    traced = jax.jit(lambda: layers.normal(nnx.Rngs(7), shape, dtype, mean=1.0, std=0.3).get_value())()
    np.testing.assert_allclose(traced, expected, rtol=1e-2)  # XLA may fuse the product and the sum
