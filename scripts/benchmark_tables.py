"""Writes the tables of README.md and benchmarks/README.md from the files in benchmarks.

A comment above a table names its kind and its files: <!-- table: KIND FILE ... -->. The line between comment and table
names the devices and versions. Tables of the kinds `chosen`, `peers` and `beside` keep the cases that they have. Other
tables get every case of their files.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import tyro

from dsv4_jax.bench.tables import Row, layer_share, model_title


ROOT = Path(__file__).parents[1]
Key = tuple[str, str]  # (op, shape) of a case


def rewrite(text: str) -> str:
    """Returns a page's text with new tables below the comments that the module describes."""
    return re.sub(r"^<!-- table: (\w+) (.+) -->\n[^|]*((?:^\|.*\n)+)", _lines, text, flags=re.MULTILINE)


def _lines(table: re.Match[str]) -> str:
    kind, names, before = table.groups()
    reports = [json.loads((ROOT / "benchmarks" / f"{name}.json").read_text()) for name in names.split()]
    cells = [line.split("|") for line in before.splitlines()[2:]]
    keys = [(op.strip(), shape.strip()) for _, op, shape, *_ in cells]
    texts, numbers, rows = KINDS[kind](reports, keys)
    lines = [" | ".join(texts | numbers), " | ".join(["---"] * len(texts) + ["---:"] * len(numbers))]
    lines += [" | ".join(cell.format_map(row) for cell in (texts | numbers).values()) for row in rows]
    text = "".join(f"| {line} |\n" for line in lines)
    return f"<!-- table: {kind} {names} -->\n{_caption(reports)}:\n\n{text}"


def _caption(reports: list[Row]) -> str:
    """Returns the devices, versions and commits of the reports, each once."""
    commits: dict[tuple[str, str], list[str]] = {}
    for report in reports:
        count = math.prod(report.get("mesh", {}).values())
        device = f"{count} x " * (count > 1) + f"{report['device']}, jax {report['jax']}"
        shapes = ""
        if "shapes" in report:
            shapes = f", {model_title(report['shapes'])}, format {report['cache_format']}"
        commits.setdefault((device, shapes), []).extend([report["commit"]] if "commit" in report else [])
    return "; ".join(
        device + shapes + f", commit {' / '.join(dict.fromkeys(names))}" * bool(names)
        for (device, shapes), names in commits.items()
    )


# Each kind of table is a function below: (reports, keys of the old table's cases) -> (columns of text, columns of
# numbers, rows). A column is {its title: a format of its cells}, and a cell is this format applied to a row.
Columns = dict[str, str]
Table = tuple[Columns, Columns, list[Row]]
OP = {"op": "{op}", "shape": "{shape}"}


def ops(reports: list[Row], keys: list[Key]) -> Table:
    """Returns every case of reports of `dsv4-jax bench ops`.

    Cases of older files have no share of the roofline. Their share of a copy's rate takes its place.
    """
    numbers = {
        "us": "{microseconds:,.2f}",
        "GB/s": "{gigabytes_per_second:,.0f}",
        "% of roofline": "{percent_of_roofline:.0f}",
        "XLA us": "{xla_microseconds:,.1f}",
        "times faster": "{times_xla:.1f}",
    }
    rows = [row for report in reports for row in report["results"]]
    return OP, numbers, [{"percent_of_roofline": row["percent_of_copy"]} | row for row in rows]


def sums(reports: list[Row], keys: list[Key]) -> Table:
    """Returns every case of reports of `dsv4-jax bench all_reduce`."""
    numbers = {
        "GPUs": "{devices}",
        "us": "{microseconds:,.2f}",
        "XLA us": "{xla_microseconds:,.1f}",
        "times faster": "{times_xla:.1f}",
    }
    return OP, numbers, [row for report in reports for row in report["results"]]


def alone(reports: list[Row], keys: list[Key]) -> Table:
    """Returns every case of reports in which XLA's version was not timed."""
    numbers = {
        "us": "{microseconds:,.2f}",
        "GB/s": "{gigabytes_per_second:,.0f}",
        "% of a read": "{percent_of_roofline:.0f}",
    }
    return OP, numbers, [row for report in reports for row in report["results"]]


