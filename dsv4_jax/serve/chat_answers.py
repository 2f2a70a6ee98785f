"""Answers to conversations. Their tokens are parsed by deepseek-recipe into reasoning, text and tool calls."""

import itertools
import json
from collections.abc import Callable
from typing import Any, ClassVar

import deepseek_recipe as recipe

from dsv4_jax.engine.text import AnswerText
from dsv4_jax.serve.answers import Answer, OpenAIAnswer, sse
from dsv4_jax.serve.call_blocks import CallBlocks
from dsv4_jax.serve.chat import Chat, Converted
from dsv4_jax.serve.choices import Choice
from dsv4_jax.serve.constraints import compile_form
from dsv4_jax.serve.errors import APIError
from dsv4_jax.serve.protocol import ChatBody, CountBody, JSONObject, MessagesBody, ResponsesBody


class ParsedChoice(Choice):
    """A choice whose tokens deepseek-recipe parses into events of a protocol, and into the complete answer."""

    def __init__(
        self,
        index: int,
        source: AnswerText | CallBlocks,
        processor: recipe.StreamProcessor,
        response: Any,
        *,
        keeps_events: bool,
        remember: Callable[[JSONObject, list[int]], None],
    ):
        """Makes an empty choice.

        Args:
          index: index of the request in the `Generation`.
          source: object that turns tokens into the parser's input, text or chunks.
          processor: the parser.
          response: empty answer of the protocol, which accumulates the events.
          keeps_events: whether to keep events for `take_events`, as a stream needs.
          remember: function of the answer as JSON and its token ids, without the token that ended it. It is called if
            the model ended the answer, but not if a limit or a stop string did.
        """
        super().__init__(index, source)
        self._processor = processor
        self._answer = response
        self._keeps_events = keeps_events
        self._remember = remember
        self._events: list[tuple[str | None, JSONObject]] = []

    @property
    def response(self) -> JSONObject:
        """The answer so far, as JSON."""
        return json.loads(self._answer.to_json())

    def take(self, update):
        request = update.request
        if not self.scored and request is not None:
            usage = recipe.PromptUsage(
                prompt_tokens=request.prompt_length, prompt_cache_hit_tokens=request.cached_tokens
            )
            self._push([recipe.InferenceChunk.ready(prompt_usage=usage)])
        super().take(update)
        if self.finish_reason is not None:
            is_whole = update.finish_reason == "stop" and not self._is_stopped
            reasons = recipe.InferenceFinishReason
            reason = reasons.Length if self.finish_reason == "length" else reasons.Stop
            self._push([recipe.InferenceChunk.finish(reason)])
            if is_whole:
                self._remember(self.response, [scored.token for scored in self.generated[:-1]])

    def take_events(self) -> list[tuple[str | None, JSONObject]]:
        """Returns (name, JSON) of each event since the preceding call; the name is None in protocols without names."""
        events = self._events
        self._events = []
        return events

    def _add(self, token):
        return self._push(self._source.add(token), 1)

    def _finish(self):
        return self._push(self._source.finish())

    @property
    def _is_stopped(self):
        return self._processor.finished or self._source.stopped

    def _push(self, new, num_tokens=0):
        """Passes text or chunks to the parser. Returns "" instead of new text, because the events hold the text."""
        for chunk in [recipe.InferenceChunk.text(new, num_tokens)] if isinstance(new, str) else new:
            if self._processor.finished:
                break
            for event in self._processor.push(chunk):
                if self._keeps_events:
                    self._events.append((self._answer.sse_event_name(event), json.loads(event.to_json())))
                self._answer.accumulate(event)
        return ""


