"""`dsv4-jax bench serve --config` where there is no GPU: an engine with a tiny random model."""

import functools
import json

import pytest

from dsv4_jax.bench import engine_steps, step_options
from dsv4_jax.bench.engine_steps import EngineOptions
from dsv4_jax.bench.step_options import ModelSetup
from dsv4_jax.cache import CacheSchema
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.expert_pages import ExpertMemory, program_bytes
from tests.expert_pages.cpu_memory import CpuMemory


@pytest.mark.slow
def test_prompts_and_decode_steps(run, tmp_path, monkeypatch):
    monkeypatch.setattr(engine_steps, "LOOP_STEPS", 2)
    monkeypatch.setattr(EngineOptions, "steps", 4)
    sizes = "--layers", 1, "--requests", 2, "--prompts", 48, "--context", 16, "--token-budget", 32
    run("bench", "serve", "--config", "v4_flash", *sizes, "--json", tmp_path / "serve.json")
    report = json.loads((tmp_path / "serve.json").read_text())
    assert report["config"] == "tiny" and report["layers"] == 1 and report["host_bytes"] == 0
    prompt, decode = report["results"]
    assert prompt["tokens"] == 48
    assert prompt["tokens_per_second"] == pytest.approx(48e3 / prompt["first_token_milliseconds"], rel=0.01)
    assert decode["requests"] == 2 and decode["loop_milliseconds"] > 0
    assert decode["token_milliseconds"] == pytest.approx(decode["step_milliseconds"], rel=0.01)
    assert decode["tokens_per_second"] == pytest.approx(2e3 / decode["step_milliseconds"], rel=0.01)


@pytest.mark.slow
def test_a_load(run, tmp_path):
    sizes = "--layers", 1, "--requests", 2, "--prompts", "--context", 40, "--reply", 6, "--token-budget", 32
    run("bench", "serve", "--config", "v4_flash", *sizes, "--json", tmp_path / "load.json")
    (load,) = json.loads((tmp_path / "load.json").read_text())["results"]
    assert load["measurement"] == "load" and load["tokens"] == 40 and load["reply"] == 6
    assert 0 < load["first_token_milliseconds"] <= load["first_token_milliseconds_p95"]
    assert 0 < load["token_milliseconds"] <= load["token_milliseconds_p95"]
    # Four requests in two rounds. The second round begins when a request of the first one ends.
    seconds = 4 * 46 / load["tokens_per_second"]
    alone = 1e-3 * (load["first_token_milliseconds"] + 5 * load["token_milliseconds"])
    assert alone < seconds < 8 * alone


def test_experts_leave_room_for_the_largest_cache(monkeypatch):
    config = read_config(packaged_checkpoint())
    options = EngineOptions(requests=(1, 8), prompts=(), expert_memory="auto")
    schema = CacheSchema(config, **options.cache_sizes(8))
    monkeypatch.setattr(step_options, "ExpertMemory", functools.partial(ExpertMemory, memory=CpuMemory()))
    monkeypatch.setattr(step_options, "random_model", lambda *_, **__: None)
    tokens = options.max_step_tokens
    made = {
        size: ModelSetup(expert_memory=size).make_model(config, schema, tokens, 0.0).expert_memory
        for size in ("auto", None, 5)
    }
    assert made["auto"].reserved_bytes == program_bytes(options.token_budget, config) + schema.memory_bytes()
    assert made["auto"].device_bytes is None and made[None] is None and made[5].device_bytes == 5
    assert program_bytes(9, config) == program_bytes(9) + 2 * config.vocab_size * config.hidden_size


def test_experts_in_host_memory(monkeypatch):
    each = 32768 + 16384
    memory = CpuMemory()
    monkeypatch.setattr(step_options, "ExpertMemory", functools.partial(ExpertMemory, memory=memory))
    config = read_config(packaged_checkpoint())
    report = {}
    options = EngineOptions(requests=(1,), prompts=(), layers=1, skew=1.0, expert_memory=5 * each)
    row = dict(measurement="decode", tokens_per_second=1.0)
    monkeypatch.setattr(engine_steps, "_measure", lambda *_: [row])
    assert len(list(engine_steps.run(config, options, report))) == 1
    assert report["host_bytes"] == 3 * each and report["skew"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--skew", "1"], "--expert-memory, --host-tables, --skew, --layers and --reply need --config"),
        (["--config", "v4_flash", "--layers", "7"], "--layers 7 must be at most 6"),
        (["--config", "v4_flash", "--prompts", "40000"], "--prompts and --context need 40001 tokens"),
        (["--config", "v4_flash", "--requests", "0"], "--requests 0 must be at least 1"),
        (["--config", "v4_flash", "--reply", "-1"], "--reply -1 must be at least 0"),
        (["--config", "v4_flash", "--requests"], "--requests needs at least one number"),
        (["--config", "no"], "--config no is neither v4_flash nor v4_pro"),
    ],
)
def test_mistakes_are_explained(refused, options, message):
    assert message in refused("bench", "serve", *options)
