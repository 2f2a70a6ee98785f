"""`dsv4-jax bench prefill` where there is no GPU: a tiny model's layers."""

import json
import types

import pytest

from dsv4_jax.bench import prefill
from dsv4_jax.bench.prefill import STACK
from dsv4_jax.data import packaged_checkpoint, read_config


def test_measures_each_kind_and_all_layers_together(run, tmp_path, monkeypatch):
    table, picture = tmp_path / "prefill.json", tmp_path / "prefill.png"
    lowered, stack_step = [], prefill.stack_step

    def lower(*args, tokens, drafts):
        lowered.append(tokens)
        return stack_step.lower(*args, tokens=tokens, drafts=drafts)

    monkeypatch.setattr(prefill, "stack_step", types.SimpleNamespace(lower=lower))
    out = run("bench", "prefill", "--chunks", 16, "--contexts", 0, 256, "--json", table, "--plot", picture)
    assert "Attention layers, chunks of one request in a cache for 384 tokens" in out
    report = json.loads(table.read_text())
    assert report["max_context"] == 384
    config = read_config(packaged_checkpoint())
    rows = {(row["layer_type"], row["context"]): row for row in report["results"]}
    kinds = list(dict.fromkeys(config.layer_types[: config.num_hidden_layers]))
    assert list(rows) == [(kind, context) for kind in kinds for context in (0, 256)] + [(STACK, 0), (STACK, 256)]
    assert lowered == [16] * len(kinds), "a program for each kind of layer and size of chunk, not for each context"
    for context in (0, 256):
        whole, parts = rows[STACK, context], [rows[kind, context] for kind in kinds]
        assert whole["layers"] == config.num_hidden_layers
        assert whole["milliseconds"] == pytest.approx(sum(r["layers"] * r["milliseconds"] for r in parts), rel=1e-3)
        assert whole["flops"] == sum(row["layers"] * row["flops"] for row in parts)
    # A sliding layer's window is full after 256 tokens: 16 x 128 rows instead of 1 + ... + 16, 4 products a channel.
    of_window = [rows["sliding_attention", context]["flops"] for context in (0, 256)]
    width = 4 * config.num_attention_heads * config.head_dim
    assert of_window[1] - of_window[0] == width * (16 * config.sliding_window - 16 * 17 // 2)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(chunks=(1,), contexts=None), "--chunks 1 must be at least 2 tokens"),
        (dict(chunks=(64,), contexts=(-1,)), "--contexts -1 must be from 0 to"),
        (dict(chunks=(), contexts=None), "--chunks and --contexts need at least one number each"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        prefill.cases(read_config(packaged_checkpoint()), "cpu", **options)
