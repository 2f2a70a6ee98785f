"""The picture of a token's time, with the committed measurements."""

from one_gpu_plot import Plot

from tests.paths import DATA


def test_draws_estimates_and_measurements(tmp_path):
    reports = tuple((DATA.parents[1] / "benchmarks").glob("*one_gpu_model*.json"))
    assert reports
    Plot(reports, tmp_path / "plot.png").run()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
