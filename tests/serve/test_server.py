"""The server as its clients see it: OpenAI's own package, and plain HTTP."""

import asyncio
import concurrent.futures
import dataclasses
import json
import math
import re
import resource
import socket
import threading
import time

import httpx2 as httpx
import openai
import pytest

from dsv4_jax.decode import SamplingParams
from dsv4_jax.engine import generate
from dsv4_jax.engine.runner import StepRunner
from dsv4_jax.engine.text import encode
from dsv4_jax.host import PrefixFiles
from dsv4_jax.serve import answers
from dsv4_jax.serve.errors import APIError
from dsv4_jax.serve.protocol import ChatBody, CompletionBody, MessagesBody, ResponsesBody, parse
from tests.serve.conftest import BLOCKS, CONTEXT, SLOTS


WARM = dict(temperature=0.9, top_p=0.95)
PROMPT = "In the beginning God created the heaven and the earth."
# 16 requests, of which four may run; together they need more blocks than there are.
PROMPTS = [PROMPT[: 3 + 3 * i] if i % 2 else PROMPT for i in range(16)]
TOKENS = 24


@pytest.fixture(scope="module")
def expected(bytes_model, make_manager, tokenizer):
    """What `generate` makes of each of PROMPTS with its index as the seed."""
    texts = []
    for first in range(0, len(PROMPTS), SLOTS):
        prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS[first : first + SLOTS]]
        options = dict(
            max_new_tokens=TOKENS, sampling=SamplingParams(0.9, 0, 0.95), seed=first, stop_tokens=(257,), chunk=21
        )
        for prompt, tokens in zip(prompts, generate(bytes_model[0], make_manager(), prompts, **options), strict=True):
            texts.append(tokenizer.decode([*prompt, *tokens])[len(tokenizer.decode(prompt)) :])
    return texts


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_free(server):
    """No request is left, and every block is free that the prefix cache does not hold."""
    engine = server.engine.engine
    manager = engine.manager
    free = manager.free_slots == SLOTS and manager.free_blocks == BLOCKS - engine.prefix.metrics.blocks
    return server.engine.unfinished == 0 and free and not server.engine._running and not server.engine._followers


def test_the_rate_of_streams(server):
    from tests.stress.stream_rate import measure

    found = asyncio.run(measure(server.url, SLOTS, 5, 20))
    assert 0 < found["milliseconds"] <= found["slowest"] and found["first"] > 0 and 0 < found["events"] <= 1
    with pytest.raises(SystemExit, match=r"400 .*prompt of 5 tokens and 9999 new ones"):
        asyncio.run(measure(server.url, 1, 5, 9999))


def test_sixteen_clients_get_what_generate_gives(server, expected):
    async def ask(client, i):
        options = dict(model="tiny", prompt=PROMPTS[i], max_tokens=TOKENS, seed=i, **WARM)
        if i % 4 < 2:
            answer = await client.completions.create(**options)
            return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
        text = ""
        reason = None
        async for event in await client.completions.create(
            stream=True, stream_options=dict(include_usage=True), **options
        ):
            for choice in event.choices:
                text = text + choice.text
                reason = choice.finish_reason
        return text, reason, event.usage

    async def ask_all():
        async with openai.AsyncOpenAI(**server.connect) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(16)))

    before = server.engine.metrics
    answers = asyncio.run(ask_all())
    assert [text for text, _, _ in answers] == expected
    assert len(set(expected)) > 12  # a few begin with the end token
    for i, (_, reason, usage) in enumerate(answers):
        assert usage.prompt_tokens == len(PROMPTS[i]) + 1
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert (reason, usage.completion_tokens) == ("length", TOKENS) or reason == "stop"
    # Most of the equal prompts were found: 48 of their 55 tokens are full blocks.
    cached = [usage.prompt_tokens_details.cached_tokens for _, _, usage in answers]
    assert max(cached) == 48 and sum(count >= 32 for count in cached) >= 4
    metrics = server.engine.metrics
    assert metrics.waits > 0 and metrics.compilations == before.compilations
    wait_until(lambda: is_free(server))


