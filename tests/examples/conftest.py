"""The programs of an example import one another by bare names, as they do when run."""

import sys

import jax
import pytest

from tests.paths import DATA


for folder in ("king_james", "grpo"):
    sys.path.insert(0, str(DATA.parents[1] / "examples" / folder))


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """A training step takes far longer to compile than to run here."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
