"""Where the parameters of a model go on several devices."""

from collections.abc import Callable

from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def shard_over(mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """A rule for `load_checkpoint(sharding=...)`: each matrix is cut over all devices of the mesh.

    Experts are cut on their first axis, so that each stays whole; other matrices on the first axis that the number of
    devices divides. What cannot be cut, and vectors, are copied to every device. XLA adds the communication.

    Args:
        mesh: the devices; all its axes are used as one. Put the cache on it, too, for instance everywhere
            (`jax.device_put(cache, NamedSharding(mesh, PartitionSpec()))`).

    Raises:
        ValueError: an axis of the mesh is not of type Auto: the modules leave it to XLA how results are laid out.
    """
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        sizes, names = mesh.axis_sizes, mesh.axis_names
        right = f"jax.make_mesh({sizes}, {names}, axis_types=(AxisType.Auto,) * {len(names)})"
        raise ValueError(f"the mesh has axes of types {mesh.axis_types}; make it with {right}")

    def rule(path: str, shape: tuple[int, ...]) -> NamedSharding:
        cut = [axis for axis, size in enumerate(shape) if size % mesh.size == 0]
        if len(shape) < 2 or not cut:
            return NamedSharding(mesh, PartitionSpec())
        return NamedSharding(mesh, PartitionSpec(*[None] * cut[0], mesh.axis_names))

    return rule
