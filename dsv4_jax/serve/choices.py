"""One text of an answer as it grows, and its tokens' log-probabilities in OpenAI's shapes."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.checkpoint import TokenBytes
from dsv4_jax.decode import TopLogprobs
from dsv4_jax.serve.async_engine import Update
from dsv4_jax.serve.text import AnswerText


# JSON has no infinity; the number that vLLM sends for tokens that cannot come.
_LEAST = -9999.0


class ScoredToken(NamedTuple):
    """A token of a text.

    Attributes:
      token: its id.
      logprob: its log-probability; None for the first one of a prompt.
      top: the likeliest tokens in its place and their log-probabilities, as many as were asked for.
      offset: where in the text it begins, or what was held back before it.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int


class Choice:
    """One text of an answer, as it grows.

    Attributes:
      index: its request in the `Generation`.
      scored: tokens of the text, first those of the prompt if their log-probabilities are shown.
      text: all that was shown.
      finish_reason: "stop" or "length" once it is complete.
      cached_tokens: tokens of its prompt that the prefix cache held.
    """

    def __init__(self, index: int, text: AnswerText, echo: str, prompt_offsets: Sequence[tuple[int, int]] = ()):
        """A choice whose text begins with `echo`, and whose tokens with `prompt_offsets`: ids, and where they begin."""
        self.index, self._answer, self._unshown, self._prompt = index, text, echo, prompt_offsets
        self.scored: list[ScoredToken] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.last_seconds = 0.0

    @property
    def generated(self) -> list[ScoredToken]:
        """Tokens of the request so far, up to the end of the text."""
        return self.scored[len(self._prompt) :]

    @property
    def num_generated(self) -> int:
        """How many these are."""
        return max(len(self.scored) - len(self._prompt), 0)

    def take(self, update: Update) -> tuple[str, list[ScoredToken]]:
        """Adds an update; returns the new text and tokens."""
        self.cached_tokens = update.cached_tokens
        new, self._unshown = self._unshown, ""
        first = len(self.scored)
        if not first:
            logprobs = [None, *update.prompt_logprobs]
            tops = [(), *_pairs(update.prompt_top, len(update.prompt_logprobs))]
            for (token, offset), logprob, top in zip(self._prompt, logprobs, tops, strict=False):
                self.scored.append(ScoredToken(token, logprob, top, offset))
        tops = _pairs(update.top, len(update.tokens))
        for i, (token, logprob, top) in enumerate(zip(update.tokens, update.logprobs, tops, strict=True)):
            self.scored.append(ScoredToken(token, logprob, top, len(self.text) + len(new)))
            # The token that ends a request is no part of its text.
            if update.finish_reason != "stop" or i + 1 < len(update.tokens):
                new += self._answer.add(token)
            if self._answer.stopped:
                break
        else:
            if update.finish_reason is not None:
                new += self._answer.finish()
        self.finish_reason = "stop" if self._answer.stopped else update.finish_reason
        self.text += new
        return new, self.scored[first:]


def _pairs(top: TopLogprobs | None, count: int) -> list[list[tuple[int, float]]]:
    """For each of `count` tokens the ids and log-probabilities of `top`."""
    if top is None:
        return [[] for _ in range(count)]
    logprobs = np.maximum(top.logprobs, _LEAST).tolist()
    return [list(zip(ids, row, strict=True)) for ids, row in zip(top.ids.tolist(), logprobs, strict=True)]


class TokenNames:
    """Tokens in the shapes of OpenAI's two kinds of log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Without a tokenizer a token is shown as its id."""
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer)
        self.name = functools.cache(self._name)

    def _name(self, token: int) -> tuple[str, list[int] | None]:
        """A token as text, and its bytes. A part of a character is shown as `bytes:\\xe2\\x82`, as OpenAI does."""
        content = str(token).encode() if self._bytes is None else self._bytes[token]
        if content is None:
            return "\ufffd", None
        try:
            return content.decode(), list(content)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), list(content)

    def of_completion(self, tokens: Sequence[ScoredToken], num_top: int) -> dict[str, Any]:
        """The `logprobs` of a completion. The token itself is always among its `top_logprobs`."""
        return dict(
            tokens=[self.name(t.token)[0] for t in tokens],
            token_logprobs=[t.logprob for t in tokens],
            top_logprobs=[self._by_name(t) for t in tokens] if num_top else None,
            text_offset=[t.offset for t in tokens],
        )

    def of_chat(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """The `logprobs` of a chat's answer."""
        content = [
            self._entry(t.token, t.logprob) | dict(top_logprobs=[self._entry(*pair) for pair in t.top]) for t in tokens
        ]
        return dict(content=content, refusal=None)

    def _by_name(self, scored):
        """{name: log-probability} of the likeliest tokens and the token itself, or None for the first of a prompt."""
        if scored.logprob is None:
            return None
        found: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            found.setdefault(self.name(token)[0], logprob)  # of tokens with the same text the likeliest
        return found

    def _entry(self, token, logprob):
        text, content = self.name(token)
        return dict(token=text, logprob=logprob, bytes=content)
