"""Drives a server of the packaged model for an hour, and records its memory, its Python objects and its JAX arrays."""

import asyncio
import collections
import contextlib
import ctypes
import dataclasses
import gc
import multiprocessing
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import rich
import tyro

from dsv4_jax.bench.reports import write_report


TEXT = Path(__file__).parents[2] / "README.md"
MEBIBYTE = 2**20
COUNTERS = ("finished", "cancelled", "failed", "generated_tokens", "prefix_blocks", "compilations")


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of the server.

    Attributes:
      minutes: length of the run.
      rate: number of requests begun per second, if fewer than `concurrency` are unfinished.
      concurrency: maximum number of unfinished requests.
      disconnecting: share of requests whose client disconnects early.
      prompt_tokens, new_tokens: minimum and maximum of a request.
      interval: number of seconds between samples of the memory.
      context: the server's --context. Its cache has room for 16 requests of this length: the most that prefixes take.
      seed: seed of the requests.
    """

    minutes: float = 60.0
    rate: float = 2.0
    concurrency: int = 24
    disconnecting: float = 0.25
    prompt_tokens: tuple[int, int] = (16, 900)
    new_tokens: tuple[int, int] = (8, 64)
    interval: float = 30.0
    context: int = 4096
    seed: int = 0


class _Mallinfo(ctypes.Structure):
    """The struct `mallinfo2` of the C library."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def sample() -> dict[str, Any]:
    """Returns the memory of this process: in all, of the C library, of Python objects and of JAX arrays."""
    import jax

    pages = int(Path("/proc/self/statm").read_text().split()[1])
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    heap = mallinfo()
    arrays = jax.live_arrays()
    gc.collect()
    objects = gc.get_objects()
    types = collections.Counter(f"{type(item).__module__}.{type(item).__qualname__}" for item in objects)
    return {
        "resident": pages * 4096,
        "malloc_in_use": heap.uordblks + heap.hblkhd,
        "malloc_free": heap.fordblks,
        "python_objects": len(objects),
        "jax_arrays": len(arrays),
        "jax_bytes": sum(array.nbytes for array in arrays),
        "threads": threading.active_count(),
        "types": dict(types.most_common(300)),
    }


def _serve(pipe, port, context):
    """Runs the server's process, and answers each message of the pipe with a sample."""
    from dsv4_jax.cli import main as command_line

    def answer():
        while pipe.recv() is not None:
            pipe.send(sample())

    threading.Thread(target=answer, daemon=True).start()
    command_line(["serve", "--port", str(port), "--context", str(context)])


async def drive(url: str, load: Load, take_sample: Any, record: Any) -> None:
    """Sends requests until the time is over, and records samples meanwhile."""
    rng = np.random.default_rng(load.seed)
    text = TEXT.read_text()
    running: set[asyncio.Task] = set()
    sent = 0
    count = 0
    start = time.monotonic()

    async def send(client, number):
        size, limit = (int(rng.integers(low, high + 1)) for low, high in (load.prompt_tokens, load.new_tokens))
        # A byte is a token. Every second prompt shares its beginning with others.
        begin = 0 if number % 2 else int(rng.integers(len(text) - size))
        events = int(rng.integers(0, limit)) if rng.random() < load.disconnecting else None
        body = {"model": "king_james", "prompt": text[begin : begin + size], "max_tokens": limit, "seed": number}
        body |= {"stream": True, "logprobs": 2}
        with contextlib.suppress(httpx2.HTTPError):  # the server's counters tell how requests ended
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if events is not None:
                        events -= line.startswith("data:")
                        if events < 0:
                            return

    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
        while (seconds := time.monotonic() - start) < 60 * load.minutes:
            if seconds >= count * load.interval:
                page = (await client.get(f"{url}/metrics")).text
                found = dict(re.findall(r"^dsv4_jax_(\w+) (\S+)$", page, re.MULTILINE))
                counts = {name: int(float(found.get(f"{name}_total", found.get(name, 0)))) for name in COUNTERS}
                record({"seconds": round(seconds), "sent": sent} | counts | await asyncio.to_thread(take_sample))
                count += 1
            if len(running) < load.concurrency:
                running.add(task := asyncio.create_task(send(client, sent)))
                task.add_done_callback(running.discard)
                sent += 1
            await asyncio.sleep(1 / load.rate)
        for task in running:
            task.cancel()


def grown(samples: list[dict[str, Any]], count: int = 12) -> dict[str, tuple[int, int]]:
    """Returns the types of which the most objects were added between a quarter of the run and its end."""
    before, after = (samples[at]["types"] for at in (len(samples) // 4, -1))
    added = sorted(after, key=lambda name: before.get(name, 0) - after[name])[:count]
    return {name: (before.get(name, 0), after[name]) for name in added}


def plot(report: dict[str, Any], path: Path) -> None:
    """Plots the process's memory, the part that the C library hands out, and the counts of objects and arrays."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = report["samples"]
    minutes = np.asarray(samples["seconds"]) / 60
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    for name, label in (("resident", "resident"), ("malloc_in_use", "in use, C library"), ("jax_bytes", "JAX arrays")):
        above.plot(minutes, np.asarray(samples[name]) / MEBIBYTE, label=label)
    above.set(ylabel="MiB", ylim=(0, None), title=f"A server's memory, {samples['sent'][-1]:,} requests")
    above.legend(loc="lower right")
    labels = {"python_objects": "Python objects", "jax_arrays": "JAX arrays", "prefix_blocks": "blocks of prefixes"}
    for name, label in labels.items():
        counts = np.asarray(samples[name])
        below.plot(minutes, counts / counts.max(), label=f"{label} (most: {counts.max():,})")
    below.set(xlabel="minutes", ylabel="share of the most", ylim=(0, None))
    below.legend()
    figure.savefig(path, dpi=120)


def main(load: Load, out: Path | None = None, picture: Path | None = None) -> None:
    """Starts a server, sends it the load, and prints how its memory grows.

    Args:
      load: the requests.
      out: also write the samples to this file.
      picture: plot them to this file.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, port, load.context))
    process.start()
    url = f"http://127.0.0.1:{port}"

    def is_ready():
        try:
            return httpx2.get(f"{url}/ready").is_success
        except httpx2.HTTPError:
            return False

    while not is_ready():
        time.sleep(1.0)

    def take_sample():
        pipe.send("sample")
        return pipe.recv()

    samples: list[dict[str, Any]] = []

    def record(new):
        samples.append(new)
        columns = {name: [item[name] for item in samples] for name in new if name != "types"}
        report = {"load": dataclasses.asdict(load), "grown_types": grown(samples), "samples": columns}
        rich.print({name: value for name, value in new.items() if name != "types"})
        if out is not None:
            write_report(out, report)
        if picture is not None:
            plot(report, picture)

    asyncio.run(drive(url, load, take_sample, record))
    process.terminate()
    process.join()


if __name__ == "__main__":
    tyro.cli(main)
