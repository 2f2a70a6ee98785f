"""Answers of a given form, with a model that often writes something else."""

import json
from typing import Literal

import deepseek_recipe as recipe
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from dsv4_jax.engine.grammar import Vocabulary
from dsv4_jax.serve.constraints import compile_form
from tests.serve.conftest import END, NAMES, VOCABULARY
from tests.serve.test_chat import BOTH, HI, TOOLS, call, calls


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
    content = ""
    found = {}
    reason = None
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
def test_json_of_a_schema(scripted, stream, think):
    """Written rightly it is the model's own text; a text that is not JSON becomes such."""
    written, extra = ("Hm {</think>", {}) if think else ("", NO_THINKING)
    scripted.say(written + '{"name": "Ann", "size": "l"}')
    content, _, reason = answer(scripted, stream, response_format=FORMAT, extra_body=extra)
    assert (content, reason) == ('{"name": "Ann", "size": "l"}', "stop")
    scripted.say(written + "Surely! A list: [1, 2]")
    content, _, reason = answer(scripted, stream, response_format=FORMAT, extra_body=extra)
    found = json.loads(content)
    assert list(found) == ["name", "size"] and len(found["name"]) <= 4 and found["size"] in "sl" and reason == "stop"


def test_any_object(scripted):
    scripted.say('{"a": [1, null]}')
    hi = [dict(role="user", content="Some json")]
    options = dict(response_format=dict(type="json_object"), extra_body=NO_THINKING)
    assert answer(scripted, messages=hi, **options)[0] == '{"a": [1, null]}'
    scripted.say("No.")  # the model would write strings without end
    content, _, reason = answer(scripted, messages=hi, **options)
    assert content.startswith("{") and reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_must_come(scripted, stream):
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


def test_a_call_that_had_to_come_is_sent_back(scripted):
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


def test_other_endpoints(scripted, claude):
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


def test_a_strict_tool_binds_only_calls(scripted):
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
def test_mistakes_are_named(scripted, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        answer(scripted, **options)


WORDS = dict(type="array", items=dict(type="string"))
LIMITS = [  # (a schema, a text that violates it, why it cannot be enforced)
    (dict(type="string", maxLength=3), '"abcd"', None),
    (dict(type="string", minLength=1), '""', None),
    (dict(type="string", const="a"), '"b"', None),
    (dict(type="string", pattern="^[a-z]+$", maxLength=3), '"abcd"', None),
    (dict(type="string", format="date-time"), '"noon"', None),
    (WORDS | dict(maxItems=1), '["a", "b"]', None),
    (WORDS | dict(minItems=1), "[]", None),
    (dict(enum=["a", 1, None]), "2", None),
    (dict(oneOf=[dict(type="integer"), dict(type="null")]), '"a"', None),
    (dict(type="object", additionalProperties=dict(type="integer")), '{"b": "c"}', None),
    ({"$ref": "#/$defs/Inner"}, '{"v": "c"}', None),
    ({"$ref": "#/definitions/Count"}, '"c"', None),
    (WORDS | dict(uniqueItems=True), '["a", "a"]', 'a: Unimplemented keys: ["uniqueItems"]'),
    ({"type": "integer", "not": {"const": 1}}, "1", 'a: Unimplemented keys: ["not"]'),
    (dict(type="array", items=dict(propertyNames={})), "[{}]", 'a.items: Unimplemented keys: ["propertyNames"]'),
    (dict(anyOf=[True, dict(format="when")]), "[1]", "a.anyOf[1]: Unknown format: when"),
    (dict(oneOf=[dict(type="number"), dict(type="integer")]), "1", "a: oneOf constraints are not supported."),
    (dict(pattern="(?=a)"), '"b"', "a: regex parse error"),
    (False, "1", ": Unsatisfiable schema: required property 'a' is unsatisfiable"),
]
DEFINITIONS = {
    "$defs": {"Inner": dict(type="object", properties=dict(v={"$ref": "#/definitions/Count"}), required=["v"])},
    "definitions": {"Count": dict(type="integer")},
}


def holding(value):
    """A schema with a property of another one."""
    return dict(type="object", properties=dict(a=value), required=["a"], additionalProperties=False) | DEFINITIONS


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("value", "written", "fault"), LIMITS, ids=str)
def test_a_schema_is_enforced_in_all_or_refused(scripted, value, written, fault, strict):
    scripted.say(f'{{"a": {written}}}')
    form = dict(type="json_schema", json_schema=dict(name="n", schema=holding(value), strict=strict))
    body = dict(model="tiny", messages=HI, max_tokens=200, temperature=0, response_format=form) | NO_THINKING
    response = scripted.http.post("/v1/chat/completions", json=body)
    if fault is None:
        choice = response.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), holding(value))
        assert choice["message"]["content"] != f'{{"a": {written}}}'
    else:
        message = response.json()["error"]["message"]
        place = "schema" if fault.startswith(":") else "schema.properties."
        assert response.status_code == 400 and f"cannot be enforced: {place}{fault}" in message, message


@pytest.fixture(scope="module")
def follows(release):
    """follows(text, tool, strict): whether a required call of a tool may be written so."""
    vocabulary = Vocabulary(release, VOCABULARY, [END])
    ids = {name: 256 + i for i, name in enumerate(NAMES)}

    def follows(text, parameters, strict=True):
        tools = [recipe.ToolDefinition("f", parameters=parameters)]
        conversation = recipe.Conversation(tools=tools, tool_choice="required")
        strict = {"f"} if strict else ()
        grammar = compile_form(conversation, [END], ids, strict, vocabulary.compile)
        matcher = grammar.start()
        matcher.read([*release.encode(text, add_special_tokens=False).ids, END])
        return not matcher.error

    return follows


