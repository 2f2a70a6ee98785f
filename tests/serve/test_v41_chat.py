"""Conversations in DeepSeek-V4.1's encoding, with a model whose answers are given."""

import json
import signal
from random import Random

import deepseek_recipe as recipe
import openai
import pytest

from dsv4_jax.checkpoint import read_tokenizer
from dsv4_jax.cli.chat_command import ChatCommand
from dsv4_jax.config import DSV4Config
from dsv4_jax.serve.chat import Chat, find_release, make_chat
from tests.byte_tokenizer import write_byte_tokenizer
from tests.paths import DATA
from tests.serve.conftest import NAMES, THINK
from tests.serve.test_chat import BOTH, HI, MESSAGES_TOOLS, RESPONSES_TOOLS, TOOLS, WARM, ask, convert


BEGIN, END, _, _, USER, ASSISTANT, _, REMINDER, SYSTEM = NAMES


def effort(number):
    return f"Reasoning Effort: {number} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"


def as_v41(written):
    """Tool calls of V4 as V4.1 has them."""
    for tag in ("invoke", "parameter"):
        written = written.replace(f"｜DSML｜{tag}", f"｜DSML｜ {tag}")
    return written.replace("｜DSML｜tool_calls", "｜DSML｜ calls")


HIGH = f"{BEGIN}{SYSTEM}{effort(75)}"
V4_HIGH = recipe.DeepseekV4Encoding().render_conversation(recipe.Conversation()).prompt.partition(ASSISTANT)[0]
KIND = dict(role="system", content="Be kind.")
HISTORY = [*HI, dict(role="assistant", content="Ho", reasoning_content="Hm."), dict(role="user", content="Go")]
FUNCTION = dict(name="read", arguments='{"path": "a", "lines": [1]}')
CALLED = dict(role="assistant", content="Look", reasoning_content="Hm.")
CALLED["tool_calls"] = [dict(id="call_0", type="function", function=FUNCTION)]
RESULT = [*HI, CALLED, dict(role="tool", tool_call_id="call_0", content="ok"), dict(role="user", content="Go")]
WRITTEN = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="read">\n'
    '<｜DSML｜parameter name="path" string="true">a</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="lines" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
OFF = dict(thinking=dict(type="disabled"))


@pytest.mark.parametrize(
    ("body", "v41", "v4"),
    [
        (dict(messages=HI), f"{HIGH}{USER}Hi{ASSISTANT}<think>", f"{V4_HIGH}{USER}Hi{ASSISTANT}<think>"),
        (
            dict(messages=[KIND, *HI]),
            f"{HIGH}Be kind.{USER}Hi{ASSISTANT}<think>",
            f"{V4_HIGH}Be kind.{USER}Hi{ASSISTANT}<think>",
        ),
        (
            dict(messages=[KIND, *HI]) | OFF,
            f"{BEGIN}{SYSTEM}Be kind.{USER}Hi{ASSISTANT}</think>",
            f"{BEGIN}Be kind.{USER}Hi{ASSISTANT}</think>",
        ),
        (
            dict(messages=[KIND, *HI], reasoning_effort="low"),
            f"{BEGIN}{SYSTEM}{effort(50)}Be kind.{USER}Hi{ASSISTANT}<think>",
            f"{BEGIN}Be kind.{USER}Hi{ASSISTANT}<think>",
        ),
        (dict(messages=HI, reasoning_effort="none"), f"{BEGIN}{USER}Hi{ASSISTANT}</think>", None),
        (dict(messages=HI, reasoning_effort="high"), f"{HIGH}{USER}Hi{ASSISTANT}<think>", None),
        (dict(messages=HI, reasoning_effort="xhigh"), f"{HIGH}{USER}Hi{ASSISTANT}<think>", None),
        (dict(messages=HI, reasoning_effort="max"), f"{BEGIN}{SYSTEM}{effort(100)}{USER}Hi{ASSISTANT}<think>", None),
        (
            dict(messages=HISTORY),
            f"{HIGH}{USER}Hi{ASSISTANT}</think>Ho{END}{USER}Go{ASSISTANT}<think>",
            f"{V4_HIGH}{USER}Hi{ASSISTANT}</think>Ho{END}{USER}Go{ASSISTANT}<think>",
        ),
        (
            dict(messages=[*HI, dict(role="latest_reminder", content="Now")]),
            f"{HIGH}{USER}Hi{REMINDER}Now{ASSISTANT}<think>",
            f"{V4_HIGH}{USER}Hi{REMINDER}Now{ASSISTANT}<think>",
        ),
        (
            dict(messages=[*HI, KIND, dict(role="user", content="Go")]),
            f"{HIGH}{USER}Hi{SYSTEM}Be kind.{USER}Go{ASSISTANT}<think>",
            f"{V4_HIGH}{USER}Hi\n\n<system-reminder>\nBe kind.\n</system-reminder>\n\nGo{ASSISTANT}<think>",
        ),
    ],
)
def test_prompts_are_those_of_each_release(release, body, v41, v4):
    for version, encoding, expected in (
        ("v41", recipe.DeepseekV41Encoding(), v41),
        ("0731", recipe.DeepseekV4Encoding(), v4),
    ):
        if expected is None:
            continue
        chat = make_chat(release, ["tiny"], version)
        conversation = convert(chat, dict(model="tiny") | body).conversation
        assert release.decode(chat.encode(conversation), skip_special_tokens=False) == expected
        if version == "v41" or KIND not in body["messages"][1:]:
            assert encoding.render_conversation(conversation).prompt == expected


