"""The commands of benchmarks/README.md for eight GPUs, with small models in place of the releases."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from dsv4_jax.bench import engine_steps, step_cases, sums
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.config.config_json import release_config
from tests.v41 import v41_config


README = Path(__file__).parents[2] / "benchmarks" / "README.md"
SECTION = README.read_text().split("## Commands for eight GPUs\n")[1].split("\n## ")[0]
COMMANDS = [words for line in SECTION.splitlines() if (words := shlex.split(line))[:2] == ["dsv4-jax", "bench"]]
# Small numbers in place of those that stand behind an option.
SMALL = {"--batches": "2", "--contexts": "160", "--chunks": "16", "--requests": "2", "--prompts": "16"} | {
    "--context": "16", "--reply": "4", "--token-budget": "16", "--drafts": "2",
}  # fmt: skip


def config_of(name):
    """A config of a few layers whose shards on eight devices are whole blocks of the release's storage."""
    if name == "v41_flash":
        config = v41_config()
        engram = dataclasses.replace(config.engram, head_dim=128)
        sizes = dict(
            head_dim=128,
            qk_rope_head_dim=64,
            index_head_dim=64,
            o_lora_rank=32,
            q_lora_rank=32,
            moe_intermediate_size=256,
        )
        return dataclasses.replace(config, engram=engram, **sizes)
    config = DSV4Config.small(
        [LayerSpec.csa()] if "pro" in name else [LayerSpec.hca(), LayerSpec.csa()],
        num_attention_heads=8, o_groups=8, head_dim=128, qk_rope_head_dim=64, q_lora_rank=128, o_lora_rank=128,
        hidden_size=128, moe_intermediate_size=1024,
    )  # fmt: skip
    return config.with_dspark(16) if "0813" in name else config


def small_command(words, folder, out):
    """The command with a small model, sizes that a CPU computes, and a file in another folder."""
    result = []
    option = ""
    for word in words:
        if word.startswith("--"):
            option = word
            result.append(word)
            if word in SMALL:
                result.append(SMALL[word])
        elif option == "--config":
            path = folder / word
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(release_config(config_of(word))))
            result.append(path)
        elif option == "--json":
            result.append(out)
        elif option not in SMALL:
            result.append(word)
    return result


def test_each_row_has_a_command():
    texts = [" ".join(words) for words in COMMANDS]
    for pattern in (
        r"all_reduce --mesh model=8",
        r"model .*v4_pro_0813 .*--batches 1 32 --contexts 4096 1048576",
        r"model .*v4_pro_0813 .*--drafts 5",
        r"prefill .*v4_pro_0813 .*--chunks 8192",
        r"model .*v4_flash --mesh model=8 --batches 1 ",
        r"serve .*v4_flash .*--requests 256 1024 --prompts --context 8192 --reply 1024",
    ):
        assert any(re.search(pattern, text) for text in texts), pattern
    assert all(f"h200_8gpus_{words[words.index('--json') + 1].split('_8gpus_')[1]}" in SECTION for words in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[-1])
def test_a_command_starts_on_eight_devices(run, tmp_path, monkeypatch, words):
    for module, name, value in (
        (step_cases, "STEPS", 2),
        (step_cases, "CHUNK_STEPS", 2),
        (engine_steps, "LOOP_STEPS", 2),
        (engine_steps.EngineOptions, "steps", 4),
        (sums, "TOKENS", (2,)),
        (sums, "ITERATIONS", 2),
    ):
        monkeypatch.setattr(module, name, value)
    out = tmp_path / "out.json"
    run(*small_command(words[1:], tmp_path, out))
    report = json.loads(out.read_text())
    sizes = re.findall(r"(\w+)=(\d)", words[words.index("--mesh") + 1])
    assert report["mesh"] == {axis: int(size) for axis, size in sizes} and report["results"]


def test_fewer_devices_are_refused(refused, tmp_path):
    for words in COMMANDS[0], COMMANDS[2]:
        command = [word.replace("model=8", "model=16") for word in words[1:-1]]
        message = refused(*command, tmp_path / "out.json")
        assert "mesh model=16 needs 16 devices, there are 8 (cpu); set JAX_NUM_CPU_DEVICES=16" in message
