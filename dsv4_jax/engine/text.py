"""Turns a request's tokens into text, in pieces of whole characters, and ends the text before a stop string."""

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from dsv4_jax.checkpoint import TextStream
from dsv4_jax.decode import Model
from dsv4_jax.engine.generate import stream
from dsv4_jax.host import KVCacheManager, TokenIds


def stream_text(
    model: Model,
    manager: KVCacheManager,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    """Generates the continuation of a text, and yields it in pieces of whole characters as soon as they are known.

    Args:
      model, manager: as for `stream`.
      tokenizer: the model's tokenizer, from `read_tokenizer`.
      prompt: the text to continue.
      stop: stop strings. The answer ends before the first occurrence of one of them.
      options: further arguments of `stream`; `max_new_tokens` is required. The answer does not contain stop tokens.

    Yields:
      Pieces of the answer's text; some may be empty.

    Raises:
      TypeError, ValueError: as for `stream`.
    """
    ids = tokenizer.encode(prompt).ids
    answer = AnswerText(tokenizer, ids, stop)
    for _, token in stream(model, manager, [ids], **options):
        if token in options.get("stop_tokens", ()):
            break
        yield answer.add(token)
        if answer.stopped:
            return
    yield answer.finish()


class StopStrings:
    """Ends a text, which comes in pieces of any size, before its first stop string.

    Attributes:
      found: whether a stop string was found.
    """

    found = False
    _held = ""

    def __init__(self, stops: Sequence[str]):
        """Begins an empty text.

        Args:
          stops: the stop strings.

        Raises:
          TypeError: `stops` is a single text.
          ValueError: a stop string is empty.
        """
        if isinstance(stops, str):
            raise TypeError(f"stop={stops!r} must be a sequence of texts, such as [{stops!r}]")
        self._stops = tuple(stops)
        if "" in self._stops:
            raise ValueError(f"stop={stops!r} has an empty text, which would end every answer at once")

    def add(self, piece: str) -> str:
        """Adds a piece, and returns the text that can be shown.

        An end of the text that may be the beginning of a stop string is held back.
        """
        text = self._held + piece
        # The stop string that ends first counts. If several end at the same place, the longest counts.
        ends = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if ends:
            self.found = True
            self._held = ""
            _, begin = min(ends)
            return text[:begin]
        sizes = ((size, stop) for stop in self._stops for size in range(1, min(len(text) + 1, len(stop))))
        end = len(text) - max((size for size, stop in sizes if text.endswith(stop[:size])), default=0)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """Returns the text that was held back, because no stop string follows."""
        text = self._held
        self._held = ""
        return text


class AnswerText:
    """Decodes a request's new tokens to text, one token at a time, up to a stop string.

    Attributes:
      stopped: whether a stop string was found, after which no text follows.
    """

    # The number of final prompt tokens that are decoded with the new tokens, since a character may begin in the prompt.
    # 8 suffice: a character has at most 4 bytes and so at most 4 tokens.
    _CONTEXT = 8
    _separator = ""
    _prompt_rest = ""

    def __init__(self, tokenizer: Tokenizer | None, prompt: TokenIds, stops: Sequence[str]):
        """Begins the text after a prompt.

        Args:
          tokenizer: the model's tokenizer. None: the text is token ids separated by spaces, without stop strings.
          prompt: [n] token ids.
          stops: stop strings, none of them empty.
        """
        self._stops = StopStrings(stops)
        self._stream = None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer)
            for token in prompt[-self._CONTEXT :]:
                self._stream.add(int(token))
            # An incomplete character at the prompt's end belongs to the answer only if a new token completes it.
            self._prompt_rest = self._stream.finish()

    @property
    def stopped(self) -> bool:
        return self._stops.found

    def add(self, token: int) -> str:
        """Adds a token, and returns the text that can be shown after it, which may be empty."""
        piece = f"{self._separator}{token}" if self._stream is None else self._stream.add(token)
        self._separator = " "
        if piece:
            self._prompt_rest = ""
        return self._stops.add(piece)

    def finish(self) -> str:
        """Returns the text that was held back: an incomplete character, or a possible beginning of a stop string."""
        last_piece = "" if self._stream is None else self._stream.finish()
        text = self._stops.add(last_piece.removeprefix(self._prompt_rest))
        return text if self.stopped else text + self._stops.finish()


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the token ids of a text. Releases the GIL meanwhile, unlike `Tokenizer.encode`."""
    (encoding,) = tokenizer.encode_batch_fast([text])
    return encoding.ids


def token_offsets(tokenizer: Tokenizer | None, tokens: TokenIds) -> list[tuple[int, int]]:
    """Returns (token, offset) for each token, as `AnswerText` decodes them without a prompt.

    The offset is the number of characters of the text that earlier tokens completed. A token that only continues an
    incomplete character has the offset of this character.
    """
    stream = None if tokenizer is None else TextStream(tokenizer)
    offsets = []
    end = 0
    for token in map(int, tokens):
        offsets.append((token, end))
        end += len(f"{token} " if stream is None else stream.add(token))
    return offsets
