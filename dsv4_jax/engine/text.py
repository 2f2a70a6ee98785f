"""Turns a request's tokens into text of whole characters that ends before a stop string."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.checkpoint import TextStream
from dsv4_jax.decode.step import Model
from dsv4_jax.engine.generate import stream
from dsv4_jax.host import KVCacheManager


def stream_text(
    model: Model,
    manager: KVCacheManager,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    """Generates text from text, and yields it in pieces of whole characters as it comes.

    Args:
      model, manager: as for `stream`.
      tokenizer: the model's tokenizer, from `read_tokenizer`.
      prompt: the text to continue.
      stop: strings before the first of which the text ends.
      options: further arguments of `stream`; `max_new_tokens` is required. Stop tokens are no part of the text.

    Yields:
      Pieces of the answer.

    Raises:
      TypeError, ValueError: as for `stream`.
    """
    ids = tokenizer.encode(prompt).ids
    text = AnswerText(tokenizer, ids, stop)
    for _, token in stream(model, manager, [ids], **options):
        if token in options.get("stop_tokens", ()):
            break
        yield text.add(token)
        if text.stopped:
            return
    yield text.finish()


class StopStrings:
    """Ends a text before its first stop string. The text comes in pieces; their sizes do not matter.

    Attributes:
      found: whether a stop string was found.
    """

    def __init__(self, stops: Sequence[str]):
        """Takes stop strings, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Returns the text that can be shown, and holds back a possible beginning of a stop string."""
        text = self._held + piece
        # The stop string that is complete first counts; of several, the longest.
        ends = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            return text[: min(ends)[1]]
        end = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Returns the text that was held back."""
        text = self._held
        self._held = ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class AnswerText:
    """The text of a request's tokens as they come.

    Attributes:
      stopped: whether a stop string was found, after which no text follows.
    """

    # Prompt tokens that can change the text of the first new tokens: more than the bytes of a character.
    _CONTEXT = 8

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int] | np.ndarray, stops: Sequence[str]):
        """Starts the text after `prompt` [n]. Without a tokenizer, the text is ids separated by spaces."""
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stops = StopStrings(stops)
        self._separator = ""
        if self._stream is not None:
            for token in prompt[-self._CONTEXT :]:
                self._stream.add(int(token))
        # An incomplete character at the prompt's end is the prompt's, unless a token completes it.
        self._prompt_rest = "" if self._stream is None else self._stream.finish()

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def add(self, token: int) -> str:
        """Adds a token and returns the text that can be shown."""
        if self._stream is not None:
            piece = self._stream.add(token)
            if piece:
                self._prompt_rest = ""
            return self._stops.add(piece)
        text = f"{self._separator}{token}"
        self._separator = " "
        return text

    def finish(self) -> str:
        """Returns the text that was held back, after the last token."""
        last_piece = "" if self._stream is None else self._stream.finish()
        text = self._stops.add(last_piece.removeprefix(self._prompt_rest))
        return text if self.stopped else text + self._stops.finish()


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text. Other threads go on meanwhile, unlike in `Tokenizer.encode`."""
    (encoding,) = tokenizer.encode_batch_fast([text])
    return encoding.ids


def token_offsets(tokenizer: Tokenizer | None, tokens: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """Returns (token, offset) of each token: the position where it, or text held back before it, begins."""
    stream = None if tokenizer is None else TextStream(tokenizer)
    offsets = []
    end = 0
    for token in map(int, tokens):
        offsets.append((token, end))
        end += len(f"{token} " if stream is None else stream.add(token))
    return offsets
