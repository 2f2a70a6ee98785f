"""The patches of JAX find what JAX 0.11 finds, and are applied only when a kernel is lowered for a GPU."""

import collections
import inspect
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import constraints, core
from jax.experimental.mosaic.gpu.fragmented_array import WGSplatFragLayout

from pallas_kernels.runtime import jax_compat
from pallas_kernels.runtime.jax_compat import equal_variables, join_systems
from pallas_kernels.runtime.launch import kernel


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
    few = constraints.ConstraintSystem(assignments={x: one})
    many = constraints.ConstraintSystem({x: one, y: two})
    wrong = constraints.ConstraintSystem(assignments={x: two, y: two})
    assert join_systems(*((many, few) if swapped else (few, many))).assignments == {x: one, y: two}
    assert isinstance(join_systems(*((wrong, few) if swapped else (few, wrong))), constraints.Unsatisfiable)
    assert isinstance(join_systems(few, constraints.Unsatisfiable()), constraints.Unsatisfiable)


def lowered_for_gpu():
    run = kernel(lambda x, out: None, out_type=jax.ShapeDtypeStruct((128,), jnp.float32), interpret=False)
    return jax.jit(run).trace(jnp.zeros(128)).lower(lowering_platforms=("cuda",)).as_text()


def test_calls_of_kernels_are_marked_for_dependent_launches():
    assert "uses_pdl = true" in lowered_for_gpu()


def test_this_version_of_jax_has_what_is_patched():
    """If it fails, JAX has moved: adapt `jax_compat`, and measure a decode step on a GPU."""
    lowered_for_gpu()
    assert jax.__version_info__[:3] in jax_compat.PDL_VERSIONS
    rule = inspect.signature(inspect.unwrap(core._mosaic_gpu_lowering_rule))
    assert rule.parameters["module"].kind is inspect.Parameter.KEYWORD_ONLY
    if jax.__version_info__ < (0, 12):
        assert constraints.compute_transitively_equal_vars is equal_variables
        assert constraints.ConstraintSystem.__and__ is join_systems
        fields = [field.name for field in constraints.ConstraintSystem.__dataclass_fields__.values()]
        assert fields == ["assignments", "constraints"]


def test_an_unknown_version_is_reported_and_left_alone(monkeypatch, caplog):
    rule = core._mosaic_gpu_lowering_rule
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    monkeypatch.setattr(jax, "__version__", "0.13.0")
    jax_compat.apply_patches.__wrapped__()
    assert core._mosaic_gpu_lowering_rule is rule
    assert [record.getMessage() for record in caplog.records if record.name == "pallas_kernels"] == [
        "JAX 0.13.0: CUDA graphs do not overlap kernels; the patch for it is unverified"
    ]


def test_ops_on_a_cpu_leave_jax_alone():
    script = """
import jax, jax.numpy as jnp
from jax._src.interpreters import mlir
from jax.experimental.mosaic.gpu import constraints, core

def found():
    return [vars(module).copy() for module in (constraints, constraints.ConstraintSystem, core, mlir)]

before = found()
from dsv4_jax import ops
for implementation in (None, "interpret"):
    ops.linear(jnp.zeros((8, 256), jnp.bfloat16), jnp.zeros((64, 256), jnp.bfloat16), implementation=implementation)
for old, new in zip(before, found(), strict=True):
    assert all(new[name] is value for name, value in old.items()), [n for n in old if new[n] is not old[n]]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
