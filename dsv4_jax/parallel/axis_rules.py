"""The table that maps logical axes of arrays, such as "heads", to axes of the mesh, "data" and "model"."""

from collections.abc import Collection, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from dsv4_jax.common.mesh_axes import DATA_AXIS, MODEL_AXIS


# `RULES` gives the mesh axis that shards each logical axis of a parameter, a cache pool or a step's input. Logical axes
# that are not listed here are replicated.
RULES = {
    "heads": MODEL_AXIS,  # query heads
    "groups": MODEL_AXIS,  # groups of heads with one output projection
    "experts": MODEL_AXIS,  # expert parallelism
    "inner": MODEL_AXIS,  # an expert's intermediate size
    "vocab": MODEL_AXIS,
    "channels": MODEL_AXIS,  # channels of the rows of Engram's tables
    "slots": DATA_AXIS,
    "blocks": DATA_AXIS,
    "context": MODEL_AXIS,  # blocks, with `CacheSchema.context_parallel`
    "tokens": DATA_AXIS,  # also axis 0 of all other per-request inputs and results of a step
}


# A `LogicalAxis` says how a dimension is sharded; None = replicated. A dimension with a tuple of logical axes is
# sharded over the mesh axes of all of them. The mesh axes of the first logical axis are the outermost.
LogicalAxis = str | tuple[str, ...] | None


def mesh_axes(axis: LogicalAxis, present: Collection[str]) -> tuple[str, ...]:
    """Returns the mesh axes that shard a dimension with this logical axis, as far as they are in `present`."""
    names = (axis,) if isinstance(axis, str) else axis or ()
    return tuple(RULES[name] for name in names if RULES.get(name) in present)


def partition_spec(axes: Sequence[LogicalAxis], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the PartitionSpec of an array whose dimensions have these logical axes.

    If a mesh axis could shard several dimensions, it shards the first of them.
    """
    unused = {*mesh.axis_names}
    spec = []
    for axis in axes:
        spec.append(mesh_axes(axis, unused))
        unused -= {*spec[-1]}
    return PartitionSpec(*spec)


def named_sharding(axes: Sequence[LogicalAxis], mesh: Mesh | AbstractMesh, ndim: int = 0) -> NamedSharding:
    """Returns the NamedSharding of an array whose first dimensions have these logical axes, see `partition_spec`.

    The result's spec names all dimensions, as the specs of a program's results do. With a shorter spec, a program would
    be compiled twice: once for newly placed arrays, and once for arrays that a program has returned.

    Args:
      axes: logical axes of the first dimensions. The other dimensions are not sharded.
      mesh: the mesh.
      ndim: number of dimensions of the array, at least the number of `axes`; 0 = the number of `axes`.
    """
    return NamedSharding(mesh, partition_spec((*axes, *[None] * (ndim - len(axes))), mesh))
