"""The command line, as the cli's tests run it."""

from tests.cli.conftest import one_layer, refused, run, width  # noqa: F401