def chosen(reports: list[Row], keys: list[Key]) -> Table:
    """Returns the times of the cases `keys`, from several files."""
    rows = {(row["op"], row["shape"]): row for report in reports for row in report["results"]}
    return OP, {"us": "{microseconds:,.1f}", "XLA, same run": "{xla_microseconds:,.1f}"}, [rows[key] for key in keys]


def peers(reports: list[Row], keys: list[Key]) -> Table:
    """Compares our kernels with the fastest peer kernels of the same run, by their times in CUDA graphs.

    If CUPTI has timed both kernels, these times are shown as well.
    """
    (report,) = reports

    def row(key: Key) -> Row:
        (ours,) = (
            row for row in report["comparisons"] if (row["op"], row["shape"], row["kernel"]) == (*key, "dsv4_jax")
        )
        row = _against_peers(key, ours["graph_microseconds"], report, "graph_microseconds")
        both = [f"{timed['cupti_microseconds']:.2f}" for timed in (ours, row) if "cupti_microseconds" in timed]
        return row | {"cupti": " / ".join(both) if len(both) == 2 else ""}

    return OP, AGAINST_PEERS | {"CUPTI, ours / peer": "{cupti}"}, [row(key) for key in keys]


def beside(reports: list[Row], keys: list[Key]) -> Table:
    """Compares our kernels in the first file with the fastest peer kernels in the second file.

    Both times are by CUPTI. If the first file is from `loop_times.py`, its times in loops are compared with the peers'
    times in CUDA graphs.
    """
    ours, other = reports
    clock = "graph_microseconds" if "loops" in ours else "cupti_microseconds"
    rows = ours["loops"] if "loops" in ours else ours["results"]
    times = {(row["op"], row["shape"]): row["microseconds"] for row in rows}
    return OP, AGAINST_PEERS, [_against_peers(key, times[key], other, clock) for key in keys]


AGAINST_PEERS = {"ours, us": "{ours:.2f}", "best peer, us": "{kernel} {best:.2f}", "ratio": "{ratio:.2f}"}


def _against_peers(key: Key, ours: float, report: Row, clock: str) -> Row:
    others = [row for row in report["comparisons"] if (row["op"], row["shape"]) == key and row["kernel"] != "dsv4_jax"]
    peer = min((row for row in others if clock in row), key=lambda row: row[clock])
    return peer | {"ours": ours, "best": peer[clock], "ratio": ours / peer[clock]}


def steps(reports: list[Row], keys: list[Key]) -> Table:
    """Returns the times of decode steps that run attention layers only, in milliseconds."""
    numbers = {
        "requests": "{requests}",
        "context": "{context:,}",
        "ms": "{milliseconds:.2f}",
        "loop": "{loop}",
        "dispatch": "{dispatch_milliseconds:.2f}",
        "floor ms": "{floor_milliseconds:.2f}",
        "% of floor": "{percent_of_floor:.0f}",
        "projections": "{kernel_milliseconds[projections]:.2f}",
        "append, flush": "{kernel_milliseconds[compressor]:.2f}",
        "indexer": "{kernel_milliseconds[indexer]:.2f}",
        "top-k": "{kernel_milliseconds[topk]:.2f}",
        "attention": "{kernel_milliseconds[attention]:.2f}",
        "rest": "{rest:.2f}",
        "gaps": "{gap_milliseconds:.2f}",
    }

    def row(row: Row) -> Row:
        kinds = row["kernel_milliseconds"]
        rest = kinds["rest"] + kinds.get("norm_rope", 0.0)
        return row | {"loop": f"{row['loop_milliseconds']:.2f}" if "loop_milliseconds" in row else "", "rest": rest}

    return {}, numbers, [row(step) for report in reports for step in report["results"]]


