"""Rounding, ordered sums, the Hadamard transform and power-of-two scales."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized
from hypothesis import given, settings, strategies as st

from dsv4_jax.quant import (
    decode_e2m1,
    decode_e4m3,
    e8m0_ceil,
    e8m0_reciprocal,
    e8m0_value,
    encode_e2m1,
    encode_e4m3,
    hadamard,
    ordered_sum,
    round_to,
)
from dsv4_jax.quant.fp4 import pack_fp4, unpack_fp4


def float32_of_every_exponent(count: int) -> np.ndarray:
    bits = np.random.default_rng(0).integers(0x00800000, 0x7F000000, count, dtype=np.uint32)
    return bits.view(np.float32) * np.where(np.arange(count) % 2, 1, -1).astype(np.float32)


def test_round_to_survives_compilation():
    x = jnp.asarray(float32_of_every_exponent(4096))
    expected = np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    got = jax.jit(lambda x: round_to(x, jnp.bfloat16).astype(jnp.float32))(x)
    chex.assert_trees_all_equal(got, expected)
    assert "reduce-precision" in jax.jit(lambda x: round_to(x, jnp.bfloat16)).lower(x).as_text("hlo")


def test_round_to_leaves_the_right_type_alone():
    x = jnp.asarray([1.0000001, -0.0], jnp.float32)
    chex.assert_trees_all_equal(round_to(x, jnp.float32), x)
    y = x.astype(jnp.bfloat16)
    assert round_to(y, jnp.bfloat16).dtype == jnp.bfloat16
    assert round_to(y, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("size", [1, 2, 16, 64, 128])
def test_hadamard_is_sylvesters_matrix(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    # Small integers: every sum is exact, so the only rounding is the last product's.
    x = np.random.default_rng(size).integers(-8, 9, (3, size)).astype(np.float32)
    expected = (x @ matrix.T).astype(np.float32) * np.float32(size**-0.5)
    chex.assert_trees_all_equal(hadamard(jnp.asarray(x)), expected)
    assert hadamard(jnp.zeros((0, size), jnp.float32)).shape == (0, size)


@pytest.mark.parametrize("size", [0, 3, 24])
def test_hadamard_needs_a_power_of_two(size):
    with pytest.raises(ValueError, match=rf"power of two.*\(2, {size}\)"):
        hadamard(jnp.zeros((2, size), jnp.float32))


@settings(deadline=None)  # the first example compiles
@given(st.integers(1, 253), st.integers(0, 2**23 - 1))
def test_e8m0_rounds_up_to_a_power_of_two(exponent, mantissa):
    x = np.uint32(exponent << 23 | mantissa).view(np.float32)
    bits = e8m0_ceil(jnp.asarray(x))
    value = np.asarray(e8m0_value(bits))
    assert value >= x > value / 2
    assert value == np.asarray(bits).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def test_e8m0_reciprocal_is_exact():
    bits = jnp.arange(1, 254, dtype=jnp.uint8)
    assert np.all(np.asarray(e8m0_value(bits)).astype(np.float64) * np.asarray(e8m0_reciprocal(bits)) == 1)


def test_every_e4m3_code_decodes():
    bits = np.arange(256, dtype=np.uint8)
    expected = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    values = np.asarray(decode_e4m3(jnp.asarray(bits)))
    chex.assert_trees_all_equal(values, expected)
    number = ~np.isnan(expected)  # a NaN's sign means nothing, and a GPU drops it
    chex.assert_trees_all_equal(np.signbit(values[number]), np.signbit(expected[number]))


def test_no_cast_pair_that_a_gpu_could_delete():
    """XLA on GPU turns f32 -> e4m3 -> f32 into nothing: seen on an H100. CPU keeps it, so look at the program."""
    program = jax.jit(lambda x: decode_e4m3(encode_e4m3(x))).lower(jnp.zeros(8, jnp.float32)).as_text()
    casts = [line for line in program.splitlines() if "stablehlo.convert" in line and "f8E4M3FN" in line]
    assert len(casts) == 1 and "-> tensor<8xf8E4M3FN>" in casts[0], program


class TestAgainstDefinitions(chex.TestCase):
    """Each op by op and as one program: XLA could fuse what the rules keep apart."""

    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.product(length=[1, 2, 3, 8, 13], axis=[0, 1, -1])
    def test_ordered_sum_is_a_tree_of_halves(self, length, axis):
        shape = [5, 6, 7]
        shape[axis] = length
        x = np.random.default_rng(length).normal(size=shape).astype(np.float32)

        def tree(x):
            if len(x) == 1:
                return x[0]
            half = len(x) // 2
            return tree(x[:half] + x[half:])

        terms = np.moveaxis(x, axis, 0)
        missing = {1: 0, 2: 0, 3: 1, 8: 0, 13: 3}[length]
        padded = np.concatenate([terms, np.zeros((missing, *terms.shape[1:]), np.float32)])
        total = self.variant(ordered_sum, static_argnames="axis")
        chex.assert_trees_all_equal(total(jnp.asarray(x), axis=axis), tree(padded))

    @chex.variants(with_jit=True, without_jit=True)
    def test_e4m3_matches_ml_dtypes_and_saturates(self):
        x = float32_of_every_exponent(20000)
        x = np.concatenate(
            [x, np.linspace(-500, 500, 4001, dtype=np.float32), np.float32([0.0, -0.0, np.inf, -np.inf])]
        )
        expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        chex.assert_trees_all_equal(self.variant(encode_e4m3)(jnp.asarray(x)), expected.view(np.uint8))

    @chex.variants(with_jit=True, without_jit=True)
    def test_e2m1_matches_ml_dtypes_on_ties_signs_and_saturation(self):
        ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        around = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(9))])
        ends = np.float32([0.0, -0.0, 6, -6, 7, -7, 1e30, -1e30])
        x = np.concatenate([around, -around, ends, np.linspace(-8, 8, 999)]).astype(np.float32)
        x = np.concatenate([x, float32_of_every_exponent(5000)])
        expected = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        codes = self.variant(encode_e2m1)(jnp.asarray(x))
        chex.assert_trees_all_equal(codes, expected.view(np.uint8) & 15)
        values = np.asarray(decode_e2m1(codes))
        chex.assert_trees_all_equal(values.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def test_packed_fp4_holds_the_even_index_in_the_low_nibble():
    codes = jnp.asarray([[1, 2, 15, 0]], jnp.uint8)
    chex.assert_trees_all_equal(pack_fp4(codes), np.array([[0x21, 0x0F]]))
    chex.assert_trees_all_equal(unpack_fp4(pack_fp4(codes)), codes)
