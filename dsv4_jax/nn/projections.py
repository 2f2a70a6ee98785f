"""Linear maps of one input, whose matrices may be fused so that one product computes them all."""

import collections
import functools
import gc
import itertools
from collections.abc import Callable, Hashable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv4_jax.nn.layers import Axes, RMSNorm, multiply, normal
from dsv4_jax.ops.linear import LinearSpec, Matrix
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight


class FusedLinear(nnx.Module):
    """Linear maps of one input, called the same way whether each has a matrix of its own or `fuse` stacked them.

    Attributes:
      names, output_sizes: name and number of rows of each map (static).
      out_dtypes: dtype that each product is rounded to, once; None = that of the input (static).
      weights: matrices [rows, in_features], by name of the map. A fused one has the names of its maps with "+" between,
        and if a mesh shards it, each device holds its rows of every map.
      launches: keys of the matrices that are multiplied together, for each product (static).
    """

    def __init__(
        self,
        in_features: int,
        output_sizes: Mapping[str, int],
        *,
        out_dtypes: Mapping[str, DTypeLike | None] = {},
        axes: Mapping[str, Axes] = {},
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.names, self.output_sizes = tuple(output_sizes), tuple(output_sizes.values())
        self.out_dtypes = tuple(map(out_dtypes.get, self.names))
        self.weights = nnx.Dict(
            {
                name: normal(rngs, (size, in_features), param_dtype, axes=axes.get(name, ()))
                for name, size in output_sizes.items()
            }
        )
        self.launches: tuple[tuple[str, ...], ...] = tuple((name,) for name in self.names)

    def __call__(self, x: Float[Array, "... n"], norm: RMSNorm | None = None) -> dict[str, Float[Array, "... _"]]:
        """Maps [..., in_features], normalized first if there is a norm, to {name: [..., output size]}."""
        products = {}
        for keys in self.launches:
            weights = {key: self.weights[key].get_value() for key in keys}
            sizes = {name: n for key, weight in weights.items() for name, n in self._local_sizes(key, weight).items()}
            dtypes = (self.out_dtypes[self.names.index(name)] for name in sizes)
            dtypes = tuple(x.dtype if dtype is None else dtype for dtype in dtypes)
            outputs = multiply(x, tuple(weights.values()), LinearSpec(tuple(sizes.values()), dtypes), norm)
            products |= zip(sizes, outputs, strict=True)
        return products

    @property
    def fused_matrix(self) -> Matrix | None:
        """The matrix of all maps, one below the other; None if they do not share one."""
        return next(iter(self.weights.values())).get_value() if len(self.weights) == 1 else None

    def matrix(self, name: str) -> Float[Array, "m n"]:
        """Returns the matrix [output size, in_features] of one map."""
        (key,) = (key for key in self.weights if name in key.split("+"))

        def rows(weight):
            sizes = self._local_sizes(key, weight)
            start = sum(list(sizes.values())[: list(sizes).index(name)])
            return weight[start : start + sizes[name]]

        return _per_device(rows, self.weights[key][...])

    def fuse(self) -> None:
        """Stacks matrices that have one dtype and one sharding, and multiplies by all of these in one launch.

        FP8 matrices whose rows on a device do not end with a block of scales stay as they are.
        """
        groups: dict[Hashable, list[str]] = collections.defaultdict(list)
        others = []
        for key in itertools.chain(*self.launches):
            value = self.weights[key].get_value()
            array = value.codes if isinstance(value, QuantizedWeight) else value
            where = None if isinstance(array, jax.core.Tracer) else array.sharding
            rows = array.shape[0] if where is None else where.shard_shape(array.shape)[0]
            if array is not value and rows % WEIGHT_BLOCK:
                others.append((key,))
            else:
                groups[jax.tree.structure(value), value.dtype, where].append(key)
        for keys in groups.values():
            if len(keys) > 1:
                maps = [self.weights.pop(key) for key in keys]
                matrix = jax.tree.map(
                    lambda *rows: _per_device(lambda *x: jnp.concatenate(x), *rows), *(one.get_value() for one in maps)
                )
                sharded = any(one.get_metadata()["axes"] for one in maps)
                self.weights["+".join(keys)] = nnx.Param(matrix, axes=("fused",) if sharded else ())
        fused = tuple(map("+".join, groups.values()))
        self.launches = (fused, *others) if fused else tuple(others)

    def _local_sizes(self, key, weight):
        """Returns the number of rows on this device of each map in a matrix."""
        sizes = {name: self.output_sizes[self.names.index(name)] for name in key.split("+")}
        devices = sum(sizes.values()) // weight.shape[0]
        return {name: size // devices for name, size in sizes.items()}


def _per_device(function, *matrices):
    """Applies a function to matrices, on each device to its own shards."""
    if isinstance(matrices[0], jax.core.Tracer) or matrices[0].sharding.is_fully_replicated:
        return function(*matrices)
    mesh, spec = matrices[0].sharding.mesh, matrices[0].sharding.spec
    in_specs = (spec,) * len(matrices)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(*matrices)


def fuse_projections[M: nnx.Module](module: M) -> M:
    """Returns a copy of a model, or of a module of it, in which linear maps of one input share a matrix.

    A decode step then computes the maps of an input with one product instead of up to seven small ones. Matrices that
    a mesh shards are fused if they have the same sharding. The fused matrices are new arrays: if memory is short, drop
    `module`, or build or load the model with `fused=True`.
    """
    copy = nnx.clone(module)
    fuse_in_place(copy)
    return copy


def fuse_in_place(module: nnx.Module) -> None:
    """Fuses the projections of the module itself, so that memory holds at most one fused matrix twice."""
    for _, linear in list(nnx.iter_modules(module)):
        if isinstance(linear, FusedLinear):
            linear.fuse()


class ModuleFiller:
    """Gives a module of shapes its arrays one by one, and fuses projections as soon as it has all maps of an input.

    Then the next layer's arrays take the memory of the maps that were fused. Fusing all projections at last would leave
    holes between arrays that stay: 0.9 GiB of a GPU for V4-Flash.

    Attributes:
      parameters: {path with dots: parameter that has no array yet}.
    """

    def __init__(self, module: nnx.Module, *, fused: bool):
        """Begins with a module whose parameters have instances of `jax.ShapeDtypeStruct`. Fuses only if `fused`."""
        self.parameters = {".".join(map(str, path)): x for path, x in nnx.to_flat_state(nnx.state(module))}
        gc.collect()  # Flax's states are in reference cycles, which would keep the maps of fused projections
        self._projections: dict[str, tuple[FusedLinear, list[str]]] = {}  # by path of each of its maps
        for path, linear in nnx.iter_modules(module) if fused else ():
            if isinstance(linear, FusedLinear):
                paths = [".".join(map(str, (*path, "weights", name))) for name in linear.names]
                self._projections |= dict.fromkeys(paths, (linear, paths))

    def set(self, path: str, value: Array | QuantizedWeight) -> None:
        """Sets the parameter at a path, once."""
        self.parameters.pop(path).set_value(value)
        linear, paths = self._projections.get(path, (None, []))
        if linear is not None and not self.parameters.keys() & set(paths):
            linear.fuse()
            # So that the maps are freed before the next arrays take memory.
            jax.block_until_ready([weight.get_value() for weight in linear.weights.values()])


def parameter_readers(module: nnx.Module) -> dict[str, Callable[[], Array]]:
    """Returns {path of a parameter in the module without fusing: function that returns its value}."""
    readers: dict[tuple, Callable[[], Array]] = {
        path: functools.partial(value.__getitem__, ...) for path, value in nnx.to_flat_state(nnx.state(module))
    }
    for path, linear in nnx.iter_modules(module):
        if isinstance(linear, FusedLinear):
            for key in linear.weights:
                del readers[*path, "weights", key]
            readers |= {(*path, "weights", name): functools.partial(linear.matrix, name) for name in linear.names}
    return {".".join(map(str, path)): reader for path, reader in readers.items()}