def test_several_answers_are_those_of_following_seeds(server, expected):
    ask = server.client.completions.create
    answer = ask(model="tiny", prompt=PROMPT, n=3, best_of=4, seed=0, max_tokens=TOKENS, logprobs=0, **WARM)
    singles = [ask(model="tiny", prompt=PROMPT, seed=i, max_tokens=TOKENS, logprobs=0, **WARM) for i in range(4)]
    found = [single.choices[0] for single in singles]
    assert found[0].text == expected[0] and found[2].text == expected[2]
    score = {choice.text: sum(p := choice.logprobs.token_logprobs) / len(p) for choice in found}
    assert [choice.text for choice in answer.choices] == sorted(score, key=score.get, reverse=True)[:3]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == sum(single.usage.completion_tokens for single in singles)
    echo = ask(model="tiny", prompt=PROMPT, n=3, best_of=4, max_tokens=0, echo=True, **WARM)
    assert [choice.text for choice in echo.choices] == [PROMPT] * 3
    events = list(ask(model="tiny", prompt=[PROMPT, "In"], n=2, seed=0, max_tokens=TOKENS, stream=True, **WARM))
    texts = {i: "".join(c.text for e in events for c in e.choices if c.index == i) for i in range(4)}
    assert [texts[0], texts[1]] == [found[0].text, found[1].text]
    assert texts[2] == ask(model="tiny", prompt="In", seed=0, max_tokens=TOKENS, **WARM).choices[0].text


