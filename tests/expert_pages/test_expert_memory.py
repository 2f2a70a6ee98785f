"""The packaged model with its experts in pages: equal weights, wherever its experts lie."""

import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.bench.model_stack import random_stack
from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.cli.options import ModelOptions
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.expert_pages import ExpertMemory
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import FusedLinear, fuse_projections
from tests.expert_pages.cpu_memory import CpuMemory, whole_pages


CHECKPOINT = packaged_checkpoint()
LAYERS, EXPERTS, EACH, EMBEDDING = 6, 8, 32768 + 16384, 2 * 258 * 256


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(CHECKPOINT, weights="quantized")


def load(on_device, **options):
    memory = ExpertMemory(device_bytes=on_device * LAYERS * EACH, memory=CpuMemory())
    return load_checkpoint(CHECKPOINT, weights="quantized", expert_memory=memory, **options), memory


@pytest.mark.parametrize("on_device", [0, 5, 8])
def test_equal_weights_for_every_share(model, on_device):
    paged, memory = load(on_device)
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(m))) for m in (model, paged)))
    assert len(memory.layers) == LAYERS
    for pages in memory.layers.values():
        assert [matrix.on_host.sum() for matrix in pages] == [EXPERTS - on_device] * 2
    assert (1 << 40) - memory.memory.room[True] == memory.host_bytes + whole_pages(EMBEDDING)


def test_random_weights_are_made_where_they_lie():
    memory = ExpertMemory(device_bytes=5 * LAYERS * EACH, memory=CpuMemory())
    stack = random_stack(read_config(CHECKPOINT), expert_memory=memory)
    assert memory.host_bytes == 3 * LAYERS * EACH
    codes = np.asarray(stack.layers[1].mlp.experts.down_proj.get_value().codes)
    assert len(np.unique(codes)) == 256 and (codes[0] != codes[1]).any()


@pytest.mark.parametrize(
    "make",
    [
        lambda memory: load_checkpoint(CHECKPOINT, weights="quantized", fused=True, expert_memory=memory),
        lambda memory: random_stack(read_config(CHECKPOINT), expert_memory=memory),
    ],
)
def test_experts_get_the_memory_that_fused_projections_leave(monkeypatch, make):
    memory, replaced = ExpertMemory(device_bytes=0, memory=CpuMemory()), []
    fuse, plan = FusedLinear.fuse, memory.plan

    def watch(linear):
        before = jax.tree.leaves(linear)
        fuse(linear)
        kept = list(map(id, jax.tree.leaves(linear)))
        replaced.extend(weakref.ref(x) for x in before if id(x) not in kept)

    def check(*args):
        assert len(replaced) > LAYERS and not any(array() is not None for array in replaced)
        return plan(*args)

    monkeypatch.setattr(FusedLinear, "fuse", watch)
    monkeypatch.setattr(memory, "plan", check)
    gc.disable()
    try:
        make(memory)
    finally:
        gc.enable()
    assert memory.is_planned


