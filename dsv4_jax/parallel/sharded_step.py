"""Runs functions of a cache on every device of a mesh at once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dsv4_jax.ops import with_mailboxes
from dsv4_jax.parallel.axis_rules import DATA_AXIS


def sharded_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step for arrays of one device or of a mesh: there it runs under `jax.shard_map`, on each device's own arrays.

    How model and cache are cut is read from their types, while the step is traced: put them on a mesh with Explicit
    axes before. On a mesh with an axis "data" each part of it gets its own requests: of all other arrays, arguments and
    results, which are then of tokens, slots or requests, axis 0 holds those of one part after those of another.

    Args:
      step: takes `(model, cache, *args, **options)` and returns a tuple whose last item is the cache.

    Returns:
      The same function. It raises ValueError if model and cache lie on different meshes.
    """

    @functools.wraps(step)
    def call(model: Any, cache: Any, *args: Any, **options: Any) -> Any:
        of_model, mesh = _mesh(model), _mesh(cache)
        if of_model != mesh and jax.tree.leaves(model):
            raise ValueError(
                f"the model lies on {_words(of_model)} and the cache on {_words(mesh)}: give load_checkpoint and "
                "KVCacheManager the same mesh"
            )
        if mesh is None:
            return step(model, cache, *args, **options)

        def local(model: Any, cache: Any, args: Any) -> Any:
            with with_mailboxes(getattr(cache, "mailboxes", None)):
                *results, cache = step(model, cache, *args, **options)
            return tuple(results), cache

        of_requests = PartitionSpec(DATA_AXIS) if DATA_AXIS in mesh.axis_names else PartitionSpec()
        results, cache = _run(local, mesh, (model, cache), args, of_requests, (of_requests, _specs(cache)))
        return *results, cache

    return call


def sharded_read(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a cache that lies anywhere; each device runs it on its own part.

    Args:
      function: takes `(cache, *args, **options)`, all of `args` on each device, and returns the same on each.
    """

    @functools.wraps(function)
    def call(cache: Any, *args: Any, **options: Any) -> Any:
        return _on_parts(function, PartitionSpec(), cache, args, options)

    return call


def sharded_update(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for a function that returns the updated cache."""

    @functools.wraps(function)
    def call(cache: Any, *args: Any, **options: Any) -> Any:
        return _on_parts(function, _specs(cache), cache, args, options)

    return call


def _on_parts(function, out_specs, cache, args, options):
    if (mesh := _mesh(cache)) is None:
        return function(cache, *args, **options)
    local = functools.partial(_call, function, options)
    return _run(local, mesh, (cache,), args, PartitionSpec(), out_specs)


def _call(function, options, cache, args):
    return function(cache, *args, **options)


def _run(local, mesh, placed, args, of_args, out_specs):
    """`local(*placed, args)` on every device, whose part of `args` axis 0 is cut as `of_args` says."""
    cut = jax.tree.map(lambda x: of_args if jax.numpy.ndim(x) else PartitionSpec(), args)
    args = jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec)), args, cut)
    # Kernels do not say along which axes their results vary.
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(*map(_specs, placed), cut), out_specs=out_specs, check_vma=False)
    return mapped(*placed, args)


def _specs(tree):
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def _mesh(tree):
    """The mesh of a tree's arrays, if it has axes of type Explicit; None for other arrays."""
    meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    return explicit[0] if explicit else None


def _words(mesh):
    return "no mesh" if mesh is None else f"a mesh of {dict(mesh.shape)}"