def test_text_ends_before_a_stop_string_that_spans_tokens(server, expected):
    seed = max(range(16), key=lambda i: len(expected[i]))
    text = expected[seed]
    options = dict(model="tiny", prompt=PROMPTS[seed], max_tokens=TOKENS, seed=seed, **WARM)
    stop = text[8:12]
    cut = text[: text.index(stop)]
    cancelled = server.engine.metrics.cancelled
    answer = server.client.completions.create(stop=["never", stop], **options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (cut, "stop")
    assert answer.usage.completion_tokens < TOKENS
    events = list(server.client.completions.create(stop=stop, stream=True, **options))
    assert "".join(event.choices[0].text for event in events) == cut
    assert [event.choices[0].finish_reason for event in events][-1] == "stop"
    wait_until(lambda: server.engine.metrics.cancelled == cancelled + 2 and is_free(server))


def test_stop_ids_logprobs_and_echo(server, tokenizer):
    ask = server.client.completions.create
    options = dict(model="tiny", prompt=[256, 73, 110], temperature=0, max_tokens=12)
    plain = ask(logprobs=0, **options).choices[0]
    logprobs = plain.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 12
    assert max(logprobs.token_logprobs) < 0 and logprobs.text_offset == sorted(logprobs.text_offset)
    assert ask(echo=True, **options).choices[0].text == "In" + plain.text
    assert "".join(e.choices[0].text for e in ask(echo=True, stream=True, **options)) == "In" + plain.text
    assert ask(echo=True, **options | dict(max_tokens=0)).choices[0].text == "In"
    # The answer to the same prompt as a chat of one token shows which token comes first.
    stopping = ask(extra_body=dict(stop_token_ids=list(range(258))), **options)
    assert (stopping.choices[0].text, stopping.choices[0].finish_reason) == ("", "stop")
    assert stopping.usage.completion_tokens == 1


def test_chat(server, tokenizer):
    messages = [dict(role="system", content="Be kind."), dict(role="user", content=[dict(type="text", text="Hi")])]
    options = dict(model="tiny", messages=messages, seed=3, max_completion_tokens=20)
    chat = server.client.chat.completions.create(logprobs=True, **options)
    ids = tokenizer.encode("System: Be kind.\n\nUser: Hi\n\nAssistant:").ids
    text = server.client.completions.create(model="tiny", prompt=ids, seed=3, max_tokens=20).choices[0].text
    choice = chat.choices[0]
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (text, "assistant", "length")
    assert len(choice.logprobs.content) == 20 and chat.usage.prompt_tokens == len(ids)
    events = list(server.client.chat.completions.create(stream=True, **options))
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == text
    # Without a limit, the answer may fill the context.
    long = server.client.chat.completions.create(model="tiny", messages=messages, temperature=0, logprobs=True)
    assert long.usage.total_tokens == CONTEXT + 1 or long.choices[0].finish_reason == "stop"


def test_likeliest_tokens_of_a_completion(server):
    ask = server.client.completions.create
    options = dict(
        model="tiny", prompt=PROMPT, seed=1, max_tokens=20, extra_body=dict(ignore_eos=True), temperature=0.3
    )
    plain, choice = (ask(logprobs=k, **options).choices[0] for k in (0, 5))
    assert choice.text == plain.text and plain.logprobs.top_logprobs is None
    found = choice.logprobs
    assert found.token_logprobs == plain.logprobs.token_logprobs and len(found.tokens) == 20
    ranks = []
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        ranks.append(list(top).index(token))
        assert top[token] == logprob and len(top) == 5 + (ranks[-1] == 5)
        assert list(top.values()) == sorted(top.values(), reverse=True) and sum(map(math.exp, top.values())) < 1
    assert min(ranks) < 5 == max(ranks), ranks  # also drawn tokens that are none of the likeliest
    events = list(ask(logprobs=5, stream=True, **options))
    assert [t for e in events for t in e.choices[0].logprobs.top_logprobs] == found.top_logprobs
    # Each of several answers has its own.
    both = ask(logprobs=5, n=2, **options).choices
    assert both[0].logprobs == found and both[1].text != choice.text


def test_likeliest_tokens_of_a_chat(server):
    options = dict(model="tiny", messages=[dict(role="user", content="é")], seed=5, max_completion_tokens=12)
    ask = server.client.chat.completions.create
    choice = ask(logprobs=True, top_logprobs=20, extra_body=dict(ignore_eos=True), **options).choices[0]
    for entry in choice.logprobs.content:
        logprobs = [top.logprob for top in entry.top_logprobs]
        assert len(logprobs) == 20 and logprobs == sorted(logprobs, reverse=True)
        for top in (entry, *entry.top_logprobs):
            (byte,) = top.bytes if len(top.token) < 5 or top.token.startswith("bytes:") else [0]
            assert top.token in (chr(byte), f"bytes:\\x{byte:02x}", "<bos>", "<eos>") and top.logprob < 0
            assert top.token != entry.token or top.logprob == entry.logprob
    assert any(top.token.startswith("bytes:") for entry in choice.logprobs.content for top in entry.top_logprobs)
    events = ask(logprobs=True, top_logprobs=20, stream=True, extra_body=dict(ignore_eos=True), **options)
    assert [x for e in events for x in (e.choices[0].logprobs or choice.logprobs).content][
        -12:
    ] == choice.logprobs.content


def test_a_prompt_is_scored(server, tokenizer):
    """As evaluation harnesses ask for it: the prompt's own log-probabilities, though the prefix cache has it."""
    ask = server.client.completions.create
    made = ask(model="tiny", prompt=PROMPT, temperature=0, max_tokens=20, logprobs=2)
    ids = tokenizer.encode(PROMPT).ids
    drawn = made.choices[0].logprobs
    whole = [
        *ids,
        *(int(name[-2:], 16) if name[:6] == "bytes:" else tokenizer.encode(name).ids[1] for name in drawn.tokens),
    ]
    asked = dict(model="tiny", prompt=whole, echo=True, temperature=0)
    answer = ask(max_tokens=0, logprobs=2, **asked)
    choice = answer.choices[0]
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, choice.finish_reason) == (len(whole), 0, "length")
    assert usage.prompt_tokens_details.cached_tokens == 0 and choice.text == PROMPT + made.choices[0].text
    found = choice.logprobs
    assert found.tokens[0] == "<bos>" and found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert "".join(found.tokens[1 : len(ids)]) == PROMPT and found.tokens[len(ids) :] == drawn.tokens
    assert found.text_offset[: len(ids)] == [0, *range(len(PROMPT))]
    # The model's own tokens: what was found when they were drawn, but for other programs' roundings of bfloat16.
    assert found.token_logprobs[len(ids) :] == pytest.approx(drawn.token_logprobs, abs=0.05)
    pairs = list(zip(found.tokens, found.top_logprobs, strict=True))
    assert all(max(top.values()) == top[token] for token, top in pairs[len(ids) :])
    # New tokens follow those of the prompt, in one answer or in events.
    more = ask(max_tokens=4, logprobs=0, **asked).choices[0]
    assert more.logprobs.token_logprobs[1 : len(whole)] == pytest.approx(found.token_logprobs[1:], abs=0.05)
    assert len(more.logprobs.tokens) == len(whole) + 4 and more.logprobs.text_offset[len(whole)] == len(choice.text)
    events = list(ask(max_tokens=4, logprobs=0, stream=True, **asked))
    assert [token for e in events for token in e.choices[0].logprobs.tokens] == more.logprobs.tokens
    wait_until(lambda: is_free(server))


