"""The tables that benchmarks print, line by line as results come."""

from collections.abc import Mapping
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


class LiveTable:
    """Prints rows as they come, the first one below the names of its columns."""

    def __init__(self, columns: Mapping[str, str], **widths: int):
        """Makes an empty table.

        Args:
          columns: {name: format of its cell, such as "{milliseconds:.1f}"}; a cell stays empty if the row lacks a key.
          widths: least widths of columns, negative if the text stands on the left; others are 8 wide.
        """
        self._columns = columns
        self._widths = widths
        self._has_header = False

    def add(self, row: Row) -> None:
        """Prints a row."""
        if not self._has_header:
            self._print({name: name for name in self._columns})
            self._has_header = True
        self._print({name: _cell(text, row) for name, text in self._columns.items()})

    def _print(self, cells):
        padded = []
        for name, text in cells.items():
            least = self._widths.get(name, 8)
            width = max(abs(least), len(name))
            padded.append(text.ljust(width) if least < 0 else text.rjust(width))
        print("  ".join(padded).rstrip(), flush=True)


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
