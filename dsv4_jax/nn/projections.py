"""Linear maps of one input, whose matrices may be fused so that one product computes them all."""

import collections
import functools
import operator
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv4_jax.nn.layers import Linear, RMSNorm, multiply
from dsv4_jax.ops.linear import LinearSpec
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight


class FusedLinear(nnx.Module):
    """Linear maps of one input, stored as one matrix so that one product computes them all.

    Attributes:
      weight: [sum(output_sizes), in_features] matrices of the maps, one below the other. If a mesh shards them, each
        device holds its rows of every map.
      names: path of each map from the module that owns it (static).
      output_sizes: number of rows of each map (static).
      out_dtypes: `Linear.out_dtype` of each map (static).
      is_sharded: whether a mesh shards any of the maps (static).
    """

    def __init__(self, maps: dict[str, Linear]):
        """Copies the matrices of `maps`, by path; they have one dtype, or all are FP8."""
        linears, self.names = maps.values(), tuple(maps)
        self.output_sizes = tuple(linear.weight.shape[0] for linear in linears)
        self.out_dtypes = tuple(linear.out_dtype for linear in linears)
        self.is_sharded = any(linear.weight.get_metadata().get("axes") for linear in linears)
        matrices = [linear.weight.get_value() for linear in linears]
        self.weight = nnx.Param(
            jax.tree.map(lambda *rows: _per_device(lambda *x: jnp.concatenate(x), *rows), *matrices)
        )

    def __call__(self, x: Float[Array, "... n"], norm: RMSNorm | None = None) -> dict[str, Float[Array, "... _"]]:
        """Maps [..., in_features], normalized first if there is a norm, to {name: [..., output size]}."""
        return _multiply_fused([self], x, norm)

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """The number of rows of each map on one device."""
        devices = sum(self.output_sizes) // self.weight.get_value().shape[0]
        return tuple(size // devices for size in self.output_sizes)

    def matrix(self, name: str) -> Float[Array, "m n"]:
        """Returns the matrix [out_features, in_features] of one map."""
        at, total = self.names.index(name), self.weight.shape[0]
        start, size = sum(self.output_sizes[:at]), self.output_sizes[at]

        def rows(weight):
            devices = total // weight.shape[0]
            return weight[start // devices : (start + size) // devices]

        return _per_device(rows, self.weight[...])


class Projections(nnx.Module):
    """The linear maps of one input within a module: separate `Linear` modules, or fused ones.

    Separate maps stand where the checkpoint names them. `fuse_projections` moves their matrices into `fused` and leaves
    None in their places.

    Attributes:
      paths: paths of the maps from the module that owns this one (static).
      fused: list of FusedLinear; empty if all maps are separate.
    """

    def __init__(self, *paths: str):
        self.paths = paths
        self.fused = nnx.List([])

    def __call__(
        self, owner: nnx.Module, x: Float[Array, "... n"], norm: RMSNorm | None = None
    ) -> dict[str, Float[Array, "... _"]]:
        """Maps x [..., in_features], normalized first if there is a norm, to {path: product}.

        `owner` is the module that holds the maps.
        """
        products = {path: linear(x, norm) for path, linear in self.separate(owner).items()}
        return products | _multiply_fused(self.fused, x, norm)

    def separate(self, owner: nnx.Module) -> dict[str, Linear]:
        """Returns the maps that are not fused, by path."""
        maps = {path: operator.attrgetter(path)(owner) for path in self.paths}
        return {path: linear for path, linear in maps.items() if linear is not None}

    def fuse(self, owner: nnx.Module) -> None:
        """Fuses maps whose matrices have one dtype and one sharding, by rows.

        A map without a partner becomes a FusedLinear of its own if there are others, since `ops.linear` can multiply
        FP8 and bfloat16 matrices in one launch.
        """
        groups: dict[Hashable, dict[str, Linear]] = collections.defaultdict(dict)
        for path, linear in self.separate(owner).items():
            matrix = linear.weight.get_value()
            if isinstance(matrix, QuantizedWeight):
                # A block of scales must not cover rows of two maps.
                if _has_whole_rows(matrix.codes) and _local_rows(matrix.codes) % WEIGHT_BLOCK == 0:
                    groups[matrix.kind, matrix.dtype, matrix.codes.sharding][path] = linear
            elif isinstance(matrix, jax.core.Tracer):
                groups[matrix.dtype][path] = linear
            elif _has_whole_rows(matrix):
                groups[matrix.dtype, matrix.sharding][path] = linear
        for maps in groups.values():
            if len(maps) > 1 or len(groups) > 1:
                self.fused.append(FusedLinear(maps))
                for path in maps:
                    *parents, name = path.split(".")
                    setattr(functools.reduce(getattr, parents, owner), name, None)


def _multiply_fused(fused, x, norm):
    """Computes the products of several FusedLinear in one call, by path."""
    if not fused:
        return {}
    weights = tuple(linear.weight.get_value() for linear in fused)
    sizes = tuple(size for linear in fused for size in linear.local_sizes)
    dtypes = tuple(x.dtype if dtype is None else dtype for linear in fused for dtype in linear.out_dtypes)
    products = multiply(x, weights if len(weights) > 1 else weights[0], LinearSpec(sizes, dtypes), norm)
    return dict(zip((name for linear in fused for name in linear.names), products, strict=True))


def _has_whole_rows(matrix):
    """Returns whether each device holds whole rows of a matrix."""
    return isinstance(matrix, jax.Array) and matrix.sharding.shard_shape(matrix.shape)[1] == matrix.shape[1]


def _local_rows(matrix):
    return matrix.sharding.shard_shape(matrix.shape)[0]


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
    a mesh shards are fused if they have the same sharding by rows. The fused matrices are new arrays: if memory is
    short, drop `module`, or build or load the model with `fused=True`.
    """
    copy = nnx.clone(module)
    fuse_in_place(copy)
    return copy


def fuse_in_place(module: nnx.Module) -> None:
    """Fuses the projections of the module itself, so that memory holds at most one fused matrix twice."""
    for _, owner in list(nnx.iter_modules(module)):
        for projections in list(vars(owner).values()):
            if isinstance(projections, Projections):
                projections.fuse(owner)


def parameter_readers(module: nnx.Module) -> dict[str, Callable[[], Array]]:
    """Returns {path of a parameter in the module without fusing: function that returns its value}."""
    state = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.state(module))}
    readers: dict[str, Callable[[], Array]] = {
        path: functools.partial(value.__getitem__, ...) for path, value in state.items()
    }
    for path, fused in nnx.iter_modules(module):
        if isinstance(fused, FusedLinear):
            # `path` is OWNER.PROJECTIONS.fused.NUMBER.
            del readers[".".join(map(str, (*path, "weight")))]
            for name in fused.names:
                readers[".".join(map(str, (*path[:-3], name, "weight")))] = functools.partial(fused.matrix, name)
    return readers
