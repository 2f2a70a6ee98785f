"""Fused projections: which maps share a matrix, and that one product computes them all."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.nn import FusedLinear, Projection, parameter_views
from dsv4_jax.quant import QuantizedWeight
from tests.paths import DATA


NAMES = "first", "second"


def pair(dtype=jnp.float32, *, out_dtypes=(None, None), **options):
    """Returns two maps of 8 channels to 4."""
    maps = {name: Projection(4, out_dtype, **options) for name, out_dtype in zip(NAMES, out_dtypes, strict=True)}
    return FusedLinear(8, maps, param_dtype=dtype, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("out_dtypes", [(None, None), (jnp.float32, None), (jnp.float32, jnp.float32)])
@pytest.mark.parametrize("axes", [(), ("inner",)])
def test_maps_give_the_products_of_their_matrices(dtype, out_dtypes, axes):
    fused = pair(dtype, out_dtypes=out_dtypes, axes=axes, is_fp8=False)
    x = jax.random.normal(jax.random.key(0), (3, 8), dtype)
    products = jax.jit(fused)(x)
    assert len(fused.weights) == 1 and products.keys() == set(NAMES)
    for (name, product), out_dtype in zip(products.items(), out_dtypes, strict=True):
        assert product.dtype == (out_dtype or dtype)
        expected = np.asarray(x, np.float64) @ np.asarray(fused.matrix(name), np.float64).T
        # Sums of eight terms in float32, or rounded to bfloat16 once.
        tolerance = 1e-5 if product.dtype == jnp.float32 else 2**-7
        np.testing.assert_allclose(np.asarray(product, np.float64), expected, rtol=tolerance, atol=tolerance)


def groups(**projections):
    return FusedLinear(256, projections, param_dtype=jnp.float32, rngs=nnx.Rngs(0)).groups


def test_maps_share_a_matrix_if_they_are_stored_and_sharded_alike():
    fp8 = Projection(128)
    plain = Projection(32, is_fp8=False)
    assert groups(a=fp8, b=fp8, c=plain, d=plain) == (("a", "b"), ("c", "d"))
    assert groups(a=fp8, b=Projection(128, axes=("heads",))) == (("a",), ("b",))
    assert groups(a=Projection(32, axes=("inner",)), b=Projection(32, axes=("inner",))) == (("a", "b"),)
    # A block of scales would belong to both maps.
    assert groups(a=Projection(64), b=fp8) == (("a",), ("b",))
    assert groups(a=fp8, b=Projection(64), c=fp8) == (("a", "b"), ("c",))


def test_gradients_reach_fused_maps():
    x = jnp.arange(24.0).reshape(3, 8)
    fused = pair(is_fp8=False)

    def loss(first, second):
        return jnp.sum(jnp.sin(x @ first.T)) + jnp.sum(jnp.sin(x @ second.T))

    gradient = jax.grad(lambda maps: sum(jnp.sum(jnp.sin(y)) for y in maps(x).values()))(fused)
    expected = jax.grad(loss, argnums=(0, 1))(*map(fused.matrix, NAMES))
    for name, own in zip(NAMES, expected, strict=True):
        chex.assert_trees_all_close(gradient.matrix(name), own, rtol=1e-5)  # sums of three terms


def test_a_fused_product_is_computed_once():
    text = jax.jit(lambda pair, x: pair(x)).lower(pair(is_fp8=False), jnp.ones((3, 8))).compile().as_text()
    assert text.count(" dot(") + text.count("custom-call(") == 1, text


def test_views_of_fused_maps_write_their_own_rows():
    fused = pair(is_fp8=False)
    views = parameter_views(fused)
    assert views.keys() == {"weights.first", "weights.second"}
    before = fused.matrix("first")
    views["weights.second"].set_value(jnp.full((4, 8), 7.0))
    chex.assert_trees_all_equal(fused.matrix("first"), before)
    chex.assert_trees_all_equal(views["weights.second"].read(), jnp.full((4, 8), 7.0))
    with pytest.raises(ValueError, match="must be stored like the old one"):
        views["weights.first"].set_value(jnp.zeros((3, 8)))


def test_quantized_maps_of_few_rows_have_matrices_of_their_own():
    model = load_checkpoint(DATA / "official_fp8", weights="quantized")
    inputs = model.model.layers[2].self_attn.input_projections
    assert isinstance(inputs.weights["q_a_proj"].get_value(), QuantizedWeight)
    assert inputs.groups[:2] == (("q_a_proj",), ("kv_proj",))
    assert all(
        not isinstance(inputs.weights["+".join(names)].get_value(), QuantizedWeight) for names in inputs.groups[2:]
    )


def test_matrices_in_fp8_share_one():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 128)), jnp.bfloat16)
    fused = FusedLinear(128, {name: Projection(128) for name in NAMES}, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    codes = jnp.asarray(rng.integers(0, 127, (256, 128)), jnp.uint8)
    scale = jnp.asarray(rng.integers(118, 122, (2, 1)), jnp.uint8)
    fused.weights["first+second"] = nnx.Param(QuantizedWeight(codes, scale, "FP8", jnp.dtype(jnp.bfloat16)), axes=())
    products = fused(x)
    views = parameter_views(fused)
    for number, name in enumerate(NAMES):
        rows = slice(128 * number, 128 * number + 128)
        alone = QuantizedWeight(codes[rows], scale[number : number + 1], "FP8", jnp.dtype(jnp.bfloat16))
        chex.assert_trees_all_equal(views[f"weights.{name}"].get_value(), alone)
        chex.assert_trees_all_equal(fused.matrix(name), alone[...])
        expected = np.asarray(x, np.float64) @ np.asarray(alone[...], np.float64).T
        # Products are exact; sums are rounded to bfloat16.
        np.testing.assert_allclose(np.asarray(products[name], np.float64), expected, rtol=2**-7, atol=1e-2)
