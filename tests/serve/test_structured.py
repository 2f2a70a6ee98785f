"""Answers of a given form, with a model that often writes something else."""

import json

import openai
import pytest

from tests.serve.test_chat import BOTH, HI, TOOLS, call, calls, claude, release, scripted  # noqa: F401


SCHEMA = dict(
    type="object",
    properties=dict(name=dict(type="string", maxLength=4), size=dict(enum=["s", "l"])),
    required=["name", "size"],
    additionalProperties=False,
)
FORMAT = dict(type="json_schema", json_schema=dict(name="n", schema=SCHEMA))
AHEAD = dict(type="object", properties=dict(name=dict(type="string", pattern="(?=a)")))  # beyond regular expressions
COLORS = dict(color=dict(type="string", enum=["red", "pink"]))
COLOR = dict(type="object", properties=COLORS, required=["color"], additionalProperties=False)
PAINT = dict(type="function", function=dict(name="paint", parameters=COLOR))
NO_THINKING = dict(thinking=dict(type="disabled"))


def answer(server, stream=False, **options):
    """Returns the content and the tool calls (name, arguments), whole or from a stream."""
    options = dict(model="tiny", messages=HI, max_tokens=400, temperature=0) | options
    response = server.client.chat.completions.create(stream=stream, **options)
    if not stream:
        message = response.choices[0].message
        found = [(c.function.name, c.function.arguments) for c in message.tool_calls or []]
        return message.content, found, response.choices[0].finish_reason
    content, found, reason = "", {}, None
    for chunk in response:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or ():
                name, arguments = found.get(part.index, ("", ""))
                found[part.index] = name + (part.function.name or ""), arguments + (part.function.arguments or "")
    return content, list(found.values()), reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("think", [False, True])
def test_json_of_a_schema(scripted, stream, think):  # noqa: F811
    """Written rightly it is the model's own text; a text that is not JSON becomes such."""
    written, extra = ("Hm {</think>", {}) if think else ("", NO_THINKING)
    scripted.say(written + '{"name": "Ann", "size": "l"}')
    content, _, reason = answer(scripted, stream, response_format=FORMAT, extra_body=extra)
    assert (content, reason) == ('{"name": "Ann", "size": "l"}', "stop")
    scripted.say(written + "Surely! A list: [1, 2]")
    content, _, reason = answer(scripted, stream, response_format=FORMAT, extra_body=extra)
    found = json.loads(content)
    assert list(found) == ["name", "size"] and len(found["name"]) <= 4 and found["size"] in "sl" and reason == "stop"


def test_any_object(scripted):  # noqa: F811
    scripted.say('{"a": [1, null]}')
    hi = [dict(role="user", content="Some json")]
    options = dict(response_format=dict(type="json_object"), extra_body=NO_THINKING)
    assert answer(scripted, messages=hi, **options)[0] == '{"a": [1, null]}'
    scripted.say("No.")  # the model would write strings without end
    content, _, reason = answer(scripted, messages=hi, **options)
    assert content.startswith("{") and reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_come(scripted, stream):  # noqa: F811
    """Reasoning is off then, unless the client says how to think."""
    begin = len("\n\n<｜DSML｜tool_calls>\n")
    scripted.say(BOTH[begin:])
    content, found, reason = answer(scripted, stream, tools=TOOLS, tool_choice="required")
    assert reason == "tool_calls" and not content
    expected = [("read", dict(path='a "b"', lines=[1, dict(c=2.5)])), ("write", {})]
    assert [(name, json.loads(arguments)) for name, arguments in found] == expected
    scripted.say("I would rather not.")
    name = dict(type="function", function=dict(name="paint"))
    content, found, reason = answer(scripted, stream, tools=[*TOOLS, PAINT], tool_choice=name)
    assert reason == "tool_calls" and not content and {name for name, _ in found} == {"paint"}
    assert all(json.loads(arguments)["color"] in ("red", "pink") for _, arguments in found)
    with pytest.raises(openai.BadRequestError, match="Thinking mode does not support this tool_choice"):
        answer(scripted, tools=TOOLS, tool_choice="required", extra_body=dict(thinking=dict(type="enabled")))


def test_a_call_that_had_to_come_is_sent_back(scripted):  # noqa: F811
    """The next prompt repeats what the model wrote, and what the prompt before it began."""
    scripted.say(BOTH[len("\n\n<｜DSML｜tool_calls>\n") :])
    options = dict(model="tiny", tools=TOOLS, tool_choice="required")
    message = scripted.client.chat.completions.create(messages=HI, **options).choices[0].message
    written = scripted.prompts[0] + scripted.tokens
    results = [dict(role="tool", tool_call_id=c.id, content="ok") for c in message.tool_calls]
    scripted.say("Done.")
    answer(
        scripted, messages=[*HI, message.model_dump(exclude_none=True), *results], tools=TOOLS, extra_body=NO_THINKING
    )
    assert scripted.prompts[0][: len(written)] == written


def test_other_endpoints(scripted, claude):  # noqa: F811
    scripted.say('{"name": "Ann", "size": "l"}')
    text = dict(format=dict(type="json_schema", name="n", schema=SCHEMA))
    response = scripted.client.responses.create(model="tiny", input="Hi", text=text, reasoning=dict(effort="none"))
    assert response.output_text == '{"name": "Ann", "size": "l"}'
    scripted.say("I would rather not.")
    options = dict(model="tiny", max_tokens=400, messages=HI, extra_body=dict(temperature=0))
    tool = dict(name="paint", input_schema=COLOR)
    message = claude.messages.create(tools=[tool], tool_choice=dict(type="any"), **options)
    assert message.stop_reason == "tool_use" and all(
        block.input["color"] in ("red", "pink") for block in message.content
    )


def test_a_strict_tool_binds_only_calls(scripted):  # noqa: F811
    strict = dict(type="function", function=PAINT["function"] | dict(strict=True))
    for text in ("Paint? No.", "Well" + calls(call("paint", color="pink"))):
        scripted.say("Hm.</think>" + text)
        content, found, _ = answer(scripted, tools=[strict])
        assert content == text.partition("\n\n<")[0] and found == (
            [("paint", '{"color": "pink"}')] if "<" in text else []
        )
    scripted.say("Hm.</think>Well" + calls(call("paint", color="blue")))
    _, found, _ = answer(scripted, tools=[strict])
    assert all(json.loads(arguments)["color"] in ("red", "pink") for _, arguments in found) and found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(response_format=FORMAT, extra_body=dict(ignore_eos=True)), "ignore_eos: an answer of a given form"),
        (
            dict(response_format=FORMAT, messages=[*HI, dict(role="assistant", content="{", prefix=True)]),
            "a continued message takes any text",
        ),
        (
            dict(response_format=dict(type="json_schema", json_schema=dict(name="n", schema=AHEAD))),
            "cannot be enforced",
        ),
    ],
)
def test_mistakes_are_named(scripted, options, message):  # noqa: F811
    with pytest.raises(openai.BadRequestError, match=message):
        answer(scripted, **options)
