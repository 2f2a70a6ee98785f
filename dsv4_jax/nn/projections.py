"""Linear maps of one input, computed by one product where their matrices are fused."""

import collections
import functools
import operator
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dsv4_jax import ops
from dsv4_jax.nn.layers import Linear, RMSNorm, multiply
from dsv4_jax.ops.linear import LinearSpec
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight


class FusedLinear(nnx.Module):
    """Linear maps of one input whose matrices are stored as one, so that one product computes them all.

    Attributes:
      weight: [all rows, in_features], the maps' matrices one below the other; on a mesh that cuts them, on each device
        the parts that it has.
      parts: (path, rows, `Linear.rounded`) of each map (static).
      is_sharded: whether a mesh would cut one of them (static).
    """

    def __init__(self, maps: dict[str, Linear]):
        """Copies the matrices of `maps`, by path; they have one dtype, or all are in FP8."""
        self.parts = tuple((path, linear.weight.shape[0], linear.rounded) for path, linear in maps.items())
        self.is_sharded = any(linear.weight.get_metadata().get("axes") for linear in maps.values())
        # Of quantised matrices, codes and scales.
        matrices = [linear.weight.get_value() for linear in maps.values()]
        self.weight = nnx.Param(jax.tree.map(lambda *rows: _local(lambda *x: jnp.concatenate(x), *rows), *matrices))

    def __call__(self, x: Float[Array, "... n"], norm: RMSNorm | None = None) -> dict[str, Float[Array, "... _"]]:
        """[..., in_features] to what each map makes of it, normed first if there is a norm, by path."""
        return _products([self], x, norm)

    @property
    def local_parts(self) -> tuple[tuple[int, bool], ...]:
        """(rows, `Linear.rounded`) of each map, of the rows that a device has."""
        devices = sum(rows for _, rows, _ in self.parts) // self.weight.get_value().shape[0]
        return tuple((rows // devices, rounded) for _, rows, rounded in self.parts)

    def swiglu(self, x: Float[Array, "... n"], limit: float) -> Float[Array, "... _"]:
        """`ops.swiglu` of the two maps' products, rounded; of a map named first and one of as many rows."""
        return ops.linear_swiglu(x, self.weight.get_value(), limit)

    def matrix(self, path: str) -> Float[Array, "m n"]:
        """The matrix [out_features, in_features] of one map."""
        at = [name for name, *_ in self.parts].index(path)
        start, rows, whole = sum(rows for _, rows, _ in self.parts[:at]), self.parts[at][1], self.weight.shape[0]

        def part(weight):
            devices = whole // weight.shape[0]
            return weight[start // devices : (start + rows) // devices]

        return _local(part, self.weight[...])


class Projections(nnx.Module):
    """The linear maps of one input within a module: separate `Linear` modules, or fused ones.

    Separate maps are where the checkpoint's names say. `fuse_projections` moves their matrices into `fused` and leaves
    None in their places.

    Attributes:
      paths: of the maps, from the module that owns this one (static).
      fused: list of FusedLinear; empty where all maps are separate.
    """

    def __init__(self, *paths: str):
        self.paths = paths
        self.fused = nnx.List([])

    def __call__(
        self, owner: nnx.Module, x: Float[Array, "... n"], norm: RMSNorm | None = None
    ) -> dict[str, Float[Array, "... _"]]:
        """What each map makes of x [..., in_features], normed first if there is a norm, by path.

        `owner` is the module that holds the maps.
        """
        products = {path: linear(x, norm) for path, linear in self.separate(owner).items()}
        return products | _products(self.fused, x, norm)

    def separate(self, owner: nnx.Module) -> dict[str, Linear]:
        """The maps that are not fused, by path."""
        maps = {path: operator.attrgetter(path)(owner) for path in self.paths}
        return {path: linear for path, linear in maps.items() if linear is not None}

    def join(self, owner: nnx.Module) -> None:
        """Joins maps whose matrices have one dtype, also FP8, and lie whole in one place or are cut alike, by rows.

        One that is alone in this is a fused matrix by itself where there are others: `ops.linear` takes them together.
        """
        alike: dict[Hashable, dict[str, Linear]] = collections.defaultdict(dict)
        for path, linear in self.separate(owner).items():
            matrix = linear.weight.get_value()
            if isinstance(matrix, QuantizedWeight):
                # A block of scales has rows of one map only.
                if _is_joinable(matrix.codes) and _rows(matrix.codes) % WEIGHT_BLOCK == 0:
                    alike[matrix.kind, matrix.dtype, matrix.codes.sharding][path] = linear
            elif isinstance(matrix, jax.core.Tracer):
                alike[matrix.dtype][path] = linear
            elif _is_joinable(matrix):
                alike[matrix.dtype, matrix.sharding][path] = linear
        for maps in alike.values():
            if len(maps) > 1 or len(alike) > 1:
                self.fused.append(FusedLinear(maps))
                for path in maps:
                    *parents, name = path.split(".")
                    setattr(functools.reduce(getattr, parents, owner), name, None)


def _products(fused, x, norm):
    """What the maps of all of some fused matrices make of x, normed first if there is a norm, by path."""
    if not fused:
        return {}
    weights = tuple(matrix.weight.get_value() for matrix in fused)
    sizes, rounded = zip(*(part for matrix in fused for part in matrix.local_parts), strict=True)
    spec = LinearSpec(sizes, tuple(x.dtype if low else jnp.float32 for low in rounded))
    products = multiply(x, weights if len(weights) > 1 else weights[0], spec, norm)
    return dict(zip((path for matrix in fused for path, *_ in matrix.parts), products, strict=True))


def _is_joinable(matrix):
    """Whether a device has whole rows of it."""
    return isinstance(matrix, jax.Array) and matrix.sharding.shard_shape(matrix.shape)[1] == matrix.shape[1]


def _rows(matrix):
    return matrix.sharding.shard_shape(matrix.shape)[0]


def _local(function, *matrices):
    """What a function makes of matrices, on each device of its own part where they are cut."""
    if isinstance(matrices[0], jax.core.Tracer) or matrices[0].sharding.is_fully_replicated:
        return function(*matrices)
    where = matrices[0].sharding
    specs = (where.spec,) * len(matrices)
    return jax.shard_map(function, mesh=where.mesh, in_specs=specs, out_specs=where.spec, check_vma=False)(*matrices)


def fuse_projections[M: nnx.Module](module: M) -> M:
    """A copy of a model, or of a part of it, in which linear maps of one input share a matrix.

    A decode step then reads the matrices of an input in one product instead of up to seven small ones. Matrices that
    are cut over a mesh are fused if they are cut alike, by rows. The fused matrices are new arrays: drop `module`
    where memory is short, or build or load the model with `fused=True`.
    """
    copy = nnx.clone(module)
    fuse_in_place(copy)
    return copy


def fuse_in_place(module: nnx.Module) -> None:
    """`fuse_projections` of the module itself; memory holds no more than one fused matrix twice."""
    for _, owner in list(nnx.iter_modules(module)):
        for projections in list(vars(owner).values()):
            if isinstance(projections, Projections):
                projections.join(owner)


def parameter_readers(module: nnx.Module) -> dict[str, Callable[[], Array]]:
    """Functions that return the values of a module's parameters, by the path that each has where none are fused."""
    state = {".".join(map(str, path)): value for path, value in nnx.to_flat_state(nnx.state(module))}
    readers: dict[str, Callable[[], Array]] = {
        path: functools.partial(value.__getitem__, ...) for path, value in state.items()
    }
    for path, fused in nnx.iter_modules(module):
        if isinstance(fused, FusedLinear):
            # Its own path is OWNER.PROJECTIONS.fused.NUMBER.
            del readers[".".join(map(str, (*path, "weight")))]
            for name, *_ in fused.parts:
                readers[".".join(map(str, (*path[:-3], name, "weight")))] = functools.partial(fused.matrix, name)
    return readers