class ParsedAnswer(Answer):
    """The base class of answers to conversations. The package deepseek-recipe makes their JSON and their events."""

    request_type: ClassVar[Any]
    response_type: ClassVar[Any]
    _chat: Chat
    _asked: JSONObject  # the part of the body that deepseek-recipe converts
    _converted: Converted

    def _sent_back(self, response: JSONObject) -> JSONObject:
        """Returns the fields of a later request's body in which a client sends this answer back.

        Each tool call of the answer gets an empty result, because a conversation that lacks a call's result is refused.

        Args:
          response: the complete answer, as JSON of the protocol.
        """
        raise NotImplementedError

    def _as_sent(self, part):
        """Completes an event or an answer of deepseek-recipe to the form that clients of the protocol expect."""
        return part

    def _make_generator(self):
        """Returns deepseek-recipe's generator of the protocol's events."""
        return self.request_type.chunk_generator(self._converted.request, self._id, self._body.model)

    def _encode(self):
        """Returns the prompt, converted and encoded from the body. Sets the answer's grammar and sampling defaults."""
        if self._service.chat is None:
            raise APIError("the checkpoint has no tokenizer.json: use /v1/completions with token ids")
        self._chat = self._service.chat
        self._asked, strict_tools = self._body.conversation()
        self._converted = self._chat.convert(self.request_type, self._asked)
        effort = self._body.effort
        if effort is not None and not self._chat.takes_numbers:
            field = self._body.effort_field
            message = f"{field}: {effort} is for DeepSeek-V4.1, this model takes none, low, high, xhigh or max"
            raise APIError(message, param=field.partition(".")[0])
        default_top_p = self._converted.request.inference_options.top_p
        if "top_p" not in self._body.model_fields_set and default_top_p is not None:
            self._top_p = round(default_top_p, 6)  # the release's, since the client gives none
        prompt = self._chat.encode(self._converted.conversation, effort)
        try:
            self._grammar = compile_form(
                self._converted.conversation,
                prompt,
                self._chat.ids,
                strict_tools,
                self._service.compile,
                self._chat.call_tags,
            )
        except ValueError as error:
            raise APIError(f"the form of the answer cannot be enforced: {error}") from None
        if self._grammar is not None and self._body.ignore_eos:
            raise APIError("ignore_eos: an answer of a given form ends with it", param="ignore_eos")
        return [prompt]

    def _new_choice(self, index, prompt):
        processor, blocks = self._chat.parser(self._converted, self._make_generator())
        stops = [*self._chat.stops, *self._converted.parsing.stop_sequences]
        return ParsedChoice(
            index,
            blocks or AnswerText(self._service.tokenizer, prompt, stops),
            processor,
            self.response_type(self._id, self._body.model, self._created, len(prompt), 0),
            keeps_events=self._body.stream,
            remember=self._remember,
        )

    def _remember(self, response, tokens):
        """Stores a complete answer, so that a later prompt that contains the answer has the same tokens.

        A client sends an answer back as JSON, which is converted to a message. The answer is stored as this message.

        Args:
          response: the answer, as JSON of the protocol.
          tokens: token ids of the answer, without the token that ended it.
        """
        try:
            repeated = self._chat.convert(self.request_type, self._asked | self._sent_back(response))
        except APIError:  # no later request can repeat it
            return
        message = next(m for m in repeated.conversation.messages if m.role == "assistant")
        self._chat.remember(self._prompts[0].tolist(), message, tokens)

    def _events(self, choice):
        return [sse(self._as_sent(event), name) for name, event in choice.take_events()]

    def _response(self):
        return self._as_sent(self.choices[0].response)


