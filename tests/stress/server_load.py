"""Sends many requests to a server of the packaged model, disconnects some clients, and checks answers and cache."""

import asyncio
import dataclasses
import json
import multiprocessing
import re
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
import rich
import tyro

from dsv4_jax.bench.reports import write_report
from dsv4_jax.checkpoint import load_checkpoint, read_tokenizer
from dsv4_jax.data import packaged_checkpoint, read_config
from dsv4_jax.decode import CompiledModel, SamplingParams
from dsv4_jax.engine import Engine, PromptLookup
from dsv4_jax.host import KVCacheManager, PrefixCache


SLOTS = 16
CONTEXT = 640
BLOCK_TOKENS = 128
DRAFTS = 2
BLOCKS = 56  # too few for 16 long requests
TOKEN_BUDGET = SLOTS * (1 + DRAFTS)
SAMPLING = SamplingParams(0.8, 0, 0.95)
TEXT = Path(__file__).parents[2] / "README.md"


@dataclasses.dataclass(frozen=True)
class Load:
    """The requests to send.

    Attributes:
      requests: number of requests.
      concurrency: number of clients, each of which sends a request after the answer to the one before.
      disconnecting: share of requests whose client disconnects early.
      prompt_tokens, new_tokens: minimum and maximum of a request.
      seed: seed of the requests.
    """

    requests: int = 300
    concurrency: int = 64
    disconnecting: float = 1 / 3
    prompt_tokens: tuple[int, int] = (16, 480)
    new_tokens: tuple[int, int] = (8, 120)
    seed: int = 0

    def make(self) -> list[dict[str, Any]]:
        """Returns prompt, max_tokens and seed of each request, and the token at which its client disconnects."""
        rng = np.random.default_rng(self.seed)
        text = TEXT.read_text()
        requests = []
        for i in range(self.requests):
            size, limit = (int(rng.integers(low, high + 1)) for low, high in (self.prompt_tokens, self.new_tokens))
            # A byte is a token. Every second prompt shares its beginning with others.
            begin = 0 if i % 2 else int(rng.integers(len(text) - size))
            leaves = int(rng.integers(0, limit)) if rng.random() < self.disconnecting else None
            requests.append({"prompt": text[begin : begin + size], "max_tokens": limit, "seed": i, "leaves": leaves})
        return requests


async def drive(connect: dict[str, Any], model: str, load: Load) -> dict[str, Any]:
    """Sends the requests.

    Args:
      connect: arguments of `openai.AsyncOpenAI`.
      model: name of the model.
      load: the requests.

    Returns:
      texts: text of each request; first_token, token: seconds to the first token, and for each token after it, of every
      complete request; seconds: total time; memory: bytes of the server's process over time.
    """
    requests = load.make()
    texts = [""] * load.requests
    first_token = []
    per_token = []
    memory = []
    due = iter(range(load.requests))

    async def send(client, i, prompt, max_tokens, seed, leaves):
        if leaves == 0:  # disconnects before the first token, perhaps while waiting for a slot
            task = asyncio.create_task(client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens))
            await asyncio.sleep(0.05)
            task.cancel()
            return
        start = time.perf_counter()
        first = 0.0
        count = 0
        options: dict[str, Any] = {
            "temperature": SAMPLING.temperature,
            "top_p": SAMPLING.top_p,
            "seed": seed,
            "stream": True,
        }
        more = {"logprobs": 0, "extra_body": {"ignore_eos": True}}
        stream = await client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, **options, **more)
        async with stream:
            async for event in stream:
                first = first or time.perf_counter()
                texts[i] += event.choices[0].text
                count += len(event.choices[0].logprobs.tokens)
                if leaves is not None and count >= leaves:
                    return
        assert count == max_tokens
        first_token.append(first - start)
        per_token.append((time.perf_counter() - first) / (count - 1))

    async def work(client):
        for i in due:
            await send(client, i, **requests[i])

    async def watch(client):
        while True:
            page = (await client._client.get(str(client.base_url).replace("/v1/", "/metrics"))).text
            memory.append(float(re.findall(r"^process_resident_memory_bytes (\S+)", page, re.MULTILINE)[0]))
            await asyncio.sleep(0.5)

    async with openai.AsyncOpenAI(**connect) as client:
        watching = asyncio.create_task(watch(client))
        start = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(load.concurrency)))
        seconds = time.perf_counter() - start
        watching.cancel()
    return {"texts": texts, "first_token": first_token, "token": per_token, "seconds": seconds, "memory": memory}


class _Silent:
    """A drafter that drafts nothing: plain decoding in the programs that verify drafts."""

    def draft(self, tokens: np.ndarray, count: int) -> list[int]:
        return []


def alone(model: Any, manager: KVCacheManager, tokenizer: Any, load: Load, token_budget: int) -> list[str]:
    """Returns the complete text of each request, generated without server, drafts and prefix cache."""
    engine = Engine(model, manager, token_budget=token_budget, drafter=_Silent(), batch_invariant=True)
    added = [
        engine.add(tokenizer.encode(r["prompt"]).ids, max_new_tokens=r["max_tokens"], sampling=SAMPLING, seed=r["seed"])
        for r in load.make()
    ]
    while engine.busy:
        engine.step()
    return [tokenizer.decode(request.generated) for request in added]