def test_models_health_and_pages(server):
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").max_model_len == CONTEXT
    assert server.http.get("/health").json() == dict(status="ok")
    assert server.http.get("/ready").json() == dict(status="ready")
    page = server.http.get("/").text
    assert "<title>" in page and 'rel="icon"' in page and "by requests<br>and the prefix cache" in page
    text = server.http.get("/metrics").text
    assert "dsv4_jax_slots 4.0" in text and "process_resident_memory_bytes" in text
    assert 'dsv4_jax_http_responses_total{path="/ready",status="200"} 1.0' in text


def test_a_restarted_server_finds_prompts_on_disk(serve_again, tmp_path):
    body = dict(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, seed=1)
    found = []
    for _ in range(2):
        with serve_again(files=PrefixFiles(tmp_path, "100MB")) as server:
            answer = server.http.post("/v1/completions", json=body).json()
            usage = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            text = server.http.get("/metrics").text
            found.append((answer["choices"][0]["text"], usage))
            assert f"dsv4_jax_prefix_disk_hit_tokens_total {usage:.1f}" in text
            assert "dsv4_jax_prefix_disk_errors_total 0.0" in text and "dsv4_jax_prefix_disk_bytes " in text
    (text, before), (again, after) = found
    assert (before, after) == (0, 48) and again == text


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        (dict(), "prompt", "prompt: this field is needed"),
        (dict(prompt=""), None, None),  # the beginning of a text
        (dict(prompt=[]), "prompt", "prompt: List should have at least 1 item after validation"),
        (dict(prompt=3), "prompt", "prompt: Input should be a valid array"),
        (dict(prompt=[1, "a"]), "prompt", "prompt[0][1]: Input should be a valid integer"),
        (dict(prompt=["a", True]), "prompt", "prompt[1]: Input should be a valid array"),
        (dict(prompt=[[]]), "prompt", "prompt is empty"),
        (dict(prompt=[5, 258]), "prompt", "prompt[1]=258 is outside the vocabulary: ids go from 0 to 257"),
        (dict(prompt=[2**70]), "prompt", "prompt"),
        (dict(prompt="a", stop_token_ids=[258]), "stop_token_ids", "stop_token_ids[0]=258 is outside the vocabulary"),
        (dict(prompt="a", max_tokens="many"), "max_tokens", "max_tokens: Input should be a valid integer"),
        (dict(prompt="a", max_tokens=-1), "max_tokens", "greater than or equal to 0"),
        (dict(prompt="a", max_tokens=256), "max_tokens", "a prompt of 2 tokens and 256 new ones are more than the"),
        (dict(prompt="a" * 300), "max_tokens", "context of 256 tokens"),
        (dict(prompt="a", temperature=-0.5), "temperature", "temperature=-0.5 must be 0 (greedy) or positive"),
        (dict(prompt="a", top_p=0), "top_p", "top_p=0.0 must be in (0, 1]"),
        (
            dict(prompt="a", color=3, n=0),
            "n",
            "than or equal to 1; color: there is no such field",
        ),
        (dict(prompt="a", n=3, best_of=2), "best_of", "best_of=2 must be at least n=3"),
        (dict(prompt="a", n=2, temperature=0), "n", "n=2: answers with temperature 0 would all be the same"),
        (dict(prompt="a", best_of=2, temperature=0), "best_of", "best_of=2: answers with temperature 0 would all be"),
        (dict(prompt="a", n=45), "n", "1 prompts with n=45 make 45 requests, the server takes 44 at once"),
        (dict(prompt=["a"] * 45), "prompt", "45 prompts with n=1 make 45 requests, the server takes 44 at once"),
        (dict(prompt=["a", "b"], n=2, best_of=23), "best_of", "2 prompts with best_of=23 make 46 requests"),
        (dict(prompt="a", best_of=10**12), "best_of", "best_of: Input should be less than or equal to 128"),
        (dict(prompt="a", logprobs=21), "logprobs", "logprobs: Input should be less than or equal to 20"),
        (dict(prompt="a", logprobs=5, echo=True, top_logprobs=0), None, None),
        (
            dict(prompt=["a" * 220] * 20, max_tokens=30, logprobs=20, echo=True, n=2, best_of=2),
            "logprobs",
            "the answer may have 210840 log-probabilities, the most is 200000: ask for fewer tokens",
        ),
        (dict(prompt="a", top_logprobs=2), "top_logprobs", "top_logprobs: this server only takes 0"),
        (dict(prompt="a", stop=[""]), "stop", "stop[0]: String should have at least 1 character"),
        (dict(prompt="a", frequency_penalty=0.5), "frequency_penalty", "frequency_penalty: this server only takes 0"),
        (dict(prompt="a", frequency_penalty=0, suffix=None, logit_bias={}, user="me"), None, None),
        (dict(messages=[]), "messages", "messages: List should have at least 1 item"),
        (dict(messages=[dict(role="bot", content="x")]), "messages", "messages[0].role: Input should be 'system'"),
        (dict(messages=[dict(role="user")]), "messages", "messages[0]: content: this field is needed"),
        (
            dict(messages=[dict(role="user", content="x")], thinking=dict(type="enabled")),
            "thinking",
            "thinking: this needs",
        ),
        (dict(prompt="x", tools=[{}]), "tools", "tools: this server only takes []"),
        (
            dict(messages=[dict(role="user", content="x")], top_logprobs=3),
            "top_logprobs",
            "top_logprobs=3 needs logprobs: true",
        ),
        (
            dict(prompt="a", temperature=1e6),
            "temperature",
            "temperature=1000000.0 must be 0 (greedy) or positive, from",
        ),
        ({"prompt": "a", "x" * 5000: 1}, "x" * 100, f"{'x' * 100}: there is no such field"),
        (dict(prompt="a", stream_options=dict(include_usage=True, include_obfuscation=False)), None, None),
        (
            dict(prompt="a", stream_options=dict(include_obfuscation=True)),
            "stream_options",
            "stream_options.include_obfuscation: Input should be False",
        ),
        (dict(messages=[dict(role="user", content="x")], top_logprobs=0, logprobs=False), None, None),
    ],
)
def test_a_mistake_is_named(server, body, param, message, monkeypatch):
    monkeypatch.setattr(answers, "_MAX_LOGPROBS", 200_000)
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = server.http.post(path, json=dict(model="tiny", max_tokens=1) | body)
    if message is None:
        assert response.status_code == 200
    else:
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert message in error["message"]


