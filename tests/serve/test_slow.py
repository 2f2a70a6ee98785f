"""What takes longer: many clients that come and go, thousands of mutated requests, and the page in a browser."""

import asyncio
import collections
import functools
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dsv4_jax.serve import app
from tests.serve.conftest import SLOTS


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(serve_again):
    """With checksums of cached blocks: one that changed would fail the request that reads it."""
    with serve_again(free=14, debug=True, batch_invariant=True) as server:
        yield server


def test_clients_come_and_go(server, bytes_model, make_manager, tokenizer):
    from tests.stress.server_load import Load, alone, count_wrong, drive

    load = Load(requests=40, concurrency=24, prompt_tokens=(8, 100), new_tokens=(6, 50), seed=1)
    got = asyncio.run(drive(server.connect, "tiny", load))
    assert count_wrong(load, got["texts"], alone(bytes_model[0], make_manager(), tokenizer, load, 24)) == 0
    assert 20 < len(got["first_token"]) == sum(request["leaves"] is None for request in load.make()) < 35
    while server.engine.unfinished:
        time.sleep(0.01)
    metrics = server.engine.metrics
    manager = server.engine.engine.manager
    assert metrics.failed == 0 and metrics.cancelled > 5 and metrics.waits > 0 and metrics.preemptions > 0
    assert (manager.free_slots, manager.free_blocks) == (SLOTS, 14 - metrics.prefix.blocks)


BODY = {
    "model": "tiny", "prompt": "In the beginning", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "seed": 3, "n": 1,
    "stop": ["x"], "stop_token_ids": [10], "logprobs": 2, "echo": False, "stream": False, "user": "me",
}  # fmt: skip
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 2,
    "stream": True,
    "logprobs": True,
    "top_logprobs": 2,
}
WEIRD = """null true -1 0 1e400 -1e400 NaN 1e-320 99999999999999999999999 1.5 "" "\ud800" "\u0000" [] [[]] [null] {}
{"a":1} [1e9] [257] [-1] ["a",1] [["a"]] [9223372036854775808] "text // 'a' [[[[[[""".split()
WEIRD += ["[" * 400 + "]" * 400, '"' + "é" * 3000 + '"', "\x00", "\xff"]
HEADERS = b"""Content-Type: text/plain|Content-Type: application/json; charset=utf-16|Content-Type:|Content-Type: \xff
Content-Length: -1|Content-Length: 5|Content-Length: 5, 6|Content-Length: x|Content-Length: 9999999999|no colon
Transfer-Encoding: chunked|Transfer-Encoding: gzip|Host:|Host: a b|Authorization: \xff|Authorization: Bearer
: no name|\x00: \x00|Upgrade: websocket|Accept-Encoding: \x80|Range: bytes=0-|Content-Encoding: gzip""".replace(
    b"\n", b"|"
).split(b"|")
HEADERS += [b"X: " + b"a" * 100_000, b"Cookie: " + b"a=b;" * 1000]


def mutated(rng):
    """The bytes of a request that is wrong in one or several places, most probably."""
    chat = rng.random() < 0.3
    body = dict(CHAT if chat else BODY)
    path = b"/v1/chat/completions" if chat else b"/v1/completions"
    text = json.dumps(body)
    kind = rng.integers(4)
    if kind == 0:  # another value
        field = str(rng.choice(list(body)))
        text = text.replace(f'"{field}": {json.dumps(body[field])}', f'"{field}": {rng.choice(WEIRD)}')
    elif kind == 1:  # another field
        text = (
            text[:-1]
            + f', "{rng.choice(["tools", "suffix", "best_of", "top_logprobs", "x", "é", ""])}": {rng.choice(WEIRD)}}}'
        )
    content = bytearray(text.encode("utf-8", "surrogatepass"))
    if kind == 2:
        for _ in range(rng.integers(1, 6)):
            at = int(rng.integers(len(content) - 1))
            how = rng.integers(4)
            if how == 0:
                content[at] = int(rng.integers(256))
            elif how == 1:
                del content[at + 2 : at + int(rng.integers(3, 9))]
            elif how == 2:
                content[at:at] = rng.bytes(int(rng.integers(1, 9)))
            else:
                del content[at + 2 :]
    headers = [
        b"Host: x",
        b"Content-Type: application/json",
        b"Content-Length: %d" % len(content),
        b"Connection: close",
    ]
    if kind == 3:
        new = HEADERS[rng.integers(len(HEADERS))]
        name = new.partition(b":")[0]
        headers = [header for header in headers if header.partition(b":")[0] != name] + [new]
        if rng.random() < 0.2:
            path = bytes(rng.choice(list(b"/v1cometsn?#%\xff"), size=9).tolist())
    return b"\r\n".join([b"POST %s HTTP/1.1" % path, *headers, b"", bytes(content)])


