"""The bodies of requests in OpenAI's and Anthropic's protocols, as pydantic models."""

import itertools
import operator
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    PlainSerializer,
    Tag,
    ValidationError,
    model_validator,
)

from dsv4_jax.common.arguments import check, check_temperature, check_top_p
from dsv4_jax.serve.errors import APIError


JSONObject = dict[str, Any]
# The values of these fields of requests are ignored, because they would not change the answer.
UNUSED = ("metadata", "client_metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier")
UNUSED += ("cache_control", "service_tier", "speed", "inference_geo", "store", "prediction", "max_tool_calls")
UNUSED += ("parallel_tool_calls", "prompt_cache_options")
# `NEUTRAL` maps an unsupported field to the values that are accepted, because they do not change the answer.
NEUTRAL = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    "background": (False,),
    "reasoning_effort": ("none",),
    "reasoning": ({}, {"summary": "auto"}),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "refusal": ("",),
    "mcp_servers": ([],),
    "context_management": ({}, {"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
}


_MAX_ERRORS = 8  # the maximum number of errors that a response lists
_MAX_ITEMS = 2**16  # the maximum length of a list of messages, parts or tools; millions would take seconds to convert
_MAX_NAME = 100  # the maximum number of characters of a field's name that an error repeats
# A token may have at most this number of log-probabilities, as in vLLM. OpenAI allows 5 for completions, 20 for chats.
MAX_LOGPROBS = 20


class _Body(BaseModel):
    """The base class of JSON objects in requests. Null fields count as absent. Unsupported fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    _unused: ClassVar[tuple[str, ...]] = ()  # names of fields that have no effect

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, body):
        """Removes null fields and fields without effect. Other unsupported fields stay, up to `_MAX_ERRORS` of them."""
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields
        unsupported = (
            name
            for name, value in body.items()
            if value is not None and name not in fields
            if name not in cls._unused and value not in NEUTRAL.get(name, ())
        )
        # Unsupported fields stay in the body, so that the validation reports them.
        refused = set(itertools.islice(unsupported, _MAX_ERRORS))
        return {name: body[name] for name in body if name in refused or (name in fields and body[name] is not None)}


# Validation of a list stops at its first error, because a body of a megabyte may have a million wrong items.
type _List[T] = Annotated[list[T], FailFast(), Field(max_length=_MAX_ITEMS)]
type _Stops = Annotated[_List[Annotated[str, Field(min_length=1)]], Field(max_length=16)]
type _Ids = Annotated[list[int], FailFast()]
# `_explain` drops the tags in angle brackets from the location (pydantic's `loc`) that an error names.
type _TextOr[T] = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[T, Tag("<other>")],
    Discriminator(lambda value: "<text>" if isinstance(value, str) else "<other>"),
]


class StreamOptions(_Body):
    """Options of a stream of events.

    Attributes:
      include_usage: whether a final event with the usage is sent.
      include_obfuscation: whether events are padded to hide their length, which is not supported.
    """

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def _greedy_if_tiny(temperature):
    """Returns 0 for a temperature below the smallest that the engine takes."""
    return 0.0 if isinstance(temperature, float) and 0 < temperature < 1e-5 else temperature


def _check_effort(effort):
    if not isinstance(effort, str) and not (type(effort) is int and 1 <= effort <= 100):
        raise ValueError(f"{effort!r:.40} must be the name of an effort, such as 'low', or an integer from 1 to 100")
    return effort


# An `_Effort` is the name or the number of a reasoning effort. deepseek-recipe takes names only, so it gets "high" for
# a number. `Chat.encode` then writes the number.
type _Effort = Annotated[
    str | int,
    BeforeValidator(_check_effort),
    PlainSerializer(lambda effort: effort if isinstance(effort, str) else "high"),
]


class GenerationBody(_Body):
    """The fields that all requests for answers share."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=128)
    temperature: Annotated[float, BeforeValidator(_greedy_if_tiny), AfterValidator(check_temperature)] = 1.0
    top_p: Annotated[float, AfterValidator(check_top_p)] = 1.0
    # 0 and -1 mean all tokens, as in vLLM.
    top_k: Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda top_k: max(top_k, 0))] = 0
    seed: int | None = None
    stop: Annotated[_Stops, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = []
    stop_token_ids: _List[int] = Field([], max_length=1024)
    ignore_eos: bool = False
    cache_salt: str = Field("", min_length=1)  # vLLM's field: requests share prefixes only with the same salt
    user: str | None = None  # OpenAI's id of the end user; not used
    _unused = UNUSED

    @property
    def num_top(self) -> int | None:
        """The number of likeliest tokens to report; None for no log-probabilities."""
        return None


def _as_prompts(prompt):
    """Returns a list of prompts, also for a single prompt, which is text or a list of token ids."""
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int))
    return [prompt] if is_one else prompt


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Annotated[_List[_TextOr[_Ids]], Field(min_length=1), BeforeValidator(_as_prompts)]
    max_tokens: int = Field(16, ge=0)
    best_of: int | None = Field(None, ge=1, le=128)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @model_validator(mode="after")
    def _agree(self):
        best_of = self.best_of or self.n
        check(best_of >= self.n, f"{best_of=} must be at least n={self.n}")
        check(
            best_of == self.n or not self.stream, f"{best_of=} compares complete answers: leave out stream, or best_of"
        )
        return self

    @property
    def num_top(self):
        """The number of likeliest tokens to report; None for no log-probabilities."""
        return self.logprobs


