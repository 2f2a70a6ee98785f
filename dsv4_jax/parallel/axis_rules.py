"""The one table of what each mesh axis cuts."""

from collections.abc import Collection, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv4_jax.ops.all_reduce import MODEL_AXIS


DATA_AXIS = "data"
# Mesh axes by the logical axis of a parameter, a pool or a step's input; axes that are not listed are copied to all
# devices.
RULES = {
    "heads": (MODEL_AXIS,),  # query heads
    "groups": (MODEL_AXIS,),  # groups of heads that share an output map
    "experts": (MODEL_AXIS,),  # where devices hold whole ones
    "inner": (MODEL_AXIS,),  # the width between the two maps of an expert
    "vocab": (MODEL_AXIS,),
    "slots": (DATA_AXIS,),
    "blocks": (DATA_AXIS,),
    "context": (MODEL_AXIS,),  # a part's blocks, where `CacheSchema.context_parallel`
    "tokens": (DATA_AXIS,),  # and all else of a step that stands in the order of requests
}


# Of a dimension; None = none, which is copied; several = cut along the first, each part along the next.
LogicalAxis = str | tuple[str, ...] | None


def mesh_axes(axis: LogicalAxis, present: Collection[str]) -> tuple[str, ...]:
    """Which of the mesh axes that are present cut a dimension of these logical axes."""
    names = (axis,) if isinstance(axis, str) else axis or ()
    return tuple(cut for name in names for cut in RULES.get(name, ()) if cut in present)


def partition_spec(axes: Sequence[LogicalAxis], mesh: Mesh) -> PartitionSpec:
    """How an array is cut whose dimensions have these logical axes; a mesh axis cuts the first one that it can."""
    left, cuts = list(mesh.axis_names), []
    for axis in axes:
        cuts.append(mesh_axes(axis, left))
        left = [name for name in left if name not in cuts[-1]]
    return PartitionSpec(*(cut[0] if len(cut) == 1 else cut or None for cut in cuts))


def named_sharding(axes: Sequence[LogicalAxis], mesh: Mesh) -> NamedSharding:
    """Where such an array lies."""
    return NamedSharding(mesh, partition_spec(axes, mesh))
