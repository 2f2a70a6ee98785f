"""The table that maps logical axes to mesh axes."""

from collections.abc import Collection, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv4_jax.common.mesh_axes import DATA_AXIS, MODEL_AXIS


# Mesh axes for each logical axis of a parameter, a pool or a step's input. Other axes are replicated.
RULES = {
    "heads": (MODEL_AXIS,),  # query heads
    "groups": (MODEL_AXIS,),  # groups of heads with one output projection
    "experts": (MODEL_AXIS,),  # expert parallelism
    "inner": (MODEL_AXIS,),  # the width between an expert's two projections
    "vocab": (MODEL_AXIS,),
    "slots": (DATA_AXIS,),
    "blocks": (DATA_AXIS,),
    "context": (MODEL_AXIS,),  # blocks, with `CacheSchema.context_parallel`
    "tokens": (DATA_AXIS,),  # also all other per-request inputs and results of a step
}


# The logical axis of a dimension. None = replicated. A tuple is sharded over all its axes, the first one outermost.
LogicalAxis = str | tuple[str, ...] | None


def mesh_axes(axis: LogicalAxis, present: Collection[str]) -> tuple[str, ...]:
    """Returns the mesh axes, of those `present`, that shard a dimension with these logical axes."""
    names = (axis,) if isinstance(axis, str) else axis or ()
    return tuple(mesh_axis for name in names for mesh_axis in RULES.get(name, ()) if mesh_axis in present)


def partition_spec(axes: Sequence[LogicalAxis], mesh: Mesh) -> PartitionSpec:
    """Returns the spec of an array with these logical axes; a mesh axis shards the first dimension that it can."""
    unused = list(mesh.axis_names)
    spec = []
    for axis in axes:
        used = mesh_axes(axis, unused)
        spec.append(used[0] if len(used) == 1 else used or None)
        unused = [name for name in unused if name not in used]
    return PartitionSpec(*spec)


def named_sharding(axes: Sequence[LogicalAxis], mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array with these logical axes."""
    return NamedSharding(mesh, partition_spec(axes, mesh))
