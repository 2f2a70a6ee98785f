"""Runs the command line in this process, so that compiled programs are shared between tests."""

import dataclasses
import shutil

import pytest

from dsv4_jax.checkpoint import save_release
from dsv4_jax.cli import main
from dsv4_jax.config import CSA, HCA, SLIDING, DSV4Config
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.paths import PACKAGED


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "one_layer", CSA)


@pytest.fixture(scope="session")
def layer_of_each_kind(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "three_layers", SLIDING, CSA, HCA)


def write_checkpoint(folder, *layer_types):
    """The packaged checkpoint's sizes and tokenizer, fewer layers, random weights; returns the folder."""
    config = DSV4Config.from_hf(PACKAGED)
    kinds = dict(layer_types=layer_types, mlp_layer_types=("moe",) * len(layer_types))
    if HCA not in layer_types:
        kinds["compress_rate_hca"] = 0
    config = dataclasses.replace(config, num_hidden_layers=len(layer_types), **kinds)
    save_release(DeepseekV4ForCausalLM(config), folder)
    shutil.copy(PACKAGED / "tokenizer.json", folder)
    return folder


@pytest.fixture(autouse=True)
def width(monkeypatch):
    """Tables as wide as everywhere else, whatever the terminal."""
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def run(capsys):
    """run(*arguments) -> stdout of a command that succeeds."""

    def call(*arguments):
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def refused(capsys):
    """refused(*arguments) -> stderr of a command that explains the user's mistake, after saying what it does."""

    def call(*arguments):
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        before, _, explained = err.partition("Error: ")
        assert explained and all(line.endswith(" ...") for line in before.splitlines()) and "Traceback" not in err
        return err

    return call
