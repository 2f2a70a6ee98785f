"""`dsv4-jax bench step` and `model`: whole decode steps of attention layers or of whole ones; where their time goes."""

import contextlib
import dataclasses
import itertools
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress

from dsv4_jax.bench import timing
from dsv4_jax.bench.attention_stack import AttentionStack, StackDecoder, floor_bytes
from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.bench.model_stack import abstract_stack, random_stack
from dsv4_jax.cache import CacheSchema
from dsv4_jax.config import HCA, DSV4Config
from dsv4_jax.data import BLOCK_TOKENS, packaged_checkpoint, read_config
from dsv4_jax.decode import CompiledModel
from dsv4_jax.host import KVCacheManager
from dsv4_jax.nn import join_projections, shardings
from dsv4_jax.parallel.mesh import check_cuts
from dsv4_jax.quant import KVFormat


STEPS = 32  # that a mean is taken over
# Requests start so many tokens before the context that is measured, to end a measurement there.
MARGIN = 4 * STEPS
# Steps before the first measured one; XLA records its CUDA graphs in the second.
WARM_UP = 4
# Kinds of kernels, by parts of their names. XLA's own matrix products are found in the text of the program.
KINDS = {
    "append + flush": ("append_swa", "flush"),
    "experts": ("experts",),
    "indexer": ("round_index_query", "indexer_scores"),
    "top-k": ("indexer_topk",),
    "attention": ("sparse_attention", "combine"),
    "projections": ("linear", "gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "dot"),
}
REST = "rest"
LONGEST = 24  # kernels listed by name
# By a report's "shapes": without a GPU, "tiny" takes the place of what was asked for.
MODELS = dict(flash="V4-Flash", pro="V4-Pro", tiny="a tiny model")
# Shares of drafts that are right, each after right ones, for which tokens a second are reported.
ACCEPTANCES = (0.5, 0.7, 0.9)
MOST_DRAFTS = 8
# Batch sizes and contexts that are measured by default, with a GPU and without.
DEFAULTS = dict(
    step=dict(gpu=((1, 8, 32), (4096, 65536, 1048576)), cpu=((1, 4), (512, 4096))),
    model=dict(gpu=((1, 8, 32, 128), (4096, 65536)), cpu=((1, 4), (512, 4096))),
)


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """What to measure: the options of `BenchCommand` with these names; None: as in `DEFAULTS`.

    `mesh`: the devices; None = the default one.
    `whole`: layers with experts and hyper-connections, as `model` measures them, not their attention alone.
    """

    batches: tuple[int, ...] | None
    contexts: tuple[int, ...] | None
    layers: int
    trace: Path | None
    drafts: int = 0
    whole: bool = False
    mesh: Mesh | None = None

    def cases(self, config: DSV4Config, device: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(batches, contexts) to measure on a "gpu" or "cpu"; raises ValueError naming an option that is wrong."""
        batches, contexts = DEFAULTS["model" if self.whole else "step"][device]
        batches = batches if self.batches is None else self.batches
        contexts = contexts if self.contexts is None else self.contexts
        for context in contexts:
            if not MARGIN < context <= config.max_position_embeddings:
                raise ValueError(
                    f"--contexts {context} must be from {MARGIN + 1} to {config.max_position_embeddings} tokens"
                )
        for requests in batches:
            if requests < 1:
                raise ValueError(f"--batches {requests} must be at least 1")
        if not batches or not contexts:
            raise ValueError("--batches and --contexts need at least one number each")
        if self.drafts > MOST_DRAFTS:
            raise ValueError(f"--drafts {self.drafts} must be at most {MOST_DRAFTS}")
        if not 0 <= self.layers <= config.num_hidden_layers:
            raise ValueError(f"--layers {self.layers} must be from 0 (all) to {config.num_hidden_layers}")
        return batches, contexts


@dataclasses.dataclass(frozen=True)
class StepCase:
    """The batch of a decoder at one context: the tokens that each request holds at the end of a measurement."""

    decoder: StackDecoder
    context: int

    def time(self, loop: bool) -> dict[str, float]:
        """Milliseconds of a step, of its dispatch and, if asked for, of a step of the on-device loop."""
        decoder = self.decoder
        decoder.start_requests(self.context - MARGIN)
        for _ in range(WARM_UP):
            jax.block_until_ready(decoder.step(decoder.batch()))
        times = dict(milliseconds=_steps_in_a_row(decoder), dispatch_milliseconds=_dispatch(decoder))
        if loop:
            for _ in range(2):  # the first compiles
                batch = decoder.batch(reserve=STEPS - 1)
                begin = time.perf_counter()
                jax.block_until_ready(decoder.loop(batch, STEPS))
                times["loop_milliseconds"] = (time.perf_counter() - begin) / STEPS
        return {name: 1e3 * seconds for name, seconds in times.items()}

    def profile(self, times: dict[str, float], copy: float, trace: Path | None) -> dict[str, Any]:
        """The case's result, from what `time` returned; on a GPU with the times of its kernels.

        `copy` is the bytes a second of a plain copy, at which the floor's bytes are read. A profile goes to `trace`.
        """
        decoder = self.decoder
        nbytes = floor_bytes(decoder, self.context)
        floor = 1e3 * nbytes / copy
        result: dict[str, Any] = dict(
            requests=decoder.requests,
            context=self.context,
            tokens=decoder.tokens,
            drafts=decoder.drafts,
            **times,
            floor_bytes=nbytes,
            floor_milliseconds=floor,
            percent_of_floor=100 * floor / times["milliseconds"],
            cache_bytes=decoder.manager.schema.memory_bytes(),
            kernel_milliseconds={},
        )
        if jax.default_backend() == "gpu":
            decoder.start_requests(self.context - MARGIN)
            with jax.profiler.trace(str(trace)) if trace else contextlib.nullcontext():
                kernels = _kernels(decoder)
            kinds = _by_kind(kernels, decoder.step_text)
            result["kernel_milliseconds"] = {kind: round(value, 4) for kind, value in kinds.items()}
            result["longest_kernels"] = _longest(kernels)
            result["launches"] = len(kernels) * 4 / STEPS
            result["gap_milliseconds"] = times["milliseconds"] - sum(kinds.values())
        return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def run(
    config: DSV4Config, kv_format: KVFormat, options: StepOptions, report: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Measures every batch size at every context that fits, then profiles and prints them, and yields the results.

    All steps are timed before the first profile: after one, the host takes up to twice as long for a launch. The rate
    of a copy comes from a profile, too. It and the clock are added to `report`. Where there is no GPU, the packaged
    model takes the place of `config`.

    With drafts, each case is measured three times: with one token of each request, with the tokens of a step that
    verifies drafts, and when such a step also makes new ones.

    Raises:
      ValueError: an option is out of range.
    """
    report["clock"] = "wall clock of steps, kernel time from CUPTI"
    small = jax.default_backend() != "gpu"
    if small:
        config, report["shapes"] = read_config(packaged_checkpoint()), "tiny"
    batches, all_contexts = options.cases(config, "cpu" if small else "gpu")
    layers = options.layers
    if options.whole and not layers and not small:
        layers = _most_layers(config, options.mesh)
    if layers:
        kinds = dict(layer_types=config.layer_types[:layers], mlp_layer_types=config.mlp_layer_types[:layers])
        rate = config.compress_rate_hca if HCA in kinds["layer_types"] else 0
        config = dataclasses.replace(config, num_hidden_layers=layers, compress_rate_hca=rate, **kinds)
    config = dataclasses.replace(config, num_nextn_predict_layers=int(options.drafts > 0))
    steps = [(1, 0), (1 + options.drafts, 0), (1 + options.drafts, options.drafts)] if options.drafts else [(1, 0)]
    whole = options.whole
    if options.mesh is not None:
        check_cuts(config, options.mesh.shape)
    stack = CompiledModel(random_stack(config, options.mesh) if whole else _attention(config, options.mesh))
    weights = tree_bytes(stack.arrays)
    cases: list[StepCase] = []
    for requests in batches:
        contexts = sorted({c for c in all_contexts if _fits(config, weights, _sizes(requests, c, kv_format, options))})
        for context in sorted(set(all_contexts) - set(contexts)):
            print(f"{requests} requests of {context} tokens do not fit this device's memory")
        for step in steps if contexts else ():
            sizes = _sizes(requests, max(contexts), kv_format, options)
            decoder = StackDecoder(stack, KVCacheManager(config, mesh=options.mesh, **sizes), requests, *step)
            cases += [StepCase(decoder, context) for context in contexts]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("timing steps, then their kernels", total=2 * len(cases))

        def in_turn():
            last = {case.decoder: case for case in cases}
            for case in cases:
                yield case
                progress.advance(bar)
                if case is last[case.decoder]:
                    case.decoder.free_cache()

        if not small and cases:
            cases[0].time(loop=False)  # a process's first steps are slower to launch
        times = [case.time(loop=case.decoder is cases[0].decoder) for case in in_turn()]
        copy = report["copy_bytes_per_second"] = timing.copy_bandwidth()
        print(
            f"{report['device']}, jax {report['jax']}. {'Whole' if whole else 'Attention'} layers of "
            f"{MODELS[report['shapes']]}: {config.num_hidden_layers}, {weights / 1e9:.2f} GB. Milliseconds a step; "
            f"floor: weights and cache read once at {copy / 1e9:,.0f} GB/s.\n\n" + _line(_COLUMNS),
            flush=True,
        )
        places: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for case, known in zip(in_turn(), times, strict=True):
            row = case.profile(known, copy, options.trace if case is cases[-1] else None)
            print(_line(_cells(row)), flush=True)
            rows = places.setdefault((row["requests"], row["context"]), [])
            rows.append(row)
            if row["tokens"] > 1:
                row["times_one_token"] = round(row["milliseconds"] / rows[0]["milliseconds"], 4)
            if row["drafts"]:
                row["tokens_per_second"] = {str(share): round(_rate(row, share), 1) for share in ACCEPTANCES}
            yield row
    if options.drafts:
        print(_draft_lines(places))


def _rate(row, share):
    """Tokens a second of all requests, if each draft after right ones is right with probability `share`."""
    return 1e3 * row["requests"] / row["milliseconds"] * sum(share**i for i in range(1 + row["drafts"]))


def _draft_lines(places):
    """What verifying and drafting cost against a step with one token, and tokens a second."""
    lines = [f"\nTokens a second: assumed that {', '.join(map('{:.0%}'.format, ACCEPTANCES))} of the drafts are right."]
    for (requests, context), (_, verify, whole) in places.items():
        rates = ", ".join(f"{rate:,.0f}" for rate in whole["tokens_per_second"].values())
        lines.append(
            f"batch {requests}, context {context}: {whole['tokens']} tokens take {verify['times_one_token']:.2f} x a "
            f"step with one, with {whole['drafts']} drafts {whole['times_one_token']:.2f} x; tokens a second: {rates}"
        )
    return "\n".join(lines)


_COLUMNS = ("batch", "context", "tokens", "drafts", "step", "floor", "%", "loop", "dispatch", *KINDS, REST, "gaps")


def _cells(row):
    times = row["kernel_milliseconds"]
    kinds = [times.get(kind) for kind in (*KINDS, REST)]
    numbers = row["milliseconds"], row["floor_milliseconds"], row["percent_of_floor"], row.get("loop_milliseconds")
    numbers = *numbers, row["dispatch_milliseconds"], *kinds, row.get("gap_milliseconds")
    whole = row["requests"], row["context"], row["tokens"], row["drafts"]
    return *whole, *("" if n is None else f"{n:.3f}" for n in numbers)


def _line(cells):
    widths = (5, 8, 6, 6, *(max(8, len(column)) for column in _COLUMNS[4:]))
    return "  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=False))


def _attention(config, mesh):
    stack = AttentionStack(config, nnx.Rngs(0))
    return join_projections(stack if mesh is None else jax.device_put(stack, shardings(stack, mesh)))


def _most_layers(config, mesh):
    """How many layers take at most seven tenths of the device's memory: the rest is the cache's and the programs'."""
    limit = 0.7 * jax.devices()[0].memory_stats()["bytes_limit"]
    sizes = itertools.accumulate(tree_bytes(nnx.state(layer)) for layer in abstract_stack(config, mesh).layers)
    return sum(size <= limit for size in sizes)


def _fits(config, weights, sizes):
    """Whether weights and cache fit into nine tenths of the device's memory; True where that is unknown."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    need = weights + CacheSchema.from_config(config, **sizes).memory_bytes()
    return limit is None or need < 0.9 * limit


def _sizes(requests: int, context: int, kv_format: KVFormat, options: StepOptions) -> dict[str, Any]:
    sizes = dict(num_blocks=requests * -(-context // BLOCK_TOKENS), max_requests=requests, max_context=context)
    return sizes | dict(kv_format=kv_format, max_query_tokens=1 + options.drafts)


def _steps_in_a_row(decoder: StackDecoder) -> float:
    """Seconds a step: the host runs ahead of the device, as a decode loop does."""
    begin = time.perf_counter()
    for _ in range(STEPS - 1):
        decoder.step(decoder.batch())
    jax.block_until_ready(decoder.step(decoder.batch()))
    return (time.perf_counter() - begin) / STEPS


def _dispatch(decoder: StackDecoder) -> float:
    """Median seconds until a call returns, which is before its result is computed."""
    seconds = []
    for _ in range(STEPS // 2):
        batch = decoder.batch()
        begin = time.perf_counter()
        y = decoder.step(batch)
        seconds.append(time.perf_counter() - begin)
        jax.block_until_ready(y)
    return statistics.median(seconds)


def _kernels(decoder: StackDecoder) -> list[tuple[str, float]]:
    """(name, milliseconds a step) of each launch."""
    steps = STEPS // 4
    jax.block_until_ready(decoder.step(decoder.batch()))

    def run():
        for _ in range(steps):
            jax.block_until_ready(decoder.step(decoder.batch()))

    return [(name, milliseconds / steps) for name, milliseconds in timing.kernels(run)]


def _by_kind(kernels, text):
    """{kind: milliseconds a step}."""
    products, kinds = _products(text), dict.fromkeys([*KINDS, REST], 0.0)
    for name, milliseconds in kernels:
        kinds[_kind(name, products)] += milliseconds
    return kinds


def _longest(kernels):
    """Names, launches and milliseconds a step of the longest kernels; numbered copies of a kernel count as one."""
    found: dict[str, list[float]] = {}
    for name, milliseconds in kernels:
        found.setdefault(re.sub(r"_\d+$", "", name), []).append(milliseconds)
    steps = STEPS // 4
    rows = [
        dict(name=name, launches=len(times) / steps, milliseconds=round(sum(times), 4)) for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["milliseconds"])[:LONGEST]


def _products(text):
    """Names of XLA's fusions around a matrix product, as their kernels are called."""
    fused = re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    product = {name for name, body in fused if "dot_general" in body}
    calls = re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = .*calls=%?([\w.-]+)", text, re.MULTILINE)
    return {re.sub(r"[.-]", "_", name) for name, called in calls if called in product}


def _kind(name, products):
    for kind, words in KINDS.items():
        if any(word in name.lower() for word in words):
            return kind
    return "projections" if name in products else REST
