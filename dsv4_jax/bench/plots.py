"""Plots of benchmark reports, as PNG files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4_jax.bench.decode_steps import MODELS
from dsv4_jax.bench.prefill import STACK
from dsv4_jax.bench.serving import SLOTS
from dsv4_jax.bench.tables import LAYER_KINDS, layer_share


def plot_layers(report: dict[str, Any], path: Path) -> None:
    """Draws a bar for each case, the time of a layer by kind of kernel, beside the floor."""
    rows = [layer_share(row) for row in report["results"]]
    with _figure(path, (10.0, 3.0 + 0.3 * len(rows))) as axes:
        axes.set(title=f"Layers of {MODELS[report['shapes']]}, {report['device']}", xlabel="microseconds a layer")
        labels = [_layer_label(row) for row in rows]
        left = [0.0] * len(rows)
        for kind in LAYER_KINDS:
            widths = [row["kinds"].get(kind, 0.0) for row in rows]
            if any(widths):
                axes.barh(labels, widths, left=left, label=kind)
                left = [start + width for start, width in zip(left, widths, strict=True)]
        gaps = [max(row["layer"] - start, 0.0) for row, start in zip(rows, left, strict=True)]
        axes.barh(labels, gaps, left=left, color="lightgray", label="gaps" if any(left) else "step")
        floors = [row["layer_floor"] for row in rows]
        places = range(len(rows))
        axes.vlines(floors, [i - 0.4 for i in places], [i + 0.4 for i in places], "k", label="floor: bytes read once")
        axes.invert_yaxis()
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _layer_label(row):
    kind = row["layer_type"].removesuffix("_attention").replace("_", " ") + ", " if "layer_type" in row else ""
    drafts = f", {row['tokens']} tokens each" * (row["tokens"] > 1) + f", {row['drafts']} drafts" * (row["drafts"] > 0)
    return f"{kind}{row['requests']} x {row['context']:,}{drafts}"


def plot_prefill(report: dict[str, Any], path: Path) -> None:
    """Draws tokens a second of all layers, and their upper bound, against the tokens before a chunk."""
    title = f"Layers of {MODELS[report['shapes']]}, chunks of a prompt, {report['device']}"
    with _axes(path, title, "tokens before the chunk", "tokens a second") as axes:
        rows = [row for row in report["results"] if row["layer_type"] == STACK]
        for chunk in sorted({row["chunk"] for row in rows}):
            own = [row for row in rows if row["chunk"] == chunk]
            contexts = [row["context"] for row in own]
            (line,) = axes.plot(contexts, [row["tokens_per_second"] for row in own], "o-", label=f"chunks of {chunk:,}")
            bound = [1e3 * chunk / row["floor_milliseconds"] for row in own]
            axes.plot(contexts, bound, ":", color=line.get_color())
        axes.plot([], [], ":", color="gray", label="bound: products, or bytes once")
        axes.set_xscale("symlog", base=2, linthresh=4096)


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
def _figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Gives axes to draw on, and writes them to the file afterwards."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # Different colors for up to 18 lines, the dark ones first. Grey is left for gaps and bounds.
    tab20 = plt.get_cmap("tab20")
    colors = [tab20(i) for first in (0, 1) for i in range(first, 20, 2) if i not in (14, 15)]
    with plt.rc_context({"axes.prop_cycle": plt.cycler(color=colors)}):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        yield axes
    figure.savefig(path, dpi=150)
    plt.close(figure)


@contextlib.contextmanager
def _axes(path: Path, title: str, xlabel: str, ylabel: str) -> Iterator[Any]:
    """Gives axes with labels, a grid and a legend to draw on, and writes them to the file afterwards."""
    with _figure(path, (7.0, 4.5)) as axes:
        yield axes
        axes.set_ylim(bottom=0)
        axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
        axes.grid(alpha=0.3)
        axes.legend()
