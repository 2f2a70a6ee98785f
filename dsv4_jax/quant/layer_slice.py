"""One layer's weights within weights that are stacked over equal layers."""

from typing import Any

import jax
from jaxtyping import Array, Int

from pallas_kernels.runtime.pytrees import pytree_dataclass


@pytree_dataclass
class LayerSlice:
    """The weight of one layer in a loop over equal layers, for references and for kernels.

    A reference reads `value`. A kernel reads `stack` at `layer`, because a slice would be copied before each launch.
    XLA computes neither `value` nor its copy in a program that does not read it.

    Attributes:
      value: array or `QuantizedWeight` of the layer. Gradients belong to it.
      stack: the same with a leading axis of layers.
      layer: [] int32, the layer's index on that axis.
    """

    value: Any
    stack: Any
    layer: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's values."""
        return self.value.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the layer's values."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.value.dtype

    def __getitem__(self, index: Any) -> Array:
        """Returns the layer's values at an index, dequantized if they are quantized."""
        return self.value[index]


def layer_value(tree: Any) -> Any:
    """Returns a tree with the `value` of each `LayerSlice` in its place."""
    return jax.tree.map(lambda x: x.value if isinstance(x, LayerSlice) else x, tree, is_leaf=_is_slice)


def layer_stacks(tree: Any) -> tuple[Any, Int[Array, ""] | None]:
    """Returns the weights of one kernel call as the kernel takes them, and its `layer` argument.

    If every array of the tree belongs to a `LayerSlice`, of one and the same layer, these are the stacks and the
    layer's index. Otherwise they are the values of the layer, and None.
    """
    weights = jax.tree.leaves(tree, is_leaf=_is_slice)
    slices = [weight for weight in weights if isinstance(weight, LayerSlice)]
    if not slices or len(slices) < len(weights):
        return layer_value(tree), None
    return jax.tree.map(lambda x: x.stack, tree, is_leaf=_is_slice), slices[0].layer


def _is_slice(x):
    return isinstance(x, LayerSlice)