def written(**arguments):
    return f"{call('f', **arguments)}\n</｜DSML｜tool_calls>"


def as_json(value):
    """A string as a call has it in JSON."""
    return written(a=0).replace(">0<", f">{json.dumps(value)}<")


@pytest.mark.parametrize(
    ("value", "right", "wrong"),
    [
        (dict(type="string", minLength=2, maxLength=3), [written(a="</a")], [written(a="a"), written(a="abcd")]),
        (dict(type="string", pattern="^a+$"), [as_json("aa")], [as_json("b"), written(a="aa")]),
        (dict(type="string", format="date"), [as_json("2020-12-01")], [as_json("2020-13-01")]),
        (dict(enum=["x", 1, None]), [written(a="x"), written(a=1), written(a=None)], [written(a="y"), written(a=2)]),
        (dict(enum=["xyz", "x"], maxLength=2), [as_json("x")], [written(a="xyz"), as_json("xyz")]),
        (dict(type=["string", "null"]), [written(a="x"), written(a=None)], [written(a=1)]),
        (
            dict(anyOf=[dict(type="string", maxLength=2), dict(type="null"), False]),
            [written(a="xy"), written(a=None)],
            [written(a="xyz"), written(a=1)],
        ),
        ({"$ref": "#/$defs/Inner"}, [written(a=dict(v=1))], [written(a=dict(v="x"))]),
        (
            dict(type="array", items={"$ref": "#/properties/a/$defs/n"}) | {"$defs": dict(n=dict(type="null"))},
            [written(a=[None])],
            [written(a=[1])],
        ),
        (
            dict(additionalProperties=dict(type="integer"), type="object"),
            [written(a=dict(b=1))],
            [written(a=dict(b="c"))],
        ),
        (True, [written(a="x"), written(a=[{}])], [written()]),
    ],
    ids=str,
)
def test_a_strict_call_follows_its_schema(follows, value, right, wrong):
    assert [follows(text, holding(value)) for text in right] == [True] * len(right)
    assert [follows(text, holding(value)) for text in wrong] == [False] * len(wrong)


def test_parameters_without_names(follows):
    numbers = dict(type="object", additionalProperties=dict(type="integer"))
    assert follows(written(x=1, y=2), numbers) and not follows(written(x="a"), numbers)
    assert follows(written(x=1, y="a"), dict(type="object"), strict=False) and follows(written(), True, strict=False)
    assert not follows(written(x=1), dict(type="object", additionalProperties=False), strict=False)
    assert follows(written(b=1), dict(required=["b"])) and not follows(written(), dict(required=["b"]))


@pytest.mark.parametrize(("value", "text", "fault"), [case for case in LIMITS if case[2]], ids=str)
def test_what_a_call_cannot_be_held_to(follows, value, text, fault):
    """A strict tool is refused; in another one, the value may be any."""
    with pytest.raises(ValueError, match="tool 'f'.schema") as error:
        follows(written(), holding(value))
    assert fault in str(error.value)
    assert follows(written(a=json.loads(text)), holding(value), strict=False)


def test_a_strict_tool_has_no_other_keywords_at_the_top(follows):
    with pytest.raises(ValueError, match="tool 'f'.schema.anyOf: a strict tool has no such keyword at the top"):
        follows(written(), dict(anyOf=[holding(True)]))
    assert follows(written(a=1), dict(anyOf=[holding(True)]), strict=False)


class Inner(BaseModel):
    v: int
    kind: Literal["s", "l"] | None = None


class Outer(BaseModel):
    x: Inner
    more: list[Inner] = Field(max_length=2)


def test_nested_models_of_openais_package(scripted):
    chat = scripted.client.chat.completions
    given = dict(x=dict(v=1, kind="s"), more=[])
    scripted.say("t</think>" + json.dumps(given))
    options = dict(model="tiny", messages=HI)
    assert chat.parse(response_format=Outer, max_tokens=300, **options).choices[0].message.parsed == Outer(**given)
    response = scripted.client.responses.parse(model="tiny", input="Hi", text_format=Outer)
    assert response.output_parsed == Outer(**given)
    scripted.say("t</think>" + calls(call("Outer", **given)))
    (made,) = chat.parse(tools=[openai.pydantic_function_tool(Outer)], **options).choices[0].message.tool_calls
    assert made.function.parsed_arguments == Outer(**given)


@pytest.mark.parametrize("schema", [True, False, {}, []])
def test_no_schema_is_a_fault_of_the_server(scripted, schema):
    """Schemas of true and false, and what is none, wherever a client can write one."""
    form = dict(name="n", schema=schema)
    tool = dict(name="f", parameters=holding(dict(anyOf=[schema, dict(oneOf=[schema])])))
    claudes = dict(name="f", input_schema=tool["parameters"])
    whole = dict(name="g", parameters=schema)
    bodies = [
        ("chat/completions", dict(response_format=dict(type="json_schema", json_schema=form))),
        ("responses", dict(text=dict(format=dict(type="json_schema") | form))),
        ("messages", dict(tools=[claudes], tool_choice=dict(type="any"))),
        ("messages", dict(tools=[claudes | dict(strict=True)])),
    ]
    for tools in ([tool], [whole], [tool | dict(strict=True)], [whole | dict(strict=True)]):
        functions = [dict(type="function", function=function) for function in tools]
        bodies.append(("chat/completions", dict(tools=functions, tool_choice="required")))
        bodies.append(("responses", dict(tools=[dict(type="function") | tool for tool in tools])))
    scripted.say("1")
    for path, body in bodies:
        asked = dict(input="Hi", max_output_tokens=20) if path == "responses" else dict(messages=HI, max_tokens=20)
        assert scripted.http.post(f"/v1/{path}", json=dict(model="tiny") | asked | body).status_code in (200, 400)
