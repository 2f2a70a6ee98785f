"""Runs a step on every device of a mesh at once."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from dsv4_jax.ops import with_mailboxes


def on_mesh(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step for arrays of one device or of a mesh: there it runs under `jax.shard_map`, on each device's own arrays.

    How arrays are cut is read from their types, while the step is traced: put them on a mesh with Explicit axes before.

    Args:
      step: takes `(model, cache, *args, **options)` and returns a tuple whose last item is the cache. Nothing else is
        cut.

    Returns:
      The same function. It raises ValueError if model and cache lie on different meshes.
    """

    @functools.wraps(step)
    def call(model: Any, cache: Any, *args: Any, **options: Any) -> Any:
        of_model, of_cache = _mesh(model), _mesh(cache)
        if of_model != of_cache and jax.tree.leaves(model):
            raise ValueError(
                f"the model lies on {_words(of_model)} and the cache on {_words(of_cache)}: give load_checkpoint and "
                "KVCacheManager the same mesh"
            )
        if of_cache is None:
            return step(model, cache, *args, **options)
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (model, cache))

        def local(model: Any, cache: Any, args: Any) -> Any:
            with with_mailboxes(getattr(cache, "mailboxes", None)):
                *results, cache = step(model, cache, *args, **options)
            return tuple(results), cache

        # Kernels do not say along which axes their results vary.
        mapped = jax.shard_map(
            local,
            mesh=of_cache,
            in_specs=(*specs, PartitionSpec()),
            out_specs=(PartitionSpec(), specs[1]),
            check_vma=False,
        )
        results, cache = mapped(model, cache, args)
        return *results, cache

    return call


def _mesh(tree):
    """The mesh of a tree's arrays, if it has axes of type Explicit; None for other arrays."""
    meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)}
    explicit = [mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types]
    return explicit[0] if explicit else None


def _words(mesh):
    return "no mesh" if mesh is None else f"a mesh of {dict(mesh.shape)}"
