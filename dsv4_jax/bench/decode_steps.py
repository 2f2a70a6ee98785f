"""`dsv4-jax bench layer` and `model`: the time of a step of the model, and of its kernels.

`bench.prefill` measures with this module, too.
"""

import bisect
import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import track

from dsv4_jax.bench import timing
from dsv4_jax.bench.cases import measured_config, tree_bytes
from dsv4_jax.bench.kernel_kinds import kernel_report
from dsv4_jax.bench.layer_slices import (
    chosen_layers,
    layer_kinds,
    numbers_label,
    slice_config,
    with_fitting_tables,
    with_sources,
)
from dsv4_jax.bench.random_steps import DRAWS, RandomSteps, abstract_model, expert_memory
from dsv4_jax.bench.step_work import step_work
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
from dsv4_jax.checkpoint.random_weights import random_model, select_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import BLOCK_TOKENS
from dsv4_jax.decode import CompiledModel
from dsv4_jax.expert_pages import HostTables
from dsv4_jax.host import KVCacheManager
from dsv4_jax.parallel.mesh import check_divisible, check_shardable
from dsv4_jax.quant import KVFormat


STEPS = DRAWS  # number of decode steps whose mean time is reported
CHUNK_STEPS = 4  # number of steps whose mean time is reported if they read chunks of prompts
# A request starts with this many tokens less than the measured context, so that it has grown to it when measured.
MARGIN = 4 * STEPS
# Number of steps before the first measured one; XLA records its CUDA graphs in the second.
WARM_UP = 4
# Share of a GPU's memory for weights and cache; the rest is for programs, and for making the weights.
MAX_MEMORY = 0.88
MAX_DRAFTS = 8  # maximum number of drafts if the model does not limit them
# {column of the printed table: format of its cell, with fields of a result}
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
# More columns if there are drafts: the time of a step relative to a step with one token a request, the time to make the
# drafts, and the tokens a second at several acceptance rates.
DRAFT_COLUMNS = {
    "x one token": "{times_one_token:.2f}",
    "drafts ms": "{draft_milliseconds:.3f}",
    **{f"{rate:.0%} accepted": f"{{tokens_per_second[{rate}]:.0f}}" for rate in ACCEPTANCES},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a measurement, mostly the options of `dsv4-jax bench model`.

    Attributes:
      batches: batch sizes to measure, in requests.
      contexts: contexts to measure: numbers of tokens that a request holds at the end of a measurement of decode steps,
        or before a chunk of a prompt.
      chunks: chunk sizes to measure: numbers of tokens of one prompt that a step reads; empty for decode steps.
      layers: number of the model's layers, see `layer_slices.chosen_layers`; 0 for all, or for as many as fit the
        device.
      drafts: number of tokens that a step drafts for each request; 0 for none.
      mesh: the devices; None for the default one.
      expert_parallel: whether each device gets whole experts instead of a shard of each expert.
      context_parallel: whether the compressed entries of a request are distributed over the devices.
      expert_memory: bytes of the GPU for experts; "auto" for all bytes that are left; None if no expert lies in host
        memory.
      host_tables: whether Engram's tables lie in host memory, see `expert_pages.HostTables`.
      skew: skews of the routers to measure, see `checkpoint.random_weights.random_model`.
      kv_format: storage format of the cache's rows; None = that of the model's release.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    chunks: tuple[int, ...] = ()
    layers: int = 0
    drafts: int = 0
    mesh: Mesh | None = None
    expert_parallel: bool = False
    context_parallel: bool = False
    expert_memory: int | Literal["auto"] | None = None
    host_tables: bool = False
    skew: tuple[float, ...] = (0.0,)
    kv_format: KVFormat | str | None = None

    def check(self, config: DSV4Config) -> None:
        """Raises ValueError if the mesh does not divide the model or a batch, or a number is out of range."""
        if self.mesh is not None:
            check_shardable(config, self.mesh.shape, self.expert_parallel)
            for requests in self.batches:
                check_divisible(self.mesh.shape, batches=requests)
        max_drafts = MAX_DRAFTS if config.drafts is None else config.drafts.max_drafts or MAX_DRAFTS
        longest = config.max_position_embeddings - max(self.chunks, default=0)
        check_numbers("batches", self.batches, 1)
        check_numbers("contexts", self.contexts, 0 if self.chunks else MARGIN + 1, longest)
        check_numbers("drafts", (self.drafts,), 0, max_drafts)
        check_numbers("layers", (self.layers,), 0, config.num_hidden_layers)

    @property
    def step_sizes(self) -> list[tuple[int, int]]:
        """The kinds of steps to measure: (tokens of a request in a step, tokens that the step then drafts for it)."""
        if self.chunks:
            return [(chunk, 0) for chunk in self.chunks]
        verify = 1 + self.drafts
        return [(1, 0), (verify, 0), (verify, self.drafts)] if self.drafts else [(1, 0)]

    def cache_sizes(self, requests: int, context: int) -> dict[str, Any]:
        """Returns the sizes of a cache, as arguments of `CacheSchema`.

        The cache has room for `requests` requests of `context` tokens, and for the largest chunk after these.
        """
        context += max(self.chunks, default=0)
        blocks = requests * -(-context // BLOCK_TOKENS)
        devices = self.mesh.size if self.mesh and self.context_parallel else 1
        return {
            "num_blocks": -(-blocks // devices) * devices,
            "max_requests": requests,
            "max_context": context,
            "max_query_tokens": 1 + self.drafts,
            "context_parallel": self.context_parallel,
            "kv_format": self.kv_format,
        }

    def largest_cache(self, config: DSV4Config) -> CacheSchema:
        """Returns the schema of the cache for the largest batch and the longest context."""
        return CacheSchema(config, **self.cache_sizes(max(self.batches), max(self.contexts)))


def check_numbers(option: str, numbers: Sequence[int], minimum: int, maximum: int | None = None) -> None:
    """Raises ValueError unless there is a number and all numbers are in a range.

    Args:
      option: name of the command-line option, for the message.
      numbers: values of the option.
      minimum: smallest valid number.
      maximum: largest valid number; None for no limit.
    """
    if not numbers:
        raise ValueError(f"--{option} needs at least one number")
    for number in numbers:
        if number < minimum or (maximum is not None and number > maximum):
            valid = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise ValueError(f"--{option} {number} must be {valid}")


def default_sizes(mesh: Mesh | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the default `batches` and `contexts`. The mesh's axis "data" divides every batch."""
    gpu = jax.default_backend() == "gpu"
    shards = 1 if mesh is None else mesh.shape.get("data", 1)
    batches = (1, 8, 32, 128) if gpu else (1, 4)
    contexts = (4096, 65536) if gpu else (512, 4096)
    return {"batches": tuple(n for n in batches if n % shards == 0), "contexts": contexts}


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A case to measure: steps of one batch size at one context.

    Attributes:
      steps: runs the steps, of one batch size and kind.
      context: number of tokens that a request holds at the end of a measurement, or before a chunk of a prompt.
      skew: skew of the model's routers, see `checkpoint.random_weights.random_model`.
    """

    steps: RandomSteps
    context: int
    skew: float = 0.0

    @property
    def count(self) -> int:
        """The number of steps that are measured."""
        return CHUNK_STEPS if self.steps.is_prefill else STEPS

    def begin(self, count: int) -> None:
        """Starts requests and runs `count` steps, each until it is complete."""
        self.steps.start_requests(self.context - (0 if self.steps.is_prefill else MARGIN))
        for _ in range(count):
            jax.block_until_ready(self.steps.step(self.steps.batch()))

    def time(self, loop: bool) -> dict[str, float]:
        """Measures a step by the wall clock.

        Args:
          loop: whether to measure the on-device loop, too. It is measured only for one token a request, because its
            steps have one.

        Returns:
          {"milliseconds": time of a step, "dispatch_milliseconds": time until the call of a step returns,
          "loop_milliseconds": time of a step of the on-device loop, if it is measured}.
        """
        self.begin(WARM_UP)
        seconds = {
            "milliseconds": _steps_in_a_row(self.steps, self.count),
            "dispatch_milliseconds": _dispatch(self.steps, self.count // 2),
        }
        if loop and self.steps.tokens == 1:
            seconds["loop_milliseconds"] = loop_seconds(self.steps, STEPS)
        return {name: 1e3 * value for name, value in seconds.items()}

    def profile(self, times: dict[str, float], report: Row) -> Row:
        """Returns the result of the case. On a GPU, it runs steps again to measure their kernels.

        The result has the floor, a lower bound of the time of a step. For a decode step, this is the time to read the
        step's bytes at the report's bandwidth of a copy. For a chunk of a prompt, it is the time to read the bytes
        except the head's weights, or the time of the layers' matrix products, whichever is longer.

        Args:
          times: the result of `time`.
          report: the report, with the measured rates of a copy and, for chunks, of a matrix product.
        """
        steps = self.steps
        schema = steps.manager.schema
        operations, nbytes, head = step_work(steps, self.context + (steps.tokens if steps.is_prefill else 0))
        floor = nbytes / report["copy_bytes_per_second"]
        if steps.is_prefill:
            products = operations / report["matmul_operations_per_second"]
            floor = max((nbytes - head) / report["copy_bytes_per_second"], products)
        row: Row = {
            "layers": schema.config.num_hidden_layers,
            "requests": steps.requests,
            "context": self.context,
            "skew": self.skew,
            "tokens": steps.tokens,
            "drafts": steps.drafts,
            **times,
            "operations": operations,
            "floor_bytes": nbytes,
            "head_bytes": head,
            "floor_milliseconds": 1e3 * floor,
            "percent_of_floor": 1e5 * floor / times["milliseconds"],
            "kernel_milliseconds": {},
            "cache_bytes": tree_bytes(KVCache.abstract(schema, steps.manager.mesh)),
        }
        if jax.default_backend() == "gpu":
            self.begin(1)
            row |= _kernels(steps, self.count)
            row["gap_milliseconds"] = times["milliseconds"] - sum(row["kernel_milliseconds"].values())
        return row


def run(config: DSV4Config, options: StepOptions, report: Row, *, each_kind: bool = False) -> Iterator[Row]:
    """Measures every batch size at every context that fits the device; prints and yields the results.

    All cases are timed first, then their kernels are profiled. With drafts, there are three kinds of steps. The first
    has one token a request. The second has 1 + drafts tokens a request, as to verify drafts. The third also makes new
    drafts. Without a GPU, the packaged model replaces `config`.

    Args:
      config: configuration of the model.
      options: the batch sizes, contexts and other options.
      report: the report that the results belong to. The bandwidth of a copy, the clock, and the seconds until the first
        step are added to it.
      each_kind: if True, measures for each kind of the model's layers a model that has only layers of this kind, and
        those that store or select entries for them. Each result then has the `layer_type` and the `layer_numbers`, and
        the on-device loop is measured only on a mesh.

    Raises:
      ValueError: an option is out of range.
    """
    config = measured_config(config, report)
    options.check(config)
    if not each_kind:
        count = options.layers or config.num_hidden_layers
        if not options.layers and options.expert_memory is None:
            count = _max_layers(config, options)
        layers = chosen_layers(config, count)
        yield from _run(slice_config(config, layers), options, report, numbers_label(layers))
        return
    count = 8 if jax.default_backend() == "gpu" else 1  # with 8, no layer finds its weights in the GPU's L2 cache
    for layer in layer_kinds(config):
        layers = with_sources(config, [layer])
        label = numbers_label(layers) + (f" x {count}" if count > 1 else "")
        for row in _run(kind_config(config, layers, count), options, report, label, loop=options.mesh is not None):
            yield {"layer_type": config.specs[layer].layer_type} | row


def kind_config(config: DSV4Config, layers: Sequence[int], repeats: int = 1) -> DSV4Config:
    """Returns the configuration of some layers as `slice_config` does, but without experts by token id."""
    sliced = slice_config(config, layers, repeats)
    return dataclasses.replace(sliced, mlp_layer_types=("moe",) * sliced.num_hidden_layers)


def _run(config, options, report, layer_numbers, *, loop=True):
    """Prints and yields the results of a model, whose layers have `layer_numbers` in the whole model, a text."""
    print(f"Numbers of the layers in {model_title(report['shapes'])}: {layer_numbers}")
    columns = COLUMNS | (DRAFT_COLUMNS if options.drafts else {})
    rows = _compare_with_one_token(measure(config, options, report, loop=loop))
    for row in print_rows(rows, columns, layer_share, batch=5, tokens=6):
        yield {"layer_numbers": layer_numbers} | row


def _compare_with_one_token(results):
    """Yields results. Adds the fields of `DRAFT_COLUMNS` to the results of steps that verify or make drafts.

    A result is compared with the earlier results of the same batch size, context and skew.
    """
    rows_by_place: dict[tuple[Any, ...], list[Row]] = {}
    for row in results:
        rows = rows_by_place.setdefault((row["requests"], row["context"], row["skew"]), [])
        rows.append(row)  # in the order of `StepOptions.step_sizes`
        if row["tokens"] > 1:
            one_token = rows[0]
            row["times_one_token"] = row["milliseconds"] / one_token["milliseconds"]
        if row["drafts"]:
            only_verifies = rows[1]
            row["draft_milliseconds"] = row["milliseconds"] - only_verifies["milliseconds"]
            row["tokens_per_second"] = tokens_per_second(row)
        yield row


def measure(config: DSV4Config, options: StepOptions, report: Row, *, loop: bool = True) -> Iterator[Row]:
    """Makes the model and yields the results of all cases.

    All steps are timed before the first profile, because launches take up to twice as long after a profile. The
    bandwidth of a copy is measured with a profile, too, and so after the steps.

    Args:
      config: configuration of the model.
      options: the batch sizes, contexts and other options.
      report: the report, to which the clock, the measured rates and the seconds until the first step are added.
      loop: whether the on-device loop is measured, too. It is measured only for the first batch size.
    """
    report["clock"] = "wall clock of steps, kernel time from CUPTI"
    config = reduce_tables(config.with_drafts(options.drafts > 0), options, report)
    max_tokens = max(options.batches) * max(1 + options.drafts, *options.chunks, 0)
    experts = expert_memory(options.expert_memory, options.largest_cache(config), max_tokens)
    model = random_model(
        config,
        options.mesh,
        expert_parallel=options.expert_parallel,
        expert_memory=experts,
        host_tables=HostTables() if options.host_tables else None,
        skew=max(options.skew),
    )
    if experts is not None:
        report["host_bytes"] = experts.host_bytes
    cases: list[StepCase] = []
    for skew in options.skew:
        if len(options.skew) > 1:
            select_experts(model, config, skew)
        cases += _cases(config, CompiledModel(model, experts), options, skew)
    if not cases:
        return
    report.setdefault("start", _start(cases[0]))
    if jax.default_backend() == "gpu":
        cases[0].time(loop=False)  # the first steps of a process are launched more slowly
    requests = cases[0].steps.requests  # the loop is measured for this batch size only
    times = [case.time(loop and case.steps.requests == requests) for case in _in_turn(cases, "timing steps")]
    copy = report["copy_bytes_per_second"] = timing.copy_bandwidth()
    if options.chunks:
        report["matmul_operations_per_second"] = timing.matmul_rate()
    kinds = ", ".join(dict.fromkeys(config.layer_types))
    print(
        f"{report['device']}, jax {report['jax']}. Layers of {model_title(report['shapes'])}: "
        f"{config.num_hidden_layers} ({kinds}), {tree_bytes(nnx.state(model)) / 1e9:.2f} GB. Weights and cache are "
        f"read at {copy / 1e9:,.0f} GB/s at most.\n",
        flush=True,
    )
    for case, known in zip(_in_turn(cases, "profiling kernels"), times, strict=True):
        yield case.profile(known, report)


def reduce_tables(config: DSV4Config, options: Any, report: Row) -> DSV4Config:
    """Returns the configuration with Engram's tables reduced to what the machine holds; reports and prints if they are.

    Args:
      config: configuration of the model.
      options: options with a `mesh`, an `expert_memory` and `host_tables`.
      report: the report, to which the numbers of rows are added.
    """
    reduced = _with_fitting_tables(config, options)
    if config.engram is not None and reduced.engram is not None and reduced != config:
        sizes = {"engram_rows": reduced.engram.num_embeddings, "engram_rows_of_release": config.engram.num_embeddings}
        report |= sizes
        rows, whole = (" and ".join(f"{count:,}" for count in counts) for counts in sizes.values())
        print(f"Engram's tables have {rows} rows, not {whole}, which this machine does not hold")
    return reduced


def _with_fitting_tables(config, options):
    devices = 1 if options.mesh is None else options.mesh.shape.get("model", 1)
    return with_fitting_tables(config, devices, on_host=options.host_tables or options.expert_memory is not None)


def _cases(config, model, options, skew):
    """Returns the cases whose cache fits the device's memory beside the weights; prints those that do not fit."""
    cases = []
    weights = tree_bytes(model.arrays)
    for requests in options.batches:
        sizes = {context: options.cache_sizes(requests, context) for context in sorted(options.contexts)}
        fitting = []
        for context, size in sizes.items():
            # With `expert_memory`, experts move to host memory until there is room for the largest cache.
            if options.expert_memory is not None or _fits(weights, CacheSchema(config, **size), options.mesh):
                fitting.append(context)
            else:
                print(f"{requests} requests of {context} tokens do not fit this device's memory")
        if not fitting:
            continue
        for tokens, drafts in options.step_sizes:
            manager = KVCacheManager(config, mesh=options.mesh, **sizes[max(fitting)])
            steps = RandomSteps(model, manager, requests, tokens, drafts)
            cases += [StepCase(steps, context, skew) for context in fitting]
    return cases


def _start(case):
    """Compiles and runs a step. Returns the seconds since the process started, and the seconds to make the program."""
    case.begin(1)
    return {"process": timing.process_seconds()} | case.steps.program.seconds


def _in_turn(cases, title):
    """Yields the cases one by one and shows a progress bar. Frees a cache after the last case that uses it."""
    last = {case.steps: case for case in cases}
    for case in track(cases, title, console=Console(stderr=True), transient=True):
        yield case
        if case is last[case.steps]:
            case.steps.free_cache()


def _max_layers(config, options):
    """Returns the number of layers whose weights fit the device's memory together with the largest cache."""

    def exceeds(count):
        few = slice_config(config, chosen_layers(config, count)).with_drafts(options.drafts > 0)
        few = _with_fitting_tables(few, options)
        model = abstract_model(few, options.mesh, expert_parallel=options.expert_parallel)
        return not _fits(tree_bytes(nnx.state(model)), options.largest_cache(few), options.mesh)

    return max(1, bisect.bisect_left(range(1, config.num_hidden_layers + 1), True, key=exceeds))


def _fits(weights, schema, mesh):
    """Returns whether `weights` bytes and a cache fit the device's memory; True if the memory's size is unknown."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit is None or weights + tree_bytes(KVCache.abstract(schema, mesh)) <= MAX_MEMORY * limit


def _steps_in_a_row(steps, count):
    """Measures the seconds of a step, while the host runs ahead of the device as in a decode loop.

    The clock starts when a step ends and the next one is already launched. It does not start at a launch, because a
    launch on an idle device can take longer than a step.
    """
    output = steps.step(steps.batch())
    next_output = steps.step(steps.batch())
    jax.block_until_ready(output)
    begin = time.perf_counter()
    for _ in range(count - 1):
        next_output = steps.step(steps.batch())
    jax.block_until_ready(next_output)
    return (time.perf_counter() - begin) / count


def _dispatch(steps, count):
    """Measures the median seconds until the call of a step returns, which is before its result is computed."""
    seconds = []
    for _ in range(count):
        batch = steps.batch()
        begin = time.perf_counter()
        output = steps.step(batch)
        seconds.append(time.perf_counter() - begin)
        jax.block_until_ready(output)
    return statistics.median(seconds)


def loop_seconds(steps: RandomSteps, count: int) -> float:
    """Measures the seconds of a step of the on-device loop of `count` steps.

    The loop runs twice, and the second run is measured.
    """
    seconds = 0.0
    for _ in range(2):  # the first run compiles
        batch = steps.batch(reserve=count - 1)
        begin = time.perf_counter()
        jax.block_until_ready(steps.loop(batch, count))
        seconds = time.perf_counter() - begin
    return seconds / count


def _kernels(steps, count):
    """Runs `count` steps and returns the mean times of a step's kernels on one GPU, see `kernel_report`."""
    devices = 1 if steps.manager.mesh is None else steps.manager.mesh.size

    def run():
        for _ in range(count):
            jax.block_until_ready(steps.step(steps.batch()))

    launches = timing.kernels(run)
    return kernel_report(launches, steps.program.call.as_text() or "", count * devices)
