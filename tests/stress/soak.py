"""Runs millions of random operations on requests and compares every live byte after each."""

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import rich
import rich.progress
import tyro


# The naive model belongs to the tests.
sys.path.insert(0, str(Path(__file__).parents[2]))

REPORT_EVERY = 256  # operations


def soak(operations: int = 1_000_000, processes: int = 2, seed: int = 0, kv_format: str = "v4") -> None:
    """Runs random operations on random requests and counts the bytes that differ from the naive model.

    Args:
      operations: number of operations of all processes.
      processes: number of processes, each with its own cache, manager, prefix cache and seed.
      seed: seed of the first process.
      kv_format: "v4", "per_entry" or "plain".
    """
    context = multiprocessing.get_context("spawn")
    began = time.monotonic()
    queue: Any = context.Queue()
    shares = [operations // processes + (i < operations % processes) for i in range(processes)]
    workers = [
        context.Process(target=_work, args=(queue, share, seed + i, kv_format), daemon=True)
        for i, share in enumerate(shares)
    ]
    for worker in workers:
        worker.start()
    total: dict[str, int] = {}
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    with rich.progress.Progress(*columns, console=rich.console.Console(stderr=True)) as progress:
        task = progress.add_task("operations", total=operations)
        running = processes
        while running:
            kind, value = queue.get()
            if kind == "done":
                running -= 1
                for name, count in value.items():
                    total[name] = total.get(name, 0) + count
            elif kind == "failed":
                sys.exit(value)
            else:
                progress.advance(task, value)
    seconds = time.monotonic() - began
    for name, count in total.items():
        rich.print(f"{name:20} {count:>12,}")
    rich.print(f"{operations:,} operations in {seconds:.0f} s, {total['differing bytes']} differing bytes")


def _work(queue, operations, seed, kv_format):
    """Runs the operations of one process; the first differing byte ends the soak."""
    # JAX reads these when it is imported. The programs are small: one thread each, quick to compile.
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"
    from tests.cache.life import Life, random_operations
    from tests.cache.test_life import manager

    life = Life(manager(kv_format=kv_format), seed=seed, every=(1, 2, None)[seed % 3])
    name = "nothing"
    i = 0
    try:
        for i, (name, a, b) in enumerate(random_operations(seed, operations)):
            life.apply(name, a, b)
            if (i + 1) % REPORT_EVERY == 0 or i + 1 == operations:
                queue.put(("progress", i % REPORT_EVERY + 1))
        life.drain()
    except BaseException as error:
        queue.put(("failed", f"seed {seed}, operation {i} ({name}): {error!r}; {life.differing} differing bytes"))
        raise
    metrics = life.prefix.metrics
    counts = {"refused": life.refused, "prefix hits": metrics.hits, "blocks evicted": metrics.evicted_blocks}
    queue.put(("done", life.done | counts | {"bytes compared": life.compared, "differing bytes": life.differing}))


if __name__ == "__main__":
    tyro.cli(soak)