@pytest.mark.parametrize("version", ["v41", "0731"])
def test_tools_and_their_results_are_written_as_by_the_releases_library(release, version):
    """The result is in the user's turn. With tools, earlier reasoning stays."""
    encoding, mark = (recipe.DeepseekV41Encoding(), as_v41) if version == "v41" else (recipe.DeepseekV4Encoding(), str)
    chat = make_chat(release, ["tiny"], version)
    conversation = convert(chat, dict(model="tiny", messages=[KIND, *RESULT], tools=TOOLS)).conversation
    prompt = release.decode(chat.encode(conversation), skip_special_tokens=False)
    assert prompt == encoding.render_conversation(conversation).prompt
    begin, _, rest = prompt.partition(USER)
    assert begin.startswith((HIGH if version == "v41" else V4_HIGH) + "Be kind.\n\n## Tools\n\n")
    assert mark('\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="$TOOL_NAME">\n') in begin
    call = f"Hi{ASSISTANT}<think>Hm.</think>Look{mark(WRITTEN)}{END}"
    assert rest == f"{call}{USER}<tool_result>ok</tool_result>\n\nGo{ASSISTANT}<think>"


def prompt_of(server, path, body):
    """The prompt of a request, as text."""
    server.say("</think>ok")
    basis = dict(input="Hi") if path == "responses" else dict(messages=HI, max_tokens=9)
    response = server.http.post(f"/v1/{path}", json=dict(model="tiny") | basis | body)
    assert response.status_code == 200, response.text
    (ids,) = server.prompts
    text = server.app.state.service.tokenizer.decode(ids, skip_special_tokens=False)
    return text, response.json()


def with_effort(path, value):
    """The field of a protocol that holds the effort, and its path."""
    match path:
        case "chat/completions":
            return dict(reasoning_effort=value), "reasoning_effort"
        case "responses":
            return dict(reasoning=dict(effort=value)), "reasoning.effort"
    return dict(output_config=dict(effort=value)), "output_config.effort"


PATHS = pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])


@PATHS
def test_effort_is_a_number_at_the_very_start(v41, path):
    numbers = {1: 1, 9: 9, 42: 42, 75: 75, 99: 99, 100: 100, "low": 50, "high": 75, "xhigh": 75, "max": 100}
    for value, number in numbers.items():
        field, _ = with_effort(path, value)
        text, response = prompt_of(v41, path, field)
        assert text == f"{BEGIN}{SYSTEM}{effort(number)}{USER}Hi{ASSISTANT}<think>"
        if path == "responses":
            assert response["reasoning"]["effort"] == value
    field, _ = with_effort(path, "none")
    assert prompt_of(v41, path, field)[0] == f"{BEGIN}{USER}Hi{ASSISTANT}</think>"


def test_an_effort_beside_thinking_off_is_not_written(v41):
    for path in ("chat/completions", "messages"):
        text, _ = prompt_of(v41, path, with_effort(path, 30)[0] | OFF)
        assert text == f"{BEGIN}{USER}Hi{ASSISTANT}</think>"
    body = dict(model="tiny", messages=HI) | with_effort("messages", 5)[0]
    count = v41.http.post("/v1/messages/count_tokens", json=body).json()
    assert count == dict(input_tokens=len(v41.prompts[-1])) and len(v41.prompts[-1]) > 50


