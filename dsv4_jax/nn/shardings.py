"""Where the parameters of a module belong on a mesh."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from dsv4_jax.nn.projections import FusedLinear
from dsv4_jax.parallel.axis_rules import named_sharding
from dsv4_jax.parallel.mesh import check_mesh
from dsv4_jax.quant import WEIGHT_BLOCK, QuantizedWeight
from dsv4_jax.quant.fp4 import MXFP4_BLOCK


def shardings[M: nnx.Module](module: M, mesh: Mesh, *, expert_parallel: bool = False) -> M:
    """The module with a `NamedSharding` for each array, as `jax.device_put` takes them.

    Parameters are cut as their `axes` and `parallel.axis_rules` say; codes and scales of a `QuantizedWeight` alike.

    Args:
      module: a module, with arrays or instances of `jax.ShapeDtypeStruct`.
      mesh: the devices.
      expert_parallel: each device along "model" gets some of the experts, instead of a part of each.

    Raises:
      ValueError: the mesh has unknown axes or does not divide a parameter, would cut through blocks that share a scale,
        or maps that it cuts are fused.
    """
    check_mesh(mesh)
    for path, fused in nnx.iter_modules(module):
        if isinstance(fused, FusedLinear) and fused.is_sharded:
            where = ".".join(map(str, path))
            raise ValueError(f"{where} joins maps that a mesh cuts: place the model first, and join it then")
    graph, state = nnx.split(module)

    def place(path, parameter):
        value, where = parameter.get_value(), parameter_sharding(parameter, mesh, expert_parallel)
        if isinstance(value, QuantizedWeight):
            check_blocks(".".join(map(str, path)), value.shape, value.kind, where)
        return parameter.replace(jax.tree.map(lambda _: where, value))

    return nnx.merge(graph, nnx.map_state(place, state))


def parameter_sharding(parameter: Any, mesh: Mesh, expert_parallel: bool = False) -> NamedSharding:
    """Where the arrays of a parameter, an `nnx.Variable`, belong."""
    axes = parameter.get_metadata().get("axes", ())
    return named_sharding([axis if axis != "experts" or expert_parallel else None for axis in axes], mesh)


def check_blocks(name: str, shape: tuple[int, ...], kind: str, where: NamedSharding) -> None:
    """Raises ValueError if a device would get a part of a block of values that share a scale.

    Args:
      name: of the weight.
      shape: [..., out, in] of its values.
      kind: its storage, "FP8" or "FP4".
      where: how it is cut.
    """
    blocks = {"FP8": (WEIGHT_BLOCK, WEIGHT_BLOCK), "FP4": (1, MXFP4_BLOCK)}[kind]
    both = zip(("rows", "columns"), shape[-2:], where.shard_shape(shape)[-2:], blocks, strict=True)
    for what, size, part, block in both:
        if part < size and part % block:
            raise ValueError(
                f"{name} is stored as {kind}: the mesh {dict(where.mesh.shape)} would cut its {size} {what} into parts "
                f'of {part}, through blocks of {block} that share a scale; load it with weights="bfloat16", or over '
                "fewer devices"
            )
