"""The packaged model with its experts in pages: equal weights, wherever its experts lie."""

import gc

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv4_jax.checkpoint import load as load_module, load_checkpoint, random_weights, save_release
from dsv4_jax.checkpoint.random_weights import random_model
from dsv4_jax.cli.model_options import ModelOptions
from dsv4_jax.config import DSV4Config, EngramConfig, LayerSpec
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.expert_pages import ExpertMemory, HostTables
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import parameter_views
from tests.expert_pages.cpu_memory import CpuMemory, whole_pages


CHECKPOINT = packaged_checkpoint()
LAYERS = 6
EXPERTS = 8
EACH = 32768 + 16384
EMBEDDING = 2 * 258 * 256


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
    model = random_model(read_config(CHECKPOINT), expert_memory=memory)
    assert memory.host_bytes == 3 * LAYERS * EACH
    codes = np.asarray(model.model.layers[1].mlp.experts.down_proj.get_value().codes)
    assert len(np.unique(codes)) == 256 and (codes[0] != codes[1]).any()


ENGRAM = EngramConfig(
    layer_ids=(0, 1), num_embeddings=(36, 88), max_ngram_size=3, vocab_size=5, n_heads=2, head_dim=32, pad_token_id=0,
    compressed_vocab_size=20,
)  # fmt: skip


def table_config():
    return DSV4Config.small(
        [LayerSpec()] * 2, engram=ENGRAM, weight_block=32, hidden_size=128, moe_intermediate_size=64, vocab_size=64,
        kv_format="v41", norms_queries=False, delays_pre=True, image_token_id=9,
    )  # fmt: skip


@pytest.mark.parametrize("place", ["beside experts", "alone", "on a mesh"])
def test_tables_lie_in_host_memory(tmp_path, monkeypatch, place):
    """Random ones repeat their first rows, and others are loaded there."""
    monkeypatch.setattr(random_weights, "MAX_ROWS", 16)

    def options():
        """The options that place tables, and a function that returns the bytes of host memory that tables take."""
        memory = CpuMemory()
        if place == "beside experts":
            experts = ExpertMemory(device_bytes=0, memory=memory)
            embedding = whole_pages(2 * 64 * 128)
            return {"expert_memory": experts}, lambda: (1 << 40) - memory.room[True] - experts.host_bytes - embedding
        mesh = jax.make_mesh((1,), ("model",)) if place == "on a mesh" else None
        return {"host_tables": HostTables(lambda _: memory), "mesh": mesh}, lambda: (1 << 40) - memory.room[True]

    making, host_bytes = options()
    model = random_model(table_config(), **making)
    tables = [model.model.layers[layer].engram.embedding.get_value() for layer in ENGRAM.layer_ids]
    for table, rows in zip(tables, ENGRAM.num_embeddings, strict=True):
        assert table.kind == "FP8_ROWS" and table.codes.shape == (rows, 32)
        codes = np.asarray(table.codes)
        chex.assert_trees_all_equal(codes[16:], np.resize(codes[:16], codes.shape)[16:])
        assert len(np.unique(codes[:16], axis=0)) == 16
    used = sum(whole_pages(size) for rows in ENGRAM.num_embeddings for size in (rows * 32, rows))
    assert host_bytes() == used
    save_release(model, tmp_path, weights="quantized")
    monkeypatch.setattr(load_module, "_read_token_ids", lambda *_: np.asarray(model.model.token_map.get_value()))
    loading, host_bytes = options()
    loaded = load_checkpoint(tmp_path, weights="quantized", **loading)
    assert host_bytes() == used
    for layer, table in zip(ENGRAM.layer_ids, tables, strict=True):
        chex.assert_trees_all_equal(loaded.model.layers[layer].engram.embedding.get_value()[...], table[...])


@pytest.mark.parametrize(
    "make",
    [
        lambda memory: load_checkpoint(CHECKPOINT, weights="quantized", expert_memory=memory),
        lambda memory: random_model(read_config(CHECKPOINT), expert_memory=memory),
    ],
)
def test_experts_get_the_memory_that_other_weights_leave(monkeypatch, make):
    """When experts are planned, what the projections of each layer were copied from is no longer there."""
    memory = ExpertMemory(device_bytes=0, memory=CpuMemory())
    others = jax.live_arrays()
    other_ids = {id(array) for array in others}
    plan = memory.plan
    sizes = []

    def check(*args):
        sizes.extend(array.nbytes for array in jax.live_arrays() if id(array) not in other_ids)
        return plan(*args)

    monkeypatch.setattr(memory, "plan", check)
    gc.disable()
    try:
        module = make(memory)
    finally:
        gc.enable()
    views = parameter_views(module)
    variables = {id(view.variable): view.variable for path, view in views.items() if ".experts." not in path}
    arrays = jax.tree.leaves([variable.get_value() for variable in variables.values()])
    # The vectors that were made last may still be there, but no matrix.
    assert 0 <= sum(sizes) - sum(array.nbytes for array in arrays) < 1024


