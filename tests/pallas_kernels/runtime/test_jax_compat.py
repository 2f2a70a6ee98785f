"""What is taken from JAX 0.12 finds what JAX 0.11 finds."""

import collections
import itertools

import jax
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import constraints
from jax.experimental.mosaic.gpu.fragmented_array import WGSplatFragLayout

from pallas_kernels.runtime.jax_compat import equal_variables, join_systems


class Key(collections.namedtuple("Key", ["name", "shape", "memory_space"])):
    """What a variable stands for."""


def variables(count):
    return [constraints.Variable(Key(i, (128,), constraints.MemorySpace.REG)) for i in range(count)]


def test_variables_that_are_equal_through_others():
    rng = np.random.default_rng(0)
    for _ in range(20):
        all_variables = variables(12)
        pairs = rng.integers(0, 12, (rng.integers(1, 12), 2))
        equations = [constraints.Equals(all_variables[a], variables(12)[b]) for a, b in pairs]
        reached = np.eye(12, dtype=bool)
        for a, b in pairs:
            reached[a, b] = reached[b, a] = True
        for middle, a, b in itertools.product(range(12), repeat=3):
            reached[a, b] |= reached[a, middle] & reached[middle, b]
        found = equal_variables(constraints.ConstraintSystem(constraints=equations))
        assert {v.key.name for v in found} == set(pairs.reshape(-1).tolist())
        for variable, others in found.items():
            expected = set(np.flatnonzero(reached[variable.key.name]).tolist()) - {variable.key.name}
            assert len(others) == len(expected) and {other.key.name for other in others} == expected


@pytest.mark.parametrize("swapped", [False, True])
def test_systems_are_joined_unless_they_contradict_each_other(swapped):
    x, y = variables(2)
    one, two = (constraints.RegisterLayout(WGSplatFragLayout((size,))) for size in (128, 256))
    few, many = constraints.ConstraintSystem(assignments={x: one}), constraints.ConstraintSystem({x: one, y: two})
    wrong = constraints.ConstraintSystem(assignments={x: two, y: two})
    assert join_systems(*((many, few) if swapped else (few, many))).assignments == {x: one, y: two}
    assert isinstance(join_systems(*((wrong, few) if swapped else (few, wrong))), constraints.Unsatisfiable)
    assert isinstance(join_systems(few, constraints.Unsatisfiable()), constraints.Unsatisfiable)
    if jax.__version_info__ < (0, 12):
        assert (
            isinstance(few & wrong, constraints.Unsatisfiable) and constraints.ConstraintSystem.__and__ is join_systems
        )
