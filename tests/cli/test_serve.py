"""`dsv4-jax serve`: mistakes, and a server's whole life."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest

from dsv4_jax.cli.serve_command import ServeCommand, _is_loopback
from dsv4_jax.config import DSV4Config
from dsv4_jax.serve.protocol import MAX_LOGPROBS
from tests.paths import DATA


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets others use this server: give --api-key KEY"),
        (["--host", "::"], "--host :: lets others use this server"),
        (["--api-key", ""], "the API key must be one or more printable ASCII characters without spaces"),
        (["--port", "70000"], "--port 70000 must be from 0 to 65535"),
        (["--drafts", "-1"], "--drafts -1 must be at least 0"),
        (["--mesh", "2"], "mesh '2' must be AXIS=DEVICES"),
        (["--mesh", "model=4"], "model=4 does not divide o_groups=2, vocab_size=258"),
        (["--mesh", "data=2", "--max-requests", "3"], "mesh axis data=2 does not divide --max-requests 3"),
        (["--grace-seconds", "nan"], "--grace-seconds nan must be at least 0"),
        (["--context", "99999"], "--context 99999 is longer than the model's: max_position_embeddings=32768"),
    ],
)
def test_mistakes_are_explained(refused, options, message, monkeypatch):
    monkeypatch.delenv("DSV4_JAX_API_KEY", raising=False)
    assert message in refused("serve", "--port", "0", *options)


def test_mistakes_are_told_at_once():
    """Within a second on an idle machine, because JAX is not imported for them."""
    mistakes = {
        "--host 1.2.3.4 --port 0 --insecure": "--host 1.2.3.4 --port 0 cannot be listened at: Cannot assign requested",
        "--host 0.0.0.0": "lets others use this server",
        "--port 70000": "--port 70000 must be",
        "--expert-memory 3GX": "--expert-memory '3GX' must be a number with one of the units",
        "--expert-memory 60GB --weights bfloat16": "--expert-memory needs --weights quantized, got bfloat16",
        "--expert-memory auto --mesh model=2": "--expert-memory is for one GPU; with --mesh, the devices share",
        "--memory 12": "--memory '12' must be a number with one of the units",
        "--context 99999": "--context 99999 is longer",
        "--context-parallel": "--context-parallel needs a mesh",
        "--expert-parallel": "--expert-parallel needs a mesh",
        "--mesh model=4": "does not divide o_groups=2",
        "--prefix-size 3GX --prefix-dir x": "--prefix-size '3GX' must be a number with one of the units",
        "--adapters a=x": "--adapters a=x: there is no x/adapter_config.json",
        "--adapters a=x,a=y": "--adapters a=x,a=y must be NAME=DIR, with different names, by commas",
        "--prefix-size 3GB": "--prefix-size 3GB needs --prefix-dir, the folder of the files",
        "--checkpoint README.md": "--checkpoint README.md is neither a folder nor a safetensors file",
        "--checkpoint nowhere": "cannot read the configuration nowhere",
        "--drafts -1": "--drafts -1 must be at least 0",
        "--max-requests 0": "--max-requests 0 must be at least 1",
        "--drafter model --drafts 0": "--drafter model needs --drafts of at least 1",
        "--min-confidence 0.5": "--min-confidence 0.5 needs draft layers that estimate their confidence",
        "--min-confidence 2": "--min-confidence 2.0 must be from 0 to 1",
    }
    others = {
        "generate --temperature -1": "--temperature -1.0 must be 0",
        "generate --top-p 2": "--top-p 2.0 must be in (0, 1]",
        "generate --top-k -3": "--top-k -3 must be at least 0",
        "generate --max-new-tokens 100000": "--max-new-tokens 100000: a request of 100000 tokens",
        "generate --checkpoint README.md": "--checkpoint README.md is neither",
        "generate --checkpoint tests/data/hf_tiny --drafts 1": "no layers that make drafts",
        "generate --drafts 1 --min-confidence 0.5": "--min-confidence 0.5 needs draft layers",
        "score --checkpoint tests/data/hf_tiny --out x.npz --ids no.npy": "--ids no.npy cannot be read: No such file",
        "score --checkpoint tests/data/hf_tiny --out x.npz": "give --ids or --text",
        "plan --config v4_flash --memory 12 --context 9": "--memory '12' must be",
    }
    mistakes = {f"serve {options}": message for options, message in mistakes.items()} | others
    code = "import sys; from dsv4_jax.cli import main\n"
    code += "for text in sys.argv[1:]: assert main(text.split()) == 2 and 'jax' not in sys.modules, text"
    run = [sys.executable, "-c", code, *mistakes]
    begin = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "DSV4_JAX_API_KEY"}
    done = subprocess.run(run, stderr=subprocess.PIPE, text=True, cwd=DATA.parents[1], env=environment, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stderr.splitlines()
    assert len(told) == len(mistakes)
    for line, message in zip(told, mistakes.values(), strict=True):
        assert line.startswith("Error: ") and message in line
    assert time.monotonic() - begin < 30  # all of them, on a busy machine


def test_this_machine_needs_no_key():
    for host, is_loopback in {"localhost": True, "127.0.0.2": True, "::1": True, "0.0.0.0": False, "a": False}.items():
        assert _is_loopback(host) == is_loopback


def test_names_of_the_server():
    local = {"localhost", "127.0.0.1", "::1"}
    assert ServeCommand()._hosts(None) == local and ServeCommand()._hosts("key") is None
    assert ServeCommand(host="0.0.0.0", insecure=True)._hosts(None) is None
    named = ServeCommand(host="10.0.0.1", allowed_hosts="A.example, b")
    assert named._hosts("key") == local | {"10.0.0.1", "a.example", "b"}


def test_batch_invariant_decode_steps_are_no_larger_than_others():
    sizes = dict(max_requests=4, drafts=2)
    assert ServeCommand(**sizes)._step_tokens == 256
    assert ServeCommand(**sizes, batch_invariant=True)._step_tokens == 12
    assert ServeCommand(**sizes, batch_invariant=True, token_budget=64)._step_tokens == 64
    assert ServeCommand(**sizes, token_budget=1)._step_tokens == 12


def test_the_models_own_layers_draft(monkeypatch, untyped):
    made: dict[str, Any] = {}
    monkeypatch.setattr("dsv4_jax.engine.Engine.__init__", lambda *_, **options: made.update(options))
    monkeypatch.setattr(ServeCommand, "load_model", lambda *_, **options: None)
    folder = DATA / "official_dspark"
    model = dict(cache_format="plain", drafter="model", min_confidence=0.5)
    config = DSV4Config.from_hf(folder, mtp=True)
    ServeCommand(**model, drafts=5)._engine(folder, config, 64, "")
    assert made["drafter"] == "model" and made["min_confidence"] == 0.5
    assert made["max_logprobs"] == min(MAX_LOGPROBS, config.vocab_size)
    with pytest.raises(ValueError, match="drafts=6 must be from 1 to 5, the most that this model's layers make"):
        ServeCommand(**model, drafts=6)._engine(folder, config, 64, "")


def test_the_prefix_caches_folder(monkeypatch, untyped, tmp_path):
    made: dict[str, Any] = {}
    monkeypatch.setattr("dsv4_jax.engine.Engine.__init__", lambda *_, **options: made.update(options))
    monkeypatch.setattr(ServeCommand, "load_model", lambda *_, **options: None)
    folder = DATA / "official_dspark"
    model = dict(cache_format="plain", prefix_dir=tmp_path / "a")
    config = DSV4Config.from_hf(folder)
    ServeCommand(**model)._engine(folder, config, 64, "")
    files = made["prefix"].files
    assert made["prefix"].every == 1
    ServeCommand(cache_format="plain", snapshots="last")._engine(folder, config, 64, "")
    assert made["prefix"].every is None
    assert (files.directory, files.max_bytes) == (tmp_path / "a", 50 * 10**9) and (tmp_path / "a").is_dir()
    with pytest.raises(ValueError, match=r"--prefix-size 100 holds no block with its snapshot, which take \d+ bytes"):
        ServeCommand(**model, prefix_size="100B")._engine(folder, config, 64, "")
    (tmp_path / "file").touch()
    model["prefix_dir"] = tmp_path / "file" / "a"
    with pytest.raises(ValueError, match="--prefix-dir '.*file/a' cannot be used: Not a directory"):
        ServeCommand(**model)._engine(folder, config, 64, "")


@pytest.mark.parametrize(
    ("options", "release"),
    [
        (dict(checkpoint=DATA / "official_v41"), "v41"),
        (dict(random_weights=str(DATA / "official_v41")), "v41"),
        (dict(random_weights="v41_flash"), "v41"),
        (dict(checkpoint=DATA / "official_dspark"), "0731"),
        (dict(), "april"),
        (dict(effort_prompts="0731"), "0731"),
    ],
)
def test_the_model_says_how_chats_are_encoded(monkeypatch, untyped, options, release):
    made: list[Any] = []
    monkeypatch.setattr(ServeCommand, "_engine", lambda *_: None)
    monkeypatch.setattr("dsv4_jax.serve.AsyncEngine", lambda *_, **__: None)
    monkeypatch.setattr("dsv4_jax.serve.HTTPServer", lambda *_, **__: SimpleNamespace(run=lambda listeners: None))
    monkeypatch.setattr("dsv4_jax.serve.create_app", lambda engine, tokenizer, options: made.append(options))
    ServeCommand(port=0, **options).run()
    assert made[0].release == release


def test_a_port_in_use_is_named(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--host localhost --port {port} cannot be listened at: Address already in use" in refused(
            "serve", "--host", "localhost", "--port", port
        )


def test_a_mesh_on_a_cpu_says_how_to_get_devices(refused):
    err = refused("generate", "--mesh", "data=64")
    assert "needs 64 devices" in err and "set JAX_NUM_CPU_DEVICES=64 to try it on a CPU" in err


def test_a_missing_extra_is_named(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'dsv4-jax[serve]'" in refused("serve")


@pytest.mark.slow
def test_serves_until_it_is_told_to_stop(one_layer):
    environment = dict(
        os.environ,
        DSV4_JAX_API_KEY="secret",
        XLA_FLAGS=f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
    )
    command = [sys.executable, "-c", "import sys; from dsv4_jax.cli import main; sys.exit(main())", "serve"]
    options = [
        "--checkpoint",
        str(one_layer),
        "--host",
        "0.0.0.0",
        "--port",
        "0",
        "--mesh",
        "data=2",
        "--max-requests",
        "2",
        "--context",
        "256",
    ]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            (port,) = re.findall(r"^one_layer: http://0.0.0.0:(\d+) when", process.stdout.readline())
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
                deadline = time.monotonic() + 120
                while True:
                    try:
                        if http.get("/ready").status_code == 200:
                            break
                    except httpx.TransportError:
                        assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.2)
                body = dict(model="one_layer", prompt="In the beginning", max_tokens=8, temperature=0)
                assert http.post("/v1/completions", json=body).status_code == 401
                headers = {"Authorization": "Bearer secret"}
                answer = http.post("/v1/completions", json=body, headers=headers).json()
            assert 1 <= answer["usage"]["completion_tokens"] <= 8  # random weights may end a text
            assert answer["choices"][0]["text"]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