def test_frequent_experts_stay_on_the_gpu():
    memory = ExpertMemory(device_bytes=3 * LAYERS * EACH, memory=CpuMemory())
    memory.plan(list("012345"), [(EXPERTS, EACH // 4096, 4096)])
    memory.frequencies["1"] = np.array([0, 3, 0, 9, 5, 1, 0, 0])
    data = [np.full(EACH, expert, np.uint8) for expert in range(EXPERTS)]
    codes = {}
    for layer in "01":
        stack = memory.place_stack([layer], (EXPERTS, EACH // 4096, 4096))
        stack.write(0, data)
        codes[layer] = stack.array
    for layer, on_device in {"0": [0, 2, 5], "1": [1, 3, 4]}.items():
        chex.assert_trees_all_equal(np.asarray(codes[layer])[:, 0, 0], np.arange(EXPERTS, dtype=np.uint8))
        assert np.flatnonzero(~memory.layers[layer][0].on_host).tolist() == on_device


NAMES = [f"model.layers.{i}.mlp.experts" for i in range(5)]
SHAPES = [(EXPERTS, 2, 4096), (EXPERTS, 4096)]
LAYER_BYTES = EXPERTS * 3 * 4096


def test_stacks_of_layers_that_take_turns():
    """The layers 0, and 1 to 4 in periods of two, which are placed one stack after another."""
    memory = ExpertMemory(device_bytes=3 * 5 * 3 * 4096, memory=CpuMemory())
    memory.plan(NAMES, SHAPES)
    rng = np.random.default_rng(0)
    memory.frequencies |= {name: rng.permutation(EXPERTS).astype(float) for name in NAMES[1:]}
    data = [rng.integers(0, 256, (5, *shape), np.uint8) for shape in SHAPES]
    for layers in ([1, 3], [2, 4], [0]):
        stacks = [memory.place_stack([NAMES[layer] for layer in layers], (len(layers), *shape)) for shape in SHAPES]
        for index, layer in enumerate(layers):
            for stack, matrices in zip(stacks, data, strict=True):
                stack.write(index, list(matrices[layer]))
        for stack, matrices in zip(stacks, data, strict=True):
            chex.assert_trees_all_equal(np.asarray(stack.array), matrices[layers])
    # Rows of the cache's counts are in the order of the layers.
    assert list(memory.layers) == NAMES
    for name, pages in memory.layers.items():
        assert [matrix.nbytes for matrix in pages] == [2 * 4096, 4096]
        for matrix in pages:
            hottest = np.argsort(-memory.frequencies[name])[:3] if name in memory.frequencies else [0, 2, 5]
            assert set(np.flatnonzero(~matrix.on_host)) == set(hottest)
    assert memory.host_bytes == (1 << 40) - memory.memory.room[True] == 5 * 5 * 3 * 4096


def test_experts_move_within_stacks_and_are_named_by_layer_in_the_file(tmp_path):
    file = tmp_path / "placement.npz"

    def place():
        memory = ExpertMemory(device_bytes=4 * 2 * 4096, memory=CpuMemory(), placement_file=file)
        memory.plan(NAMES[:2], [(EXPERTS, 4096)])
        return memory, memory.place_stack([NAMES[1], NAMES[0]], (2, EXPERTS, 4096))

    memory, stack = place()
    data = np.random.default_rng(0).integers(0, 256, (2, EXPERTS, 4096), np.uint8)
    for index in range(2):
        stack.write(index, list(data[index]))
    moves = memory.migration
    counts = np.zeros((2, 2, EXPERTS), np.int32)
    moves.interval = 1
    moves.remap_share = 1e9
    moves.start(jnp.asarray(counts), experts_per_token=2)
    cold = np.flatnonzero(memory.layers[NAMES[1]][0].on_host)[:2]
    for _ in range(3):
        counts[:, 1, cold] += 50
        moves.between_steps(jnp.asarray(counts))
        moves.wait()
    moves.finish(jnp.asarray(counts))
    assert moves.metrics.swaps == 2
    chex.assert_trees_all_equal(np.asarray(stack.array), data)
    assert not memory.layers[NAMES[1]][0].on_host[cold].any() and not stack.layers[0].on_host[cold].any()
    assert np.flatnonzero(~memory.layers[NAMES[0]][0].on_host).tolist() == [0, 2, 5, 7]  # as they were placed
    with np.load(file) as stored:
        assert stored.files == NAMES[:2]
        assert not stored[NAMES[0]].any() and np.flatnonzero(stored[NAMES[1]]).tolist() == cold.tolist()
    again, _ = place()
    assert not again.layers[NAMES[1]][0].on_host[cold].any()


def test_another_layer_or_shape_than_planned_is_refused():
    memory = ExpertMemory(device_bytes=0, memory=CpuMemory())
    memory.plan(NAMES[:2], SHAPES)
    with pytest.raises(ValueError, match=r"layers \['layers.7'\] are not among the planned ones: \['model.layers.0"):
        memory.place_stack([NAMES[1], "layers.7"], (2, *SHAPES[0]))
    for layers, shape in ((2, SHAPES[0]), (1, (2, *SHAPES[0])), (2, (2, EXPERTS - 1, 4096))):
        message = f"{layers} layers of 8 experts must have .* got \\[{shape[0]}, {shape[1]}"
        with pytest.raises(ValueError, match=message):
            memory.place_stack(NAMES[:layers], shape)
    assert memory.memory.is_empty() and memory.layers == {name: [] for name in NAMES[:2]}


def test_a_stack_that_does_not_fit_leaves_nothing_and_can_be_placed_later():
    memory = ExpertMemory(device_bytes=0, memory=CpuMemory(host_bytes=3 * LAYER_BYTES))
    memory.plan(NAMES[:3], SHAPES)
    memory.memory.room[True] -= LAYER_BYTES  # other programs took it since then
    memory.place_stack(NAMES[:3], (3, *SHAPES[1]))
    before = dict(memory.memory.ranges), dict(memory.memory.mapped)
    with pytest.raises(MemoryError, match="no 8192 bytes on the host"):
        memory.place_stack(NAMES[:3], (3, *SHAPES[0]))
    assert (memory.memory.ranges, memory.memory.mapped) == before
    assert [len(pages) for pages in memory.layers.values()] == [1, 1, 1]
    memory.memory.room[True] += LAYER_BYTES
    memory.place_stack(NAMES[:3], (3, *SHAPES[0]))
    assert [len(pages) for pages in memory.layers.values()] == [2, 2, 2]
    assert memory.host_bytes == 3 * LAYER_BYTES and memory.memory.room[True] == 0


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


def test_auto_leaves_room_for_scales_and_programs(caplog):
    caplog.set_level("INFO")
    memory = ExpertMemory(memory=CpuMemory(device_bytes=4 * 10**8), reserved_bytes=10**8)
    shapes = [(256, 4096, 64), (256, 4096, 64)]
    each = 4 * 2 * 4096 * 64
    on_device = (3 * 10**8 - 256 * each // 16) // each
    memory.plan(list("0123"), shapes)
    ExpertMemory(memory=CpuMemory(device_bytes=10**10)).plan(list("0123"), shapes)
    some, everything = caplog.messages
    assert some.startswith(f"{256 - on_device} of 256 experts a layer")
    assert everything == "all 256 experts a layer fit the GPU (0.5 GB)"


def test_memory_that_is_short_is_told_before_anything_is_made():
    memory = CpuMemory(device_bytes=10**9, host_bytes=10**9)
    shapes = [(256, 4096, 64), (256, 4096, 64)]
    with pytest.raises(ValueError, match=r"experts may take 2.0 GB of the GPU, of which 1.0 GB are free.*PREALLOCATE"):
        ExpertMemory(2 * 10**9, memory=memory).plan([f"layers.{i}" for i in range(64)], shapes)
    with pytest.raises(
        ValueError, match=r"\d+ of 256 experts a layer \(8.1 GB\) would have to lie in host memory, of which 1.0"
    ):
        ExpertMemory(5 * 10**8, memory=memory).plan([f"layers.{i}" for i in range(64)], shapes)
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
        monkeypatch.setattr("dsv4_jax.expert_pages.expert_memory.CudaMemory", lambda device: memory)  # noqa: B023
        loaded = ModelOptions(expert_memory=text).load_model(CHECKPOINT, schema)
        assert (1 << 40) - memory.room[True] == on_host * LAYERS * EACH + whole_pages(EMBEDDING)
        assert jax.tree.structure(loaded.module) == jax.tree.structure(model)


def test_the_file_of_the_command_line_is_checked_first(tmp_path):
    config = read_config(CHECKPOINT)
    with pytest.raises(ValueError, match="--host-tables is for models with Engram, such as DeepSeek-V4.1"):
        ModelOptions(host_tables=True).check_devices(read_config(CHECKPOINT))
    with pytest.raises(ValueError, match="--expert-placement needs --expert-memory"):
        ModelOptions(expert_placement=tmp_path / "placement.npz").check_devices(config)
    with pytest.raises(ValueError, match=r"--expert-placement .*placement.npz cannot be written"):
        ModelOptions(expert_memory="auto", expert_placement=tmp_path / "no" / "placement.npz").check_devices(config)


def test_without_a_gpu_it_is_said():
    with pytest.raises(ValueError, match="weights in host memory need an NVIDIA GPU"):
        load_checkpoint(CHECKPOINT, weights="quantized", expert_memory=ExpertMemory())
