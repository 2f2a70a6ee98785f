"""`dsv4-jax bench ops` where there is no GPU: wall-clock times of the references."""

import json

import pytest

from dsv4_jax.bench.op_times import CASES
from dsv4_jax.cli import main
from dsv4_jax.cli.bench_command import OPS


@pytest.mark.slow
def test_times_every_case_and_writes_json(run, tmp_path):
    path = tmp_path / "times.json"
    out = run("bench", "ops", "--calls", "1", "--json", path)
    assert "wall clock" in out and "V4-Flash shapes, format v4" in out
    report = json.loads(path.read_text())
    rows = {(row["op"], row["shape"]): row for row in report["results"]}
    assert len(rows) == len(report["results"])
    assert {op for op, _ in rows} == {
        "append_swa", "norm_rope + append", "flush", "gather_compressed_kv", "index query", "indexer_scores",
        "scores + top-k", "indexer_topk", "sparse_attention", "linear", "experts", "hyper_connections", "router",
    }  # fmt: skip
    # A row in bfloat16, slot and position come in; 584 bytes go out.
    assert rows["append_swa", "T=1"]["bytes"] == 1024 + 8 + 584
    # An index and a stored row come in, a dense row and a flag go out; a slot each token.
    assert rows["gather_compressed_kv", "8 x 512"]["bytes"] == 8 * (512 * (4 + 584 + 1024 + 1) + 4)
    for row in rows.values():
        assert row["implementation"] == "xla" and row["microseconds"] > 0
        assert row["percent_of_copy"] == pytest.approx(
            1e8 * row["bytes"] / row["microseconds"] / report["copy_bytes_per_second"], rel=0.01, abs=0.06
        )


@pytest.mark.slow
def test_a_folder_s_model_is_measured(run, toy):
    """Every op has a case at the sizes of a small model like V4.1, also of those that read weights."""
    out = run("bench", "ops", "--config", toy, "--calls", "1")
    assert f"{toy} shapes, format v41" in out
    ops = {line.split("  ")[0] for line in out.splitlines()}
    assert {"flush", "candidate_blocks", "sparse_attention", "linear", "experts", "hyper_connections"} <= ops


def test_every_op_has_cases():
    assert tuple(CASES) == OPS


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "ops", "--help"])
    assert "For example:\n  dsv4-jax bench ops" in capsys.readouterr().out


def test_mistakes_are_explained(refused):
    assert "--calls 0 must be at least 1" in refused("bench", "ops", "--calls", "0")
