"""The functions that kernels and references share, against float64: no comparison of the two would see their errors.

Arguments have every exponent of the stated domain, with the same mantissas at each: random ones and the extreme ones.
Bounds are those of the docstrings; what was measured stands beside them.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.quant import ordered_sum
from pallas_kernels.formats import exact_math as dm


@functools.cache
def mantissas():
    extreme = [0, 1, 2, 3, (1 << 22) - 1, 1 << 22, (1 << 22) + 1, (1 << 23) - 2, (1 << 23) - 1]
    return np.concatenate([np.random.default_rng(0).integers(0, 1 << 23, 20000), extreme]).astype(np.uint32)


def floats(least: int, most: int) -> np.ndarray:
    """Positive float32 numbers from 2**least up to 2**most: all binades, as many of each, and the last power."""
    exponents = np.arange(least, most, dtype=np.int64)[:, None] + 127
    inner = ((exponents << 23) | mantissas()[None, :]).astype(np.uint32).view(np.float32).ravel()
    return np.append(inner, np.float32(2.0) ** most).astype(np.float32)


def bits(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


def values(function, *x):
    """float64 of the float32 results: the same bits from a compiler that does little and one that does all it can."""
    quick, thorough = (
        jax.tree.map(np.asarray, jax.jit(function, compiler_options={"xla_backend_optimization_level": level})(*x))
        for level in ("0", "3")
    )
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(bits, quick), jax.tree.map(bits, thorough))
    return jax.tree.map(lambda found: found.astype(np.float64), quick)


def units(found, exact):
    """The largest error in units in the last place of the exact result."""
    return np.max(np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64))


def test_exp_negative():
    """Within 2**-22 of 1 (measured: 2**-22.9); the relative error grows with |x|, to 2**-18 (measured: 2**-18.0)."""
    x = np.append(-floats(-126, 127), np.float32([0, -0.0, -86.6, -86.64, -86.65, -87, -3.4e38, -np.inf]))
    found = values(dm.exp_negative, x)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(found - exact).max() < 2**-22
    # 2**-125 = e**-86.643..; close to it the limit may already hold.
    above = x > -86.64
    assert np.abs(found[above] / exact[above] - 1).max() < 2**-17.9
    assert (found[x < -86.65] == 2.0**-125).all() and found[-1] == 2.0**-125
    assert (found[x == 0] == 1).all() and found.max() == 1


def test_exp_negative_never_falls():
    """A larger logit gets no smaller weight."""
    x = np.sort(np.random.default_rng(1).uniform(-90, 0, 1 << 20).astype(np.float32))
    assert np.diff(values(dm.exp_negative, x)).min() >= 0


def test_reciprocal():
    """Within 2 units in the last place (measured: 1.99) for normal x up to 2**125."""
    x = floats(-126, 125)
    assert units(values(dm.reciprocal, x), 1 / x.astype(np.float64)) < 2
    powers = np.float32(2.0) ** np.arange(-126, 126)
    assert units(values(dm.reciprocal, powers), 1 / powers.astype(np.float64)) <= 1


def test_inverse_sqrt():
    """Within 2 units in the last place (measured: 1.93) from 2**-125 to 2**125."""
    x = floats(-125, 125)
    assert units(values(dm.inverse_sqrt, x), 1 / np.sqrt(x.astype(np.float64))) < 2


def test_cos_sin():
    """Within 2e-7 (measured: 1.5e-7) for angles 0 .. 2**20, the neighbors of all multiples of pi / 2 among them."""
    multiples = (np.arange(667544) * (np.pi / 2)).astype(np.float32)
    around = [np.nextafter(multiples, np.float32(side)) for side in (0, 2**21)]
    x = np.concatenate([floats(-126, 20), np.zeros(1), multiples, *around, np.arange(1 << 20)]).astype(np.float32)
    x = x[x <= 2**20]
    for found, exact in zip(values(dm.cos_sin, x), (np.cos, np.sin), strict=True):
        assert np.abs(found - exact(x.astype(np.float64))).max() < 2e-7


def test_round_bfloat16():
    """Exact for every finite float32: ties to even, signed zeros, what overflows."""
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    x = np.concatenate([halves.ravel().view(np.float32), floats(-126, 127), -floats(-126, 127)])
    x = x[np.isfinite(x)]
    with np.errstate(over="ignore"):
        exact = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    chex.assert_trees_all_equal(bits(values(dm.round_bfloat16, x)), bits(exact))


def test_product_is_rounded_before_it_is_added():
    """`product(x, y) + z` has two roundings, whatever the compiler would make of `x * y + z`."""
    random = np.random.default_rng(2)
    x, y, z = (np.ldexp(random.uniform(-2, 2, 1 << 20), random.integers(-40, 40)).astype(np.float32) for _ in range(3))
    z[::2] = -(x * y)[::2]  # nothing is left but the rounding, which an FMA would return
    found = values(lambda x, y, z: dm.product(x, y) + z, x, y, z)
    chex.assert_trees_all_equal(found, (x * y + z).astype(np.float64))
    assert (found[::2] == 0).all()


@pytest.mark.parametrize("count", [1, 2, 8, 64, 128])
def test_tree_sum(count):
    """The bits of `ordered_sum`; within log2(count) roundings of the terms' magnitudes (and so of float64)."""
    terms = np.random.default_rng(count).standard_normal((count, 10000)).astype(np.float32)
    found = values(lambda *terms: dm.tree_sum(list(terms)), *terms)
    chex.assert_trees_all_equal(bits(found), bits(ordered_sum(jnp.asarray(terms), axis=0)))
    exact = terms.astype(np.float64).sum(axis=0)
    magnitude = np.abs(terms.astype(np.float64)).sum(axis=0)
    assert (np.abs(found - exact) <= np.log2(count) * 2**-24 * magnitude).all()


@pytest.mark.parametrize(
    ("function", "derivative", "x"),
    [
        (dm.exp_negative, np.exp, [-1.0, -0.25, -20.0]),
        (dm.reciprocal, lambda x: -1 / x**2, [0.5, 3.0, 1000.0]),
        (dm.inverse_sqrt, lambda x: -0.5 * x**-1.5, [0.5, 3.0, 1000.0]),
        (lambda x: dm.cos_sin(x)[0], lambda x: -np.sin(x), [0.5, 3.0, 1000.0]),
        (lambda x: dm.cos_sin(x)[1], np.cos, [0.5, 3.0, 1000.0]),
    ],
)
def test_derivatives(function, derivative, x):
    """Bits have no derivative, so each function has that of the function that it computes (errors: float32)."""
    found = jax.jit(jax.vmap(jax.grad(function)))(jnp.asarray(x, jnp.float32))
    chex.assert_trees_all_close(np.asarray(found, np.float64), derivative(np.asarray(x)), rtol=1e-5, atol=1e-6)
    second = jax.grad(jax.grad(function))(jnp.float32(x[0]))
    step = 1e-5
    slope = (derivative(x[0] + step) - derivative(x[0] - step)) / (2 * step)
    chex.assert_trees_all_close(np.float64(second), slope, rtol=1e-4, atol=1e-6)
