"""Weights that are stacked over the layers of a model. A kernel reads the weights of one layer.

A kernel has an optional argument `layer`. If it is None, the weights belong to one layer. Otherwise the weights have a
leading axis of layers, and `layer` is the index on this axis. The index is an operand in global memory, because it is
the counter of a loop in the program that calls the kernel. The preceding kernel may write the index, so this kernel
calls `runtime.launch.wait_for_inputs` before it reads the index.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.runtime.checks import check_array


def check_weight(name: str, weight: jax.Array | None, layer: jax.Array | None, dtype, *shape: int | None) -> None:
    """Raises NotImplementedError unless a weight has this dtype and shape.

    `shape` is as in `check_array`. If `layer` is given, the weight needs a leading axis of layers, which `shape` does
    not include.
    """
    check_array(name, weight, dtype, *([] if layer is None else [None]), *shape)


def layer_operand(layer: jax.Array | None) -> jax.Array | None:
    """Reshapes a layer's index to [1] int32, an operand of a kernel. Returns None if `layer` is None.

    Raises NotImplementedError unless the index is an int32 scalar.
    """
    if layer is None:
        return None
    check_array("layer", layer, jnp.int32)
    return layer.reshape(1)


def weights_of_layer(weights_gmem, layer_gmem):
    """Returns references to the weights of the layer that a kernel reads. The kernel's body calls this function.

    Args:
      weights_gmem: pytree of references to weights.
      layer_gmem: reference to the operand [1] int32 from `layer_operand`, or None if the weights belong to one layer.
    """
    if layer_gmem is None:
        return weights_gmem
    layer = layer_gmem[0]
    return jax.tree.map(lambda ref: ref.at[layer], weights_gmem)