def test_frequent_experts_stay_on_the_gpu():
    memory = ExpertMemory(device_bytes=3 * LAYERS * EACH, memory=CpuMemory())
    memory.plan(LAYERS, [(EXPERTS, EACH // 4096, 4096)])
    memory.frequencies["1"] = np.array([0, 3, 0, 9, 5, 1, 0, 0])
    data = [np.full(EACH, expert, np.uint8) for expert in range(EXPERTS)]
    codes = {layer: memory.place(layer, data, (EXPERTS, EACH // 4096, 4096)) for layer in "01"}
    for layer, on_device in {"0": [0, 2, 5], "1": [1, 3, 4]}.items():
        chex.assert_trees_all_equal(np.asarray(codes[layer])[:, 0, 0], np.arange(EXPERTS, dtype=np.uint8))
        assert np.flatnonzero(~memory.layers[layer][0].on_host).tolist() == on_device


@pytest.mark.parametrize(("room", "weight"), [(0, "model.embed_tokens"), (1, "model.layers.0.mlp.experts")])
def test_a_machine_that_runs_out_of_memory_names_the_weight(room, weight, monkeypatch):
    memory = ExpertMemory(device_bytes=0, memory=CpuMemory())
    memory.memory.room[True] = room * whole_pages(EMBEDDING)
    monkeypatch.setattr(memory.memory, "free_host_bytes", lambda: 1 << 40)
    with pytest.raises(ValueError, match=f"does not fit: out of memory at {weight}.* no [0-9]+ bytes on the host"):
        load_checkpoint(CHECKPOINT, weights="quantized", expert_memory=memory)
    gc.collect()  # the error held the weights that were loaded
    assert memory.memory.is_empty()


def test_what_was_decided_is_told(caplog):
    with caplog.at_level("INFO"):
        load(5)
    assert "3 of 8 experts a layer stay in host memory (0.0 GB)" in caplog.text


def test_auto_leaves_room_for_scales_and_programs():
    memory = ExpertMemory(memory=CpuMemory(device_bytes=4 * 10**8), reserved_bytes=10**8)
    shapes = [(256, 4096, 64), (256, 4096, 64)]
    each = 4 * 2 * 4096 * 64
    on_device = (3 * 10**8 - 256 * each // 16) // each
    assert memory.plan(4, shapes).startswith(f"{256 - on_device} of 256 experts a layer")
    assert (
        ExpertMemory(memory=CpuMemory(device_bytes=10**10)).plan(4, shapes)
        == "all 256 experts a layer fit the GPU (0.5 GB)"
    )


def test_memory_that_is_short_is_told_before_anything_is_made():
    memory = CpuMemory(device_bytes=10**9, host_bytes=10**9)
    shapes = [(256, 4096, 64), (256, 4096, 64)]
    with pytest.raises(ValueError, match=r"experts may take 2.0 GB of the GPU, of which 1.0 GB are free.*PREALLOCATE"):
        ExpertMemory(2 * 10**9, memory=memory).plan(64, shapes)
    with pytest.raises(
        ValueError, match=r"\d+ of 256 experts a layer \(8.1 GB\) would have to lie in host memory, of which 1.0"
    ):
        ExpertMemory(5 * 10**8, memory=memory).plan(64, shapes)
    assert memory.is_empty()


@pytest.mark.parametrize("options", [dict(weights="bfloat16"), dict(weights=jnp.float32)])
def test_other_weights_are_refused(options):
    with pytest.raises(ValueError, match='expert_memory= needs weights="quantized" and no mesh'):
        load_checkpoint(CHECKPOINT, expert_memory=ExpertMemory(memory=CpuMemory()), **options)


def test_the_option_of_the_command_line(monkeypatch, model):
    for name in ("ALLOCATOR", "PREALLOCATE"):
        monkeypatch.setenv(f"XLA_PYTHON_CLIENT_{name}", "")  # the option sets them
    schema = KVCacheManager(read_config(CHECKPOINT), num_blocks=2, max_requests=1, max_context=128).schema
    for text, on_host in dict(auto=0, **{f"{5 * LAYERS * EACH}B": 3}).items():
        memory = CpuMemory()
        monkeypatch.setattr("dsv4_jax.expert_pages.CudaMemory", lambda device: memory)  # noqa: B023
        loaded = ModelOptions(expert_memory=text).load_model(CHECKPOINT, schema)
        assert (1 << 40) - memory.room[True] == on_host * LAYERS * EACH + whole_pages(EMBEDDING)
        assert jax.tree.structure(loaded.module) == jax.tree.structure(fuse_projections(model))


def test_the_file_of_the_command_line_is_checked_first(tmp_path):
    config = read_config(CHECKPOINT)
    with pytest.raises(ValueError, match="--expert-placement needs --expert-memory"):
        ModelOptions(expert_placement=tmp_path / "placement.npz").check_devices(config)
    with pytest.raises(ValueError, match=r"--expert-placement .*placement.npz cannot be written"):
        ModelOptions(expert_memory="auto", expert_placement=tmp_path / "no" / "placement.npz").check_devices(config)


def test_without_a_gpu_it_is_said():
    with pytest.raises(ValueError, match="experts in host memory need an NVIDIA GPU"):
        load_checkpoint(CHECKPOINT, weights="quantized", expert_memory=ExpertMemory())
