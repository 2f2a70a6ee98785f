"""A model that costs the host little to hand to a compiled function."""

import dataclasses
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.nn.linear import JoinedWeight
from dsv4_jax.ops.linear import Part


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedModel:
    """A model's arrays in one list.

    A call of a compiled function takes its arguments apart. For a module tree of V4-Flash's size that is some 5 ms of
    Python, longer than the step itself may take; for a list it is 0.25 ms.

    Attributes:
      leaves: the arrays.
      places: for each of the model's arrays, the leaf that it is, or (leaf, its parts, which part) where it was joined
        with others, as in `JoinedWeight` (static).
      structure: how they make up the model (static).
    """

    leaves: list[Any]
    places: tuple[int | tuple[int, tuple[Part, ...], int], ...] = dataclasses.field(metadata=dict(static=True))
    structure: Any = dataclasses.field(metadata=dict(static=True))


def pack(model: nnx.Module | PackedModel, *, join: bool = False) -> PackedModel:
    """The model for callers that run many steps, accepted wherever `dsv4_jax.decode` takes a model.

    Args:
      model: an nnx.Module; a packed one is returned as it is.
      join: store matrices that are multiplied with the same input as one, so that a step reads them in one product
        instead of up to seven small ones. Modules say which, `same_input()`; sharded and quantised ones stay as they
        are. The joined ones are copies: drop `model` where memory is short.
    """
    if isinstance(model, PackedModel):
        return model
    arrays, structure = jax.tree.flatten(model)
    groups = _groups(model) if join else []
    leaves: list[Any] = []
    place: dict[int, tuple[int, tuple[Part, ...], int]] = {}
    for group in groups:
        matrices = [linear.weight.get_value() for linear in group]
        parts = tuple((len(matrix), linear.rounded) for linear, matrix in zip(group, matrices, strict=True))
        place |= {id(matrix): (len(leaves), parts, i) for i, matrix in enumerate(matrices)}
        leaves.append(jnp.concatenate(matrices))
    places: list[int | tuple[int, tuple[Part, ...], int]] = []
    for array in arrays:
        places.append(place.get(id(array), len(leaves)))
        if id(array) not in place:
            leaves.append(array)
    return PackedModel(leaves, tuple(places), structure)


def unpack(model: nnx.Module | PackedModel) -> Any:
    """The model itself, also while it is traced."""
    if not isinstance(model, PackedModel):
        return model
    arrays = [
        model.leaves[place] if isinstance(place, int) else JoinedWeight(model.leaves[place[0]], *place[1:])
        for place in model.places
    ]
    return jax.tree.unflatten(model.structure, arrays)


def _groups(model):
    """Lists of two or more linear maps with the same input, their weights of one dtype and place, none sharded."""
    groups = []
    for _, module in nnx.iter_modules(model):
        for linears in getattr(module, "same_input", list)():
            alike = defaultdict(list)
            for linear in linears:
                matrix = linear.weight.get_value()
                if isinstance(matrix, jax.core.Tracer):
                    alike[matrix.dtype].append(linear)
                elif isinstance(matrix, jax.Array) and matrix.sharding.is_fully_replicated:
                    alike[matrix.dtype, matrix.sharding].append(linear)
            groups += [group for group in alike.values() if len(group) > 1]
    return groups
