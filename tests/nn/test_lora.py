"""Adapters of low rank: beside frozen maps, merged into them, several in one batch, and trained alone."""

import dataclasses
import functools
import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import save_file

from dsv4_jax.checkpoint import load_adapters, load_checkpoint, save_adapter, save_release
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.nn.lora import TARGETS, add_adapters, cast_adapters, merge_adapter
from tests.paths import DATA
from tests.v41 import v41_config


PROMPTS = [np.arange(3, 27), np.arange(40, 61), np.arange(7, 24)]  # 62 tokens


def manager_of(model):
    options = {"num_blocks": 16, "max_requests": 3, "max_context": 64, "block_tokens": 16}
    return KVCacheManager(model.config, **options, dtype=model.model.dtype, kv_format="plain")


@jax.jit
def step(model, cache, batch):
    hidden, _ = model(cache, batch)
    return model.logits(hidden)


def logits(model, adapters=None):
    """Returns the logits [T, V] of the prompts, each with an adapter's number."""
    manager = manager_of(model)
    batch = manager.prepare_forward({manager.admit(): prompt for prompt in PROMPTS})
    batch = batch if adapters is None else dataclasses.replace(batch, adapters=jnp.asarray(adapters, jnp.int32))
    tokens = sum(map(len, PROMPTS))
    return np.asarray(step(model, manager.init_cache(), batch))[:tokens]


def randomize(model, seed=0):
    """Draws `up`, so that every adapter has an effect."""
    rng = np.random.default_rng(seed)
    state = nnx.state(model, nnx.LoRAParam)
    for path, variable in nnx.to_flat_state(state):
        if path[-1] == "up":
            variable.set_value(jnp.asarray(0.05 * rng.standard_normal(variable.shape), jnp.float32))
    nnx.update(model, state)


def arrays(model):
    """Returns {path of an array: a copy in NumPy}, of all of the model's arrays."""
    leaves, _ = jax.tree.flatten_with_path(nnx.state(model))
    return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def v41():
    return DeepseekV4ForCausalLM(v41_config(), jnp.float32)


def quantized():
    return load_checkpoint(DATA / "official_fp8", dtype=jnp.float32, weights="quantized")


@pytest.mark.parametrize("make", [v41, quantized])
def test_merged_equals_beside_and_each_request_has_its_adapter(make):
    model = make()
    plain = logits(model)
    add_adapters(model, ["a", "b"], rank=3, scales=[0.5, 2.0])
    # Sums in another order than in the merged model, and products that another program fuses; discrete decisions are
    # far from ties.
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-4 * np.abs(plain).max())
    close(logits(model, [0] * 3), plain)  # `up` is zero
    randomize(model)
    alone = {number: logits(model, [number] * 3) for number in (-1, 0, 1)}
    close(alone[-1], plain)
    for number, name in enumerate(["a", "b"]):
        assert np.abs(alone[number] - plain).max() > 1e-2
        close(alone[number], logits(merge_adapter(model, name)))
    chex.assert_trees_all_equal(logits(model), alone[-1])
    ends = np.cumsum([0, *map(len, PROMPTS)])
    mixed = logits(model, [1, -1, 0])
    for i, number in enumerate([1, -1, 0]):
        rows = slice(*ends[i : i + 2])
        chex.assert_trees_all_equal(mixed[rows], alone[number][rows])


def test_adapters_in_the_dtype_of_activations_have_the_same_products():
    model = DeepseekV4ForCausalLM(v41_config(), jnp.bfloat16)
    add_adapters(model, ["a", "b"], rank=3, scales=[0.5, 2.0])
    randomize(model)
    copy = cast_adapters(model)
    chex.assert_trees_all_equal(logits(copy, [1, -1, 0]), logits(model, [1, -1, 0]))
    assert {x.dtype for x in jax.tree.leaves(nnx.state(copy, nnx.LoRAParam))} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam))} == {jnp.dtype(jnp.float32)}
    graph, adapters, others = nnx.split(model, nnx.LoRAParam, ...)

    def total(adapters):
        cast = cast_adapters(nnx.merge(graph, adapters, others))
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(nnx.state(cast, nnx.LoRAParam)))

    chex.assert_trees_all_equal(jax.grad(total)(adapters), jax.tree.map(jnp.ones_like, adapters))


