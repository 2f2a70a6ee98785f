"""`dsv4-jax bench layer` and `model`: the time of a step of the model, and of its kernels.

`bench.prefill` measures with this module, too.
"""

import bisect
from collections.abc import Iterator

import jax
from flax import nnx
from rich.console import Console
from rich.progress import track

from dsv4_jax.bench import layer_slices, timing
from dsv4_jax.bench.cases import measured_config, tree_bytes
from dsv4_jax.bench.random_steps import RandomSteps
from dsv4_jax.bench.step_cases import StepCase
from dsv4_jax.bench.step_options import StepOptions
from dsv4_jax.bench.tables import (
    ACCEPTANCES,
    Row,
    kind_columns,
    layer_share,
    model_title,
    print_rows,
    tokens_per_second,
)
from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.checkpoint.random_weights import abstract_model, select_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel
from dsv4_jax.host import KVCacheManager


# Weights and cache may take this share of a GPU's memory. The rest is for programs and for making the weights.
MAX_MEMORY = 0.88
# `COLUMNS` maps the title of each printed column to the format of its cells, with names of a result's fields in braces.
COLUMNS = {
    "batch": "{requests}",
    "context": "{context}",
    "tokens": "{tokens}",
    "drafts": "{drafts}",
    "skew": "{skew}",
    "step ms": "{milliseconds:.3f}",
    "% of floor": "{percent_of_floor:.1f}",
    "loop ms": "{loop_milliseconds:.3f}",
    "call ms": "{dispatch_milliseconds:.3f}",
    "head ms": "{outside:.3f}",
    "layer us": "{layer:.1f}",
    "floor us": "{layer_floor:.1f}",
    **kind_columns("kinds", 1),
    "gaps": "{gaps:.1f}",
    "launches": "{launches:.0f}",
}
# Further columns of a table with drafts: the time of a step divided by that of a step with one token a request, the
# time to make the drafts, and the tokens a second at each rate of `ACCEPTANCES`.
DRAFT_COLUMNS = {
    "x one token": "{times_one_token:.2f}",
    "drafts ms": "{draft_milliseconds:.3f}",
    **{f"{rate:.0%} accepted": f"{{tokens_per_second[{rate}]:.0f}}" for rate in ACCEPTANCES},
}


def run(config: DSV4Config, options: StepOptions, report: Row, *, each_kind: bool = False) -> Iterator[Row]:
    """Measures every batch size at every context that fits the device; prints and yields the results.

    All cases are timed first, then their kernels are profiled. With drafts, there are three kinds of steps. The first
    has one token a request. The second has 1 + drafts tokens a request, as when drafts are verified. The third also
    makes new drafts. Without a GPU, the packaged model replaces a released model.

    Args:
      config: configuration of the model.
      options: the batch sizes, contexts and other options.
      report: the report that the results belong to. The bandwidth of a copy, the clock, and the seconds until the first
        step are added to it.
      each_kind: if True, measures a small model for each kind of layers. The small model has only layers of this kind,
        and the layers whose entries or selections they read. Each result then also has the `layer_type`, and the
        on-device loop is measured only on a mesh.

    Raises:
      ValueError: an option is out of range.
    """
    config = measured_config(config, report)
    options.check(config)
    if not each_kind:
        num_layers = config.num_hidden_layers
        count = options.layers or (_max_layers(config, options) if options.expert_memory is None else num_layers)
        layers = layer_slices.chosen_layers(config, count)
        label = layer_slices.numbers_label(layers)
        yield from _run(layer_slices.slice_config(config, layers), options, report, label)
        return
    count = 8 if jax.default_backend() == "gpu" else 1  # with 8, no layer finds its weights in the GPU's L2 cache
    for layer in layer_slices.layer_kinds(config):
        layers = layer_slices.with_sources(config, [layer])
        label = layer_slices.numbers_label(layers) + (f" x {count}" if count > 1 else "")
        small_config = layer_slices.slice_config(config, layers, count, hashed=False)
        for row in _run(small_config, options, report, label, loop=options.mesh is not None):
            yield {"layer_type": config.specs[layer].layer_type} | row


def _run(config, options, report, layer_numbers, *, loop=True):
    """Prints and yields a model's results. `layer_numbers` is text that lists the measured layers, such as "0-3"."""
    print(f"Numbers of the layers in {model_title(report['shapes'])}: {layer_numbers}")
    columns = COLUMNS | DRAFT_COLUMNS if options.drafts else COLUMNS
    rows = _compare_with_one_token(measure(config, options, report, loop=loop))
    for row in print_rows(rows, columns, layer_share, batch=5, tokens=6):
        yield {"layer_numbers": layer_numbers} | row


