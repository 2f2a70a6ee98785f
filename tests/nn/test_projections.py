"""Projections of one input: their matrices are rows of few arrays, and one product computes them all."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn import DeepseekV4ForCausalLM, FusedLinear, Projection, parameter_views
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.quant import QuantizedWeight
from tests.paths import DATA


NAMES = "first", "second"


def pair(dtype=jnp.float32, out_dtypes=(None, None), axes=()):
    """Returns two maps of 8 channels to 4, which share a matrix."""
    maps = {
        name: Projection(4, out_dtype, axes, is_fp8=False) for name, out_dtype in zip(NAMES, out_dtypes, strict=True)
    }
    return FusedLinear(8, maps, param_dtype=dtype, rngs=nnx.Rngs(0))


def separate(maps):
    """Returns {name: FusedLinear of this map alone} of a FusedLinear."""
    modules = {}
    for name, projection in maps.projections.items():
        view = parameter_views(maps)[f"weights.{name}"]
        modules[name] = FusedLinear(view.shape[1], {name: projection}, param_dtype=view.dtype, rngs=nnx.Rngs(1))
        modules[name].weights[name].set_value(view.get_value())
    return modules


@pytest.mark.parametrize("axes", [(), ("inner",)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("out_dtypes", [(None, None), (jnp.float32, None), (jnp.float32, jnp.float32)])
def test_maps_of_one_matrix_give_what_each_gives_alone(dtype, out_dtypes, axes):
    fused, x = pair(dtype, out_dtypes, axes), jax.random.normal(jax.random.key(0), (3, 8), dtype)
    assert fused.groups == (NAMES,) and fused.fused_matrix.shape == (8, 8)
    found = jax.jit(fused)(x)
    assert found.keys() == set(NAMES)
    for (name, alone), out_dtype in zip(separate(fused).items(), out_dtypes, strict=True):
        expected = jax.jit(alone)(x)[name]
        assert found[name].dtype == expected.dtype == (out_dtype or dtype)
        # Sums of eight products in another order, rounded to bfloat16 if they have its dtype.
        np.testing.assert_allclose(
            *(np.asarray(y, np.float32) for y in (found[name], expected)), rtol=1e-6 if out_dtype else 2**-7
        )
        chex.assert_trees_all_equal(fused.matrix(name), alone.matrix(name))


@pytest.mark.parametrize(
    ("projections", "groups"),
    [
        ([Projection(4, is_fp8=False), Projection(6, is_fp8=False)], "ab"),
        ([Projection(128), Projection(256), Projection(4), Projection(128)], "abc d"),
        ([Projection(4), Projection(4)], "a b"),
        ([Projection(128), Projection(4, is_fp8=False), Projection(4), Projection(8, is_fp8=False)], "ac bd"),
        ([Projection(128, axes=("heads",)), Projection(128)], "a b"),
        ([Projection(64, axes=("inner",)), Projection(64, axes=("inner",))], "ab"),
        ([Projection(128, axes=("inner",)), Projection(256, axes=("inner",))], "a b"),
    ],
    ids=["bfloat16", "blocks of FP8", "part of a block", "two storages", "sharded and not", "sharded", "other sizes"],
)
def test_maps_that_are_stored_alike_share_a_matrix(projections, groups):
    names = "abcd"[: len(projections)]
    maps = FusedLinear(8, dict(zip(names, projections, strict=True)), param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert ["".join(group) for group in maps.groups] == groups.split()
    views = parameter_views(maps)
    assert {path: view.shape for path, view in views.items()} == {
        f"weights.{name}": (projection.size, 8) for name, projection in zip(names, projections, strict=True)
    }
    for name, rows in zip(names, projections, strict=True):
        new = jax.random.normal(jax.random.key(rows.size), (rows.size, 8))
        before = {path: view.read() for path, view in views.items()}
        views[f"weights.{name}"].set_value(new)
        after = {path: view.read() for path, view in views.items()}
        chex.assert_trees_all_equal(after, before | {f"weights.{name}": new})
        chex.assert_trees_all_equal(maps.matrix(name), new)


def test_maps_have_names():
    with pytest.raises(KeyError, match="there is no map 'third'; there are first, second"):
        pair().matrix("third")


def test_gradients_reach_fused_maps():
    x = jnp.arange(24.0).reshape(3, 8)

    def gradient(maps):
        return jax.grad(lambda maps: sum(jnp.sum(jnp.sin(y)) for y in maps(x).values()))(maps)

    fused = pair()
    for name, alone in separate(fused).items():
        chex.assert_trees_all_close(gradient(fused).matrix(name), gradient(alone).matrix(name), rtol=1e-6)


def test_a_joined_product_is_computed_once():
    text = jax.jit(lambda pair, x: pair(x)).lower(pair(), jnp.ones((3, 8))).compile().as_text()
    assert text.count(" dot(") + text.count("custom-call(") == 1, text


def groups(layer):
    """Returns the names of the maps of each matrix of a layer's attention, without "_proj"."""
    attention = layer.self_attn
    return [
        ["+".join(names).replace("_proj", "") for names in maps.groups]
        for maps in (attention.input_projections, attention.latent_projections)
    ]


