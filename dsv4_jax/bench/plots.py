"""Pictures of benchmark reports, as PNG files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4_jax.bench.decode_steps import MODELS
from dsv4_jax.bench.serving import SLOTS


def plot_steps(report: dict[str, Any], path: Path) -> None:
    """Draws a step's time and its lower bound against context, one line for each batch size.

    Where gaps between kernels take more than a tenth of a step, the time of its kernels is marked too.
    """
    layers = report.get("layers", "attention").capitalize()
    title = f"{layers} layers of {MODELS[report['shapes']]}, one decode step, {report['device']}"
    with _axes(path, title, "context (tokens a request)", "milliseconds a step") as axes:
        kinds = {(row["requests"], row.get("tokens", 1), row.get("drafts", 0)) for row in report["results"]}
        for requests, tokens, drafts in sorted(kinds):
            kind = requests, tokens, drafts
            rows = [r for r in report["results"] if (r["requests"], r.get("tokens", 1), r.get("drafts", 0)) == kind]
            contexts = [row["context"] for row in rows]
            label = f"batch {requests}" + f", {tokens} tokens" * (tokens > 1) + f", {drafts} drafts" * (drafts > 0)
            (line,) = axes.plot(contexts, [row["milliseconds"] for row in rows], "o-", label=label)
            axes.plot(contexts, [row["floor_milliseconds"] for row in rows], ":", color=line.get_color())
            for row in rows:
                if (gaps := row.get("gap_milliseconds", 0)) > 0.1 * row["milliseconds"]:
                    place = row["context"], row["milliseconds"] - gaps
                    axes.plot(*place, "o", mfc="white", color=line.get_color())
                    text = f"its kernels alone:\nthe other {gaps:.2f} ms are gaps between them"
                    axes.annotate(text, place, (14, -26), textcoords="offset points", fontsize=8)
        axes.plot([], [], ":", color="gray", label="floor: weights and cache read once")
        axes.set_xscale("log", base=2)


def plot_serving(report: dict[str, Any], path: Path) -> None:
    """Draws the time to the first token against the tokens sent, without and with the prefix cache."""
    title = "{conversations} conversations of {turns} turns".format(**report["workload"])
    title = f"{title}, {SLOTS} slots, {report['device']}"
    with _axes(path, title, "tokens sent", "milliseconds to the first token") as axes:
        for row in report["results"]:
            name = f"prefix cache, {row['hit_rate']:.0%} of tokens found" if row["prefix_cache"] else "no prefix cache"
            label = f"{name}: {row['generated_tokens_per_second']:.0f} tokens/s"
            axes.scatter(*zip(*row["first_tokens"], strict=True), s=18, alpha=0.7, label=label)


@contextlib.contextmanager
def _axes(path: Path, title: str, xlabel: str, ylabel: str) -> Iterator[Any]:
    """Axes to draw on; written to the file afterwards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    yield axes
    axes.set_ylim(bottom=0)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
