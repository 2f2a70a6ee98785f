"""Conversions between storages and namings: the same values, bit for bit where the storage holds them."""

import json
import tracemalloc

import chex
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dsv4_jax.checkpoint import convert, convert_checkpoint, load_checkpoint, read_checkpoint, save_release
from dsv4_jax.checkpoint.keys import detect_naming
from dsv4_jax.checkpoint.save import check_storage
from dsv4_jax.checkpoint.storage import join_scales
from dsv4_jax.cli import main
from dsv4_jax.config import DSV4Config
from tests.paths import DATA, PACKAGED, TINY
from tests.values import parameter_values


FP8 = DATA / "official_fp8"  # FP8, FP4, bfloat16 and float32, with the multi-token-prediction block
HYBRID = DATA / "hf_tiny"  # float32
MODULE = HYBRID / "module_names"


def stored_bytes(folder):
    """{name: (dtype, shape, bytes)} of a checkpoint."""
    return {name: (x.dtype, x.shape, x.data.tobytes()) for name, x in read_checkpoint(folder).items()}


def values(folder):
    """{name: values in float64} of a checkpoint."""
    return {name: x.load().astype(np.float64) for name, x in join_scales(read_checkpoint(folder))[0].items()}


@pytest.mark.parametrize("naming", ["release", pytest.param("hybrid", marks=pytest.mark.slow), "module"])
@pytest.mark.parametrize("weights", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_release_comes_back_bit_for_bit(tmp_path, weights, naming):
    save_release(load_checkpoint(FP8, DSV4Config.from_hf(FP8, mtp=True)), tmp_path / "old")
    convert_checkpoint(tmp_path / "old", tmp_path / "new", weights=weights, naming=naming, shard_bytes=10**6)
    new = read_checkpoint(tmp_path / "new")
    config = DSV4Config.from_hf(tmp_path / "new", mtp=True)
    assert detect_naming(config, new) == naming and config == DSV4Config.from_hf(FP8, mtp=True)
    assert {x.dtype for x in new.values()} == {"I64", "F32", *(["BF16"] if weights == "bfloat16" else [])}
    content = json.loads((tmp_path / "new" / "config.json").read_text())
    assert content["torch_dtype"] == weights and not {"quantization_config", "expert_dtype"} & content.keys()
    convert_checkpoint(tmp_path / "new", tmp_path / "again", weights="quantized", naming="release")
    assert stored_bytes(tmp_path / "again") == stored_bytes(tmp_path / "old")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (tmp_path / "old" / "config.json").read_text()
    )


@pytest.mark.parametrize("naming", ["release", "hybrid"])
def test_weights_that_stay_quantized_are_copied(tmp_path, naming):
    """The release's own scales are not the least ones: rounding again would change them."""
    convert_checkpoint(FP8, tmp_path / "new", weights="quantized", naming=naming)
    old = stored_bytes(FP8)
    new = stored_bytes(tmp_path / "new")
    if naming == "release":
        assert new == old
    assert sorted(new.values()) == sorted(old.values())
    convert_checkpoint(tmp_path / "new", tmp_path / "again", weights="quantized", naming="release")
    assert stored_bytes(tmp_path / "again") == old


def test_every_value_of_the_release_is_held(tmp_path):
    convert_checkpoint(FP8, tmp_path / "new", weights="bfloat16")
    chex.assert_trees_all_equal(values(tmp_path / "new"), values(FP8))


@pytest.mark.parametrize(("source", "naming"), [(HYBRID, "module"), (MODULE, "hybrid"), (MODULE, None)])
def test_other_names_are_the_same_tensors(tmp_path, source, naming):
    convert_checkpoint(source, tmp_path / "new", weights="float32", naming=naming)
    assert stored_bytes(tmp_path / "new") == stored_bytes(HYBRID if naming == "hybrid" else MODULE)


def test_bfloat16_is_rounded_to_nearest_even(tmp_path):
    convert_checkpoint(HYBRID, tmp_path / "new", weights="bfloat16")
    old = read_checkpoint(HYBRID)
    new = read_checkpoint(tmp_path / "new")
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        rounded = tensor.load().astype(ml_dtypes.bfloat16) if new[name].dtype == "BF16" else tensor.load()
        assert new[name].data.tobytes() == rounded.tobytes(), name
    assert new["model.layers.1.attn.attn_sink"].dtype == "F32" and new["head.weight"].dtype == "BF16"


def test_a_model_is_saved_as_its_files_are_converted(tmp_path):
    model = load_checkpoint(HYBRID, dtype=np.float32)
    for weights, naming in (("float32", "module"), ("bfloat16", "hybrid"), ("quantized", "release")):
        # transformers' spelling of config.json says nothing of the rates that the release's needs.
        save_release(model, tmp_path / f"{weights} saved", weights=weights, naming=naming)
        convert_checkpoint(HYBRID, tmp_path / weights, weights=weights, naming=naming)
        assert stored_bytes(tmp_path / weights) == stored_bytes(tmp_path / f"{weights} saved")
        one, other = (
            parameter_values(load_checkpoint(tmp_path / name, dtype=np.float32))
            for name in (weights, f"{weights} saved")
        )
        chex.assert_trees_all_equal(one, other)


