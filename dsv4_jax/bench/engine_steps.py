"""`dsv4-jax bench serve --config`: the time of an engine's prompts and decode steps at a released model's size.

The weights are random, and there is no HTTP server.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dsv4_jax.bench.layer_slices import chosen_layers, numbers_label, slice_config
from dsv4_jax.bench.random_steps import RandomSteps
from dsv4_jax.bench.step_cases import loop_seconds
from dsv4_jax.bench.step_options import ModelSetup, check_numbers
from dsv4_jax.bench.tables import Row, print_rows
from dsv4_jax.bench.timing import wall_seconds
from dsv4_jax.cache import CacheSchema
from dsv4_jax.common.arguments import check_whole
from dsv4_jax.config import DSV4Config
from dsv4_jax.data import BLOCK_TOKENS
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager


WARM_UP = 4  # number of decode steps before the first measured one
LOOP_STEPS = 16  # number of steps of the on-device loop
LOAD_ROUNDS = 2  # number of requests that a load sends, in units of those that run at once
# `COLUMNS` maps the title of each printed column to the format of its cells, with names of a result's fields in braces.
COLUMNS = {
    "what": "{measurement}",
    "tokens": "{tokens}",
    "requests": "{requests}",
    "first token, ms": "{first_token_milliseconds:.1f}",
    "95% of them": "{first_token_milliseconds_p95:.1f}",
    "step, ms": "{step_milliseconds:.2f}",
    "loop, ms": "{loop_milliseconds:.2f}",
    "a token, ms": "{token_milliseconds:.2f}",
    "95% of requests": "{token_milliseconds_p95:.2f}",
    "tokens/s": "{tokens_per_second:.1f}",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(ModelSetup):
    """Options of `dsv4-jax bench serve --config`.

    Attributes:
      requests: numbers of requests to measure decode steps with.
      prompts: lengths of the prompts to measure, in tokens.
      context: length of the requests' prompts before decode steps, in tokens.
      reply: number of tokens of the replies of a load, which is measured instead of decode steps; 0 = no load.
      steps: number of decode steps whose mean time is reported.
      token_budget: maximum number of tokens of a step.
      skew: skew of the routers, see `checkpoint.random_weights.random_model`.
    """

    requests: tuple[int, ...]
    prompts: tuple[int, ...]
    context: int = 512
    reply: int = 0
    steps: int = 32
    token_budget: int = 2048
    skew: float = 0.0

    @property
    def new_tokens(self) -> int:
        """The maximum number of tokens of a request's reply, including those generated while other prompts are read."""
        if self.reply:
            return self.reply
        prompts = -(-max(self.requests) * self.context // self.token_budget)
        return (1 + self.drafts) * (prompts + 2 * WARM_UP + 2 * self.steps) + 2 * LOOP_STEPS

    @property
    def max_step_tokens(self) -> int:
        """The number of tokens of the largest step."""
        return max(self.token_budget, max(self.requests) * (1 + self.drafts))

    @property
    def max_context(self) -> int:
        """The maximum number of tokens that a request holds."""
        return max(self.context + self.new_tokens, max(self.prompts, default=0) + 1)

    def cache_sizes(self, requests: int) -> dict[str, Any]:
        """Returns the sizes of a cache, as arguments of `CacheSchema`.

        The cache has room for `requests` requests that decode, or for one request with the longest prompt.
        """
        decoding = requests * -(-(self.context + self.new_tokens) // BLOCK_TOKENS)
        return {
            "num_blocks": max(decoding, -(-self.max_context // BLOCK_TOKENS)),
            "max_requests": requests,
            "max_context": self.max_context,
            "max_query_tokens": 1 + self.drafts,
        }


def run(config: DSV4Config, options: EngineOptions, report: Row) -> Iterator[Row]:
    """Measures prompts and then decode steps; prints and yields the results.

    A result whose "measurement" is "prompt" holds the time until the first token of a prompt that runs alone. A
    "decode" result holds the mean time of `Engine.step` while all requests decode. If there are no drafts, it also
    holds the time of a step of the on-device loop with the same requests, without the engine's work on the host. A
    "load" result holds the throughput of `LOAD_ROUNDS` times as many requests as run at once. A request begins as soon
    as another one ends. Times until the first token count from there, and times of a token from the first token on.

    Args:
      config: configuration of the model.
      options: the sizes and other options.
      report: the report that the results belong to. The options and the time to make the weights are added to it.

    Raises:
      ValueError: the sizes do not fit the model, the mesh or the GPU.
    """
    check_numbers("requests", options.requests, 1)
    check_whole("layers", options.layers, 0, config.num_hidden_layers)
    layers = chosen_layers(config, options.layers or config.num_hidden_layers)
    label = numbers_label(layers)
    config = options.fit_tables(slice_config(config, layers).with_drafts(options.drafts > 0), report)
    if options.max_context > (limit := config.max_position_embeddings):
        raise ValueError(f"--prompts and --context need {options.max_context} tokens; the model's context is {limit}")
    schema = CacheSchema(config, **options.cache_sizes(max(options.requests)))
    begin = time.perf_counter()
    model = options.make_model(config, schema, options.max_step_tokens, options.skew)
    jax.block_until_ready(model.arrays)
    report |= {
        "layers": len(layers),
        "layer_numbers": label,
        "token_budget": options.token_budget,
        "expert_parallel": options.expert_parallel,
        "context": options.context,
        "skew": options.skew,
        "host_bytes": model.expert_memory.host_bytes if model.expert_memory else 0,
        "weights_seconds": time.perf_counter() - begin,
    }
    print(f"weights of layers {label} made in {report['weights_seconds']:.1f} s", file=sys.stderr)
    yield from print_rows(_measure(model, config, options), COLUMNS, what=-7, tokens=7)


def _measure(model, config, options):
    """Yields the results of prompts, then a result of decode steps for each number of requests."""
    prompts = options.prompts
    for requests in options.requests:
        manager = KVCacheManager(config, mesh=options.mesh, **options.cache_sizes(requests))
        budget = max(options.token_budget, requests * (1 + options.drafts))
        engine = Engine(model, manager, token_budget=budget, drafter="model" if options.drafts else None)
        rng = np.random.default_rng(requests)
        compile_seconds = wall_seconds(engine.warm_up)
        print(f"{requests} requests: programs compiled in {compile_seconds:.1f} s", file=sys.stderr)
        for tokens in prompts:
            _, seconds = (wall_seconds(_run_prompt, engine, rng, tokens) for _ in range(2))  # the second run counts
            yield {
                "measurement": "prompt",
                "tokens": tokens,
                "first_token_milliseconds": 1e3 * seconds,
                "tokens_per_second": tokens / seconds,
                "compile_seconds": compile_seconds,
            }
        prompts = ()  # prompts are measured with the first number of requests only
        measure = _load if options.reply else _decode
        row = measure(engine, rng, requests, options) | {"compile_seconds": compile_seconds}
        engine.close()
        if not options.drafts and not options.reply:
            # Measure the on-device loop with the same number of requests in the same cache.
            steps = RandomSteps(model, manager, requests, cache=engine.cache)
            steps.start_requests(options.context)
            row["loop_milliseconds"] = 1e3 * loop_seconds(steps, LOOP_STEPS)
        yield row


def _add(engine, rng, tokens, new_tokens):
    """Adds a request with `tokens` random tokens."""
    ids = rng.integers(2, engine.manager.schema.config.vocab_size, size=tokens)
    return engine.add(ids, max_new_tokens=new_tokens)


def _run_prompt(engine, rng, tokens):
    """Runs a prompt alone until its first token."""
    request = _add(engine, rng, tokens, 1)
    while request.finish_reason is None:
        engine.step()


def _run_steps(engine, count):
    for _ in range(count):
        engine.step()


def _decode(engine, rng, requests, options):
    """Measures steps while all requests decode."""
    added = [_add(engine, rng, options.context, options.new_tokens) for _ in range(requests)]
    while not all(request.generated for request in added):
        engine.step()
    _run_steps(engine, WARM_UP)
    before = sum(len(request.generated) for request in added)
    seconds = wall_seconds(_run_steps, engine, options.steps)
    tokens = sum(len(request.generated) for request in added) - before
    return {
        "measurement": "decode",
        "requests": requests,
        "drafts": options.drafts,
        "step_milliseconds": 1e3 * seconds / options.steps,
        "tokens_per_second": tokens / seconds,
        "token_milliseconds": 1e3 * seconds * requests / max(tokens, 1),
        "acceptance": engine.metrics.acceptance,
    }


def _load(engine, rng, requests, options):
    """Measures the throughput of prompts and replies while `requests` requests run at once."""
    begins = {}  # {request: time at which it was added}
    first_times = {}  # {request: time of its first token}
    ends = {}  # {request: time of its last token}
    begin = time.perf_counter()
    while len(ends) < LOAD_ROUNDS * requests:
        while len(begins) < min(LOAD_ROUNDS * requests, len(ends) + requests):
            begins[_add(engine, rng, options.context, options.reply)] = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            first_times.setdefault(output.request, now)
            if output.request.finish_reason is not None:
                ends[output.request] = now
    seconds = time.perf_counter() - begin
    first_tokens = [1e3 * (first_times[request] - begins[request]) for request in begins]
    tokens = [1e3 * (ends[request] - first_times[request]) / max(options.reply - 1, 1) for request in begins]
    return {
        "measurement": "load",
        "tokens": options.context,
        "reply": options.reply,
        "requests": requests,
        "drafts": options.drafts,
        "first_token_milliseconds": float(np.median(first_tokens)),
        "first_token_milliseconds_p95": float(np.percentile(first_tokens, 95)),
        "token_milliseconds": float(np.median(tokens)),
        "token_milliseconds_p95": float(np.percentile(tokens, 95)),
        "tokens_per_second": len(begins) * (options.context + options.reply) / seconds,
        "acceptance": engine.metrics.acceptance,
    }
