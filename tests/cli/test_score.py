"""`dsv4-jax score` against transformers' goldens (tolerances: the oracle's README), and mistakes."""

import shutil

import chex
import numpy as np
import pytest

from dsv4_jax.cli import score_command
from tests.byte_tokenizer import write_byte_tokenizer
from tests.paths import DATA


FOLDER = DATA / "hf_tiny"
PLAIN = ["--checkpoint", FOLDER, "--cache-format", "plain", "--dtype", "float32"]
# 20 times the difference observed between two independent float32 implementations of a layer.
LAYER_TOLERANCE = 2e-5
# 10 times the difference observed between two implementations.
LOGITS_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def golden():
    return np.load(FOLDER / "golden.npz")


@pytest.fixture
def ids_file(golden, tmp_path):
    np.save(tmp_path / "ids.npy", golden["ids"])
    return tmp_path / "ids.npy"


@pytest.mark.slow
def test_scores_equal_transformers(run, golden, ids_file, tmp_path):
    how = ["--chunk", "16", "--decode-from", "33", "--layers"]
    table = run("score", *PLAIN, "--ids", ids_file, *how, "--out", tmp_path / "scores.npz")
    scores = np.load(tmp_path / "scores.npz")
    layers = range(5)
    names = {f"attn_{side}_{layer}" for side in ("in", "out") for layer in layers}
    assert set(scores) == names | {"logits", "log_likelihoods", "perplexity"}
    assert {scores[name].dtype for name in scores} == {np.dtype(np.float32)}
    chex.assert_trees_all_close(scores["logits"], golden["logits"], rtol=0, atol=LOGITS_TOLERANCE)
    for name in sorted(names):
        chex.assert_trees_all_close(scores[name], golden[name], rtol=0, atol=LAYER_TOLERANCE, custom_message=name)

    logits = golden["logits"].astype(np.float64)[:, :-1]
    log_softmax = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    want = np.take_along_axis(log_softmax, golden["ids"][:, 1:, None], axis=-1)[..., 0]
    # Twice the logits' tolerance: the token's logit and the normalizer may each be off by it.
    chex.assert_trees_all_close(scores["log_likelihoods"], want, rtol=0, atol=2 * LOGITS_TOLERANCE)
    perplexity = np.exp(-want.mean(axis=1))
    chex.assert_trees_all_close(scores["perplexity"], perplexity, rtol=2 * LOGITS_TOLERANCE)
    for value in scores["perplexity"]:
        assert f"{value:.3f}" in table


@pytest.mark.slow
def test_without_layers_and_ending(run, golden, ids_file, tmp_path):
    run("score", *PLAIN, "--ids", ids_file, "--out", tmp_path / "scores")
    scores = np.load(tmp_path / "scores")
    assert set(scores) == {"logits", "log_likelihoods", "perplexity"}
    chex.assert_trees_all_close(scores["logits"], golden["logits"], rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.slow
def test_perplexity_alone_keeps_no_logits(run, refused, golden, ids_file, tmp_path, monkeypatch):
    table = run("score", *PLAIN, "--ids", ids_file, "--chunk", "16", "--out", tmp_path / "scores.npz")
    kept = []
    collect = score_command._collect
    monkeypatch.setattr(score_command, "_collect", lambda *args: kept.append(collect(*args)) or kept[0])
    assert run("score", *PLAIN, "--ids", ids_file, "--chunk", "16") == table
    (results,) = kept
    assert results.keys() == {"log_likelihoods", "perplexity"}
    chex.assert_trees_all_equal(results["log_likelihoods"], np.load(tmp_path / "scores.npz")["log_likelihoods"])
    for option in (["--layers"], ["--drafts", "1"]):
        assert "give --out FILE.npz" in refused("score", *PLAIN, "--ids", ids_file, *option)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 6, 7], "has shape [3]; it must be [B, T]"),
        ([[5], [6]], "has shape [2, 1]; it must be [B, T], B at least 1 and T at least 2"),
        (np.zeros((0, 9), np.int32), "has shape [0, 9]"),
        ([[5, 6], [7, 160]], "ids[1][1]=160 is outside the vocabulary"),
        ([[5, -6]], "ids[0][1]=-6 is outside the vocabulary"),
        ([[5.0, 6.0]], "ids[0] must hold whole numbers, not float64"),
        (np.zeros((1, 4097), np.int32), "max_position_embeddings=4096"),
    ],
)
def test_bad_ids_are_explained(refused, tmp_path, ids, message):
    np.save(tmp_path / "ids.npy", ids)
    err = refused("score", *PLAIN, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "scores.npz")
    assert message in err
    assert not (tmp_path / "scores.npz").exists()


def npy(header):
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


HEADERS = (
    "{'descr': '<i4', 'shape': (2,",
    f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({2**58}, 2)}}",
    "{'descr': '|O', 'fortran_order': False, 'shape': (2, 2)}",
)


