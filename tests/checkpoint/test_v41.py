"""Checkpoints of DeepSeek-V4.1: the release's names and storage, what is left out, and saving them again."""

import dataclasses
import json
import logging
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from dsv4_jax.checkpoint import convert, convert_checkpoint, load_checkpoint, read_checkpoint, save_release
from dsv4_jax.checkpoint.keys import weights
from dsv4_jax.checkpoint.match import match_weights
from dsv4_jax.checkpoint.random_weights import random_model
from dsv4_jax.checkpoint.save import tensor_headers
from dsv4_jax.checkpoint.storage import QuantizedTensor, join_scales
from dsv4_jax.config import DSV4Config
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.nn.engram import TokenMap
from dsv4_jax.quant import QuantizedWeight
from tests.paths import DATA
from tests.values import parameter_values


V41 = DATA / "official_v41"
FP8 = DATA / "official_v41_fp8"
FOLDERS = pytest.mark.parametrize("folder", [V41, FP8], ids=["bfloat16", "quantized"])


def values(model):
    """{name of a stored tensor: its values}, of the model's parameters."""
    parameters = parameter_values(model)
    result = {}
    for weight in weights(model.config, "release"):
        value = parameters[weight.path].reshape(len(weight.sources), *weight.source_shape)
        result |= dict(zip(weight.sources, value, strict=True))
    return result


def stored_bytes(folder):
    return {name: (x.dtype, x.shape, x.data.tobytes()) for name, x in read_checkpoint(folder).items()}


def with_tensors(folder, content):
    """A copy of official_v41 with more tensors, in a second file that the index names."""
    shutil.copytree(V41, folder)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    save_file(content, folder / "model-2.safetensors")
    places = dict.fromkeys(read_checkpoint(V41), "model-1.safetensors") | dict.fromkeys(content, "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@FOLDERS
def test_the_table_has_the_names_shapes_and_storage_of_the_release(folder):
    config = DSV4Config.from_hf(folder)
    tensors, problems = join_scales(read_checkpoint(folder), "FP8_32")
    assert not problems
    table = {source: weight for weight in weights(config, "release") for source in weight.sources}
    assert {name: x.shape for name, x in tensors.items()} == {name: x.source_shape for name, x in table.items()}
    if folder == FP8:
        assert {name: x.dtype for name, x in tensors.items()} == {name: x.dtype for name, x in table.items()}


def test_the_table_of_v41_flash():
    table = {source: weight for weight in weights(DSV4Config.v41_flash(), "release") for source in weight.sources}
    expected = {
        "layers.0.attn.wq_a.weight": ((1280, 5120), "FP8_32"),
        "layers.39.attn.wo_b.weight": ((5120, 8192), "FP8_32"),
        "layers.20.attn.compressor.wkv.weight": ((512, 5120), "BF16"),
        "layers.2.attn.indexer.wk.weight": ((128, 512), "BF16"),
        "layers.36.attn.indexer.wq_b.weight": ((4096, 1280), "FP8_32"),
        "layers.36.attn.indexer.weights_proj.weight": ((32, 5120), "BF16"),
        "layers.39.ffn.experts.383.w2.weight": ((5120, 2304), "FP4"),
        "layers.0.ffn.gate.bias_vl": ((384,), "F32"),
        "layers.1.engram.embed.weight": ((384006168, 256), "FP8_ROWS"),
        "layers.14.engram.wkv.weight": ((25600, 6144), "FP8_32"),
        "layers.14.engram.q_weight": ((4, 5120), "BF16"),
    }
    assert {name: (table[name].source_shape, table[name].dtype) for name in expected} == expected
    counts = {"attn.wq_a": 40, "compressor.wkv": 4, "compressor.wgate": 3, "indexer.wk": 4, "indexer.wq_b": 8}
    assert {end: sum(name.endswith(f".{end}.weight") for name in table) for end in counts} == counts
    assert not any(word in name for name in table for word in ("ape", "hc_head", "tid2eid", "indexer.compressor"))


def test_the_release_has_as_many_tensors_of_draft_layers():
    table = weights(DSV4Config.v41_flash(mtp=True), "release")
    headers = [header for weight in table for entries in tensor_headers(weight, "quantized") for header in entries]
    assert sum(header.name.startswith("mtp.") for header in headers) == 2401
    # Of 96,085 tensors, 266 are left for the encoder of images.
    assert len(headers) - 2401 == 93418


@pytest.mark.parametrize("options", [dict(dtype=jnp.float32), dict(weights="quantized")], ids=["float32", "quantized"])
def test_every_parameter_has_the_goldens_values(options):
    golden = np.load(FP8 / "golden.npz")
    found = values(load_checkpoint(FP8, **options))
    for name, sums in zip(golden["all_names"], golden["all_sums"], strict=True):
        w = found.pop(name).astype(np.float64).reshape(-1)
        got = w.sum(), np.abs(w).sum(), (w * (np.arange(w.size) % 1009 + 1) / 1009).sum()
        # Sums of exact values in another order; relative to the sum of magnitudes.
        chex.assert_trees_all_close(np.array(got), sums, rtol=0, atol=1e-12 * sums[1], custom_message=name)
    assert set(found) == {f"layers.{layer}.ffn.gate.bias_vl" for layer in range(7)}


@FOLDERS
def test_every_tensor_lands_where_its_name_says(folder):
    tensors, _ = join_scales(read_checkpoint(folder), "FP8_32")
    found = values(load_checkpoint(folder, dtype=jnp.float32))
    assert tensors.keys() == found.keys()
    for name, tensor in tensors.items():
        chex.assert_trees_all_equal(found[name], tensor.load().astype(np.float32), custom_message=name)


def test_what_stays_quantized():
    views = parameter_views(load_checkpoint(FP8, weights="quantized"))
    held = {path: view.get_value() for path, view in views.items()}
    kinds = {path: value.kind for path, value in held.items() if isinstance(value, QuantizedWeight)}
    assert kinds["model.layers.1.engram.embedding"] == "FP8_ROWS"
    assert kinds["model.layers.1.engram.kv_proj.weight"] == "FP8_32"
    assert kinds["model.layers.6.self_attn.latent_projections.weights.indexer_q_b_proj"] == "FP8_32"
    assert kinds["model.layers.6.mlp.experts.down_proj"] == "FP4"
    # Byte for byte what lies in the files, scales included: all of it.
    assert sum(held[path].codes.nbytes + held[path].scale.nbytes for path in kinds) == sum(
        tensor.nbytes for tensor in read_checkpoint(FP8).values() if tensor.quantized
    )


def test_token_ids_are_those_of_the_tokenizer(tmp_path):
    model = load_checkpoint(V41)
    (token_map,) = (variable for _, variable in nnx.to_flat_state(nnx.state(model)) if isinstance(variable, TokenMap))
    chex.assert_trees_all_equal(np.asarray(token_map[...]), np.load(V41 / "golden.npz")["token_map"].astype(np.int32))
    shutil.copytree(V41, tmp_path / "x")
    (tmp_path / "x" / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="x has no tokenizer.json, from which Engram's compressed token ids"):
        load_checkpoint(tmp_path / "x")


def test_a_mesh_gets_the_same_values():
    mesh = jax.make_mesh((2,), ("model",))
    alone, sharded = (load_checkpoint(V41, dtype=jnp.float32, mesh=where) for where in (None, mesh))
    chex.assert_trees_all_equal(values(sharded), values(alone))
    assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(nnx.state(sharded)))
    # A part of 16 rows of w1, say, would have half a block.
    with pytest.raises(ValueError, match="is stored as FP.*, through blocks of 32 that share a scale"):
        load_checkpoint(FP8, weights="quantized", mesh=mesh)


