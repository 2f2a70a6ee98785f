"""Where parameters go: over several devices, and never with more host memory than the result and a layer.

One other process does the loading, with four CPU devices, and nothing else in its memory.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dsv4_jax.checkpoint import read_checkpoint, save_release, shard_over
from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.checkpoint.save import release_config
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.paths import DATA, TINY


FP8 = DATA / "official_fp8"
SCRIPT = """
import json, re, sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from dsv4_jax.checkpoint import load_checkpoint, shard_over

small, large = sys.argv[1:]
mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
report = {}

@jax.jit
def outputs(model, x):  # of the whole model it would take long to compile
    return model.logits(model.model.layers[1].mlp(x, jnp.zeros(len(x), jnp.int32)))

want = None
for weights, where in (("float32", None), ("float32", shard_over(mesh)), ("stored", shard_over(mesh))):
    model = load_checkpoint(small, dtype=jnp.float32, weights=weights, sharding=where)
    got = outputs(model, jax.random.normal(jax.random.key(0), (12, model.config.hidden_size)))
    want = np.asarray(got) if want is None else want
    leaves = jax.tree.leaves(model)
    whole = sum(x.nbytes for x in leaves)
    on_one = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    error = float(np.abs(np.asarray(got) - want).max())
    devices = min(len(x.sharding.device_set) for x in leaves)
    experts = jax.tree.leaves(model.model.layers[1].mlp.experts.gate_up_proj)[0]
    report[weights] = dict(whole=whole, on_one=on_one, error=error, devices=devices,
                           experts=[experts.shape, experts.addressable_shards[0].data.shape])
del model, leaves, experts

def anonymous():
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1])

for weights in ("bfloat16", "stored"):
    before = peak = anonymous()
    done = threading.Event()
    def watch():
        global peak
        while not done.is_set():
            peak = max(peak, anonymous())
            time.sleep(0.002)
    thread = threading.Thread(target=watch)
    thread.start()
    model = load_checkpoint(large, weights=weights)
    done.set()
    thread.join()
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    layer = max(size(layer) for layer in model.model.layers)
    report["memory " + weights] = dict(over=peak - before - size(model), layer=layer, result=size(model))
    del model
print(json.dumps(report))
"""


STEPS = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from dsv4_jax.checkpoint import load_checkpoint, shard_over
from dsv4_jax.decode import forward
from dsv4_jax.host import KVCacheManager

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
found = []
for where in (None, shard_over(mesh)):
    model = load_checkpoint(sys.argv[1], dtype=jnp.float32, sharding=where)
    host = KVCacheManager(model.config, dtype=jnp.float32, num_blocks=4, max_requests=1, max_context=256)
    cache, slot, logits = host.init_cache(), host.admit(), []
    if where is not None:
        cache = jax.device_put(cache, everywhere)
    for ids in ([5, 17, 42], [7]):
        out, cache = forward(model, cache, host.prepare_forward({slot: ids}))
        logits.append(np.asarray(out))
    found.append(logits)
print(json.dumps([float(np.abs(a - b).max()) for a, b in zip(*found, strict=True)]))
"""


def on_four_devices(script: str, *arguments: Path):
    flags = re.sub(r"--xla_force_host\S+", "", os.environ.get("XLA_FLAGS", ""))
    flags = {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | flags, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_large(folder: Path) -> None:
    """official_fp8's tensors with larger matrices, all codes zero: holes in the file, no bytes on the disk."""
    config = dataclasses.replace(DSV4Config.from_hf(FP8), hidden_size=768, moe_intermediate_size=1024)
    (folder / "config.json").write_text(json.dumps(release_config(config)))
    shapes = {source: weight.source_shape for weight in weights(config, "release") for source in weight.sources}
    stored, header, scales, at = read_checkpoint(FP8), {}, [], 0
    for name, tensor in stored.items():
        if name.startswith("mtp."):
            continue
        owner = name if name in shapes else name.removesuffix("scale") + "weight"
        rows, columns = (*shapes[owner], 1)[:2]
        packed = stored[owner].dtype == "I8"
        shape = shapes[owner]
        if owner != name:
            shape = (rows, columns // 32) if packed else (-(-rows // 128), -(-columns // 128))
            scales.append((at, math.prod(shape)))
        elif packed:
            shape = rows, columns // 2
        itemsize = tensor.data.size // math.prod(tensor.shape)
        header[name] = dict(dtype=tensor.dtype, shape=shape, data_offsets=[at, at := at + itemsize * math.prod(shape)])
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
        for start, size in scales:
            file.seek(8 + len(text) + start)
            file.write(bytes([127]) * size)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    large = tmp_path_factory.mktemp("large")
    write_large(large)
    return on_four_devices(SCRIPT, FP8, large)


@pytest.mark.parametrize("weights", ["float32", "stored"])
def test_parameters_are_cut_over_a_mesh(report, weights):
    found = report[weights]
    assert found["devices"] == 4
    # Nearly all is in matrices that four devices divide.
    assert found["whole"] / 4 <= found["on_one"] < 0.27 * found["whole"]
    whole, piece = found["experts"]
    assert piece == [whole[0] // 4, *whole[1:]]
    assert found["error"] < 1e-5  # float32 sums in other orders


@pytest.mark.slow
def test_a_model_over_a_mesh_takes_the_same_steps(tmp_path):
    config = DSV4Config.from_hf(TINY)
    kinds = dict(layer_types=config.layer_types[:3], mlp_layer_types=config.mlp_layer_types[:3])
    assert len(set(kinds["layer_types"])) == 3
    save_release(DeepseekV4ForCausalLM(dataclasses.replace(config, num_hidden_layers=3, **kinds)), tmp_path)
    assert max(on_four_devices(STEPS, tmp_path)) < 1e-5  # float32 sums in other orders; logits are up to 3


def test_meshes_of_explicit_axes_are_refused():
    with pytest.raises(ValueError, match=r"jax\.make_mesh\(\(1,\), \('x',\), axis_types=\(AxisType\.Auto,\) \* 1\)"):
        shard_over(jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("weights", ["bfloat16", "stored"])
def test_loading_takes_the_result_and_a_layer(report, weights):
    memory = report[f"memory {weights}"]
    assert memory["layer"] > (20e6 if weights == "bfloat16" else 8e6)  # so that the interpreter's own memory is little
    assert memory["over"] <= 1.1 * memory["layer"], memory
