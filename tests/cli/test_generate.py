"""`dsv4-jax generate`: tokens, report, mistakes."""

import json
import re
import shutil
import sys
from unittest import mock

import numpy as np
import pytest

from dsv4_jax.cache import CacheSchema
from dsv4_jax.checkpoint import read_tokenizer, save_release
from dsv4_jax.cli.generate_command import _print
from dsv4_jax.cli.model_options import ModelOptions
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.byte_tokenizer import write_byte_tokenizer
from tests.paths import DATA, PACKAGED, TINY


IDS = ["--checkpoint", TINY, "--max-new-tokens", "32"]
# Of the commonest words in any English text, and of the King James text.
WORDS = set("the of and in a to that is was he unto shall for his not be with they all him them it lord".split())


@pytest.mark.slow
def test_without_arguments_it_writes_english(run):
    out = run("generate")
    text = out[: out.index("128 new tokens on")]
    assert text.startswith("In the beginning ")
    words = re.findall("[a-z]+", text.lower())[3:]
    assert len(words) > 15 and sum(word in WORDS for word in words) > len(words) / 4, text


@pytest.mark.slow
def test_chunks_of_a_prompt_do_not_change_the_text(run, layer_of_each_kind):
    text = (DATA.parents[1] / "README.md").read_text()[:700]
    texts = []
    for chunk in (1024, 64):
        options = ["--checkpoint", layer_of_each_kind, "--max-new-tokens", "40", "--ignore-eos", "--chunk", chunk]
        texts.append(json.loads(run("generate", "--prompt", text, *options, "--json"))["text"])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_mesh_writes_the_same_text(run):
    options = ["--dtype", "float32", "--max-new-tokens", "40", "--json"]
    alone = json.loads(run("generate", *options))
    more = ["--mesh", "data=2,model=2", "--drafts", "2"]
    assert json.loads(run("generate", *options, *more))["tokens"] == alone["tokens"]


@pytest.mark.slow
def test_a_mesh_finds_the_same_likelihoods(run, layer_of_each_kind, tmp_path):
    """Of three rows, an odd number for two parts, whose context four devices split."""
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 256, (3, 192)))
    scores = []
    for more in ([], ["--mesh", "data=2,model=2", "--context-parallel", "--expert-parallel"]):
        files = ["--checkpoint", layer_of_each_kind, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npz"]
        run("score", *files, "--dtype", "float32", "--chunk", "96", *more)
        scores.append(np.load(tmp_path / "out.npz")["log_likelihoods"])
    # float32 sums in other orders, and now and then the next FP8 code of a value.
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-2)


@pytest.mark.slow
def test_a_mesh_finds_the_same_drafts(run, tmp_path):
    """A step of five tokens of each row has padding behind them, which separates the rows of two devices."""
    config = DSV4Config.from_hf(PACKAGED, mtp=True).with_layers([LayerSpec()])
    save_release(DeepseekV4ForCausalLM(config), tmp_path)
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 256, (2, 10)))
    scores = []
    for more in ([], ["--mesh", "data=2"]):
        files = ["--checkpoint", tmp_path, "--ids", tmp_path / "ids.npy", "--out", tmp_path / "out.npz"]
        run("score", *files, "--dtype", "float32", "--chunk", "5", "--drafts", "1", *more)
        scores.append(np.load(tmp_path / "out.npz")["draft_logits"])
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-2)  # as above


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ("4", "mesh '4' must be AXIS=DEVICES with axes of data, model, such as model=4"),
        ("model=4", "mesh axis model=4 does not divide o_groups=2, vocab_size=258; this model takes 1, 2"),
    ],
)
def test_meshes_that_cannot_be(refused, mesh, message):
    assert message in " ".join(refused("generate", "--mesh", mesh).split())


def test_expert_parallel_want_a_mesh(refused):
    assert "--expert-parallel needs a mesh with more" in " ".join(refused("generate", "--expert-parallel").split())


