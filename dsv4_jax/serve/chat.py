"""Encodes conversations as prompts, arrays of token ids, and makes the parsers of their answers."""

import collections
import json
import logging
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import deepseek_recipe as recipe
import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.config import DSV4Config
from dsv4_jax.engine.grammar import with_names
from dsv4_jax.engine.text import encode
from dsv4_jax.serve.call_blocks import CALL_TOKEN, V4_TAGS, V41_TAGS, CallBlocks
from dsv4_jax.serve.errors import APIError
from dsv4_jax.serve.protocol import JSONObject


_log = logging.getLogger(__name__)
_END = "<｜end▁of▁sentence｜>"
_ASSISTANT = "<｜Assistant｜>"
_THINK = "<think>"
_RELEASE_TOKENS = ("<｜begin▁of▁sentence｜>", _END, "<｜User｜>", _ASSISTANT, _THINK, "</think>", CALL_TOKEN)
_PARSED_CALL_TOKEN = "\0" + CALL_TOKEN  # the parser's name of CALL_TOKEN; no text contains this name
# `_APRIL_EFFORTS` maps a reasoning effort of April's release to the effort of release 0731 that has the same prompt.
# The encoding has only the prompts of 0731: "low", which is empty, "high" and "max". April's release has the first two
# of them, under other names.
_APRIL_EFFORTS = {"low": "low", "high": "low", "xhigh": "high", "max": "high"}
_MAX_PAST_TOKENS = 2**22  # 16 MiB of token ids

Release = Literal["april", "0731", "v41"]


class PastAnswer(NamedTuple):
    """An answer with tool calls, both as the client saw it and as the model wrote it.

    Attributes:
      message: the answer as the client saw it.
      tokens: [n] int32 token ids: the prompt's final `<think>` or `</think>`, and what the model wrote after it. The
        token that ended the answer is left out.
    """

    message: recipe.Message
    tokens: np.ndarray


class PastAnswers:
    """A store of answers with tool calls, by the id of their first call.

    It holds up to `_MAX_PAST_TOKENS` tokens. Beyond that, the least recently used answers are dropped.
    """

    def __init__(self):
        self._answers: collections.OrderedDict[str, PastAnswer] = collections.OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def add(self, id: str, answer: PastAnswer) -> None:
        """Adds an answer. `id` is the id of its first call; no stored answer may have the same id."""
        with self._lock:
            self._answers[id] = answer
            self._size += len(answer.tokens)
            while self._size > _MAX_PAST_TOKENS:
                _, oldest = self._answers.popitem(last=False)
                self._size -= len(oldest.tokens)

    def find(self, message: recipe.Message) -> PastAnswer | None:
        """Returns the answer that a client's message repeats, with or without its reasoning. None if there is none."""
        if not message.tool_calls:
            return None
        id = message.tool_calls[0].id
        with self._lock:
            answer = self._answers.get(id)
            if answer is None:
                return None
            self._answers.move_to_end(id)
        is_same_reasoning = message.reasoning_content in (None, "", answer.message.reasoning_content)
        if is_same_reasoning and _without_reasoning(message) == _without_reasoning(answer.message):
            return answer
        return None


class Converted(NamedTuple):
    """The body of a request, converted to a conversation that can be encoded for the model.

    Attributes:
      request: the body as deepseek-recipe converts it.
      conversation: the request's conversation, with the fields of Messages that deepseek-recipe leaves out.
      parsing: options of the answer's parser.
    """

    request: recipe.ConversationRequest
    conversation: recipe.Conversation
    parsing: recipe.ParsingOptions


