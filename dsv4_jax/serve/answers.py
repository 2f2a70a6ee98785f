"""Answers to completions and chat completions: turns a body into requests, and their tokens into text."""

import asyncio
import dataclasses
import itertools
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from dsv4_jax.decode.sampling import SamplingParams
from dsv4_jax.engine import Candidate
from dsv4_jax.engine.text import AnswerText, token_offsets
from dsv4_jax.serve.async_engine import Generation, QueueFullError, Update
from dsv4_jax.serve.choices import Choice, ScoredToken
from dsv4_jax.serve.errors import APIError
from dsv4_jax.serve.protocol import ChatBody, CompletionBody, GenerationBody, usage
from dsv4_jax.serve.service import Service


_log = logging.getLogger("dsv4_jax.serve")
# Maximum of an answer, which keeps some hundred bytes for each until it is sent.
_MAX_LOGPROBS = 2**21


class EventStream(StreamingResponse):
    """Server-sent events of an answer. Cancels its requests if the client disconnects."""

    def __init__(self, answer: "Answer"):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.events(), headers=headers, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.cancel()


class Answer:
    """The answer to one HTTP request: its prompts, its requests to the engine, and their texts."""

    body_type: ClassVar[type[GenerationBody]]
    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, service: Service, body: Any, start: float):
        """Encodes the prompts of a body that came at `start` by `time.monotonic`. Takes too long for the event loop.

        Raises APIError if the prompts are too long, or need a feature that the server lacks.
        """
        self._service, self._body, self._start = service, body, start
        self._generation: Generation | None = None
        self._samples = body.num_samples
        if body.stop and service.tokenizer is None:
            raise APIError(400, "the checkpoint has no tokenizer.json: use stop_token_ids", param="stop")
        self._stops = list(body.stop)
        self._check(body.stop_token_ids or [0], "stop_token_ids")
        self._prompts = [self._check(ids, "prompt") for ids in self._encode()]
        self._limit = self._check_limit()
        self._scores_prompts = getattr(body, "echo", False) and body.num_top is not None
        self._check_size()
        self.choices = []
        for i, prompt in enumerate(self._prompts):
            offsets = token_offsets(service.tokenizer, prompt) if self._scores_prompts else []
            for index in range(i * self._samples, (i + 1) * self._samples):
                text = AnswerText(service.tokenizer, prompt, self._stops)
                self.choices.append(Choice(index, text, self._echo(i), offsets))
        created, model = int(time.time()), service.options.model_name
        self._head = dict(id=f"{self.id_prefix}-{uuid.uuid4().hex}", created=created, model=model)

    def _encode(self) -> Sequence[Sequence[int]]:
        """Returns the token ids of each prompt."""
        raise NotImplementedError

    def _max_tokens(self, room: int) -> int:
        """Returns the maximum number of new tokens, given room for `room` tokens."""
        raise NotImplementedError

    def _echo(self, prompt: int) -> str:
        """Returns the text with which the answers to a prompt begin."""
        return ""

    def _choice(self, index: int, text: str, tokens: Sequence[ScoredToken], choice: Choice) -> dict[str, Any]:
        """Returns a choice of a complete answer as JSON."""
        raise NotImplementedError

    def _chunk(self, text: str, tokens: Sequence[ScoredToken], choice: Choice) -> dict[str, Any]:
        """Returns a choice of an event as JSON, with its new text and tokens."""
        return self._choice(choice.index, text, tokens, choice)

    def _openings(self) -> list[dict[str, Any]]:
        """Returns the choices of events before the first token."""
        return []

    def submit(self) -> None:
        """Submits the requests to the engine; raises APIError if the queue is full."""
        body, service = self._body, self._service
        if not self._limit and not self._scores_prompts:
            return
        try:
            ends = () if body.ignore_eos else service.options.end_tokens
            self._generation = service.engine.submit(
                self._prompts,
                n=self._samples,
                max_new_tokens=max(self._limit, 1),
                sampling=SamplingParams(body.temperature, max(body.top_k, 0), body.top_p),
                seed=secrets.randbits(32) if body.seed is None else body.seed,
                stop_tokens=(*ends, *body.stop_token_ids),
                top_logprobs=body.num_top or 0,
                prompt_logprobs=self._scores_prompts,
            )
        except QueueFullError as error:
            raise APIError(429, str(error), code="queue_full", headers={"Retry-After": "1"}) from None
        except (ValueError, TypeError) as error:
            raise APIError(400, str(error)) from None

    def cancel(self) -> None:
        """Cancels the requests that still run."""
        if self._generation is not None and any(choice.finish_reason is None for choice in self.choices):
            self._generation.cancel()

    async def complete(self) -> Response:
        """Waits for the whole answer and returns it."""
        async for _ in self._updates():
            pass
        return await asyncio.to_thread(self._response)

    def _response(self):
        shown = []
        for answers in itertools.batched(self.choices, self._samples):
            if self._samples > self._body.n:
                answers = sorted(answers, key=_score, reverse=True)[: self._body.n]
            shown += answers
        choices = [self._choice(i, choice.text, choice.scored, choice) for i, choice in enumerate(shown)]
        return JSONResponse(dict(object=self.kind) | self._head | dict(choices=choices, usage=self._usage()))

    def stream(self) -> Response:
        """Returns the answer as a stream of events."""
        return EventStream(self)

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events."""
        with_usage = self._body.stream_options.include_usage
        head = dict(object=self.chunk_kind) | self._head | (dict(usage=None) if with_usage else {})
        try:
            for choice in self._openings():
                yield _event(head | dict(choices=[choice]))
            async for choice, text, tokens in self._updates():
                if text or choice.finish_reason or self._body.num_top is not None:
                    yield await run_off_loop(len(tokens), self._chunk_event, head, text, tokens, choice)
            if with_usage:
                yield _event(head | dict(choices=[], usage=self._usage()))
        except APIError as error:
            yield _event(error.body)
            return
        yield b"data: [DONE]\n\n"

    def _chunk_event(self, head, text, tokens, choice):
        return _event(head | dict(choices=[self._chunk(text, tokens, choice)]))

    async def _updates(self) -> AsyncIterator[tuple[Choice, str, list[ScoredToken]]]:
        """Yields (choice, new text, new tokens) until all choices are complete."""
        if self._generation is None:  # max_tokens=0
            for choice in self.choices:
                yield choice, *choice.take(Update(choice.index, finish_reason="length"))
            return
        deadline = self._start + self._service.options.request_seconds
        metrics = self._service.metrics
        while any(choice.finish_reason is None for choice in self.choices):
            try:
                update = await asyncio.wait_for(self._generation.next_update(), deadline - time.monotonic())
            except TimeoutError:
                seconds = f"{self._service.options.request_seconds:g} seconds"
                raise APIError(504, f"the answer was not complete after {seconds}", code="timeout") from None
            choice = self.choices[update.index]
            if choice.finish_reason is not None:
                continue
            if update.finish_reason in ("error", "cancelled"):
                raise _as_api_error(update.error)
            if not self._limit:  # the request ran for its prompt only
                update = dataclasses.replace(update, tokens=(), logprobs=(), top=None, finish_reason="length")
            now = time.monotonic()
            if choice.num_generated:
                for _ in update.tokens:
                    metrics.token_seconds.observe((now - choice.last_seconds) / len(update.tokens))
            elif update.tokens:
                metrics.first_token_seconds.observe(now - self._start)
            choice.last_seconds = now
            text, tokens = await run_off_loop(len(update.prompt_logprobs), choice.take, update)
            if choice.finish_reason is not None and update.finish_reason is None:
                self._generation.cancel(choice.index)
            yield choice, text, tokens

    def _usage(self) -> dict[str, Any]:
        generated = sum(choice.num_generated for choice in self.choices)
        # Only the first sample of a prompt counts: it read the prompt that the others find in the cache.
        cached = sum(choice.cached_tokens for choice in self.choices[:: self._samples])
        return usage(sum(map(len, self._prompts)), generated, cached)

    def _check(self, ids: Sequence[int], name: str) -> np.ndarray:
        try:
            return self._service.engine.engine.manager.check_ids(ids, name)
        except (ValueError, TypeError, OverflowError) as error:
            raise APIError(400, str(error), param=name) from None

    def _check_size(self) -> None:
        """Raises APIError if the answer is more than the server makes or keeps at once."""
        engine, count = self._service.engine, len(self._prompts) * self._samples
        if self._samples > 1 and self._body.temperature == 0:
            raise APIError(400, f"{self._samples} answers with temperature 0 would all be the same", param="n")
        if count > engine.capacity:
            message = f"{count} answers are more than the {engine.capacity} that the server takes at once"
            raise APIError(400, message, param="n")
        if self._body.num_top is None:
            return
        most = engine.engine.config.max_logprobs
        if (need := max(self._body.num_top, self._scores_prompts)) > most:
            raise APIError(400, f"this takes an engine with max_logprobs={need}, it has {most}", param="logprobs")
        shown = sum(self._limit + len(prompt) * self._scores_prompts for prompt in self._prompts)
        if (total := shown * self._samples * (1 + self._body.num_top)) > _MAX_LOGPROBS:
            message = f"the answer may have {total} log-probabilities, the most is {_MAX_LOGPROBS}"
            raise APIError(400, f"{message}: ask for fewer tokens", param="logprobs")

    def _check_limit(self) -> int:
        """Returns the maximum number of new tokens of each request."""
        manager, longest = self._service.engine.engine.manager, max(map(len, self._prompts))
        context = min(manager.schema.max_context, manager.requests.capacity)
        # The last token is sampled, but never stored.
        room = context + 1 - longest
        limit = self._max_tokens(room)
        if limit > room or longest > context:
            message = f"a prompt of {longest} tokens and {limit} new ones are more than the context of {context} tokens"
            raise APIError(400, message, param="max_tokens", code="context_length_exceeded")
        return limit


class CompletionAnswer(Answer):
    """The answer to POST /v1/completions."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    body_type = CompletionBody
    _body: CompletionBody

    def _encode(self) -> Sequence[Sequence[int]]:
        return [self._ids(prompt) for prompt in self._body.prompts]

    def _ids(self, prompt: str | list[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self._service.tokenizer is None:
            raise APIError(400, "the checkpoint has no tokenizer.json: give the prompt as token ids", param="prompt")
        return self._service.tokenizer.encode(prompt).ids

    def _max_tokens(self, room: int) -> int:
        return self._body.max_tokens

    def _echo(self, prompt: int) -> str:
        if not self._body.echo:
            return ""
        content, tokenizer = self._body.prompts[prompt], self._service.tokenizer
        if isinstance(content, str):
            return content
        return " ".join(map(str, content)) + " " if tokenizer is None else tokenizer.decode(content)

    def _choice(self, index: int, text: str, tokens: Sequence[ScoredToken], choice: Choice) -> dict[str, Any]:
        num_top = self._body.num_top
        logprobs = None if num_top is None else self._service.names.of_completion(tokens, num_top)
        return dict(index=index, text=text, logprobs=logprobs, finish_reason=choice.finish_reason)


class ChatAnswer(Answer):
    """The answer to POST /v1/chat/completions."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"
    body_type = ChatBody
    _body: ChatBody

    def _encode(self) -> Sequence[Sequence[int]]:
        if self._service.chat is None:
            raise APIError(400, "the checkpoint has no tokenizer.json: use /v1/completions with token ids")
        self._stops += self._service.chat.stops
        return [self._service.chat.encode(self._body.messages)]

    def _max_tokens(self, room: int) -> int:
        asked = self._body.max_completion_tokens or self._body.max_tokens
        return max(room, 1) if asked is None else asked

    def _choice(self, index: int, text: str, tokens: Sequence[ScoredToken], choice: Choice) -> dict[str, Any]:
        message = dict(role="assistant", content=text, refusal=None)
        return dict(index=index, message=message) | self._rest(tokens, choice)

    def _chunk(self, text: str, tokens: Sequence[ScoredToken], choice: Choice) -> dict[str, Any]:
        return dict(index=choice.index, delta=dict(content=text) if text else {}) | self._rest(tokens, choice)

    def _openings(self) -> list[dict[str, Any]]:
        delta = dict(role="assistant", content="")
        return [dict(index=choice.index, delta=delta, logprobs=None, finish_reason=None) for choice in self.choices]

    def _rest(self, tokens: Sequence[ScoredToken], choice: Choice) -> dict[str, Any]:
        logprobs = None if self._body.num_top is None else self._service.names.of_chat(tokens)
        return dict(logprobs=logprobs, finish_reason=choice.finish_reason)


def _score(choice: Choice) -> float:
    """Returns the score by which the best choices are found, like `n_best`."""
    tokens = choice.generated
    return Candidate([t.token for t in tokens], sum(t.logprob or 0.0 for t in tokens)).score()


async def run_off_loop[**P, T](tokens: int, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Calls a function, in another thread if it has so many tokens that it would block the event loop."""
    return await asyncio.to_thread(function, *args, **options) if tokens > 100 else function(*args, **options)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _as_api_error(error: Exception | None) -> APIError:
    """Returns the error that a client sees for a failed request, and logs the cause."""
    if isinstance(error, APIError):
        return error
    if error is None:
        return APIError(503, "the server has stopped", code="unavailable")
    _log.error("a request failed", exc_info=error)
    if isinstance(error, ValueError | TypeError):
        return APIError(400, str(error))
    return APIError(500, "the step that ran this request failed; the server's log says more")