def test_connections_that_send_no_whole_head_end(serve_again, monkeypatch):
    monkeypatch.setattr("dsv4_jax.serve.server._HEAD_SECONDS", 0.3)
    with serve_again() as server:
        address = server.url.removeprefix("http://").split(":")

        def answer(sent):
            with socket.create_connection(address, timeout=20) as connection:
                connection.sendall(sent)
                received = b""
                while part := connection.recv(4096):  # until the server closes
                    received += part
            head, _, body = received.partition(b"\r\n\r\n")
            return int(head.split()[1]), json.loads(body)["error"]

        for sent, status, message in [
            (b"", 408, "the head of the request did not arrive within 0.3 seconds"),
            (b"GET /health HTTP/1.1\r\nHost:", 408, "the head of the request did not arrive"),
            (b"nonsense\r\n\r\n", 400, "Invalid HTTP request"),
        ]:
            found, error = answer(sent)
            assert found == status and message in error["message"] and error["type"] == "invalid_request_error"
        # A connection that is kept for further requests, and a body that comes late, are no half-sent heads.
        assert server.http.get("/health").status_code == 200
        time.sleep(0.5)
        assert server.http.get("/health").status_code == 200
        late = (part for part in [b'{"model": "tiny", "prompt": [5],', b'"max_tokens": 1}'] if time.sleep(0.3) is None)
        response = server.http.post("/v1/completions", content=late, headers={"Content-Type": "application/json"})
        assert response.status_code == 200
        monkeypatch.setattr("dsv4_jax.serve.server._SPARE_DESCRIPTORS", 2**40)
        found, error = answer(b"")
        assert found == 503 and "too many connections" in error["message"]


