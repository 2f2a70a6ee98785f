"""load_checkpoint: three namings, shards, dtypes, and one report of everything that is wrong."""

import json
import logging
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv4_jax.checkpoint import load_checkpoint, read_checkpoint
from dsv4_jax.checkpoint.keys import detect_naming, weights
from dsv4_jax.config import DSV4Config
from tests.paths import DATA, TINY
from tests.values import parameter_values


HF_TINY = DATA / "hf_tiny"
MTP = DATA / "official_mtp"
CONFIG = DSV4Config.from_hf(HF_TINY)


def tensors(folder):
    return {name: np.array(tensor.load()) for name, tensor in read_checkpoint(folder).items()}


def write(folder, content, config_from=HF_TINY):
    """A checkpoint folder with the given tensors."""
    folder.mkdir(exist_ok=True)
    save_file(content, folder / "model.safetensors")
    shutil.copy(config_from / "config.json", folder)
    return folder


def renamed(naming):
    """hf_tiny's tensors (hybrid) under another naming, experts one by one."""
    stored = tensors(HF_TINY)
    old, new = ([w.sources for w in weights(CONFIG, n)] for n in ("hybrid", naming))
    pairs = zip(old, new, strict=True)
    return {after: stored[before] for olds, news in pairs for before, after in zip(olds, news, strict=True)}


def assert_same(one, other):
    one = parameter_values(one)
    other = parameter_values(other)
    chex.assert_trees_all_equal_dtypes(one, other)
    chex.assert_trees_all_equal(one, other)


@pytest.fixture(scope="module")
def hybrid():
    return load_checkpoint(HF_TINY, dtype=jnp.float32)


def test_namings_are_detected():
    assert detect_naming(CONFIG, read_checkpoint(HF_TINY)) == "hybrid"
    assert detect_naming(CONFIG, read_checkpoint(HF_TINY / "module_names")) == "module"
    assert detect_naming(DSV4Config.from_hf(TINY), read_checkpoint(TINY)) == "release"


@pytest.mark.parametrize("naming", ["hybrid", "release"])
def test_a_head_that_is_the_embedding(hybrid, naming, tmp_path):
    stored = renamed(naming)
    head = stored.pop("head.weight")
    folder = write(tmp_path / naming, stored)
    with pytest.raises(ValueError, match=r"1 missing:\s+head\.weight"):
        load_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(tie_word_embeddings=True)))
    tied = load_checkpoint(folder, dtype=jnp.float32)
    chex.assert_trees_all_equal(tied.lm_head.weight[...], hybrid.model.embed_tokens.weight[...])
    # A file may have a head all the same.
    save_file(stored | {"head.weight": head}, folder / "model.safetensors")
    untied = load_checkpoint(folder, dtype=jnp.float32)
    chex.assert_trees_all_equal(untied.lm_head.weight[...], hybrid.lm_head.weight[...])


def test_the_three_namings_load_the_same_model(hybrid, tmp_path):
    module = load_checkpoint(HF_TINY / "module_names", dtype=jnp.float32)
    assert_same(hybrid, module)
    assert jax.tree.structure(hybrid) == jax.tree.structure(module)
    assert_same(hybrid, load_checkpoint(write(tmp_path / "release", renamed("release")), dtype=jnp.float32))


def test_one_routed_expert_in_the_spellings_of_transformers(hybrid, tmp_path):
    """hf_tiny without its other experts, as transformers writes config.json and either set of names."""
    for naming, source in ("hybrid", HF_TINY), ("module", HF_TINY / "module_names"):
        stored = {k: x for k, x in tensors(source).items() if not re.search(r"experts\.[1-7]\.", k)}
        for name, value in stored.items():
            if name.endswith("tid2eid"):
                stored[name] = np.zeros_like(value[:, :1])
            elif ".gate." in name or ".mlp.experts." in name:
                stored[name] = value[:1].copy()
        folder = write(tmp_path / naming, stored)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | dict(n_routed_experts=1, num_experts_per_tok=1)))
        assert detect_naming(DSV4Config.from_hf(folder), stored) == naming
        loaded = parameter_values(load_checkpoint(folder, dtype=jnp.float32))
        for path, value in parameter_values(hybrid).items():
            first = value[:1] if ".gate." in path or ".mlp.experts." in path else value
            if not path.endswith("tid2eid"):
                chex.assert_trees_all_equal(loaded[path], first, custom_message=path)


