"""The safetensors reader: values, shards, and every way a file can be broken."""

import json
import os

import chex
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, strategies as st
from safetensors.numpy import save, save_file

from dsv4_jax.checkpoint import read_checkpoint, read_file, read_tokenizer, weights_fingerprint
from dsv4_jax.config import DSV4Config
from tests.paths import TINY


RNG = np.random.default_rng(0)
TENSORS = {
    "f32": RNG.standard_normal((2, 3)).astype(np.float32),
    "bf16": RNG.standard_normal((5,)).astype(ml_dtypes.bfloat16),
    "f16": RNG.standard_normal((1, 3)).astype(np.float16),
    "i64": RNG.integers(-9, 9, (2, 2)),
    "i32": RNG.integers(-9, 9, (3,), np.int32),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.array(3, np.float32),
}
GOOD = save(TENSORS)


def pack(header, data=b""):
    """A safetensors file with the given header, which may be raw bytes."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + data


def entry(start, stop, shape=None, dtype="F32"):
    return {"dtype": dtype, "shape": [(stop - start) // 4] if shape is None else shape, "data_offsets": [start, stop]}


def read_bytes(tmp_path, content):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    return read_file(file)


def test_values_shapes_and_dtypes(tmp_path):
    tensors = read_bytes(tmp_path, GOOD)
    assert tensors.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        got = tensors[name].load()
        assert (tensors[name].name, tensors[name].shape) == (name, expected.shape)
        assert (got.dtype, got.shape, got.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def test_values_are_views_that_cannot_be_written(tmp_path):
    got = read_bytes(tmp_path, GOOD)["f32"].load()
    assert not got.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        got[0, 0] = 1


def test_headers_that_do_not_align_the_data_are_read(tmp_path):
    data = np.arange(3, dtype=np.float32)
    for padding in range(4):
        header = json.dumps({"x": entry(0, 12)}).encode() + b" " * padding
        chex.assert_trees_all_equal(read_bytes(tmp_path, pack(header, data.tobytes()))["x"].load(), data)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, np.int8])
def test_quantized_tensors_are_listed_but_not_loaded(tmp_path, dtype):
    tensor = read_bytes(tmp_path, save({"w": np.ones((2, 2), dtype)}))["w"]
    assert tensor.quantized
    assert tensor.shape == (2, 2)
    with pytest.raises(ValueError, match=rf"w in .*x\.safetensors is stored as {tensor.dtype}: codes"):
        tensor.load()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "has 0 bytes"),
        (b"1234567", "header too small"),
        (GOOD[:100], "invalid header length"),
        ((2**63).to_bytes(8, "little") + GOOD[8:], "header too large"),
        (GOOD[:-1], "truncated, .* file not fully covered"),
        (GOOD + b"\0", "file not fully covered"),
        (pack(b"{"), "invalid JSON"),
        (pack(b"\xff\xfe"), "invalid UTF-8"),
        (pack(b"[" * 100_000), "invalid JSON"),
        (pack(b"[]"), "invalid"),
        (pack(b'{"a": 1, "a": 2}'), "invalid"),
        (pack({"__metadata__": 1}), "invalid"),
        (pack({"w": 1}), "invalid"),
        (pack({"w": {"dtype": "F32", "shape": [1]}}, bytes(4)), "data_offsets"),
        (pack({"w": entry(0, 8, [1], dtype="F64")}, bytes(8)), r"w is F64 \[1\]; its dtype must be one of F32, BF16"),
        (pack({"w": entry(0, 4, dtype=["F32"])}, bytes(4)), "invalid JSON"),
        (pack({"w": entry(0, 4, dtype="F8")}, bytes(4)), "unknown variant `F8`"),
        (pack({"w": entry(0, 4, [-1, -1])}, bytes(4)), "invalid"),
        (pack({"w": entry(0, 4, [True])}, bytes(4)), "invalid"),
        (pack({"w": entry(0, 0, [0] * 65)}), "w is F32 .*, and its shape have at most 32 sizes"),
        (pack({"w": entry(0, 0, [0, 2**80])}), "invalid"),
        (pack({"w": entry(0, 0, [0, 2**63])}), "w is F32 .*, and its shape have at most 32 sizes of at most"),
        (pack({"w": entry(4, 0, [1])}, bytes(4)), "invalid offset for tensor `w`"),
        (pack({"w": entry(-4, 0, [1])}, bytes(4)), "invalid"),
        (pack({"w": entry(0, 8)}, bytes(4)), "file not fully covered"),
        (pack({"w": entry(0, 8, [3])}, bytes(8)), "invalid shape, data type, or offset for tensor"),
        (pack({"w": entry(0, 4, [1]), "v": entry(0, 4, [1])}, bytes(4)), "invalid offset for tensor"),
        (pack({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)), "invalid offset for tensor `b`"),
        (pack({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)), "invalid offset for tensor `b`"),
        (pack({"a": entry(4, 8)}, bytes(8)), "invalid offset for tensor `a`"),
        (
            pack(b'{"a": %s, "a": %s}' % tuple(json.dumps(entry(i, i + 4)).encode() for i in (0, 4)), bytes(8)),
            "invalid offset for tensor `a`",
        ),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as error:
        read_bytes(tmp_path, content)
    assert "x.safetensors" in str(error.value)


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors has 0 bytes"):
        read_file(tmp_path / "x.safetensors")


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(GOOD)) | st.just(len(GOOD)),
)
@example([], 0)
def test_mutated_files_are_read_or_refused(tmp_path_factory, flips, length):
    content = bytearray(GOOD)
    for position, value in flips:
        content[position] = value
    file = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    file.unlink(missing_ok=True)  # a new file, since the old one may still be mapped
    file.write_bytes(content[:length])
    try:
        loaded = {name: tensor.load() for name, tensor in read_file(file).items() if not tensor.quantized}
    except ValueError as error:
        assert "mutated.safetensors" in str(error)
    else:
        assert length == len(GOOD)
        for name, values in loaded.items():
            assert values.size == 0 or values.nbytes <= len(GOOD), name


def shards(folder, parts, index=None):
    """Writes each part as a shard, with an index of them unless given."""
    weight_map = {}
    for i, part in enumerate(parts):
        save_file(part, folder / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
    content = {"metadata": {}, "weight_map": weight_map} if index is None else index
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


ONE = {"a": np.zeros(2, np.float32)}
TWO = {"b": np.ones(3, np.float32)}


def test_shards_are_read_together(tmp_path):
    tensors = read_checkpoint(shards(tmp_path, [ONE, TWO]))
    assert {name: tensor.file.name for name, tensor in tensors.items()} == {
        "a": "model-0.safetensors",
        "b": "model-1.safetensors",
    }
    chex.assert_trees_all_equal(tensors["b"].load(), TWO["b"])


@pytest.mark.parametrize(
    "parts, index, message",
    [
        ([ONE], "{", "index.json: its JSON is broken"),
        ([ONE], {}, "has no weight_map"),
        ([ONE], {"weight_map": {}}, "has no weight_map"),
        ([ONE], {"weight_map": {"a": 1}}, "places a in 1; it must be the name of a file"),
        ([ONE], {"weight_map": {"a": "../model-0.safetensors"}}, "must be the name of a file beside the index"),
        ([ONE], {"weight_map": {"a": "model-7.safetensors"}}, "places a in model-7.safetensors, and there is no such"),
        ([ONE], {"weight_map": {"a": "x" * 5000}}, r"places a in x{200}, and there is no such file"),
        ([ONE], {"weight_map": {"a": "x/" * 5000}}, r"places a in '(x/)+x?; it must be the name of a file"),
        (
            [ONE],
            {"weight_map": {"a": "model-0.safetensors", "c": "model-0.safetensors"}},
            "places c in model-0.safetensors, but it lies in none of its files",
        ),
        (
            [ONE | TWO],
            {"weight_map": {"a": "model-0.safetensors"}},
            "places b in no file, but it lies in model-0.safetensors",
        ),
        ([ONE | {"c": ONE["a"]}, ONE | TWO], None, "a lies in two shards: model-0.safetensors and model-1.safetensors"),
        (
            [ONE, TWO],
            {"weight_map": {"a": "model-1.safetensors", "b": "model-0.safetensors"}},
            "places a in model-1.safetensors, but it lies in model-0.safetensors",
        ),
    ],
)
def test_contradicting_shards_are_refused(tmp_path, parts, index, message):
    with pytest.raises(ValueError, match=message):
        read_checkpoint(shards(tmp_path, parts, index))


def test_folders_without_a_checkpoint_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .*; no \*\.safetensors at all"):
        read_checkpoint(tmp_path)
    save_file(ONE, tmp_path / "part-1.safetensors")
    with pytest.raises(ValueError, match="only part-1.safetensors"):
        read_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"cannot read .*nowhere: No such file"):
        read_checkpoint(tmp_path / "nowhere")


def test_fingerprints_differ_between_weights_and_not_between_copies(tmp_path):
    found = weights_fingerprint(write(tmp_path, "a", TENSORS))
    assert weights_fingerprint(write(tmp_path, "b", dict(reversed(TENSORS.items())))) == found and len(found) == 64
    others = [
        TENSORS | {"f32": TENSORS["f32"] + 1},
        TENSORS | {"f32": TENSORS["f32"].reshape(3, 2)},
        TENSORS | {"more": np.zeros((0,), np.float32)},
        {("other" if name == "bf16" else name): x for name, x in TENSORS.items()},
    ]
    prints = {weights_fingerprint(write(tmp_path, f"{i}", other)) for i, other in enumerate(others)}
    assert len(prints | {found}) == 5


def test_files_that_nothing_refers_to_are_named(tmp_path, caplog):
    shards(tmp_path, [ONE, TWO])
    read_checkpoint(tmp_path)
    assert not caplog.text
    save_file(ONE, tmp_path / "consolidated.safetensors")
    assert read_checkpoint(tmp_path).keys() == {"a", "b"}
    assert "consolidated.safetensors is not read, since no other file refers to it" in caplog.text
    save_file(ONE, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds two checkpoints: model.safetensors, and the shards of model.saf"):
        read_checkpoint(tmp_path)
    assert read_checkpoint(tmp_path / "model.safetensors").keys() == {"a"}
    (tmp_path / "model.safetensors.index.json").unlink()
    caplog.clear()
    assert read_checkpoint(tmp_path).keys() == {"a"}
    assert "consolidated.safetensors, model-0.safetensors, model-1.safetensors is not read" in caplog.text


def test_an_index_may_name_the_single_file(tmp_path, caplog):
    save_file(ONE, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert read_checkpoint(tmp_path).keys() == {"a"} and not caplog.text


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", read_checkpoint),
        ("model.safetensors.index.json", read_checkpoint),
        ("config.json", DSV4Config.from_hf),
        ("tokenizer.json", read_tokenizer),
    ],
)
def test_git_lfs_pointers_are_told_apart(tmp_path, name, read):
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ValueError, match=rf"{name} is a Git LFS pointer .*: git -C {tmp_path} lfs pull$"):
        read(tmp_path)


def test_the_snapshot_in_a_hubs_folder_is_hinted_at(tmp_path):
    snapshot = tmp_path / "models--deepseek-ai--DeepSeek-V4-Flash" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    for folder in snapshot.parent, snapshot.parent.parent:
        for read in read_checkpoint, DSV4Config.from_hf:
            with pytest.raises(ValueError, match=rf"give the snapshot in it, {snapshot}$"):
                read(folder)


def write(tmp_path, name, tensors):
    save_file(tensors, file := tmp_path / f"{name}.safetensors")
    return file


def test_one_file_may_be_named_directly():
    assert read_checkpoint(TINY / "model.safetensors").keys() == read_checkpoint(TINY).keys()
