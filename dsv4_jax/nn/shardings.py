"""Shardings of a module's parameters on a mesh."""

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from dsv4_jax.parallel.axis_rules import named_sharding
from dsv4_jax.parallel.mesh import check_mesh
from dsv4_jax.quant import BLOCKS, QuantizedKind, QuantizedWeight


def shardings[M: nnx.Module](module: M, mesh: Mesh | AbstractMesh, *, expert_parallel: bool = False) -> M:
    """Returns the module with a `NamedSharding` in the place of each array, as `jax.device_put` takes it.

    `parallel.axis_rules` maps the logical axes of each parameter to axes of the mesh. Codes and scales of a
    `QuantizedWeight` have the same sharding. `jax.device_put` refuses a sharding that does not divide an array.

    Args:
      module: a module with arrays or `jax.ShapeDtypeStruct` objects.
      mesh: the mesh of devices.
      expert_parallel: whether each device along the mesh axis "model" gets some of the experts, instead of a shard of
        each expert.

    Raises:
      ValueError: the mesh has unknown axes, or a shard of a `QuantizedWeight` would end within a block of values that
        share a scale.
    """
    check_mesh(mesh)
    graph, state = nnx.split(module)

    def place(path, parameter):
        """Puts the sharding of a parameter in the place of its arrays."""
        name = ".".join(map(str, path))
        value = parameter.get_value()
        sharding = parameter_sharding(parameter, mesh, expert_parallel)
        if isinstance(value, QuantizedWeight):
            check_blocks(name, value.shape, value.kind, sharding)
        return parameter.replace(jax.tree.map(lambda _: sharding, value))

    return nnx.merge(graph, nnx.map_state(place, state))


def sharded_structs[M: nnx.Module](module: M, mesh: Mesh | AbstractMesh | None, *, expert_parallel: bool = False) -> M:
    """Returns a copy of a module of `jax.ShapeDtypeStruct` objects. With a mesh, the structs get shardings.

    The arguments and errors are those of `shardings`.
    """
    if mesh is None:
        return nnx.clone(module)
    where = shardings(module, mesh, expert_parallel=expert_parallel)
    return jax.tree.map(lambda struct, sharding: struct.update(sharding=sharding), module, where)


def parameter_sharding(
    parameter: nnx.Variable, mesh: Mesh | AbstractMesh, expert_parallel: bool = False
) -> NamedSharding:
    """Returns the sharding of the arrays of a parameter, an `nnx.Variable`."""
    axes = parameter.get_metadata().get("axes", ())
    logical = [axis if axis != "experts" or expert_parallel else None for axis in axes]
    return named_sharding(logical, mesh, len(parameter.get_value().shape))


def check_blocks(name: str, shape: tuple[int, ...], kind: QuantizedKind, where: NamedSharding) -> None:
    """Raises ValueError if a sharding would split a block of values that share a scale.

    Args:
      name: path of the weight, for the message.
      shape: shape [..., out, in] of the weight's values.
      kind: the weight's storage.
      where: the weight's sharding.
    """
    both = zip(("rows", "columns"), shape[-2:], where.shard_shape(shape)[-2:], BLOCKS[kind], strict=True)
    for what, size, part, block in both:
        if part < size and part % block:
            raise ValueError(
                f"{name} is stored as {kind}: the mesh {dict(where.mesh.shape)} would cut its {size} {what} into parts "
                f'of {part}, through blocks of {block} that share a scale; load it with weights="bfloat16", or over '
                "fewer devices"
            )