class Chat:
    """The encoding of conversations as plain text, for tokenizers that lack the special tokens of DeepSeek.

    A message is a paragraph, `System: ..`, `User: ..` or `Assistant: ..`. The answer ends where the model writes
    `User:`. Tools and thinking are not supported.

    Attributes:
      stops: strings that end the answer, in addition to those of the client.
      ids: {name: id} of the special tokens that the tokenizer has.
      special_tokens: names of the special tokens that the encoding needs.
      call_tags: how the model writes the tags of tool calls.
      takes_numbers: whether reasoning effort may be a number.
      options: deepseek-recipe's options for converting bodies to conversations.
    """

    stops: tuple[str, ...] = ("\n\nUser:",)
    special_tokens: ClassVar[tuple[str, ...]] = _RELEASE_TOKENS
    call_tags = V4_TAGS
    takes_numbers = False
    _version = recipe.ModelVersion.DeepseekV4Pro
    _thinks_by_default = False

    def __init__(self, tokenizer: Tokenizer, models: Sequence[str]):
        self._tokenizer = tokenizer
        self.ids = {name: token for name in self.special_tokens if (token := tokenizer.token_to_id(name)) is not None}
        self.options = recipe.ConversionOptions(
            default_thinking_mode=self._thinks_by_default,
            thinking_max_tokens_upper_bound=2**31 - 1,
            non_thinking_max_tokens_upper_bound=2**31 - 1,
        ).with_model_versions_by_name(dict.fromkeys(models, self._version))

    def convert(self, kind: type, body: JSONObject) -> Converted:
        """Converts a body to a conversation.

        Args:
          kind: class of the protocol in deepseek-recipe: `ChatCompletionRequest`, `ResponsesRequest` or
            `MessagesRequest`.
          body: the body, JSON in this protocol.

        Raises:
          APIError: the body is wrong, or this encoding does not support a feature that it uses.
        """
        try:
            request = kind(body).convert(self.options)
        except recipe.ConversionError as error:
            message = json.loads(error.body)["error"]["message"]
            fields = (word for word in re.findall(r"\w+", message) if word in body.keys() - {"model"})
            raise APIError(message, error.status_code, param=next(fields, None)) from None
        except (ValueError, OverflowError, RecursionError) as error:  # also raised for huge numbers and deep nesting
            field = _find_field(kind, body, str(error))
            message = str(error).replace("invalid request body", field or "invalid request body")
            raise APIError(message, param=field and field.partition("[")[0]) from None
        conversation = request.conversation
        parsing = request.parsing_options
        if kind is recipe.MessagesRequest:
            conversation = _as_in_messages(conversation, body)
        if conversation.tool_choice == "required":
            parsing.starts_in_tool_calls = True
        if conversation.messages[-1].prefix:  # so that the parser keeps a new line at the answer's start
            parsing.thinking_initial_stage = recipe.ThinkingInitialStage.ContentContinuation
        self._check(conversation)
        return Converted(request, conversation, parsing)

    def _check(self, conversation):
        messages = conversation.messages
        needs = {
            "tools": conversation.tools or any(m.tool_calls or m.role == "tool" for m in messages),
            "thinking": conversation.thinking_mode,
            "messages": any(m.prefix or m.role == "latest_reminder" for m in messages),
        }
        for name, is_used in needs.items():
            if is_used:
                raise APIError(f"{name}: this needs a tokenizer with the tokens of DeepSeek's release", param=name)

    def encode(self, conversation: recipe.Conversation, effort: int | None = None) -> list[int]:
        """Returns the prompt as token ids.

        Args:
          conversation: the conversation.
          effort: reasoning effort from 1 to 100, in place of the conversation's; for encodings that set
            `takes_numbers`. None = the conversation's effort.
        """
        paragraphs = [f"{message.role.capitalize()}: {message.content}\n\n" for message in conversation.messages]
        return encode(self._tokenizer, "".join([*paragraphs, "Assistant:"]))

    def remember(self, prompt: Sequence[int], message: recipe.Message, tokens: list[int]) -> None:
        """Stores a complete answer, so that later prompts can repeat its tokens. The base class stores nothing.

        Args:
          prompt: token ids of the prompt.
          message: the answer as the client sees it.
          tokens: token ids of the answer as the model wrote it, without the token that ended it.
        """

    def parser(self, converted: Converted, generator: Any) -> tuple[recipe.StreamProcessor, CallBlocks | None]:
        """Makes the parser of an answer.

        Args:
          converted: result of `convert`.
          generator: deepseek-recipe's generator of the protocol's events.

        Returns:
          (parser, blocks). `blocks` is the `CallBlocks` that turns tokens into the parser's input; None if the parser
          reads the answer's text.
        """
        plain = recipe.ParsingOptions(
            parse_tool_calls=False,
            thinking_initial_stage=recipe.ThinkingInitialStage.ContentContinuation,
            special_tokens=recipe.SpecialTokens(thinking_start="\0", thinking_end="\0"),
        )
        return recipe.StreamProcessor(generator, plain), None