def test_files_of_adapters(tmp_path):
    """As PEFT writes them; adapters of other ranks and maps run together."""
    model = v41()
    add_adapters(model, ["a"], rank=3, scales=[0.5])
    randomize(model)
    save_adapter(model, "a", tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 1.5)
    assert "model.layers.4.mlp.shared_experts.down_proj" in config["target_modules"]
    small = {
        "base_model.model.model.layers.2.self_attn.o_b_proj.lora_A.weight": np.ones((1, 128), ml_dtypes.bfloat16),
        "base_model.model.model.layers.2.self_attn.o_b_proj.lora_B.weight": np.ones((64, 1), ml_dtypes.bfloat16),
    }
    (tmp_path / "b").mkdir()
    save_file(small, tmp_path / "b" / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "use_rslora": True}
    (tmp_path / "b" / "adapter_config.json").write_text(json.dumps(plain))
    loaded = v41()
    load_adapters(loaded, {"b": tmp_path / "b", "a": tmp_path / "a"})
    rounded = v41()
    load_adapters(rounded, {"b": tmp_path / "b", "a": tmp_path / "a"}, dtype=jnp.bfloat16)
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(loaded, nnx.LoRAParam))
    chex.assert_trees_all_equal(nnx.state(rounded, nnx.LoRAParam), expected)
    assert loaded.adapter_names == ("b", "a")
    views = parameter_views(loaded)
    for path, view in parameter_views(model).items():
        if ".adapters." in path:
            axis = 1 if path.endswith(".up") else 0
            matrix = np.take(np.asarray(views[path].read()), 1, axis)
            chex.assert_trees_all_equal(matrix, np.take(np.asarray(view.read()), 0, axis))
    up = views["model.layers.2.self_attn.o_b_proj.adapters.up"].read()[:, 0]
    chex.assert_trees_all_equal(np.asarray(up), np.eye(1, 3, dtype=np.float32).repeat(64, 0))
    assert not np.asarray(views["model.layers.3.self_attn.o_b_proj.adapters.up"].read()[:, 0]).any()
    assert loaded.model.layers[2].self_attn.o_b_proj.adapters.scales == (2.0, 0.5)

    unchanged = v41()

    def refused(match, tensors=small, **fields):
        (tmp_path / "b" / "adapter_config.json").write_text(json.dumps(plain | fields))
        save_file(tensors, tmp_path / "b" / "adapter_model.safetensors")
        with pytest.raises((TypeError, ValueError), match=match):
            load_adapters(unchanged, {"b": tmp_path / "b"})
        assert unchanged.adapter_names == ()

    refused("adapter 'b': use_dora=True in adapter_config.json must be False", use_dora=True)
    refused("adapter 'b': r='1' must be a whole number", r="1")
    refused("init_lora_weights='pissa' in adapter_config.json", init_lora_weights="pissa")
    name = "base_model.model.model.layers.2.self_attn.o_b_proj.lora_A.weight"
    for value in (np.nan, 3.4e38):  # the latter is infinite in bfloat16
        refused(f"{name} in .* has NaN or infinite values", small | {name: np.full((1, 128), value, np.float32)})
    refused(r"scales=\[1e\+300\] must be finite in float32", lora_alpha=1e300)
    refused(r"o_b_proj needs lora_A \[2, 128\] and lora_B \[64, 2\], got lora_A \[1, 128\]", r=2)
    one = np.ones((1, 1), np.float32)
    for module in ("x", "lm_head", "model.layers.1.engram.kv_proj", "model.layers.1.mlp.gate"):
        name = f"base_model.model.{module}.lora_A.weight"
        refused(f"adapter 'b': '{name}' in .* is for no map that can have an adapter", small | {name: one})
    with pytest.raises(ValueError, match="adapter 'c': cannot read .*c/adapter_config.json: No such file"):
        load_adapters(v41(), {"c": tmp_path / "c"})


def test_folders_without_names_are_refused(untyped):
    folders: Any = ["b"]
    with pytest.raises(TypeError, match=r"folders=\['b'\] must map names of adapters to their folders"):
        load_adapters(v41(), folders)


