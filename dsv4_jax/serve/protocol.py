"""Bodies of OpenAI's API that clients send, and the usage that answers report."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from dsv4_jax.arguments import check_temperature, check_top_p
from dsv4_jax.serve.errors import APIError


# Unsupported fields that clients often send, with the values that have no effect and are accepted.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = dict(
    frequency_penalty=(0,),
    presence_penalty=(0,),
    repetition_penalty=(1,),
    logit_bias=({},),
    suffix=("",),
    top_logprobs=(0,),
    tools=([],),
    tool_choice=("none", "auto"),
    parallel_tool_calls=(True, False),
    functions=([],),
    response_format=({"type": "text"},),
    text=({}, {"format": {"type": "text"}}),
    include=([], ["reasoning.encrypted_content"]),
    truncation=("disabled",),
    background=(False,),
    reasoning_effort=("none",),
    modalities=(["text"],),
    service_tier=("auto", "default", "standard_only"),
    store=(False,),
    metadata=({},),
)


_MAX_NAME = 100  # characters of a field's name that an error repeats
# vLLM's limit. OpenAI allows 5 for completions and 20 for chats.
MAX_LOGPROBS = 20


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    """Options of a stream. `include_usage`: send a last event with the usage. Events are not padded."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class GenerationBody(_Body):
    """Fields that completions and chat completions share. A null field counts as absent."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1, le=128)
    temperature: Annotated[float, AfterValidator(check_temperature)] = 1.0
    top_p: Annotated[float, AfterValidator(check_top_p)] = 1.0
    top_k: int = Field(0, ge=-1, lt=2**31)  # as in vLLM, 0 and -1 take all tokens
    seed: int | None = None
    stop: Annotated[list[Annotated[str, Field(min_length=1)]], BeforeValidator(_listed), Field(max_length=16)] = []
    stop_token_ids: list[int] = Field([], max_length=1024)
    ignore_eos: bool = False
    user: str | None = None  # OpenAI's id of the end user; not used

    @property
    def num_samples(self) -> int:
        """The number of answers to draw for each prompt."""
        return self.n

    @property
    def num_top(self) -> int | None:
        """The number of likeliest tokens to report; None for no log-probabilities."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = cls.model_fields
        return {
            name: value
            for name, value in body.items()
            if value is not None and (name in fields or name not in _NEUTRAL or value not in _NEUTRAL[name])
        }


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    prompt: Any
    max_tokens: int = Field(16, ge=0)
    best_of: int | None = Field(None, ge=1, le=128)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @model_validator(mode="after")
    def _agree(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of={self.best_of} must be at least n={self.n}")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ValueError(f"best_of={self.best_of} compares complete answers: leave out stream, or best_of")
        return self

    @property
    def num_top(self) -> int | None:
        """The number of likeliest tokens to report; None for no log-probabilities."""
        return self.logprobs

    @property
    def num_samples(self) -> int:
        """The number of answers to draw for each prompt, the best of which are returned."""
        return self.best_of or self.n

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or token ids; APIError if `prompt` has another type."""
        prompts = self.prompt
        if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and _is_id(prompts[0])):
            prompts = [prompts]
        for prompt in prompts if isinstance(prompts, list) and prompts else [None]:
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_id, prompt))):
                message = "prompt must be text, a list of token ids, or a list of several such prompts"
                raise APIError(400, message, param="prompt")
        return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class TextPart(_Body):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Body):
    """A message of a chat. `name` is not used."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    prefix: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        # Fields of an earlier answer that clients send back.
        empty = ("refusal", "annotations", "audio", "function_call", "tool_calls")
        return {name: value for name, value in body.items() if value is not None and (value or name not in empty)}

    @model_validator(mode="after")
    def _agree(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("content: this field is needed")
        return self

    def as_json(self) -> dict[str, Any]:
        """Returns the message as deepseek-recipe takes it, which calls a developer the system."""
        role = "system" if self.role == "developer" else self.role
        return dict(content="") | self.model_dump(exclude_unset=True) | dict(role=role)


class _ChatBody(GenerationBody):
    """Fields that chats share in all protocols."""

    tools: list[dict[str, Any]] = []
    tool_choice: Any = "auto"
    _no_thinking: ClassVar[dict[str, Any]]  # fields that turn reasoning off
    _form: ClassVar[tuple[str, ...]]  # path to what has the schema of an answer

    @property
    def strict_tools(self) -> set[str]:
        """Names of the tools whose calls have to follow their schemas."""
        return set(_strict_names(self.tools))

    def asked(self) -> dict[str, Any]:
        """Returns the part of the body that deepseek-recipe converts, as the client wrote it."""
        return self.model_dump(exclude_unset=True, exclude={"seed", "top_k", "stop_token_ids", "ignore_eos"})

    def conversation(self) -> dict[str, Any]:
        """Returns the part of the body that deepseek-recipe converts.

        Nothing is strict in it, because deepseek-recipe would reduce the schema. A call that must come, comes without
        reasoning, unless the client says how to think. Raises APIError if there is no tool to call.
        """
        asked = self.asked()
        choice = asked.get("tool_choice", "auto")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind not in ("none", "auto"):
            if not self.tools:
                raise APIError(400, f"tool_choice: {kind!r} needs tools", param="tool_choice")
            if not asked.keys() & {"thinking", "reasoning", "reasoning_effort"}:
                asked |= self._no_thinking
        if self.tools:
            asked["tools"] = [_relaxed(tool) for tool in self.tools]
        form = functools.reduce(lambda part, key: part.get(key) if isinstance(part, dict) else None, self._form, asked)
        if isinstance(form, dict):
            form.pop("strict", None)
        return asked


def _relaxed(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool without `strict`."""
    tool = {key: value for key, value in tool.items() if key != "strict"}
    if isinstance(tool.get("function"), dict):
        tool["function"] = _relaxed(tool["function"])
    if isinstance(tool.get("tools"), list):
        tool["tools"] = [_relaxed(part) for part in tool["tools"] if isinstance(part, dict)]
    return tool


def _strict_names(tools: list[dict[str, Any]], namespace: str = "") -> Iterator[str]:
    """Yields the names of tools with `strict: true`, as deepseek-recipe writes them."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(tool.get("tools"), list):
            yield from _strict_names(tool["tools"], f"{tool.get('name')}__")
        elif isinstance(function, dict) and function.get("strict") is True:
            yield f"{namespace}{function.get('name')}"


class ChatBody(_ChatBody):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)
    tool_choice: str | dict[str, Any] = "auto"
    response_format: dict[str, Any] = {}
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _agree(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs: true")
        return self

    @property
    def num_top(self) -> int | None:
        """The number of likeliest tokens to report; None for no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def asked(self) -> dict[str, Any]:
        """Returns the part of the body that deepseek-recipe converts, as the client wrote it."""
        names = {"stop", "tools", "tool_choice", "response_format", "thinking", "reasoning_effort"}
        asked = self.model_dump(include=names, exclude_unset=True)
        return asked | dict(messages=[message.as_json() for message in self.messages])

    _no_thinking = dict(thinking=dict(type="disabled"))
    _form = ("response_format", "json_schema")


class _OneAnswerBody(_ChatBody):
    """Fields that Responses and Messages share: one answer, and tools."""

    n: int = Field(1, ge=1, le=1)
    stop: list[str] = Field([], max_length=0)
    # Types of items, parts and tools that deepseek-recipe converts; it drops others without a word.
    _types: ClassVar[tuple[str, ...]]

    @model_validator(mode="after")
    def _agree(self) -> "_OneAnswerBody":
        for name in ("input", "messages", "system", "tools"):
            self._check_types(getattr(self, name, None), name)
        return self

    @classmethod
    def _check_types(cls, items: Any, name: str) -> None:
        for i, item in enumerate(items if isinstance(items, list) else []):
            if not isinstance(item, dict):
                continue
            if (kind := item.get("type", cls._types[0])) not in cls._types:
                raise ValueError(f"{name}[{i}]: type {kind!r} is not supported, only {', '.join(cls._types)}")
            for part in ("content", "output"):
                cls._check_types(item.get(part), f"{name}[{i}].{part}")


class ResponsesBody(_OneAnswerBody):
    """The body of POST /v1/responses. Nothing is stored."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=2**31)
    tool_choice: str | dict[str, Any] = "auto"
    text: dict[str, Any] = {}
    reasoning: dict[str, Any] = {}
    store: Literal[False] = False
    prompt_cache_key: str | None = None  # not used: every prompt's prefix is looked up
    safety_identifier: str | None = None  # not used
    _no_thinking = dict(reasoning=dict(effort="none"))
    _form = ("text", "format")
    _types = ("message", "input_text", "output_text", "text", "reasoning", "reasoning_text", "summary_text", "function")
    _types += ("function_call", "function_call_output", "custom", "custom_tool_call", "custom_tool_call_output")


class ToolChoice(_Body):
    """Anthropic's choice of tools."""

    type: Literal["none", "auto", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool = False  # has no effect


class MessagesBody(_OneAnswerBody):
    """The body of POST /v1/messages."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int = Field(ge=1, lt=2**31)
    system: str | list[dict[str, Any]] = ""
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=16)
    thinking: dict[str, Any] = {}
    output_config: dict[str, Any] = {}
    tool_choice: ToolChoice = ToolChoice(type="auto")
    metadata: dict[str, Any] = {}  # not used
    cache_control: dict[str, Any] = {}  # not used: every prompt's prefix is looked up

    @model_validator(mode="after")
    def _can_be_kept(self) -> "MessagesBody":
        if "format" in self.output_config:
            raise ValueError("output_config.format: not supported here, use response_format of /v1/chat/completions")
        if (kind := self.tool_choice.type) in ("any", "tool") and self.thinking.get("type", "disabled") != "disabled":
            raise ValueError(f"tool_choice: {kind!r} needs thinking: {{'type': 'disabled'}}")
        if kind == "any" and len(self.tools) != 1:  # deepseek-recipe would not enforce it
            raise ValueError(f"tool_choice: 'any' of {len(self.tools)} tools is not supported: name the tool")
        return self

    def conversation(self) -> dict[str, Any]:
        """Returns the part of the body that deepseek-recipe converts."""
        asked = super().conversation()
        if self.tool_choice.type == "any":
            asked |= dict(tool_choice=dict(type="tool", name=self.tools[0].get("name")))
        return asked

    _no_thinking = dict(thinking=dict(type="disabled"))
    _form = ("output_config", "format")
    _types = ("custom", "text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def parse[Body: _Body](kind: type[Body], content: bytes) -> Body:
    """Parses the body of a request; raises APIError 400, naming the fields that are wrong."""
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)
    except RecursionError:
        raise APIError(400, "the body is nested too deeply") from None
    shown = "; ".join(map(_explain, wrong[:8]))
    more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
    # An error that concerns several fields begins with the value of one: "best_of=2 must be ..".
    location = wrong[0]["loc"] or re.findall(r"(\w+)=", wrong[0]["msg"])
    raise APIError(400, shown + more, param=str(location[0])[:_MAX_NAME] if location else None)


def _explain(wrong: Mapping[str, Any]) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in wrong["loc"]).strip(".")[:_MAX_NAME]
    match wrong["type"]:
        case "extra_forbidden" if name in _NEUTRAL:
            return f"{name}: this server only takes {' or '.join(map(repr, _NEUTRAL[name]))}, or leave it out"
        case "extra_forbidden":
            return f"{name}: there is no such field"
        case "missing":
            return f"{name}: this field is needed"
    message = wrong["msg"].removeprefix("Value error, ")
    return f"{name}: {message}" if name else message


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Returns the usage of an answer. `prompt_tokens` includes the cached ones."""
    return dict(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=dict(cached_tokens=cached_tokens),
    )