def test_every_tensor_lands_where_its_name_says(hybrid):
    stored = tensors(HF_TINY / "module_names")
    loaded = parameter_values(hybrid)
    loaded = {weight.sources[0]: loaded[weight.path] for weight in weights(hybrid.config, "module")}
    assert stored.keys() == loaded.keys()
    for name, value in stored.items():
        chex.assert_trees_all_equal(np.asarray(loaded[name]).reshape(value.shape), value, custom_message=name)


def test_the_packaged_checkpoint_holds_the_goldens_weights():
    golden = np.load(DATA / "official_tiny" / "golden.npz")
    loaded = parameter_values(load_checkpoint(TINY))
    table = list(weights(DSV4Config.from_hf(TINY), "release"))
    assert {w.path for w in table} == loaded.keys()
    for weight in table:
        expected = np.concatenate([golden[f"w:{source}"] for source in weight.sources]).reshape(weight.shape)
        got = np.asarray(loaded[weight.path])
        chex.assert_trees_all_equal(got.astype(np.float64), expected.astype(np.float64), custom_message=weight.path)


def test_experts_are_stacked_gate_above_up(hybrid):
    stored = tensors(HF_TINY)
    loaded = parameter_values(hybrid)["model.layers.2.mlp.experts.gate_up_proj"]
    for expert in (0, 5):
        prefix = f"model.layers.2.ffn.experts.{expert}"
        chex.assert_trees_all_equal(loaded[expert, 0], stored[f"{prefix}.w1.weight"])
        chex.assert_trees_all_equal(loaded[expert, 1], stored[f"{prefix}.w3.weight"])