def test_new_connections_take_the_place_of_the_longest_silent_one(serve_again, monkeypatch):
    with serve_again() as server:
        server.http.close()
        wait_until(lambda: not server.server.server_state.connections)
        address = server.url.removeprefix("http://").split(":")
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        monkeypatch.setattr("dsv4_jax.serve.server._SPARE_DESCRIPTORS", limit - 3)
        silent = []
        for count in range(1, 4):
            silent.append(socket.create_connection(address, timeout=20))
            wait_until(lambda count=count: len(server.server.server_state.connections) == count)
            time.sleep(0.01)  # the event loop's clock has milliseconds
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert b"503" in silent[0].recv(4096).partition(b"\r\n")[0]
        for connection in silent[1:]:  # had sent nothing for a shorter time
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)
        for connection in silent:
            connection.close()


def test_other_names_of_the_server_are_refused(serve_again):
    """As a page of another site has them, by whose name a browser reaches this machine."""
    hosts = frozenset({"localhost", "127.0.0.1", "::1", "models.example"})
    with serve_again(allowed_hosts=hosts) as server:
        port = server.url.rpartition(":")[2]

        def status(**headers):
            return server.http.get("/v1/models", headers=headers).status_code

        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "MODELS.example"):
            assert status(Host=host) == 200 and status(Origin=f"http://{host}") == 200
        for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "[::2]", "[::", "127.0.0.1.x"):
            assert status(Host=host) == 403 and status(Origin=f"https://{host}") == 403
        assert status(Origin="null") == 403
        answer = server.http.post("/v1/messages", headers=dict(Host="evil.example"), json={}).json()
        assert answer["type"] == "error" and answer["error"]["type"] == "permission_error"
        assert "host 'evil.example' is none of 127.0.0.1, ::1, localhost, models.example" in answer["error"]["message"]


