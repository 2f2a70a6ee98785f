"""The texts of an answer, which grow token by token, and log-probabilities in OpenAI's formats."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.checkpoint import TokenBytes
from dsv4_jax.serve.async_engine import Update
from dsv4_jax.serve.protocol import JSONObject


# The likeliest tokens' log-probabilities are raised to at least this number, because JSON lacks -inf. vLLM sends the
# same number.
_MIN_LOGPROB = -9999.0


class ScoredToken(NamedTuple):
    """A token of a text, with log-probabilities.

    Attributes:
      token: id of the token.
      logprob: log-probability of the token; None for the first token of a prompt.
      top: (id, log-probability) pairs of the most likely tokens at this position.
      offset: number of characters of the text before the token, not counting text that is still held back.
    """

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]
    offset: int


class Choice:
    """One text of an answer, which grows as tokens come.

    Attributes:
      index: index of the request in the `Generation`.
      prompt: (id, offset in the text) pairs of the prompt's tokens if their log-probabilities are shown, else empty.
      scored: tokens of the text so far: those of `prompt`, then the generated ones.
      text: text so far that can be shown.
      new_text: end of `text` that came with the newest update.
      new_tokens: tokens of the newest update; the first update also has those of `prompt`.
      finish_reason: "stop" or "length" if the choice is complete, else None.
      cached_tokens: number of prompt tokens that were found in the prefix cache.
      last_seconds: time of the newest update by `time.monotonic`, set by the answer.
    """

    text = ""
    new_text = ""
    finish_reason: str | None = None
    cached_tokens = 0
    last_seconds = 0.0

    def __init__(self, index: int, source: Any, echo: str = "", prompt_offsets: Sequence[tuple[int, int]] = ()):
        """Makes a choice without new tokens.

        Args:
          index: index of the request in the `Generation`.
          source: object that turns tokens into text, such as an `AnswerText`.
          echo: text with which the choice begins.
          prompt_offsets: the attribute `prompt`.
        """
        self.index = index
        self._source = source
        self._unshown = echo
        self.prompt = prompt_offsets
        self.scored: list[ScoredToken] = []
        self.new_tokens: list[ScoredToken] = []

    @property
    def generated(self) -> list[ScoredToken]:
        """The generated tokens so far, including the one that ended the request."""
        return self.scored[len(self.prompt) :]

    @property
    def num_generated(self) -> int:
        """The number of generated tokens so far."""
        return max(len(self.scored) - len(self.prompt), 0)

    def take(self, update: Update) -> None:
        """Adds the tokens of an update."""
        request = update.request
        new_text = self._unshown
        self._unshown = ""
        num_earlier = len(self.scored)
        drawn = []
        if request is not None:
            self.cached_tokens = request.cached_tokens
            if self.prompt and not num_earlier:
                logprobs = [None, *request.prompt_logprobs]
                prompt_tops = [(), *_pairs(request.prompt_top_logprobs)]
                for (token, offset), logprob, top in zip(self.prompt, logprobs, prompt_tops, strict=True):
                    self.scored.append(ScoredToken(token, logprob, top, offset))
            # `tops` holds this update's tokens only. `zip` stops at its end, and so drops tokens that the engine's
            # thread has added since.
            begin = request.prompt_length + self.num_generated
            tops = _pairs(request.top_logprobs[self.num_generated : update.num_generated])
            drawn = list(zip(request.tokens_from(begin), request.logprobs_from(begin), tops, strict=False))
        for i, (token, logprob, top) in enumerate(drawn):
            self.scored.append(ScoredToken(token, logprob, top, len(self.text) + len(new_text)))
            # A token that ends the request is not part of the text.
            if update.finish_reason != "stop" or i + 1 < len(drawn):
                new_text += self._add(token)
            if self._is_stopped:
                break
        else:  # no stop string has ended the text
            if update.finish_reason is not None:
                new_text += self._finish()
        self.finish_reason = "stop" if self._is_stopped else update.finish_reason
        self.text += new_text
        self.new_text = new_text
        self.new_tokens = self.scored[num_earlier:]

    def _add(self, token):
        """Adds a token to the text. Returns the text that can be shown now."""
        return self._source.add(token)

    def _finish(self):
        """Returns the text that is still held back. It is called after the final token."""
        return self._source.finish()

    @property
    def _is_stopped(self):
        """Whether a stop string was found, which ends the text."""
        return self._source.stopped


def _pairs(top):
    """Returns a list of (id, log-probability) pairs for each position."""
    logprobs = np.maximum(top.logprobs, _MIN_LOGPROB).tolist()
    return [list(zip(ids, row, strict=True)) for ids, row in zip(top.ids.tolist(), logprobs, strict=True)]


class TokenNames:
    """Formats log-probabilities as OpenAI does, for completions and for chat completions."""

    def __init__(self, tokenizer: Tokenizer | None):
        """Makes the formatter. Without a tokenizer, it shows a token as its id."""
        self._bytes = None if tokenizer is None else TokenBytes(tokenizer)
        self.name = functools.cache(self._name)

    def _name(self, token):
        """Returns (text, bytes) of a token. As OpenAI does, shows a part of a character as `bytes:\\xe2\\x82`."""
        content = str(token).encode() if self._bytes is None else self._bytes[token]
        if content is None:
            return "\ufffd", None
        try:
            return content.decode(), list(content)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), list(content)

    def of_completion(self, tokens: Sequence[ScoredToken], num_top: int) -> JSONObject:
        """Returns the `logprobs` of a completion. `top_logprobs` always include the token itself."""
        return {
            "tokens": [self.name(t.token)[0] for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            "top_logprobs": [self._by_name(t) for t in tokens] if num_top else None,
            "text_offset": [t.offset for t in tokens],
        }

    def of_chat(self, tokens: Sequence[ScoredToken]) -> JSONObject:
        """Returns the `logprobs` of a chat completion."""
        content = [
            self._entry(t.token, t.logprob) | {"top_logprobs": [self._entry(*pair) for pair in t.top]} for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _by_name(self, scored):
        """Returns {text: log-probability} of the likeliest tokens and this token; None for a prompt's first token."""
        if scored.logprob is None:
            return None
        by_name = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            by_name.setdefault(self.name(token)[0], logprob)  # keeps the likeliest of tokens with the same text
        return by_name

    def _entry(self, token, logprob):
        text, content = self.name(token)
        return {"token": text, "logprob": logprob, "bytes": content}
