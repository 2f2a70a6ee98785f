"""The release's quantized storage: written and read back, and every way in which a scale can be wrong."""

import dataclasses
import json
import shutil

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from safetensors.numpy import save_file

from dsv4_jax.checkpoint import load_checkpoint, read_checkpoint, read_file, save_release
from dsv4_jax.checkpoint.storage import CODES, join_scales
from dsv4_jax.common.safetensors_header import DTYPES
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.nn import DeepseekV4ForCausalLM, parameter_views
from dsv4_jax.quant import QuantizedWeight
from tests.paths import DATA, TINY
from tests.values import parameter_values


FP8 = DATA / "official_fp8"
NAN = ml_dtypes.float8_e4m3fn(np.nan)


def load_all(folder, **options):
    """A checkpoint with its multi-token-prediction block."""
    return load_checkpoint(folder, DSV4Config.from_hf(folder, mtp=True), dtype=jnp.float32, **options)


def stored(tmp_path, **tensors):
    save_file(tensors, tmp_path / "x.safetensors")
    return read_file(tmp_path / "x.safetensors")


def encoded(values, kind):
    """Codes and scales of a matrix with the dtypes that they have in a file."""
    weight = QuantizedWeight.encode(values, kind)
    return weight.codes.view(DTYPES[CODES[kind]]), weight.scale.view(ml_dtypes.float8_e8m0fnu)


@pytest.fixture(scope="module")
def release():
    return load_all(FP8)


@pytest.mark.parametrize("shard_bytes", [pytest.param(5 * 10**9, marks=pytest.mark.slow), 10**6])
def test_what_was_read_is_written_back_unchanged(release, tmp_path, shard_bytes):
    save_release(release, tmp_path / "new", shard_bytes=shard_bytes)
    files = sorted(file.name for file in (tmp_path / "new").glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes > 10**7)
    again = load_all(tmp_path / "new")
    assert again.config == release.config
    old = parameter_values(release)
    new = parameter_values(again)
    assert old.keys() == new.keys()
    for name, value in old.items():
        chex.assert_trees_all_equal(new[name], value, custom_message=name)
    # The same names, dtypes and shapes as the release's own writer.
    theirs = read_checkpoint(FP8)
    ours = read_checkpoint(tmp_path / "new")
    assert {name: (t.dtype, t.shape) for name, t in ours.items()} == {
        name: (t.dtype, t.shape) for name, t in theirs.items()
    }


def test_a_random_model_can_be_shipped_small(tmp_path):
    """Packaged float32 weights: the configuration comes back, files shrink, values are near."""
    model = load_checkpoint(TINY, dtype=jnp.float32)
    save_release(model, tmp_path)
    assert DSV4Config.from_hf(tmp_path) == model.config
    again = parameter_values(load_checkpoint(tmp_path, dtype=jnp.float32))
    old = parameter_values(model)
    for name, value in old.items():
        # The coarsest is e2m1, at its worst where a group's largest value is 5: halfway between 4 and 6.
        chex.assert_trees_all_close(
            again[name], value, rtol=0, atol=np.abs(value).max() / 5 + 1e-30, custom_message=name
        )


