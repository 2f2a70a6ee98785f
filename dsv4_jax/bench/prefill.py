"""`dsv4-jax bench prefill`: the time of layers and of their kernels when they read chunks of a prompt."""

import collections
from collections.abc import Iterator

import jax

from dsv4_jax.bench.cases import measured_config
from dsv4_jax.bench.decode_steps import StepOptions, check_numbers, measure
from dsv4_jax.bench.tables import LAYER_KINDS, Row, kind_columns, print_rows
from dsv4_jax.config import DSV4Config


STACK = "stack"  # the "layer_type" of results for all layers together
# {column of the printed table: format of its cell, with fields of a result}
COLUMNS = {
    "layer": "{layer_type}",
    "context": "{context}",
    "chunk": "{chunk}",
    "ms": "{milliseconds:.3f}",
    "floor": "{floor_milliseconds:.3f}",
    "% of it": "{percent_of_floor:.0f}",
    "tokens/s": "{tokens_per_second:.0f}",
    "TFLOP/s": "{tflops:.0f}",
    **kind_columns("kernel_milliseconds", 3),
}


def default_sizes() -> dict[str, tuple[int, ...]]:
    """Returns the default `chunks`, numbers of tokens of a chunk, and `contexts`, numbers of tokens before it."""
    if jax.default_backend() == "gpu":
        return {"chunks": (512, 2048, 8192), "contexts": (0, 65536, 524288)}
    return {"chunks": (64,), "contexts": (0, 256)}


def run(config: DSV4Config, options: StepOptions, report: Row) -> Iterator[Row]:
    """Measures a model of one layer for each kind of layer; prints and yields the results.

    The last results are for all layers of the model: the sum over kinds of the time of a layer times the number of
    layers. All contexts are measured in a cache for the longest one, so that a program is compiled only once for each
    kind of layer and size of a chunk.

    On a GPU, a time is the sum of the kernels' times, without the embedding, the head and sampling. Without a GPU, the
    packaged model replaces `config`, and a time is the time of the whole step.

    Args:
      config: configuration of the model.
      options: the chunks, contexts and other options.
      report: the report that the results belong to. The clock and the measured rates are added to it.

    Raises:
      ValueError: an option is out of range.
    """
    config = measured_config(config, report)
    check_numbers("chunks", options.chunks, 2)
    options.check(config)
    yield from print_rows(_measure(config, options, report), COLUMNS, layer=-28, chunk=6)


def _measure(config, options, report):
    rows_by_place: dict[tuple[int, int], list[Row]] = {}
    for spec, count in collections.Counter(spec.kind for spec in config.specs).items():
        for step in measure(config.with_layers([spec]).with_drafts(False), options, report):
            times = {kind: step["kernel_milliseconds"].get(kind, 0.0) for kind in LAYER_KINDS}
            row = {"layer_type": spec.layer_type, "layers": count, "context": step["context"], "chunk": step["tokens"]}
            row |= {"flops": step["operations"], "bytes": step["floor_bytes"] - step["head_bytes"]}
            row |= {"kernel_milliseconds": times, "milliseconds": sum(times.values()) or step["milliseconds"]}
            row = _with_rates(row | {"floor_milliseconds": step["floor_milliseconds"]})
            rows_by_place.setdefault((row["context"], row["chunk"]), []).append(row)
            yield row
    yield from map(_total, rows_by_place.values())


def _with_rates(row):
    milliseconds = row["milliseconds"]
    return row | {
        "percent_of_floor": 100 * row["floor_milliseconds"] / milliseconds,
        "tokens_per_second": 1e3 * row["chunk"] / milliseconds,
        "tflops": row["flops"] / milliseconds / 1e9,
    }


def _total(rows):
    """Returns the result for all layers of the model, from the results of one layer of each kind."""
    row = rows[0] | {"layer_type": STACK, "layers": sum(row["layers"] for row in rows)}
    for name in ("flops", "bytes", "milliseconds", "floor_milliseconds"):
        row[name] = sum(row["layers"] * row[name] for row in rows)
    row["kernel_milliseconds"] = {
        kind: sum(row["layers"] * row["kernel_milliseconds"][kind] for row in rows)
        for kind in rows[0]["kernel_milliseconds"]
    }
    return _with_rates(row)