def test_shards(hybrid, tmp_path):
    shutil.copy(HF_TINY / "config.json", tmp_path)
    stored = tensors(HF_TINY)
    weight_map = {}
    names = sorted(stored)
    for i in range(3):
        file = f"model-{i}.safetensors"
        save_file({name: stored[name] for name in names[i::3]}, tmp_path / file)
        weight_map |= dict.fromkeys(names[i::3], file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same(hybrid, load_checkpoint(tmp_path, dtype=jnp.float32))


def test_the_module_decides_each_dtype():
    dtypes = {path: value.dtype for path, value in parameter_values(load_checkpoint(HF_TINY)).items()}
    assert dtypes["model.layers.1.self_attn.input_projections.weights.q_a_proj"] == jnp.bfloat16
    assert dtypes["lm_head.weight"] == jnp.bfloat16
    assert dtypes["model.layers.1.mlp.experts.down_proj"] == jnp.bfloat16
    assert dtypes["model.layers.1.self_attn.input_projections.weights.compressor_kv_proj"] == jnp.bfloat16
    assert dtypes["model.layers.1.self_attn.compressor.position_bias"] == jnp.float32
    assert dtypes["model.layers.1.attn_hc.fn"] == jnp.float32
    assert dtypes["model.layers.0.mlp.gate.tid2eid"] == jnp.int32


def test_casting_rounds_to_nearest_even():
    got = parameter_values(load_checkpoint(HF_TINY))["lm_head.weight"]
    expected = tensors(HF_TINY)["head.weight"].astype(ml_dtypes.bfloat16)
    chex.assert_trees_all_equal(np.asarray(got).view(np.uint16), expected.view(np.uint16))


def test_the_model_does_not_depend_on_the_file_any_more(tmp_path):
    folder = write(tmp_path / "x", tensors(HF_TINY))
    before = load_checkpoint(folder, dtype=jnp.float32)
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert_same(before, load_checkpoint(HF_TINY, dtype=jnp.float32))


def test_a_single_file_finds_its_config_beside_it(hybrid):
    assert_same(hybrid, load_checkpoint(str(HF_TINY / "model.safetensors"), dtype=jnp.float32))


def test_a_given_config_wins(tmp_path, hybrid):
    folder = write(tmp_path / "x", tensors(HF_TINY))
    (folder / "config.json").unlink()
    assert_same(hybrid, load_checkpoint(folder, CONFIG, dtype=jnp.float32))
    with pytest.raises(ValueError, match="cannot read the configuration"):
        load_checkpoint(folder)


def test_a_missing_file_is_not_taken_for_a_configuration():
    with pytest.raises(ValueError, match=r"cannot read \S*missing\.safetensors: No such file"):
        load_checkpoint(HF_TINY / "missing.safetensors")


def test_the_progress_bar_leaves_stdout_alone(capsys, monkeypatch, hybrid):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich: draw although this is no terminal
    assert_same(hybrid, load_checkpoint(HF_TINY, dtype=jnp.float32, progress=True))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Loading weights" in shown.err


@pytest.mark.parametrize("prefix", ["mtp.0.", "model.mtp.0."])
def test_multi_token_prediction_is_left_out_with_one_line(tmp_path, hybrid, caplog, prefix):
    extra = {f"{prefix}e_proj.weight": np.full((2, 2), np.nan, np.float32), f"{prefix}norm.weight": np.ones(2, np.int8)}
    with caplog.at_level(logging.INFO, logger="dsv4_jax.checkpoint"):
        loaded = load_checkpoint(write(tmp_path / "x", tensors(HF_TINY) | extra), dtype=jnp.float32)
    assert_same(hybrid, loaded)
    assert len(caplog.records) == 1
    assert "2 tensors of multi-token prediction" in caplog.text


def test_a_block_of_multi_token_prediction_is_whole_or_refused(tmp_path):
    """Missing and extra tensors of it are reported like all others; copies of embedding and head are not needed."""
    config = DSV4Config.from_hf(MTP, mtp=True)
    stored = tensors(MTP)
    copies = {"mtp.0.emb.tok_emb.weight": stored["embed.weight"], "mtp.0.head.weight": stored["head.weight"]}
    names = [name for name in stored if name.startswith("mtp.")]
    assert len(names) == 53
    model = load_checkpoint(write(tmp_path / "x", stored | copies), config)
    assert model.drafts.e_proj.weight.shape == (64, 64)
    stored["mtp.0.e_projj.weight"] = stored.pop("mtp.0.e_proj.weight")
    with pytest.raises(ValueError) as error:
        load_checkpoint(write(tmp_path / "y", stored), config)
    assert "1 missing:\n  mtp.0.e_proj.weight (near: mtp.0.e_projj.weight)" in str(error.value)
    assert "1 extra:" in str(error.value)
    without = {name: tensor for name, tensor in stored.items() if not name.startswith("mtp.")}
    with pytest.raises(ValueError, match="53 missing"):
        load_checkpoint(write(tmp_path / "z", without), config)


def test_everything_wrong_is_reported_at_once(tmp_path):
    stored = tensors(HF_TINY)
    stored["model.layers.1.attn.wkvv.weight"] = stored.pop("model.layers.1.attn.wkv.weight")
    del stored["model.layers.2.ffn.experts.3.w3.weight"]
    stored["unheard_of"] = np.zeros(3, np.float32)
    stored["head.weight"] = stored["head.weight"].T.copy()
    stored["model.layers.0.attn.attn_sink"] = np.zeros(4, np.int32)
    stored["model.layers.1.attn.attn_sink"] = np.zeros(4, np.uint8)
    stored["model.layers.0.ffn.gate.tid2eid"] = stored["model.layers.0.ffn.gate.tid2eid"].astype(np.float32)
    with pytest.raises(ValueError) as error:
        load_checkpoint(write(tmp_path / "x", stored))
    for line in (
        "2 missing:",
        "  model.layers.1.attn.wkv.weight (near: model.layers.1.attn.wkvv.weight)",
        "  model.layers.2.ffn.experts.3.w3.weight",
        "2 extra:",
        "  model.layers.1.attn.wkvv.weight (near: model.layers.1.attn.wkv.weight)",
        "  unheard_of",
        "1 of another shape:",
        "  head.weight is [64, 160], needed [160, 64]",
        "3 of another kind:",
        "  model.layers.0.attn.attn_sink is stored as I32, needed are floating-point numbers",
        "  model.layers.1.attn.attn_sink is stored as U8, needed are floating-point numbers",
        "  model.layers.0.ffn.gate.tid2eid is stored as F32, needed are integers",
    ):
        assert line in str(error.value).splitlines(), line


def test_long_reports_are_cut(tmp_path):
    stored = tensors(HF_TINY) | {f"x{i}": np.zeros(1, np.float32) for i in range(130)}
    with pytest.raises(ValueError, match=r"130 extra:(\n  x\d+.*){10}\n  \.\.\. and 120 more$"):
        load_checkpoint(write(tmp_path / "x", stored))


def test_tensors_of_another_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"not DeepSeek-V4 weights in any known naming; the tensors are wte"):
        load_checkpoint(write(tmp_path / "x", {"wte": np.zeros(3, np.float32)}))


