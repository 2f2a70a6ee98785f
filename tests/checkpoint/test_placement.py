"""Where parameters go: over several devices, and never with more host memory than the result and a layer."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest

from dsv4_jax.checkpoint import load_checkpoint, read_checkpoint, save_release
from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.checkpoint.placement import Staging
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.config.config_json import release_config
from dsv4_jax.nn import DeepseekV4ForCausalLM, shardings
from dsv4_jax.parallel.axis_rules import named_sharding
from dsv4_jax.parallel.mesh import make_mesh
from tests.paths import DATA


FP8 = DATA / "official_fp8"
SCRIPT = """
import json, re, sys, threading, time
import jax
from dsv4_jax.checkpoint import load_checkpoint

small, large, weights = sys.argv[1:]

def anonymous():
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1])

load_checkpoint(small, weights=weights)  # what JAX and the interpreter need once is not what loading takes
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
print(json.dumps(dict(over=peak - before - size(model), layer=layer, result=size(model))))
"""


def write_large(folder: Path) -> None:
    """official_fp8's tensors with larger matrices, all codes zero: holes in the file, no bytes on the disk."""
    config = dataclasses.replace(DSV4Config.from_hf(FP8), hidden_size=768, moe_intermediate_size=1024)
    (folder / "config.json").write_text(json.dumps(release_config(config)))
    shapes = {source: weight.source_shape for weight in weights(config, "release") for source in weight.sources}
    stored = read_checkpoint(FP8)
    header = {}
    scales = []
    at = 0
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
def whole_blocks(tmp_path_factory):
    """A checkpoint in the release's storage of which two devices get whole blocks."""
    config = DSV4Config.from_hf(FP8).with_layers([LayerSpec.csa()], ["hash_moe"])
    config = dataclasses.replace(config, moe_intermediate_size=256)
    folder = tmp_path_factory.mktemp("blocks")
    save_release(DeepseekV4ForCausalLM(config), folder)
    return folder


@pytest.mark.parametrize("weights", ["float32", "quantized"])
def test_each_device_gets_its_part(whole_blocks, weights):
    one = load_checkpoint(whole_blocks, weights=weights)
    two = load_checkpoint(whole_blocks, weights=weights, mesh=make_mesh({"model": 2}))
    assert [x.sharding for x in jax.tree.leaves(two)] == jax.tree.leaves(shardings(one, make_mesh({"model": 2})))
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert mine.dtype == theirs.dtype and np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    experts = jax.tree.leaves(two.model.layers[0].mlp.experts.gate_up_proj)[0]
    assert experts.addressable_shards[1].data.shape[:3] == (8, 2, 128)
    # Embedding, head, sinks; two arrays of the experts and two of the shared one, and queries, groups and output.
    cut = [x for x in jax.tree.leaves(two) if not x.sharding.is_fully_replicated]
    assert len(cut) == 3 + 7 * (2 if weights == "quantized" else 1)
    assert all(2 * shard.data.nbytes == x.nbytes for x in cut for shard in x.addressable_shards)


def test_each_device_gets_its_experts(whole_blocks):
    mesh = make_mesh({"model": 2})
    options = dict(expert_parallel=True)
    one = load_checkpoint(whole_blocks, weights="quantized")
    two = load_checkpoint(whole_blocks, weights="quantized", mesh=mesh, **options)
    assert [x.sharding for x in jax.tree.leaves(two)] == jax.tree.leaves(shardings(one, mesh, **options))
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    for x in jax.tree.leaves(two.model.layers[0].mlp.experts):
        assert x.addressable_shards[0].data.shape == (4, *x.shape[1:])


def test_blocks_that_share_a_scale_are_not_cut():
    """160 rows of a shared expert's map have scales for 128 and 32 of them; 80 columns are two groups and a half."""
    with pytest.raises(
        ValueError, match=r"stored as FP\d: the mesh {'model': 2} would cut its 160 (rows|columns) into p"
    ):
        load_checkpoint(FP8, weights="quantized", mesh=make_mesh({"model": 2}))


