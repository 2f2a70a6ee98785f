"""The experts' kernel for many tokens against float64: interpreted, on a GPU, and compiled for one."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv4_jax import ops
from tests.pallas_kernels.kernels import registers
from tests.pallas_kernels.test_experts import check, compare, operands, without_some_experts


MODULE = sys.modules["pallas_kernels.experts.grouped_experts"]


@pytest.fixture(autouse=True)
def many_tokens(monkeypatch):
    monkeypatch.setattr(sys.modules["dsv4_jax.ops.experts"], "MAX_PAIRS", 0)


@pytest.mark.parametrize(("inner", "kind"), [(512, "FP4"), (256, "FP4"), (256, "BF16")])
def test_interpreted(monkeypatch, inner, kind):
    monkeypatch.setattr(MODULE, "MAX_INPUTS", 16)
    x, _, *others = operands(18, 1, 3, 512, inner, kind)
    # One has more pairs than a tile, and one none.
    compare("interpret", x, jnp.asarray([[1]] * 17 + [[2]], jnp.int32), *others)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)])
def test_pairs_without_an_expert_here_add_nothing(implementation):
    x, selected, *others = operands(4, 2, 2, 512, 512)
    compare(implementation, x, without_some_experts(selected), *others)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
@pytest.mark.parametrize("tokens", [9, 100, 700, 3000])
def test_on_gpu(tokens, kind):
    check("mosaic_gpu", tokens, 6, 32, 1024, 512, kind, shared=5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
def test_an_eighth_of_each_expert_on_gpu(kind):
    check("mosaic_gpu", 300, 6, 32, 1024, 256, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["FP4", "BF16"])
def test_the_same_bits_every_time_on_gpu(kind):
    arrays = operands(500, 6, 32, 1024, 512, kind)
    call = jax.jit(functools.partial(ops.experts, limit=7.0, implementation="mosaic_gpu"))
    first, second = (np.asarray(call(*arrays), np.float32) for _ in range(2))
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
    if tokens in (2048, 8192):
        weights = S((256, 4096, 4096), jnp.bfloat16), S((256, 4096, 2048), jnp.bfloat16)
        compile_for_h100(f"bf16_experts{tokens}", run, *args, *weights)
""")
    # Five or three warpgroups start with as many registers each, and may not hold more together.
    assert used == {
        "experts64": 96,
        "experts2048": 96,
        "experts4096": 96,
        "experts8192": 168,
        "bf16_experts2048": 96,
        "bf16_experts8192": 168,
    }, used
