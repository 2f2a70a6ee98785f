"""The tables that benchmarks print, with a line for each result as soon as it is measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from dsv4_jax.bench.kernel_kinds import KINDS, OUTSIDE, REST


Row = dict[str, Any]  # the fields of a result, or of a report of many results
# Kernels of these kinds belong to layers.
LAYER_KINDS = tuple(kind for kind in (*KINDS, REST) if kind not in OUTSIDE)
# `MODELS` maps the field "shapes" of a report to the model's name in titles. The field is the name of a configuration
# without "v4_", or a folder. Folders are not listed, because their path is the title. Without a GPU, "tiny" replaces
# models of V4.
MODELS = {
    "flash": "V4-Flash",
    "pro": "V4-Pro",
    "flash_0731": "V4-Flash-0731",
    "pro_0813": "V4-Pro-0813",
    "v41_flash": "V4.1-Flash",
    "tiny": "a tiny model",
}
# Tokens a second are reported for each of these acceptance rates of drafts.
ACCEPTANCES = (0.5, 0.7, 0.9)


def model_title(shapes: str) -> str:
    """Returns the model's name in titles, from the field "shapes" of a report."""
    return MODELS.get(shapes, shapes)


def print_rows(
    rows: Iterable[Row], columns: Mapping[str, str], show: Callable[[Row], Row] = lambda row: row, **widths: int
) -> Iterator[Row]:
    """Prints a table that begins with a line of column names. Prints and then yields one row at a time.

    Args:
      rows: the results.
      columns: {name of a column: format of its cells, such as "{milliseconds:.1f}"}. A cell stays empty if the row
        lacks a field that the format names.
      show: function that returns the row to print for a result.
      widths: minimum width of each named column in characters, negative for left-aligned text; default 8.
    """

    def print_line(cells):
        """Prints a line of cells, each padded to the width of its column."""
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
    """Returns the text of a cell; an empty text if the row lacks a field of the format."""
    try:
        return text.format(**row)
    except KeyError:
        return ""


def kind_columns(field: str, digits: int) -> dict[str, str]:
    """Returns a column for each kind of layers' kernels, for `print_rows`.

    Args:
      field: name of the field of a result that holds {kind: number}.
      digits: number of digits after the decimal point.
    """
    return {kind: f"{{{field}[{kind}]:.{digits}f}}" for kind in LAYER_KINDS}


def layer_share(row: Row) -> Row:
    """Returns a step's result with the time of an average layer, in microseconds.

    These keys are added; the last two only if kernels were measured:

      * layer: time of a layer with the gaps between kernels. Without measured kernels it includes a share of the
        embedding, the head and sampling.
      * layer_floor: lower bound of a layer's time, from `floor_milliseconds` without the head.
      * kinds: {kind of kernel: time of a layer's kernels of this kind}.
      * gaps: a layer's share of the time in which the step runs no kernel, including gaps outside the layers.
      * outside: milliseconds of the kernels of the embedding, the head and sampling.
    """
    times = row["kernel_milliseconds"]
    to_layer = 1e3 / row["layers"]  # factor from milliseconds of a step to microseconds of a layer
    outside = sum(times.get(kind, 0.0) for kind in OUTSIDE)
    floor = row["floor_milliseconds"] * (1 - row.get("head_bytes", 0) / row["floor_bytes"])
    kinds = {kind: to_layer * times[kind] for kind in LAYER_KINDS if kind in times}
    added = {"layer": to_layer * (row["milliseconds"] - outside), "layer_floor": to_layer * floor, "kinds": kinds}
    if times:
        added |= {"outside": outside, "gaps": to_layer * row["gap_milliseconds"]}
    return row | added


def tokens_per_second(row: Row) -> dict[str, float]:
    """Returns the tokens a second of all requests at each rate of `ACCEPTANCES`: {rate as text: tokens a second}."""
    steps = 1e3 * row["requests"] / row["milliseconds"]
    return {str(share): steps * sum(share**i for i in range(1 + row["drafts"])) for share in ACCEPTANCES}
