"""Measures the time of a token in streams that a server answers at once, with a client that takes little time."""

import asyncio
import json
import statistics
import time
import urllib.parse
import urllib.request
from typing import Any

import rich
import tyro


async def read_stream(url: urllib.parse.SplitResult, body: dict[str, Any]) -> tuple[float, float, int, int]:
    """Sends one request to `/v1/completions` and reads its events.

    Returns:
      Times by `time.perf_counter` of the first and the last event with text, the number of tokens by the server's
      count, and the number of events.
    """
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    status = await reader.readline()
    if b" 200 " not in status:
        answer = (await reader.read()).decode()
        writer.close()
        raise SystemExit(f"{status.decode().strip()}: {answer.partition('\r\n\r\n')[2]}")
    # Lines of the body's chunked encoding and of the head are skipped; a line is parsed only if it is the last one.
    first = 0.0
    last = 0.0
    events = 0
    usage = b""
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        if line.find(b'"choices":[]') >= 0:
            usage = line
        elif not line.startswith(b"data: [DONE]"):
            last = time.perf_counter()
            events = events + 1
            first = first or last
    writer.close()
    if not usage:
        raise SystemExit("the server ended a stream without its usage")
    return first, last, json.loads(usage[6:])["usage"]["completion_tokens"], events


async def measure(url: str, streams: int, prompt_tokens: int, new_tokens: int) -> dict[str, float]:
    """Starts all streams at once.

    Returns:
      milliseconds: the mean over streams of the time of a token, from a stream's first event to its last; slowest: its
      maximum; first: the median time to the first event; events: events for each token.
    """
    with urllib.request.urlopen(f"{url}/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    body = {"model": model, "stream": True, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    begin = time.perf_counter()
    target = urllib.parse.urlsplit(url)
    prompts = [[5 + (7 * i + j) % 200 for j in range(prompt_tokens)] for i in range(streams)]
    found = await asyncio.gather(*(read_stream(target, body | {"prompt": prompt}) for prompt in prompts))
    times = [1e3 * (last - first) / (tokens - 1) for first, last, tokens, _ in found]
    result = {"milliseconds": statistics.mean(times), "slowest": max(times)}
    result |= {"first": 1e3 * statistics.median(first - begin for first, *_ in found)}
    return result | {"events": sum(events for *_, events in found) / sum(tokens for _, _, tokens, _ in found)}


def main(
    url: str = "http://127.0.0.1:8000",
    streams: tuple[int, ...] = (32,),
    prompt_tokens: int = 16,
    new_tokens: int = 512,
    repeats: int = 3,
) -> None:
    """Prints milliseconds a token of streams from a server that runs, without a tokenizer or with one.

    Args:
      url: the server's address.
      streams: numbers of streams that run at once; the server needs `--max-requests` of as many.
      prompt_tokens: tokens of each prompt; their ids are below 205.
      new_tokens: tokens of each answer.
      repeats: number of measurements of each.
    """
    for count in streams:
        for _ in range(repeats):
            result = asyncio.run(measure(url, count, prompt_tokens, new_tokens))
            rich.print(count, {name: round(value, 3) for name, value in result.items()})


if __name__ == "__main__":
    tyro.cli(main)
