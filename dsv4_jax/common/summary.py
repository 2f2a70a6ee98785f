"""Reprs of large objects: one line for terminals, a table for notebooks. They do not read the values of arrays."""

import dataclasses
import html
from typing import Any


MAX_ITEMS = 8  # maximum number of items of a line
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


class Summarized:
    """A base class of objects whose reprs show the items {name: value} that their `_summary()` returns.

    By default the items are the object's fields, arrays by their types. A line shows the first `MAX_ITEMS` items, and a
    table the first `MAX_ROWS`.
    """

    def __init_subclass__(cls) -> None:
        cls.__repr__ = Summarized.__repr__  # so that dataclass decorators find a repr in the class and make none

    def _summary(self) -> dict[str, Any]:
        # Fields that usually hold arrays may hold any objects, which `jax.tree.map` can put there.
        return {name: getattr(x, "aval", getattr(x, "shape", x)) for name, x in vars(self).items()}

    def __repr__(self) -> str:
        items = [f"{name}: {value}" for name, value in self._summary().items()]
        return f"{type(self).__name__}({', '.join(items[:MAX_ITEMS] + ['...'] * (len(items) > MAX_ITEMS))})"

    def _repr_html_(self) -> str:
        rows = [
            f"<tr><th>{html.escape(name)}</th><td>{_cell(value)}</td></tr>" for name, value in self._summary().items()
        ]
        if len(rows) > MAX_ROWS:
            rows[MAX_ROWS:] = [f"<tr><th>and {len(rows) - MAX_ROWS} more</th><td></td></tr>"]
        return f"<div><b>{type(self).__name__}</b><table>{''.join(rows)}</table></div>"


def _cell(value):
    text = html.escape(str(value))
    if not isinstance(value, Share):
        return text
    return f'<progress value="{value.used}" max="{max(value.total, 1)}"></progress> {text}'
