"""Bodies of real clients: fields that change no answer are accepted, others refused by name."""

import json
import re
import time

import pytest

from dsv4_jax.serve import answers
from dsv4_jax.serve.protocol import NEUTRAL, UNUSED
from tests.paths import DATA
from tests.serve.test_chat import BOTH, HI, MESSAGES_TOOLS, RESPONSES_TOOLS, TOOLS, call, calls


BASES = {
    "completions": dict(model="tiny", prompt="Hi", max_tokens=9),
    "chat/completions": dict(model="tiny", messages=HI, max_tokens=9),
    "responses": dict(model="tiny", input="Hi", max_output_tokens=9),
    "messages": dict(model="tiny", messages=HI, max_tokens=9),
}
BASE_LIMITS = {"chat/completions": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}
# What Claude Code 2.1.197 sends with every request, but for the texts.
CLAUDE_CODE = dict(
    model="tiny",
    max_tokens=32000,
    system=[dict(type="text", text="You are Claude Code.", cache_control=dict(type="ephemeral"))],
    messages=[dict(role="user", content=[dict(type="text", text="Hi", cache_control=dict(type="ephemeral"))])],
    tools=[tool | dict(type="custom", cache_control=dict(type="ephemeral")) for tool in MESSAGES_TOOLS],
    metadata=dict(user_id="a"),
    thinking=dict(type="adaptive"),
    output_config=dict(effort="medium"),
    context_management=dict(edits=[dict(type="clear_thinking_20251015", keep="all")]),
    mcp_servers=[],
    speed="standard",
)
# What Codex 0.171.0 sends, but for the texts.
CODEX = dict(
    model="tiny",
    max_output_tokens=None,
    instructions="You are Codex.",
    input=[dict(type="message", role="user", content=[dict(type="input_text", text="Hi")])],
    tools=[
        *RESPONSES_TOOLS,
        dict(type="web_search", external_web_access=False),
        dict(type="namespace", name="files", description="d", tools=[RESPONSES_TOOLS[0] | dict(name="find")]),
    ],
    tool_choice="auto",
    parallel_tool_calls=True,
    reasoning=dict(effort="medium", summary="auto"),
    store=False,
    include=["reasoning.encrypted_content"],
    prompt_cache_key="k",
    prompt_cache_retention="24h",
    prompt_cache_options=dict(mode="explicit", ttl="12h"),
    client_metadata=dict(session_id="a"),
    metadata=dict(a="b"),
    text=dict(verbosity="medium"),
)


def post(server, path, **body):
    response = server.http.post(f"/v1/{path}", json=BASES.get(path, {}) | body)
    return response.status_code, response.json(), response


@pytest.mark.parametrize("path", BASES)
def test_fields_without_effect(scripted, path):
    """All at once, and each value that is neutral where the field is not supported."""
    scripted.say("</think>ok")
    unused = {name: dict(a="b") for name in UNUSED if (path, name) != ("responses", "store")}
    status, answer, _ = post(scripted, path, **unused, user="u", temperature=1e-8, color=None)
    assert status == 200, answer
    for name, values in NEUTRAL.items():
        for value in values:
            status, answer, _ = post(scripted, path, **{name: value})
            # The protocol's own field of this name may have other values.
            assert status == 200 or (path, name) == ("messages", "tool_choice"), answer
        status, answer, _ = post(scripted, path, **{name: ["else"]})
        assert status == 400 and name in answer["error"]["message"]


def cached_tokens(answer):
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens"))


@pytest.mark.parametrize("path", BASES)
def test_a_salt_keeps_prefixes_apart(scripted, path):
    """Timing and `cached_tokens` tell what others asked only within a salt."""
    long = path + "a" * 610  # no prompt ends at a boundary of blocks, where a repetition finds less
    body = {name: [dict(role="user", content=long)] if name == "messages" else long for name in BASES[path]}
    body = {name: body[name] for name in ("messages", "prompt", "input") if name in body}
    found = []
    for salt in (None, "x", "y", "x", None):
        scripted.say("</think>ok")
        status, answer, _ = post(scripted, path, **body, cache_salt=salt)
        assert status == 200, answer
        found.append(cached_tokens(answer) > 500)
    assert found == [False, False, False, True, True]
    status, answer, _ = post(scripted, path, **body, cache_salt="")
    assert status == 400 and "cache_salt: String should have at least 1 character" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("written", ["Hm.</think>Four.", "</think>", "Hm.</think>Both." + BOTH, "Hm.</think>a stop b"])
