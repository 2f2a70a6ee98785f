"""Claims of the pages about the committed benchmark files, which `scripts/benchmark_tables.py` checks."""

import json
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[1]


def wrong_claims(folder: Path = ROOT / "benchmarks", card: Path | None = None) -> list[str]:
    """Returns the claims that the files in a folder, or the packaged model's card, contradict."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    claims = _head_claims(files) | _peer_claims(files["peers_h200"]) | _sum_claims(files["h200_all_reduce"])
    claims |= _cache_claims(files["cache_cost"])
    claims |= _draft_claims(files["drafts"], card) | _same_tokens("DSpark's drafts", files["drafts_dspark"], 5)
    claims |= _serve_claims(files["serve"]) | _load_claims(files["serve_load"])
    return [claim for claim, holds in claims.items() if not holds]


def _head_claims(files: dict[str, Any]) -> dict[str, bool]:
    keys = ("device", "jax", "commit", "clock", "shapes", "cache_format")
    # `dsv4-jax bench ops`, `step`, `layer`, `model` and `prefill` write these; other files have formats of their own.
    runs = {name: run for name, run in files.items() if name[:5] in ("h100_", "h200_") and name != "h200_all_reduce"}
    return {
        f"{name}: a run has results, and names {', '.join(keys)}": all(run.get(key) for key in keys)
        and bool(run.get("loops") or run.get("results"))
        for name, run in runs.items()
    }


def _peer_claims(run: dict[str, Any]) -> dict[str, bool]:
    kernels: dict[tuple[str, str], set[str]] = {}
    for row in run["comparisons"]:
        kernels.setdefault((row["op"], row["shape"]), set()).add(row["kernel"])
    return {
        "peers: every case was timed in a graph": all(row["graph_microseconds"] > 0 for row in run["comparisons"]),
        "peers: every case has our time and a peer's": all(
            "dsv4_jax" in names and len(names) > 1 for names in kernels.values()
        ),
        "peers: the run names its source": all(run[key] for key in ("device", "jax", "commit", "source")),
        "peers: every kernel is described": set(run["does"]) == {row["kernel"] for row in run["comparisons"]},
    }


def _sum_claims(run: dict[str, Any]) -> dict[str, bool]:
    rows = run["results"]
    return {
        "all_reduce: the run names its origin": all(run[key] for key in ("device", "jax", "commit", "clock", "mesh")),
        "all_reduce: 1 to 128 tokens": [row["shape"] for row in rows] == [f"[{n}, 4096]" for n in (1, 8, 32, 128)],
        "all_reduce: mailboxes are twice as fast as XLA": all(
            row["implementation"] == "mosaic_gpu" and row["times_xla"] > 2 for row in rows
        ),
    }


def _cache_claims(run: dict[str, Any]) -> dict[str, bool]:
    bits = {(row["format"], row["attended"]): row["bits"] for row in run["text"]}
    found = {(row["format"], row["attended"]): row["accuracy"] for row in run["needles"]}
    formats = ("plain", "v4", "per_entry")
    return {
        "cache: quantizing changes bits per byte by less than 0.1%": max(
            abs(bits[name, "top-k"] / bits["plain", "top-k"] - 1) for name in formats
        )
        < 0.001,
        "cache: compressed entries pay": bits["v4", "top-k"]
        < 0.98 * bits["v4", "trained with the window only"]
        < bits["v4", "window"],
        "cache: facts are found at every distance": all(
            list(found[name, "top-k"]) == ["1000", "2000", "4000", "8000", "16000"]
            and min(found[name, "top-k"].values()) > 0.95
            for name in formats
        ),
        "cache: the window alone finds no fact": max(found["plain", "window"].values()) == 0,
    }


def _draft_claims(run: dict[str, Any], card: Path | None) -> dict[str, bool]:
    text = (card or ROOT / "dsv4_jax" / "data" / "king_james" / "README.md").read_text()
    claims = _same_tokens("drafts", run, 3)
    for name in _draft_rows(3):
        row = run[name]
        claims[f"drafts: {name} accepts more than a third"] = min(row["acceptance"]) > 0.35
        claims[f"drafts: the model's card has {name}"] = f"{row['mean_accepted']:.2f}" in text
    return claims


def _same_tokens(kind: str, run: dict[str, Any], most: int) -> dict[str, bool]:
    """Claims that no number of drafts up to `most` changes one of 10,000 tokens."""
    return {
        f"{kind}: {name} changes no token": run[name]["tokens"] >= 10_000 and run[name]["differing_tokens"] == 0
        for name in _draft_rows(most)
    }


def _draft_rows(most: int) -> list[str]:
    return [f"{sampling}_{count}" for sampling in ("greedy", "temperature_1") for count in range(1, 1 + most)]


def _serve_claims(run: dict[str, Any]) -> dict[str, bool]:
    cold, cached = run["results"]
    waits = [row["first_token_milliseconds"]["median"] for row in run["results"]]
    return {
        "serve: without, then with a prefix cache": not cold["prefix_cache"] and cached["prefix_cache"],
        "serve: the prefix cache holds most prompt tokens": cold["hit_rate"] == 0 < 0.6 < cached["hit_rate"],
        "serve: the prefix cache changes no token": cached["same_tokens"],
        "serve: the prefix cache is faster": waits[1] < waits[0]
        and cached["generated_tokens_per_second"] > cold["generated_tokens_per_second"],
        "serve: 7 and 2 programs": [row["compilations"] for row in run["results"]] == [7, 2],
        "serve: no program is compiled late": not any(row["compilations_later"] for row in run["results"]),
    }


def _load_claims(run: dict[str, Any]) -> dict[str, bool]:
    load = run["load"]
    engine = run["engine"]
    memory = run["memory_mib"]
    return {
        "load: 300 requests from 64 clients": (load["requests"], load["concurrency"]) == (300, 64),
        "load: a third is cancelled": 80 < engine["cancelled"] < 120,
        "load: all others are answered": run["answered"] + engine["cancelled"] >= 290
        and engine["failed"] == engine["restarts"] == 0,
        "load: nothing is wrong or lost": run["wrong_texts"] == run["lost_slots"] == run["lost_blocks"] == 0,
        "load: memory does not grow": memory["fourth_quarter"] < 1.01 * memory["third_quarter"],
    }
