"""What `dsv4-jax bench step`, `layer` and `model` print: a line for each case."""

import dataclasses
from typing import Any

from dsv4_jax.bench.kernel_kinds import KINDS, REST


Row = dict[str, Any]
OF_WHOLE_LAYERS = ("hyper-connections", "router", "experts", "collectives")
# Shares of drafts that are right, each after right ones, for which tokens a second are reported.
ACCEPTANCES = (0.5, 0.7, 0.9)


@dataclasses.dataclass(frozen=True)
class Columns:
    """Of a step, in milliseconds, or of a layer's share of one, in microseconds.

    Attributes:
      layers: of the step, if a layer's share is printed.
    """

    layers: int | None

    @property
    def unit(self) -> str:
        """What the numbers are."""
        return "Milliseconds a step" if self.layers is None else "Microseconds a layer"

    def header(self) -> str:
        """Names of the columns."""
        return self._line(self._names())

    def line(self, row: Row) -> str:
        """A case's numbers, below `header`."""
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
        return [kind for kind in (*KINDS, REST) if self.layers is not None or kind not in OF_WHOLE_LAYERS]

    def _names(self):
        timed = "step" if self.layers is None else "layer"
        places = "batch", "context", "tokens", "drafts"
        return [*places, timed, "floor", "% of it", "loop", "dispatch", *self._kinds(), "gaps", "launches"]

    def _line(self, cells):
        widths = (5, 8, 6, 6, *(max(8, len(name)) for name in self._names()[4:]))
        return "  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=True))


def tokens_per_second(row: Row) -> dict[str, float]:
    """Of all requests of a case with drafts, for each of `ACCEPTANCES` as the share of drafts that are right."""
    steps = 1e3 * row["requests"] / row["milliseconds"]
    return {str(share): round(steps * sum(share**i for i in range(1 + row["drafts"])), 1) for share in ACCEPTANCES}


def draft_lines(places: dict[tuple[int, int], list[Row]]) -> str:
    """What verifying and drafting cost against a step with one token, and tokens a second."""
    lines = [f"\nTokens a second: assumed that {', '.join(map('{:.0%}'.format, ACCEPTANCES))} of the drafts are right."]
    for (requests, context), (_, verify, whole) in places.items():
        rates = ", ".join(f"{rate:,.0f}" for rate in whole["tokens_per_second"].values())
        lines.append(
            f"batch {requests}, context {context}: {whole['tokens']} tokens take {verify['times_one_token']:.2f} x a "
            f"step with one, with {whole['drafts']} drafts {whole['times_one_token']:.2f} x; tokens a second: {rates}"
        )
    return "\n".join(lines)
