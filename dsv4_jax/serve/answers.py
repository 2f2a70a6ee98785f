"""Answers to HTTP requests: they turn a body into requests to the engine, and the tokens that come back into text."""

import asyncio
import itertools
import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import numpy as np
from starlette.responses import JSONResponse, StreamingResponse

from dsv4_jax.decode import SamplingParams
from dsv4_jax.engine import Candidate
from dsv4_jax.engine.grammar import Grammar
from dsv4_jax.engine.text import AnswerText, encode, token_offsets
from dsv4_jax.serve.async_engine import Generation, Update
from dsv4_jax.serve.choices import Choice
from dsv4_jax.serve.errors import APIError
from dsv4_jax.serve.protocol import CompletionBody, GenerationBody, JSONObject
from dsv4_jax.serve.service import Service


_log = logging.getLogger("dsv4_jax.serve")
# An answer may have at most this number of log-probabilities. Each takes some hundred bytes of memory until it is sent.
_MAX_LOGPROBS = 2**21
_KEEP_ALIVE_SECONDS = 10.0  # a stream sends something at least this often, because proxies close silent connections


class EventStream(StreamingResponse):
    """A response that sends an answer as server-sent events. It cancels the answer if the client disconnects."""

    def __init__(self, answer: "Answer"):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(answer.events(), headers=headers, media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._answer.cancel()


class Answer:
    """The answer to one HTTP request, the base class of answers in all protocols.

    It encodes the prompts of the body, submits `n` requests to the engine for each prompt, and collects their texts.
    """

    body_type: ClassVar[type[GenerationBody]]
    id_prefix: ClassVar[str]
    _generation: Generation | None = None
    _grammar: Grammar | None = None
    _keep_alive = b": keep-alive\n\n"  # a comment in a stream of events, which clients skip
    # The message for a prompt that does not fit into the context together with the new tokens.
    _too_long = "a prompt of {} tokens and {} new ones are more than the context of {} tokens"

    def __init__(self, service: Service, body: Any, start: float):
        """Encodes the prompts of a body. Call it outside of the event loop's thread, because it can take long.

        Args:
          service: state that all requests share.
          body: the parsed body of the request, a `body_type`.
          start: time when the request came, by `time.monotonic`.

        Raises:
          APIError: the prompts are too long, or need a feature that the server lacks.
        """
        self._service = service
        self._body = body
        self._start = start

        self._samples = getattr(body, "best_of", None) or body.n
        if body.stop and service.tokenizer is None:
            raise APIError("the checkpoint has no tokenizer.json: use stop_token_ids", param="stop")

        self._top_p = body.top_p
        self._check(body.stop_token_ids or [0], "stop_token_ids")
        self._prompts = [self._check(ids, "prompt") for ids in self._encode()]
        self._limit = self._check_limit()
        self._id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._scores_prompts = getattr(body, "echo", False) and body.num_top is not None
        num_requests = len(self._prompts) * self._samples
        self._check_size(num_requests)
        self.choices: list[Any] = [self._new_choice(i, self._prompts[i // self._samples]) for i in range(num_requests)]

    def _encode(self) -> Sequence[Sequence[int]]:
        """Returns the token ids of each prompt."""
        raise NotImplementedError

    def _max_tokens(self, room: int) -> int:
        """Returns the maximum number of new tokens of a request. `room` is how many the context has room for, or 1."""
        raise NotImplementedError

    def _new_choice(self, index: int, prompt: np.ndarray) -> Choice:
        """Returns an empty choice, which collects the text of request number `index`, an answer to `prompt`."""
        raise NotImplementedError

    def _events(self, choice: Any) -> list[bytes]:
        """Returns the server-sent events for the new text and new tokens of a choice."""
        raise NotImplementedError

    def _last_events(self):
        """Returns the server-sent events that follow when all choices are complete."""
        return []

    def _error_event(self, error):
        """Returns the server-sent event of an error."""
        return sse(error.body)

    def _response(self) -> JSONObject:
        """Returns the complete answer."""
        raise NotImplementedError

    @property
    def headers(self) -> dict[str, str]:
        """Additional headers of the response."""
        return {}

    def submit(self) -> None:
        """Submits the requests to the engine. Raises APIError if the queue is full."""
        body = self._body
        service = self._service
        if not self._limit and not self._scores_prompts:
            return  # the answer has no tokens
        ends = () if body.ignore_eos else service.options.end_tokens
        self._generation = service.engine.submit(
            self._prompts,
            n=self._samples,
            max_new_tokens=max(self._limit, 1),
            sampling=SamplingParams(body.temperature, body.top_k, self._top_p),
            seed=secrets.randbits(32) if body.seed is None else body.seed,
            stop_tokens=(*ends, *body.stop_token_ids),
            top_logprobs=body.num_top or 0,
            prompt_logprobs=self._scores_prompts,
            grammar=self._grammar,
            cache_salt=body.cache_salt,
            adapter=body.model if body.model in service.options.adapters else None,
        )

    def cancel(self) -> None:
        """Cancels the requests that still run."""
        if self._generation is not None and any(choice.finish_reason is None for choice in self.choices):
            self._generation.cancel()

    async def complete(self) -> JSONResponse:
        """Waits for the whole answer and returns it."""
        async for _ in self._updates():
            pass
        return await asyncio.to_thread(lambda: JSONResponse(self._response()))

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events."""
        try:
            async for choice in self._updates():
                if choice is None:
                    yield self._keep_alive
                    continue
                for event in await _run_off_loop(len(choice.new_tokens), self._events, choice):
                    yield event
            for event in self._last_events():
                yield event
        except APIError as error:
            yield self._error_event(error)

    async def _updates(self):
        """Yields each choice that has taken an update, until all choices are complete.

        Yields None if no update came for `_KEEP_ALIVE_SECONDS`. Raises APIError if a request fails or
        the time limit is reached.
        """
        if self._generation is None:
            for choice in self.choices:
                choice.take(Update(choice.index, finish_reason="length"))
                yield choice
            return
        limit = self._service.options.request_seconds
        metrics = self._service.metrics
        while any(choice.finish_reason is None for choice in self.choices):
            seconds_left = self._start + limit - time.monotonic()
            if seconds_left <= 0:
                raise APIError(f"the answer was not complete after {limit:g} seconds", 504, code="timeout")
            update = await self._generation.next_update(min(_KEEP_ALIVE_SECONDS, seconds_left))
            if update is None:
                yield None
                continue
            choice = self.choices[update.index]
            if choice.finish_reason is not None:  # a stop string has ended the text before this update
                continue
            if update.finish_reason in ("error", "cancelled"):
                raise _as_api_error(update.error)
            if not self._limit:  # the request ran only to score its prompt
                update = update._replace(num_generated=0, finish_reason="length")
            now = time.monotonic()
            num_new = update.num_generated - choice.num_generated
            if choice.num_generated:
                for _ in range(num_new):
                    metrics.token_seconds.observe((now - choice.last_seconds) / num_new)
            elif num_new:
                metrics.first_token_seconds.observe(now - self._start)
            choice.last_seconds = now
            await _run_off_loop(0 if choice.scored else len(choice.prompt), choice.take, update)
            if choice.finish_reason is not None and update.finish_reason is None:  # a stop string ended the text
                self._generation.cancel(choice.index)
            yield choice

    def _check(self, ids, name):
        try:
            return self._service.manager.check_ids(ids, name)
        except (ValueError, TypeError, OverflowError) as error:
            raise APIError(str(error), param=name) from None

    def _check_size(self, count):
        """Raises APIError if samples would be equal, or the answer needs too many requests or log-probabilities.

        `count` is the number of requests.
        """
        engine = self._service.engine
        name = "best_of" if getattr(self._body, "best_of", None) else "n"
        if self._samples > 1 and self._body.temperature == 0:
            message = f"{name}={self._samples}: answers with temperature 0 would all be the same"
            raise APIError(message, param=name)
        if count > engine.capacity:
            message = f"{len(self._prompts)} prompts with {name}={self._samples} make {count} requests"
            message += f", the server takes {engine.capacity} at once"
            raise APIError(message, param="prompt" if self._samples == 1 else name)
        if self._body.num_top is None:
            return
        limit = engine.engine.config.max_logprobs
        if (needed := max(self._body.num_top, self._scores_prompts)) > limit:
            raise APIError(f"this takes an engine with max_logprobs={needed}, it has {limit}", param="logprobs")
        shown = sum(self._limit + len(prompt) * self._scores_prompts for prompt in self._prompts)
        if (total := shown * self._samples * (1 + self._body.num_top)) > _MAX_LOGPROBS:
            message = f"the answer may have {total} log-probabilities, the most is {_MAX_LOGPROBS}"
            raise APIError(f"{message}: ask for fewer tokens", param="logprobs")

    def _check_limit(self):
        """Returns the maximum number of new tokens of each request. Raises APIError if there is no room for them."""
        manager = self._service.manager
        longest = max(map(len, self._prompts))
        context = min(manager.schema.max_context, manager.capacity)
        # A request can have one token more than the cache stores, because the last token is sampled but never runs.
        room = context + 1 - longest
        limit = self._max_tokens(max(room, 1))
        if limit > room or longest > context:
            message = self._too_long.format(longest, limit, context)
            raise APIError(message, param="max_tokens", code="context_length_exceeded")
        return limit


class OpenAIAnswer(Answer):
    """The base class of answers in the format that completions and chat completions share."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def _json(self, choice: Any) -> JSONObject:
        """Returns the JSON of a choice in a complete answer, without its index."""
        raise NotImplementedError

    def _chunks(self, choice: Any) -> list[JSONObject]:
        """Returns the JSON of a choice in each new event of a stream, without its index."""
        raise NotImplementedError

    def _response(self):
        shown = []
        for answers in itertools.batched(self.choices, self._samples):
            if self._samples > self._body.n:
                answers = sorted(answers, key=_score, reverse=True)[: self._body.n]
            shown += answers
        choices = [self._json(choice) | {"index": i} for i, choice in enumerate(shown)]
        return self._object(self.kind, choices) | {"usage": self._usage()}

    def _events(self, choice):
        return [self._event([chunk | {"index": choice.index}], None) for chunk in self._chunks(choice)]

    def _last_events(self):
        usage = [self._event([], self._usage())] if self._body.stream_options.include_usage else []
        return [*usage, b"data: [DONE]\n\n"]

    def _event(self, choices, usage):
        shown_usage = {"usage": usage} if self._body.stream_options.include_usage else {}
        return sse(self._object(self.chunk_kind, choices) | shown_usage)

    def _object(self, kind, choices):
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._body.model,
            "choices": choices,
        }

    def _usage(self):
        prompt_tokens = sum(map(len, self._prompts))
        completion_tokens = sum(choice.num_generated for choice in self.choices)
        # Only the first sample of each prompt counts. Later samples find the prompt's tokens that the first one cached.
        cached_tokens = sum(choice.cached_tokens for choice in self.choices[:: self._samples])
        return {
            "prompt_tokens": prompt_tokens,  # including the cached ones
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class CompletionAnswer(OpenAIAnswer):
    """The answer to POST /v1/completions."""

    id_prefix = "cmpl-"
    kind = "text_completion"
    chunk_kind = "text_completion"
    body_type = CompletionBody

    def _encode(self):
        return [self._ids(prompt) for prompt in self._body.prompt]

    def _ids(self, prompt):
        if not isinstance(prompt, str):
            return prompt
        if self._service.tokenizer is None:
            raise APIError("the checkpoint has no tokenizer.json: give the prompt as token ids", param="prompt")
        return encode(self._service.tokenizer, prompt)

    def _max_tokens(self, room):
        return self._body.max_tokens

    def _new_choice(self, index, prompt):
        tokenizer = self._service.tokenizer
        offsets = token_offsets(tokenizer, prompt) if self._scores_prompts else []
        echo = self._body.prompt[index // self._samples] if self._body.echo else ""
        if not isinstance(echo, str):
            echo = " ".join(map(str, echo)) + " " if tokenizer is None else tokenizer.decode(echo)
        return Choice(index, AnswerText(tokenizer, prompt, self._body.stop), echo, offsets)

    def _json(self, choice):
        return self._part(choice.text, choice.scored, choice.finish_reason)

    def _chunks(self, choice):
        is_shown = choice.new_text or choice.finish_reason or self._body.num_top is not None
        return [self._part(choice.new_text, choice.new_tokens, choice.finish_reason)] if is_shown else []

    def _part(self, text, tokens, finish_reason):
        num_top = self._body.num_top
        logprobs = None if num_top is None else self._service.names.of_completion(tokens, num_top)
        return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _score(choice):
    """Returns the score by which `best_of` selects choices, as in `engine.search.n_best`; 0 without new tokens."""
    tokens = choice.generated
    return Candidate([t.token for t in tokens], sum(t.logprob or 0.0 for t in tokens)).score() if tokens else 0.0


async def _run_off_loop(tokens, function, *args):
    """Calls a function that handles `tokens` tokens, outside the event loop's thread if these are more than 100."""
    return await asyncio.to_thread(function, *args) if tokens > 100 else function(*args)


def sse(content: JSONObject, name: str | None = None) -> bytes:
    """Returns a server-sent event with JSON as its content; `name` is the event's name."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"{'' if name is None else f'event: {name}\n'}data: {text}\n\n".encode()


def _as_api_error(error):
    """Returns the error to send to the client for a failed request to the engine, and logs the cause."""
    if isinstance(error, APIError):
        return error
    if error is None:
        return APIError("the server has stopped", 503, code="unavailable")
    _log.error("a request failed", exc_info=error)
    if isinstance(error, ValueError | TypeError):
        return APIError(str(error))
    return APIError("the step that ran this request failed; the server's log says more", 500)
