"""Where the parameters of a module belong on a mesh."""

import jax
from flax import nnx
from jax.sharding import Mesh

from dsv4_jax.nn.projections import JoinedLinear
from dsv4_jax.parallel.axis_rules import named_sharding
from dsv4_jax.parallel.mesh import check_mesh


def shardings[M: nnx.Module](module: M, mesh: Mesh) -> M:
    """The module with a `NamedSharding` for each array, as `jax.device_put` takes them.

    Parameters are cut as their `axes` and `parallel.axis_rules` say; codes and scales of a `StoredWeight` alike.

    Raises:
      ValueError: the mesh has unknown axes or does not divide a parameter, or maps that it cuts are joined.
    """
    check_mesh(mesh)
    for path, joined in nnx.iter_modules(module):
        if isinstance(joined, JoinedLinear) and joined.cut:
            where = ".".join(map(str, path))
            raise ValueError(f"{where} joins maps that a mesh cuts: place the model first, and join it then")
    graph, state = nnx.split(module)

    def place(path, variable):
        where = named_sharding(variable.get_metadata().get("axes", ()), mesh)
        return variable.replace(jax.tree.map(lambda _: where, variable.get_value()))

    return nnx.merge(graph, nnx.map_state(place, state))