def test_files_for_a_replaced_module_leave_the_model_unchanged(tmp_path):
    model = v41()
    add_adapters(model, ["a"], rank=3)
    save_adapter(model, "a", tmp_path)
    replaced = v41()
    for layer in replaced.model.layers.loops[-1].layers:
        layer.self_attn.o_b_proj = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    structure = nnx.graphdef(replaced)
    number = replaced.model.layers.loops[-1].run.start
    map_name = f"base_model.model.model.layers.{number}.self_attn.o_b_proj.lora_A.weight"
    with pytest.raises(ValueError, match=f"'{map_name}' in .* is for no map that can have an adapter"):
        load_adapters(replaced, {"a": tmp_path})
    assert nnx.graphdef(replaced) == structure
    assert replaced.adapter_names == ()


def test_only_adapters_are_trained():
    """Over quantized weights: a few steps of descent reduce the loss and change nothing else."""
    model = quantized()
    add_adapters(model, ["a"], rank=2)
    before = arrays(model)
    manager = manager_of(model)
    batch = manager.prepare_forward({manager.admit(): PROMPTS[0]}).with_adapter(model, "a")
    optimizer = nnx.Optimizer(model, optax.sgd(0.3, momentum=0.9), wrt=nnx.LoRAParam)
    sizes = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    assert sum(x.size for x in jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState))) <= 2 * sizes + 3
    targets = jnp.roll(batch.token_ids, -1)
    cache = manager.init_cache()

    @nnx.jit
    def train(model, optimizer):
        def loss(model):
            hidden, _ = model(cache, batch)
            scores = optax.softmax_cross_entropy_with_integer_labels(model.logits(hidden), targets)
            return jnp.mean(scores[: len(PROMPTS[0]) - 1])

        value, gradient = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradient)
        return value

    losses = [float(train(model, optimizer)) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
    changed = {path for path, array in arrays(model).items() if (array != before[path]).any()}
    assert changed and all("'adapters'" in path for path in changed)


def test_what_is_refused():
    model = v41()
    with pytest.raises(ValueError, match=r"targets=\['gate'\] are none of the linear maps"):
        add_adapters(model, ["a"], rank=2, targets=["q_a_proj", "gate"])
    with pytest.raises(ValueError, match="names=.* must be different, not empty, and at least one"):
        add_adapters(model, ["a", "a"], rank=2)
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        add_adapters(model, ["a"], rank=0)
    with pytest.raises(ValueError, match="targets is empty: name some of the linear maps"):
        add_adapters(model, ["a"], rank=2, targets=[])
    with pytest.raises(TypeError, match=r"names='poet' and targets=.* must each be a list of texts"):
        add_adapters(model, "poet", rank=2)
    add_adapters(model, ["a"], rank=2, targets=["o_b_proj"])
    with pytest.raises(ValueError, match="the model has adapters, .*: use `nn.merge_adapter` or `save_adapter`"):
        save_release(model, "nowhere")
    with pytest.raises(ValueError, match="the model has adapters already: a"):
        add_adapters(model, ["b"], rank=2)
    with pytest.raises(ValueError, match="name='b' must be one of the model's adapters: a"):
        merge_adapter(model, "b")
    assert "o_b_proj" in TARGETS


def test_a_batch_that_does_not_fit_is_refused():
    """Arrays of a wrong shape would broadcast or clamp, and adapters of a model without any would be ignored."""
    model = v41()
    manager = manager_of(model)
    cache = manager.init_cache()
    batch = manager.prepare_forward({manager.admit(): PROMPTS[0]})
    with pytest.raises(ValueError, match="the batch has adapters, but the model has none"):
        model(cache, dataclasses.replace(batch, adapters=jnp.zeros((3,), jnp.int32)))
    with pytest.raises(ValueError, match="name='a' must be one of the model's adapters: none"):
        batch.with_adapter(model, "a")
    for name, expected in (("is_image", 32), ("adapters", 3)):
        with pytest.raises(ValueError, match=rf"batch\.{name} must be an array of shape \({expected},\), got \(1,\)"):
            cache.begin_step(dataclasses.replace(batch, **{name: jnp.ones((1,), jnp.int32)}))
