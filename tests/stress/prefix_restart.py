"""Measures the time to the first token of a long prompt: cold, found in memory, and found on disk by a new engine."""

import tempfile
import time
from typing import Any

import numpy as np
import rich
import rich.table
import tyro

from dsv4_jax.checkpoint import load_checkpoint
from dsv4_jax.data import BLOCK_TOKENS, packaged_checkpoint, read_config
from dsv4_jax.decode.programs import CompiledModel
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager, PrefixCache, PrefixFiles


def first_token(engine: Engine, prompt: np.ndarray) -> tuple[tuple[float, float], int]:
    """Returns the seconds and CPU seconds to a prompt's first token, and the number of tokens that were cached."""
    begin = time.perf_counter(), time.process_time()
    request = engine.add(prompt, max_new_tokens=1)
    next(engine.stream(request))
    return (time.perf_counter() - begin[0], time.process_time() - begin[1]), request.cached_tokens


def measure(tokens: int = 16384, rounds: int = 10) -> None:
    """Measures the packaged model and prints medians; fails if the ratio of disk to memory is above 1.2.

    Args:
      tokens: number of tokens of the prompt.
      rounds: number of restarts, each with one prompt from disk and one from memory.
    """
    config = read_config(packaged_checkpoint())
    model = CompiledModel(load_checkpoint(packaged_checkpoint(), config))
    prompt = np.random.default_rng(0).integers(0, 256, tokens).astype(np.int32)
    sizes: dict[str, Any] = {"num_blocks": 2 * tokens // BLOCK_TOKENS, "max_requests": 4, "max_context": tokens + 256}
    times: dict[str, list[tuple[float, float]]] = {"cold": [], "memory": [], "disk": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 + rounds):
            manager = KVCacheManager(config, block_tokens=BLOCK_TOKENS, **sizes)
            prefix = PrefixCache(manager, key="packaged", files=PrefixFiles(folder, "20GB"))
            engine = Engine(model, manager, prefix=prefix, token_budget=256)
            engine.warm_up()
            for found in ("disk" if times["cold"] else "cold", "memory"):
                seconds, cached = first_token(engine, prompt)
                assert (cached > 0) == (found != "cold"), f"{cached} tokens were cached"
                times[found].append(seconds)
            files = prefix.metrics.files
            engine.close()
    table = rich.table.Table("prompt", "median, ms", "least, ms", "most, ms", "CPU time, median, ms")
    medians = {name: np.median(1000 * np.array(seconds), axis=0) for name, seconds in times.items()}
    for name, (wall, cpu) in medians.items():
        ends = (1000 * f(times[name])[0] for f in (min, max))
        table.add_row(name, *(f"{x:.1f}" for x in (wall, *ends, cpu)))
    rich.print(table, files)
    ratio, cpu_ratio = medians["disk"] / medians["memory"]
    print(f"{cached} of {tokens} tokens were cached; disk / memory = {ratio:.2f}, of CPU time {cpu_ratio:.2f}")
    if ratio > 1.2:
        raise SystemExit("the ratio must be at most 1.2")


if __name__ == "__main__":
    tyro.cli(measure)