def test_every_token_that_was_drawn_is_counted(scripted, stream, written):
    """The one that ended the answer, too, and equally in all protocols that have chats."""
    tools = {"chat/completions": TOOLS, "responses": RESPONSES_TOOLS, "messages": MESSAGES_TOOLS}
    counts = {}
    for path in tools:
        scripted.say(written)
        stop = {"chat/completions": "stop", "messages": "stop_sequences"}
        options = {stop[path]: ["stop"]} if path in stop and "stop" in written else {}
        options |= {"tools": tools[path], BASE_LIMITS[path]: 400, "stream": stream}
        if stream and path == "chat/completions":
            options |= {"stream_options": {"include_usage": True}}
        response = scripted.http.post(f"/v1/{path}", json=BASES[path] | options)
        lines = response.text.splitlines() if stream else [f"data: {response.text}"]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        usages = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
        usage = [usage for usage in usages if usage][-1]
        counts[path] = usage.get("completion_tokens") or usage["output_tokens"]
        if "total_tokens" in usage:
            assert usage["total_tokens"] == len(scripted.prompts[0]) + counts[path]
    drawn = len(scripted.tokens)
    until_stop = len("Hm.") + 1 + len("a stop")  # </think> is one token, and so is each character
    expected = {path: until_stop if path != "responses" else drawn for path in tools} if "stop" in written else None
    assert counts == (expected or dict.fromkeys(tools, drawn))


@pytest.mark.parametrize("path", [*BASES, "messages/count_tokens"])
@pytest.mark.parametrize("model", [None, "gpt"])
def test_a_request_names_its_model(scripted, path, model):
    """OpenAI's and Anthropic's servers refuse a request without one, each in its own shape."""
    body = BASES.get(path, BASES["messages"]) | dict(model=model)
    if not model:
        del body["model"]
    for asked in (body, body | ({} if model else dict(model=None))):
        response = scripted.http.post(f"/v1/{path}", json=asked)
        answer = response.json()
        assert response.status_code == (404 if model else 400)
        message = "there is no model 'gpt'" if model else "model: this field is needed"
        assert message in answer["error"]["message"]
        kind = "not_found_error" if model else "invalid_request_error"
        assert answer["error"]["type"] == kind and (answer.get("type") == "error") == path.startswith("messages")


def test_the_page_lists_the_fields():
    """Every field that is accepted without effect, and no other."""
    page = (DATA.parents[1] / "docs" / "serve.md").read_text()
    rows = page.partition("| field | accepted |\n| --- | --- |\n")[2].partition("\n\n")[0].splitlines()
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    nested = {"thinking", "annotations", "provider_specific_fields", "summary", "generate_summary"}
    nested |= {"disable_parallel_tool_use", "budget_tokens", "display", "user", "prompt_cache_breakpoint"}
    assert listed - nested == {*UNUSED, *NEUTRAL} and nested <= listed


def test_claude_code(scripted, release):
    scripted.say("Hm.</think>Both." + BOTH)
    status, answer, _ = post(scripted, "messages", **CLAUDE_CODE)
    assert (status, answer["stop_reason"], len(answer["content"])) == (200, "tool_use", 4), answer
    blocks = [dict(type="redacted_thinking", data="x"), *answer["content"]]
    results = [dict(type="tool_result", tool_use_id=block["id"], content="ok") for block in answer["content"][2:]]
    turns = [dict(role="assistant", content=blocks), dict(role="user", content=results)]
    written = scripted.prompts[0] + scripted.tokens
    scripted.say("Well.</think>Done.")
    status, answer, _ = post(scripted, "messages", **CLAUDE_CODE | dict(messages=CLAUDE_CODE["messages"] + turns))
    assert status == 200 and answer["content"][1]["text"] == "Done."
    assert scripted.prompts[0][: len(written)] == written
    assert answer["usage"]["cache_read_input_tokens"] >= 0.9 * len(written)
    count = {name: value for name, value in CLAUDE_CODE.items() if name != "max_tokens"}
    status, answer, _ = post(
        scripted, "messages/count_tokens", **count | dict(messages=CLAUDE_CODE["messages"] + turns)
    )
    assert (status, answer) == (200, dict(input_tokens=len(scripted.prompts[0])))
    status, answer, _ = post(scripted, "messages/count_tokens", color=1)
    assert (
        status == 400 and answer["type"] == "error" and "messages: this field is needed" in answer["error"]["message"]
    )
    assert post(scripted, "messages/nothing")[1]["type"] == "error"


