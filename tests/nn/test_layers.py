"""Linear, RMSNorm and Embedding: values, rounding and dtypes."""

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from dsv4_jax.nn import Embedding, Linear, RMSNorm
from tests.nn.reference import f64, rms_norm


def integers(*shape):
    return np.random.default_rng(1).integers(-8, 9, shape).astype(np.float32)


def test_linear_sums_exactly_and_rounds_once():
    # Products and sums of small integers are exact in float32, in any order, and most sums need more than bf16's bits.
    layer = Linear(300, 16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = integers(5, 300)
    weight = integers(16, 300)
    layer.weight[...] = jnp.asarray(weight, jnp.bfloat16)
    exact = x @ weight.T
    expected = exact.astype(ml_dtypes.bfloat16)
    assert np.mean(expected.astype(np.float32) != exact) > 0.2
    y = layer(jnp.asarray(x, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(np.asarray(y), expected)


def test_grouped_linear_keeps_groups_apart():
    layer = Linear(3 * 40, 3 * 7, num_groups=3, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = integers(4, 3, 40)
    weight = integers(21, 40)
    layer.weight[...] = jnp.asarray(weight, jnp.bfloat16)
    expected = np.concatenate([x[:, g] @ weight[7 * g : 7 * g + 7].T for g in range(3)], axis=1)
    y = layer(jnp.asarray(x.reshape(4, -1), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(np.asarray(y), expected.astype(ml_dtypes.bfloat16))


def test_rms_norm_is_float32_inside_and_rounds_once(draw):
    norm = RMSNorm(64, eps=1e-6, rngs=nnx.Rngs(0))
    x = jnp.asarray(100 * draw(6, 64), jnp.bfloat16)
    low = norm(x)
    exact = norm(x.astype(jnp.float32))
    assert (norm.weight.dtype, low.dtype, exact.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    # A few roundings of 2**-24 each.
    chex.assert_trees_all_close(f64(exact), rms_norm(f64(x), 1e-6, f64(norm.weight)), rtol=1e-6)
    chex.assert_trees_all_equal(np.asarray(low), np.asarray(exact.astype(jnp.bfloat16)))


def test_padding_ids_embed_to_finite_rows(draw):
    table = Embedding(10, 4, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    y = table(jnp.array([3, -1, 9], jnp.int32))
    chex.assert_trees_all_equal(np.asarray(y)[[0, 2]], np.asarray(table.weight[...])[[3, 9]])
    chex.assert_tree_all_finite(y)