def _compare_with_one_token(results):
    """Yields the results, with the fields of `DRAFT_COLUMNS` added if a step verifies or makes drafts.

    A result is compared with the earlier results of the same batch size, context and skew.
    """
    rows_by_place = {}  # {(requests, context, skew): results so far}
    for row in results:
        rows = rows_by_place.setdefault((row["requests"], row["context"], row["skew"]), [])
        rows.append(row)  # in the order of `StepOptions.step_sizes`
        if row["tokens"] > 1:
            row["times_one_token"] = row["milliseconds"] / rows[0]["milliseconds"]
        if row["drafts"]:
            row["draft_milliseconds"] = row["milliseconds"] - rows[1]["milliseconds"]  # minus a step that only verifies
            row["tokens_per_second"] = tokens_per_second(row)
        yield row


def measure(config: DSV4Config, options: StepOptions, report: Row, *, loop: bool = True) -> Iterator[Row]:
    """Makes the model and yields the results of all cases.

    All steps are timed before the first profile, because launches take up to twice as long after a profile. The
    bandwidth of a copy is measured with a profile, too, and therefore after the steps.

    Args:
      config: configuration of the model.
      options: the batch sizes, contexts and other options.
      report: the report, to which the clock, the measured rates and the seconds until the first step are added.
      loop: whether the on-device loop is measured, too. It is measured only for the first batch size.
    """
    report["clock"] = "wall clock of steps, kernel time from CUPTI"
    config = options.fit_tables(config.with_drafts(options.drafts > 0), report)
    max_tokens = max(options.batches) * max(1 + options.drafts, *options.chunks, 0)
    model = options.make_model(config, options.largest_cache(config), max_tokens, max(options.skew))
    if model.expert_memory is not None:
        report["host_bytes"] = model.expert_memory.host_bytes
    cases = []
    for skew in options.skew:
        if len(options.skew) > 1:
            module = model.module
            select_experts(module, config, skew)
            model = CompiledModel(module, model.expert_memory)
        cases += _cases(config, model, options, skew)
    if not cases:
        return
    cases[0].begin(1)  # compiles the step's program
    report.setdefault("start", {"process": timing.process_seconds()} | cases[0].steps.program.seconds)
    if jax.default_backend() == "gpu":
        cases[0].time(loop=False)  # the first steps of a process are launched more slowly
    requests = cases[0].steps.requests  # the loop is measured for this batch size only
    times = [case.time(loop and case.steps.requests == requests) for case in _in_turn(cases, "timing steps")]
    copy_rate = report["copy_bytes_per_second"] = timing.copy_bandwidth()
    if options.chunks:
        report["matmul_operations_per_second"] = timing.matmul_rate()
    kinds = ", ".join(dict.fromkeys(config.layer_types))
    print(
        f"{report['device']}, jax {report['jax']}. Layers of {model_title(report['shapes'])}: "
        f"{config.num_hidden_layers} ({kinds}), {tree_bytes(model.arrays) / 1e9:.2f} GB. Weights and cache are "
        f"read at {copy_rate / 1e9:,.0f} GB/s at most.\n",
        flush=True,
    )
    for case, case_times in zip(_in_turn(cases, "profiling kernels"), times, strict=True):
        yield case.profile(case_times, report)


def _cases(config, model, options, skew):
    """Returns the cases whose cache fits the device's memory beside the weights; prints those that do not fit."""
    cases = []
    weights = tree_bytes(model.arrays)
    for requests in options.batches:
        contexts = []
        for context in sorted(options.contexts):
            schema = CacheSchema(config, **options.cache_sizes(requests, context))
            # If there is `expert_memory`, experts move to host memory until there is room for the largest cache.
            if options.expert_memory is not None or _fits(weights, schema, options.mesh):
                contexts.append(context)
            else:
                print(f"{requests} requests of {context} tokens do not fit this device's memory")
        for tokens, drafts in options.step_sizes if contexts else ():
            manager = KVCacheManager(config, mesh=options.mesh, **options.cache_sizes(requests, max(contexts)))
            steps = RandomSteps(model, manager, requests, tokens, drafts, options.batch_invariant)
            cases += [StepCase(steps, context, skew) for context in contexts]
    return cases


def _in_turn(cases, title):
    """Yields the cases one by one and shows a progress bar. Frees a cache after the last case that uses it."""
    last_cases = {case.steps: case for case in cases}
    for case in track(cases, title, console=Console(stderr=True), transient=True):
        yield case
        if case is last_cases[case.steps]:
            case.steps.cache = None


def _max_layers(config, options):
    """Returns the number of layers whose weights fit the device's memory together with the largest cache."""

    def exceeds(count):
        """Returns whether a model of `count` layers does not fit."""
        few = layer_slices.slice_config(config, layer_slices.chosen_layers(config, count))
        few = options.fit_tables(few.with_drafts(options.drafts > 0))
        model = abstract_model(few, options.mesh, expert_parallel=options.expert_parallel)
        return not _fits(tree_bytes(nnx.state(model)), options.largest_cache(few), options.mesh)

    return max(1, bisect.bisect_left(range(1, config.num_hidden_layers + 1), True, key=exceeds))


def _fits(weights, schema, mesh):
    """Returns whether `weights` bytes and a cache fit the device's memory; True if the memory's size is unknown."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit is None or weights + tree_bytes(KVCache.abstract(schema, mesh)) <= MAX_MEMORY * limit
