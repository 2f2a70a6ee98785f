"""The tables that benchmarks print, line by line as results come."""

from collections.abc import Mapping
from typing import Any

from dsv4_jax.bench.kernel_kinds import ALL_REDUCE, KINDS, REST


Row = dict[str, Any]
# Kinds of kernels that attention layers alone do not have.
WHOLE_LAYER_KINDS = ("hyper_connections", "router", "experts", "shared_expert", ALL_REDUCE)
# Acceptance rates for which tokens a second are reported.
ACCEPTANCES = (0.5, 0.7, 0.9)


class LiveTable:
    """Prints rows as they come, the first one below the names of its columns."""

    def __init__(self, **widths: int):
        """Sets the least widths of columns, negative if the text stands on the left; others are 8 wide."""
        self._widths, self._header = widths, False

    def add(self, cells: Mapping[str, Any]) -> None:
        """Prints a row, given as {name of a column: its text or number}."""
        rows = [cells] if self._header else [{name: name for name in cells}, cells]
        self._header = True
        for row in rows:
            print("  ".join(self._cell(name, cell) for name, cell in row.items()).rstrip(), flush=True)

    def _cell(self, name, cell):
        least = self._widths.get(name, 8)
        width = max(abs(least), len(name))
        return str(cell).ljust(width) if least < 0 else str(cell).rjust(width)


def number(value: float | None, digits: int) -> str:
    """Returns a cell with so many digits after the point; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def attention_kinds(kinds: Mapping[str, float]) -> Row:
    """Returns cells with the milliseconds of the kinds of kernels that attention layers have."""
    shown = (kind for kind in (*KINDS, REST) if kind not in WHOLE_LAYER_KINDS)
    return {kind: number(kinds.get(kind), 3) for kind in shown}


def step_cells(row: Row, layers: int | None) -> Row:
    """Returns the cells of a step: milliseconds, or for a number of whole layers, microseconds of a layer's share."""
    scale, digits = (1.0, 3) if layers is None else (1e3 / layers, 1)

    def share(value, scale=scale):
        return number(None if value is None else value * scale, digits)

    times = row["kernel_milliseconds"]
    kinds = attention_kinds(times) if layers is None else {kind: share(times.get(kind)) for kind in (*KINDS, REST)}
    cells = dict(batch=row["requests"], context=row["context"], tokens=row["tokens"], drafts=row["drafts"])
    cells |= {} if layers is None else dict(skew=row["skew"])
    cells |= {"step" if layers is None else "layer": share(row["milliseconds"])}
    cells |= {"floor": share(row["floor_milliseconds"]), "% of it": share(row["percent_of_floor"], 1.0)}
    cells |= dict(loop=share(row.get("loop_milliseconds")), dispatch=share(row["dispatch_milliseconds"])) | kinds
    return cells | dict(gaps=share(row.get("gap_milliseconds")), launches=share(row.get("launches"), 1 / (layers or 1)))


def tokens_per_second(row: Row) -> dict[str, float]:
    """Returns the tokens a second of all requests of a case with drafts, for each acceptance rate."""
    steps = 1e3 * row["requests"] / row["milliseconds"]
    return {str(share): round(steps * sum(share**i for i in range(1 + row["drafts"])), 1) for share in ACCEPTANCES}


def draft_lines(rows_by_place: dict[tuple[Any, ...], list[Row]]) -> str:
    """Returns lines with the cost of verifying and drafting, and tokens a second.

    A place is (batch size, context, skew); its rows have one token, verify drafts, and draft as well.
    """
    rates = ", ".join(map("{:.0%}".format, ACCEPTANCES))
    lines = [f"\nTokens a second if {rates} of the drafts are accepted, each after accepted ones."]
    for (requests, context, _), (one, verify, whole) in rows_by_place.items():
        rates = ", ".join(f"{rate:,.0f}" for rate in whole["tokens_per_second"].values())
        verified, drafted = (
            f"{row['times_one_token']:.2f} x (floor {row['floor_bytes'] / one['floor_bytes']:.2f} x)"
            for row in (verify, whole)
        )
        lines.append(
            f"batch {requests}, context {context}: {whole['tokens']} tokens take {verified} a step with one, with "
            f"{whole['drafts']} drafts {drafted}; drafts alone {whole['draft_milliseconds']:.3f} ms; tokens a second: "
            f"{rates}"
        )
    return "\n".join(lines)
