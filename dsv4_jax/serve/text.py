"""What a request's tokens become on their way to a client: text that is whole and ends before a stop string."""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from dsv4_jax.checkpoint import TextStream


class StopStrings:
    """Ends a text that comes in pieces before the first stop string; how it is cut into pieces makes no difference.

    Attributes:
      found: whether a stop string has come.
    """

    def __init__(self, stops: Sequence[str]):
        """Stop strings, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that can be shown now; holds back what may be the beginning of a stop string."""
        text = self._held + piece
        # The first to be complete counts, and of several the longest.
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class AnswerText:
    """The text of a request's tokens as they come.

    Attributes:
      stopped: whether a stop string has come: nothing follows.
    """

    # Bytes of a character, or more: what the tokens before them make of the first new tokens.
    _CONTEXT = 8

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int] | np.ndarray, stops: Sequence[str]):
        """Text that follows `prompt` [n]; without a tokenizer it is the ids, with spaces between them."""
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._stops = StopStrings(stops)
        self._separator = ""
        if self._stream is not None:
            for token in prompt[-self._CONTEXT :]:
                self._stream.add(int(token))

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def add(self, token: int) -> str:
        """The text that can be shown now."""
        if self._stream is not None:
            return self._stops.add(self._stream.add(token))
        text, self._separator = f"{self._separator}{token}", " "
        return text

    def finish(self) -> str:
        """What was held back when the last token has come."""
        text = "" if self._stream is None else self._stops.add(self._stream.finish())
        return text if self.stopped else text + self._stops.finish()


def token_offsets(tokenizer: Tokenizer | None, tokens: Sequence[int] | np.ndarray) -> list[tuple[int, int]]:
    """Each token of a text, and where in it the token begins, or what was held back before it."""
    stream, offsets, end = None if tokenizer is None else TextStream(tokenizer), [], 0
    for token in map(int, tokens):
        offsets.append((token, end))
        end += len(f"{token} " if stream is None else stream.add(token))
    return offsets