def test_parts_for_images_and_drafts_are_left_out_and_named_once(tmp_path, caplog):
    names = ["vision.blocks.0.attn.wq.weight", "aligner.w1.weight", "image_start", "image_newline"]
    drafts = ["mtp.0.main_proj.weight", "mtp.2.norm.weight"]
    folder = with_tensors(tmp_path / "x", {name: np.ones((2, 2), np.float32) for name in names + drafts})
    with caplog.at_level(logging.INFO, "dsv4_jax.checkpoint"):
        found = values(load_checkpoint(folder, dtype=jnp.float32))
    lines = [record.message for record in caplog.records if "not used" in record.message]
    assert lines == [
        "2 tensors of multi-token prediction (mtp.0.main_proj.weight, ...) are not used",
        "4 tensors of images (aligner.w1.weight, ...) are not used",
    ]
    chex.assert_trees_all_equal(found, values(load_checkpoint(V41, dtype=jnp.float32)))


@pytest.mark.parametrize("name", ["layers.3.attn.wk.weight", "layers.0.attn.compressor.wkv.weight", "hc_head_fn"])
def test_other_tensors_are_refused_by_name(tmp_path, name):
    folder = with_tensors(tmp_path / "x", {name: np.ones((2, 2), np.float32)})
    with pytest.raises(ValueError, match=f"1 extra:\n  {name}"):
        load_checkpoint(folder)


@FOLDERS
def test_what_was_read_is_written_back(tmp_path, folder):
    """The oracle's own scales are not the least ones: values are kept, and bytes from the second time on."""
    model = load_checkpoint(folder, dtype=jnp.float32)
    for name, source in (("new", model), ("again", None)):
        source = source or load_checkpoint(tmp_path / "new", dtype=jnp.float32)
        save_release(source, tmp_path / name, weights="quantized" if folder == FP8 else "bfloat16", shard_bytes=10**6)
        shutil.copy(folder / "tokenizer.json", tmp_path / name)
    again = load_checkpoint(tmp_path / "again", dtype=jnp.float32)
    assert again.config == model.config
    chex.assert_trees_all_equal(values(again), values(model))
    assert stored_bytes(tmp_path / "new") == stored_bytes(tmp_path / "again")
    if folder == FP8:
        described = {name: x[:2] for name, x in stored_bytes(tmp_path / "new").items()}
        assert described == {name: x[:2] for name, x in stored_bytes(FP8).items()}
        content = json.loads((tmp_path / "new" / "config.json").read_text())
        assert content["quantization_config"]["weight_block_size"] == [32, 32]


