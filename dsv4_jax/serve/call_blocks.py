"""Distinguishes blocks of tool calls in an answer from text that only mentions the token of calls."""

import re
from typing import NamedTuple

import deepseek_recipe as recipe
from tokenizers import Tokenizer


CALL_TOKEN = "｜DSML｜"
_MAX_HEAD = 64  # maximum number of tokens of a head (`CallTags.heads`), including white space between its two tags


class CallTags(NamedTuple):
    """The tags around tool calls, as a release writes them.

    Attributes:
      gap: text between `CALL_TOKEN` and the name of a tag.
      block: name of the tag around the calls of an answer.
    """

    gap: str
    block: str

    @property
    def start(self) -> str:
        """The tag that begins a block, without the first character `<`."""
        return f"{CALL_TOKEN}{self.gap}{self.block}>"

    @property
    def heads(self) -> tuple[str, str]:
        """The two texts that can follow the first `<` of a block: the tags of block and call, or only a call's tag."""
        invoke = f'{CALL_TOKEN}{self.gap}invoke name="'
        return f"{self.start}<{invoke}", invoke


V4_TAGS = CallTags(gap="", block="tool_calls")
V41_TAGS = CallTags(gap=" ", block="calls")


class CallBlocks:
    """Turns an answer's tokens into chunks for deepseek-recipe's parser, with `CALL_TOKEN` only where a call begins.

    At `CALL_TOKEN`, the parser drops all text until a call follows. If no call begins there, `CALL_TOKEN` is therefore
    passed as text. `CALL_TOKEN` and the tokens after it are held back until they show whether a call begins.
    """

    stopped = False  # as in `AnswerText`; this class does not look for stop strings

    def __init__(self, tokenizer: Tokenizer, *, tags: CallTags, has_calls: bool, has_begun: bool):
        """Makes the state for an answer.

        Args:
          tokenizer: the tokenizer.
          tags: how the model writes the tags of calls.
          has_calls: whether the answer can have tool calls.
          has_begun: whether the prompt ends within a block of calls.
        """
        self._tokenizer = tokenizer
        self._token = tokenizer.token_to_id(CALL_TOKEN)
        self._heads = tags.heads if has_calls else ()
        self._has_begun = has_begun
        self._held: list[int] = []
        self._previous: list[int] = []

    def add(self, token: int) -> list[recipe.InferenceChunk]:
        """Adds a token; returns the chunks to pass to the parser, none while tokens are held back."""
        if self._has_begun or not (self._held or token == self._token):
            self._previous = [token]
            return [recipe.InferenceChunk.tokens([token])]
        if not self._held and not self._tokenizer.decode(self._previous).endswith("<"):
            return [recipe.InferenceChunk.text(CALL_TOKEN, 1)]
        self._held.append(token)
        text = re.sub(r">\s+(?=<|$)", ">", self._tokenizer.decode(self._held, skip_special_tokens=False))
        if text.startswith(self._heads):
            begin = self._held
            self._held = []
            self._has_begun = True
            return [recipe.InferenceChunk.tokens(begin)]
        if len(self._held) < _MAX_HEAD and any(head.startswith(text) for head in self._heads):
            return []
        return self._release()

    def finish(self) -> list[recipe.InferenceChunk]:
        """Returns the chunks of tokens that are still held back. Call it after the answer's final token."""
        chunks = []
        while self._held:
            chunks += self._release()
        return chunks

    def _release(self):
        """Returns the first held token as text. Adds the other held tokens again, because a block may begin there."""
        _, *tokens = self._held
        self._held = []
        self._previous = []
        chunks = [recipe.InferenceChunk.text(CALL_TOKEN, 1)]
        for token in tokens:
            chunks += self.add(token)
        return chunks