def exchange(server, request):
    """(status, body) of what a server answers to raw bytes."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    answer = bytearray()
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(request)
        try:
            while received := connection.recv(2**16):
                answer += received
        except ConnectionResetError:
            pass  # the server answered and closed before it had read all of the request
        except TimeoutError:
            raise AssertionError(request) from None
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_mutated_requests_are_refused_with_a_message(server, monkeypatch):
    monkeypatch.setattr(app, "_BODY_SECONDS", 0.2)  # some bodies never end
    rng = np.random.default_rng(0)
    statuses = collections.Counter()
    requests = [mutated(rng) for _ in range(2000)]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(functools.partial(exchange, server), requests))
    for number, (request, (status, body)) in enumerate(zip(requests, answers, strict=True)):
        statuses[status] += 1
        assert status == 200 or 400 <= status < 500, (number, request, status, body)
        assert b"Traceback" not in body and len(body) > 10, (number, request)
        if status != 200 and body != b"Invalid HTTP request received.":
            assert json.loads(body)["error"]["message"], (number, request)
    assert statuses[400] > 1000 and {404, 408, 413, 415} <= statuses.keys()
    answer = server.client.completions.create(model="tiny", prompt="In", max_tokens=3, seed=0)
    assert answer.usage.total_tokens >= 4
    assert server.engine.metrics.failed == 0


def test_the_page_shows_tokens_as_they_come(server, browser):
    def find(name):
        return browser.find_element("id", name)

    def fill(**values):
        for name, value in values.items():
            find(name).clear()
            find(name).send_keys(str(value))

    def wait(condition):
        end = time.monotonic() + 60
        while not (found := condition()):
            assert time.monotonic() < end, (browser.page_source, browser.get_log("browser"))
            time.sleep(0.05)
        return found

    # A random model may end at once.
    ask = server.client.completions.create
    options = dict(model="tiny", prompt="In the beginning", temperature=0.8, max_tokens=60)
    answers = ((seed, ask(seed=seed, **options)) for seed in range(99))
    seed, answer = next(a for a in answers if a[1].choices[0].finish_reason == "length")

    browser.get(server.url)
    wait(lambda: find("model").text == "tiny")
    fill(prompt="In the beginning", max_tokens=60, seed=seed)
    find("run").click()
    wait(lambda: "60 tokens in" in find("speed").text)
    shown = browser.execute_script("return document.getElementById('text').textContent")
    assert shown == "In the beginning" + answer.choices[0].text
    assert len(browser.find_elements("css selector", "#text span")) > 10  # pieces, not one text
    assert "of 17 prompt tokens were in the cache" in find("speed").text
    wait(lambda: "since the start" in find("acceptance").text and "4 slots" in find("requests").text)
    assert "prompt tokens found" in find("prefix").text
    assert len(browser.find_elements("css selector", "#cache meter")) == len(server.engine.metrics.pools)
    assert "iB" in find("cache").text and "waiting for a slot or for blocks" in find("requests").text

    fill(max_tokens=230, temperature=5)
    find("run").click()
    find("stop").click()
    wait(lambda: server.engine.unfinished == 0 and find("run").is_enabled())

    fill(max_tokens=9999)
    find("run").click()
    wait(lambda: "are more than the context of" in find("text").text)
    assert not [entry for entry in browser.get_log("browser") if "400" not in entry["message"]]
