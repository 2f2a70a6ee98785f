"""The weight of one layer, held together with the stack of this weight over all equal layers."""

from typing import Any

import jax
from jaxtyping import Array, Int

from pallas_kernels.runtime.pytrees import pytree_dataclass


@pytree_dataclass
class LayerSlice:
    """The weight of one layer in a loop over equal layers, in two forms.

    The reference of an op reads `value`. A kernel reads `stack` at the index `layer`, because XLA would copy `value`
    out of the stack before each launch. XLA does not compute a `value` that the program does not read.

    Attributes:
      value: array or `QuantizedWeight`, the layer's weight. Gradients are those of `value`.
      stack: array or `QuantizedWeight` with a leading axis of layers.
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
    """Returns the tree with each `LayerSlice` replaced by its `value`."""
    return jax.tree.map(lambda x: x.value if isinstance(x, LayerSlice) else x, tree, is_leaf=_is_slice)


def layer_stacks(tree: Any) -> tuple[Any, Int[Array, ""] | None]:
    """Converts the weights of one kernel call to the form that the kernel takes.

    Args:
      tree: arrays, `QuantizedWeight` objects and `LayerSlice` objects. All slices must be of one layer.

    Returns:
      (tree with the `stack` of each weight, the layer's index) if every weight is a `LayerSlice`. Otherwise (tree with
      the `value` of each `LayerSlice`, None).
    """
    weights = jax.tree.leaves(tree, is_leaf=_is_slice)
    slices = [weight for weight in weights if isinstance(weight, LayerSlice)]
    if not slices or len(slices) < len(weights):
        return layer_value(tree), None
    return jax.tree.map(lambda x: x.stack, tree, is_leaf=_is_slice), slices[0].layer


def _is_slice(x):
    return isinstance(x, LayerSlice)
