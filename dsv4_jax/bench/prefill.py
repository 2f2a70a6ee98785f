"""`dsv4-jax bench prefill`: the time of layers and of their kernels when they read chunks of a prompt."""

import functools
from collections.abc import Iterator

import numpy as np

from dsv4_jax.bench.cases import measured_config
from dsv4_jax.bench.decode_steps import measure
from dsv4_jax.bench.layer_slices import layer_kinds, slice_config, with_sources
from dsv4_jax.bench.step_options import StepOptions, check_numbers
from dsv4_jax.bench.tables import LAYER_KINDS, Row, kind_columns, print_rows
from dsv4_jax.config import DSV4Config


STACK = "stack"  # the "layer_type" of results for all layers together
# `COLUMNS` maps the title of each printed column to the format of its cells, with names of a result's fields in braces.
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


def run(config: DSV4Config, options: StepOptions, report: Row) -> Iterator[Row]:
    """Measures a model of one layer for each kind of layer; prints and yields the results.

    If a layer needs other layers that store or select entries for it, a model of these other layers alone is measured,
    too. The work and the time of this model are subtracted. The final results are for all layers together. For
    these, the work and the time of a layer of each kind are multiplied by the number of such layers and summed up. All
    contexts are measured in a cache for the longest context, so that a program is compiled only once for each kind of
    layer and size of a chunk.

    On a GPU, a time is the sum of the kernels' times, without the embedding, the head and sampling. Without a GPU, a
    time is the time of the whole step, and the packaged model replaces a released model.

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
    """Yields a result for each kind of layer, chunk and context, then those for all layers together."""

    @functools.cache
    def measured(layers):
        """Returns {(context, chunk): amounts, see `_amounts`} of the layers with these indices."""
        if not layers:
            return {}
        small_config = slice_config(config, layers, hashed=False).with_drafts(False)
        steps = measure(small_config, options, report)
        return {(step["context"], step["tokens"]): _amounts(step) for step in steps}

    # `totals` maps (context, chunk) to [number of layers, the amounts, the floor], summed over all layers.
    totals: dict[tuple[int, int], np.ndarray] = {}
    for layer, count in layer_kinds(config).items():
        layers = with_sources(config, [layer])
        others = measured(layers[:-1])  # the layers that store or select entries for `layer`
        for size, with_others in measured(layers).items():
            amounts = with_others - others.get(size, 0)
            operations, nbytes = amounts[:2]
            seconds = nbytes / report["copy_bytes_per_second"], operations / report["matmul_operations_per_second"]
            floor = 1e3 * max(seconds)
            totals[size] = totals.get(size, 0) + count * np.array([1, *amounts, floor])
            yield _row(config.specs[layer].layer_type, layer, count, size, amounts, floor)
    for size, total in totals.items():
        yield _row(STACK, "", round(total[0]), size, total[1:-1], total[-1])


def _amounts(step):
    """Returns an array of amounts that are sums over the layers of a step.

    The amounts are operations, bytes without the head's weights, milliseconds, and the milliseconds of each of
    `LAYER_KINDS`. If no kernels were measured, the milliseconds are those of the whole step.
    """
    times = [step["kernel_milliseconds"].get(kind, 0.0) for kind in LAYER_KINDS]
    nbytes = step["floor_bytes"] - step["head_bytes"]
    return np.array([step["operations"], nbytes, sum(times) or step["milliseconds"], *times])


def _row(layer_type, layer, count, size, amounts, floor):
    """Returns the result for one of the `count` layers of a kind, or for a stack of `count` layers."""
    context, chunk = size
    operations, nbytes, milliseconds, *times = amounts.tolist()
    return {
        "layer_type": layer_type,
        "layer": layer,
        "layers": count,
        "context": context,
        "chunk": chunk,
        "flops": round(operations),
        "bytes": round(nbytes),
        "kernel_milliseconds": dict(zip(LAYER_KINDS, times, strict=True)),
        "milliseconds": milliseconds,
        "floor_milliseconds": floor,
        "percent_of_floor": 100 * floor / milliseconds,
        "tokens_per_second": 1e3 * chunk / milliseconds,
        "tflops": operations / milliseconds / 1e9,
    }