def test_a_head_that_is_the_embedding_stays_so(tmp_path):
    stored = {name: np.array(x.load()) for name, x in read_checkpoint(HYBRID).items() if name != "head.weight"}
    config = json.loads((HYBRID / "config.json").read_text()) | dict(tie_word_embeddings=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    save_file(stored, tmp_path / "old" / "model.safetensors")
    convert_checkpoint(tmp_path / "old", tmp_path / "new", weights="float32", naming="module")
    expected = stored_bytes(MODULE)
    del expected["lm_head.weight"]
    assert stored_bytes(tmp_path / "new") == expected


def test_memory_is_bounded_by_a_tensor(tmp_path, monkeypatch):
    """Experts are read one by one, though they are one tensor in the new files; other tensors some rows at a time."""
    monkeypatch.setattr("dsv4_jax.checkpoint.save._CHUNK_BYTES", 1 << 14)
    convert_checkpoint(TINY, tmp_path / "new", weights="float32", naming="release")
    sizes = [x.nbytes for x in read_checkpoint(tmp_path / "new").values()]
    tracemalloc.start()
    convert_checkpoint(tmp_path / "new", tmp_path / "again", weights="bfloat16", naming="module")
    assert tracemalloc.get_traced_memory()[1] < sum(sizes) / 2
    tracemalloc.stop()


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    def refused(message, source=HYBRID, weights="float32", naming=None, dest="new"):
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(source, tmp_path / dest, weights=weights, naming=naming)

    refused("naming='module' stacks experts in one tensor, so weights='quantized' must be", MODULE, "quantized")
    with pytest.raises(ValueError, match="weights='fp8' must be quantized, bfloat16 or float32, and naming='release'"):
        check_storage("fp8", "release")
    refused("there is no folder .*none", dest="none/new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    refused("full must not exist yet, or be an empty folder", dest="full")
    (tmp_path / ".new.partial").mkdir()
    refused("new.partial exists: another conversion writes there, or was interrupted")
    (tmp_path / ".new.partial").rmdir()

    stored = {name: np.array(x.load()) for name, x in read_checkpoint(HYBRID).items()}
    stored["head.weight"][0, 0] = np.finfo(np.float32).max
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text((HYBRID / "config.json").read_text())
    save_file(stored, tmp_path / "old" / "model.safetensors")
    refused("head.weight has NaN or infinite values as bfloat16", tmp_path / "old", "bfloat16")
    usage = convert.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused("new needs .*, and the disk has 1000 B left")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "old"]


def test_the_loss_of_rounding(tmp_path):
    """Errors of tensors, and how many values changed or became 0; none if the values are those of the storage."""
    losses = convert_checkpoint(TINY, tmp_path / "new", weights="quantized")
    old = values(TINY)
    new = values(tmp_path / "new")
    tensors = join_scales(read_checkpoint(tmp_path / "new"))[0]
    for storage, loss in losses.items():
        names = [name for name, x in tensors.items() if x.dtype == storage]
        errors = {name: np.sqrt(np.sum((new[name] - old[name]) ** 2) / np.sum(old[name] ** 2)) for name in names}
        assert loss.num_values == sum(old[name].size for name in names)
        assert loss.num_rounded == sum(np.count_nonzero(new[name] != old[name]) for name in names)
        assert loss.num_zeroed == sum(np.count_nonzero((new[name] == 0) & (old[name] != 0)) for name in names)
        total = np.sqrt(sum(old[name].size * errors[name] ** 2 for name in names) / loss.num_values)
        # Differences were rounded to float32.
        np.testing.assert_allclose([loss.error, loss.largest[0]], [total, max(errors.values())], rtol=1e-5)
        assert loss.largest[0] == pytest.approx(errors[loss.largest[1]], rel=1e-5)
    assert 0.1 < losses["FP4"].error < 0.13 and 0.02 < losses["FP8"].error < 0.03 and losses["FP4"].num_zeroed > 1000
    convert_checkpoint(tmp_path / "new", tmp_path / "wide", weights="bfloat16")
    for source in "wide", "new":  # rounded again, and copied
        again = convert_checkpoint(tmp_path / source, tmp_path / f"from {source}", weights="quantized")
        for storage, loss in losses.items():
            assert again[storage].num_values == loss.num_values
            assert again[storage].num_rounded == again[storage].error == again[storage].largest[0] == 0


def test_the_command(tmp_path, capsys):
    arguments = [str(PACKAGED), str(tmp_path / "new"), "--weights", "bfloat16", "--naming", "hybrid"]
    assert main(["convert", *arguments]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert last == f"wrote {tmp_path / 'new'}"
    assert any(line.split()[1:8:2] == ["BF16", "297", "9857472", "0"] for line in table), table
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (PACKAGED / "tokenizer.json").read_bytes()
    one, other = (parameter_values(load_checkpoint(folder)) for folder in (PACKAGED, tmp_path / "new"))
    chex.assert_trees_all_equal(one, other)
    assert main(["convert", *arguments]) == 2
    assert "new must not exist yet, or be an empty folder" in " ".join(capsys.readouterr().err.split())