def test_a_model_of_one_expert(tmp_path):
    """Its matrices lie in the files as any expert's, without the axis that the model stacks them on."""
    config = DSV4Config.from_hf(DATA / "hf_tiny").with_layers([LayerSpec()], ["hash_moe"])
    config = dataclasses.replace(config, n_routed_experts=1, num_experts_per_tok=1)
    save_release(DeepseekV4ForCausalLM(config, jnp.float32), tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    down = read_file(file)["layers.0.ffn.experts.0.w2.weight"]
    assert down.shape == (config.hidden_size, config.moe_intermediate_size // 2)
    again = load_checkpoint(tmp_path, dtype=jnp.float32)
    assert again.config == config
    save_release(again, tmp_path / "again")
    values = parameter_values(load_checkpoint(tmp_path / "again", dtype=jnp.float32))
    for name, value in parameter_values(again).items():
        chex.assert_trees_all_equal(values[name], value, custom_message=name)


@pytest.mark.parametrize(("kind", "block"), [("FP8", (128, 128)), ("FP8_32", (32, 32)), ("FP8_ROWS", (1, 32))])
@given(st.integers(1, 200), st.integers(1, 200), st.integers(-100, 100), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_fp8_is_the_nearest_value_under_the_least_scale(kind, block, rows, columns, exponent, random):
    values = np.random.default_rng(random.randrange(2**32)).standard_normal((rows, columns)).astype(np.float32)
    values = np.ldexp(values, exponent)
    codes, scales = encoded(values, kind)
    assert scales.shape == (-(-rows // block[0]), -(-columns // block[1]))
    scale = np.repeat(np.repeat(scales.astype(np.float64), block[0], axis=0), block[1], axis=1)[:rows, :columns]
    assert np.isfinite(codes.astype(np.float32)).all()
    # Half an e4m3 step: 2 ** -4 of the value, or of the smallest normal number, 2 ** -6.
    error = np.abs(codes.astype(np.float64) * scale - values)
    assert (error <= 2.0**-4 * np.maximum(np.abs(values), scale * 2.0**-6)).all()
    largest = np.abs(codes.astype(np.float32))[: block[0], : block[1]].max()
    assert 224 <= largest <= 448


def test_fp4_codes_are_packed_low_nibble_first_and_ties_go_to_even():
    values = np.zeros((1, 64), np.float32)
    values[0, :8] = [6, -6, 0.25, 0.75, 2.5, 3.5, 5, -0.5]
    codes, scales = encoded(values, "FP4")
    assert codes.shape == (1, 32) and scales.astype(np.float32).tolist() == [[1, 1]]
    assert codes[0, :4].view(np.uint8).tolist() == [0xF7, 0x20, 0x64, 0x96]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("wq_a.scale"), "it needs layers.1.attn.wq_a.scale, F8_E8M0 [2, 2], which is missing"),
        (
            lambda t: t.update({"wq_a.scale": np.ones((2, 1), ml_dtypes.float8_e8m0fnu)}),
            "layers.1.attn.wq_a.scale must be F8_E8M0 [2, 2], and is F8_E8M0 [2, 1]",
        ),
        (
            lambda t: t.update({"wq_a.scale": np.ones((2, 2), np.float32)}),
            "layers.1.attn.wq_a.scale must be F8_E8M0 [2, 2], and is F32 [2, 2]",
        ),
        (
            lambda t: t.update({"wq_a.weight": t["wq_a.weight"].view(np.int8)[:, :40]}),
            "FP4 needs whole groups of 32 inputs, this has 80",
        ),
        (lambda t: t.update({"wq_a.weight": t["wq_a.weight"].view(np.int8)}), "must be F8_E8M0 [192, 16]"),
        (
            lambda t: t.update({"wq_a.weight": t["wq_a.weight"].view(ml_dtypes.float8_e8m0fnu)}),
            "is stored as F8_E8M0 [192, 256], which no weight is",
        ),
        (
            lambda t: t.update({"wq_a.scale": np.full((2, 2), 255, np.uint8).view(ml_dtypes.float8_e8m0fnu)}),
            "layers.1.attn.wq_a.weight has 49152 NaN or infinite values of 49152",
        ),
        (
            lambda t: t.update({"wq_a.weight": np.where(np.arange(256) == 7, NAN, t["wq_a.weight"])}),
            "layers.1.attn.wq_a.weight has 192 NaN or infinite values of 49152",
        ),
    ],
    ids=["missing", "shape", "dtype", "groups", "fp4", "codes", "nan", "nan code"],
)
def test_wrong_scales_are_reported_by_name(tmp_path, change, message):
    """One tensor of a good checkpoint is changed; the rest stays in place beside it."""
    prefix = "layers.1.attn."
    folder = tmp_path / "x"
    shutil.copytree(FP8, folder)
    content = {}
    for name, tensor in read_checkpoint(FP8).items():
        dtypes = dict(F8_E4M3=ml_dtypes.float8_e4m3fn, F8_E8M0=ml_dtypes.float8_e8m0fnu, I8=np.int8)
        content[name] = (
            tensor.data.view(dtypes[tensor.dtype]).reshape(tensor.shape) if tensor.quantized else tensor.load()
        )
    part = {name: content.pop(prefix + name) for name in ("wq_a.weight", "wq_a.scale")}
    change(part)
    for file in folder.glob("model*"):
        file.unlink()
    save_file(
        content | {prefix + name: np.ascontiguousarray(x) for name, x in part.items()}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError) as error:
        load_checkpoint(folder, weights="quantized")
    assert message in str(error.value)
    assert "missing:" not in str(error.value) and "extra:" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "code", "scale", "stays"),
    [
        ("FP8", 0x7E, 160, True),  # 448 * 2 ** 33
        ("FP8", 0x7E, 161, False),
        ("FP8", 0x01, 42, True),  # 2 ** -32 of 2 ** -9 * 2 ** -85 is bfloat16's least normal number
        ("FP8", 0x01, 41, False),
        ("FP4", 0x77, 160, True),
        ("FP4", 0xFF, 127, True),  # -6 twice
        ("FP4", 0x77, 255, False),  # NaN
        ("FP4", 0x11, 0, False),
    ],
)
def test_what_a_device_computes_exactly_may_stay_quantized(tmp_path, kind, code, scale, stays):
    codes = np.full((2, 16 if kind == "FP4" else 32), code, np.uint8)
    codes = codes.view(np.int8 if kind == "FP4" else ml_dtypes.float8_e4m3fn)
    scales = np.full((2, 1) if kind == "FP4" else (1, 1), scale, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    tensors, problems = join_scales(stored(tmp_path, **{"a.weight": codes, "a.scale": scales}))
    assert not problems
    assert tensors["a.weight"].can_stay == stays
    smallest = np.abs(tensors["a.weight"].load()).min()
    if stays:
        assert np.finfo(np.float32).tiny <= smallest * 2.0**-32 < np.inf


def test_stored_weights_stay_stored_and_are_written_back(release, tmp_path):
    model = load_all(FP8, weights="quantized")
    held = {path: view.get_value() for path, view in parameter_views(model).items()}
    quantized = {name: value.kind for name, value in held.items() if isinstance(value, QuantizedWeight)}
    assert quantized["model.layers.1.mlp.experts.gate_up_proj"] == "FP4"
    assert quantized["model.layers.1.self_attn.latent_projections.weights.indexer_q_b_proj"] == "FP8"
    # Experts, attention, shared experts; indexers; the projections of multi-token prediction.
    assert len(quantized) == 5 * (2 + 5 + 3) + 2 + 2
    # Byte for byte what lies in the files, scales included.
    assert sum(held[name].codes.nbytes + held[name].scale.nbytes for name in quantized) == sum(
        tensor.data.size for tensor in read_checkpoint(FP8).values() if tensor.quantized
    )
    save_release(model, tmp_path)
    again = parameter_values(load_all(tmp_path))
    for name, value in parameter_values(release).items():
        chex.assert_trees_all_equal(again[name], value, custom_message=name)


def test_unknown_weights_are_refused():
    with pytest.raises(ValueError, match="weights='fp8' must be quantized, bfloat16 or float32"):
        load_checkpoint(FP8, weights="fp8")


def test_scales_without_a_weight_are_extra(tmp_path):
    scale = np.ones((1, 1), ml_dtypes.float8_e8m0fnu)
    fused, problems = join_scales(stored(tmp_path, **{"a.scale": scale, "a.weight": np.zeros((2, 2), np.float32)}))
    assert not problems and set(fused) == {"a.scale", "a.weight"}


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_headers_give_the_same_values_or_an_error(tmp_path, count):
    """Data bytes stay as they are, so a tensor of the same name, dtype and shape must have the same values."""
    rng = np.random.default_rng(0)
    file = tmp_path / "x.safetensors"
    codes, scales = encoded(rng.standard_normal((130, 200)).astype(np.float32), "FP8")
    packed, groups = encoded(rng.standard_normal((6, 64)).astype(np.float32), "FP4")
    tensors = {
        "a.weight": codes, "a.scale": scales, "b.weight": packed, "b.scale": groups,
        "c.weight": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16), "d": np.arange(7),
        "e": rng.standard_normal(4).astype(np.float32),
    }  # fmt: skip
    save_file(tensors, file)
    good = file.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    original = {name: (t.dtype, t.shape, t.load()) for name, t in join_scales(read_file(file))[0].items()}
    interesting = np.frombuffer(b'0123456789,:[]{}"\x00\xff FI', np.uint8)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(count):
        content = bytearray(good)
        for position in rng.integers(0, header, rng.integers(1, 4)):
            content[position] = rng.choice(interesting) if rng.random() < 0.8 else rng.integers(256)
        if rng.random() < 0.1:
            del content[rng.integers(len(content)) :]
        file.unlink()  # a new file, since the old one may still be mapped
        file.write_bytes(content)
        try:
            found, problems = join_scales(read_file(file))
        except ValueError as error:
            assert "x.safetensors" in str(error)
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        for name, tensor in found.items():
            if name in original and (tensor.dtype, tensor.shape) == original[name][:2]:
                chex.assert_trees_all_equal(tensor.load(), original[name][2], custom_message=f"{name} {bytes(content)}")
    assert min(outcomes.values()) > 10, outcomes


