"""`dsv4-jax bench serve --config`: an engine's prompts and decode steps at a released model's size, without HTTP."""

import cProfile
import dataclasses
import pstats
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from dsv4_jax.bench.cases import small_config
from dsv4_jax.bench.tables import LiveTable, number
from dsv4_jax.cache import CacheSchema
from dsv4_jax.checkpoint.random_weights import random_model
from dsv4_jax.config import DSV4Config
from dsv4_jax.decode import CompiledModel, DraftOptions
from dsv4_jax.engine import Engine
from dsv4_jax.engine.runner import StepRunner
from dsv4_jax.expert_pages import ExpertMemory, program_bytes
from dsv4_jax.host import KVCacheManager


WARM_UP = 4  # steps before the first measured one
LOOP_STEPS = 16
HOST_SHARE = 0.01  # functions of the host that take less than this share of a step are not reported
_ROOMS = "engine", "host", "decode", "expert_pages"  # whose functions are reported


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of a measurement, named and described as those of `dsv4-jax bench serve --config`.

    `steps` is the number of decode steps whose mean time is reported. `mesh` and `expert_memory` are those of
    `decode_steps.StepOptions`.
    """

    requests: tuple[int, ...] = (1, 4, 16, 64)
    prompts: tuple[int, ...] = (1024, 8192, 65536)
    context: int = 512
    steps: int = 32
    token_budget: int = 2048
    layers: int = 0
    drafts: int = 0
    expert_memory: int | Literal["auto"] | None = None
    skew: float = 0.0
    mesh: Mesh | None = None

    @property
    def new_tokens(self) -> int:
        """The most tokens that a measurement generates for a request, the first while others read their prompts."""
        prompts = -(-max(self.requests) * self.context // self.token_budget)
        return (1 + self.drafts) * (prompts + 2 * WARM_UP + 2 * self.steps) + (WARM_UP + 3) * LOOP_STEPS

    @property
    def max_step_tokens(self) -> int:
        """The number of tokens of the largest step."""
        return max(self.token_budget, max(self.requests) * (1 + self.drafts))

    @property
    def max_context(self) -> int:
        """The most tokens that a request holds."""
        return max(self.context + self.new_tokens, max(self.prompts, default=0) + 1)

    def manager_options(self, requests: int) -> dict[str, Any]:
        """Returns the arguments of a manager for so many requests, or for one of the longest prompts."""
        blocks = requests * -(-(self.context + self.new_tokens) // 128)
        blocks = max(blocks, -(-self.max_context // 128))
        sizes = dict(max_requests=requests, max_context=self.max_context, max_query_tokens=1 + self.drafts)
        return sizes | dict(num_blocks=blocks)


def run(config: DSV4Config, options: EngineOptions, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measures prompts and then decode steps, prints and yields the results.

    A "prompt" row has the time until the first token of a prompt that runs alone. A "decode" row has the mean time of
    `Engine.step` while all requests decode, that of a step of the on-device loop beside it (without the engine's
    bookkeeping), and the milliseconds a step that the host spends in each function, callees included, under Python's
    profiler. What holds for all results is added to the report. Raises ValueError if the sizes do not fit the model,
    the mesh or the GPU.
    """
    count = options.layers or config.num_hidden_layers
    if count > config.num_hidden_layers:
        raise ValueError(f"--layers {count} must be from 0 (all) to {config.num_hidden_layers}")
    config = config.first_layers(count).with_drafts(options.drafts > 0)
    if options.max_context > (limit := config.max_position_embeddings):
        raise ValueError(f"--prompts and --context need {options.max_context} tokens; the model's context is {limit}")
    experts = _expert_memory(config, options)
    begin = time.perf_counter()
    model = random_model(config, options.mesh, expert_memory=experts, skew=options.skew)
    model = CompiledModel(jax.block_until_ready(model), experts)
    sizes = dict(layers=count, token_budget=options.token_budget, context=options.context, skew=options.skew)
    report |= sizes | dict(host_bytes=experts.host_bytes if experts else 0)
    report["weights_seconds"] = round(time.perf_counter() - begin, 1)
    _say(f"weights of {count} layers made in {report['weights_seconds']} s")
    lines = LiveTable(what=-7, tokens=7)
    for number_of_requests in options.requests:
        case = _Case(model, config, options, number_of_requests)
        prompts = options.prompts if number_of_requests == options.requests[0] else ()
        for row in (*map(case.prompt, prompts), case.decode()):
            lines.add(_cells(row))
            yield row