class ChatAnswer(OpenAIAnswer, ParsedAnswer):
    """The answer to POST /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    body_type = ChatBody
    request_type = recipe.ChatCompletionRequest
    response_type = recipe.ChatCompletionResponse

    def _max_tokens(self, room):
        return self._body.max_completion_tokens or self._body.max_tokens or room

    def _json(self, choice):
        content = choice.response["choices"][0]
        message = {"refusal": None, "annotations": []} | content["message"]
        return content | {"message": message, "logprobs": self._logprobs(choice.scored)}

    def _usage(self):
        details = [choice.response["usage"].get("completion_tokens_details", {}) for choice in self.choices]
        reasoning_tokens = sum(detail.get("reasoning_tokens", 0) for detail in details)
        return super()._usage() | {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}

    def _chunks(self, choice):
        chunks = [event["choices"][0] for _, event in choice.take_events()]
        if self._body.num_top is not None:
            chunks = chunks or [{"delta": {}, "finish_reason": None}]
            chunks[0]["logprobs"] = self._logprobs(choice.new_tokens)
        return chunks

    def _logprobs(self, tokens):
        return None if self._body.num_top is None else self._service.names.of_chat(tokens)

    def _sent_back(self, response):
        message = response["choices"][0]["message"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": ""} for call in message.get("tool_calls") or []
        ]
        return {"messages": [message, *results]}


class ResponsesAnswer(ParsedAnswer):
    """The answer to POST /v1/responses."""

    id_prefix = "resp_"
    body_type = ResponsesBody
    request_type = recipe.ResponsesRequest
    response_type = recipe.ResponsesResponse
    _num_events = 0

    def _make_generator(self):
        body = self._body.asked()
        body["text"] = {"verbosity": "medium"} | body.get("text", {})
        request = recipe.ResponsesRequest(body)
        generator = super()._make_generator().with_echo(request.echo())
        return generator.with_namespace_tool_map(request.namespace_tool_map(self._chat.options))

    @property
    def headers(self):
        some = itertools.islice(self._body.left_out.items(), 8)
        left_out = ", ".join(f"tools[{i}] ({ascii(kind[:40])})" for i, kind in some)
        return {"Warning": f'299 - "left out, since this server runs no tools: {left_out}"'} if left_out else {}

    def _max_tokens(self, room):
        return self._body.max_output_tokens or room

    def _as_sent(self, part):
        self._num_events += 1
        response = part.get("response", part)
        if self._body.effort is not None and "reasoning" in response:
            response["reasoning"]["effort"] = self._body.effort
        if usage := response.get("usage"):
            usage["output_tokens"] = self.choices[0].num_generated
            usage["total_tokens"] = usage["input_tokens"] + usage["output_tokens"]
        return part

    def _sent_back(self, response):
        items = response["output"]
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": ""}
            for item in items
            if "call_id" in item
        ]
        return {"input": [*items, *results]}

    def _error_event(self, error):
        event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return sse(event | {"sequence_number": self._num_events}, "error")


class MessagesAnswer(ParsedAnswer):
    """The answer to POST /v1/messages."""

    id_prefix = "msg_"
    body_type = MessagesBody
    request_type = recipe.MessagesRequest
    response_type = recipe.MessagesResponse
    _keep_alive = sse({"type": "ping"}, "ping")
    _too_long = "prompt is too long: {0} tokens > {2} maximum"  # clients recognize the error by these words
    # Fields that the protocol requires and deepseek-recipe leaves out, with their values.
    _block_fields = {"text": {"citations": None}, "tool_use": {"caller": {"type": "direct"}}}
    _usage_fields = dict.fromkeys(("cache_creation", "inference_geo", "output_tokens_details", "server_tool_use"))
    _stop_fields = dict.fromkeys(("container", "stop_details"))

    def _make_generator(self):
        # `thinking_mode=True` would begin each answer with a block of thinking, even an empty one.
        return recipe.MessagesChunkGenerator(self._id, self._body.model, thinking_mode=False)

    def _as_sent(self, part):
        for name in part.keys() & {"message", "content_block", "delta"}:
            part[name] = self._as_sent(part[name])
        if "content" in part:
            part["content"] = [self._as_sent(block) for block in part["content"]]
        if "usage" in part:
            part["usage"] = self._usage_fields | part["usage"] | {"output_tokens": self.choices[0].num_generated}
        if "stop_reason" in part:
            part = self._stop_fields | part
            if part["stop_reason"] == "max_tokens" and self._limit < self._body.max_tokens:
                part["stop_reason"] = "model_context_window_exceeded"
        return self._block_fields.get(part.get("type", ""), {}) | part

    def _max_tokens(self, room):
        return min(self._body.max_tokens, room)

    def _sent_back(self, response):
        blocks = response["content"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"]} for block in blocks if block["type"] == "tool_use"
        ]
        return {"messages": [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]}

    def _error_event(self, error):
        return sse(error.anthropic_body, "error")


class TokenCount(MessagesAnswer):
    """The answer to POST /v1/messages/count_tokens. It counts the tokens of the prompt, and submits no request."""

    body_type = CountBody

    def _check_limit(self):
        return 0

    def _response(self):
        return {"input_tokens": len(self._prompts[0])}