def test_save_refuses_before_it_writes(release, tmp_path):
    with pytest.raises(ValueError, match="shard_bytes=0 must be at least 1"):
        save_release(release, tmp_path / "x", shard_bytes=0)
    broken = load_checkpoint(TINY)
    broken.model.norm.weight[...] = broken.model.norm.weight[...].at[0].set(jnp.nan)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has NaN or infinite values"):
        save_release(broken, tmp_path / "x")
    changed = load_checkpoint(TINY)
    changed.model.norm.bias = nnx.Param(jnp.zeros(3))
    changed.lm_head = nnx.List([changed.lm_head])
    with pytest.raises(ValueError, match=r"lm_head\.0\.weight\n  lm_head\.weight\n  model\.norm\.bias"):
        save_release(changed, tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("sizes", [(10**6, 10**9), (10**9, 10**6)])
def test_a_folder_may_hold_an_earlier_checkpoint(release, tmp_path, sizes):
    """Of another number of files, one of which has an index."""
    for size in sizes:
        save_release(release, tmp_path, shard_bytes=size)
    assert read_checkpoint(tmp_path).keys()


def test_the_index_is_complete(release, tmp_path):
    save_release(release, tmp_path, shard_bytes=10**6)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.data.size for t in read_checkpoint(tmp_path).values())
    for name, file in index["weight_map"].items():
        if name.endswith(".scale"):
            assert index["weight_map"][name.removesuffix("scale") + "weight"] == file


