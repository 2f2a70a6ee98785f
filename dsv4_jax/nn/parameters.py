"""Views of a model's parameters for each layer and each linear map, in arrays that are stacked and fused."""

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
from dsv4_jax.quant import QuantizedWeight


Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class ParameterView:
    """A parameter of one layer, such as the matrix of one linear map, as a part of a variable.

    Attributes:
      variable: the `nnx.Variable`, whose array can hold the parameters of several layers or maps.
      index: index of the parameter in this array: ints on leading axes, perhaps followed by a slice of rows.
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
        """The number of leading axes, of layers or maps, that the variable has and the parameter lacks."""
        return sum(not isinstance(place, slice) for place in self.index)

    def get_value(self) -> Array | QuantizedWeight:
        """Returns a copy of the parameter."""
        value = self.variable.get_value()
        parts: Any = {field: array[self.leaf_index(field)] for field, array in leaves(value).items()}
        return dataclasses.replace(value, **parts) if isinstance(value, QuantizedWeight) else parts[None]

    def read(self) -> Array:
        """Returns a copy of the parameter's values, dequantized if they are quantized."""
        return self.get_value()[...]

    def set_value(self, new: Array | QuantizedWeight) -> None:
        """Writes the parameter into the variable, whose old arrays are donated.

        Raises ValueError if the new value has another shape or another storage than the parameter. The storage is an
        array, or a kind of `QuantizedWeight`.
        """
        kind, new_kind = (getattr(value, "kind", "an array") for value in (self.variable.get_value(), new))
        if (new.shape, new_kind) != (self.shape, kind):
            raise ValueError(
                f"the new value must be stored like the old one, with shape {self.shape} as {kind}; "
                f"got {new.shape} as {new_kind}"
            )
        for field, array in leaves(new).items():
            write_leaf(self.variable, field, array, self.leaf_index(field))

    def leaf_index(self, field: str | None) -> Index:
        """Returns the index of the parameter in the array `field` of the variable, see `leaves`."""
        if field != "scale":
            return self.index
        rows = self.variable.get_value().block[0]  # the scales have a row for each block of so many rows of codes
        return tuple(
            slice(place.start // rows, math.ceil(place.stop / rows)) if isinstance(place, slice) else place
            for place in self.index
        )


def parameter_views(module: nnx.Module) -> dict[str, ParameterView]:
    """Returns {path with dots: ParameterView} of all parameters, one for each layer and each linear map.

    Paths do not depend on which layers are stacked and which maps share a matrix. Examples are
    "model.layers.17.self_attn.o_b_proj.weight" and "model.layers.17.self_attn.input_projections.weights.kv_proj".
    """
    modules = dict(nnx.iter_modules(module))
    views = {}
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        key = path[-1]
        fused = modules.get(path[:-2])
        rows: dict[Any, Index] = {key: ()}
        if isinstance(fused, FusedLinear) and path[-2] == "weights":
            # The key of a matrix in `FusedLinear.weights` joins the names of its maps with "+".
            rows = {name: fused.rows_of(name)[1] for name in str(key).split("+")}
        for name, row_index in rows.items():
            for layer_path, layer_index in _layer_paths(modules, (*path[:-1], name)):
                views[".".join(map(str, layer_path))] = ParameterView(variable, (*layer_index, *row_index))
    return views


def _layer_paths(modules, path):
    """Yields (path of a layer's parameter, its index on the leading axis) for each layer of the stacked parameter.

    Args:
      modules: {path: module} of all modules.
      path: path of the parameter. Yields (path, ()) if it is not in a stack.
    """
    for length in range(len(path)):
        stack = modules.get(path[:length])
        if isinstance(stack, LayerStack) and path[length] == "loops":
            loop, _, position = path[length + 1 : length + 4]
            for repeat, layer in enumerate(stack.loops[loop].run.layers(position)):
                yield (*path[:length], layer - stack.start, *path[length + 4 :]), (repeat,)
            return
    yield path, ()


def indexed_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    """Returns the shape of the part at `index` of an array with the given shape."""
    return np.broadcast_to(0, shape)[index].shape


def leaves(value: Any) -> dict[str | None, Any]:
    """Returns {field: array} of a variable's value: its "codes" and "scale" if it is quantized, else {None: value}."""
    return {"codes": value.codes, "scale": value.scale} if isinstance(value, QuantizedWeight) else {None: value}


def set_leaf(variable: nnx.Variable, field: str | None, array: Array) -> None:
    """Replaces the array in a field of a variable, see `leaves`."""
    variable.set_value(array if field is None else dataclasses.replace(variable.get_value(), **{field: array}))


def write_leaf(variable: nnx.Variable, field: str | None, new: Array, index: Index) -> None:
    """Writes a part of an array of a variable.

    Args:
      variable: the variable. A `jax.ShapeDtypeStruct` in the place of the array becomes zeros first.
      field: field of the variable, see `leaves`. Its array is donated.
      new: the values to write.
      index: index of the part, as in `ParameterView`.
    """
    array = leaves(variable.get_value())[field]
    # `new` lacks the axes on which `index` is a number, such as the axis of layers.
    axes = tuple(axis for axis, place in enumerate(index) if not isinstance(place, slice))
    new = jnp.expand_dims(new, axes)
    if isinstance(array, jax.ShapeDtypeStruct):
        if new.shape == array.shape:
            set_leaf(variable, field, new)
            return
        # The zeros are committed to a device only if the new values are. Otherwise the parameters would become
        # committed, and steps would be compiled again.
        is_placed = not isinstance(new, jax.core.Tracer) and new.committed
        array = jnp.zeros(array.shape, array.dtype, device=new.sharding if is_placed else None)
    starts = [place.start if isinstance(place, slice) else place for place in index]
    starts += [0] * (array.ndim - len(starts))
    set_leaf(variable, field, _write(array, new, [np.int32(start) for start in starts]))


@functools.partial(jax.jit, donate_argnums=0)
def _write(array, new, starts):
    where = jax.typeof(array).sharding  # `new` can take it: along sharded axes, `new` is as large as `array`
    new = new.astype(array.dtype)
    return jax.lax.dynamic_update_slice(array, new if where.mesh.empty else jax.reshard(new, where), starts)