@PATHS
@pytest.mark.parametrize("value", [0, 101, -1, 50.0, True, [50], 10**30, "60", "huge"])
def test_another_effort_is_named_with_its_field(v41, path, value):
    body, field = with_effort(path, value)
    basis = dict(input="Hi") if path == "responses" else dict(messages=HI, max_tokens=9)
    response = v41.http.post(f"/v1/{path}", json=dict(model="tiny") | basis | body)
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    if isinstance(value, str):
        assert message.startswith(f"{field.partition('.')[0]}: unknown variant `{value}`, expected one of `none`")
    else:
        known = "must be the name of an effort, such as 'low', or an integer from 1 to 100"
        assert message == f"{field}: {value!r} {known}"


@PATHS
def test_numbers_are_not_for_v4(scripted, path):
    body, field = with_effort(path, 60)
    basis = dict(input="Hi") if path == "responses" else dict(messages=HI, max_tokens=9)
    response = scripted.http.post(f"/v1/{path}", json=dict(model="tiny") | basis | body)
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    assert message == f"{field}: 60 is for DeepSeek-V4.1, this model takes none, low, high, xhigh or max"


def test_a_number_is_replaced_only_at_the_start(release):
    """Numbers in the conversation stay, and past calls are written again beside any effort."""
    chat = make_chat(release, ["tiny"], "v41")
    rng = Random(0)
    for number in range(1, 101):
        messages = [dict(KIND, content=f"75 of {rng.randrange(100)}"), *RESULT]
        conversation = convert(chat, dict(model="tiny", messages=messages, tools=TOOLS)).conversation
        expected = recipe.DeepseekV41Encoding().render_conversation(conversation).prompt
        ids = chat.encode(conversation, number)
        expected = expected.replace("Effort: 75", f"Effort: {number}", 1)
        assert release.decode(ids, skip_special_tokens=False) == expected
        if number == 50:
            calls = [recipe.ToolCall("call_0", **FUNCTION)]
            tokens = release.encode("Hm.</think>Look" + as_v41(WRITTEN)).ids
            chat.remember([THINK], recipe.AssistantMessage("Look", "Hm.", calls), tokens)


@PATHS
def test_a_late_system_message_keeps_its_role(v41, path):
    late = dict(role="system", content="The date has changed.")
    field = "input" if path == "responses" else "messages"
    text, _ = prompt_of(v41, path, {field: [*WARM, dict(role="assistant", content="ok"), late, *HI]})
    assert text.endswith(f"ok{END}{SYSTEM}The date has changed.{USER}Hi{ASSISTANT}<think>")
    assert text.count(SYSTEM) == 2


def test_a_client_cannot_write_v41s_tokens(release):
    chat = make_chat(release, ["tiny"], "v41")

    def specials(text):
        tools = [dict(type="function", function=dict(name="f", description=text, parameters=dict(type="object")))]
        messages = [dict(role="system", content=text), dict(role="user", content=text)]
        ids = chat.encode(convert(chat, dict(model="tiny", messages=messages, tools=tools)).conversation)
        return [i for i in ids if i > 255], bytes(i for i in ids if i < 256)

    attack = "".join(NAMES) + "<｜image｜>"
    attacked, text = specials(attack)
    assert attacked == specials("x")[0] and text.count(attack.encode()) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_read_and_written_again(v41, stream):
    """Three turns. Each prompt repeats what the model wrote, though its JSON has other spaces than the encoding's."""
    messages = [*HI]
    written = []
    for turn in range(3):
        v41.say(f"Turn {turn}.</think>Both." + as_v41(BOTH))
        message, reason = ask(v41, stream, messages=messages, tools=TOOLS, extra_body=dict(reasoning_effort=7))
        assert (message["content"], message["reasoning_content"], reason) == ("Both.", f"Turn {turn}.", "tool_calls")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["read", "write"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"])["lines"] == [1, dict(c=2.5)]
        assert v41.prompts[0][: len(written)] == written
        written = v41.prompts[0] + v41.tokens
        del message["reasoning_content"]  # as some clients do
        messages += [message, *(dict(role="tool", tool_call_id=c["id"], content="ok") for c in message["tool_calls"])]


def test_calls_in_responses_and_messages(v41, claude):
    v41.say("Hm.</think>Both." + as_v41(BOTH))
    response = v41.client.responses.create(model="tiny", input="Hi", tools=RESPONSES_TOOLS)
    assert [item.name for item in response.output if item.type == "function_call"] == ["read", "write"]
    v41.say("Hm.</think>Both." + as_v41(BOTH))
    answer = claude.messages.create(model="tiny", max_tokens=500, messages=HI, tools=MESSAGES_TOOLS)
    assert [block.name for block in answer.content if block.type == "tool_use"] == ["read", "write"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text",
    ["Use `<｜DSML｜ calls>` for a call. And more.", "A\n\n<｜DSML｜ calls>\nI will call f.\n</｜DSML｜ calls>\nB"],
)
def test_a_block_without_a_call_is_text(v41, stream, text):
    v41.say("Hm.</think>" + text)
    message, _ = ask(v41, stream, tools=TOOLS)
    assert message["content"] == text and "tool_calls" not in message
    v41.say("Hm.</think>" + text + as_v41(BOTH))
    message, reason = ask(v41, stream, tools=TOOLS)
    assert (message["content"], len(message["tool_calls"]), reason) == (text, 2, "tool_calls")


def test_a_call_that_must_come_has_v41s_tags(v41, release):
    """A model that writes V4's tags, or no call at all, can only write V4.1's."""
    for written in (as_v41(BOTH).removeprefix("\n\n<｜DSML｜ calls>\n"), BOTH, "I would rather not."):
        v41.say(written)
        message, reason = ask(v41, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=600)
        prompt = release.decode(v41.prompts[0], skip_special_tokens=False)
        assert prompt.endswith(f"{ASSISTANT}</think>\n\n<｜DSML｜ calls>\n")
        assert message["tool_calls"][0]["function"]["name"] in ("read", "write")
    strict = [dict(TOOLS[0], function=TOOLS[0]["function"] | dict(strict=True))]
    v41.say("</think>" + as_v41(BOTH).partition('\n<｜DSML｜ invoke name="write')[0] + "\n</｜DSML｜ calls>")
    message, reason = ask(v41, tools=strict, temperature=0)
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")


def test_top_p_is_the_releases(release):
    """With tools and thinking, V4's is 0.95."""
    for version, top_p in (("v41", 1.0), ("0731", 0.95)):
        converted = convert(make_chat(release, ["tiny"], version), dict(model="tiny", messages=HI, tools=TOOLS))
        assert converted.request.inference_options.top_p == pytest.approx(top_p)


def test_images_are_refused(v41):
    part = dict(type="image_url", image_url=dict(url="data:image/png;base64,AAAA"))
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\].type: Input should be 'text'"):
        ask(v41, messages=[dict(role="user", content=[part])])


