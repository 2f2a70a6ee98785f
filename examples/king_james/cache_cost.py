"""Measures what quantizing the cache costs a model: `python examples/king_james/cache_cost.py --help`."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import kjv
import matplotlib
import numpy as np
import tyro
from card import bits_by_place
from needles import DIGITS, Planted, test_row
from rich.console import Console
from rich.progress import track

from dsv4_jax.bench.reports import write_report
from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.cli.model_options import ModelOptions
from dsv4_jax.cli.options import Dtype
from dsv4_jax.cli.scoring import score_ids
from dsv4_jax.nn import DeepseekV4ForCausalLM
from dsv4_jax.ops.dispatch import use_implementation


FORMATS = ("plain", "v4", "per_entry")


@dataclasses.dataclass(frozen=True)
class CacheCost:
    """Measures how the cache affects a model: bits per byte of held-out text, and the share of facts found again in it.

    All text runs through the paged cache in chunks, like a prompt. Each cache format is measured several times: with
    attention to all compressed entries, to the indexer's top-k (the model's k, a half and a quarter of it), and to the
    window alone. Writes OUT.json, OUT.md and OUT.png.

    For example:
      python examples/king_james/cache_cost.py --checkpoint dsv4_jax/data/king_james \\
        --text kjv/usr/lib/bible.data --out cost
      python examples/king_james/cache_cost.py --checkpoint runs/kjv/best --window-model runs/window/best \\
        --needle-model runs/needles/best --text kjv/usr/lib/bible.data --out benchmarks/cache_cost
      python examples/king_james/cache_cost.py --needle-model runs/needles/best --text kjv/usr/lib/bible.data \\
        --out needles --needle-rows 4 --pairs 8

    Attributes:
      text: the text that the models were trained on; only the held-out books are read.
      out: path of the files to write, without their endings.
      checkpoint: a model from examples/king_james/train_tiny.py, to score the text.
      window_model: a model of the same size, trained without compressed entries, to compare with.
      needle_model: a model that was fine-tuned to retrieve facts.
      rows: number of held-out excerpts, spread evenly.
      length: number of bytes in an excerpt.
      distances: numbers of bytes between a fact and the question about it.
      pairs: number of facts at each distance in a row.
      needle_rows: number of rows with facts.
      chunk: number of bytes of each row in a prefill step.
      dtype: dtype of weights and activations.
      implementation: implementation of the cache's operations: the device's best, or XLA's.
    """

    text: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    out: Annotated[Path, tyro.conf.arg(metavar="PATH")]
    checkpoint: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    window_model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    needle_model: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    rows: int = 16
    length: int = 4096
    distances: tuple[int, ...] = (1000, 2000, 4000, 8000, 16000)
    pairs: int = 2
    needle_rows: int = 16
    chunk: int = 512
    dtype: Dtype = "bfloat16"
    implementation: Literal["best", "xla"] = "best"

    def run(self) -> dict[str, Any]:
        """Measures, and returns the content of OUT.json."""
        with use_implementation(None if self.implementation == "best" else self.implementation):
            return self._run()

    def _run(self) -> dict[str, Any]:
        held_out = kjv.split(kjv.read_books(self.text))["held_out"]
        report: dict[str, Any] = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "rows": self.rows,
            "length": self.length,
            "chunk": self.chunk,
            "dtype": self.dtype,
            "text": [],
            "needles": [],
        }
        ids = excerpts(held_out, self.rows, self.length)
        if self.checkpoint is not None:
            model = self._load(self.checkpoint)
            for case in track([*_cases(model, self.length)], "Text", console=Console(stderr=True)):
                report["text"].append(self._score(model, ids, *case))
                self._write(report)
        if self.window_model is not None:
            window_model = self._load(self.window_model)
            for form in FORMATS:
                report["text"].append(self._score(window_model, ids, form, "trained with the window only", 1, False))
        if self.needle_model is not None:
            model = self._load(self.needle_model)
            rng = np.random.default_rng(0)
            starts = np.linspace(0, len(held_out), self.needle_rows, endpoint=False, dtype=int)
            rows = [test_row(rng, np.roll(held_out, -start), self.distances, self.pairs) for start in starts]
            cases = [
                (form, attended, topk, window_only)
                for form, attended, topk, window_only in _cases(model, len(rows[0].ids))
                if attended == _OWN or (form == "plain" and attended == _WINDOW)
            ]
            for case in track(cases, "Needles", console=Console(stderr=True)):
                report["needles"].append(self._find(model, rows, *case))
                self._write(report)
        return report

    def _write(self, report: dict[str, Any]) -> None:
        """Writes the files. It is called after every measurement, because each measurement takes long."""
        write_report(self.out.with_suffix(".json"), report)
        self.out.with_suffix(".md").write_text(tables(report))
        plot(self.out.with_suffix(".png"), report)

    def _load(self, folder: Path) -> DeepseekV4ForCausalLM:
        return load_checkpoint(folder, dtype=jnp.dtype(self.dtype))

    def _score(self, model, ids, form, attended, topk, window_only) -> dict[str, Any]:
        bits, _ = self._read(model, ids, form, topk, window_only)
        places = {str(low): value for low, value in bits_by_place(bits).items()}
        return {"format": form, "attended": attended, "bits": float(bits.mean()), "by_place": places}

    def _find(self, model, rows: list[Planted], form, attended, topk, window_only) -> dict[str, Any]:
        ids = np.stack([row.ids for row in rows])
        _, best = self._read(model, ids, form, topk, window_only)
        hits_by_distance: dict[int, list[bool]] = {distance: [] for distance in self.distances}
        for row, guesses in zip(rows, best, strict=True):
            for answer, distance in zip(row.answers, row.distances, strict=True):
                right = guesses[answer - 1 : answer - 1 + DIGITS] == row.ids[answer : answer + DIGITS]
                nearest = min(hits_by_distance, key=lambda asked: abs(asked - int(distance)))
                hits_by_distance[nearest].append(bool(right.all()))
        accuracy = {str(distance): float(np.mean(hits)) for distance, hits in hits_by_distance.items()}
        questions = len(rows) * len(rows[0].answers)
        return {"format": form, "attended": attended, "accuracy": accuracy, "questions": questions}

    def _read(self, model, ids, form, topk, window_only) -> tuple[np.ndarray, np.ndarray]:
        """Runs the model over ids [rows, n].

        Returns:
          (bits, best), [rows, n - 1] each, for the places 1 .. n - 1. `bits` is the negative log2 of the probability of
          the id at a place, and `best` is the likeliest id there.
        """
        config = dataclasses.replace(model.config, index_topk=topk)
        steps = ids.shape[1] - 1
        manager = ModelOptions(cache_format=form, dtype=self.dtype).make_manager(config, len(ids), steps)
        sizes = [min(self.chunk, steps - begin) for begin in range(0, steps, self.chunk)]
        bits = []
        best = []
        start = 1
        for part in score_ids(model, manager, ids[:, :-1], sizes, layers=False, window_only=window_only):
            logits = part["logits"].astype(np.float64)
            logits -= logits.max(axis=2, keepdims=True)
            targets = ids[:, start : start + logits.shape[1], None]
            chosen = np.take_along_axis(logits, targets, axis=2)[..., 0]
            bits.append((np.log(np.exp(logits).sum(axis=2)) - chosen) / np.log(2))
            best.append(logits.argmax(axis=2))
            start += logits.shape[1]
        return np.concatenate(bits, axis=1), np.concatenate(best, axis=1)


_OWN = "top-k"
_WINDOW = "window"


def _cases(model: DeepseekV4ForCausalLM, length: int) -> Iterator[tuple[str, str, int, bool]]:
    """Yields (cache format, label of the attended entries, index_topk, window_only) for each measurement."""
    topk = model.config.index_topk
    rate = min(spec.compress_rate for spec in model.config.layers if spec.selection is not None)
    for form in FORMATS:
        yield form, "all", -(-length // rate), False
        for attended, count in ((_OWN, topk), ("50% of top-k", topk // 2), ("25% of top-k", topk // 4)):
            yield form, attended, count, False
        yield form, _WINDOW, topk, True


def excerpts(text: np.ndarray, rows: int, length: int) -> np.ndarray:
    """Returns evenly spread excerpts of a text, int32 [rows, length + 1]. Each begins with BOS."""
    starts = np.linspace(0, len(text) - length, rows, dtype=int)
    ids = np.full((rows, length + 1), kjv.BOS, np.int32)
    ids[:, 1:] = text[starts[:, None] + np.arange(length)[None, :]]
    return ids


def tables(report: dict[str, Any]) -> str:
    """Returns the report in Markdown."""
    parts = []
    if rows := report["text"]:
        sample = f"{report['rows']} excerpts of {report['length']} bytes, {report['dtype']}"
        values = [[f"{value:.4f}" for value in (row["bits"], *row["by_place"].values())] for row in rows]
        columns = ["all", *(f"from {place}" for place in rows[0]["by_place"])]
        parts.append(f"Bits per byte of held-out text, {sample}:\n\n" + _table(rows, columns, values))
    if rows := report["needles"]:
        values = [[f"{value:.0%}" for value in row["accuracy"].values()] for row in rows]
        title = f"Facts found again ({rows[0]['questions']} questions), by bytes back:\n\n"
        parts.append(title + _table(rows, list(rows[0]["accuracy"]), values))
    return "\n".join(parts)


def _table(rows, columns, values):
    lines = [("cache", "attended to", *columns), ("---", "---", *("---:" for _ in columns))]
    lines += [(row["format"], row["attended"], *cells) for row, cells in zip(rows, values, strict=True)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def plot(path: Path, report: dict[str, Any]) -> None:
    """Plots the cost of a quantized cache, the cost of attending to less, and the share of facts found.

    The report may be partial.
    """
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = {(row["format"], row["attended"]) for row in report["text"]}
    panels = []
    if any(form != "plain" for form, _ in measured):
        panels.append((_plot_formats, report["text"]))
    if ("plain", _OWN) in measured:
        panels.append((_plot_attended, report["text"]))
    if report["needles"]:
        panels.append((_plot_needles, report["needles"]))
    if not panels:
        return
    figure, axes = plt.subplots(
        1, len(panels), figsize=(1 + 5.5 * len(panels), 4.5), layout="constrained", squeeze=False
    )
    for ax, (draw, rows) in zip(axes[0], panels, strict=True):
        draw(ax, rows)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _plot_formats(ax, rows):
    """Plots what each quantized cache costs over the plain one, in 1/1000 bit per byte, by the attended entries."""
    bits = {(row["attended"], row["format"]): row["bits"] for row in rows}
    names = list(dict.fromkeys(row["attended"] for row in rows if row["format"] != "plain"))
    for i, form in enumerate(name for name in FORMATS if name != "plain"):
        values = [1000 * (bits.get((name, form), np.nan) - bits[name, "plain"]) for name in names]
        ax.barh(np.arange(len(names)) + (i - 0.5) * 0.38, values, 0.36, label=f"{form} - plain")
    ax.axvline(0, color="black", lw=0.8)
    ax.set_yticks(range(len(names)), [name.replace(" with ", "\nwith ") for name in names])
    ax.invert_yaxis()
    ax.set(
        xlabel="thousandths of a bit per byte more than with the plain cache", title="What quantizing the cache costs"
    )
    ax.legend(fontsize=8)


def _plot_attended(ax, rows):
    """Plots what attending to other entries than the model's top-k costs, in bits per byte, with the plain cache."""
    bits = {row["attended"]: row["bits"] for row in rows if row["format"] == "plain"}
    names = [name for name in bits if name != _OWN]
    bars = ax.barh(range(len(names)), [bits[name] - bits[_OWN] for name in names], 0.6, color="C2")
    ax.bar_label(bars, fmt="{:+.4f}", padding=3, fontsize=8)
    ax.margins(x=0.18)
    ax.axvline(0, color="black", lw=0.8)
    ax.set_yticks(range(len(names)), [name.replace(" with ", "\nwith ") for name in names])
    ax.invert_yaxis()
    title = f"What attending to less costs ({bits[_OWN]:.4f} with top-k)"
    ax.set(xlabel="bits per byte more than with the indexer's top-k", title=title)


def _plot_needles(ax, rows):
    distances = list(rows[0]["accuracy"])
    width = 0.8 / len(rows)
    for i, row in enumerate(rows):
        at = np.arange(len(distances)) + (i - (len(rows) - 1) / 2) * width
        values = [100 * value for value in row["accuracy"].values()]
        bars = ax.bar(at, values, 0.9 * width, label=f"{row['attended']}, cache {row['format']}")
        ax.bar_label(bars, fmt="{:.0f}", fontsize=7)
    title = f"Facts found again: {rows[0]['questions']} questions, {rows[0]['questions'] // len(distances)} a distance"
    ax.set_xticks(range(len(distances)), [f"{int(distance):,}" for distance in distances])
    ax.set(xlabel="bytes between the fact and the question", ylabel="% answered", title=title, ylim=(0, 128))
    ax.set_yticks(range(0, 101, 20))
    ax.legend(fontsize=8, ncols=2, loc="upper center")


if __name__ == "__main__":
    try:
        tyro.cli(CacheCost).run()
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
