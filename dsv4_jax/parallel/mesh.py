"""Meshes of devices and their validation. Importing this module does not import JAX."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dsv4_jax.common.mesh_axes import AXES, DATA_AXIS, MODEL_AXIS
from dsv4_jax.config import DSV4Config


if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh


def parse_mesh(text: str) -> dict[str, int]:
    """Parses text such as "model=4" or "data=2,model=2" to {name of an axis: its size}, in the order of `AXES`.

    Raises:
      ValueError: an axis is unknown or named twice, or a size is not a positive whole number.
    """
    sizes: dict[str, int] = {}
    for item in text.split(","):
        axis, _, size = (piece.strip() for piece in item.partition("="))
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"mesh {text!r} must be AXIS=DEVICES with axes of {', '.join(AXES)}, such as model=4")
        sizes[axis] = int(size)
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def make_mesh(sizes: Mapping[str, int]) -> "Mesh":
    """Makes a mesh with these sizes, {name of an axis: its size}, from the first devices in `jax.devices()`.

    Raises:
      ValueError: there are too few devices.
    """
    import jax

    devices = jax.devices()
    needed = math.prod(sizes.values())
    if needed > len(devices):
        text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
        advice = f"; set JAX_NUM_CPU_DEVICES={needed} to try it on a CPU" * (devices[0].platform == "cpu")
        raise ValueError(
            f"mesh {text} needs {needed} devices, there are {len(devices)} ({devices[0].device_kind}){advice}"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices[:needed])


def abstract_mesh(sizes: Mapping[str, int]) -> "AbstractMesh":
    """Returns a mesh with these sizes but without devices, for the shardings of `jax.ShapeDtypeStruct`."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Explicit,) * len(sizes))


def check_mesh(mesh: "Mesh | AbstractMesh") -> None:
    """Raises ValueError if an axis of the mesh is unknown, or is not Explicit.

    On a mesh with Explicit axes an array's type includes its sharding, which `sharded_step` reads.
    """
    from jax.sharding import AxisType

    if unknown := [axis for axis in mesh.axis_names if axis not in AXES]:
        raise ValueError(f"the mesh has axes {unknown}; known: {', '.join(AXES)}")
    if any(kind != AxisType.Explicit for kind in mesh.axis_types):
        right = f"jax.make_mesh({mesh.axis_sizes}, {mesh.axis_names})"
        raise ValueError(f"the mesh has axes of types {mesh.axis_types}; they must be Explicit: make it with {right}")


def check_shardable(config: DSV4Config, sizes: Mapping[str, int], expert_parallel: bool = False) -> None:
    """Raises ValueError if the mesh axis "model" does not divide the sizes of the model that are sharded over it.

    Args:
      config: configuration of the model.
      sizes: {name of a mesh axis: its size}.
      expert_parallel: whether whole experts are sharded over the axis, which must then divide `n_routed_experts` too.
    """
    devices = sizes.get(MODEL_AXIS, 1)
    names = ["num_attention_heads", "o_groups", "moe_intermediate_size", "vocab_size"]
    names += ["n_routed_experts"] * expert_parallel
    sharded = {name: getattr(config, name) for name in names}
    if config.engram is not None:
        sharded["engram_head_dim"] = config.engram.head_dim
    if expert_parallel and config.dspark is not None:
        sharded["dspark_n_routed_experts"] = config.layer_experts(config.num_hidden_layers)[0]
    if listed := _indivisible(sharded, devices):
        common = math.gcd(*sharded.values())
        valid_sizes = [n for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"mesh axis model={devices} does not divide {listed}; this model takes {', '.join(map(str, valid_sizes))}"
        )


def check_context_parallel(sizes: Mapping[str, int], context_parallel: bool, num_blocks: int = 0) -> int:
    """Checks sizes for `context_parallel`, and returns the number of devices among which a shard's blocks are divided.

    Args:
      sizes: {name of a mesh axis: its size}.
      context_parallel: whether each shard along the axis "data" divides its blocks over the axis "model". If not,
        nothing is checked, and the result is 1.
      num_blocks: number of blocks in all shards; 0 = not known yet.

    Raises:
      ValueError: `context_parallel` is True, but the axis "model" has only one device, or `num_blocks` is no multiple
        of the number of devices of the mesh.
    """
    if not context_parallel:
        return 1
    if (devices := sizes.get(MODEL_AXIS, 1)) == 1:
        raise ValueError(f"{context_parallel=} needs a mesh with more than one device along the axis model")
    if num_blocks % (every := math.prod(sizes.values())):
        raise ValueError(f"{context_parallel=}: the mesh's {every} devices do not divide {num_blocks=}")
    return devices


def check_divisible(sizes: Mapping[str, int], **counts: int) -> None:
    """Raises ValueError if the size of the mesh axis "data" does not divide one of the counts.

    Args:
      sizes: {name of a mesh axis: its size}.
      counts: the counts. Their names, such as `max_requests`, appear in the error message.
    """
    shards = sizes.get(DATA_AXIS, 1)
    if listed := _indivisible(counts, shards):
        raise ValueError(f"mesh axis data={shards} does not divide {listed}: give multiples of {shards}")


def _indivisible(counts, devices):
    """Returns the text "NAME=COUNT, .." of the counts that `devices` does not divide."""
    return ", ".join(f"{name}={count}" for name, count in counts.items() if count % devices)