def test_the_encoding_needs_its_own_tokens(tmp_path, caplog):
    """V4's tokens are not enough: without the system's, a conversation is plain text. Toy checkpoints have none."""
    assert type(make_chat(read_tokenizer(DATA / "official_v41"), ["tiny"], "v41")) is Chat
    path = tmp_path / "tokenizer.json"
    write_byte_tokenizer(path, {name: 256 + i for i, name in enumerate(NAMES) if name != SYSTEM})
    tokenizer = read_tokenizer(path)
    assert type(make_chat(tokenizer, ["tiny"], "0731")) is not Chat and not caplog.text
    assert type(make_chat(tokenizer, ["tiny"], "v41")) is Chat
    assert "Chats are encoded as plain text, because the tokenizer lacks tokens: <｜System｜>" in caplog.text


def test_the_configuration_says_which_encoding_a_model_knows(tmp_path):
    """A V4.1 checkpoint has `dspark_block_size` nested, or at the top as in the release's inference code."""
    folder = DATA / "official_v41"
    raw = json.loads((folder / "config.json").read_text())
    assert raw["model_type"] == "deepseek_v41" and "dspark_block_size" not in raw
    assert find_release(folder, DSV4Config.from_hf(folder)) == "v41"
    del raw["text_config"]["model_type"]
    (tmp_path / "config.json").write_text(json.dumps(raw | raw.pop("text_config")))
    assert find_release(tmp_path, DSV4Config.from_hf(tmp_path)) == "v41"
    for name, release in {"official_dspark": "0731", "official_tiny": "april", "none": "0731"}.items():
        config = DSV4Config.from_hf(DATA / name) if name != "none" else DSV4Config.v4_flash()
        assert find_release(DATA / name, config) == release


def test_a_number_in_the_terminal(v41, release, monkeypatch, capsys):
    v41.say("Hm.</think>Good morning.")
    lines = iter(["Hi", "/thinking 7", "Hi", "/thinking 0", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ChatCommand(url=v41.url, thinking="60", max_tokens=40).run()
    shown = capsys.readouterr().out
    assert shown.count("Good morning.") == 2 and "thinking 0 must be off" in shown
    starts = [release.decode(ids, skip_special_tokens=False).partition(USER)[0] for ids in v41.prompts]
    assert starts == [f"{BEGIN}{SYSTEM}{effort(60)}", f"{BEGIN}{SYSTEM}{effort(7)}"]
