"""`dsv4-jax bench serve`: made-up conversations, served twice."""

import json

import numpy as np
import pytest

from dsv4_jax.bench.serving import MESSAGE_TOKENS, REPLY_TOKENS, Workload


@pytest.mark.slow
def test_serves_without_and_with_the_prefix_cache(run, one_layer, monkeypatch, tmp_path):
    monkeypatch.setattr("dsv4_jax.bench.serving.packaged_checkpoint", lambda: one_layer)
    table = tmp_path / "serve.json"
    picture = tmp_path / "serve.png"
    sizes = ["--conversations", 3, "--turns", 2, "--drafts", 2]
    out = run("bench", "serve", *sizes, "--json", table, "--plot", picture)
    assert "3 conversations of 2 turns" in out and "same tokens" in out
    report = json.loads(table.read_text())
    assert report["workload"] == dict(conversations=3, turns=2, drafts=2, seed=0)
    cold, cached = report["results"]
    assert cold["prompt_tokens_run"] == cold["prompt_tokens_sent"] == cached["prompt_tokens_sent"]
    # Second turns find at least the two full blocks of their system prompts.
    assert cached["prompt_tokens_run"] <= cold["prompt_tokens_run"] - 3 * 256
    assert cold["hit_rate"] == 0 < cached["hit_rate"] < 1
    for row in (cold, cached):
        assert row["requests"] == len(row["first_tokens"]) == 6 and row["same_tokens"]
        assert row["compilations_later"] == 0 < row["compilations"] <= 7
        assert 0 < row["generated_tokens"] < row["generated_tokens_per_second"] * row["seconds"] * 1.01
        assert 0 <= row["acceptance"] <= 1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_conversations_share_system_prompts_and_fit_their_context():
    workload = Workload(conversations=40, turns=3, seed=1)
    script = workload.script(160)
    assert script == workload.script(160) != Workload(40, 3, seed=2).script(160)
    for turns in script:
        ids = np.concatenate([prompt for prompt, _ in turns])
        assert len(turns) == 3 and 2 <= ids.min() and ids.max() < 160
        assert len(ids) + sum(reply for _, reply in turns) <= workload.max_context
    starts = {tuple(turns[0][0][:256]) for turns in script}
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["serve", "--conversations", "0"], "--conversations 0 must be at least 1"),
        (["serve", "--turns", "-1"], "--turns -1 must be at least 1"),
        (["serve", "--drafts", "-1"], "--drafts -1 must be at least 0"),
        (["serve", "--turns", "300"], "conversations of up to 34048 tokens, max_position_embeddings=32768"),
    ],
)
def test_mistakes_are_explained(refused, options, message):
    assert message in refused("bench", *options)


def test_numbers_of_tokens_reach_both_ends_of_their_ranges():
    turns = [turn for conversation in Workload(conversations=400, turns=3).script(160) for turn in conversation[1:]]
    messages, replies = zip(*((len(message), reply) for message, reply in turns), strict=True)
    assert (min(messages), max(messages)) == MESSAGE_TOKENS and (min(replies), max(replies)) == REPLY_TOKENS
