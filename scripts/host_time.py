"""Measures the time of one core that an engine's decode step takes on the host, with a model that computes nothing."""

import cProfile
import dataclasses
import pstats
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
import tyro

from dsv4_jax.checkpoint import read_tokenizer
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.decode import SamplingParams, step_launch
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoModel:
    """A model that computes nothing. Its logits make token 1 the next token after every token."""

    logits_row: Any

    def __call__(self, cache: Any, batch: Any) -> tuple[jax.Array, Any]:
        return jnp.zeros((len(batch.slots), 1)), cache.begin_step(batch)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return jnp.broadcast_to(self.logits_row, (len(hidden), len(self.logits_row)))


def measure(requests: int, steps: int, profile: bool, grammars: bool = False, **options: Any) -> dict[str, float]:
    """Measures the CPU time that Python's main thread uses for a step, in milliseconds.

    Returns:
      {"step": median over the steps of the time of a step, "call": that of the call of the compiled program,
      "bookkeeping": that of the rest of the step, "least_bookkeeping": the minimum over the steps of this rest}.
    """
    config = read_config(packaged_checkpoint())
    length = 4 + 3 * (steps + 10)
    sizes = {"max_requests": requests, "max_context": 2 * length, "block_tokens": 128}
    manager = KVCacheManager(config, num_blocks=requests * -(-2 * length // 128), **sizes)
    model = NoModel(jnp.zeros((config.vocab_size,)).at[1].set(1.0))
    params = {}
    if grammars:
        from dsv4_jax.engine.grammar import Vocabulary

        tokenizer: Any = read_tokenizer(packaged_checkpoint())
        vocabulary = Vocabulary(tokenizer, config.vocab_size, config.eos_token_id)
        params = {"grammar": vocabulary.compile(r"start: /(.|\n)*/")}
    engine = Engine(model, manager, token_budget=4 * requests, **options)
    for i in range(requests):
        sampling = SamplingParams(temperature=0.0, top_k=i % 3)
        stop_tokens = config.eos_token_id if grammars else [3] * (i % 2)
        engine.add([i % 200, 2], max_new_tokens=length, seed=i, stop_tokens=stop_tokens, sampling=sampling, **params)
    launch = step_launch.launch
    call_seconds = []
    step_seconds = []

    def timed_launch(program, *args, **options):
        def timed(*args, **options):
            begin = time.thread_time()
            results = program(*args, **options)
            call_seconds.append(time.thread_time() - begin)
            return results

        return launch(timed, *args, **options)

    def run(count):
        for _ in range(count):
            begin = time.thread_time()
            outputs = engine.step()
            step_seconds.append(time.thread_time() - begin)
            assert not outputs or len(outputs) == requests

    run(10)
    step_launch.launch = timed_launch
    step_seconds.clear()
    run(steps)
    step_launch.launch = launch
    step_ms = 1e3 * np.array(step_seconds)
    call_ms = 1e3 * np.array(call_seconds)
    if profile:
        with cProfile.Profile(time.thread_time) as profiler:
            run(steps)
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(40)
    result = {"step": np.median(step_ms), "call": np.median(call_ms), "bookkeeping": np.median(step_ms - call_ms)}
    result |= {"least_bookkeeping": (step_ms - call_ms).min()}
    return {name: round(float(value), 3) for name, value in result.items()}


def main(
    requests: tuple[int, ...] = (1, 32, 128, 256), steps: int = 100, profile: bool = False, grammars: bool = False
) -> None:
    """Prints milliseconds a step of the thread's CPU time: in all, in calls of the compiled step, and besides them.

    Args:
      requests: numbers of requests that decode at once.
      steps: number of measured steps.
      profile: also print a profile.
      grammars: give every request a grammar, so that each step computes a mask of tokens for every request.
    """
    for count in requests:
        rich.print(count, measure(count, steps, profile, grammars))


if __name__ == "__main__":
    tyro.cli(main)
