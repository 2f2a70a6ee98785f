"""Acceptance of drafts: the script with DSpark layers and prompts of random ids."""

import pytest
from draft_acceptance import DraftAcceptance

from tests.paths import DATA


@pytest.mark.slow
def test_every_number_of_drafts_is_measured(capsys):
    sizes = dict(requests=2, prompt=8, tokens=16, speed_tokens=0)
    report = DraftAcceptance(checkpoint=DATA / "official_dspark", **sizes).run()
    names = [f"{sampling}_{drafts}" for sampling in ("greedy", "temperature_1") for drafts in range(1, 6)]
    assert all(report[name]["differing_tokens"] == 0 and report[name]["tokens"] == 32 for name in names)
    assert len(report["greedy_5"]["acceptance"]) == 5
    assert "| drafts a step | accepted, greedy |" in capsys.readouterr().out
