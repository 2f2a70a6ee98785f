"""Meshes of devices: which axes they have, and which models they can cut. Importing this module does not import JAX."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dsv4_jax.config import DSV4Config


if TYPE_CHECKING:
    from jax.sharding import Mesh

# "data" cuts requests, with their slots and blocks; "model" each layer's heads and experts, and every device along it
# runs the same tokens. Devices along the last axis are neighbours.
AXES = ("data", "model")


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of a mesh by axis, in the order of `AXES`, from text such as "model=4" or "data=2,model=2".

    Raises:
      ValueError: an unknown axis, one that is named twice, or a size that is no whole number above 0.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh {text!r} must be AXIS=DEVICES with axes of {', '.join(AXES)}, such as model=4")
        sizes[axis] = int(size)
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def make_mesh(sizes: Mapping[str, int]) -> "Mesh":
    """A mesh of the first devices, from its sizes by axis.

    Raises:
      ValueError: there are not so many devices.
    """
    import jax

    devices, needed = jax.devices(), math.prod(sizes.values())
    if needed > len(devices):
        text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        raise ValueError(f"mesh {text} needs {needed} devices, there are {len(devices)} ({devices[0].device_kind})")
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices[:needed])


def check_mesh(mesh: "Mesh") -> None:
    """Raises ValueError unless the mesh has known axes of type Explicit, so that arrays' types say how they are cut."""
    from jax.sharding import AxisType

    if unknown := [axis for axis in mesh.axis_names if axis not in AXES]:
        raise ValueError(f"the mesh has axes {unknown}; known: {', '.join(AXES)}")
    if any(kind != AxisType.Explicit for kind in mesh.axis_types):
        right = f"jax.make_mesh({mesh.axis_sizes}, {mesh.axis_names})"
        raise ValueError(f"the mesh has axes of types {mesh.axis_types}; they must be Explicit: make it with {right}")


def check_shardable(config: DSV4Config, sizes: Mapping[str, int], expert_parallel: bool = False) -> None:
    """Raises ValueError, which names what does not divide, unless a mesh of these sizes by axis can cut the model."""
    parts = sizes.get("model", 1)
    names = ["num_attention_heads", "o_groups", "moe_intermediate_size", "vocab_size"]
    names += ["n_routed_experts"] * expert_parallel
    cut = {name: getattr(config, name) for name in names}
    if odd := {name: size for name, size in cut.items() if size % parts}:
        common = math.gcd(*cut.values())
        fitting = [n for n in range(1, common + 1) if common % n == 0]
        listed = ", ".join(f"{name}={size}" for name, size in odd.items())
        raise ValueError(
            f"mesh axis model={parts} does not divide {listed}; this model can be cut in {', '.join(map(str, fitting))}"
        )


def check_context_parallel(sizes: Mapping[str, int], context_parallel: bool, num_blocks: int = 0) -> int:
    """How many devices of a mesh of these sizes hold the blocks of a part of the cache between them.

    Raises:
      ValueError: there are no others to share them with, or they do not divide `num_blocks`.
    """
    if not context_parallel:
        return 1
    if (devices := sizes.get("model", 1)) == 1:
        raise ValueError(f"{context_parallel=} needs a mesh with more than one device along the axis model")
    if num_blocks % (every := math.prod(sizes.values())):
        raise ValueError(f"{context_parallel=}: the mesh's {every} devices do not divide {num_blocks=}")
    return devices


def check_divisible(sizes: Mapping[str, int], **counts: int) -> None:
    """Raises ValueError, which names what does not divide, unless a mesh of these sizes can cut these counts."""
    parts = sizes.get("data", 1)
    if odd := {name: count for name, count in counts.items() if count % parts}:
        listed = ", ".join(f"{name}={count}" for name, count in odd.items())
        raise ValueError(f"mesh axis data={parts} does not divide {listed}: give multiples of {parts}")