@pytest.mark.parametrize("options", [dict(dtype=jnp.float32), dict(weights="quantized")], ids=["float32", "quantized"])
def test_sizes_that_are_no_multiples_of_a_block(tmp_path, options):
    config = dataclasses.replace(DSV4Config.from_hf(FP8).first_layers(3), q_lora_rank=72, o_lora_rank=40)
    save_release(DeepseekV4ForCausalLM(config, jnp.float32), tmp_path / "old")
    shutil.copy(FP8 / "tokenizer.json", tmp_path / "old")
    shapes = {name: x.shape for name, x in read_checkpoint(tmp_path / "old").items()}
    assert shapes["layers.1.attn.wq_a.scale"] == (3, 3) and shapes["layers.1.attn.wo_b.scale"] == (3, 3)
    model = load_checkpoint(tmp_path / "old", **options)
    save_release(model, tmp_path / "new")
    shutil.copy(FP8 / "tokenizer.json", tmp_path / "new")
    assert model.config == config and {name: x.shape for name, x in read_checkpoint(tmp_path / "new").items()} == shapes
    # Bytes differ where the largest value of a block was rounded down so far that half the scale is enough.
    chex.assert_trees_all_equal(values(load_checkpoint(tmp_path / "new", config, **options)), values(model))
    # Blocks of 128 x 128 in the place of these would rescale the weights.
    with pytest.raises(ValueError, match=r"wq_a\.scale must be F8_E8M0 \[1, 1\], and is F8_E8M0 \[3, 3\]"):
        load_checkpoint(tmp_path / "new", dataclasses.replace(config, weight_block=128), **options)


def test_conversions_keep_blocks_and_values(tmp_path):
    convert_checkpoint(FP8, tmp_path / "copy", weights="quantized")
    assert stored_bytes(tmp_path / "copy") == stored_bytes(FP8)
    convert_checkpoint(FP8, tmp_path / "wide", weights="bfloat16")
    assert {x.dtype for x in read_checkpoint(tmp_path / "wide").values()} == {"BF16", "F32"}
    convert_checkpoint(tmp_path / "wide", tmp_path / "again", weights="quantized")
    expected = {name: x[:2] for name, x in stored_bytes(FP8).items()}
    assert {name: x[:2] for name, x in stored_bytes(tmp_path / "again").items()} == expected
    loaded = (values(load_checkpoint(x, dtype=jnp.float32)) for x in (FP8, tmp_path / "wide", tmp_path / "again"))
    old, wide, again = loaded
    chex.assert_trees_all_equal(wide, old)
    chex.assert_trees_all_equal(again, old)


def test_tables_are_converted_some_rows_at_a_time(monkeypatch, tmp_path):
    loaded = []
    load = QuantizedTensor.load

    def record(tensor, start=0, stop=None):
        values = load(tensor, start, stop)
        loaded.append(len(values))
        return values

    monkeypatch.setattr(convert, "_ROWS", 128)
    monkeypatch.setattr(QuantizedTensor, "load", record)
    convert_checkpoint(FP8, tmp_path / "wide", weights="bfloat16")
    assert max(loaded) == 128
    monkeypatch.undo()
    loaded = [values(load_checkpoint(folder, dtype=jnp.float32)) for folder in (FP8, tmp_path / "wide")]
    chex.assert_trees_all_equal(*loaded)


def test_random_weights_are_the_tree_of_a_checkpoint():
    config = DSV4Config.from_hf(FP8)
    drawn = random_model(config)
    loaded = load_checkpoint(FP8, weights="quantized")
    chex.assert_trees_all_equal_shapes_and_dtypes(nnx.state(drawn), nnx.state(loaded))
    assert all(np.isfinite(np.asarray(value, np.float32)).all() for value in values(drawn).values())


def test_a_table_whose_scales_are_those_of_a_matrix_is_refused():
    """Rows of 32 x 32 blocks would be dequantized by the scales of other rows."""
    stored = dict(read_checkpoint(FP8))
    name = "layers.1.engram.embed.scale"
    rows, columns = stored[name].shape
    shape = (-(-rows // 32), columns)
    stored[name] = dataclasses.replace(stored[name], shape=shape, data=stored[name].data[: shape[0] * columns])
    with pytest.raises(ValueError, match="embed.weight has scales of the kind FP8_32, needed is FP8_ROWS"):
        match_weights(FP8, stored, DSV4Config.from_hf(FP8))