class ReleaseChat(Chat):
    """The encoding of DeepSeek-V4's releases, with thinking, reasoning effort, tools and reminders.

    Names of special tokens within a client's text are encoded as text. If a client sends back an answer with tool
    calls, the answer is encoded as the tokens that the model wrote.
    """

    stops = ()
    _encoding_type: ClassVar[Any] = recipe.DeepseekV4Encoding
    _thinks_by_default = True

    def __init__(self, tokenizer: Tokenizer, models: Sequence[str], release: Release):
        super().__init__(tokenizer, models)
        self._past = PastAnswers()
        self._efforts = _APRIL_EFFORTS if release == "april" else {}
        self._names = recipe.SpecialTokens(dsml=_PARSED_CALL_TOKEN)
        self._decoder = recipe.Tokenizer.from_str(with_names(tokenizer, {CALL_TOKEN: _PARSED_CALL_TOKEN}))
        self._encoding = self._encoding_type().with_special_tokens(self._names).with_tokenizer(self._decoder)
        self._call_begin = tokenizer.encode(f"\n\n<{self.call_tags.start}\n").ids

    def _check(self, conversation):
        pass

    def _encode(self, conversation, effort):
        """Returns the prompt as token ids, with past answers as deepseek-recipe encodes them."""
        name = conversation.reasoning_effort
        name = self._efforts.get(name, name)
        messages = list(_in_place(conversation.messages))
        return self._encoding.encode(_changed(conversation, messages=messages, reasoning_effort=name))

    def encode(self, conversation, effort=None):
        """Returns the prompt as token ids. Past answers with tool calls have the tokens that the model wrote."""
        ids = self._encode(conversation, effort)
        written = [m for m in conversation.messages if m.role == "assistant" and not m.prefix]
        answers = [self._past.find(message) for message in written]
        if not any(answers):
            return ids
        # Every message of the assistant ends with the end token, which occurs nowhere else.
        ends = [i for i, token in enumerate(ids) if token == self.ids[_END]]
        for answer, end in reversed(list(zip(answers, ends, strict=True))):
            if answer is None:
                continue
            # `<think>` or `</think>` follows the token that begins a message of the assistant.
            begin = next(i for i in range(end, -1, -1) if ids[i] == self.ids[_ASSISTANT]) + 1
            # The stored tokens fit only if both they and the prompt contain the answer's reasoning, or neither does. In
            # conversations without tools, the encoding leaves out earlier reasoning.
            if ids[begin] == answer.tokens[0]:
                ids[begin:end] = answer.tokens.tolist()
        return ids

    def remember(self, prompt, message, tokens):
        # An answer with tool calls is stored if its prompt ends with `<think>` or `</think>`, perhaps followed by the
        # beginning of a required tool call. Any other prompt ends within a message, which the answer continues.
        begin = max(i for i, token in enumerate(prompt) if token in (self.ids[_THINK], self.ids["</think>"]))
        if message.tool_calls and list(prompt[begin + 1 :]) in ([], self._call_begin):
            answer = PastAnswer(message, np.array([*prompt[begin:], *tokens], np.int32))
            self._past.add(message.tool_calls[0].id, answer)

    def parser(self, converted, generator):
        parsing = converted.parsing
        parsing.special_tokens = self._names
        blocks = CallBlocks(
            self._tokenizer,
            tags=self.call_tags,
            has_calls=parsing.parse_tool_calls,
            has_begun=parsing.starts_in_tool_calls,
        )
        return recipe.StreamProcessor(generator, parsing, self._decoder), blocks


class V41Chat(ReleaseChat):
    """The encoding of DeepSeek-V4.1. Reasoning effort may be a number, and system messages keep their places."""

    special_tokens = (*_RELEASE_TOKENS, "<｜System｜>")
    call_tags = V41_TAGS
    takes_numbers = True
    _version = recipe.ModelVersion.DeepseekV41Flash
    _encoding_type = recipe.DeepseekV41Encoding

    def _encode(self, conversation, effort):
        if effort is None or not conversation.thinking_mode:
            return self._encoding.encode(conversation)
        # deepseek-recipe takes names only. It writes "high" as 75, the first number of the prompt. The release's
        # tokenizer separates numbers from other text.
        ids = self._encoding.encode(_changed(conversation, reasoning_effort="high"))
        old = self._tokenizer.encode("75", add_special_tokens=False).ids
        begin = ids.index(old[0])
        ids[begin : begin + len(old)] = self._tokenizer.encode(str(effort), add_special_tokens=False).ids
        return ids


