"""Decorators that run functions under `jax.shard_map` if the arrays that they get lie on a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dsv4_jax.common.mesh_axes import DATA_AXIS
from dsv4_jax.ops import with_mailboxes


def sharded_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a step so that it runs under `jax.shard_map` if model and cache lie on a mesh.

    The shardings of model and cache are read from their types at trace time, so their mesh must have Explicit axes. If
    the mesh has an axis "data", each shard along it has its own requests: axis 0 of the arrays in `args` and in the
    results is sharded over "data".

    Args:
      step: function of `(model, cache, *args, **options)` that returns a tuple whose last item is the cache. `options`
        are static.

    Returns:
      A function with the signature of the step. It raises ValueError if model and cache lie on different meshes.
    """

    @functools.wraps(step)
    def call(model, cache, *args, **options):
        model_mesh = mesh_of(model)
        mesh = mesh_of(cache)
        if model_mesh != mesh and jax.tree.leaves(model):
            raise ValueError(
                f"the model lies on {_words(model_mesh)} and the cache on {_words(mesh)}: give load_checkpoint and "
                "KVCacheManager the same mesh"
            )
        if mesh is None:
            return step(model, cache, *args, **options)

        def local(model, cache, *args):
            """Runs the step on one device, with its shards."""
            with with_mailboxes(getattr(cache, "mailboxes", None)):
                *results, cache = step(model, cache, *args, **options)
            return tuple(results), cache

        requests_spec = _requests_spec(mesh)
        results, cache = _run(local, mesh, (model, cache), args, requests_spec, (requests_spec, _specs(cache)))
        return *results, cache

    return call


def check_within_shard_map(what: str, tree: Any) -> None:
    """Raises ValueError if arrays lie on a mesh with Explicit axes. Code under `jax.shard_map` sees no such mesh.

    Args:
      what: name of the arrays, for the message.
      tree: pytree of the arrays.
    """
    if (mesh := mesh_of(tree)) is not None:
        raise ValueError(
            f"{what} lies on {_words(mesh)}, and a step on a mesh runs under jax.shard_map: decorate your function of "
            "(model, cache, batch) with `dsv4_jax.decode.sharded_step`, below `jax.jit` or `jax.grad`"
        )


def sharded_rows(function: Callable[..., Any], *, placed: int = 0) -> Callable[..., Any]:
    """Decorates a function so that it runs under `jax.shard_map`, with axis 0 of all arrays sharded over "data".

    Without a mesh the function runs unchanged.

    Args:
      function: function of pytrees of arrays that returns a pytree of arrays. Axis 0 of each array is sharded; scalars
        among the arguments are replicated.
      placed: number of leading arguments, such as a model, whose arrays keep their shardings instead.
    """

    return _on_shards(function, placed, by_request=True)


def sharded_read(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that reads the cache, so that each device runs it on its shard of the cache.

    Args:
      function: function of `(cache, *args, **options)`. `args` are replicated, and `options` are static. The function
        must return the same result on all devices.
    """
    return _on_shards(function)


def sharded_update(function: Callable[..., Any]) -> Any:
    """Decorates a function that updates the cache. It is jitted, and each device runs it on its shard of the cache.

    Args:
      function: function of `(cache, *args)` that returns the updated cache. The cache is donated, and `args` are
        replicated. Another sharded pytree of arrays may take the place of the cache.
    """
    return jax.jit(_on_shards(function, is_update=True), donate_argnums=0)


def _on_shards(function, placed=1, *, by_request=False, is_update=False):
    """Decorates a function so that each device runs it on its shards, if the arrays that it gets lie on a mesh.

    Args:
      function: function of pytrees of arrays. Its keyword arguments are static.
      placed: number of leading arguments, such as the cache, whose arrays keep their shardings.
      by_request: whether axis 0 of the other arguments and of the results is sharded over "data"; if not, they are
        replicated.
      is_update: whether the result has the shardings of the first argument instead.
    """

    @functools.wraps(function)
    def call(*args, **options):
        if (mesh := mesh_of(args)) is None:
            return function(*args, **options)
        spec = _requests_spec(mesh) if by_request else PartitionSpec()
        results_spec = _specs(args[0]) if is_update else spec
        return _run(functools.partial(function, **options), mesh, args[:placed], args[placed:], spec, results_spec)

    return call


def _run(local, mesh, placed, args, args_spec, out_specs):
    """Runs `local(*placed, *args)` on every device of the mesh.

    Args:
      local: the function to run.
      mesh: the mesh.
      placed: tuple of pytrees, such as model and cache, whose arrays keep their shardings.
      args: tuple of pytrees of arrays, which get the spec `args_spec`; scalars are replicated.
      args_spec: PartitionSpec of `args`.
      out_specs: PartitionSpecs of the results.
    """
    args_specs = jax.tree.map(lambda x: args_spec if jax.numpy.ndim(x) else PartitionSpec(), args)
    args = jax.tree.map(lambda x, spec: jax.reshard(x, NamedSharding(mesh, spec)), args, args_specs)
    # `check_vma=False`, since kernels do not declare the mesh axes along which their results vary.
    in_specs = *map(_specs, placed), *args_specs
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*placed, *args)


def _specs(tree):
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)


def mesh_of(tree: Any) -> Any:
    """Returns the mesh of the arrays in a pytree, if it has Explicit axes; else None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def _requests_spec(mesh):
    return PartitionSpec(DATA_AXIS) if DATA_AXIS in mesh.axis_names else PartitionSpec()


def _words(mesh):
    return "no mesh" if mesh is None else f"a mesh of {dict(mesh.shape)}"
