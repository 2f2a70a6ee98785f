"""`dsv4-jax bench prefill` where there is no GPU: a tiny model's layers."""

import json

import pytest

from dsv4_jax.bench import prefill
from dsv4_jax.bench.prefill import STACK
from dsv4_jax.config import LayerSpec
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.decode import program_store


@pytest.mark.slow
def test_layers_of_others_are_subtracted(run, toy, tmp_path):
    """Layers 2, 3 and 4 of the toy model read one after the other."""
    table = tmp_path / "prefill.json"
    run("bench", "prefill", "--config", toy, "--chunks", 16, "--contexts", 0, "--json", table)
    *rows, whole = json.loads(table.read_text())["results"]
    assert [row["layer"] for row in rows] == [0, 1, 2, 3, 4]
    assert whole["milliseconds"] == pytest.approx(sum(row["milliseconds"] for row in rows), rel=1e-3)
    window, _, stores, selects, reuses = (row["flops"] for row in rows)
    assert window < reuses < selects < stores and whole["flops"] == sum(row["flops"] for row in rows)


@pytest.mark.slow
def test_measures_each_kind_and_all_layers_together(run, tmp_path, monkeypatch):
    config = read_config(packaged_checkpoint()).with_layers([LayerSpec(), LayerSpec.hca(), LayerSpec.hca()])
    monkeypatch.setattr(prefill, "measured_config", lambda *_: config)
    table = tmp_path / "prefill.json"
    picture = tmp_path / "prefill.png"
    compiled = []
    compile_program = program_store.compile_program

    def compile(function, args, options):
        compiled.append(args[2].token_ids.shape)
        return compile_program(function, args, options)

    monkeypatch.setattr("dsv4_jax.bench.random_steps.compile_program", compile)
    run("bench", "prefill", "--chunks", 16, "--contexts", 0, 256, "--json", table, "--plot", picture)
    report = json.loads(table.read_text())
    rows = {(row["layer_type"], row["context"]): row for row in report["results"]}
    kinds = list(dict.fromkeys(config.layer_types))
    assert list(rows) == [(kind, context) for kind in kinds for context in (0, 256)] + [(STACK, 0), (STACK, 256)]
    assert compiled == [(16,)] * len(kinds), "a program for each kind of layer and size of chunk, not for each context"
    for context in (0, 256):
        whole = rows[STACK, context]
        parts = [rows[kind, context] for kind in kinds]
        assert [row["layers"] for row in (whole, *parts)] == [3, 1, 2]
        assert whole["milliseconds"] == pytest.approx(sum(r["layers"] * r["milliseconds"] for r in parts), rel=1e-3)
        assert whole["flops"] == sum(row["layers"] * row["flops"] for row in parts)
        assert whole["tokens_per_second"] == pytest.approx(16e3 / whole["milliseconds"], rel=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
