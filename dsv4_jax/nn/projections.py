"""Fused linear maps: maps of the same input share matrices, so that one launch computes them all."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.nn.layers import AnyRngs, Axes, RMSNorm, multiply, normal
from dsv4_jax.nn.token_adapters import add_products
from dsv4_jax.ops.linear import LinearSpec, Matrix
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight, layer_value


@dataclasses.dataclass(frozen=True)
class Projection:
    """Description of a linear map in a FusedLinear.

    Attributes:
      size: number of output channels.
      out_dtype: dtype that the float32 sums are rounded to; None = the input's dtype.
      axes: logical axes of the matrix [size, in_features], see `parallel.axis_rules`; empty = replicated.
      is_fp8: whether the release stores the matrix in FP8, in blocks of up to `WEIGHT_BLOCK` rows that share a scale.
    """

    size: int
    out_dtype: DTypeLike | None = None
    axes: Axes = ()
    is_fp8: bool = True


class FusedLinear(nnx.Module):
    """Linear maps of one input, computed in one launch. Maps share a matrix if they are stored and sharded alike.

    Maps that are replicated share a matrix [sum of sizes, in_features] if the release stores all of them in FP8, or
    none of them. In FP8, the size of every map but the last must also be a multiple of 128, so that no block of rows
    with one scale belongs to two maps.
    Maps that are sharded share a matrix [maps, size, in_features] if they also have equal sizes.

    Attributes:
      projections: {name: Projection} (static).
      groups: for each matrix, the names of its maps (static).
      weights: {names of the maps of a matrix, joined by "+": the matrix}.
      adapters: {name of a map: its `lora.Adapters`} for some of the maps, or None.
    """

    adapters: Any = None

    def __init__(
        self, in_features: int, projections: Mapping[str, Projection], *, param_dtype: DTypeLike, rngs: AnyRngs
    ):
        self.projections = nnx.static(dict(projections))
        self.groups = _groups(projections)
        self.weights = nnx.Dict({})
        for names in self.groups:
            sizes = [projections[name].size for name in names]
            axes = projections[names[0]].axes
            if axes and len(names) > 1:
                shape = (len(names), sizes[0], in_features)
                axes = (None, *axes)
            else:
                shape = (sum(sizes), in_features)
            self.weights["+".join(names)] = normal(rngs, shape, param_dtype, axes=axes)

    def __call__(self, x: Float[Array, "... n"], norm: RMSNorm | None = None) -> dict[str, Float[Array, "... _"]]:
        """Maps x [..., in_features], after `norm` if it is given, to {name of the map: [..., size on this device]}."""
        sizes = {}
        matrices = []
        for names in self.groups:
            matrix = merged_rows(self.weights["+".join(names)].get_value())
            devices = sum(self.projections[name].size for name in names) // matrix.shape[0]
            sizes |= {name: self.projections[name].size // devices for name in names}
            matrices.append(matrix)
        dtypes = tuple(self.projections[name].out_dtype or x.dtype for name in sizes)
        products = multiply(x, tuple(matrices), LinearSpec(tuple(sizes.values()), dtypes), norm)
        outputs = dict(zip(sizes, products, strict=True))
        if self.adapters is None:
            return outputs
        adapted = [outputs[name] for name in self.adapters]
        added = add_products(adapted, norm(x) if norm else x, [*self.adapters.values()])
        return outputs | dict(zip(self.adapters, added, strict=True))

    @property
    def fused_matrix(self) -> Matrix:
        """The matrix that all maps share, [rows, in_features]. There must be only one."""
        (names,) = self.groups
        return merged_rows(self.weights["+".join(names)].get_value())

    def matrix(self, name: str) -> Float[Array, "m n"]:
        """Returns a copy of the matrix [output size, in_features] of one map."""
        key, rows = self.rows_of(name)
        return self.weights[key][...][rows]

    def rows_of(self, name: str) -> tuple[str, tuple[int | slice, ...]]:
        """Returns (key of a map's matrix in `weights`, index of the map's rows in this matrix).

        Raises KeyError if there is no map of this name.
        """
        for names in self.groups:
            if name in names:
                rows = names.index(name)
                if not self.projections[name].axes or len(names) == 1:
                    start = sum(self.projections[other].size for other in names[:rows])
                    rows = slice(start, start + self.projections[name].size)
                return "+".join(names), (rows,)
        raise KeyError(f"there is no map {name!r}; there are {', '.join(self.projections)}")


def merged_rows(weight: Any) -> Any:
    """Reshapes matrices [..., maps, rows, columns] to [..., maps * rows, columns]; returns one matrix unchanged."""
    if len(weight.shape) == 2:
        return weight
    value = layer_value(weight)
    if isinstance(value, QuantizedWeight) and value.shape[-2] % value.block[0]:
        # The weight is dequantized, because a block of rows with one scale would hold rows of two maps.
        return merged_rows(value[...])
    # The index of a `LayerSlice` is a scalar, which has no rows.
    return jax.tree.map(lambda x: x.reshape(*x.shape[:-3], -1, x.shape[-1]) if x.ndim else x, weight)


def _groups(projections):
    """Returns the names of the maps that share each matrix, in the order of the maps."""
    groups: list[list[str]] = []
    for name, projection in projections.items():
        for group in groups:
            last = projections[group[-1]]
            if (last.is_fp8, last.axes) != (projection.is_fp8, projection.axes):
                continue
            if last.size == projection.size if last.axes else not last.is_fp8 or last.size % WEIGHT_BLOCK == 0:
                group.append(name)
                break
        else:
            groups.append([name])
    return tuple(map(tuple, groups))
