"""`dsv4-jax score` against transformers' goldens (tolerances: the oracle's README), and mistakes."""

import numpy as np
import pytest

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


def test_scores_equal_transformers(run, golden, ids_file, tmp_path):
    how = ["--chunk", "16", "--decode-from", "33", "--layers"]
    table = run("score", *PLAIN, "--ids", ids_file, *how, "--out", tmp_path / "scores.npz")
    scores = np.load(tmp_path / "scores.npz")
    layers = range(5)
    names = {f"attn_{side}_{layer}" for side in ("in", "out") for layer in layers}
    assert set(scores) == names | {"logits", "log_likelihoods", "perplexity"}
    assert {scores[name].dtype for name in scores} == {np.dtype(np.float32)}
    np.testing.assert_allclose(scores["logits"], golden["logits"], rtol=0, atol=LOGITS_TOLERANCE)
    for name in sorted(names):
        np.testing.assert_allclose(scores[name], golden[name], rtol=0, atol=LAYER_TOLERANCE, err_msg=name)

    logits = golden["logits"].astype(np.float64)[:, :-1]
    log_softmax = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    want = np.take_along_axis(log_softmax, golden["ids"][:, 1:, None], axis=-1)[..., 0]
    # Twice the logits' tolerance: the token's logit and the normaliser may each be off by it.
    np.testing.assert_allclose(scores["log_likelihoods"], want, rtol=0, atol=2 * LOGITS_TOLERANCE)
    perplexity = np.exp(-want.mean(axis=1))
    np.testing.assert_allclose(scores["perplexity"], perplexity, rtol=2 * LOGITS_TOLERANCE)
    for value in scores["perplexity"]:
        assert f"{value:.3f}" in table


def test_without_layers_and_ending(run, golden, ids_file, tmp_path):
    run("score", *PLAIN, "--ids", ids_file, "--out", tmp_path / "scores")
    scores = np.load(tmp_path / "scores")
    assert set(scores) == {"logits", "log_likelihoods", "perplexity"}
    np.testing.assert_allclose(scores["logits"], golden["logits"], rtol=0, atol=LOGITS_TOLERANCE)


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


@pytest.mark.parametrize("content", [b"", b"5,6,7\n", b"PK\x03\x04"])
def test_files_that_hold_no_array_are_explained(refused, tmp_path, content):
    (tmp_path / "ids.npy").write_bytes(content)
    err = refused("score", *PLAIN, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "scores.npz")
    assert "is no .npy file of numbers" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--decode-from", "76"], "--decode-from 76 must be from 0 to 75"),
        (["--decode-from", "-1"], "--decode-from -1 must be from 0 to 75"),
        (["--chunk", "0"], "--chunk 0 must be at least 1"),
        (["--ids", "no_such.npy"], "No such file or directory: 'no_such.npy'"),
        (["--out", "no/such/folder/scores.npz"], "--out no/such/folder/scores.npz must name a file in an existing"),
        (["--checkpoint", "no/such/folder"], "cannot read the configuration"),
        (["--cache-format", "v4"], "24"),
    ],
)
def test_mistakes_are_explained(refused, ids_file, tmp_path, options, message):
    assert message in refused("score", *PLAIN, "--ids", ids_file, "--out", tmp_path / "scores.npz", *options)
