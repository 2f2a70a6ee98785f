"""Reprs of large objects: one line for terminals, a table for notebooks. They do not read the values of arrays."""

import dataclasses
import html
from collections.abc import Mapping


MAX_ROWS = 32  # maximum number of rows of a table


@dataclasses.dataclass(frozen=True)
class Share:
    """The used amount of a total. Notebooks show it with a bar.

    Attributes:
      used: used amount.
      total: total amount.
      note: text after the numbers.
    """

    used: int
    total: int
    note: str = ""

    def __str__(self) -> str:
        return f"{self.used:,} of {self.total:,} {self.note}".rstrip()


@dataclasses.dataclass(frozen=True)
class Summary:
    """The contents of an object's repr.

    Attributes:
      words: items of the line for terminals.
      rows: {name: value} of the table for notebooks, which shows the first `MAX_ROWS` of them.
    """

    words: tuple[str, ...]
    rows: Mapping[str, str | Share]


class Summarized:
    """A base class of objects whose reprs show the `Summary` that their `_summary()` returns."""

    def _summary(self) -> Summary:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._summary().words)})"

    def _repr_html_(self) -> str:
        summary = self._summary()
        rows = [f"<tr><th>{html.escape(name)}</th><td>{_cell(value)}</td></tr>" for name, value in summary.rows.items()]
        if len(rows) > MAX_ROWS:
            rows[MAX_ROWS:] = [f"<tr><th>and {len(rows) - MAX_ROWS} more</th><td></td></tr>"]
        title = f"<b>{type(self).__name__}</b>: {html.escape(', '.join(summary.words))}"
        return f"<div>{title}<table>{''.join(rows)}</table></div>"


def _cell(value: str | Share) -> str:
    if isinstance(value, str):
        return html.escape(value)
    return f'<progress value="{value.used}" max="{max(value.total, 1)}"></progress> {html.escape(str(value))}'