@pytest.mark.slow
def test_streams_then_reports(run):
    out = run("generate", *IDS, "--ignore-eos")
    tokens, _, table = out.partition("\n")
    tokens = [int(token) for token in tokens.split()]
    assert len(tokens) == 32
    assert "32 new tokens on" in table and "none compiling" in table and "format v4" in table

    # All that runs again runs the same programs.
    report = json.loads(run("generate", *IDS, "--ignore-eos", "--json"))
    assert report["tokens"] == tokens
    assert report["compilations"] == 0
    # Every token but the first, which the prompt's step yields.
    assert report["timed_tokens"] == 31
    assert 0 < 31 / report["tokens_per_second"] < report["seconds"]
    assert isinstance(report["device"], str)
    sizes = dict(num_blocks=1, max_requests=1, max_context=128)
    schema = CacheSchema(DSV4Config.from_hf(TINY), **sizes)
    assert report["cache_bytes"] == dict(
        per_token=102.0,  # 2 CSA layers of (136 + 34) / 4 and 2 HCA layers of 136 / 16 bytes
        per_request=schema.bytes_per_request,
        total=schema.memory_bytes(),
        dense_bf16_per_token=5 * 96 * 2,
    )

    # The model's end token, 1, is the last one given.
    stopped = json.loads(run("generate", *IDS, "--json"))["tokens"]
    assert stopped == tokens[: tokens.index(1) + 1]
    assert len(stopped) < 32


@pytest.mark.slow
def test_compilations_are_counted_and_not_timed(run):
    draw = ["generate", *IDS, "--prompt-ids", "5", "--temperature", "0.8", "--top-k", "20", "--top-p", "0.9"]
    draw += ["--max-new-tokens", "8", "--ignore-eos", "--json", "--cache-format", "per_entry"]
    first = json.loads(run(*draw, "--seed", "3"))
    assert first["compilations"] == 1
    # A prompt of one token is a decode step: nothing compiles after the first token.
    assert first["timed_tokens"] == 7
    compiling = first["seconds"] - 7 / first["tokens_per_second"]
    assert compiling > first["seconds"] / 2
    again = json.loads(run(*draw, "--seed", "3"))
    # How tokens are drawn is an input of the program.
    other = json.loads(run(*draw, "--seed", "4", "--top-k", "7"))
    assert again["tokens"] == first["tokens"] != other["tokens"]
    assert again["compilations"] == other["compilations"] == 0


@pytest.mark.slow
def test_tokens_equal_transformers(run):
    golden = np.load(DATA / "hf_tiny" / "golden.npz")
    prompt = ",".join(map(str, golden["greedy_prompt"][0]))
    plain = ["--checkpoint", DATA / "hf_tiny", "--cache-format", "plain", "--dtype", "float32"]
    options = ["--max-new-tokens", "48", "--ignore-eos", "--json"]
    report = json.loads(run("generate", *plain, "--prompt-ids", prompt, *options))
    assert report["tokens"] == golden["greedy_tokens"][0].tolist()
    assert "text" not in report  # there is no tokenizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt-ids", ""], "--prompt-ids is empty"),
        (["--prompt-ids", "1,x"], "--prompt-ids '1,x' must be whole numbers separated by commas"),
        (["--prompt-ids", "1,,2"], "must be whole numbers separated by commas"),
        (["--prompt-ids", "5,258"], "--prompt-ids[1]=258 is outside the vocabulary: ids go from 0 to 257"),
        (["--prompt-ids=-1,5"], "--prompt-ids[0]=-1 is outside the vocabulary"),
        (["--prompt-ids", ",".join(["7"] * 32769)], "max_position_embeddings=32768"),
        (["--max-new-tokens", "40000"], "--max-new-tokens 40000: a request of 40000 tokens"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["--max-new-tokens", "-3"], "--max-new-tokens -3 must be at least 1"),
        (["--n-best", "0"], "--n-best 0 must be at least 1"),
        (["--beams", "-2"], "--beams -2 must be at least 1"),
        (["--n-best", "2", "--beams", "2"], "--n-best and --beams exclude each other"),
        (["--n-best", "2"], "--n-best 2 answers would all be the same: give --temperature above 0"),
        (["--beams", "2", "--temperature", "1"], "leave out --temperature"),
        (["--beams", "2", "--drafts", "1"], "--drafts makes one answer"),
        (["--prompt", "a\udcff"], "--prompt is no UTF-8 text: character 1 is the byte 0xff"),
        (["--chunk", "-1"], "--chunk -1 must be at least 1"),
        (["--temperature", "-1"], "--temperature -1.0 must be 0 (greedy) or positive"),
        (["--temperature", "nan"], "--temperature nan must be 0"),
        (["--top-k", "-1"], "--top-k -1 must be at least 0"),
        (["--top-p", "0"], "--top-p 0.0 must be in (0, 1]"),
        (["--top-k", "4294967295"], "--top-k 4294967295 must be at most 2147483647"),
        (["--checkpoint", "no/such/folder"], "cannot read the configuration no/such/folder: No such file"),
        # 24 dims of a head are not rotated: not whole groups of 64.
        (["--checkpoint", DATA / "hf_tiny"], "24"),
    ],
)
def test_mistakes_are_explained(refused, options, message):
    assert message in refused("generate", *options)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--n-best", "--beams"])
