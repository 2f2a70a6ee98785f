"""One text of an answer as it grows, and log-probabilities in OpenAI's formats."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.checkpoint import TokenBytes
from dsv4_jax.decode import TopLogprobs
from dsv4_jax.serve.async_engine import Update


# JSON has no infinity; vLLM sends this number for impossible tokens.
_MIN_LOGPROB = -9999.0


class ScoredToken(NamedTuple):
    """A token of a text, with log-probabilities.

    Attributes:
      token: id of the token.
      logprob: log-probability of the token; None for the first token of a prompt.
      top: (id, log-probability) of the likeliest tokens in its place.
      offset: number of characters of the text before the token. Text of earlier tokens that is still held back does not
        count.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int


class Choice:
    """One text of an answer, as it grows.

    Attributes:
      index: index of the request in the `Generation`.
      prompt: (id, offset) of the prompt's tokens, if their log-probabilities are shown.
      scored: tokens of the text, preceded by the prompt's tokens if their log-probabilities are shown.
      text: the text that was shown so far.
      finish_reason: "stop" or "length" once the choice is complete.
      cached_tokens: number of prompt tokens that the prefix cache held.
    """

    def __init__(self, index: int, source: Any, echo: str = "", prompt_offsets: Sequence[tuple[int, int]] = ()):
        """Starts a choice with the text `echo` and with the prompt's tokens, given as (id, offset).

        `source` turns tokens into text, such as an `AnswerText`.
        """
        self.index = index
        self._source = source
        self._unshown = echo
        self.prompt = prompt_offsets
        self.scored: list[ScoredToken] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.last_seconds = 0.0

    @property
    def generated(self) -> list[ScoredToken]:
        """The new tokens so far: all that were drawn, one that ended the request included."""
        return self.scored[len(self.prompt) :]

    @property
    def num_generated(self) -> int:
        """The number of new tokens so far."""
        return max(len(self.scored) - len(self.prompt), 0)

    def take(self, update: Update) -> tuple[str, list[ScoredToken]]:
        """Adds an update, and returns the new text and tokens."""
        request = update.request
        new = self._unshown
        self._unshown = ""
        num_earlier = len(self.scored)
        drawn = []
        if request is not None:
            self.cached_tokens = request.cached_tokens
            if self.prompt and not num_earlier:
                logprobs = [None, *request.prompt_logprobs]
                tops = [(), *_pairs(request.prompt_top_logprobs)]
                for (token, offset), logprob, top in zip(self.prompt, logprobs, tops, strict=True):
                    self.scored.append(ScoredToken(token, logprob, top, offset))
            # The request may have more tokens by now.
            count = update.num_generated - self.num_generated
            begin = request.prompt_length + self.num_generated
            tokens = request.tokens_from(begin)[:count]
            tops = _pairs(request.top_logprobs[self.num_generated : update.num_generated])
            drawn = list(zip(tokens, request.logprobs_from(begin)[:count], tops, strict=True))
        for i, (token, logprob, top) in enumerate(drawn):
            self.scored.append(ScoredToken(token, logprob, top, len(self.text) + len(new)))
            # The token that ends a request is no part of its text.
            if update.finish_reason != "stop" or i + 1 < len(drawn):
                new += self._add(token)
            if self._is_stopped:
                break
        else:
            if update.finish_reason is not None:
                new += self._finish()
        self.finish_reason = "stop" if self._is_stopped else update.finish_reason
        self.text += new
        return new, self.scored[num_earlier:]

    def _add(self, token: int) -> str:
        """Adds a token and returns the text that can be shown."""
        return self._source.add(token)

    def _finish(self) -> str:
        """Returns the text that was held back, after the last token."""
        return self._source.finish()

    @property
    def _is_stopped(self) -> bool:
        """Whether a stop string was found, after which no text follows."""
        return self._source.stopped


def _pairs(top: TopLogprobs) -> list[list[tuple[int, float]]]:
    """Returns the (id, log-probability) pairs of each token."""
    logprobs = np.maximum(top.logprobs, _MIN_LOGPROB).tolist()
    return [list(zip(ids, row, strict=True)) for ids, row in zip(top.ids.tolist(), logprobs, strict=True)]


class TokenNames:
    """Formats tokens for OpenAI's two kinds of log-probabilities."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Without a tokenizer, a token is shown as its id."""
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer)
        self.name = functools.cache(self._name)

    def _name(self, token: int) -> tuple[str, list[int] | None]:
        """Returns a token as text and its bytes. A part of a character is shown as `bytes:\\xe2\\x82`, as by OpenAI."""
        content = str(token).encode() if self._bytes is None else self._bytes[token]
        if content is None:
            return "\ufffd", None
        try:
            return content.decode(), list(content)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), list(content)

    def of_completion(self, tokens: Sequence[ScoredToken], num_top: int) -> dict[str, Any]:
        """Returns the `logprobs` of a completion. `top_logprobs` always include the token itself."""
        return {
            "tokens": [self.name(t.token)[0] for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [self._by_name(t) for t in tokens] if num_top else None,
            "text_offset": [t.offset for t in tokens],
        }

    def of_chat(self, tokens: Sequence[ScoredToken]) -> dict[str, Any]:
        """Returns the `logprobs` of a chat completion."""
        content = [
            self._entry(t.token, t.logprob) | {"top_logprobs": [self._entry(*pair) for pair in t.top]} for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _by_name(self, scored):
        """Returns {name: log-probability} of the likeliest tokens and this one; None for a prompt's first token."""
        if scored.logprob is None:
            return None
        by_name: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            by_name.setdefault(self.name(token)[0], logprob)  # keeps the likeliest of tokens with the same text
        return by_name

    def _entry(self, token, logprob):
        text, content = self.name(token)
        return {"token": text, "logprob": logprob, "bytes": content}