def test_a_prompt_that_is_too_long_in_messages(scripted):
    """Claude Code compacts a conversation on these words."""
    long = [dict(role="user", content="a" * 9000)]
    status, answer, _ = post(scripted, "messages", messages=long)
    assert status == 400 and re.fullmatch(
        r"prompt is too long: 9\d{3} tokens > 8192 maximum", answer["error"]["message"]
    )
    status, answer, _ = post(scripted, "messages/count_tokens", model="tiny", messages=long)
    assert status == 200 and answer["input_tokens"] > 9000


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_beyond_the_context_in_messages(scripted, claude, stream):
    """The answer fills the context, and says so, as Anthropic's does."""
    messages = [dict(role="user", content="a" * 8100)]
    options = dict(model="tiny", messages=messages, thinking=dict(type="disabled"))
    scripted.say("b" * 8192)
    prompt = claude.messages.count_tokens(**options).input_tokens
    room = 8192 + 1 - prompt  # the last token is not stored
    for limit, reason in ((32000, "model_context_window_exceeded"), (room, "max_tokens")):
        if stream:
            with claude.messages.stream(max_tokens=limit, **options) as events:
                answer = events.get_final_message()
        else:
            answer = claude.messages.create(max_tokens=limit, timeout=60, **options)
        assert (answer.content[0].text, answer.usage.output_tokens) == ("b" * room, room)
        assert answer.stop_reason == reason


@pytest.mark.parametrize("thread", [dict(type="create"), dict(type="continue", previous_message_id="msg_1")])
def test_a_thread(scripted, thread):
    """Refused in the form on which Anthropic's package goes on without it; null is none."""
    status, answer, _ = post(scripted, "messages", thread=thread)
    assert status == 400 and answer["error"]["message"].startswith("thread: this server keeps no conversations")
    details = dict(error_code="thread_unsupported_request", unsupported=["thread"])
    assert answer["error"]["details"] == details
    scripted.say("</think>ok")
    assert post(scripted, "messages", thread=None)[0] == 200
    assert "details" not in post(scripted, "messages", color=1)[1]["error"]


def test_codex(scripted):
    find = call("files__find", path="a")
    scripted.say("Hm.</think>Look." + calls(find))
    status, answer, response = post(scripted, "responses", **CODEX)
    assert status == 200, answer
    assert response.headers["Warning"] == "299 - \"left out, since this server runs no tools: tools[2] ('web_search')\""
    made = answer["output"][-1]
    assert (made["type"], made["namespace"], made["name"]) == ("function_call", "files", "find")
    written = scripted.prompts[0] + scripted.tokens
    results = [dict(type="function_call_output", call_id=made["call_id"], output="ok")]
    scripted.say("Well.</think>Done.")
    status, answer, _ = post(scripted, "responses", **CODEX | dict(input=CODEX["input"] + answer["output"] + results))
    assert status == 200 and answer["output"][-1]["content"][0]["text"] == "Done."
    assert scripted.prompts[0][: len(written)] == written
    scripted.say("</think>ok")
    response = post(scripted, "responses", tools=[dict(type=f"漢\r\n{i}") for i in range(20)])[2]
    assert response.status_code == 200 and response.headers["Warning"].endswith("tools[7] ('\\u6f22\\r\\n7')\"")
    status, answer, response = post(scripted, "responses", tools=[dict(type="web_search")], tool_choice="required")
    assert status == 400 and "needs tools" in answer["error"]["message"] and "Warning" not in response.headers


def test_an_error_in_a_stream_of_responses_has_its_number(scripted, monkeypatch):
    engine = scripted.engine.engine
    step = engine.step
    outputs = []

    def failing():
        if len(outputs) > 2:
            raise RuntimeError("the device is on fire")
        outputs.append(step())
        return outputs[-1]

    monkeypatch.setattr(engine, "step", failing)
    scripted.say("</think>" + "long " * 100)
    body = BASES["responses"] | dict(stream=True, max_output_tokens=900)
    lines = scripted.http.post("/v1/responses", json=body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events))) and len(events) > 3
    assert events[-1]["type"] == "error" and "fire" not in events[-1]["message"]


