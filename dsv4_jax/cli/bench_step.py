"""`dsv4-jax bench step`: whole decode steps of the attention stack, and where their time goes."""

import contextlib
import dataclasses
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv4_jax.cache import CacheSchema
from dsv4_jax.cli import timing
from dsv4_jax.cli.attention_stack import AttentionStack, begin_step, floor_bytes, random_cache, stack_loop, stack_step
from dsv4_jax.cli.common import packaged_checkpoint, read_config
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode.packed import PackedModel, pack
from dsv4_jax.host import KVCacheManager
from dsv4_jax.quant import KVFormat


# Steps that a mean is taken over; a context's requests begin this much earlier, so as to end there.
STEPS = 32
MARGIN = 4 * STEPS
# What a kernel is, by parts of its name; matrix products of XLA's own are found through the program's text.
KINDS = {
    "append + flush": ("append_swa", "flush"),
    "indexer": ("round_index_query", "indexer_scores"),
    "top-k": ("indexer_topk",),
    "attention": ("sparse_attention", "combine"),
    "projections": ("gemm", "gemv", "nvjet", "cutlass", "cublas", "splitk", "dot"),
}
REST = "rest"
# Kernels that a result names one by one.
LONGEST = 24


@dataclasses.dataclass(frozen=True)
class Options:
    """What `dsv4-jax bench step` was asked for: see `Bench`."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    layers: int
    trace: Path | None

    def check(self, config: DSV4Config) -> None:
        """Raises ValueError naming the option that is wrong."""
        for context in self.contexts:
            if not MARGIN < context <= config.max_position_embeddings:
                raise ValueError(
                    f"--contexts {context} must be from {MARGIN + 1} to {config.max_position_embeddings} tokens"
                )
        for requests in self.batches:
            if requests < 1:
                raise ValueError(f"--batches {requests} must be at least 1")
        if not self.batches or not self.contexts:
            raise ValueError("--batches and --contexts need at least one number each")
        if not 0 <= self.layers <= config.num_hidden_layers:
            raise ValueError(f"--layers {self.layers} must be from 0 (all) to {config.num_hidden_layers}")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One cache and one batch size.

    Attributes:
      stack: the weights.
      manager: book of the cache's requests.
      requests: batch size.
    """

    stack: PackedModel
    manager: KVCacheManager
    requests: int

    def measure(
        self, contexts: tuple[int, ...], copy: float, trace: Path | None, loop: bool
    ) -> Iterator[dict[str, Any]]:
        """One result for each context, longest last.

        Args:
          contexts: tokens that each request holds at the end of the measurement.
          copy: bytes a second of a plain copy: the floor is so many bytes read once.
          trace: folder for a profile of the last context's steps.
          loop: whether to time the on-device loop too.
        """
        manager, config = self.manager, self.manager.schema.config
        cache = random_cache(manager)
        x = jax.random.normal(jax.random.key(1), (self.requests, config.hidden_size), jnp.bfloat16)
        step = looped = None
        for context in sorted(contexts):
            slots = [manager.admit() for _ in range(self.requests)]
            past = context - MARGIN
            cache = begin_step(cache, manager.prepare_forward({slot: [0] for slot in slots}, reserve=past))
            for slot in slots:
                manager.advance(slot, past - 1)

            def batch(reserve=0, slots=slots):
                return manager.prepare_forward({slot: [0] for slot in slots}, reserve=reserve)

            if step is None:
                step = stack_step.lower(self.stack, cache, batch(), x).compile()
            _, cache = jax.block_until_ready(step(self.stack, cache, batch(), x))
            seconds, cache = _steps_in_a_row(step, self.stack, cache, batch, x)
            dispatch, cache = _dispatch(step, self.stack, cache, batch, x)
            with jax.profiler.trace(str(trace)) if trace and context == max(contexts) else contextlib.nullcontext():
                kernels, cache = _kernels(step, self.stack, cache, batch, x)
            nbytes = floor_bytes(self.stack, manager, self.requests, context)
            floor = nbytes / copy
            result = dict(
                requests=self.requests,
                context=context,
                milliseconds=seconds * 1e3,
                floor_bytes=nbytes,
                floor_milliseconds=floor * 1e3,
                percent_of_floor=100 * floor / seconds,
                dispatch_milliseconds=dispatch * 1e3,
                cache_bytes=manager.schema.memory_bytes(),
                kernel_milliseconds={
                    kind: round(value, 4) for kind, value in _by_kind(kernels, step.as_text()).items()
                },
                longest_kernels=_longest(kernels),
            )
            if kernels:
                result["gap_milliseconds"] = seconds * 1e3 - sum(milliseconds for _, milliseconds in kernels)
            if loop:
                many = batch(reserve=STEPS - 1)
                for slot in slots:
                    manager.advance(slot, STEPS - 1)
                if looped is None:
                    looped = stack_loop.lower(self.stack, cache, many, x, steps=STEPS).compile()
                begin = time.perf_counter()
                _, cache = jax.block_until_ready(looped(self.stack, cache, many, x))
                result["loop_milliseconds"] = (time.perf_counter() - begin) * 1e3 / STEPS
            yield {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
            for slot in slots:
                manager.release(slot)


def run(config: DSV4Config, kv_format: KVFormat, options: Options, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measures and prints every batch size at every context that fits, and yields the results."""
    small = jax.default_backend() != "gpu"
    if small:
        config = read_config(packaged_checkpoint())
    options.check(config)
    if layers := options.layers:
        kinds = dict(layer_types=config.layer_types[:layers], mlp_layer_types=config.mlp_layer_types[:layers])
        config = dataclasses.replace(config, num_hidden_layers=layers, **kinds)
    stack = pack(AttentionStack(config, nnx.Rngs(0)))
    weights = sum(leaf.nbytes for leaf in stack.leaves)
    print(
        f"{report['device']}, jax {report['jax']}. Attention layers of {'a tiny model' if small else 'V4'}: "
        f"{config.num_hidden_layers}, {weights / 1e9:.2f} GB. Milliseconds a step; floor: weights and cache read once "
        f"at {report['copy_bytes_per_second'] / 1e9:,.0f} GB/s.\n\n" + _line(_COLUMNS),
        flush=True,
    )
    for i, requests in enumerate(options.batches):
        contexts = tuple(c for c in options.contexts if _fits(config, kv_format, weights, requests, c))
        for context in sorted(set(options.contexts) - set(contexts)):
            print(_line((requests, context, "does not fit this device's memory")))
        if contexts:
            sizes = _sizes(requests, max(contexts), kv_format)
            setting = Setting(stack, KVCacheManager(config, **sizes), requests)
            for row in setting.measure(contexts, report["copy_bytes_per_second"], options.trace, loop=i == 0):
                print(_line(_cells(row)), flush=True)
                yield row


_COLUMNS = ("batch", "context", "step", "floor", "%", "loop", "dispatch", *KINDS, REST, "gaps")


def _cells(row):
    times = row["kernel_milliseconds"]
    kinds = [times.get(kind) for kind in (*KINDS, REST)]
    numbers = row["milliseconds"], row["floor_milliseconds"], row["percent_of_floor"], row.get("loop_milliseconds")
    numbers = *numbers, row["dispatch_milliseconds"], *kinds, row.get("gap_milliseconds")
    return row["requests"], row["context"], *("" if n is None else f"{n:.3f}" for n in numbers)


def _line(cells):
    widths = (5, 8, *(max(8, len(column)) for column in _COLUMNS[2:]))
    return "  ".join(str(cell).rjust(width) for cell, width in zip(cells, widths, strict=False))


def _fits(config, kv_format, weights, requests, context):
    """Whether weights, cache and a tenth for everything else fit the device's memory, if that is known."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    need = weights + CacheSchema.from_config(config, **_sizes(requests, context, kv_format)).memory_bytes()
    return limit is None or need < 0.9 * limit


def _sizes(requests: int, context: int, kv_format: KVFormat) -> dict[str, Any]:
    return dict(
        num_blocks=requests * -(-context // 128), max_requests=requests, max_context=context, kv_format=kv_format
    )


def _steps_in_a_row(step, stack, cache, batch, x):
    """(seconds a step, cache): the host runs ahead of the device, as a decode loop does."""
    begin = time.perf_counter()
    y = x
    for _ in range(STEPS):
        y, cache = step(stack, cache, batch(), x)
    jax.block_until_ready(y)
    return (time.perf_counter() - begin) / STEPS, cache


def _dispatch(step, stack, cache, batch, x):
    """(median seconds until a call returns, which is before its result is there; cache)."""
    seconds = []
    for _ in range(STEPS // 2):
        now = batch()
        begin = time.perf_counter()
        y, cache = step(stack, cache, now, x)
        seconds.append(time.perf_counter() - begin)
        jax.block_until_ready(y)
    return statistics.median(seconds), cache


def _kernels(step, stack, cache, batch, x):
    """([(name, milliseconds a step)] of all launches, cache); nothing where kernels cannot be timed."""
    if jax.default_backend() != "gpu":
        return [], cache
    steps = STEPS // 4

    def run():
        nonlocal cache
        for _ in range(steps):
            y, cache = step(stack, cache, batch(), x)
            jax.block_until_ready(y)

    return [(name, milliseconds / steps) for name, milliseconds in timing.kernels(run)], cache


def _by_kind(kernels, text):
    """{kind: milliseconds a step}."""
    products, kinds = _products(text), dict.fromkeys([*KINDS, REST], 0.0)
    for name, milliseconds in kernels:
        kinds[_kind(name, products)] += milliseconds
    return kinds if kernels else {}


def _longest(kernels):
    """Names, launches and milliseconds a step of the kernels that take most time; numbered copies of one are one."""
    found: dict[str, list[float]] = {}
    for name, milliseconds in kernels:
        found.setdefault(re.sub(r"_\d+$", "", name), []).append(milliseconds)
    steps = STEPS // 4
    rows = [
        dict(name=name, launches=len(times) / steps, milliseconds=round(sum(times), 4)) for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["milliseconds"])[:LONGEST]


def _products(text):
    """Names of the kernels that XLA fuses around a matrix product."""
    fused = re.findall(r"^%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    product = {name for name, body in fused if "dot_general" in body}
    calls = re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = .*calls=%?([\w.-]+)", text, re.MULTILINE)
    return {re.sub(r"[.-]", "_", name) for name, called in calls if called in product}


def _kind(name, products):
    for kind, words in KINDS.items():
        if any(word in name.lower() for word in words):
            return kind
    return "projections" if name in products else REST


def plot(results: list[dict[str, Any]], title: str, path: Path) -> None:
    """A picture of step time and its floor against context, one line a batch size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for requests in sorted({row["requests"] for row in results}):
        rows = [row for row in results if row["requests"] == requests]
        contexts = [row["context"] for row in rows]
        (line,) = axes.plot(contexts, [row["milliseconds"] for row in rows], "o-", label=f"batch {requests}")
        axes.plot(contexts, [row["floor_milliseconds"] for row in rows], ":", color=line.get_color())
    axes.plot([], [], ":", color="gray", label="floor: weights and cache read once")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="context (tokens a request)", ylabel="milliseconds a step", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
