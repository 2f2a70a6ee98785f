"""Joined projections: the same rows in fewer arrays, and one product for all maps of an input."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.checkpoint import load_checkpoint, read_checkpoint, save_release
from dsv4_jax.nn import DeepseekV4ForCausalLM, FusedLinear, Linear, Projections, fuse_projections
from dsv4_jax.nn.projections import parameter_readers
from dsv4_jax.quant import QuantizedWeight
from tests.paths import DATA


class Pair(nnx.Module):
    def __init__(self, *dtypes, out_dtypes=(None, None)):
        self.inner = nnx.Module()
        self.first, self.inner.second = (
            Linear(8, 4, param_dtype=dtype, out_dtype=out_dtype, rngs=nnx.Rngs(i))
            for i, (dtype, out_dtype) in enumerate(zip(dtypes, out_dtypes, strict=True))
        )
        self.input_projections = Projections("first", "inner.second")

    def __call__(self, x):
        return self.input_projections(self, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("out_dtypes", [(None, None), (jnp.float32, None), (jnp.float32, jnp.float32)])
def test_maps_give_the_same_when_fused(dtype, out_dtypes):
    plain, x = Pair(dtype, dtype, out_dtypes=out_dtypes), jax.random.normal(jax.random.key(0), (3, 8), dtype)
    fused = fuse_projections(plain)
    assert plain.first is not None and fused.first is fused.inner.second is None
    got, expected = jax.jit(fused)(x), jax.jit(plain)(x)
    assert got.keys() == expected.keys() == {"first", "inner.second"}
    for (path, product), out_dtype in zip(expected.items(), out_dtypes, strict=True):
        assert got[path].dtype == product.dtype == (out_dtype or dtype)
        np.testing.assert_allclose(
            *(np.asarray(y, np.float32) for y in (got[path], product)), rtol=1e-6 if out_dtype else 2**-7
        )


def test_only_matrices_of_one_dtype_are_joined():
    assert len(jax.tree.leaves(fuse_projections(Pair(jnp.float32, jnp.float32)))) == 1
    assert len(jax.tree.leaves(fuse_projections(Pair(jnp.float32, jnp.bfloat16)))) == 2


def test_a_joined_product_is_computed_once():
    fused = fuse_projections(Pair(jnp.float32, jnp.float32))
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
        assert [sorted(each) for each in counts] == [[2, 2], [2, 2, 7], [2, 4]]
        assert len(leaves) == len(jax.tree.leaves(plain)) - sum(n - 1 for each in counts for n in each)
    assert values(plain).keys() == before.keys()
    assert not any(isinstance(module, FusedLinear) for _, module in nnx.iter_modules(plain))


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
    assert isinstance(attention.q_a_proj.weight.get_value(), QuantizedWeight)
    assert [list(each.names) for each in attention.input_projections.fused] == [
        ["kv_proj"],  # alone in FP8: one product takes it together with the others
        [f"compressor.{name}" for name in ("kv_proj", "gate_proj")]
        + ([f"compressor.indexer.{name}" for name in ("kv_proj", "gate_proj", "scorer.weights_proj")]
           if attention.compressor.indexer is not None else [])
    ]  # fmt: skip
    assert not attention.latent_projections.fused


def test_matrices_in_fp8_share_one():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 128)), jnp.bfloat16)
    owner = nnx.Module()
    for name, rows in (("first", 128), ("second", 256), ("third", 64)):
        codes = jnp.asarray(rng.integers(0, 127, (rows, 128)), jnp.uint8)
        scale = jnp.asarray(rng.integers(118, 122, (-(-rows // 128), 1)), jnp.uint8)
        linear = Linear(128, rows, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        linear.weight = nnx.Param(QuantizedWeight(codes, scale, "FP8", jnp.dtype(jnp.bfloat16)))
        setattr(owner, name, linear)
    owner.projections = Projections("first", "second", "third")
    fused = fuse_projections(owner)
    assert fused.projections.fused[0].names == ("first", "second")
    # The rows of a block of scales would belong to two maps.
    assert fused.third is not None
    found, expected = fused.projections(fused, x), owner.projections(owner, x)
    readers = parameter_readers(fused)
    for name, product in expected.items():
        chex.assert_trees_all_equal(found[name], product)
        chex.assert_trees_all_equal(readers[f"{name}.weight"](), getattr(owner, name).weight[...])
