"""`dsv4-jax bench prefill`: the time of layers over chunks of a prompt, and of their kernels."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from dsv4_jax.bench.cases import measured_config
from dsv4_jax.bench.decode_steps import StepOptions, measure
from dsv4_jax.bench.tables import LAYER_KINDS, LiveTable, kind_columns
from dsv4_jax.config import DSV4Config
from dsv4_jax.quant import KVFormat


# Default tokens of a chunk and tokens before it, with a GPU and without.
DEFAULTS = dict(gpu=((512, 2048, 8192), (0, 65536, 524288)), cpu=((64,), (0, 256)))
STACK = "stack"  # the "layer_type" of all layers together
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


def run(
    config: DSV4Config, kv_format: KVFormat, options: StepOptions, report: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measures a model of one layer for each kind of layer; prints and yields the results.

    The last results are for all layers: the time of each kind times the number of its layers. One program is compiled
    for a kind and chunk size, so every context is measured in the cache of the longest. On a GPU, times are those of
    kernels, without those of embedding, head and sampling. Without one, the packaged model replaces `config`, and the
    clock measures whole steps. Rates and clock are added to the report. Raises ValueError if an option is out of range.
    """
    config = measured_config(config, report)
    chunks, contexts = DEFAULTS[jax.default_backend()]
    given = dict(chunks=options.chunks or chunks, contexts=contexts if options.contexts is None else options.contexts)
    options = dataclasses.replace(options, batches=(1,), kv_format=kv_format, **given)
    options.check(config)
    lines = LiveTable(COLUMNS, layer=-28, chunk=6)
    totals: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for spec, count in collections.Counter(spec.kind for spec in config.specs).items():
        for step in measure(config.with_layers([spec]).with_drafts(False), options, report):
            nbytes = step["floor_bytes"] - step["head_bytes"]
            times = step["kernel_milliseconds"]
            times = {kind: times[kind] for kind in LAYER_KINDS if kind in times}
            row: dict[str, Any] = dict(layer_type=spec.layer_type, layers=count, context=step["context"])
            row |= dict(chunk=step["tokens"], flops=step["operations"], bytes=nbytes, kernel_milliseconds=times)
            milliseconds = sum(times.values()) or step["milliseconds"]
            row |= _rates(milliseconds, step["floor_milliseconds"], step["operations"], step["tokens"])
            totals.setdefault((row["context"], row["chunk"]), []).append(row)
            lines.add(row)
            yield row
    for rows in totals.values():
        lines.add(row := _together(rows))
        yield row


def _rates(milliseconds, floor, flops, chunk):
    """Returns a result's times and rates."""
    return dict(
        milliseconds=milliseconds,
        floor_milliseconds=floor,
        percent_of_floor=100 * floor / milliseconds,
        tokens_per_second=1e3 * chunk / milliseconds,
        tflops=flops / milliseconds / 1e9,
    )


def _together(rows):
    """Returns the result of all layers, from the result of each kind."""

    def total(value):
        return sum(row["layers"] * value(row) for row in rows)

    kinds = rows[0]["kernel_milliseconds"]
    times = {kind: total(lambda row, kind=kind: row["kernel_milliseconds"][kind]) for kind in kinds}
    sums = {name: total(lambda row, name=name: row[name]) for name in ("flops", "bytes")}
    place = dict(layer_type=STACK, layers=sum(row["layers"] for row in rows))
    place |= {name: rows[0][name] for name in ("context", "chunk")}
    floor, milliseconds = (total(lambda row, n=n: row[n]) for n in ("floor_milliseconds", "milliseconds"))
    return place | sums | dict(kernel_milliseconds=times) | _rates(milliseconds, floor, sums["flops"], place["chunk"])
