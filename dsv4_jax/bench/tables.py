"""The tables that benchmarks print, line by line as results come."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dsv4_jax.bench.kernel_kinds import KINDS, OUTSIDE, REST


Row = dict[str, Any]  # a result, or a report of many
LAYER_KINDS = tuple(kind for kind in (*KINDS, REST) if kind not in OUTSIDE)
# By a report's "shapes". Without a GPU, "tiny" replaces the requested model.
MODELS = {
    "flash": "V4-Flash",
    "pro": "V4-Pro",
    "flash_0731": "V4-Flash-0731",
    "pro_0813": "V4-Pro-0813",
    "tiny": "a tiny model",
}
# Acceptance rates for which tokens a second are reported.
ACCEPTANCES = (0.5, 0.7, 0.9)


def print_rows(
    rows: Iterable[Row], columns: Mapping[str, str], show: Callable[[Row], Row] = lambda row: row, **widths: int
) -> Iterator[Row]:
    """Yields rows, and prints each as it comes, the first one below the names of its columns.

    Args:
      rows: the results.
      columns: {name: format of its cell, such as "{milliseconds:.1f}"}; a cell stays empty if the row lacks a key.
      show: what is printed of a row.
      widths: least widths of columns, negative if the text stands on the left; others are 8 wide.
    """

    def print_line(cells):
        padded = []
        for name, text in zip(columns, cells, strict=True):
            least = widths.get(name, 8)
            width = max(abs(least), len(name))
            padded.append(text.ljust(width) if least < 0 else text.rjust(width))
        print("  ".join(padded).rstrip(), flush=True)

    for number, row in enumerate(rows):
        if number == 0:
            print_line(columns)
        shown = show(row)
        print_line([_cell(text, shown) for text in columns.values()])
        yield row


def _cell(text, row):
    try:
        return text.format(**row)
    except KeyError:
        return ""


def kind_columns(field: str, digits: int) -> dict[str, str]:
    """Returns the columns of the kinds of kernels of layers, whose numbers are in a field of the row."""
    return {kind: f"{{{field}[{kind}]:.{digits}f}}" for kind in LAYER_KINDS}


def layer_share(row: Row) -> Row:
    """Returns a step's result with a layer's share of it, in microseconds.

    Keys that are added: `layer`, its time with the gaps between kernels; `layer_floor`; `gaps`; `kinds`, its kernels;
    `outside`, the milliseconds of embedding, head and sampling. These count in the gaps only and, where no kernels were
    measured, in the time.
    """
    times = row["kernel_milliseconds"]
    share = 1e3 / row["layers"]
    outside = sum(times.get(kind, 0.0) for kind in OUTSIDE)
    floor = row["floor_milliseconds"] * (1 - row.get("head_bytes", 0) / row["floor_bytes"])
    kinds = {kind: share * times[kind] for kind in LAYER_KINDS if kind in times}
    added: Row = {"layer": share * (row["milliseconds"] - outside), "layer_floor": share * floor, "kinds": kinds}
    if times:
        added |= {"outside": outside, "gaps": share * row["gap_milliseconds"]}
    return row | added


def tokens_per_second(row: Row) -> dict[str, float]:
    """Returns the tokens a second of all requests of a case with drafts, for each acceptance rate."""
    steps = 1e3 * row["requests"] / row["milliseconds"]
    return {str(share): steps * sum(share**i for i in range(1 + row["drafts"])) for share in ACCEPTANCES}
