"""Real agents and client packages, each in a loop of three turns in which a scripted model calls two tools.

Packages that the environment lacks are installed from their registries, in pinned versions. A client's process knows
this server only: every other connection goes to a proxy that is not there.
"""

import collections
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import anthropic
import jax
import numpy as np
import pytest

from dsv4_jax.config import DSV4Config, LayerSpec
from dsv4_jax.engine import Engine
from dsv4_jax.host import KVCacheManager, PrefixCache
from tests.paths import PACKAGED
from tests.serve.conftest import END, VOCABULARY, ScriptedModel, serving
from tests.serve.test_chat import call, calls


pytestmark = pytest.mark.slow

CONTEXT = 2**18  # bytes; an agent's instructions and tools take up to 150,000
SECONDS = 120  # limit of an installation, and of a client's run


@jax.tree_util.register_pytree_node_class
class LongScriptedModel(ScriptedModel):
    """Draws the tokens that `script` has, [CONTEXT + 1] by position."""

    script = np.full((CONTEXT + 1,), END, np.int32)


@pytest.fixture(scope="module")
def agent_server(release):
    """A server, `turns`: the model's answers by the number of results so far, and `results` of the last prompt.

    A conversation without tools asks for a title.
    """
    config = DSV4Config.from_hf(PACKAGED).with_layers([LayerSpec.csa()])
    config = dataclasses.replace(config, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    sizes = dict(max_requests=4, max_context=CONTEXT, block_tokens=1024, max_query_tokens=48)
    manager = KVCacheManager(config, num_blocks=1024, **sizes)
    model = LongScriptedModel()
    engine = Engine(model, manager, drafter=model, token_budget=8192, prefix=PrefixCache(manager, key="scripted"))
    with serving(engine, release) as server:
        chat = server.app.state.service.chat
        encode = chat.encode

        def encode_and_script(conversation, effort):
            ids = encode(conversation, effort)
            answer = "</think>A title"
            if conversation.tools:
                server.results = [message.content for message in conversation.messages if message.role == "tool"]
                answer = server.turns[len(server.results)]
            if ids[-1] != release.token_to_id("<think>"):
                answer = answer.partition("</think>")[2]
            tokens = [*release.encode(answer).ids, END]
            # Other requests run meanwhile: the places of their answers stay as they are.
            LongScriptedModel.script[len(ids) : len(ids) + len(tokens)] = tokens
            return ids

        chat.encode = encode_and_script
        yield server


@pytest.fixture(autouse=True)
def no_responses(agent_server):
    agent_server.app.state.service.metrics.responses.clear()


def check(server, results, **refused):
    """Checks the results of the tools in the last prompt, and that all responses but those refused have status 200."""
    counts = collections.Counter()
    for sample in server.app.state.service.metrics.responses.collect()[0].samples:
        if sample.name.endswith("_total"):
            counts[sample.labels["status"]] += sample.value
    assert counts.pop("200") >= 3 and counts == refused, counts
    assert [found.strip().splitlines()[-1] for found in server.results] == results


@pytest.fixture(scope="session")
def install():
    """install(*packages) -> the folder of npm's packages, or of Python's for `python=True`."""
    uv = os.environ.get("UV") or shutil.which("uv")  # `uv run` sets the former
    with tempfile.TemporaryDirectory() as base:

        @functools.cache
        def make(*packages, python=False):
            folder = tempfile.mkdtemp(dir=base)
            if not (program := uv if python else shutil.which("npm")):
                pytest.skip(f"{packages}: there is no {'uv' if python else 'npm'}")
            command = [program, "install", "--no-fund", "--no-audit", "--fetch-retries=0", "--prefix", folder]
            if python:
                command = [program, "pip", "install", "--python", sys.executable, "--target", folder]
            try:
                made = subprocess.run([*command, *packages], capture_output=True, text=True, timeout=SECONDS)
            except subprocess.TimeoutExpired:
                pytest.skip(f"{packages}: not installed within {SECONDS} s")
            gone = any(word in made.stderr for word in ("ETARGET", "E404", "No solution found"))
            assert not gone, made.stderr  # the registry answered, but not with these versions
            if made.returncode:
                pytest.skip(f"{packages} could not be installed: {made.stderr[:300]}")
            return Path(folder)

        yield make


@pytest.fixture
def run(tmp_path):
    """run(*command, **variables) -> what a client writes. It runs in `tmp_path / "project"` with a home of its own."""

    def make(*command, **variables):
        for name in ("project", "home"):
            (tmp_path / name).mkdir(exist_ok=True)
        nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
        env = dict(PATH=os.environ["PATH"], HOME=f"{tmp_path}/home", NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
        options = dict(cwd=tmp_path / "project", env=env | nowhere | variables, stdin=subprocess.DEVNULL)
        made = subprocess.run(command, **options, capture_output=True, text=True, timeout=SECONDS)
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout

    return make


PROMPT = "Add some numbers."
SCHEMA = dict(type="object", properties=dict(a=dict(type="integer"), b=dict(type="integer")), required=["a", "b"])
ADDED = [dict(a=1, b=2), dict(a=3, b=40)]  # arguments of the two calls


def script(*written):
    """The turns of a conversation with two calls."""
    one, two = written
    return ["Hm.</think>Let me." + calls(one), "</think>" + calls(two), "Well.</think>All done."]


@pytest.fixture
def adding(agent_server):
    """The server, whose model calls `add` twice."""
    agent_server.turns = script(*(call("add", **arguments) for arguments in ADDED))
    return agent_server


def test_openai_chat(adding):
    tools = [dict(type="function", function=dict(name="add", parameters=SCHEMA))]
    messages = [dict(role="user", content=PROMPT)]
    called = []
    while True:
        create = adding.client.chat.completions.create
        message = create(model="tiny", messages=messages, tools=tools).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for made in message.tool_calls:
            called.append(json.loads(made.function.arguments))
            messages.append(dict(role="tool", tool_call_id=made.id, content=str(sum(called[-1].values()))))
    assert (called, message.content) == (ADDED, "All done.")
    check(adding, ["3", "43"])


def test_openai_responses(adding):
    tools = [dict(type="function", name="add", parameters=SCHEMA, strict=False)]
    items = [dict(role="user", content=PROMPT)]
    called = []
    while True:
        answer = adding.client.responses.create(model="tiny", input=items, tools=tools, store=False)
        items += answer.output
        new = [item for item in answer.output if item.type == "function_call"]
        if not new:
            break
        for made in new:
            called.append(json.loads(made.arguments))
            output = str(sum(called[-1].values()))
            items.append(dict(type="function_call_output", call_id=made.call_id, output=output))
    assert (called, answer.output_text) == (ADDED, "All done.")
    check(adding, ["3", "43"])


def test_anthropic(adding):
    """Its own loop, which runs the tools. It asks for a thread, and goes on without."""
    called = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        called.append(dict(a=a, b=b))
        return str(a + b)

    with anthropic.Anthropic(base_url=adding.url, api_key="none", max_retries=0) as client:
        messages = [dict(role="user", content=PROMPT)]
        runner = client.beta.messages.tool_runner(model="tiny", max_tokens=4000, tools=[add], messages=messages)
        last = runner.until_done()
    assert (called, last.content[-1].text) == (ADDED, "All done.")
    check(adding, ["3", "43"], **{"400": 1})


LITELLM = """
import json, sys, litellm
url, tools = sys.argv[1], json.loads(sys.argv[2])
for provider, base in (("openai", f"{url}/v1"), ("anthropic", url)):
    messages, called = [dict(role="user", content=sys.argv[3])], []
    while True:
        options = dict(model=f"{provider}/tiny", api_base=base, api_key="none", max_tokens=4000, num_retries=0)
        message = litellm.completion(messages=messages, tools=tools, **options).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for made in message.tool_calls:
            called.append(json.loads(made.function.arguments))
            messages.append(dict(role="tool", tool_call_id=made.id, content=str(sum(called[-1].values()))))
    print(json.dumps([called, message.content]))
"""


def test_litellm(adding, install, run):
    """In OpenAI's protocol and in Anthropic's. Importing the package takes longer than both."""
    folder = install("litellm==1.110.2", python=True)
    tools = json.dumps([dict(type="function", function=dict(name="add", description="Adds.", parameters=SCHEMA))])
    options = dict(PYTHONPATH=str(folder), LITELLM_LOCAL_MODEL_COST_MAP="True")
    written = run(sys.executable, "-c", LITELLM, adding.url, tools, PROMPT, **options)
    answers = [line for line in written.splitlines() if line.startswith("[")]
    assert list(map(json.loads, answers)) == [[ADDED, "All done."]] * 2, written
    check(adding, ["3", "43"])


# Runs all checks, also those that it would skip because of the model's name.
LLM_COMPLY = """
import sys
from llm_comply import cli, tests
for case in tests.get_tests(sys.argv[1]):
    case.skip_reason = None
cli.main(["-u", sys.argv[2], "-k", "none", "-m", "tiny", "--json", "--format", sys.argv[1]])
"""


@pytest.mark.parametrize(
    ("form", "images", "warnings"),
    [
        ("openai-chat", "chat-image-input", {"chat-reasoning-summary"}),  # the model does not think
        ("open-responses", "image-input", {"compact-response"}),  # an endpoint that it may lack
        ("anthropic", "anth-image-input", {"anth-thinking-display"}),
    ],
)
def test_llm_comply(agent_server, install, run, form, images, warnings):
    """All checks but those of images, which are refused by name."""
    folder = install("llm-comply==0.5.0", python=True)
    begin, _, rest = calls(call("get_weather", location="Paris")).partition("tool_calls>\n")
    agent_server.turns = ["</think>" + rest]  # behind a prompt that begins the call
    url = f"{agent_server.url}/v1"
    results = json.loads(run(sys.executable, "-c", LLM_COMPLY, form, url, PYTHONPATH=str(folder)))["results"]
    failed = {result["id"]: result["errors"] for result in results if result["status"] != "passed"}
    assert failed.keys() == {images} and failed[images][0] == "HTTP 400 (expected [200])", failed
    assert {result["id"] for result in results if result.get("warnings")} == warnings


AI_SDK = """
import {streamText, tool, jsonSchema, stepCountIs} from "ai";
import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
const [url, schema, prompt] = process.argv.slice(2);
const called = [];
const execute = async made => { called.push(made); return made.a + made.b; };
const add = tool({description: "Adds.", inputSchema: jsonSchema(JSON.parse(schema)), execute});
const model = createOpenAICompatible({name: "local", baseURL: url, apiKey: "none"})("tiny");
const answer = streamText({model, tools: {add}, stopWhen: stepCountIs(5), prompt, maxRetries: 0});
const text = await answer.text;
console.log(JSON.stringify([called, text]));
"""


def test_ai_sdk(adding, install, run):
    folder = install("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92")
    (folder / "loop.mjs").write_text(AI_SDK)
    written = run("node", str(folder / "loop.mjs"), f"{adding.url}/v1", json.dumps(SCHEMA), PROMPT)
    assert json.loads(written.splitlines()[-1]) == [ADDED, "All done."]
    check(adding, ["3", "43"])


def files(folder):
    return {name: (folder / name).read_text() for name in ("one.txt", "two.txt")}


FILES = {"one.txt": "one\n", "two.txt": "two\n"}
COMMANDS = ("echo one > one.txt; echo first", "cat one.txt; echo two > two.txt")


def test_claude_code(agent_server, install, run, tmp_path):
    program = install("@anthropic-ai/claude-code@2.1.197") / "node_modules/.bin/claude"
    agent_server.turns = script(*(call("Bash", command=command, description="Write") for command in COMMANDS))
    written = run(
        str(program), "-p", "--output-format", "json", "--allowedTools", "Bash", "--", "Write two files.",
        ANTHROPIC_BASE_URL=agent_server.url, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="tiny",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="tiny", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_AUTOUPDATER="1",
    )  # fmt: skip
    answer = json.loads(written)
    assert (answer["result"], answer["is_error"], answer["permission_denials"]) == ("All done.", False, [])
    assert files(tmp_path / "project") == FILES
    check(agent_server, ["first", "one"])


def test_codex(agent_server, install, run, tmp_path):
    program = install("@openai/codex@0.171.0") / "node_modules/.bin/codex"
    agent_server.turns = script(*(call("exec_command", cmd=command) for command in COMMANDS))
    (tmp_path / "config.toml").write_text(f"""
        model = "tiny"
        model_provider = "local"
        [model_providers.local]
        name = "local"
        base_url = "{agent_server.url}/v1"
        wire_api = "responses"
        env_key = "KEY"
        """)
    options = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    written = run(str(program), "exec", *options, "Write two files.", CODEX_HOME=str(tmp_path), KEY="none")
    items = [event["item"] for event in map(json.loads, written.splitlines()) if event["type"] == "item.completed"]
    ran = [item for item in items if item["type"] == "command_execution"]
    assert [(item["aggregated_output"], item["exit_code"]) for item in ran] == [("first\n", 0), ("one\n", 0)]
    assert items[-1]["text"] == "All done." and files(tmp_path / "project") == FILES
    check(agent_server, ["first", "one"])


def test_opencode(agent_server, install, run, tmp_path):
    program = install("opencode-ai@1.18.33") / "node_modules/.bin/opencode"
    second = call("write", filePath=f"{tmp_path}/project/two.txt", content="two\n")
    agent_server.turns = script(call("bash", command=COMMANDS[0], description="Write"), second)
    options = dict(baseURL=f"{agent_server.url}/v1", apiKey="none")
    models = dict(tiny=dict(name="tiny", limit=dict(context=CONTEXT, output=8192)))
    provider = dict(npm="@ai-sdk/openai-compatible", name="local", options=options, models=models)
    config = dict(provider=dict(local=provider), model="local/tiny", small_model="local/tiny", permission="allow")
    config |= dict(autoupdate=False, share="disabled")
    variables = dict(OPENCODE_CONFIG_CONTENT=json.dumps(config), OPENCODE_DISABLE_MODELS_FETCH="1")
    written = run(str(program), "run", "Write two files.", OPENCODE_DISABLE_AUTOUPDATE="1", **variables)
    assert written.strip().endswith("All done.") and files(tmp_path / "project") == FILES
    check(agent_server, ["first", "Wrote file successfully."])