class _Case:
    """An engine for a number of requests, and the time to compile its programs."""

    def __init__(self, model, config, options, requests):
        self.model, self.options, self.requests = model, options, requests
        self.manager = KVCacheManager(config, mesh=options.mesh, **options.manager_options(requests))
        self._rng, self._vocabulary = np.random.default_rng(requests), config.vocab_size
        self.engine = self._engine()
        begin = time.perf_counter()
        self.engine.warm_up()
        self.compile_seconds = round(time.perf_counter() - begin, 1)
        _say(f"{requests} requests: programs compiled in {self.compile_seconds} s")

    def prompt(self, tokens):
        """Measures a prompt that runs alone, the second time that it runs."""
        for _ in range(2):
            begin = time.perf_counter()
            request = self._add(tokens, 1)
            while request.finish_reason is None:
                self.engine.step()
            seconds = time.perf_counter() - begin
        result = dict(measurement="prompt", tokens=tokens, first_token_milliseconds=round(1e3 * seconds, 2))
        return result | dict(tokens_per_second=round(tokens / seconds, 1), compile_seconds=self.compile_seconds)

    def decode(self):
        """Measures steps while all requests decode."""
        steps = self.options.steps
        self._start(self.engine)
        before, seconds = self._tokens(), _seconds(self.engine, steps)
        tokens = self._tokens() - before
        host = _host_milliseconds(self.engine, steps)
        metrics = self.engine.metrics
        result = dict(measurement="decode", requests=self.requests, drafts=self.options.drafts)
        result |= dict(step_milliseconds=round(1e3 * seconds / steps, 3), tokens_per_second=round(tokens / seconds, 1))
        result |= dict(token_milliseconds=round(1e3 * seconds * self.requests / max(tokens, 1), 3))
        result |= dict(acceptance=round(metrics.acceptance, 4), compile_seconds=self.compile_seconds)
        self.engine.close()
        if not self.options.drafts:
            result["loop_milliseconds"] = round(self._loop_milliseconds(), 3)
        return result | dict(host_milliseconds=host)

    def _loop_milliseconds(self):
        """Measures a step of the on-device loop alone, for the same number of requests in the same cache."""
        engine = self._engine(self.engine.cache, num_scheduler_steps=LOOP_STEPS)
        self._start(engine)
        runner = StepRunner(self.model, self.manager, engine.config, device_drafts=DraftOptions())
        cache, seconds = engine.cache, 0.0
        for _ in range(2):  # the first compiles
            begin = time.perf_counter()
            _, cache = runner.run_steps(cache, dict.fromkeys(engine.running, LOOP_STEPS))
            seconds = time.perf_counter() - begin
        return 1e3 * seconds / LOOP_STEPS

    def _engine(self, cache=None, **config):
        drafts, budget = self.options.drafts, self.options.token_budget
        budget = max(budget, self.requests * (1 + drafts))
        config["drafter"] = "model" if drafts else None
        return Engine(self.model, self.manager, cache, token_budget=budget, **config)

    def _start(self, engine):
        """Starts the requests and runs steps until all of them decode."""
        self._running = [self._add(self.options.context, self.options.new_tokens, engine) for _ in range(self.requests)]
        while not all(request.generated for request in self._running):
            engine.step()
        _seconds(engine, WARM_UP)

    def _add(self, tokens, new_tokens, engine=None):
        ids = self._rng.integers(2, self._vocabulary, size=tokens)
        return (engine or self.engine).add(ids, max_new_tokens=new_tokens)

    def _tokens(self):
        return sum(len(request.generated) for request in self._running)


def _seconds(engine, steps):
    """Runs steps and returns how long they took together."""
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return time.perf_counter() - begin


def _host_milliseconds(engine, steps):
    """Returns the milliseconds a step that the host spends in each function of the engine, callees included."""
    with cProfile.Profile() as profile:
        seconds = _seconds(engine, steps)
    rows: Any = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    found = {}
    for (file, _, function), (_, _, _, cumulative, _) in rows.items():
        path = Path(file)
        if path.parent.name in _ROOMS and "dsv4_jax" in path.parts and cumulative > HOST_SHARE * seconds:
            name = f"{path.parent.name}.{path.stem}.{function}"
            found[name] = round(max(found.get(name, 0.0), 1e3 * cumulative / steps), 3)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _expert_memory(config, options):
    """Returns where the experts will lie, with room for the largest cache; None if all stay on the devices."""
    if options.expert_memory is None:
        return None
    if options.expert_memory != "auto":
        return ExpertMemory(options.expert_memory)
    schema = CacheSchema(config, **options.manager_options(max(options.requests)))
    return ExpertMemory(reserved_bytes=program_bytes(options.max_step_tokens, config) + schema.memory_bytes())


def choose_config(config: DSV4Config, name: str, report: dict[str, Any]) -> DSV4Config:
    """Returns the configuration to measure, whose name the report gets: without a GPU a released one is a tiny one."""
    is_replaced = jax.default_backend() != "gpu" and name.startswith("v4_")
    report["config"] = "tiny" if is_replaced else name
    return small_config(config) if is_replaced else config


def _say(text):
    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def _cells(row):
    """Returns the cells of a result's line."""
    what = row["measurement"]
    cells = {"what": what, "tokens": row.get("tokens", ""), "requests": row.get("requests", "")}
    cells |= {"first token, ms": number(row.get("first_token_milliseconds"), 1)}
    cells |= {"step, ms": number(row.get("step_milliseconds"), 2), "loop, ms": number(row.get("loop_milliseconds"), 2)}
    return cells | {"a token, ms": number(row.get("token_milliseconds"), 2), "tokens/s": row["tokens_per_second"]}