@pytest.mark.parametrize("content", [b"", b"5,6,7\n", b"PK\x03\x04", *(npy(text) for text in HEADERS)])
def test_files_that_hold_no_array_are_explained(refused, tmp_path, content):
    (tmp_path / "ids.npy").write_bytes(content)
    err = refused("score", *PLAIN, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "scores.npz")
    assert "is no .npy file of numbers" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--decode-from", "76"], "--decode-from 76 must be from 0 to 75"),
        (["--decode-from", "-1"], "--decode-from -1 must be at least 0"),
        (["--chunk", "0"], "--chunk 0 must be at least 1"),
        (["--ids", "no_such.npy"], "--ids no_such.npy cannot be read: No such file or directory"),
        (
            ["--out", "no/such/folder/scores.npz"],
            "--out no/such/folder/scores.npz cannot be written: No such file or directory",
        ),
        (["--checkpoint", "no/such/folder"], "cannot read the configuration"),
        (["--cache-format", "v4"], "24"),
    ],
)
def test_mistakes_are_explained(refused, ids_file, tmp_path, options, message):
    assert message in refused("score", *PLAIN, "--ids", ids_file, "--out", tmp_path / "scores.npz", *options)


@pytest.fixture
def with_text(tmp_path):
    """hf_tiny, its 160 tokens being bytes: options of a checkpoint with a tokenizer."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FOLDER / name, folder)
    write_byte_tokenizer(folder / "tokenizer.json", {})
    return ["score", "--checkpoint", folder, *PLAIN[2:], "--out", tmp_path / "scores.npz"]


@pytest.mark.slow
def test_text_is_scored_in_bits_per_byte(run, with_text, tmp_path):
    text = b"In the beginning\r\nGod created the heaven and the earth. And the earth was w"
    assert len(text) == 75
    (tmp_path / "text").write_bytes(text)
    table = run(*with_text, "--text", tmp_path / "text")
    scores = dict(np.load(tmp_path / "scores.npz"))
    bits = -scores["log_likelihoods"].mean(dtype=np.float64) / np.log(2)
    chex.assert_trees_all_close(scores["bits_per_byte"], np.array([bits]), rtol=1e-6)
    assert f"{bits:.4f}" in table
    np.save(tmp_path / "ids.npy", [list(text)])
    run(*with_text, "--ids", tmp_path / "ids.npy")
    for name, value in np.load(tmp_path / "scores.npz").items():
        chex.assert_trees_all_equal(value, scores[name], custom_message=name)
    # 0x80 is no character.
    np.save(tmp_path / "ids.npy", [[*text[:74], 0x80]])
    assert "byte" not in run(*with_text, "--ids", tmp_path / "ids.npy")
    assert "bits_per_byte" not in np.load(tmp_path / "scores.npz")


@pytest.mark.slow
def test_ablations(run, golden, tmp_path):
    """What a token sees: its window of 8 alone; few entries; all of them."""
    np.save(tmp_path / "ids.npy", golden["ids"][:1])
    other = golden["ids"][:1].copy()
    other[0, :20] = (other[0, :20] + 1) % 160
    np.save(tmp_path / "other.npy", other)

    def logits(*options, ids="ids.npy"):
        run("score", *PLAIN, "--ids", tmp_path / ids, "--out", tmp_path / "scores.npz", *options)
        return np.load(tmp_path / "scores.npz")["logits"][0]

    usual = logits()
    alone = logits("--window-only")
    fewer = logits("--index-topk", "1")
    chex.assert_trees_all_equal(logits("--index-topk", "4"), usual)  # what config.json says
    # The first entry closes with the fourth token (CSA), and one is as good as four until there are two.
    chex.assert_trees_all_close(alone[:3], usual[:3], rtol=0, atol=LOGITS_TOLERANCE)
    chex.assert_trees_all_close(fewer[:7], usual[:7], rtol=0, atol=LOGITS_TOLERANCE)
    for one, two in ((alone, usual), (fewer, usual), (fewer, alone)):
        assert (np.abs(one - two).max(axis=1) > 1e-3)[16:].all()
    # Windows of 8 in five layers reach 35 tokens back: what was before does not matter, unless there are entries.
    changed = logits("--window-only", ids="other.npy")
    assert (np.abs(changed - alone).max(axis=1) > 1e-3)[:20].all()
    chex.assert_trees_all_close(changed[55:], alone[55:], rtol=0, atol=LOGITS_TOLERANCE)
    assert (np.abs(logits(ids="other.npy") - usual).max(axis=1) > 1e-3)[55:].any()


def test_mistakes_about_text_are_explained(refused, with_text, ids_file, tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"a")
    assert "give --ids or --text, one of them" in refused(*with_text)
    assert "give --ids or --text, one of them" in refused(*with_text, "--ids", ids_file, "--text", file)
    assert "has 1 tokens; scoring needs at least 2" in refused(*with_text, "--text", file)
    file.write_bytes(b"\xff\xfe")
    assert "is no UTF-8 text" in refused(*with_text, "--text", file)
    assert "No such file" in refused(*with_text, "--text", tmp_path / "none")
    assert "there is none: use --ids" in refused("score", *PLAIN, "--text", file, "--out", tmp_path / "s.npz")
    assert "--index-topk 0 must be at least 1" in refused(*with_text, "--ids", ids_file, "--index-topk", "0")
