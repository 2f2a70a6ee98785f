"""The one table of what each mesh axis cuts."""

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dsv4_jax.ops.all_reduce import MODEL_AXIS


# Mesh axis by the logical axis of a parameter or a pool; axes that are not listed are copied to all devices.
RULES = {
    "heads": MODEL_AXIS,  # query heads
    "groups": MODEL_AXIS,  # groups of heads that share an output map
    "inner": MODEL_AXIS,  # the width between the two maps of an expert
    "vocab": MODEL_AXIS,
}


def partition_spec(axes: Sequence[str | None], mesh: Mesh) -> PartitionSpec:
    """How an array is cut whose dimensions have these logical axes (None = none, which is copied)."""
    cuts = [None if axis is None else RULES.get(axis) for axis in axes]
    return PartitionSpec(*(cut if cut in mesh.axis_names else None for cut in cuts))


def named_sharding(axes: Sequence[str | None], mesh: Mesh) -> NamedSharding:
    """Where such an array lies."""
    return NamedSharding(mesh, partition_spec(axes, mesh))
