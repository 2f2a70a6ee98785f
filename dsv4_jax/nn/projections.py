"""Linear maps of one input, which share matrices so that one product computes them all."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.nn.layers import AnyRngs, Axes, RMSNorm, multiply, normal
from dsv4_jax.ops.linear import LinearSpec, Matrix
from dsv4_jax.quant import WEIGHT_BLOCK, LayerSlice, QuantizedWeight


@dataclasses.dataclass(frozen=True)
class Projection:
    """One of the linear maps of an input.

    Attributes:
      size: number of output channels.
      out_dtype: dtype that the product is rounded to, once; None = that of the input.
      axes: logical axes of the matrix [size, in_features]; empty = replicated.
      is_fp8: whether the release stores the matrix in FP8, in blocks of `WEIGHT_BLOCK` rows that share a scale.
    """

    size: int
    out_dtype: DTypeLike | None = None
    axes: Axes = ()
    is_fp8: bool = True


class FusedLinear(nnx.Module):
    """Linear maps of one input: one launch, and a matrix for all maps that are stored and sharded in the same way.

    Maps share a matrix [rows, in_features], one below the other, if the release stores all of them in FP8 or none of
    them, no mesh shards them, and no block of scales would belong to two of them. Maps that a mesh shards share one of
    [maps, rows of each, in_features] if they have equally many rows.

    Attributes:
      projections: {name: Projection} (static).
      groups: names of the maps of each matrix (static).
      weights: the matrices, by the names of their maps with "+" between.
    """

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
        """Maps [..., in_features], normalized first if there is a norm, to {name: [..., output size]}."""
        sizes = {}
        matrices = []
        for names in self.groups:
            matrix = merged_rows(self.weights["+".join(names)].get_value())
            full = sum(self.projections[name].size for name in names)
            devices = full // matrix.shape[0]
            sizes |= {name: self.projections[name].size // devices for name in names}
            matrices.append(matrix)
        dtypes = tuple(self.projections[name].out_dtype or x.dtype for name in sizes)
        outputs = multiply(x, tuple(matrices), LinearSpec(tuple(sizes.values()), dtypes), norm)
        return dict(zip(sizes, outputs, strict=True))

    @property
    def fused_matrix(self) -> Matrix:
        """The matrix of all maps, which share one."""
        (names,) = self.groups
        return merged_rows(self.weights["+".join(names)].get_value())

    def matrix(self, name: str) -> Float[Array, "m n"]:
        """Returns a copy of the matrix [output size, in_features] of one map."""
        key, rows = self.rows_of(name)
        return self.weights[key][...][rows]

    def rows_of(self, name: str) -> tuple[str, tuple[int | slice, ...]]:
        """Returns the key in `weights` of a map's matrix, and the index of the map's rows in it."""
        for names in self.groups:
            if name in names:
                position = names.index(name)
                if self.projections[name].axes and len(names) > 1:
                    return "+".join(names), (position,)
                start = sum(self.projections[other].size for other in names[:position])
                return "+".join(names), (slice(start, start + self.projections[name].size),)
        raise KeyError(f"there is no map {name!r}; there are {', '.join(self.projections)}")


def merged_rows(weight: Any) -> Any:
    """Returns matrices [..., maps, rows, columns] as [..., maps * rows, columns]; returns one matrix unchanged."""
    if len(weight.shape) == 2:
        return weight
    if isinstance(weight, LayerSlice):
        value = merged_rows(weight.value)
        if not isinstance(value, type(weight.value)):
            return value
        return LayerSlice(value, _merge(weight.stack), weight.layer)
    if isinstance(weight, QuantizedWeight) and weight.kind == "FP8" and weight.shape[-2] % WEIGHT_BLOCK:
        # Dequantizes: a block of 128 rows with one scale would hold rows of two maps.
        return merged_rows(weight[...])
    return _merge(weight)


def _merge(weight):
    return jax.tree.map(lambda x: x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1]), weight)


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
