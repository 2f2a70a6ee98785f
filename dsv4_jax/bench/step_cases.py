"""A benchmark case that measures steps of one size at one context: the time of a step and of its kernels."""

import dataclasses
import statistics
import time

import jax

from dsv4_jax.bench import timing
from dsv4_jax.bench.cases import tree_bytes
from dsv4_jax.bench.kernel_kinds import kernel_report
from dsv4_jax.bench.random_steps import DRAWS, RandomSteps
from dsv4_jax.bench.step_options import MARGIN
from dsv4_jax.bench.step_work import step_work
from dsv4_jax.bench.tables import Row
from dsv4_jax.cache import KVCache


STEPS = DRAWS  # number of decode steps whose mean time is reported
CHUNK_STEPS = 4  # number of steps whose mean time is reported if they read chunks of prompts
WARM_UP = 4  # number of steps before the first measured one; XLA records its CUDA graphs in the second step


@dataclasses.dataclass(frozen=True)
class StepCase:
    """Steps of one batch size, with one number of tokens and of drafts per request, at one context.

    Attributes:
      steps: runs the steps.
      context: maximum number of tokens that a request holds while decode steps are measured; with chunks of a prompt,
        number of tokens before the chunk.
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
        """Starts requests and runs `count` steps. Waits until a step is complete before the next one is launched."""
        self.steps.start_requests(self.context - (0 if self.steps.is_prefill else MARGIN))
        self._run(count)

    def _run(self, count):
        for _ in range(count):
            jax.block_until_ready(self.steps.step(self.steps.batch()))

    def time(self, loop: bool) -> dict[str, float]:
        """Measures a step by the wall clock.

        Args:
          loop: whether to measure the on-device loop, too. It is measured only if a step has one token a request, as a
            step of the loop has.

        Returns:
          {"milliseconds": time of a step, "dispatch_milliseconds": time until the call of a step returns,
          "loop_milliseconds": time of a step of the on-device loop, if it is measured}.
        """
        self.begin(WARM_UP)
        times = {
            "milliseconds": 1e3 * _steps_in_a_row(self.steps, self.count),
            "dispatch_milliseconds": 1e3 * _dispatch(self.steps, self.count // 2),
        }
        if loop and self.steps.tokens == 1:
            times["loop_milliseconds"] = 1e3 * loop_seconds(self.steps, STEPS)
        return times

    def profile(self, times: dict[str, float], report: Row) -> Row:
        """Returns the result of the case. On a GPU, steps run again, so that their kernels are measured.

        The result includes the floor, a lower bound of the time of a step. For a decode step, this is the time to read
        the step's bytes at the report's bandwidth of a copy. For a chunk of a prompt, it is the larger of two times: to
        read the bytes except the head's weights, and to compute the layers' matrix products.

        Args:
          times: the result of `time`.
          report: the report, with the measured rates of a copy and, for chunks, of a matrix product.
        """
        steps = self.steps
        schema = steps.manager.schema
        mesh = steps.manager.mesh
        operations, nbytes, head_bytes = step_work(steps, self.context + (steps.tokens if steps.is_prefill else 0))
        copy_rate = report["copy_bytes_per_second"]
        floor = nbytes / copy_rate
        if steps.is_prefill:
            floor = max((nbytes - head_bytes) / copy_rate, operations / report["matmul_operations_per_second"])
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
            "head_bytes": head_bytes,
            "floor_milliseconds": 1e3 * floor,
            "percent_of_floor": 1e5 * floor / times["milliseconds"],
            "kernel_milliseconds": {},
            "cache_bytes": tree_bytes(KVCache.abstract(schema, mesh)),
        }
        if jax.default_backend() == "gpu":
            self.begin(1)
            launches = timing.kernels(lambda: self._run(self.count))
            calls = self.count * (1 if mesh is None else mesh.size)  # each device launches the kernels of a step
            row |= kernel_report(launches, steps.program.call.as_text() or "", calls)
            row["gap_milliseconds"] = times["milliseconds"] - sum(row["kernel_milliseconds"].values())
        return row


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
    """Measures the seconds of a step in the on-device loop of `count` steps. The second run of the loop is measured."""
    jax.block_until_ready(steps.loop(steps.batch(reserve=count - 1), count))  # the first run compiles
    return timing.wall_seconds(steps.loop, steps.batch(reserve=count - 1), count) / count
