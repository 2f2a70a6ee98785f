"""How fast checkpoints are loaded: the script at a small size."""

import json

import pytest
from load_rate import load_rate

from dsv4_jax.config import DSV4Config
from tests.paths import TINY


def test_loads_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(DSV4Config, "v4_flash", lambda: DSV4Config.from_hf(TINY))
    report = tmp_path / "report.json"
    load_rate(tmp_path / "weights", layers=1, mesh="model=1", times=2, report=report)
    found = json.loads(report.read_text())
    assert found["mesh"] == "model=1" and len(found["loads"]) == 2
    for load in found["loads"]:
        # Reports have six digits.
        assert load["rate"] == pytest.approx(found["bytes"] / load["seconds"], rel=1e-5) and load["host_bytes"] >= 0
    assert "GB/s onto model=1" in capsys.readouterr().out
    assert not (tmp_path / "weights").exists()
