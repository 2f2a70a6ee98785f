"""`dsv4-jax bench step`, `layer` and `model`: the time of decode steps, and of their kernels."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress

from dsv4_jax.bench import timing
from dsv4_jax.bench.attention_stack import DRAWS, AttentionStack, StackDecoder, floor_bytes
from dsv4_jax.bench.cases import small_config, tree_bytes
from dsv4_jax.bench.kernel_kinds import kernel_report
from dsv4_jax.bench.model_stack import abstract_stack, random_stack
from dsv4_jax.bench.tables import LiveTable, draft_lines, step_cells, tokens_per_second
from dsv4_jax.cache import CacheSchema, KVCache
from dsv4_jax.checkpoint.random_weights import select_experts
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import BLOCK_TOKENS
from dsv4_jax.decode import CompiledModel
from dsv4_jax.expert_pages import ExpertMemory, program_bytes
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import shardings
from dsv4_jax.parallel.mesh import check_divisible, check_shardable
from dsv4_jax.quant import KVFormat


STEPS = DRAWS  # steps whose mean time is reported
# Requests start this many tokens before the measured context, to end a measurement there.
MARGIN = 4 * STEPS
# Steps before the first measured one; XLA records its CUDA graphs in the second.
WARM_UP = 4
# Share of a GPU's memory for weights and cache; the rest is for programs, and for making the weights.
MAX_MEMORY = 0.88
# By a report's "shapes". Without a GPU, "tiny" replaces the requested model.
MODELS = dict(flash="V4-Flash", pro="V4-Pro", flash_0731="V4-Flash-0731", pro_0813="V4-Pro-0813", tiny="a tiny model")
MAX_DRAFTS = 8
# Layers of one kind that `bench layer` runs on a GPU, so that none finds its weights in the L2 cache.
LAYERS_OF_A_KIND = 8
# Default batch sizes and contexts, with a GPU and without.
DEFAULTS = dict(
    step=dict(gpu=((1, 8, 32), (4096, 65536, 1048576)), cpu=((1, 4), (512, 4096))),
    model=dict(gpu=((1, 8, 32, 128), (4096, 65536)), cpu=((1, 4), (512, 4096))),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of a measurement, named and described as those of `dsv4-jax bench model`.

    None for batches or contexts stands for those of `DEFAULTS`. `whole` says whether layers include experts and
    hyper-connections. The devices are those of `mesh`, None for the default one, and `expert_memory` is bytes of the
    GPU, "auto" for what is left, or None for all experts.
    """

    batches: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    layers: int = 0
    trace: Path | None = None
    drafts: int = 0
    whole: bool = False
    mesh: Mesh | None = None
    expert_parallel: bool = False
    context_parallel: bool = False
    expert_memory: int | Literal["auto"] | None = None
    skew: tuple[float, ...] = (0.0,)

    def cases(self, config: DSV4Config, device: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the batch sizes and contexts on a "gpu" or "cpu"; raises ValueError if an option is wrong."""
        sizes, longest = {} if self.mesh is None else self.mesh.shape, config.max_position_embeddings
        batches, contexts = DEFAULTS["model" if self.whole else "step"][device]
        batches = tuple(n for n in batches if n % sizes.get("data", 1) == 0) if self.batches is None else self.batches
        contexts = contexts if self.contexts is None else self.contexts
        for requests in batches:
            check_divisible(sizes, batches=requests)
            if requests < 1:
                raise ValueError(f"--batches {requests} must be at least 1")
        for context in contexts:
            if not MARGIN < context <= longest:
                raise ValueError(f"--contexts {context} must be from {MARGIN + 1} to {longest} tokens")
        if not batches or not contexts:
            raise ValueError("--batches and --contexts need at least one number each")
        limit = None if config.drafts is None else config.drafts.max_drafts
        if self.drafts > (most := limit or MAX_DRAFTS):
            raise ValueError(f"--drafts {self.drafts} must be at most {most}")
        if not 0 <= self.layers <= config.num_hidden_layers:
            raise ValueError(f"--layers {self.layers} must be from 0 (all) to {config.num_hidden_layers}")
        return batches, contexts


@dataclasses.dataclass(frozen=True)
class StepCase:
    """One batch size at one context, the number of tokens that a request holds at the end of a measurement.

    Its `skew` is that of the stack's routers.
    """

    decoder: StackDecoder
    context: int
    skew: float = 0.0

    def start(self, report: dict[str, Any]) -> None:
        """Compiles and runs a step, and adds its compilation time and the age of the process to the report."""
        self.decoder.start_requests(self.context - MARGIN)
        jax.block_until_ready(self.decoder.step(self.decoder.batch()))
        report.setdefault("start", dict(process=round(timing.process_seconds(), 2), **self.decoder.compile_seconds))

    def time(self, loop: bool) -> dict[str, float]:
        """Measures the milliseconds of a step, of its dispatch and, with `loop`, of a step of the on-device loop.

        The loop has one token a request, so that of steps with more is not measured.
        """
        decoder = self.decoder
        decoder.start_requests(self.context - MARGIN)
        for _ in range(WARM_UP):
            jax.block_until_ready(decoder.step(decoder.batch()))
        times = dict(milliseconds=_steps_in_a_row(decoder), dispatch_milliseconds=_dispatch(decoder))
        if loop and decoder.tokens == 1:
            for _ in range(2):  # the first compiles
                batch = decoder.batch(reserve=STEPS - 1)
                begin = time.perf_counter()
                jax.block_until_ready(decoder.loop(batch, STEPS))
                times["loop_milliseconds"] = (time.perf_counter() - begin) / STEPS
        return {name: 1e3 * seconds for name, seconds in times.items()}

    def profile(self, times: dict[str, float], copy: float, trace: Path | None) -> dict[str, Any]:
        """Returns the case's result, on a GPU with the times of its kernels; `times` is the result of `time`.

        The floor is the time to read its bytes at the rate of a copy, `copy` bytes a second.
        """
        decoder, nbytes = self.decoder, floor_bytes(self.decoder, self.context)
        floor = 1e3 * nbytes / copy
        result: dict[str, Any] = dict(requests=decoder.requests, context=self.context, skew=self.skew)
        result |= dict(tokens=decoder.tokens, drafts=decoder.drafts, **times, floor_bytes=nbytes)
        result |= dict(floor_milliseconds=floor, percent_of_floor=100 * floor / times["milliseconds"])
        result |= dict(cache_bytes=_cache_bytes(decoder.manager.schema, decoder.manager.mesh), kernel_milliseconds={})
        if jax.default_backend() == "gpu":
            decoder.start_requests(self.context - MARGIN)
            with jax.profiler.trace(str(trace)) if trace else contextlib.nullcontext():
                result |= _kernels(decoder)
            result["gap_milliseconds"] = times["milliseconds"] - sum(result["kernel_milliseconds"].values())
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def run(
    config: DSV4Config, kv_format: KVFormat, options: StepOptions, report: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measures every batch size at every context that fits, then profiles and prints them, and yields the results.

    With drafts, each case is measured three times: with one token a request, with the tokens of a step that verifies
    drafts, and when such a step also drafts new tokens. Without a GPU, the packaged model replaces `config`. The rate
    of a copy, the clock, and the seconds until the first step are added to the report. Raises ValueError if an option
    is out of range.
    """
    config, small = _choose_model(config, report)
    options.cases(config, "cpu" if small else "gpu")
    layers = options.layers
    if options.whole and not layers and not small and options.expert_memory is None:
        layers = _max_layers(config, kv_format, options)
    yield from _measure(config.first_layers(layers or config.num_hidden_layers), kv_format, options, report)


def run_kinds(
    config: DSV4Config, kv_format: KVFormat, options: StepOptions, report: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measures layers of one kind, for each kind of the model, like `run`. Results also have their `layer_type`.

    The on-device loop is measured on a mesh only.
    """
    config, small = _choose_model(config, report)
    for spec in dict.fromkeys(spec.kind for spec in config.specs):
        layers = config.with_layers([spec] * (1 if small else LAYERS_OF_A_KIND))
        for row in _measure(layers, kv_format, options, report, loop=options.mesh is not None):
            yield dict(layer_type=spec.layer_type) | row


def _choose_model(config, report):
    """Returns the configuration to measure, and whether it is a tiny model's because there is no GPU."""
    report["clock"] = "wall clock of steps, kernel time from CUPTI"
    if jax.default_backend() == "gpu":
        return config, False
    report["shapes"] = "tiny"
    return small_config(config), True


def _measure(config, kv_format, options, report, loop=True):
    """Yields the results of all layers of `config`.

    All steps are timed before the first profile, because launches take up to twice as long after one. The rate of a
    copy comes from a profile, too.
    """
    config = config.with_drafts(options.drafts > 0)
    if options.mesh is not None:
        check_shardable(config, options.mesh.shape, options.expert_parallel)
    if options.whole:
        experts = _expert_memory(config, kv_format, options)
        placing: dict[str, Any] = dict(expert_parallel=options.expert_parallel, expert_memory=experts)
        layers = random_stack(config, options.mesh, **placing, skew=max(options.skew))
        if experts is not None:
            report["host_bytes"] = experts.host_bytes
    else:
        layers = AttentionStack(config, nnx.Rngs(0))
        if options.mesh is not None:
            layers = jax.device_put(layers, shardings(layers, options.mesh))
    cases: list[StepCase] = []
    for skew in options.skew if options.whole else (0.0,):
        if len(options.skew) > 1:
            select_experts(layers, config, skew)
        cases += _cases(config, CompiledModel(layers), kv_format, options, skew)
    if not cases:
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("timing steps, then their kernels", total=2 * len(cases))
        cases[0].start(report)
        if jax.default_backend() == "gpu":
            cases[0].time(loop=False)  # a process launches its first steps slower
        requests = cases[0].decoder.requests  # whose loops are measured, too
        times = [case.time(loop and case.decoder.requests == requests) for case in _in_turn(cases, progress, bar)]
        copy = report["copy_bytes_per_second"] = timing.copy_bandwidth()
        gigabytes = tree_bytes(nnx.state(layers)) / 1e9
        unit, lines = "Microseconds a layer" if options.whole else "Milliseconds a step", LiveTable(batch=5, tokens=6)
        kinds = ", ".join(dict.fromkeys(config.layer_types))
        print(
            f"{report['device']}, jax {report['jax']}. {'Whole' if options.whole else 'Attention'} layers of "
            f"{MODELS[report['shapes']]}: {config.num_hidden_layers} ({kinds}), {gigabytes:.2f} GB. "
            f"{unit}; floor: weights and cache read once at {copy / 1e9:,.0f} GB/s.\n",
            flush=True,
        )
        rows_by_place: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for case, known in zip(_in_turn(cases, progress, bar), times, strict=True):
            row = dict(layers=config.num_hidden_layers)
            row |= case.profile(known, copy, options.trace if case is cases[-1] else None)
            lines.add(step_cells(row, config.num_hidden_layers if options.whole else None))
            rows = rows_by_place.setdefault((row["requests"], row["context"], row["skew"]), [])
            rows.append(row)
            if row["tokens"] > 1:
                row["times_one_token"] = round(row["milliseconds"] / rows[0]["milliseconds"], 4)
            if row["drafts"]:
                row["draft_milliseconds"] = round(row["milliseconds"] - rows[1]["milliseconds"], 4)
                row["tokens_per_second"] = tokens_per_second(row)
            yield row
    print(draft_lines(rows_by_place) if options.drafts else "", flush=True)


def _cases(config, stack, kv_format, options, skew) -> list[StepCase]:
    """Returns the cases that fit the device's memory; prints those that do not."""
    batches, contexts = options.cases(config, "gpu" if jax.default_backend() == "gpu" else "cpu")
    drafts, weights = options.drafts, tree_bytes(stack.arrays)
    # Tokens and drafts of a request in a step.
    steps = [(1, 0), (1 + drafts, 0), (1 + drafts, drafts)] if drafts else [(1, 0)]
    cases = []
    for requests in batches:
        sizes = {context: _sizes(requests, context, kv_format, options) for context in contexts}
        # Experts in pages leave room for every cache.
        paged = options.expert_memory is not None
        fitting = sorted(c for c in sizes if paged or _fits(config, weights, sizes[c], options.mesh))
        for context in sorted(set(contexts) - set(fitting)):
            print(f"{requests} requests of {context} tokens do not fit this device's memory")
        for step in steps if fitting else ():
            manager = KVCacheManager(config, mesh=options.mesh, **sizes[max(fitting)])
            decoder = StackDecoder(stack, manager, requests, *step)
            cases += [StepCase(decoder, context, skew) for context in fitting]
    return cases


def _in_turn(cases: list[StepCase], progress: Progress, bar: Any) -> Iterator[StepCase]:
    """Yields the cases; frees a decoder's cache after its last one."""
    last = {case.decoder: case for case in cases}
    for case in cases:
        yield case
        progress.advance(bar)
        if case is last[case.decoder]:
            case.decoder.free_cache()


def _max_layers(config, kv_format, options):
    """Returns the number of layers whose weights fit the device's memory together with the largest cache."""
    limit = MAX_MEMORY * jax.devices()[0].memory_stats()["bytes_limit"]
    batches, contexts = options.cases(config, "gpu")
    sizes = _sizes(max(batches), max(contexts), kv_format, options)
    stack = abstract_stack(config, options.mesh)
    layer_bytes = [tree_bytes(nnx.state(layer)) for layer in stack.layers]
    others = tree_bytes(nnx.state(stack)) - sum(layer_bytes)  # the layers that draft

    def fits(count):
        cache = _cache_bytes(CacheSchema(config.first_layers(count), **sizes), options.mesh)
        return sum(layer_bytes[:count]) + others + cache <= limit

    return max([1, *(count for count in range(1, config.num_hidden_layers + 1) if fits(count))])


def _expert_memory(config, kv_format, options):
    """Returns where the experts will lie, with room for the largest cache; None if all stay on the devices."""
    if options.expert_memory is None:
        return None
    if options.expert_memory != "auto":
        return ExpertMemory(options.expert_memory)
    batches, contexts = options.cases(config, "gpu")
    schema = CacheSchema(config, **_sizes(max(batches), max(contexts), kv_format, options))
    tokens = max(batches) * (1 + options.drafts)
    return ExpertMemory(reserved_bytes=program_bytes(tokens, config) + _cache_bytes(schema, None))


def _cache_bytes(schema, mesh):
    """Returns the bytes of a cache on one device."""
    return tree_bytes(KVCache.abstract(schema, mesh))


def _fits(config, weights, sizes, mesh):
    """Returns whether weights and cache fit into the device's memory; True if its size is unknown."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    need = weights + _cache_bytes(CacheSchema(config, **sizes), mesh)
    return limit is None or need < 0.9 * limit


def _sizes(requests: int, context: int, kv_format: KVFormat, options: StepOptions) -> dict[str, Any]:
    blocks = requests * -(-context // BLOCK_TOKENS)
    devices = options.mesh.size if options.mesh and options.context_parallel else 1
    sizes = dict(num_blocks=-(-blocks // devices) * devices, max_requests=requests, max_context=context)
    sizes |= dict(max_query_tokens=1 + options.drafts, context_parallel=options.context_parallel)
    return sizes | dict(kv_format=kv_format)


def _steps_in_a_row(decoder: StackDecoder) -> float:
    """Measures seconds a step, with the host running ahead of the device as in a decode loop.

    Begins at the end of a step behind which the next one is launched, because the device is idle during the first
    launch, which can take longer than a step.
    """
    first, y = (decoder.step(decoder.batch()) for _ in range(2))
    jax.block_until_ready(first)
    begin = time.perf_counter()
    for _ in range(STEPS - 1):
        y = decoder.step(decoder.batch())
    jax.block_until_ready(y)
    return (time.perf_counter() - begin) / STEPS


def _dispatch(decoder: StackDecoder) -> float:
    """Measures the median seconds until a call returns, before its result is computed."""
    seconds = []
    for _ in range(STEPS // 2):
        batch = decoder.batch()
        begin = time.perf_counter()
        y = decoder.step(batch)
        seconds.append(time.perf_counter() - begin)
        jax.block_until_ready(y)
    return statistics.median(seconds)


def _kernels(decoder: StackDecoder) -> dict[str, Any]:
    """Returns the times of the kernels of a step on one GPU."""
    devices = 1 if decoder.manager.mesh is None else decoder.manager.mesh.size
    jax.block_until_ready(decoder.step(decoder.batch()))

    def run():
        for _ in range(STEPS):
            jax.block_until_ready(decoder.step(decoder.batch()))

    return kernel_report(timing.kernels(run), decoder.step_text, STEPS * devices)
