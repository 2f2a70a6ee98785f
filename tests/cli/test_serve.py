"""`dsv4-jax serve`: mistakes, and a server's whole life."""

import os
import re
import signal
import subprocess
import sys
import time

import httpx2 as httpx
import pytest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets others use this server: give --api-key KEY"),
        (["--host", "::"], "--host :: lets others use this server"),
        (["--api-key", ""], "the API key must be one or more printable ASCII characters without spaces"),
        (["--port", "70000"], "--port 70000 must be from 0 to 65535"),
        (["--drafts", "-1"], "--drafts -1 must be at least 0"),
        (["--num-scheduler-steps", "4"], "--num-scheduler-steps 4 needs --drafts 0, and no --batch-invariant"),
        (["--mesh", "2"], "mesh '2' must be AXIS=DEVICES"),
        (["--mesh", "model=4"], "model=4 does not divide o_groups=2, vocab_size=258"),
        (["--mesh", "data=2", "--max-requests", "3"], "mesh axis data=2 does not divide max_requests=3"),
        (["--grace-seconds", "nan"], "--grace-seconds nan must be at least 0"),
        (["--context", "99999"], "--context 99999 is longer than the model's: max_position_embeddings=32768"),
    ],
)
def test_mistakes_are_explained(refused, options, message, monkeypatch):
    monkeypatch.delenv("DSV4_JAX_API_KEY", raising=False)
    assert message in refused("serve", "--port", "0", *options)


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
                body = dict(prompt="In the beginning", max_tokens=8, temperature=0)
                assert http.post("/v1/completions", json=body).status_code == 401
                headers = {"Authorization": "Bearer secret"}
                answer = http.post("/v1/completions", json=body, headers=headers).json()
            assert 1 <= answer["usage"]["completion_tokens"] <= 8  # random weights may end a text
            assert answer["choices"][0]["text"]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