def test_several_answers_the_best_first(run, layer_of_each_kind, option):
    options = ["--checkpoint", layer_of_each_kind, "--max-new-tokens", "12", "--ignore-eos", option, "3"]
    options += ["--temperature", "1"] if option == "--n-best" else []
    shown = run("generate", *options)
    report = json.loads(run("generate", *options, "--json"))  # compiles nothing, so that it is timed
    found = report["candidates"]
    assert len({tuple(one["tokens"]) for one in found}) == 3 and report["tokens"] == found[0]["tokens"]
    assert report["text"] == found[0]["text"] and report["timed_tokens"] == 36
    assert [one["logprob"] for one in found] == sorted((one["logprob"] for one in found), reverse=True)
    assert shown.startswith("In the beginning" + "\n".join(one["text"] for one in found) + "\n")


def test_broken_checkpoints_are_explained(refused, tmp_path):
    shutil.copy(TINY / "config.json", tmp_path)
    assert "holds neither model.safetensors nor" in refused("generate", "--checkpoint", tmp_path)
    weights = (TINY / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[:-100])
    assert "truncated" in refused("generate", "--checkpoint", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 1000)
    assert "truncated, damaged or no safetensors file" in refused("generate", "--checkpoint", tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: its JSON is broken" in refused("generate", "--checkpoint", tmp_path)


@pytest.fixture(scope="module")
def with_text(tmp_path_factory):
    """hf_tiny, its 160 tokens being bytes: options of a checkpoint with a tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "hf_tiny" / name, folder)
    write_byte_tokenizer(folder / "tokenizer.json", {})
    return ["--checkpoint", folder, "--cache-format", "plain", "--dtype", "float32", "--max-new-tokens", "12"]


@pytest.mark.slow
def test_text_in_text_out(run, with_text):
    """The prompt is the default one, so that all runs share two programs."""
    text = "In the beginning"
    report = json.loads(run("generate", *with_text, "--prompt", text, "--ignore-eos", "--json"))
    by_ids = ",".join(map(str, text.encode()))
    same = json.loads(run("generate", *with_text, "--prompt-ids", by_ids, "--ignore-eos", "--json"))
    assert len(report["tokens"]) == 12 and same["tokens"] == report["tokens"]
    assert report["text"] == read_tokenizer(with_text[1]).decode(report["tokens"]) == same["text"]
    streamed = run("generate", *with_text, "--ignore-eos")
    assert streamed.startswith(text + report["text"] + "\n")


@pytest.mark.parametrize("options", [[], ["--weights", "quantized"], ["--weights", "float32"]])
def test_weights_are_loaded_as_asked(refused, monkeypatch, options):
    def load(*args, dtype, weights, **options):
        raise ValueError(f"{dtype} activations, {weights} weights")

    monkeypatch.setattr("dsv4_jax.checkpoint.load_checkpoint", load)
    assert f"bfloat16 activations, {(options or [None])[-1]} weights" in refused("generate", *options)


@pytest.mark.parametrize(
    ("weights", "on_gpu"), [(None, "quantized"), ("bfloat16", "bfloat16"), ("quantized", "quantized")]
)
def test_on_a_gpu_weights_stay_as_they_are_stored(monkeypatch, weights, on_gpu):
    monkeypatch.setattr("dsv4_jax.checkpoint.load_checkpoint", lambda *args, weights, **options: weights)
    for backend, expected in dict(cpu=weights, gpu=on_gpu).items():
        monkeypatch.setattr("jax.default_backend", lambda: backend)  # noqa: B023
        assert (
            ModelOptions(weights=weights).load_model(TINY, mock.Mock(config=DSV4Config.from_hf(TINY))).module
            == expected
        )


def test_mistakes_about_text_are_explained(refused, with_text, tmp_path):
    assert "exclude each other" in refused("generate", *with_text, "--prompt", "a", "--prompt-ids", "1")
    without = ["--checkpoint", DATA / "hf_tiny"]
    assert "there is none: use --prompt-ids" in refused("generate", *without, "--prompt", "a")
    assert "--prompt[1]=195 is outside the vocabulary" in refused("generate", *with_text, "--prompt", "a\u00e4")
    shutil.copy(DATA / "hf_tiny" / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "cannot read" in refused("generate", "--checkpoint", tmp_path)


@pytest.mark.slow
def test_drafts_change_no_token_and_are_counted(run):
    golden = np.load(DATA / "official_mtp" / "golden.npz")
    prompt = ",".join(map(str, golden["greedy_prompt"][0]))
    options = ["--checkpoint", DATA / "official_mtp", "--prompt-ids", prompt, "--max-new-tokens", "32", "--ignore-eos"]
    options += ["--dtype", "float32", "--cache-format", "plain", "--drafts", "3"]
    report = json.loads(run("generate", *options, "--json"))
    assert report["tokens"] == golden["greedy_tokens"][0].tolist()
    assert sum(1 + kept for kept in report["accepted"]) == 32
    assert len(report["accepted"]) < 28
    assert f"{32 / len(report['accepted']):.2f}, drafts included" in run("generate", *options)


def test_drafts_need_a_block_that_makes_them(refused):
    without = ["--checkpoint", DATA / "hf_tiny", "--drafts", "1"]
    assert "this model has no layers that make drafts" in refused("generate", *without)
    assert "--drafts -1 must be at least 0" in refused("generate", "--drafts", "-1")
    too_many = ["--checkpoint", DATA / "official_dspark", "--drafts", "6", "--cache-format", "plain"]
    assert "--drafts 6 must be from 1 to 5, the most that this model's layers make" in refused("generate", *too_many)
    options = ["--temperature", "1", "--n-best", "2"]
    assert "leave out --n-best and --beams" in refused("generate", "--drafts", "1", *options)


@pytest.mark.slow
def test_random_weights_need_no_checkpoint(run, refused, one_layer, tmp_path):
    shutil.copy(one_layer / "config.json", tmp_path)
    options = "--random-weights", tmp_path, "--skew", 1, "--max-new-tokens", 8
    report = json.loads(run("generate", *options, "--ignore-eos", "--json"))
    assert len(report["tokens"]) == 8 and "text" not in report
    assert "--checkpoint and --random-weights exclude each other" in refused(
        "generate", *options, "--checkpoint", one_layer
    )
    assert "--skew 1.0 needs --random-weights" in refused("generate", "--skew", 1)
    assert "--random-weights no is neither v4_flash nor v4_pro" in refused("serve", "--random-weights", "no")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_gets_no_control_characters(monkeypatch, capsys, is_terminal):
    """A file or another program gets the text as it is."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    _print("a\x1b[2Jb\x9bc\n\td")
    assert capsys.readouterr().out == ("a[2Jbc\n\td" if is_terminal else "a\x1b[2Jb\x9bc\n\td")
