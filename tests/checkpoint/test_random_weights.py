"""Random weights: tokens select experts as unequally as asked, and frequent experts lie on the GPU."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax import ops
from dsv4_jax.checkpoint import load, load_checkpoint, random_weights
from dsv4_jax.checkpoint.random_weights import STD, random_model, selection_bias
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.expert_pages import ExpertMemory, selection_shares
from dsv4_jax.nn import parameter_views
from tests.expert_pages.cpu_memory import CpuMemory, whole_pages
from tests.v41 import v41_config


CONFIG = read_config(packaged_checkpoint())


def zipf(experts, chosen, skew, tokens):
    """[tokens, chosen] distinct experts, drawn one after another with weights rank ** -skew."""
    noise = np.random.default_rng(0).gumbel(size=(tokens, experts))
    return np.argsort(-noise + skew * np.log(np.arange(1, experts + 1.0)))[:, :chosen]


@pytest.mark.slow
@pytest.mark.parametrize("skew", [0.0, 1.0])
def test_a_router_selects_as_often_as_asked(skew):
    """The router of V4-Flash's sizes, with random activations."""
    tokens = 4096
    experts = 256
    chosen = 6
    hidden = 4096
    shares = selection_shares(experts, chosen, skew)
    assert shares.sum() == pytest.approx(chosen)
    keys = jax.random.split(jax.random.key(0))
    x, weight = (jax.random.normal(key, (n, hidden)) for key, n in zip(keys, (tokens, experts), strict=True))
    bias = jnp.asarray(selection_bias(shares, STD * hidden**0.5))
    routing = jax.jit(lambda *args: ops.router(*args, top_k=chosen, scaling_factor=1.0))(x, STD * weight, bias)
    for found in (routing.experts, zipf(experts, chosen, skew, tokens)):
        counts = np.bincount(np.asarray(found).ravel(), minlength=experts) / tokens
        # A tenth and three fifths of the experts, the rarest, are those that lie in host memory on an H200 and an H100.
        for on_host in (26, 157):
            assert counts[-on_host:].sum() == pytest.approx(shares[-on_host:].sum(), rel=0.08)
        assert np.abs(counts - shares)[:8].max() < 0.03


@pytest.mark.slow
def test_a_model_without_a_checkpoint(monkeypatch):
    each = 32768 + 16384  # bytes of an expert
    hashed = ("hash_moe",) + ("moe",) * 2
    config = CONFIG.with_layers(CONFIG.specs[:3], hashed)
    config = dataclasses.replace(config, num_nextn_predict_layers=1)
    memory = ExpertMemory(device_bytes=5 * 4 * each, memory=CpuMemory())
    made = []
    plan = memory.plan
    scales = random_weights._scales
    # Scales are made after the plan, which leaves room for them.
    monkeypatch.setattr(random_weights, "_scales", lambda *args: made.append(args) or scales(*args))
    monkeypatch.setattr(memory, "plan", lambda *args: made.append("plan") or plan(*args))
    model = random_model(config, expert_memory=memory, skew=1.0)
    assert made[0] == "plan" and len(made) > 1
    embedding = model.model.embed_tokens.weight[...]
    assert (1 << 40) - memory.memory.room[True] == memory.host_bytes + whole_pages(embedding.nbytes)
    names = [*(f"model.layers.{i}.mlp.experts" for i in range(3)), "drafts.layers.0.mlp.experts"]
    assert list(memory.layers) == names and memory.frequencies.keys() == set(names)
    for name, pages in memory.layers.items():
        rarest = np.argsort(memory.frequencies[name])[:3]
        assert set(np.flatnonzero(pages[0].on_host)) == set(rarest)
    table = np.asarray(model.model.layers[0].mlp.gate.tid2eid[...])
    counts = np.bincount(table.ravel(), minlength=8) / len(table)
    chex.assert_trees_all_close(counts, memory.frequencies[names[0]], atol=0.1)
    assert all(len(set(row)) == config.num_experts_per_tok for row in table.tolist())
    # The same tree as a quantized checkpoint of this configuration.
    whole = random_model(CONFIG)
    loaded = load_checkpoint(packaged_checkpoint(), weights="quantized")
    chex.assert_trees_all_equal_shapes_and_dtypes(nnx.state(whole), nnx.state(loaded))


@pytest.mark.parametrize("source", ["random", "loaded"])
def test_weights_are_not_committed_to_their_device(source, monkeypatch):
    """Committed ones would make the first step's outputs committed, with which the next step compiles again."""
    monkeypatch.setattr(load, "_MAX_HOST_BYTES", 0)  # as of the variables of a large model
    specs = [LayerSpec(), LayerSpec(), LayerSpec.csa(4), LayerSpec.hca(128), LayerSpec.csa(4), LayerSpec.hca(128)]
    made = {
        "random": lambda: random_model(DSV4Config.small(specs)),
        "loaded": lambda: load_checkpoint(packaged_checkpoint(), weights="quantized"),
    }
    assert not any(x.committed for x in jax.tree.leaves(made[source]()))


def test_draft_layers_may_have_other_numbers_of_experts():
    config = v41_config(drafts=True)
    views = parameter_views(random_model(config, skew=1.0))
    experts = {path: len(view.read()) for path, view in views.items() if path.endswith("e_score_correction_bias")}
    assert len(experts) == 7
    assert all(count == (4 if path.startswith("drafts.") else 8) for path, count in experts.items())
    memory = ExpertMemory(device_bytes=0, memory=CpuMemory())
    with pytest.raises(ValueError, match="as many experts in each layer: .* has 4, .* has 8. Leave out the draft lay"):
        random_model(config, expert_memory=memory)