# What tools write in place of a linear map's `weight`, by the ends of the names.
QUANTIZED = {
    "GPTQ or AWQ": {"qweight": np.int32, "qzeros": np.int32, "scales": np.float16, "g_idx": np.int32},
    "compressed-tensors": {
        "weight_packed": np.uint8,
        "weight_scale": ml_dtypes.float8_e4m3fn,
        "weight_shape": np.int64,
    },
    "compressed-tensors or ModelOpt": {"weight": ml_dtypes.float8_e4m3fn, "weight_scale": np.float32},
    "NVFP4": {"weight": np.uint8, "weight_scale_2": np.float32, "weight_scale": ml_dtypes.float8_e4m3fn},
    "FP8 with float32 scales": {"weight": ml_dtypes.float8_e4m3fn, "weight_scale_inv": np.float32},
    "bitsandbytes": {"weight": np.uint8, "weight.absmax": np.float32},
}


@pytest.mark.parametrize("method", QUANTIZED)
@pytest.mark.parametrize("naming", ["hybrid", "release"])
def test_other_quantizations_are_named_in_one_line(tmp_path, method, naming):
    stored = renamed(naming)
    for name in [name for name in stored if ".attn.w" in name or ".experts." in name]:
        values = stored.pop(name)
        for end, dtype in QUANTIZED[method].items():
            stored[f"{name.removesuffix('weight')}{end}"] = np.zeros_like(values, dtype)
    folder = write(tmp_path / "x", stored)
    with pytest.raises(ValueError, match=rf"is quantized by another method: {method}\. Give") as error:
        load_checkpoint(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300

    config = json.loads((folder / "config.json").read_text())
    declared = dict(quant_method="awq", bits=4)
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=declared)))
    with pytest.raises(ValueError, match="is quantized by another method: awq"):
        load_checkpoint(folder)


def test_a_method_that_config_json_names_alone(tmp_path, hybrid):
    stored = tensors(HF_TINY)
    folder = write(tmp_path / "x", stored)
    config = json.loads((folder / "config.json").read_text())
    declared = dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized")
    (folder / "config.json").write_text(json.dumps(config | dict(quantization_config=declared)))
    # The tensors decide: these have been dequantized.
    assert_same(hybrid, load_checkpoint(folder, dtype=jnp.float32))
    stored["head.codes"] = stored.pop("head.weight")
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ValueError, match="by another method: compressed-tensors, nvfp4-pack-quantized"):
        load_checkpoint(folder)


