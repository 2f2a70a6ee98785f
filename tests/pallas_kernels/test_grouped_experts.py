"""The experts' kernel for many tokens against float64: interpreted, on a GPU, and compiled for one."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_experts
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.test_experts import LIMIT, check, operands, reference, run


MODULE = sys.modules["pallas_kernels.experts.grouped_experts"]


def pairs_of(*weights):
    """Codes and scales of each."""
    return tuple((weight.codes, weight.scale) for weight in weights)


def agree(got, want):
    # Where a sum in another order is rounded the other way, the value is off by 2**-8: few are.
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
    np.testing.assert_allclose(got, want, atol=2.0**-6 * np.abs(want).max())


def test_interpreted(monkeypatch):
    monkeypatch.setattr(sys.modules["dsv4_jax.ops.experts"], "MOST_PAIRS", 0)
    monkeypatch.setattr(MODULE, "MOST_INPUTS", 16)
    x, _, *others = operands(18, 1, 3, 512, 512)
    # One has more pairs than a tile, and one none.
    selected = jnp.asarray([[1]] * 17 + [[2]], jnp.int32)
    agree(np.float64(run(x, selected, *others, implementation="interpret")), reference(x, selected, *others))
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
def test_pairs_without_an_expert_here(interpret):
    x, _, weights, *matrices = operands(4, 1, 1, 512, 512)
    selected = jnp.asarray([[-1], [0], [1], [0]], jnp.int32)
    call = functools.partial(grouped_experts, limit=LIMIT, interpret=interpret)
    got = np.asarray(call(x, selected, weights, *pairs_of(*matrices)), np.float64).sum(axis=1)
    assert not got[::2].any()
    agree(got[1::2], reference(x[1::2], selected[1::2], weights[1::2], *matrices))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [9, 100, 700, 3000])
def test_on_gpu(monkeypatch, tokens):
    monkeypatch.setattr(sys.modules["dsv4_jax.ops.experts"], "MOST_PAIRS", 0)
    check("mosaic_gpu", tokens, 6, 32, 1024, 512, shared=5)


@pytest.mark.gpu
def test_the_same_bits_every_time_on_gpu():
    arrays = operands(500, 6, 32, 1024, 512)
    call = jax.jit(functools.partial(grouped_experts, limit=LIMIT))
    first, second = (np.asarray(call(*arrays[:3], *pairs_of(*arrays[3:])), np.float32) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.aot
def test_compiles_for_h100_without_spills():
    used = registers("""
import functools, jax, jax.numpy as jnp
from pallas_kernels import grouped_experts
S, pairs = jax.ShapeDtypeStruct, lambda rows, columns: tuple(S((256, rows, columns // n), jnp.uint8) for n in (2, 32))
for tokens in 64, 2048, 4096, 8192:
    args = S((tokens, 4096), jnp.bfloat16), S((tokens, 6), jnp.int32), S((tokens, 6), jnp.float32)
    run = functools.partial(grouped_experts, limit=7.0)
    compile_for_h100(f"experts{tokens}", run, *args, pairs(4096, 4096), pairs(4096, 2048))
""")
    # Five or three warpgroups start with as many registers each, and may not hold more together.
    assert used == {"experts64": 96, "experts2048": 96, "experts4096": 96, "experts8192": 168}, used
