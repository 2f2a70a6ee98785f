"""A model's parameters by the names of their layers and maps: views of stacked and fused arrays."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from dsv4_jax.nn.layer_stack import LayerStack
from dsv4_jax.nn.projections import FusedLinear
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight


Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class ParameterView:
    """A parameter of one layer, or the matrix of one linear map: a part of a variable.

    Attributes:
      variable: the `nnx.Variable`, whose array holds several layers or maps.
      index: the place in it: numbers on the leading axes, and perhaps a slice of rows.
    """

    variable: Any
    index: Index = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter's values."""
        return indexed_shape(self.variable.get_value().shape, self.index)

    @property
    def dtype(self) -> Any:
        """The dtype of the parameter's values."""
        return self.variable.get_value().dtype

    @property
    def num_layer_axes(self) -> int:
        """The number of the variable's leading axes on which the parameter has a number."""
        return sum(not isinstance(place, slice) for place in self.index)

    def get_value(self) -> Array | QuantizedWeight:
        """Returns a copy of the parameter."""
        value = self.variable.get_value()
        if not isinstance(value, QuantizedWeight):
            return value[self.index]
        codes, scale = (getattr(value, field)[self.leaf_index(field)] for field in ("codes", "scale"))
        return dataclasses.replace(value, codes=codes, scale=scale)

    def read(self) -> Array:
        """Returns a copy of the parameter's values, dequantized if they are quantized."""
        return self.get_value()[...]

    def set_value(self, new: Array | QuantizedWeight) -> None:
        """Writes the parameter in place, stored as the variable is. The variable's arrays are donated.

        Raises ValueError if the new value has another shape or storage.
        """
        if new.shape != self.shape or isinstance(new, QuantizedWeight) != (leaf_names(self.variable) != (None,)):
            raise ValueError(f"the new value must be stored like the old one, with shape {self.shape}; got {new.shape}")
        for field in leaf_names(self.variable):
            leaf: Any = new if field is None else getattr(new, field)
            write_leaf(self.variable, field, leaf, self.leaf_index(field))

    def leaf_index(self, field: str | None) -> Index:
        """Returns the place in an array of the variable, see `leaf_names`."""
        value = self.variable.get_value()
        if field != "scale" or value.kind != "FP8":
            return self.index
        return tuple(map(_of_scales, self.index))


def _of_scales(place):
    """Returns the place of FP8's scales for rows at a place of the codes."""
    if not isinstance(place, slice):
        return place
    return slice(place.start // WEIGHT_BLOCK, math.ceil(place.stop / WEIGHT_BLOCK))


def parameter_views(module: nnx.Module) -> dict[str, ParameterView]:
    """Returns {path with dots: ParameterView} of every parameter, by layer and by linear map.

    Paths have the numbers of layers, as in "model.layers.17.self_attn.o_b_proj.weight", however layers are stacked, and
    names of maps, as in "model.layers.17.self_attn.input_projections.weights.kv_proj", whichever share a matrix.
    """
    stacks = {}
    fused = {}
    for path, child in nnx.iter_modules(module):
        if isinstance(child, LayerStack):
            stacks[path] = child
        if isinstance(child, FusedLinear):
            fused[path] = child
    views = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        maps = [(path[-1], ())]
        if path[-2:-1] == ("weights",) and path[:-2] in fused:
            maps = [(name, fused[path[:-2]].rows_of(name)[1]) for name in str(path[-1]).split("+")]
        for name, rows in maps:
            for layer_path, index in _layer_paths(stacks, (*path[:-1], name)):
                views[".".join(map(str, layer_path))] = ParameterView(variable, (*index, *rows))
    return views


def _layer_paths(stacks, path):
    """Yields the path of each layer's parameter in a stacked one, and its index on the leading axis."""
    for length in range(len(path)):
        stack = stacks.get(path[:length])
        if stack is not None and path[length] == "loops":
            loop, _, position = path[length + 1 : length + 4]
            for repeat, layer in enumerate(stack.loops[loop].run.layers(position)):
                yield (*path[:length], layer - stack.start, *path[length + 4 :]), (repeat,)
            return
    yield path, ()


def indexed_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Returns the shape of an array's part at an index."""
    rows = [place.stop - place.start for place in index if isinstance(place, slice)]
    return (*rows, *shape[len(index) :])


def leaf_names(variable: nnx.Variable) -> tuple[str | None, ...]:
    """Returns the names of the arrays that a variable holds: ("codes", "scale") if it is quantized, else (None,)."""
    return ("codes", "scale") if isinstance(variable.get_value(), QuantizedWeight) else (None,)


def get_leaf(variable: nnx.Variable, field: str | None) -> Any:
    """Returns an array of a variable, or its shape."""
    return variable.get_value() if field is None else getattr(variable.get_value(), field)


def set_leaf(variable: nnx.Variable, field: str | None, array: Array) -> None:
    """Replaces an array of a variable."""
    variable.set_value(array if field is None else dataclasses.replace(variable.get_value(), **{field: array}))


def write_leaf(variable: nnx.Variable, field: str | None, new: Array, index: Index) -> None:
    """Writes a part of an array of a variable, which is donated; a shape in its place becomes zeros first."""
    array = get_leaf(variable, field)
    axes = tuple(axis for axis, place in enumerate(index) if not isinstance(place, slice))
    new = jnp.expand_dims(new, axes)
    if isinstance(array, jax.ShapeDtypeStruct):
        if new.shape == array.shape:
            set_leaf(variable, field, new)
            return
        # An array that is committed to its device makes others so, and with them steps compile once more.
        is_placed = not isinstance(new, jax.core.Tracer) and new.committed
        array = jnp.zeros(array.shape, array.dtype, device=new.sharding if is_placed else None)
    starts = [place.start if isinstance(place, slice) else place for place in index]
    starts += [0] * (array.ndim - len(starts))
    set_leaf(variable, field, _write(array, new, [np.int32(start) for start in starts]))


@functools.partial(jax.jit, donate_argnums=0)
def _write(array, new, starts):
    return jax.lax.dynamic_update_slice(array, new.astype(array.dtype), starts)
