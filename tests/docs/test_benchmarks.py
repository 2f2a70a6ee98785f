"""The committed numbers: what notebook 05 relies on."""

import json
from pathlib import Path

import pytest

from tests.paths import PACKAGED


FILES = {path.name: json.loads(path.read_text()) for path in (Path(__file__).parents[2] / "benchmarks").glob("*.json")}
PEERS = FILES.pop("peers_h200.json")
COST = FILES.pop("cache_cost.json")
SERVE = FILES.pop("serve.json")
LOAD = FILES.pop("serve_load.json")
DRAFTS = FILES.pop("drafts.json")
SUMS = FILES.pop("h200_all_reduce.json")
CARD = (PACKAGED / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_run_says_where_it_was_taken(name):
    run = FILES[name]
    assert all(run[key] for key in ("device", "jax", "commit", "clock", "shapes", "cache_format"))
    assert run["loops"] if "loops" in run else run["results"]


def test_sums_over_gpus_are_sooner_there_through_mailboxes():
    assert all(SUMS[key] for key in ("device", "jax", "commit", "clock", "mesh"))
    assert [row["shape"] for row in SUMS["results"]] == [f"[{tokens}, 4096]" for tokens in (1, 8, 32, 128)]
    assert all(row["implementation"] == "mosaic_gpu" and row["times_xla"] > 2 for row in SUMS["results"])


def test_peers_and_ours_are_timed_by_one_method():
    """In every comparison of the notebook there is a time of ours and one of a peer, taken in the same way."""
    kernels = {}
    for row in PEERS["comparisons"]:
        assert row["graph_microseconds"] > 0
        kernels.setdefault((row["op"], row["shape"]), set()).add(row["kernel"])
    assert all("dsv4_jax" in names and len(names) > 1 for names in kernels.values())
    assert all(PEERS[key] for key in ("device", "jax", "commit", "source"))
    assert set(PEERS["does"]) == {row["kernel"] for row in PEERS["comparisons"]}


def test_the_cache_costs_little():
    """What the page says of the packaged model."""
    bits = {(row["format"], row["attended"]): row["bits"] for row in COST["text"]}
    assert COST["device"] and COST["jax"]
    assert max(abs(bits[name, "top-k"] / bits["plain", "top-k"] - 1) for name in ("v4", "per_entry")) < 0.001
    assert bits["v4", "top-k"] < 0.98 * bits["v4", "trained with the window only"] < bits["v4", "window"]


def test_facts_are_found_through_a_quantised_cache():
    found = {(row["format"], row["attended"]): row["accuracy"] for row in COST["needles"]}
    for name in ("plain", "v4", "per_entry"):
        assert list(found[name, "top-k"]) == ["1000", "2000", "4000", "8000", "16000"]
        assert min(found[name, "top-k"].values()) > 0.95
    assert max(found["plain", "window"].values()) == 0


def test_drafts_are_mostly_right_and_change_nothing():
    for name in ("greedy", "temperature_1"):
        for count in (1, 2, 3):
            row = DRAFTS[f"{name}_{count}"]
            assert row["tokens"] >= 10_000 and row["differing"] == 0
            assert len(row["at_least"]) == count and min(row["at_least"]) > 0.35
            assert f"{row['kept']:.2f}" in CARD, "the packaged model's card has other numbers"


def test_the_prefix_cache_serves_the_same_tokens_sooner():
    cold, cached = SERVE["results"]
    assert SERVE["device"] and SERVE["jax"] and not cold["prefix_cache"] and cached["prefix_cache"]
    assert cold["hit_rate"] == 0 < 0.6 < cached["hit_rate"] and cached["same_tokens"]
    assert cached["first_token_milliseconds"]["median"] < cold["first_token_milliseconds"]["median"]
    assert cached["generated_tokens_per_second"] > cold["generated_tokens_per_second"]
    assert [row["compilations"] for row in (cold, cached)] == [7, 2]
    assert cold["compilations_later"] == cached["compilations_later"] == 0


def test_the_server_loses_nothing_under_load():
    load, ended = LOAD["load"], LOAD["engine"]
    assert (load["requests"], load["at_once"]) == (300, 64) and 80 < ended["cancelled"] < 120
    assert LOAD["answered"] + ended["cancelled"] >= 290 and ended["failed"] == ended["restarts"] == 0
    assert LOAD["wrong_texts"] == LOAD["lost_slots"] == LOAD["lost_blocks"] == 0
    third, fourth = (LOAD["memory_mib"][part] for part in ("third_quarter", "fourth_quarter"))
    assert fourth < third * 1.01