class TextPart(_Body):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str
    _unused = ("cache_control", "prompt_cache_breakpoint")


class Thought(_Body):
    """A part of an answer's reasoning, as in Anthropic's Messages."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""
    signature: str = ""
    data: str = ""


class Message(_Body):
    """A message of a chat.

    Clients write an answer's reasoning in one of the fields `reasoning_content`, `reasoning` and `thinking_blocks`. The
    field `name` is not used.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: _TextOr[_List[TextPart]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking_blocks: _List[Thought] = []
    tool_calls: _List[JSONObject] = []
    tool_call_id: str | None = None
    prefix: bool = False
    _unused = ("annotations", "provider_specific_fields", "cache_control", "prompt_cache_breakpoint")

    @model_validator(mode="after")
    def _agree(self):
        check(self.content is not None or self.role == "assistant", "content: this field is needed")
        return self

    def as_json(self) -> JSONObject:
        """Returns the message in the form that deepseek-recipe takes. The role "developer" becomes "system" there."""
        message = self.model_dump(exclude_defaults=True, exclude={"reasoning", "thinking_blocks"})
        blocks = "".join(block.thinking for block in self.thinking_blocks)
        if reasoning := self.reasoning_content or self.reasoning or blocks:
            message["reasoning_content"] = reasoning
        return {"content": ""} | message | {"role": "system" if self.role == "developer" else self.role}


class _ChatBody(GenerationBody):
    """The fields that chats share in all protocols."""

    tools: _List[JSONObject] = []
    tool_choice: _TextOr[JSONObject] = "auto"
    effort_field: ClassVar[str]  # path of the field of reasoning effort
    _no_thinking: ClassVar[JSONObject] = {"thinking": {"type": "disabled"}}  # fields that turn reasoning off

    @property
    def effort(self) -> int | None:
        """The reasoning effort as a number; None if it is a name or not set."""
        effort = operator.attrgetter(self.effort_field)(self)
        return effort if isinstance(effort, int) else None

    def asked(self) -> JSONObject:
        """Returns the part of the body that deepseek-recipe converts, as the client wrote it."""
        return self.model_dump(
            exclude_unset=True, exclude={"seed", "top_k", "stop_token_ids", "ignore_eos", "cache_salt"}
        )

    def conversation(self) -> tuple[JSONObject, set[str]]:
        """Returns (the part of the body that deepseek-recipe converts, names of the strict tools).

        The fields `strict` are removed from this part, because deepseek-recipe would reduce schemas that have it. If
        a tool call is required, reasoning is turned off, unless the client sets an option of reasoning.

        Raises:
          APIError: a tool call is required, but there are no tools.
        """
        asked = self.asked()
        choice = asked.get("tool_choice", "auto")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind not in ("none", "auto"):
            if not asked.get("tools"):
                raise APIError(f"tool_choice: {kind!r} needs tools", param="tool_choice")
            if not asked.keys() & {"thinking", "reasoning", "reasoning_effort"}:
                asked |= self._no_thinking
        for field in ("response_format", "text", "output_config"):
            for form in asked.get(field, {}).values():
                if isinstance(form, dict):
                    form.pop("strict", None)
        return asked, set(_take_strict(asked.get("tools", [])))


def _take_strict(tools, namespace=""):
    """Removes the field `strict` from tools. Yields the names of strict tools, as deepseek-recipe writes them."""
    for tool in tools:
        if not isinstance(tool, dict):
            continue
        if isinstance(tool.get("tools"), list):
            yield from _take_strict(tool["tools"], f"{tool.get('name')}__")
        elif isinstance(function := tool.get("function", tool), dict) and function.pop("strict", None) is True:
            yield f"{namespace}{function.get('name')}"
        tool.pop("strict", None)


class ChatBody(_ChatBody):
    """The body of POST /v1/chat/completions."""

    messages: _List[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    response_format: JSONObject = {}
    thinking: JSONObject | None = None
    reasoning_effort: _Effort | None = None

    @model_validator(mode="after")
    def _agree(self):
        check(self.logprobs or not self.top_logprobs, f"top_logprobs={self.top_logprobs} needs logprobs: true")
        return self

    @property
    def num_top(self):
        """The number of likeliest tokens to report; None for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def asked(self):
        """Returns the part of the body that deepseek-recipe converts, as the client wrote it."""
        names = {"model", "stop", "tools", "tool_choice", "response_format", "thinking", "reasoning_effort"}
        asked = self.model_dump(include=names, exclude_unset=True)
        return asked | {"messages": [message.as_json() for message in self.messages]}

    effort_field = "reasoning_effort"


class _OneAnswerBody(_ChatBody):
    """The fields that OpenAI's Responses and Anthropic's Messages share. A request has one answer."""

    n: int = Field(1, ge=1, le=1)
    stop: _List[str] = Field([], max_length=0)
    # The types of items and parts, and the types of tools, that deepseek-recipe converts. It would drop other types
    # silently.
    _types: ClassVar[tuple[str, ...]]
    _tool_types: ClassVar[tuple[str, ...]]

    @model_validator(mode="after")
    def _agree(self):
        for name in ("input", "messages", "system"):
            self._check_types(getattr(self, name, None), name, self._types)
        return self

    @classmethod
    def _check_types(cls, items, name, types):
        items = items if isinstance(items, list) else []
        check(len(items) <= _MAX_ITEMS, f"{name}: {len(items)} items are more than {_MAX_ITEMS}")
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                continue
            if (kind := item.get("type") or types[0]) not in types:
                raise ValueError(f"{name}[{i}]: type {kind!r} is not supported, only {', '.join(types)}")
            for part in ("content", "output"):
                cls._check_types(item.get(part), f"{name}[{i}].{part}", types)


class TextOptions(_Body):
    """Options of an answer's text in Responses: its form."""

    format: JSONObject = {}


class ReasoningOptions(_Body):
    """Options of reasoning in Responses.

    The response repeats `summary`. The field has no other effect, because an answer always has its whole reasoning.
    """

    effort: _Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    _unused = ("generate_summary",)


class ResponsesBody(_OneAnswerBody):
    """The body of POST /v1/responses. The server does not store responses."""

    input: _TextOr[_List[JSONObject]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    store: Literal[False] = False
    effort_field = "reasoning.effort"
    _no_thinking = {"reasoning": {"effort": "none"}}
    _types = ("message", "input_text", "output_text", "text", "reasoning", "reasoning_text", "summary_text")
    _types += ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output")
    _tool_types = ("function", "custom", "namespace")

    @property
    def left_out(self) -> dict[int, str]:
        """The tools left out of the prompt, since the server would have to run them, as {index in `tools`: type}."""
        return {
            i: kind
            for i, tool in enumerate(self.tools)
            if isinstance(kind := tool.get("type"), str) and kind not in self._tool_types
        }

    def asked(self):
        """Returns the part of the body that deepseek-recipe converts, as the client wrote it."""
        asked = super().asked()
        return asked | {"tools": [tool for i, tool in enumerate(asked.get("tools", ())) if i not in self.left_out]}


class ToolChoice(_Body):
    """The choice of tools in Messages."""

    type: Literal["none", "auto", "any", "tool"]
    name: str | None = None
    _unused = ("disable_parallel_tool_use",)


class OutputOptions(TextOptions):
    """Options of an answer in Messages: reasoning effort and form."""

    effort: _Effort | None = None


class MessagesBody(_OneAnswerBody):
    """The body of POST /v1/messages."""

    messages: _List[JSONObject] = Field(min_length=1)
    max_tokens: int = Field(ge=1, lt=2**31)
    system: _TextOr[_List[JSONObject]] = ""
    stop_sequences: _Stops = []
    thinking: JSONObject = {}
    output_config: OutputOptions = OutputOptions()
    tool_choice: ToolChoice = ToolChoice(type="auto")  # pyrefly: ignore
    thread: JSONObject | None = None  # a conversation stored on the server, which is not supported
    effort_field = "output_config.effort"
    _types = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
    _tool_types = ("custom",)

    @model_validator(mode="after")
    def _can_be_kept(self):
        self._check_types(self.tools, "tools", self._tool_types)
        if (kind := self.tool_choice.type) in ("any", "tool") and self.thinking.get("type", "disabled") != "disabled":
            raise ValueError(f"tool_choice: {kind!r} needs thinking: {{'type': 'disabled'}}")
        form = self.output_config.format
        if form and (form.get("type") != "json_schema" or "schema" not in form):
            raise ValueError("output_config.format: needs type 'json_schema' and a schema")
        return self

    def conversation(self):
        """Returns the same as the base class, without redacted reasoning in messages.

        Raises APIError if `thread` is set. The error makes Anthropic's client package send all messages instead.
        """
        if self.thread is not None:
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            message = "thread: this server keeps no conversations, send all messages"
            raise APIError(message, param="thread", details=details)
        asked, strict_tools = super().conversation()
        for tool in asked.get("tools", ()):
            tool.pop("type", None)
        for message in asked["messages"]:
            if isinstance(parts := message.get("content"), list):
                message["content"] = [
                    part for part in parts if not isinstance(part, dict) or part.get("type") != "redacted_thinking"
                ]
        return asked, strict_tools


class CountBody(MessagesBody):
    """The body of POST /v1/messages/count_tokens."""

    max_tokens: int = Field(1, ge=1, lt=2**31)
    stream: Literal[False] = False  # pyrefly: ignore


def parse[Body: _Body](kind: type[Body], content: bytes) -> Body:
    """Parses the body of a request. Raises APIError with status 400, whose message names the wrong fields."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
    except RecursionError:
        raise APIError("the body is nested too deeply") from None
    shown = "; ".join(map(_explain, wrong[:_MAX_ERRORS]))
    more = f"; and {len(wrong) - _MAX_ERRORS} more" if len(wrong) > _MAX_ERRORS else ""
    # If an error concerns several fields, its message begins with the name or place of one of them, such as
    # "best_of=2 must be".
    location = wrong[0]["loc"] or re.findall(r"(\w+)(?==|[.\[:])", wrong[0]["msg"].removeprefix("Value error, "))
    raise APIError(shown + more, param=str(location[0])[:_MAX_NAME] if location else None)


def _explain(wrong):
    """Returns text that says which field is wrong, and why."""
    places = [part for part in wrong["loc"] if not str(part).startswith("<")]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in places).strip(".")[:_MAX_NAME]
    field = str(places[-1]) if places else ""
    match wrong["type"]:
        case "extra_forbidden" if field in NEUTRAL:
            return f"{name}: this server only takes {' or '.join(map(repr, NEUTRAL[field]))}, or leave it out"
        case "extra_forbidden":
            return f"{name}: there is no such field"
        case "missing":
            return f"{name}: this field is needed"
    message = wrong["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message
