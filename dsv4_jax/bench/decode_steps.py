"""`dsv4-jax bench layer` and `model`: the time of steps, and of their kernels; `prefill` measures with it, too."""

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
from dsv4_jax.bench.random_steps import DRAWS, RandomSteps, abstract_model, expert_memory
from dsv4_jax.bench.step_work import step_work
from dsv4_jax.bench.tables import ACCEPTANCES, MODELS, Row, kind_columns, layer_share, print_rows, tokens_per_second
from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.checkpoint.random_weights import random_model, select_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import BLOCK_TOKENS
from dsv4_jax.decode import CompiledModel
from dsv4_jax.host import KVCacheManager
from dsv4_jax.parallel.mesh import check_divisible, check_shardable
from dsv4_jax.quant import KVFormat


STEPS = DRAWS  # steps whose mean time is reported
CHUNK_STEPS = 4  # the same of steps with chunks of prompts
# Requests start this many tokens before the measured context, to end a measurement there.
MARGIN = 4 * STEPS
# Steps before the first measured one; XLA records its CUDA graphs in the second.
WARM_UP = 4
# Share of a GPU's memory for weights and cache; the rest is for programs, and for making the weights.
MAX_MEMORY = 0.88
MAX_DRAFTS = 8
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
# Columns of steps with drafts: the cost of verifying them, that of making them, and tokens a second.
DRAFT_COLUMNS = {
    "x one token": "{times_one_token:.2f}",
    "drafts ms": "{draft_milliseconds:.3f}",
    **{f"{rate:.0%} accepted": f"{{tokens_per_second[{rate}]:.0f}}" for rate in ACCEPTANCES},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a measurement. Those that are not listed are described in `dsv4-jax bench model`.

    Attributes:
      contexts: numbers of tokens that a request holds at the end of a measurement, or before a chunk of a prompt.
      chunks: numbers of tokens of one prompt that a step reads; empty for decode steps.
      mesh: the devices; None for the default one.
      expert_memory: bytes of the GPU for experts, "auto" for those that are left, or None for all experts.
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
    skew: tuple[float, ...] = (0.0,)
    kv_format: KVFormat | str = "v4"

    def check(self, config: DSV4Config) -> None:
        """Raises ValueError if an option is wrong for a model."""
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
        """Returns the tokens and drafts of a request in each kind of step."""
        if self.chunks:
            return [(chunk, 0) for chunk in self.chunks]
        verify = 1 + self.drafts
        return [(1, 0), (verify, 0), (verify, self.drafts)] if self.drafts else [(1, 0)]

    def cache_sizes(self, requests: int, context: int) -> dict[str, Any]:
        """Returns the sizes of a cache for so many requests of a context, and a chunk behind it."""
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
        """Returns the schema of the largest cache."""
        return CacheSchema(config, **self.cache_sizes(max(self.batches), max(self.contexts)))


def check_numbers(option: str, numbers: Sequence[int], minimum: int, maximum: int | None = None) -> None:
    """Raises ValueError unless an option has numbers, all of them from `minimum` to `maximum`; None = no maximum."""
    if not numbers:
        raise ValueError(f"--{option} needs at least one number")
    for number in numbers:
        if number < minimum or (maximum is not None and number > maximum):
            valid = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise ValueError(f"--{option} {number} must be {valid}")


def default_sizes(mesh: Mesh | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the batch sizes, of those that a mesh divides, and contexts that are measured by default."""
    gpu = jax.default_backend() == "gpu"
    shards = 1 if mesh is None else mesh.shape.get("data", 1)
    batches = (1, 8, 32, 128) if gpu else (1, 4)
    contexts = (4096, 65536) if gpu else (512, 4096)
    return {"batches": tuple(n for n in batches if n % shards == 0), "contexts": contexts}


@dataclasses.dataclass(frozen=True)
class StepCase:
    """One batch size at one context.

    Attributes:
      steps: the steps of requests to measure.
      context: number of tokens that a request holds at the end of a measurement, or before a chunk of a prompt.
      skew: skew of the model's routers.
    """

    steps: RandomSteps
    context: int
    skew: float = 0.0

    @property
    def count(self) -> int:
        """The number of steps that are measured."""
        return CHUNK_STEPS if self.steps.is_prefill else STEPS

    def begin(self, count: int) -> None:
        """Starts requests and runs some steps."""
        self.steps.start_requests(self.context - (0 if self.steps.is_prefill else MARGIN))
        for _ in range(count):
            jax.block_until_ready(self.steps.step(self.steps.batch()))

    def time(self, loop: bool) -> dict[str, float]:
        """Measures the milliseconds of a step, of its dispatch and, with `loop`, of a step of the on-device loop.

        The loop is measured only beside steps of one token a request, because its steps have one.
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
        """Returns the case's result, on a GPU with the times of its kernels; `times` is the result of `time`.

        The floor is the time to read the step's bytes at the report's rate of a copy. For a chunk of a prompt, the head
        does not count, and the floor is the time of the layers' products if that is longer.
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
    """Measures every batch size at every context that fits, then profiles and prints them, and yields the results.

    With drafts, each case is measured three times: with one token a request, with the tokens of a step that verifies
    drafts, and when such a step also drafts new tokens. Without a GPU, the packaged model replaces `config`. The rate
    of a copy, the clock, and the seconds until the first step are added to the report.

    Args:
      config: the model.
      options: what to measure.
      report: the report that the results belong to.
      each_kind: measure a model of layers of one kind, for each kind of the model's layers. Results then have their
        `layer_type`, and the on-device loop is measured on a mesh only.

    Raises:
      ValueError: an option is out of range.
    """
    config = measured_config(config, report)
    options.check(config)
    if not each_kind:
        yield from _run(config.first_layers(options.layers or config.num_hidden_layers), options, report)
        return
    count = 8 if jax.default_backend() == "gpu" else 1  # on a GPU so many that none finds its weights in the L2 cache
    for kind in dict.fromkeys(spec.kind for spec in config.specs):
        for row in _run(config.with_layers([kind] * count), options, report, loop=options.mesh is not None):
            yield {"layer_type": kind.layer_type} | row


def _run(config, options, report, *, loop=True):
    """Prints and yields the results of a model, or of as many of its layers as fit, if no number was chosen."""
    if not options.layers and options.expert_memory is None:
        config = config.first_layers(_max_layers(config, options))
    columns = COLUMNS | (DRAFT_COLUMNS if options.drafts else {})
    rows = _compare_with_one_token(measure(config, options, report, loop=loop))
    yield from print_rows(rows, columns, layer_share, batch=5, tokens=6)


def _compare_with_one_token(results):
    """Yields results, those of steps with drafts beside the step of one token a request at the same place."""
    rows_by_place: dict[tuple[Any, ...], list[Row]] = {}
    for row in results:
        rows = rows_by_place.setdefault((row["requests"], row["context"], row["skew"]), [])
        rows.append(row)
        if row["tokens"] > 1:
            row["times_one_token"] = row["milliseconds"] / rows[0]["milliseconds"]
        if row["drafts"]:
            row["draft_milliseconds"] = row["milliseconds"] - rows[1]["milliseconds"]
            row["tokens_per_second"] = tokens_per_second(row)
        yield row


def measure(config: DSV4Config, options: StepOptions, report: Row, *, loop: bool = True) -> Iterator[Row]:
    """Yields the results of a model; see `run`. `loop` is that of `StepCase.time`.

    All steps are timed before the first profile, because launches take up to twice as long after one. The rate of a
    copy is measured by a profile, too.
    """
    report["clock"] = "wall clock of steps, kernel time from CUPTI"
    config = config.with_drafts(options.drafts > 0)
    max_tokens = max(options.batches) * max(1 + options.drafts, *options.chunks, 0)
    experts = expert_memory(options.expert_memory, options.largest_cache(config), max_tokens)
    model = random_model(
        config,
        options.mesh,
        expert_parallel=options.expert_parallel,
        expert_memory=experts,
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
        cases[0].time(loop=False)  # a process launches its first steps slower
    requests = cases[0].steps.requests  # whose loops are measured, too
    times = [case.time(loop and case.steps.requests == requests) for case in _in_turn(cases, "timing steps")]
    copy = report["copy_bytes_per_second"] = timing.copy_bandwidth()
    if options.chunks:
        report["matmul_operations_per_second"] = timing.matmul_rate()
    kinds = ", ".join(dict.fromkeys(config.layer_types))
    print(
        f"{report['device']}, jax {report['jax']}. Layers of {MODELS[report['shapes']]}: "
        f"{config.num_hidden_layers} ({kinds}), {tree_bytes(nnx.state(model)) / 1e9:.2f} GB. Weights and cache are "
        f"read at {copy / 1e9:,.0f} GB/s at most.\n",
        flush=True,
    )
    for case, known in zip(_in_turn(cases, "profiling kernels"), times, strict=True):
        yield case.profile(known, report)


def _cases(config, model, options, skew):
    """Returns the cases that fit the device's memory; prints those that do not."""
    cases = []
    weights = tree_bytes(model.arrays)
    for requests in options.batches:
        sizes = {context: options.cache_sizes(requests, context) for context in sorted(options.contexts)}
        fitting = []
        for context, size in sizes.items():
            # Experts in pages leave room for every cache.
            if options.expert_memory is not None or _fits(weights, CacheSchema(config, **size), options.mesh):
                fitting.append(context)
            else:
                print(f"{requests} requests of {context} tokens do not fit this device's memory")
        for tokens, drafts in options.step_sizes if fitting else ():
            manager = KVCacheManager(config, mesh=options.mesh, **sizes[max(fitting)])
            steps = RandomSteps(model, manager, requests, tokens, drafts)
            cases += [StepCase(steps, context, skew) for context in fitting]
    return cases


def _start(case):
    """Compiles and runs a step; returns the age of the process, and the seconds to make the step's program."""
    case.begin(1)
    return {"process": timing.process_seconds()} | case.steps.program.seconds


def _in_turn(cases, title):
    """Yields the cases, below a progress bar; frees a cache after its last one."""
    last = {case.steps: case for case in cases}
    for case in track(cases, title, console=Console(stderr=True), transient=True):
        yield case
        if case is last[case.steps]:
            case.steps.free_cache()


def _max_layers(config, options):
    """Returns the number of layers whose weights fit the device's memory together with the largest cache."""

    def exceeds(count):
        few = config.first_layers(count).with_drafts(options.drafts > 0)
        model = abstract_model(few, options.mesh, expert_parallel=options.expert_parallel)
        return not _fits(tree_bytes(nnx.state(model)), options.largest_cache(few), options.mesh)

    return max(1, bisect.bisect_left(range(1, config.num_hidden_layers + 1), True, key=exceeds))


def _fits(weights, schema, mesh):
    """Returns whether weights and cache fit into the device's memory; True if its size is unknown."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit is None or weights + tree_bytes(KVCache.abstract(schema, mesh)) <= MAX_MEMORY * limit


def _steps_in_a_row(steps, count):
    """Measures seconds a step, with the host running ahead of the device as in a decode loop.

    The time begins when a step ends, behind which the next one is launched already. It does not begin with a launch,
    which can take longer than a step while the device is idle.
    """
    output, next_output = (steps.step(steps.batch()) for _ in range(2))
    jax.block_until_ready(output)
    begin = time.perf_counter()
    for _ in range(count - 1):
        next_output = steps.step(steps.batch())
    jax.block_until_ready(next_output)
    return (time.perf_counter() - begin) / count


def _dispatch(steps, count):
    """Measures the median seconds until a call returns, before its result is computed."""
    seconds = []
    for _ in range(count):
        batch = steps.batch()
        begin = time.perf_counter()
        output = steps.step(batch)
        seconds.append(time.perf_counter() - begin)
        jax.block_until_ready(output)
    return statistics.median(seconds)


def loop_seconds(steps: RandomSteps, count: int) -> float:
    """Measures seconds a step of the on-device loop of `count` steps, the second time that it runs."""
    seconds = 0.0
    for _ in range(2):  # the first compiles
        batch = steps.batch(reserve=count - 1)
        begin = time.perf_counter()
        jax.block_until_ready(steps.loop(batch, count))
        seconds = time.perf_counter() - begin
    return seconds / count


def _kernels(steps, count):
    """Returns the times of the kernels of a step on one GPU, from `count` steps."""
    devices = 1 if steps.manager.mesh is None else steps.manager.mesh.size

    def run():
        for _ in range(count):
            jax.block_until_ready(steps.step(steps.batch()))

    launches = timing.kernels(run)
    return kernel_report(launches, steps.program.call.as_text() or "", count * devices)
