"""Devices that hold whole experts instead of a part of each make the tokens of one device."""

import re

import jax
import pytest

from dsv4_jax.nn import shardings
from dsv4_jax.parallel.mesh import check_shardable, make_mesh
from tests.parallel.conftest import run_engine
from tests.v41 import v41_config


@pytest.mark.slow
def test_tokens_are_those_of_one_device(model, alone):
    devices = 8
    mesh = make_mesh({"model": devices})
    cut = jax.device_put(model, shardings(model, mesh, expert_parallel=True))
    mlp = cut.model.layers[1].mlp
    parts = [
        parameter.get_value().addressable_shards[0].data.shape
        for parameter in (
            mlp.experts.gate_up_proj,
            mlp.experts.down_proj,
            mlp.shared_experts.gate_up_proj.weights["gate_proj+up_proj"],
        )
    ]
    assert parts == [(8 // devices, 2, 32, 64), (8 // devices, 64, 32), (2, 32 // devices, 64)]
    tokens, _, programs = run_engine(cut, model.config, mesh)
    assert (tokens, programs) == (alone[0], 1)


def test_experts_that_a_mesh_does_not_divide(model):
    sizes = {"model": 16}
    with pytest.raises(ValueError, match=re.escape("does not divide num_attention_heads=8, o_groups=8, n_routed_exp")):
        check_shardable(model.config, sizes, expert_parallel=True)
    with pytest.raises(ValueError, match="model=8 does not divide dspark_n_routed_experts=4"):
        check_shardable(v41_config(drafts=True), {"model": 8}, expert_parallel=True)
