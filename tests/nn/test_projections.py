"""Joined projections: the same rows in fewer arrays, and one product for all maps of an input."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.checkpoint import load_checkpoint, read_checkpoint, save_release
from dsv4_jax.nn import DeepseekV4ForCausalLM, FusedLinear, fuse_projections
from dsv4_jax.nn.layers import ABSTRACT
from dsv4_jax.nn.projections import ModuleFiller, parameter_readers
from dsv4_jax.quant import QuantizedWeight
from tests.paths import DATA


NAMES = "first", "second"
SIZES = dict.fromkeys(NAMES, 4)


def pair(*dtypes, out_dtypes=(None, None)):
    """Returns two maps of 8 channels to 4, each with a matrix of its own dtype."""
    options = dict(out_dtypes=dict(zip(NAMES, out_dtypes, strict=True)), param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    maps = FusedLinear(8, SIZES, **options)
    for name, dtype in zip(NAMES, dtypes, strict=True):
        maps.weights[name] = nnx.Param(maps.matrix(name).astype(dtype), axes=())
    return maps


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("out_dtypes", [(None, None), (jnp.float32, None), (jnp.float32, jnp.float32)])
def test_maps_give_the_same_when_fused(dtype, out_dtypes):
    plain, x = pair(dtype, dtype, out_dtypes=out_dtypes), jax.random.normal(jax.random.key(0), (3, 8), dtype)
    fused = fuse_projections(plain)
    assert plain.fused_matrix is None and fused.fused_matrix.shape == (8, 8)
    got, expected = jax.jit(fused)(x), jax.jit(plain)(x)
    assert got.keys() == expected.keys() == set(NAMES)
    for (name, product), out_dtype in zip(expected.items(), out_dtypes, strict=True):
        assert got[name].dtype == product.dtype == (out_dtype or dtype)
        np.testing.assert_allclose(
            *(np.asarray(y, np.float32) for y in (got[name], product)), rtol=1e-6 if out_dtype else 2**-7
        )
        chex.assert_trees_all_equal(fused.matrix(name), plain.matrix(name))


def test_only_matrices_of_one_dtype_are_joined():
    assert fuse_projections(pair(jnp.float32, jnp.float32)).launches == (("first+second",),)
    fused = fuse_projections(pair(jnp.float32, jnp.bfloat16))
    assert fused.launches == (NAMES,)
    assert fuse_projections(fused).launches == fused.launches


def test_gradients_reach_fused_maps():
    x = jnp.arange(24.0).reshape(3, 8)

    def gradient(maps):
        return jax.grad(lambda maps: sum(jnp.sum(jnp.sin(y)) for y in maps(x).values()))(maps)

    plain = pair(jnp.float32, jnp.float32)
    expected, found = gradient(plain), gradient(fuse_projections(plain))
    for name in NAMES:
        chex.assert_trees_all_close(found.matrix(name), expected.matrix(name), rtol=1e-6)


def test_a_joined_product_is_computed_once():
    fused = fuse_projections(pair(jnp.float32, jnp.float32))
    text = jax.jit(lambda pair, x: pair(x)).lower(fused, jnp.ones((3, 8))).compile().as_text()
    assert text.count(" dot(") + text.count("custom-call(") == 1, text


def values(model):
    return {path: np.asarray(read()) for path, read in parameter_readers(model).items()}


def test_joining_moves_every_row_to_its_place(short_config):
    plain = DeepseekV4ForCausalLM(short_config)
    before = values(plain)
    # One fused now and one that was built so: the same arrays in the same places.
    for fused in (fuse_projections(plain), DeepseekV4ForCausalLM(short_config, fused=True)):
        leaves = jax.tree.leaves(fused)
        assert sum(leaf.nbytes for leaf in leaves) == sum(leaf.nbytes for leaf in jax.tree.leaves(plain))
        after = values(fused)
        assert after.keys() == before.keys()
        for path, value in before.items():
            chex.assert_trees_all_equal(after[path], value, custom_message=path)
        # Sliding, CSA, HCA: the layer's input, the latent if there is an indexer, the shared expert's input.
        counts = [
            [len(module.names) for _, module in nnx.iter_modules(layer) if isinstance(module, FusedLinear)]
            for layer in fused.model.layers
        ]
        assert [sorted(each) for each in counts] == [[1, 2, 2], [2, 2, 7], [1, 2, 4]]
        assert len(leaves) == len(jax.tree.leaves(plain)) - sum(n - 1 for each in counts for n in each)
    assert values(plain).keys() == before.keys()
    assert not any("+" in name for name in before)


@pytest.mark.parametrize("fused", [False, True])
def test_maps_are_fused_as_soon_as_all_have_their_arrays(fused):
    module = nnx.Dict({name: FusedLinear(8, SIZES, param_dtype=jnp.float32, rngs=ABSTRACT) for name in ("x", "y")})
    filler, separate = ModuleFiller(module, fused=fused), (("first",), ("second",))
    for value, name in enumerate(NAMES):
        assert module.x.launches == separate
        filler.set(f"x.weights.{name}", jnp.full((4, 8), value, jnp.float32))
    assert module.x.launches == ((("first+second",),) if fused else separate) and module.y.launches == separate
    chex.assert_trees_all_equal(module.x.matrix("second"), np.ones((4, 8), np.float32))
    assert filler.parameters.keys() == {f"y.weights.{name}" for name in NAMES}


def test_loaded_joined_and_saved_as_ever(tmp_path):
    folder = DATA / "official_fp8"
    plain, fused = (load_checkpoint(folder, fused=fused) for fused in (False, True))
    assert len(jax.tree.leaves(fused)) < len(jax.tree.leaves(plain))
    for name, model in dict(plain=plain, fused=fused).items():
        save_release(model, tmp_path / name)
    ours, theirs = (read_checkpoint(tmp_path / name) for name in ("fused", "plain"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        chex.assert_trees_all_equal(ours[name].data, tensor.data, custom_message=name)


def test_quantized_matrices_of_few_rows_stay_separate():
    model = load_checkpoint(DATA / "official_fp8", weights="quantized", fused=True)
    attention = model.model.layers[2].self_attn
    inputs = attention.input_projections
    assert isinstance(inputs.weights["q_a_proj"].get_value(), QuantizedWeight)
    pooled = [f"compressor_{name}" for name in ("kv_proj", "gate_proj")]
    if attention.compressor.indexer is not None:
        pooled += [f"indexer_{name}" for name in ("kv_proj", "gate_proj", "weights_proj")]
    # kv_proj is alone in FP8: one product takes it together with the others.
    assert inputs.launches == (("kv_proj", "+".join(pooled)), ("q_a_proj",))
    assert len(attention.latent_projections.weights) == len(attention.latent_projections.names)


def test_matrices_in_fp8_share_one():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 128)), jnp.bfloat16)
    sizes = dict(first=128, second=256, third=64)
    plain = FusedLinear(128, sizes, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for name, rows in sizes.items():
        codes = jnp.asarray(rng.integers(0, 127, (rows, 128)), jnp.uint8)
        scale = jnp.asarray(rng.integers(118, 122, (-(-rows // 128), 1)), jnp.uint8)
        plain.weights[name] = nnx.Param(QuantizedWeight(codes, scale, "FP8", jnp.dtype(jnp.bfloat16)), axes=())
    fused = fuse_projections(plain)
    # The third's rows would share a block of scales with another map's.
    assert fused.launches == (("first+second",), ("third",))
    found, expected, readers = fused(x), plain(x), parameter_readers(fused)
    for name, product in expected.items():
        chex.assert_trees_all_equal(found[name], product)
        chex.assert_trees_all_equal(readers[f"weights.{name}"](), plain.matrix(name))
