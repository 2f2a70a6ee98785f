"""What the cache costs: the report of one test without the other."""

import pytest
from cache_cost import plot, tables


TEXT = [
    dict(format="plain", attended="all", bits=1.5, by_place={"0": 1.75, "128": 1.25}),
    dict(format="plain", attended="top-k", bits=1.25, by_place={"0": 1.5, "128": 1.0}),
    dict(format="v4", attended="all", bits=1.75, by_place={"0": 2.0, "128": 1.5}),
]
NEEDLES = dict(format="v4", attended="top-k", accuracy={"1000": 0.75, "16000": 0.5}, questions=64)
OF = dict(rows=2, length=256, dtype="float32")


@pytest.mark.parametrize(("text", "needles"), [(TEXT, []), ([], [NEEDLES]), (TEXT[:1], [NEEDLES]), (TEXT, [NEEDLES])])
def test_reports_what_was_measured(text, needles, tmp_path):
    report = dict(OF, text=text, needles=needles)
    table = tables(report)
    assert ("| plain | all | 1.5000 | 1.7500 | 1.2500 |" in table) == bool(text)
    assert ("(64 questions), by bytes back:" in table) == bool(needles)
    assert ("| v4 | top-k | 75% | 50% |" in table) == bool(needles)
    assert not table.startswith("\n")
    plot(tmp_path / "cost.png", report)
    assert (tmp_path / "cost.png").stat().st_size > 1000