def make_chat(tokenizer: Tokenizer, models: Sequence[str], release: Release) -> Chat:
    """Makes the encoding of conversations: the release's, or a plain `Chat` if the tokenizer lacks a special token.

    Args:
      tokenizer: the tokenizer.
      models: names of models in the API.
      release: the release in whose encoding the model was trained.
    """
    kind = V41Chat if release == "v41" else ReleaseChat
    missing = [name for name in kind.special_tokens if tokenizer.token_to_id(name) is None]
    if not missing:
        return kind(tokenizer, models, release)
    if len(missing) < len(kind.special_tokens):
        _log.warning("Chats are encoded as plain text, because the tokenizer lacks tokens: %s", ", ".join(missing))
    return Chat(tokenizer, models)


def find_release(folder: Path, config: DSV4Config) -> Release:
    """Returns the release in whose encoding of conversations a checkpoint was trained.

    V4.1 is recognized by `config.kv_format`. V4's releases since 0731 are recognized by the fields of DSpark's draft
    layers in the config.json in `folder`. Without the file, a model of V4 counts as "0731".

    Args:
      folder: folder of the checkpoint.
      config: the checkpoint's configuration.
    """
    if config.kv_format == "v41":
        return "v41"
    file = folder / "config.json"
    return "april" if file.exists() and "dspark_block_size" not in json.loads(file.read_text()) else "0731"


def _find_field(kind, body, message):
    """Finds the field of a body, or the item of a field, that causes an error of deepseek-recipe.

    Returns the name of the field or item, such as "messages[3]", which alone causes the same error message. Returns
    None if there is no such part.
    """
    for field, value in body.items():
        items = [(f"{field}[{i}]", [item]) for i, item in enumerate(value)] if isinstance(value, list) else []
        for name, part in [*items, (field, value)]:
            try:
                kind({field: part})
            except (ValueError, OverflowError, RecursionError) as error:
                if str(error) == message:
                    return name
    return None


def _as_in_messages(conversation, body):
    """Returns a conversation with the features of Anthropic's Messages that deepseek-recipe does not convert.

    These are the continuation of a final message by the assistant, the tool choice "any", and the answer's schema.
    """
    *earlier, last = conversation.messages
    changes: dict[str, Any] = {}
    if last.role == "assistant":
        last = recipe.AssistantMessage(last.content, last.reasoning_content, last.tool_calls, prefix=True)
        changes["messages"] = [*earlier, last]
    if body.get("tool_choice", {}).get("type") == "any":
        changes["tool_choice"] = "required"
    if form := body.get("output_config", {}).get("format"):
        changes["response_schema"] = form["schema"]
    return _changed(conversation, **changes)


def _in_place(messages):
    """Yields the messages in a form in which the encoding keeps their order.

    The encoding would move system messages to the front. A system message that follows a message of another role
    therefore becomes a reminder in a user message, in the form that deepseek-recipe has for Anthropic's Messages.
    """
    is_opening = True
    for message in messages:
        is_opening &= message.role == "system"
        if message.role == "system" and not is_opening:
            message = recipe.UserMessage(f"<system-reminder>\n{message.content}\n</system-reminder>")
        yield message


def _changed(conversation, **changes):
    """Returns a copy of a conversation in which the given fields are replaced."""
    names = (
        "messages",
        "thinking_mode",
        "tools",
        "tool_choice",
        "reasoning_effort",
        "response_schema",
        "response_regex",
    )
    fields = {name: getattr(conversation, name) for name in names}
    if conversation.response_format == "json_object":
        fields["response_format"] = "json_object"
    return recipe.Conversation(**fields | changes)


def _without_reasoning(message):
    """Returns (text, [(id, name, arguments) of each tool call]). Arguments are parsed, since clients reformat JSON."""
    calls = message.tool_calls or []
    return message.content, [(call.id, call.name, _parsed(call.arguments)) for call in calls]


def _parsed(arguments):
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
