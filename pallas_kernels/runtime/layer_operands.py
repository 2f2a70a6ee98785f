"""Weights that are stacked over equal layers, of which a kernel reads one.

A kernel with the argument `layer` takes weights of one layer, or with the layer's number weights that have a leading
axis of layers. The number is an operand in global memory, because it is the counter of a loop in the program around the
kernel. The kernel before this one may write it, so it is read after `wait_for_inputs`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.runtime.checks import check_array


def check_weight(name: str, weight: jax.Array | None, layer: jax.Array | None, dtype, *shape: int | None) -> None:
    """Raises NotImplementedError unless a layer's weight has this dtype and shape, see `check_array`."""
    check_array(name, weight, dtype, *([] if layer is None else [None]), *shape)


def layer_operand(layer: jax.Array | None) -> jax.Array | None:
    """Returns the layer's number as an operand of `kernel`, [1] int32, or None; raises NotImplementedError."""
    if layer is None:
        return None
    check_array("layer", layer, jnp.int32)
    return layer.reshape(1)


def weights_of_layer(weights_gmem, layer_gmem):
    """Returns references to the layer's weights, within a kernel.

    Args:
      weights_gmem: pytree of references.
      layer_gmem: reference to the operand that `layer_operand` made, or None if the weights are those of one layer.
    """
    if layer_gmem is None:
        return weights_gmem
    layer = layer_gmem[0]
    return jax.tree.map(lambda ref: ref.at[layer], weights_gmem)
