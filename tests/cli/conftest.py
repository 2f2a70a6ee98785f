"""Runs the command line in this process, so that compiled programs are shared between tests."""

import shutil

import pytest

from dsv4_jax.checkpoint import save_release
from dsv4_jax.cli import main
from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.nn import DeepseekV4ForCausalLM
from tests.paths import PACKAGED


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "one_layer", LayerSpec.csa())


@pytest.fixture(scope="session")
def layer_of_each_kind(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "three_layers"
    return write_checkpoint(folder, LayerSpec(), LayerSpec.csa(), LayerSpec.hca())


def write_checkpoint(folder, *specs):
    """The packaged checkpoint's sizes and tokenizer, fewer layers, random weights; returns the folder."""
    config = DSV4Config.from_hf(PACKAGED).with_layers(specs)
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
