"""A model's state goes through Orbax, which Flax depends on, and back: stacked weights, quantized ones, and shards."""

import chex
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.nn import DeepseekV4ForCausalLM, shardings
from tests.paths import DATA
from tests.v41 import v41_config


# Two loops of two repeats each, so that parameters are stacked.
LAYERS = [LayerSpec(), LayerSpec(), *[LayerSpec.csa(4), LayerSpec.hca(8)] * 2]


def random_model(seed):
    return DeepseekV4ForCausalLM(DSV4Config.small(LAYERS), rngs=nnx.Rngs(seed))


def v41_model(seed):
    return DeepseekV4ForCausalLM(v41_config(drafts=True), rngs=nnx.Rngs(seed))


def quantized_model(_):
    return load_checkpoint(DATA / "official_fp8", weights="quantized")


def through_orbax(folder, state, target):
    """Saves a state and restores it with the shapes, dtypes and shardings of another one."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "step", nnx.to_pure_dict(state))
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, nnx.to_pure_dict(target))
        nnx.replace_by_pure_dict(target, checkpointer.restore(folder / "step", shapes))
    return target


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_model, v41_model, quantized_model])
def test_a_restored_model_is_the_saved_one(make, tmp_path):
    model = make(0)
    state = nnx.state(model)
    restored = through_orbax(tmp_path, state, jax.tree.map(np.zeros_like, state))
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(restored, state)


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_model, v41_model])
def test_a_model_is_restored_onto_a_mesh(make, tmp_path):
    model = make(0)
    mesh = jax.make_mesh((2,), ("model",), devices=jax.devices()[:2])
    graph, other = nnx.split(jax.device_put(make(1), shardings(model, mesh)))
    restored = nnx.merge(graph, through_orbax(tmp_path, nnx.state(model), other))
    chex.assert_trees_all_equal(restored, model)
    assert [x.sharding for x in jax.tree.leaves(restored)] == jax.tree.leaves(shardings(model, mesh))