def count_wrong(load: Load, texts: list[str], expected: list[str]) -> int:
    """Counts the wrong texts. A client that disconnected may have a prefix, with a part of a character at its end."""
    return sum(
        not whole.startswith(text.rstrip("\ufffd")) if request["leaves"] is not None else text != whole
        for request, text, whole in zip(load.make(), texts, expected, strict=True)
    )


def left_over(engine: Engine) -> dict[str, int]:
    """Counts slots and blocks that are not free after all requests, with an empty prefix cache."""
    schema = engine.manager.schema
    assert engine.prefix is not None
    engine.prefix.evict(schema.num_blocks)
    slots = schema.max_requests - engine.manager.free_slots
    blocks = schema.num_blocks - engine.manager.free_blocks
    return {"lost_slots": slots, "lost_blocks": blocks}


def summary(seconds: list[float]) -> dict[str, float]:
    """Returns the median and the 95th percentile in milliseconds."""
    cuts = statistics.quantiles(seconds, n=20, method="inclusive")
    return {"p50": round(1e3 * cuts[9], 1), "p95": round(1e3 * cuts[18], 1)}


def _manager():
    sizes = {
        "max_requests": SLOTS,
        "max_context": CONTEXT,
        "block_tokens": BLOCK_TOKENS,
        "max_query_tokens": 1 + DRAFTS,
    }
    return KVCacheManager(read_config(packaged_checkpoint()), num_blocks=BLOCKS, **sizes)


def _serve(pipe):
    """Runs the server's process: sends its port, then, after SIGTERM, its metrics and what was left over."""
    from dsv4_jax.serve import AsyncEngine, HTTPServer, ServerOptions, create_app

    manager = _manager()
    model = CompiledModel(load_checkpoint(packaged_checkpoint()))
    # Checksums on: a block that changed in the cache fails the request that reads it.
    prefix = PrefixCache(manager, key="king_james", debug=True)
    # In programs of several sizes, the last bit of a logit would depend on other requests.
    options: dict[str, Any] = {"token_budget": TOKEN_BUDGET, "batch_invariant": True}
    engine = Engine(model, manager, drafter=PromptLookup(), prefix=prefix, **options)
    app = create_app(AsyncEngine(engine, max_waiting=256), read_tokenizer(packaged_checkpoint()), ServerOptions("tiny"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        HTTPServer(app, grace_seconds=5, access_log=False).run([listener])
    metrics = dataclasses.asdict(engine.metrics)
    acceptance = round(engine.metrics.acceptance, 4)
    names = "finished cancelled failed waits preemptions restarts steps prompt_tokens generated_tokens compilations"
    counts = {name: metrics[name] for name in names.split()}
    pipe.send(counts | {"acceptance": acceptance, "hit_tokens": prefix.metrics.hit_tokens})
    pipe.send(left_over(engine))


def main(load: Load, out: Path | None = None) -> None:
    """Starts a server of the packaged model, sends it the load, and prints a report.

    Args:
      load: the requests.
      out: also write the report to this file.
    """
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,))
    process.start()
    url = f"http://127.0.0.1:{pipe.recv()}"
    connect = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 600}
    with openai.OpenAI(**connect) as client:  # returns when all programs are compiled
        client.completions.create(model="tiny", prompt=TEXT.read_text()[:200], max_tokens=8)
    got = asyncio.run(drive(connect, "tiny", load))
    time.sleep(1.0)
    process.terminate()  # SIGTERM: graceful shutdown
    counts = pipe.recv()
    lost = pipe.recv()
    process.join()
    model = CompiledModel(load_checkpoint(packaged_checkpoint()))
    expected = alone(model, _manager(), read_tokenizer(packaged_checkpoint()), load, TOKEN_BUDGET)
    second_half = got["memory"][len(got["memory"]) // 2 :]
    middle = len(second_half) // 2
    report = dict(
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        load=dataclasses.asdict(load),
        slots=SLOTS,
        blocks=BLOCKS,
        seconds=round(got["seconds"], 1),
        answered=len(got["first_token"]),
        first_token_milliseconds=summary(got["first_token"]),
        token_milliseconds=summary(got["token"]),
        generated_tokens_per_second=round(counts["generated_tokens"] / got["seconds"], 1),
        batch_invariant=True,
        wrong_texts=count_wrong(load, got["texts"], expected),
        memory_mib={
            "third_quarter": round(statistics.mean(second_half[:middle]) / 2**20, 1),
            "fourth_quarter": round(statistics.mean(second_half[middle:]) / 2**20, 1),
        },
        engine=counts,
        **lost,
    )
    rich.print_json(json.dumps(report))
    if out is not None:
        write_report(out, report)


if __name__ == "__main__":
    tyro.cli(main)
