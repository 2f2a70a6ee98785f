"""Tells blocks of tool calls from text that only names their token."""

import re

import deepseek_recipe as recipe
from tokenizers import Tokenizer


CALL_TOKEN = "｜DSML｜"
# A block with a call goes on so behind its `<`. Its own tag may be missing.
_HEADS = (f'{CALL_TOKEN}tool_calls><{CALL_TOKEN}invoke name="', f'{CALL_TOKEN}invoke name="')
_MAX_HEAD = 64  # tokens, white space between the two tags included


class CallBlocks:
    """Passes an answer's tokens to deepseek-recipe's parser, and the token of calls only where a call begins.

    The parser drops all text from this token on until a call follows. Where none does, the token is passed as text. It
    waits until what follows decides.
    """

    stopped = False  # it looks for no stop strings

    def __init__(self, tokenizer: Tokenizer, *, has_calls: bool, has_begun: bool):
        """Says whether there are tools to call, and whether the prompt ends within a block of calls."""
        self._tokenizer = tokenizer
        self._token = tokenizer.token_to_id(CALL_TOKEN)
        self._heads = _HEADS if has_calls else ()
        self._has_begun = has_begun
        self._held: list[int] = []
        self._previous: list[int] = []

    def add(self, token: int) -> list[recipe.InferenceChunk]:
        """Returns what the parser gets after a token."""
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
        """Returns what was held back, after the last token."""
        chunks = []
        while self._held:
            chunks += self._release()
        return chunks

    def _release(self) -> list[recipe.InferenceChunk]:
        """Passes the first token that was held back as text. A block may begin behind it."""
        _, *tokens = self._held
        self._held = []
        self._previous = []
        chunks = [recipe.InferenceChunk.text(CALL_TOKEN, 1)]
        for token in tokens:
            chunks += self.add(token)
        return chunks