def test_nan_and_infinite_weights_are_named(tmp_path):
    stored = tensors(HF_TINY)
    stored["model.layers.3.ffn.experts.6.w2.weight"][1, 2] = np.nan
    stored["model.layers.1.attn.kv_norm.weight".replace("kv_norm", "norm")][:2] = -np.inf
    stored["head.weight"][0, 0] = np.finfo(np.float32).max  # finite, but not in bfloat16
    with pytest.raises(ValueError) as error:
        load_checkpoint(write(tmp_path / "x", stored))
    assert "model.layers.3.ffn.experts.6.w2.weight has 1 NaN or infinite values of 2048" in str(error.value)
    assert "model.layers.1.attn.norm.weight has 2 NaN or infinite values of 32" in str(error.value)
    assert "head.weight has 1 NaN or infinite values" in str(error.value)
    with pytest.raises(ValueError, match="experts.6.w2") as error:
        load_checkpoint(tmp_path / "x", dtype=jnp.float32)
    assert "head.weight" not in str(error.value)


@pytest.mark.parametrize("expert", [8, -1, 2**40])
def test_expert_ids_out_of_range_are_named(tmp_path, expert):
    stored = tensors(HF_TINY)
    stored["model.layers.0.ffn.gate.tid2eid"][3, 1] = expert
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.gate\.tid2eid names experts outside 0\.\.7"):
        load_checkpoint(write(tmp_path / "x", stored))


def test_truncated_checkpoints_are_refused(tmp_path):
    folder = write(tmp_path / "x", tensors(HF_TINY))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated, damaged or no"):
        load_checkpoint(folder)


@pytest.mark.parametrize("preset", ["v4_flash", "v4_pro"])
def test_the_table_gives_the_released_shapes(preset):
    config = getattr(DSV4Config, preset)()
    table = {source: weight for weight in weights(config, "release") for source in weight.sources}
    assert len(table) == sum(len(weight.sources) for weight in weights(config, "release"))
    sliding, csa, hca = (next((i for i in range(61) if config.compress_rate(i) == rate), None) for rate in (0, 4, 128))
    flash = {  # dsv4.md 8.1
        "layers.0.attn.wq_a.weight": (1024, 4096),
        "layers.0.attn.wq_b.weight": (32768, 1024),
        "layers.0.attn.wo_a.weight": (8192, 4096),
        "layers.0.attn.wo_b.weight": (4096, 8192),
        f"layers.{csa}.attn.compressor.wkv.weight": (1024, 4096),
        f"layers.{csa}.attn.compressor.ape": (4, 1024),
        f"layers.{hca}.attn.compressor.wgate.weight": (512, 4096),
        f"layers.{hca}.attn.compressor.ape": (128, 512),
        f"layers.{csa}.attn.indexer.wq_b.weight": (8192, 1024),
        f"layers.{csa}.attn.indexer.weights_proj.weight": (64, 4096),
        f"layers.{csa}.attn.indexer.compressor.wkv.weight": (256, 4096),
        f"layers.{csa}.attn.indexer.compressor.ape": (4, 256),
        "layers.5.ffn.experts.255.w1.weight": (2048, 4096),
        "layers.5.ffn.experts.255.w2.weight": (4096, 2048),
    }
    pro = {
        "layers.0.attn.wq_a.weight": (1536, 7168),
        "layers.0.attn.wq_b.weight": (65536, 1536),
        "layers.0.attn.wo_a.weight": (16384, 4096),
        "layers.60.ffn.experts.383.w3.weight": (3072, 7168),
    }
    for name, shape in (flash if sliding == 0 else pro).items():
        assert table[name].source_shape == shape, name