def layers(reports: list[Row], keys: list[Key]) -> Table:
    """Returns a layer's share of decode steps of `dsv4-jax bench model` or `layer`, in microseconds."""
    texts = {"layers": "{layer_count}"}
    numbers = {
        "requests": "{requests}",
        "context": "{context:,}",
        "us": "{layer:.0f}",
        "floor us": "{layer_floor:.0f}",
        "launches": "{launches:.0f}",
        "gaps": "{gaps:.0f}",
        "hyper-connections": "{hyper_connections:.1f}",
        "router": "{router:.1f}",
        "experts": "{experts:.1f}",
        "projections": "{projections:.1f}",
        "append, flush": "{compressor:.1f}",
        "indexer, top-k": "{indexed:.1f}",
        "attention": "{attention:.1f}",
        "rest": "{rest:.1f}",
    }

    def row(row: Row) -> Row:
        share = layer_share(row)
        kinds = share["kinds"]
        kind = row.get("layer_type", "first").removesuffix("_attention").replace("_", " ")
        sums = {
            "layer_count": f"{row['layers']}, {kind}",
            "experts": kinds["experts"] + kinds.get("shared_expert", 0.0),
            "indexed": kinds["indexer"] + kinds["topk"],
            "rest": kinds["rest"] + kinds.get("norm_rope", 0.0),
            "launches": row["launches"] / row["layers"],
        }
        return share | kinds | sums

    return texts, numbers, [row(step) for report in reports for step in report["results"]]


def prefill(reports: list[Row], keys: list[Key]) -> Table:
    """Returns the times of layers over chunks of a prompt, of `dsv4-jax bench prefill`, in milliseconds."""
    texts = {"layer": "{kind}"}
    numbers = {
        "tokens before": "{context:,}",
        "chunk": "{chunk:,}",
        "ms": "{milliseconds:.2f}",
        "floor ms": "{floor_milliseconds:.2f}",
        "TFLOP/s": "{tflops:.0f}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "projections": "{projections:.2f}",
        "attention": "{attention:.2f}",
        "indexer": "{indexer:.2f}",
        "top-k": "{topk:.2f}",
        "norm + rotation": "{norm_rope:.2f}",
        "append, flush": "{compressor:.2f}",
        "rest": "{rest:.2f}",
    }

    def row(row: Row) -> Row:
        kind = row["layer_type"].removesuffix("_attention").replace("_", " ")
        return row | row["kernel_milliseconds"] | {"kind": f"{kind} ({row['layers']})" if kind == "stack" else kind}

    return texts, numbers, [row(chunk) for report in reports for chunk in report["results"]]


def many_tokens(reports: list[Row], keys: list[Key]) -> Table:
    """Returns the times of single kernels with many tokens, and those of earlier kernels."""
    numbers = {
        "tokens": "{tokens:,}",
        "tokens before": "{context:,}",
        "us": "{microseconds:,.1f}",
        "rate": "{rate}",
        "earlier kernel, us": "{before}",
    }

    def row(row: Row) -> Row:
        rate = f"{row['tflops']} TFLOP/s" if "tflops" in row else f"{row['gigabytes_per_second']:,} GB/s"
        before = row["before_microseconds"]
        return row | {"rate": rate, "before": "" if before is None else f"{before:,.1f}"}

    return {"kernel": "{kernel}, {what}"}, numbers, [row(kernel) for report in reports for kernel in report["kernels"]]


def cost(reports: list[Row], keys: list[Key]) -> Table:
    """Returns bits per byte, from examples/king_james/cache_cost.py."""
    rows = [row | {f"from {place}": bits for place, bits in row["by_place"].items()} for row in reports[0]["text"]]
    places = [name for name in rows[0] if name.startswith("from ")]
    return CACHE, {"all": "{bits:.4f}"} | {name: f"{{{name}:.4f}}" for name in places}, rows


def needles(reports: list[Row], keys: list[Key]) -> Table:
    """Returns the share of facts that were found, by distance, from examples/king_james/cache_cost.py."""
    rows = [row | {f"{int(far):,}": share for far, share in row["accuracy"].items()} for row in reports[0]["needles"]]
    distances = [name for name in rows[0] if name[0].isdigit()]
    return CACHE, {name: f"{{{name}:.0%}}" for name in distances}, rows


CACHE = {"cache": "{format}", "attended to": "{attended}"}
KINDS: dict[str, Callable[[list[Row], list[Key]], Table]] = {
    table.__name__: table
    for table in (
        ops, sums, alone, chosen, peers, beside, steps, layers, prefill, many_tokens, cost, needles
    )
}  # fmt: skip
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")


def main(check: bool = False) -> None:
    """Rewrites the tables.

    Args:
      check: change nothing, and fail if a table is stale.
    """
    problems = []
    for page in PAGES:
        text = page.read_text()
        if check and rewrite(text) != text:
            problems.append(f"{page}: a table is stale, run: python scripts/benchmark_tables.py")
        elif not check:
            page.write_text(rewrite(text))
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    tyro.cli(main)
