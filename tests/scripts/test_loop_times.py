"""Times of calls in a loop on the device: the script on a CPU."""

import itertools
import json
import types

import loop_times
import pytest


# Seconds that a clock shows of the first two loops, then five times of three and of one. Two pairs are disturbed.
SECONDS = 2, *(3, 1), *(1, 3), *(3, 1), *(9, 1), *(3, 1)


@pytest.mark.slow
def test_times_and_reports(tmp_path, capsys, monkeypatch):
    clock = itertools.cycle(reading for seconds in SECONDS for reading in (0, seconds))
    monkeypatch.setattr(loop_times, "time", types.SimpleNamespace(perf_counter=clock.__next__))
    report = tmp_path / "report.json"
    sizes = ["--calls", "2", "--passes", "2", "--report", str(report)]
    loop_times.main(["--names", "append", "indexer", "--only", "append_swa T=1", "1024 visible", *sizes])
    found = json.loads(report.read_text())
    # One case whose calls update a state, and one whose calls have results.
    assert [(row["op"], row["shape"]) for row in found["loops"]] == [
        ("append_swa", "T=1"),
        ("indexer_topk", "1 x 16384, 1024 visible"),
    ]
    # A loop of one second has two passes of two calls.
    assert [row["microseconds"] for row in found["loops"]] == [250_000, 250_000]
    assert "append_swa" in capsys.readouterr().out