def test_matrices_of_the_released_model():
    """Window, CSA and HCA layers: FP8 and bfloat16 are apart, and so are queries, which a mesh shards."""
    layers = DeepseekV4ForCausalLM(DSV4Config.v4_flash().first_layers(4), rngs=ABSTRACT).model.layers
    pooled = "compressor_kv+compressor_gate"
    assert groups(layers[0]) == [["q_a+kv"], ["q_b"]]
    assert groups(layers[2]) == [
        ["q_a+kv", f"{pooled}+indexer_kv+indexer_gate+indexer_weights"],
        ["q_b", "indexer_q_b"],
    ]
    assert groups(layers[3]) == [["q_a+kv", pooled], ["q_b"]]
    assert layers[3].mlp.shared_experts.gate_up_proj.groups == (("gate_proj", "up_proj"),)


def test_quantized_matrices_of_few_rows_stay_separate():
    model = load_checkpoint(DATA / "official_fp8", weights="quantized")
    attention = model.model.layers[2].self_attn
    inputs = attention.input_projections
    assert isinstance(inputs.weights["q_a_proj"].get_value(), QuantizedWeight)
    pooled = [f"compressor_{name}" for name in ("kv_proj", "gate_proj")]
    if attention.compressor.indexer is not None:
        pooled += [f"indexer_{name}" for name in ("kv_proj", "gate_proj", "weights_proj")]
    # q_a_proj's last block of scales would reach into kv_proj's rows.
    assert inputs.groups == (("q_a_proj",), ("kv_proj",), tuple(pooled))
    assert len(attention.latent_projections.weights) == len(attention.latent_projections.projections)


def test_matrices_in_fp8_share_one():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 128)), jnp.bfloat16)
    # The last one's rows end within a block of scales.
    sizes = {"first": 128, "second": 256, "third": 64}
    fused = FusedLinear(
        128, {name: Projection(size) for name, size in sizes.items()}, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    assert fused.groups == (tuple(sizes),)

    def random_weight(rows):
        codes = jnp.asarray(rng.integers(0, 127, (rows, 128)), jnp.uint8)
        scale = jnp.asarray(rng.integers(118, 122, (-(-rows // 128), 1)), jnp.uint8)
        return QuantizedWeight(codes, scale, "FP8", jnp.dtype(jnp.bfloat16))

    fused.weights["first+second+third"].set_value(random_weight(448))
    views = parameter_views(fused)
    for name, rows in sizes.items():
        others = {other: views[f"weights.{other}"].get_value() for other in sizes if other != name}
        new = random_weight(rows)
        views[f"weights.{name}"].set_value(new)
        chex.assert_trees_all_equal(views[f"weights.{name}"].get_value(), new)
        chex.assert_trees_all_equal({other: views[f"weights.{other}"].get_value() for other in others}, others)
    found = fused(x)
    for name, alone in separate(fused).items():
        chex.assert_trees_all_equal(found[name], alone(x)[name])
        chex.assert_trees_all_equal(fused.matrix(name), views[f"weights.{name}"].read())
