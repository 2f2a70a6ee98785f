"""The command line, as the cli's tests run it."""

import json

import pytest

from dsv4_jax.config.config_json import release_config
from tests.cli.conftest import one_layer, refused, run, width  # noqa: F401
from tests.v41 import v41_config


@pytest.fixture
def toy(tmp_path):
    """A folder with the configuration of a small model like V4.1."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(release_config(v41_config())))
    return folder
