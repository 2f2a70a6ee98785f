"""Tables of `dsv4-jax bench step`, `layer` and `model`: a line for each case."""

import dataclasses
from typing import Any

from dsv4_jax.bench.kernel_kinds import ALL_REDUCE, KINDS, REST


Row = dict[str, Any]
# Kinds of kernels that attention layers alone do not have.
WHOLE_LAYER_KINDS = ("hyper_connections", "router", "experts", "shared_expert", ALL_REDUCE)
# Acceptance rates for which tokens a second are reported.
ACCEPTANCES = (0.5, 0.7, 0.9)


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns of a table: milliseconds of a step, or microseconds of a layer's share of one.

    Attributes:
      layers: number of layers in the step, to print a layer's share; None for the whole step.
    """

    layers: int | None

    @property
    def unit(self) -> str:
        """The unit of the numbers."""
        return "Milliseconds a step" if self.layers is None else "Microseconds a layer"

    def header(self) -> str:
        """Returns the names of the columns."""
        return self._line(self._names())

    def line(self, row: Row) -> str:
        """Returns the numbers of a case, to print below `header`."""
        times, share = row["kernel_milliseconds"], 1.0 if self.layers is None else 1e3 / self.layers
        numbers = [row["milliseconds"], row["floor_milliseconds"]]
        rest = [
            row.get("loop_milliseconds"),
            row["dispatch_milliseconds"],
            *(times.get(kind) for kind in self._kinds()),
        ]
        rest.append(row.get("gap_milliseconds"))
        cells = [None if number is None else number * share for number in (*numbers, *rest)]
        launches = None if "launches" not in row else row["launches"] / (self.layers or 1)
        cells = [*cells[:2], row["percent_of_floor"], *cells[2:], launches]
        digits = 3 if self.layers is None else 1
        places = row["requests"], row["context"], row["tokens"], row["drafts"]
        return self._line([*places, *("" if cell is None else f"{cell:.{digits}f}" for cell in cells)])

    def _kinds(self):
        return [kind for kind in (*KINDS, REST) if self.layers is not None or kind not in WHOLE_LAYER_KINDS]

    def _names(self):
        timed = "step" if self.layers is None else "layer"
        places = "batch", "context", "tokens", "drafts"
        return [*places, timed, "floor", "% of it", "loop", "dispatch", *self._kinds(), "gaps", "launches"]

    def _line(self, cells):
        widths = (5, 8, 6, 6, *(max(8, len(name)) for name in self._names()[4:]))
        return "  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True))


def tokens_per_second(row: Row) -> dict[str, float]:
    """Returns the tokens a second of all requests of a case with drafts, for each acceptance rate."""
    steps = 1e3 * row["requests"] / row["milliseconds"]
    return {str(share): round(steps * sum(share**i for i in range(1 + row["drafts"])), 1) for share in ACCEPTANCES}


def draft_lines(rows_by_place: dict[tuple[int, int], list[Row]]) -> str:
    """Returns lines with the cost of verifying and drafting, and tokens a second.

    Args:
      rows_by_place: (batch size, context) -> rows with one token, with verification, and with drafting as well.
    """
    rates = ", ".join(map("{:.0%}".format, ACCEPTANCES))
    lines = [f"\nTokens a second if {rates} of the drafts are accepted, each after accepted ones."]
    for (requests, context), (_, verify, whole) in rows_by_place.items():
        rates = ", ".join(f"{rate:,.0f}" for rate in whole["tokens_per_second"].values())
        lines.append(
            f"batch {requests}, context {context}: {whole['tokens']} tokens take {verify['times_one_token']:.2f} x a "
            f"step with one, with {whole['drafts']} drafts {whole['times_one_token']:.2f} x; tokens a second: {rates}"
        )
    return "\n".join(lines)
