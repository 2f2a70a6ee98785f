"""The soak, short."""

import pytest

from tests.stress.soak import soak


@pytest.mark.slow
def test_it_counts(capsys):
    soak(operations=61, processes=2, seed=3)
    assert "61 operations in" in (out := capsys.readouterr().out) and ", 0 differing bytes" in out
