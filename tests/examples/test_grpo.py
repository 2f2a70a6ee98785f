"""GRPO: rollouts and training agree to the bit, and a run continues where it stopped."""

import dataclasses

import grpo
import numpy as np
import pytest
from grpo import CONFIG, Recipe, make_engine, plot, reward, roll_out, train
from jax import numpy as jnp

from dsv4_jax import DeepseekV4ForCausalLM
from dsv4_jax.config import LayerSpec


RECIPE = Recipe(iterations=2, prompts=3, group=16, new_tokens=12, drafts=1)  # more answers than the engine has slots


def test_reward_counts_tokens_that_count_on():
    assert reward([10, 3], [4, 5, 7, 8]) == 0.75
    assert reward([9], [0, 10, 11]) == pytest.approx(1 / 3)


def test_rollouts_and_training_agree_to_the_bit(tmp_path):
    lines = train(RECIPE, tmp_path)
    assert [line["difference"] for line in lines] == [0.0, 0.0]
    assert lines[-1]["preemptions"] > 0 and lines[0]["gradient"] > 0
    assert lines[0]["reward"] == lines[0]["untrained"]

    more = train(dataclasses.replace(RECIPE, iterations=3), tmp_path)
    assert more[:2] == lines and more[2]["difference"] == 0.0 and more[2]["iteration"] == 2
    plot([more, more], tmp_path / "reward.png")
    assert (tmp_path / "reward.png").stat().st_size > 0


@pytest.mark.slow
def test_rollouts_and_training_on_a_mesh_agree_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(grpo, "CONFIG", CONFIG.with_layers([LayerSpec.csa()], ["moe"]))
    recipe = dataclasses.replace(RECIPE, prompts=2, mesh="data=2,model=2")
    lines = train(recipe, tmp_path)
    assert [line["difference"] for line in lines] == [0.0, 0.0] and lines[0]["gradient"] > 0
    more = train(dataclasses.replace(recipe, iterations=3), tmp_path)
    assert more[:2] == lines and more[2]["difference"] == 0.0
    with pytest.raises(ValueError, match=r"other settings \(iterations, mesh\): use another folder"):
        train(dataclasses.replace(recipe, mesh=""), tmp_path)


def test_rollout_says_which_weights_drew_each_token():
    engine = make_engine(DeepseekV4ForCausalLM(CONFIG, jnp.float32), RECIPE)
    rollout = roll_out(engine, RECIPE, iteration=0, version=7)
    np.testing.assert_array_equal(rollout.versions, np.where(rollout.is_answer, 7, 0))
    assert rollout.is_answer.sum() == RECIPE.prompts * RECIPE.group * RECIPE.new_tokens
    assert (np.asarray(rollout.old_logprobs)[np.asarray(rollout.is_answer)] < 0).all()
    assert engine.prefix.metrics.hit_tokens > 0