@pytest.mark.parametrize("count", [500, pytest.param(2000, marks=pytest.mark.slow)])
def test_mutated_indexes_give_the_same_values_or_an_error(tmp_path, count):
    rng = np.random.default_rng(1)
    index = tmp_path / "model.safetensors.index.json"
    shards = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}
    values = {name: rng.standard_normal(3).astype(np.float32) for names in shards.values() for name in names}
    for file, names in shards.items():
        save_file({name: values[name] for name in names}, tmp_path / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    # Room for changes that do no harm.
    good = json.dumps(dict(metadata="0" * 200, weight_map=weight_map)).encode()
    interesting = np.frombuffer(b'12,:[]{}"./\\\x00\xff -abc', np.uint8)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(count):
        content = bytearray(good)
        for position in rng.integers(0, len(content), rng.integers(1, 4)):
            content[position] = rng.choice(interesting)
        if rng.random() < 0.1:
            del content[rng.integers(len(content)) :]
        index.write_bytes(content)
        try:
            found = read_checkpoint(tmp_path)
        except ValueError as error:
            assert "model" in str(error)
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        assert found.keys() <= values.keys()
        for name, tensor in found.items():
            chex.assert_trees_all_equal(tensor.load(), values[name])
    assert min(outcomes.values()) > 20, outcomes