def ticks_beside(function):
    """Runs a function in another thread; returns its seconds, and the longest for which this one had to wait."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        begin = last = time.monotonic()
        future = pool.submit(function)
        longest = 0.0
        while not future.done():
            time.sleep(0.001)
            longest = max(longest, time.monotonic() - last)
            last = time.monotonic()
        future.result()
        return time.monotonic() - begin, longest


def test_a_long_text_is_encoded_beside_others(tokenizer):
    text = "word " * 400_000
    seconds, longest = ticks_beside(lambda: encode(tokenizer, text))
    assert longest < seconds / 2
    assert encode(tokenizer, text[:5000]) == tokenizer.encode(text[:5000]).ids


@pytest.mark.parametrize("kind", [ChatBody, ResponsesBody, MessagesBody])
@pytest.mark.parametrize(
    "wrong",
    [dict(messages=[{}] * 200_000), dict(input=[{}] * 200_000), {f"k{i}": 1 for i in range(200_000)}]
    + [dict(messages=[dict(role="user", content=[{}] * 200_000)], tools=[3] * 200_000)]
    + [dict(messages=[dict(role="user", content="a")] * 200_000, input=[dict(role="user", content=[{}] * 200_000)])],
    ids=["messages", "input", "fields", "parts", "items"],
)
def test_a_body_of_many_faults_has_few_errors(kind, wrong):
    with pytest.raises(APIError) as error:
        parse(kind, json.dumps(wrong | dict(color=1)).encode())
    left_out = re.findall(r"and (\d+) more", error.value.message)
    assert sum(map(int, left_out)) <= 4  # of one body, whatever its length
    assert error.value.message.count(";") <= 8 and len(error.value.message) < 1000


def test_other_mistakes_have_their_status(server):
    def refused(status, method, path, **what):
        response = server.http.request(method, path, **what)
        assert response.status_code == status
        return response.json()["error"]["message"]

    json_type = {"Content-Type": "application/json"}
    assert "there is no model 'gpt'" in refused(404, "POST", "/v1/completions", json=dict(model="gpt", prompt="a"))
    assert "Not Found" in refused(404, "GET", "/v1/nothing")
    assert "Method Not Allowed" in refused(405, "GET", "/v1/completions")
    assert "must be application/json" in refused(415, "POST", "/v1/completions", content="{}")
    assert "Invalid JSON" in refused(400, "POST", "/v1/completions", content="{", headers=json_type)
    assert "Input should be an object" in refused(400, "POST", "/v1/completions", json=[1])
    long = b'{"prompt": "' + b"a" * server.app.state.service.max_body_bytes + b'"}'
    assert "the body is longer than" in refused(413, "POST", "/v1/completions", content=long, headers=json_type)
    chunks = (long[i : i + 2**16] for i in range(0, len(long), 2**16))  # of no declared length
    assert "the body is longer than" in refused(413, "POST", "/v1/completions", content=chunks, headers=json_type)


def test_a_client_that_goes_away_frees_its_blocks(server):
    cancelled = server.engine.metrics.cancelled
    body = dict(model="tiny", prompt=PROMPT, max_tokens=190, ignore_eos=True)
    with server.http.stream("POST", "/v1/completions", json=body | dict(stream=True, n=3)) as response:
        next(response.iter_lines())
        assert server.engine.unfinished == 3
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/completions", json=body, timeout=0.3)
    wait_until(lambda: is_free(server))
    assert server.engine.metrics.cancelled == cancelled + 4


def test_a_full_queue_says_when_to_come_back(server, monkeypatch):
    monkeypatch.setattr(server.engine, "capacity", 1)
    with server.http.stream(
        "POST", "/v1/completions", json=dict(model="tiny", prompt=PROMPT, max_tokens=150, stream=True)
    ):
        response = server.http.post("/v1/completions", json=dict(model="tiny", prompt="a"))
    assert response.status_code == 429 and response.headers["Retry-After"] == "1"
    assert response.json()["error"]["code"] == "queue_full"
    wait_until(lambda: is_free(server))


def test_a_step_that_raises_fails_its_requests_only(server, expected, monkeypatch):
    """Some of four requests run when a step raises; one with a slot that did not fit, and two that wait, go on."""
    engine = server.engine.engine
    failed = []
    launch = StepRunner.__call__
    engine.prefix.evict(BLOCKS)  # all prompts are read anew, the first ones in several steps

    def raising(runner, cache, schedule, after=None):
        wait_until(lambda: failed or server.engine.unfinished == 6)
        if not failed and 1 < len(schedule.requests) < len(engine.running):
            failed.extend(schedule.requests)
            raise RuntimeError("the device is on fire")
        return launch(runner, cache, schedule, after)

    monkeypatch.setattr(StepRunner, "__call__", raising)
    answers = [None] * 6

    def ask(i):
        body = dict(model="tiny", prompt=PROMPTS[i], max_tokens=TOKENS, seed=i, stream=i == 0, **WARM)
        answers[i] = server.http.post("/v1/completions", json=body)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    # The first one's answer had begun.
    assert answers[0].status_code == 200 and "data: [DONE]" not in answers[0].text
    messages = [json.loads(answers[0].text.strip().rpartition("data: ")[2])]
    messages += [answer.json() for answer in answers[1:] if answer.status_code == 500]
    assert len(messages) == len(failed) > 1
    for message in messages:
        assert message["error"]["type"] == "server_error" and "fire" not in message["error"]["message"]
    for i, answer in enumerate(answers[1:], 1):
        assert answer.status_code == 500 or answer.json()["choices"][0]["text"] == expected[i]
    assert server.http.get("/health").status_code == 200
    wait_until(lambda: is_free(server))


def test_key_time_limit_and_graceful_stop(serve_again):
    body = dict(model="tiny", prompt=PROMPT, max_tokens=190, ignore_eos=True)
    with serve_again(api_key="secret", request_seconds=1.5, grace_seconds=0.2) as server:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer é"},
        ):
            headers = {name: value.encode() for name, value in headers.items()}
            response = server.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 401 and "API key" in response.json()["error"]["message"]
        assert server.http.get("/metrics").status_code == 200
        server.http.headers["Authorization"] = "Bearer secret"

        response = server.http.post("/v1/completions", json=body | dict(n=4))
        assert response.status_code == 504 and response.json()["error"]["code"] == "timeout"
        assert '"code":"timeout"' in server.http.post("/v1/completions", json=body | dict(n=4, stream=True)).text
        wait_until(lambda: is_free(server))

        with server.http.stream("POST", "/v1/completions", json=body | dict(n=4, stream=True)) as response:
            lines = response.iter_lines()
            next(lines)
            server.server.should_exit = True
            wait_until(lambda: server.app.state.service.stopping)
            last = [line for line in lines if line][-1]
        assert "the server is stopping" in json.loads(last.removeprefix("data: "))["error"]["message"]
        with pytest.raises(httpx.TransportError):
            server.http.get("/health")
    assert is_free(server)


def test_running_requests_end_before_the_server_does(serve_again, expected):
    """Those that wait too: there are blocks for one request and a half."""

    async def ask(client, i):
        return await client.completions.create(
            model="tiny", prompt=PROMPTS[i], max_tokens=TOKENS, seed=i, stream=True, **WARM
        )

    async def ask_all(server):
        async with openai.AsyncOpenAI(**server.connect) as client:
            streams = await asyncio.gather(*(ask(client, i) for i in range(4)))
            server.server.should_exit = True
            return ["".join([event.choices[0].text async for event in stream]) for stream in streams]

    with serve_again(free=9) as server:
        assert asyncio.run(ask_all(server)) == expected[:4]
        metrics = server.engine.metrics
        assert metrics.finished == 4 and metrics.waits + metrics.preemptions > 0


@pytest.mark.parametrize(("top_k", "expected"), [(-1, 0), (0, 0), (7, 7)])
def test_a_body_has_the_fields_of_sampling_params(top_k, expected):
    body = CompletionBody(model="tiny", prompt="a", top_k=top_k, top_p=0.5, temperature=0.25)
    assert {field.name for field in dataclasses.fields(SamplingParams)} <= body.model_fields_set
    assert SamplingParams(body.temperature, body.top_k, body.top_p) == SamplingParams(0.25, expected, 0.5)