def test_settings_that_responses_repeat(scripted):
    scripted.say("</think>ok")
    answer = post(scripted, "responses", reasoning=dict(effort="low", summary="auto"))[1]
    assert answer["reasoning"] == dict(effort="low", summary="auto")
    assert answer["text"] == dict(format=dict(type="text"), verbosity="medium")
    status, answer, _ = post(scripted, "responses", reasoning=dict(summary="short"))
    assert status == 400 and "reasoning.summary: Input should be 'auto', 'concise'" in answer["error"]["message"]


def test_a_strict_tool_in_a_namespace(scripted):
    tool = RESPONSES_TOOLS[0] | dict(
        strict=True, parameters=dict(type="object", properties=dict(a=dict(uniqueItems=True)))
    )
    status, answer, _ = post(
        scripted, "responses", tools=[dict(type="namespace", name="n", description="", tools=[tool])]
    )
    assert status == 400 and "tool 'n__read'.schema.properties.a: Unimplemented" in answer["error"]["message"]


@pytest.mark.parametrize("strict", [True, False])
def test_responses_repeat_whether_a_tool_is_strict(scripted, strict):
    scripted.say("</think>ok")
    tool = RESPONSES_TOOLS[0] | dict(strict=strict)
    status, answer, _ = post(scripted, "responses", tools=[tool, dict(type="web_search")])
    assert status == 200 and [tool["strict"] for tool in answer["tools"]] == [strict]


def test_what_chats_of_other_servers_have(scripted, release):
    blocks = [dict(type="thinking", thinking="Hm.", signature="s"), dict(type="redacted_thinking", data="x")]
    for field in (
        dict(reasoning="Hm."),
        dict(thinking_blocks=blocks),
        dict(reasoning_content="Hm.", reasoning="Else."),
    ):
        past = dict(role="assistant", content="ok", tool_calls=[], refusal=None, annotations=[]) | field
        scripted.say("Well.</think>Done.")
        status, answer, _ = post(scripted, "chat/completions", messages=[*HI, past, *HI], tools=TOOLS, max_tokens=50)
        assert status == 200, answer
        assert "<think>Hm.</think>ok" in release.decode(scripted.prompts[0], skip_special_tokens=False)
        message = answer["choices"][0]["message"]
        usage = answer["usage"]
        assert (message["refusal"], message["annotations"]) == (None, [])
        assert "Else." not in release.decode(scripted.prompts[0])
        assert usage["completion_tokens_details"] == dict(reasoning_tokens=len("Well."))


def test_marks_for_a_cache_in_chats(scripted):
    """Every prefix is looked up without them."""
    prompts = []
    for mark in ({}, dict(cache_control=dict(type="ephemeral")), dict(prompt_cache_breakpoint=dict(mode="explicit"))):
        scripted.say("</think>ok")
        messages = [
            dict(role="system", content="Look.") | mark,
            dict(role="user", content=[dict(type="text", text="Hi") | mark]),
        ]
        body = dict(messages=messages, tools=TOOLS)
        if "cache_control" in mark:
            body["tools"] = [tool | mark for tool in TOOLS]
        status, answer, _ = post(scripted, "chat/completions", **body)
        assert status == 200, answer
        prompts += scripted.prompts
    assert prompts[0] == prompts[1] == prompts[2]


def test_any_of_two_tools_in_messages(scripted, claude):
    scripted.say("I would rather not.")
    options = dict(model="tiny", max_tokens=400, messages=HI, extra_body=dict(temperature=0))
    names = dict(type="object", properties={}, additionalProperties=False)
    tools = [dict(name=name, input_schema=names) for name in ("read", "write")]
    made = claude.messages.create(tools=tools, tool_choice=dict(type="any"), **options)
    assert made.stop_reason == "tool_use" and {block.name for block in made.content} <= {"read", "write"}


def test_a_format_in_messages(scripted, claude, release):
    schema = dict(type="object", properties=dict(a=dict(type="integer")), required=["a"], additionalProperties=False)
    scripted.say("Hm.</think>Surely!")
    form = dict(type="json_schema", schema=schema)
    options = dict(model="tiny", max_tokens=400, messages=HI, extra_body=dict(temperature=0))
    made = claude.messages.create(output_config=dict(format=form), **options)
    assert type(json.loads(made.content[1].text)["a"]) is int
    assert json.dumps(schema) in release.decode(scripted.prompts[0])


