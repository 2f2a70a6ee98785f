"""`dsv4-jax bench prefill`: the time of layers and of their kernels when they read chunks of a prompt."""

from collections.abc import Iterator

import jax

from dsv4_jax.bench.cases import measured_config
from dsv4_jax.bench.decode_steps import StepOptions, check_numbers, kind_config, measure
from dsv4_jax.bench.layer_slices import layer_kinds, with_sources
from dsv4_jax.bench.tables import LAYER_KINDS, Row, kind_columns, print_rows
from dsv4_jax.config import DSV4Config


_SUMS = "flops", "bytes", "milliseconds"  # numbers of a layer's row that are subtracted and added up
STACK = "stack"  # the "layer_type" of results for all layers together
# {column of the printed table: format of its cell, with fields of a result}
COLUMNS = {
    "layer": "{layer_type}",
    "number": "{layer}",
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

    If a layer needs others that store or select entries for it, a model of these is measured, too, and subtracted. The
    last results are for all layers of the model: the sum over kinds of the time of a layer times the number of
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
    # {numbers of layers: {(context, chunk): the sums over these layers}}
    measured: dict[tuple[int, ...], dict[tuple[int, int], Row]] = {(): {}}
    for layer, count in layer_kinds(config).items():
        layers = with_sources(config, [layer])
        for part in (layers[:-1], layers):
            if part not in measured:
                steps = measure(kind_config(config, part).with_drafts(False), options, report)
                rows = map(_step_row, steps)
                measured[part] = {(row["context"], row["chunk"]): row for row in rows}
        for place, whole in measured[layers].items():
            row = {"layer_type": config.specs[layer].layer_type, "layer": layer, "layers": count}
            row |= _minus(whole, measured[layers[:-1]].get(place))
            seconds = (
                row["bytes"] / report["copy_bytes_per_second"],
                row["flops"] / report["matmul_operations_per_second"],
            )
            row = _with_rates(row | {"floor_milliseconds": 1e3 * max(seconds)})
            rows_by_place.setdefault(place, []).append(row)
            yield row
    yield from map(_total, rows_by_place.values())


def _step_row(step):
    times = {kind: step["kernel_milliseconds"].get(kind, 0.0) for kind in LAYER_KINDS}
    row = {"context": step["context"], "chunk": step["tokens"]}
    row |= {"flops": step["operations"], "bytes": step["floor_bytes"] - step["head_bytes"]}
    return row | {"kernel_milliseconds": times, "milliseconds": sum(times.values()) or step["milliseconds"]}


def _minus(whole, other):
    """Returns a row without the work and the times of the layers of another row of the same context and chunk."""
    if other is None:
        return whole
    times = {kind: time - other["kernel_milliseconds"][kind] for kind, time in whole["kernel_milliseconds"].items()}
    return whole | {name: whole[name] - other[name] for name in _SUMS} | {"kernel_milliseconds": times}


def _with_rates(row):
    milliseconds = row["milliseconds"]
    return row | {
        "percent_of_floor": 100 * row["floor_milliseconds"] / milliseconds,
        "tokens_per_second": 1e3 * row["chunk"] / milliseconds,
        "tflops": row["flops"] / milliseconds / 1e9,
    }


def _total(rows):
    """Returns the result for all layers of the model, from the results of one layer of each kind."""
    row = rows[0] | {"layer_type": STACK, "layer": "", "layers": sum(row["layers"] for row in rows)}
    for name in (*_SUMS, "floor_milliseconds"):
        row[name] = sum(row["layers"] * row[name] for row in rows)
    row["kernel_milliseconds"] = {
        kind: sum(row["layers"] * row["kernel_milliseconds"][kind] for row in rows)
        for kind in rows[0]["kernel_milliseconds"]
    }
    return _with_rates(row)
