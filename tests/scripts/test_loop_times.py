"""Times of calls in a loop on the device: the script on a CPU."""

import json

import pytest
from loop_times import main


@pytest.mark.slow
def test_times_and_reports(tmp_path, capsys):
    report = tmp_path / "report.json"
    sizes = ["--calls", "2", "--passes", "2", "--report", str(report)]
    main(["--names", "append", "indexer", "--only", "append_swa T=1", "1024 visible", *sizes])
    found = json.loads(report.read_text())
    # One case whose calls update a state, and one whose calls have results.
    assert [(row["op"], row["shape"]) for row in found["loops"]] == [
        ("append_swa", "T=1"),
        ("indexer_topk", "1 x 16384, 1024 visible"),
    ]
    assert all(row["microseconds"] > 0 for row in found["loops"])
    assert "append_swa" in capsys.readouterr().out
