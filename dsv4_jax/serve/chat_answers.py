"""Answers to chats, whose tokens deepseek-recipe parses into reasoning, text and tool calls."""

import itertools
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import deepseek_recipe as recipe
import numpy as np
from starlette.responses import JSONResponse, Response

from dsv4_jax.engine.text import AnswerText
from dsv4_jax.serve.answers import Answer, OpenAIAnswer, sse
from dsv4_jax.serve.async_engine import Update
from dsv4_jax.serve.call_blocks import CallBlocks
from dsv4_jax.serve.chat import Chat, Converted, ToolCall
from dsv4_jax.serve.choices import Choice, ScoredToken
from dsv4_jax.serve.errors import APIError
from dsv4_jax.serve.protocol import ChatBody, CountBody, MessagesBody, ResponsesBody


class AnswerParser(AnswerText):
    """Parses an answer's tokens into a protocol's events and its complete answer.

    Attributes:
      response: the answer so far.
    """

    def __init__(
        self,
        processor: recipe.StreamProcessor,
        response: Any,
        source: AnswerText | CallBlocks,
        keeps_events: bool = True,
    ):
        """Takes a parser, an empty response, and what turns tokens into the parser's text or chunks."""
        super().__init__(None, [], [])
        self._processor = processor
        self._source = source
        self._keeps_events = keeps_events
        self._has_begun = False
        self._events: list[tuple[str | None, str]] = []
        self.response = response

    @property
    def stopped(self) -> bool:
        return self._processor.finished or (isinstance(self._source, AnswerText) and self._source.stopped)

    def begin(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Reports the usage of the prompt, once."""
        if not self._has_begun:
            self._has_begun = True
            usage = recipe.PromptUsage(prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens)
            self._push([recipe.InferenceChunk.ready(prompt_usage=usage)])

    def add(self, token: int) -> str:
        new = self._source.add(token)
        self._push([recipe.InferenceChunk.text(new, 1)] if isinstance(new, str) else new)
        return ""

    def finish(self) -> str:
        new = self._source.finish()
        self._push([recipe.InferenceChunk.text(new)] if isinstance(new, str) else new)
        return ""

    def end(self, finish_reason: str) -> None:
        """Ends the answer."""
        reasons = dict(stop=recipe.InferenceFinishReason.Stop, length=recipe.InferenceFinishReason.Length)
        if not self._processor.finished:
            self._push([recipe.InferenceChunk.finish(reasons[finish_reason])])

    def take_events(self) -> list[tuple[str | None, str]]:
        """Returns the new events: their names, if the protocol has such, and their JSON."""
        events = self._events
        self._events = []
        return events

    def _push(self, chunks):
        for chunk in chunks:
            if self._processor.finished:
                return
            for event in self._processor.push(chunk):
                if self._keeps_events:
                    self._events.append((self.response.sse_event_name(event), event.to_json()))
                self.response.accumulate(event)


class ParsedChoice(Choice):
    """A choice whose text is parsed.

    Attributes:
      parser: the parser, which keeps the text.
      is_whole: whether the model ended the answer itself.
    """

    def __init__(self, index: int, parser: AnswerParser, prompt_tokens: int):
        super().__init__(index, parser, "")
        self.parser = parser
        self._prompt_tokens = prompt_tokens
        self.is_whole = False

    def take(self, update: Update) -> tuple[str, list[ScoredToken]]:
        self.parser.begin(self._prompt_tokens, update.cached_tokens)
        new = super().take(update)
        if self.finish_reason is not None:
            self.is_whole = update.finish_reason == "stop" and not self.parser.stopped
            self.parser.end(self.finish_reason)
        return new


class ParsedAnswer(Answer):
    """An answer in one of deepseek-recipe's protocols."""

    request_type: ClassVar[Any]
    response_type: ClassVar[Any]
    _body: Any
    _chat: Chat
    _converted: Converted

    def _read(self, response: dict[str, Any]) -> tuple[str, str, list[ToolCall]]:
        """Returns the reasoning, the content and the tool calls (id, name, arguments) of a complete answer."""
        raise NotImplementedError

    def _make_generator(self, answer_id: str, model: str) -> Any:
        return self.request_type.chunk_generator(self._converted.request, answer_id, model)

    def _encode(self) -> Sequence[Sequence[int]]:
        if self._service.chat is None:
            raise APIError(400, "the checkpoint has no tokenizer.json: use /v1/completions with token ids")
        self._chat = self._service.chat
        body = self._body.conversation() | dict(model=self._service.options.model_name)
        self._converted = self._chat.convert(self.request_type, body)
        prompt = self._chat.encode(self._converted.conversation)
        try:
            strict = self._body.strict_tools
            self._grammar = self._chat.grammar(self._converted, prompt, strict, self._service.compile)
        except ValueError as error:
            raise APIError(400, f"the form of the answer cannot be enforced: {error}") from None
        if self._grammar is not None and self._body.ignore_eos:
            raise APIError(400, "ignore_eos: an answer of a given form ends with it", param="ignore_eos")
        return [prompt]

    def _new_choice(self, prompt: np.ndarray, number: int, index: int) -> Choice:
        answer_id = self._head["id"]
        created = self._head["created"]
        model = self._head["model"]
        chat = self._chat
        converted = self._converted
        processor, blocks = chat.parser(converted, self._make_generator(answer_id, model))
        stops = [*chat.stops, *converted.parsing.stop_sequences]
        source = blocks or AnswerText(self._service.tokenizer, prompt, stops)
        response = self.response_type(answer_id, model, created, len(prompt), 0)
        return ParsedChoice(index, AnswerParser(processor, response, source, self._body.stream), len(prompt))

    @property
    def _sampling(self) -> dict[str, Any]:
        default = self._converted.request.inference_options.top_p
        if "top_p" in self._body.model_fields_set or default is None:
            return super()._sampling
        return super()._sampling | {"top_p": round(default, 6)}

    def _complete(self, choice: ParsedChoice) -> dict[str, Any]:
        """Returns a complete answer as JSON, and remembers it if its client may send it back."""
        response = json.loads(choice.parser.response.to_json())
        if choice.is_whole:
            tokens = [scored.token for scored in choice.generated[:-1]]
            reasoning, content, calls = self._read(response)
            self._chat.remember(self._prompts[0].tolist(), reasoning, content, calls, tokens)
        return response


class ChatAnswer(ParsedAnswer, OpenAIAnswer):
    """The answer to POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    body_type = ChatBody
    request_type = recipe.ChatCompletionRequest
    response_type = recipe.ChatCompletionResponse
    _body: ChatBody

    def _max_tokens(self, room: int) -> int:
        asked = self._body.max_completion_tokens or self._body.max_tokens
        return max(room, 1) if asked is None else asked

    def _json(self, choice: Any) -> dict[str, Any]:
        made = self._complete(choice)["choices"][0] | dict(logprobs=self._logprobs(choice.scored))
        return made | dict(message=dict(refusal=None, annotations=[]) | made["message"])

    def _usage(self) -> dict[str, Any]:
        responses = [json.loads(choice.parser.response.to_json()) for choice in self.choices]
        details = [response["usage"].get("completion_tokens_details", {}) for response in responses]
        reasoning = sum(detail.get("reasoning_tokens", 0) for detail in details)
        return super()._usage() | dict(completion_tokens_details=dict(reasoning_tokens=reasoning))

    def _chunks(self, choice: Any, text: str, tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
        chunks = [json.loads(event)["choices"][0] for _, event in choice.parser.take_events()]
        if self._body.num_top is not None:
            chunks = chunks or [dict(delta={}, finish_reason=None)]
            chunks[0] |= dict(logprobs=self._logprobs(tokens))
        if choice.finish_reason is not None:
            self._complete(choice)
        return chunks

    def _logprobs(self, tokens):
        return None if self._body.num_top is None else self._service.names.of_chat(tokens)

    def _read(self, response: dict[str, Any]) -> tuple[str, str, list[ToolCall]]:
        message = response["choices"][0]["message"]
        functions = [(call["id"], call["function"]) for call in message.get("tool_calls") or []]
        calls = [(name, function["name"], function["arguments"]) for name, function in functions]
        return message.get("reasoning_content") or "", message["content"] or "", calls


class SingleAnswer(ParsedAnswer):
    """An answer of one choice, in a format that is deepseek-recipe's throughout."""

    _num_events = 0

    def _events(self, choice: Any, text: str, tokens: Sequence[ScoredToken]) -> list[bytes]:
        if choice.finish_reason is not None:
            self._complete(choice)
        events = choice.parser.take_events()
        self._num_events += len(events)
        return [sse(self._as_sent(json.loads(event)), name) for name, event in events]

    def _response(self) -> Response:
        return JSONResponse(self._as_sent(self._complete(self.choices[0])))

    def _as_sent(self, part: dict[str, Any]) -> dict[str, Any]:
        """Returns an event or a whole answer of deepseek-recipe as the protocol's clients know it."""
        return part


class ResponsesAnswer(SingleAnswer):
    """The answer to POST /v1/responses."""

    id_prefix = "resp_"
    body_type = ResponsesBody
    request_type = recipe.ResponsesRequest
    response_type = recipe.ResponsesResponse
    _body: ResponsesBody

    def _make_generator(self, answer_id: str, model: str) -> Any:
        asked: dict[str, Any] = self._body.asked() | dict(model=model)
        asked["text"] = dict(verbosity="medium") | asked.get("text", {})
        self._namespaces = self._chat.namespace_tools(asked)
        generator = super()._make_generator(answer_id, model).with_echo(recipe.ResponsesRequest(asked).echo())
        return generator.with_namespace_tool_map(self._namespaces)

    @property
    def headers(self) -> dict[str, str]:
        some = itertools.islice(self._body.left_out.items(), 8)
        left_out = ", ".join(f"tools[{i}] ({ascii(kind[:40])})" for i, kind in some)
        return {"Warning": f'299 - "left out, since this server runs no tools: {left_out}"'} if left_out else {}

    def _max_tokens(self, room: int) -> int:
        return self._body.max_output_tokens or max(room, 1)

    def _read(self, response: dict[str, Any]) -> tuple[str, str, list[ToolCall]]:
        texts = dict(reasoning="", message="")
        calls = []
        for item in response["output"]:
            match item["type"]:
                case "function_call":
                    called = item.get("namespace"), item["name"]
                    names = (name for name, tool in self._namespaces.items() if tool == called)
                    calls.append((item["call_id"], next(names, item["name"]), item["arguments"]))
                case "custom_tool_call":
                    calls.append((item["call_id"], item["name"], json.dumps(dict(input=item["input"]))))
                case kind:
                    texts[kind] += "".join(part["text"] for part in item["content"])
        return texts["reasoning"], texts["message"], calls

    def _error_event(self, error: APIError) -> bytes:
        place = dict(param=error.param, sequence_number=self._num_events)
        return sse(dict(type="error", code=error.code, message=error.message) | place, "error")


class MessagesAnswer(SingleAnswer):
    """The answer to POST /v1/messages."""

    id_prefix = "msg_"
    body_type = MessagesBody
    request_type = recipe.MessagesRequest
    response_type = recipe.MessagesResponse
    _keep_alive = sse(dict(type="ping"), "ping")
    _body: MessagesBody
    # Fields that the protocol requires and deepseek-recipe leaves out.
    _block_fields: ClassVar[dict[str, Any]] = dict(text=dict(citations=None), tool_use=dict(caller=dict(type="direct")))
    _usage_fields: ClassVar[dict[str, Any]] = dict.fromkeys(
        ("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use")
    )
    _stop_fields: ClassVar[dict[str, Any]] = dict.fromkeys(("container", "stop_details"))

    def _make_generator(self, answer_id: str, model: str) -> Any:
        # Otherwise each answer would begin with a block of thinking, which may stay empty.
        return recipe.MessagesChunkGenerator(answer_id, model, thinking_mode=False)

    def _as_sent(self, part: dict[str, Any]) -> dict[str, Any]:
        for name in part.keys() & {"message", "content_block", "delta"}:
            part[name] = self._as_sent(part[name])
        if "content" in part:
            part["content"] = [self._as_sent(block) for block in part["content"]]
        if "usage" in part:
            part["usage"] = self._usage_fields | part["usage"]
        if "stop_reason" in part:
            part = self._stop_fields | part
            if part["stop_reason"] == "max_tokens" and self._limit < self._body.max_tokens:
                part["stop_reason"] = "model_context_window_exceeded"
        return self._block_fields.get(part.get("type", ""), {}) | part

    def _max_tokens(self, room: int) -> int:
        return min(self._body.max_tokens, max(room, 1))

    def _too_long(self, longest: int, limit: int, context: int) -> str:
        return f"prompt is too long: {longest} tokens > {context} maximum"  # clients look for these words

    def _read(self, response: dict[str, Any]) -> tuple[str, str, list[ToolCall]]:
        texts = dict(thinking="", text="")
        calls = []
        for block in response["content"]:
            if block["type"] == "tool_use":
                calls.append((block["id"], block["name"], json.dumps(block["input"])))
            else:
                texts[block["type"]] += block[block["type"]]
        return texts["thinking"], texts["text"], calls

    def _error_event(self, error: APIError) -> bytes:
        return sse(error.anthropic_body, "error")


class TokenCount(MessagesAnswer):
    """The answer to POST /v1/messages/count_tokens, for which nothing runs."""

    body_type = CountBody
    streams = False

    def _check_limit(self) -> int:
        return 0

    def _response(self) -> Response:
        return JSONResponse(dict(input_tokens=len(self._prompts[0])))