@pytest.mark.parametrize("step", ["device_put", "block_until_ready"])
def test_a_full_device_is_named(whole_blocks, monkeypatch, step):
    """Whether it says so when a transfer is asked for, or when it is waited for."""
    do = getattr(jax, step)
    calls = []

    def full(*args, **options):
        calls.append(args)
        if len(calls) > 20:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory on CUDA_1")
        return do(*args, **options)

    monkeypatch.setattr(jax, step, full)
    with pytest.raises(
        ValueError, match=r"out of memory at model\.layers\.0\..*, on 2 devices\. Shard the model over more .*CUDA_1"
    ):
        load_checkpoint(whole_blocks, mesh=make_mesh({"model": 2}))


def test_each_piece_is_read_once():
    """[3, 2, 4, 6] from six matrices, which two devices share by rows or by columns."""
    values = np.arange(144, dtype=np.uint8).reshape(3, 2, 4, 6)
    reads = []
    staging = Staging()

    def piece(i):
        return lambda: reads.append(i) or values.reshape(6, 4, 6)[i]

    for axes in ((None, None, "inner"), (None, None, None, "inner"), (None, "heads"), ()):
        where = named_sharding(axes, make_mesh({"model": 2}))
        placed = staging.place([piece(i) for i in range(6)], values.shape, np.uint8, where)
        assert placed.sharding == where and reads == list(range(6))
        reads.clear()
        chex.assert_trees_all_equal(placed, values)


@pytest.mark.parametrize("axes", [("vocab",), (None, "vocab"), (), None], ids=str)
def test_arrays_keep_their_values(axes):
    """Neither what is placed next nor what becomes of a source changes an array, wherever in memory that begins."""
    where = axes if axes is None else named_sharding(axes, make_mesh({"model": 2}))
    staging = Staging()
    memory = np.zeros(2**17, np.uint8)
    placed = []
    first = -memory.ctypes.data % 64
    for at in range(0, 128, 4):
        shape = 64 + 2 * at, 64
        source = memory[first + at :][: 4 * math.prod(shape)].view(np.float32).reshape(shape)
        for stored in (source, source.T, np.zeros(shape, np.float16)):  # in one range, not, and cast
            stored[...] = source[...] = len(placed)
            placed.append(staging.place([lambda stored=stored: stored], stored.shape, np.float32, where))
    source[...] = -1
    for number, array in enumerate(placed):
        assert np.all(np.asarray(array) == number), number


def test_the_file_is_read_by_the_device_and_staging_memory_is_reused(monkeypatch):
    """What needs no change goes straight from its pages; the rest from one piece of memory."""
    memory = np.zeros(2**14, np.float32)
    put = jax.device_put
    sources = []
    staging = Staging()
    monkeypatch.setattr(jax, "device_put", lambda x, device: sources.append(x) or put(x, device))
    where = named_sharding(("vocab",), make_mesh({"model": 2}))
    first = 2 - memory.ctypes.data % 64 // 4
    stored = memory[16 + first :][: 64 * 96].reshape(64, 96)
    staging.place([lambda: stored], stored.shape, np.float32, where)
    assert len(sources) == 2 and all(np.shares_memory(x, stored) for x in sources)
    sources.clear()
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float32):
        staging.place([lambda: stored.T], stored.T.shape, dtype, where)
    assert len(sources) == 6 and len({id(x.base) for x in sources}) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("weights", ["bfloat16", "quantized"])
def test_loading_takes_the_result_and_a_layer(tmp_path, weights):
    write_large(tmp_path)
    command = [sys.executable, "-c", SCRIPT, FP8, tmp_path, weights]
    # Otherwise glibc keeps up to 30 MB of freed matrices, in some runs and not in others.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)
    assert memory["layer"] > (20e6 if weights == "bfloat16" else 8e6)  # so that the interpreter's own memory is little
    assert memory["over"] <= memory["layer"], memory
