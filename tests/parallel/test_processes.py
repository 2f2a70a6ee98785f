"""Two processes with a device each: they make the tokens of one, and one of them notices when the other dies."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from dsv4_jax.checkpoint import load_checkpoint, save_release
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.engine import generate
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.parallel.conftest import PROMPTS
from tests.paths import TINY


SIZES = dict(num_blocks=12, max_requests=3, max_context=64, block_tokens=16)
SCRIPT = """
import json, os, sys, time
import jax, jax.numpy as jnp

folder, rank, address, sizes, prompts = (json.loads(text) for text in sys.argv[1:])
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(address, 2, rank, initialization_timeout=60)

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.engine import generate, stream
from dsv4_jax.host import KVCacheManager

mesh = jax.make_mesh((2,), ("model",))
model = load_checkpoint(folder, dtype=jnp.float32, mesh=mesh)
assert len(model.lm_head.weight.get_value().addressable_shards) == 1
manager = KVCacheManager(model.config, dtype=jnp.float32, mesh=mesh, **sizes)
report = dict(tokens=generate(model, manager, prompts, max_new_tokens=8))
try:
    for count, _ in enumerate(stream(model, manager, prompts, max_new_tokens=8)):
        last = time.monotonic()
        if rank and count == 5:
            os._exit(9)
except Exception as error:
    report |= dict(error=str(error), seconds=time.monotonic() - last)
print(json.dumps(report), flush=True)
os._exit(0)  # a process that has lost another cannot leave in order
"""


@pytest.mark.slow
def test_two_processes_make_the_tokens_of_one(tmp_path):
    save_release(DeepseekV4ForCausalLM(DSV4Config.from_hf(TINY).with_layers([LayerSpec.csa()])), tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    running = []
    for rank in range(2):
        arguments = [json.dumps(x) for x in (str(tmp_path), rank, address, SIZES, PROMPTS)]
        command = [sys.executable, "-c", SCRIPT, *arguments]
        options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=root)
        running.append(subprocess.Popen(command, **options))
    (out, errors), _ = (process.communicate(timeout=300) for process in running)
    assert [process.returncode for process in running] == [0, 9], errors
    report = json.loads(out.splitlines()[-1])
    model = load_checkpoint(tmp_path, dtype=jnp.float32)
    manager = KVCacheManager(model.config, dtype=jnp.float32, **SIZES)
    assert report["tokens"] == generate(model, manager, PROMPTS, max_new_tokens=8)
    assert report["seconds"] < 60 and "process 0 of 2: another process" in report["error"]