@pytest.mark.parametrize("written", ['{"a": 1}', "Surely!" + BOTH, BOTH])
def test_a_format_beside_tools(scripted, written):
    """An answer is JSON of the schema, or calls a tool."""
    schema = dict(type="object", properties=dict(a=dict(type="integer")), required=["a"], additionalProperties=False)
    form = dict(type="json_schema", json_schema=dict(name="n", schema=schema))
    scripted.say("Hm.</think>" + written)
    body = dict(tools=TOOLS, response_format=form, max_tokens=400, temperature=0)
    message = post(scripted, "chat/completions", **body)[1]["choices"][0]["message"]
    if written == BOTH:
        assert [c["function"]["name"] for c in message["tool_calls"]] == ["read", "write"]
    if "tool_calls" in message:
        assert not message["content"]
    else:
        assert type(json.loads(message["content"])["a"]) is int


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("chat/completions", dict(thinking=dict(type="maybe")), "thinking", "thinking: unknown variant `maybe`"),
        ("chat/completions", dict(reasoning_effort="huge"), "reasoning_effort", "reasoning_effort: unknown variant"),
        (
            "chat/completions",
            dict(messages=[*HI, dict(role="assistant", tool_calls=[dict(id=3)])]),
            "messages",
            "messages[1]: invalid type: integer `3`",
        ),
        (
            "chat/completions",
            dict(messages=[dict(role="user", content=[dict(type="image_url", image_url=dict(url="u"))])]),
            "messages",
            "messages[0].content[0].type: Input should be 'text'; messages[0].content[0].text: this field is needed",
        ),
        ("chat/completions", dict(messages=[dict(role="user", content=3)]), "messages", "messages[0].content: Input"),
        (
            "chat/completions",
            dict(tools=[dict(type="function", function=dict(name="a b"))]),
            "tools",
            "tools[0].function.name",
        ),
        ("responses", dict(input=3), "input", "input: Input should be a valid array"),
        ("responses", dict(text=dict(verbosity="low")), "text", "text.verbosity: this server only takes 'medium'"),
        (
            "responses",
            dict(input=[dict(role="user", content=[dict(type="input_file")])]),
            "input",
            "input[0].content[0]",
        ),
        (
            "responses",
            dict(tool_choice=dict(type="allowed_tools"), tools=RESPONSES_TOOLS),
            "tool_choice",
            "tool_choice",
        ),
    ],
)
def test_errors_have_a_place(scripted, path, body, param, message):
    status, answer, _ = post(scripted, path, **body)
    assert status == 400 and message in answer["error"]["message"] and answer["error"]["param"] == param, answer
    assert "str" not in answer["error"]["message"].split(":")[0]


@pytest.mark.parametrize("path", BASES)
def test_a_stream_is_kept_alive(scripted, monkeypatch, path):
    """Before the first token, and between tokens."""
    monkeypatch.setattr(answers, "_KEEP_ALIVE_SECONDS", 0.1)
    engine = scripted.engine.engine
    step = engine.step
    begin = []

    def slow():
        begin.append(None)
        if len(begin) < 3:
            time.sleep(0.35)
        return step()

    monkeypatch.setattr(engine, "step", slow)
    scripted.say("</think>ok")
    with scripted.http.stream("POST", f"/v1/{path}", json=BASES[path] | dict(stream=True)) as response:
        lines = [line for line in response.iter_lines() if line]
    alive = 'data: {"type":"ping"}' if path == "messages" else ": keep-alive"
    events = [line for line in lines if line.startswith(("data:", ":"))]
    assert events[:2] == [alive, alive] and any(event != alive for event in events[2:]), lines


def test_the_releases_top_p(scripted, monkeypatch):
    """It holds with tools and thinking if the client sends none. Responses repeat what the client sent."""
    drawn_with = []
    submit = scripted.engine.submit

    def submit_and_record(*args, **options):
        drawn_with.append(options["sampling"].top_p)
        return submit(*args, **options)

    monkeypatch.setattr(scripted.engine, "submit", submit_and_record)
    repeated = []
    for body in ({}, {"tools": RESPONSES_TOOLS}, {"tools": RESPONSES_TOOLS, "top_p": 0.5}):
        scripted.say("</think>ok")
        repeated.append(post(scripted, "responses", **body)[1]["top_p"])
    assert drawn_with == [1.0, 0.95, 0.5] and repeated == [1.0, 1.0, 0.5]
