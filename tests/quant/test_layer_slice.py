"""One layer's weights in a loop over stacked ones: values and gradients, of references and of kernels."""

import chex
import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.ops.dispatch import dispatch
from dsv4_jax.quant import LayerSlice, layer_stacks


LAYERS = 3


def scaled_xla(x, weight):
    return jnp.tanh(x * weight)


def scaled_kernel(x, weight, *, interpret):
    del interpret
    (weight,), layer = layer_stacks((weight,))
    return jnp.tanh(x * (weight if layer is None else weight[layer]))


def looped(x, stack, implementation):
    def body(x, layer):
        weight, number = layer
        piece = LayerSlice(weight, jax.lax.stop_gradient(stack), number)
        return dispatch("scaled", implementation, x, piece, xla=scaled_xla, kernel=scaled_kernel), None

    return jnp.sum(jax.lax.scan(body, x, (stack, jnp.arange(LAYERS, dtype=jnp.int32)))[0])


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_loop_over_a_stack_has_values_and_gradients_of_separate_layers(implementation):
    x = jnp.linspace(-1.0, 1.0, 4)
    stack = jax.random.normal(jax.random.key(0), (LAYERS, 4))

    def unrolled(x, stack):
        for weight in stack:
            x = scaled_xla(x, weight)
        return jnp.sum(x)

    expected = jax.value_and_grad(unrolled, argnums=(0, 1))(x, stack)
    result = jax.value_and_grad(looped, argnums=(0, 1))(x, stack, implementation)
    chex.assert_trees_all_close(result, expected, rtol=1e-6)  # a loop fuses the products in another way


def test_weights_of_which_some_are_not_stacked_are_values():
    piece = LayerSlice(jnp.ones(2), jnp.ones((3, 2)), jnp.int32(1))
    weights, layer = layer_stacks((piece, jnp.zeros(2)))
    assert layer is None
    chex.assert_shape(weights, (2,))
    stacks, layer = layer_stacks((piece, None, piece))
    assert layer is piece.layer
    chex.assert_shape([stacks[0], stacks[2]], (3, 2))
