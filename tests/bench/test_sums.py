"""`dsv4-jax bench all_reduce` where there is no GPU: XLA's sums over virtual devices."""

import json

import jax
import numpy as np
import pytest

from dsv4_jax.bench import sums


def test_times_sums_of_two_devices(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sums, "TOKENS", (2,))
    monkeypatch.setattr(sums, "ITERATIONS", 2)
    path = tmp_path / "sums.json"
    run("bench", "all_reduce", "--mesh", "model=2", "--json", path)
    report = json.loads(path.read_text())
    (row,) = report["results"]
    assert report["mesh"] == {"model": 2}
    assert (row["shape"], row["implementation"], row["devices"]) == ("[2, 4096]", "xla", 2)
    assert row["microseconds"] == row["xla_microseconds"] and row["times_xla"] == 1


@pytest.mark.parametrize(
    ("change", "message"), [([0, 0], "the result is not the sum"), ([0, 1], "devices have different results")]
)
def test_a_wrong_sum_is_not_timed(change, message):
    shards = jax.numpy.arange(12.0).reshape(2, 2, 3)
    result = np.tile(np.asarray(shards.sum(axis=0)), (2, 1, 1))
    sums._check_sum("xla", shards, result)
    result[change[0] :, 0, 0] += 1
    result[: change[1], 0, 0] -= 1
    with pytest.raises(RuntimeError, match=message):
        sums._check_sum("xla", shards, result)
