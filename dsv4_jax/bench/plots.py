"""Plots of benchmark reports, as PNG files."""

import contextlib
from pathlib import Path

import numpy as np

from dsv4_jax.bench.prefill import STACK
from dsv4_jax.bench.serving import SLOTS
from dsv4_jax.bench.tables import LAYER_KINDS, Row, layer_share, model_title


def plot_layers(report: Row, path: Path) -> None:
    """Draws a bar for each case: the time of a layer by kind of kernel. A line in the bar marks the lower bound."""
    rows = [layer_share(row) for row in report["results"]]
    title = f"Layers of {model_title(report['shapes'])}, {report['device']}"
    with _axes(path, (10.0, 3.0 + 0.3 * len(rows)), title=title, xlabel="microseconds a layer") as axes:
        labels = [_layer_label(row) for row in rows]
        bar_ends = np.zeros(len(rows))
        for kind in LAYER_KINDS:
            widths = np.array([row["kinds"].get(kind, 0.0) for row in rows])
            if widths.any():
                axes.barh(labels, widths, left=bar_ends, label=kind)
                bar_ends = bar_ends + widths
        gaps = np.array([row["layer"] for row in rows]) - bar_ends
        axes.barh(labels, gaps.clip(0), left=bar_ends, color="lightgray", label="gaps" if bar_ends.any() else "step")
        floors = [row["layer_floor"] for row in rows]
        places = np.arange(len(rows))
        axes.vlines(floors, places - 0.4, places + 0.4, "k", label="floor: bytes read once")
        axes.invert_yaxis()
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _layer_label(row):
    """Returns the label of a case's bar."""
    label = f"{row['requests']} x {row['context']:,}"
    if "layer_type" in row:
        kind = row["layer_type"].removesuffix("_attention").replace("_", " ")
        label = f"{kind} {row.get('layer_numbers', '')}".rstrip() + f", {label}"
    if row["tokens"] > 1:
        label += f", {row['tokens']} tokens each"
    if row["drafts"]:
        label += f", {row['drafts']} drafts"
    return label


def plot_prefill(report: Row, path: Path) -> None:
    """Plots tokens a second through all layers, and the upper bound, against the number of tokens before a chunk."""
    title = f"Layers of {model_title(report['shapes'])}, chunks of a prompt, {report['device']}"
    with _axes(path, title=title, xlabel="tokens before the chunk", ylabel="tokens a second") as axes:
        stack = [row for row in report["results"] if row["layer_type"] == STACK]
        for chunk in sorted({row["chunk"] for row in stack}):
            rows = [row for row in stack if row["chunk"] == chunk]
            contexts = [row["context"] for row in rows]
            rates = [row["tokens_per_second"] for row in rows]
            bounds = [1e3 * chunk / row["floor_milliseconds"] for row in rows]
            (line,) = axes.plot(contexts, rates, "o-", label=f"chunks of {chunk:,}")
            axes.plot(contexts, bounds, ":", color=line.get_color())
        axes.plot([], [], ":", color="gray", label="bound: products, or bytes once")
        axes.set_xscale("symlog", base=2, linthresh=4096)
        axes.set_ylim(bottom=0)
        axes.legend()


def plot_serving(report: Row, path: Path) -> None:
    """Plots the time to the first token against the number of tokens sent, without and with the prefix cache."""
    title = "{conversations} conversations of {turns} turns".format(**report["workload"])
    title = f"{title}, {SLOTS} slots, {report['device']}"
    with _axes(path, title=title, xlabel="tokens sent", ylabel="milliseconds to the first token") as axes:
        for row in report["results"]:
            name = f"prefix cache, {row['hit_rate']:.0%} of tokens found" if row["prefix_cache"] else "no prefix cache"
            label = f"{name}: {row['generated_tokens_per_second']:.0f} tokens/s"
            axes.scatter(*zip(*row["first_tokens"], strict=True), s=18, alpha=0.7, label=label)
        axes.set_ylim(bottom=0)
        axes.legend()


@contextlib.contextmanager
def _axes(path, size=(7.0, 4.5), **labels):
    """Yields axes to draw on. When the context ends, writes the plot to the file.

    Args:
      path: the PNG file.
      size: width and height in inches.
      labels: properties of the axes, such as `title` and `xlabel`.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    # There are different colors for up to 18 lines, the dark ones first. Grey is reserved for gaps and bounds.
    tab20 = colormaps["tab20"]
    axes.set_prop_cycle(color=[tab20(i) for i in (*range(0, 20, 2), *range(1, 20, 2)) if i not in (14, 15)])
    axes.set(**labels)
    axes.grid(alpha=0.3)
    yield axes
    figure.savefig(path, dpi=150)
