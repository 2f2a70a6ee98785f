"""How objects show themselves: in a line, and in a notebook as a table. Neither reads an array's values."""

import dataclasses
import html
from collections.abc import Mapping


MAX_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a whole, shown with a bar.

    Attributes:
      used: the part.
      total: the whole.
      note: what else to say.
    """

    used: int
    total: int
    note: str = ""

    def __str__(self) -> str:
        return f"{self.used:,} of {self.total:,} {self.note}".rstrip()


@dataclasses.dataclass(frozen=True)
class Summary:
    """What an object says about itself.

    Attributes:
      words: the parts of its line.
      rows: {name: value} of its table; only the first `MAX_ROWS` are shown.
    """

    words: tuple[str, ...]
    rows: Mapping[str, str | Share]


class Summarised:
    """A class whose objects show themselves by their `_summary()`."""

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
