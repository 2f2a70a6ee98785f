"""Grammars that a request's tokens follow, by llguidance: JSON of a schema, a regular expression, any Lark grammar."""

import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import (
    allocate_token_bitmask,
    fill_next_token_bitmask,
    fill_next_token_bitmask_par,
    fill_next_token_bitmask_par_with_draft_tokens,
)
from tokenizers import Tokenizer


class Vocabulary:
    """The tokens of a model, as grammars see them.

    Attributes:
      size: number of tokens of the model.
      end_tokens: ids that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, end_tokens: Sequence[int]):
        """Reads a tokenizer, which takes about a second for 129,280 tokens.

        Args:
          tokenizer: a tokenizer of bytes: BPE with a `ByteLevel` or `ByteFallback` decoder.
          size: number of tokens of the model, at least the tokenizer's. Tokens beyond the tokenizer's are never drawn.
          end_tokens: ids that end an answer, at least one.

        No text of a grammar matches one of the tokenizer's added tokens. It refers to the one with id i as `<[i]>`.

        Raises:
          ValueError: the tokenizer is of another kind, or there is no end token.
        """
        if not end_tokens:
            raise ValueError("end_tokens is empty: an answer that follows a grammar ends with one of them")
        self.size = size
        self.end_tokens = tuple(end_tokens)
        # By other names, since text that a grammar prescribes may contain theirs.
        names = {token.content: f"\U000f0000{id}" for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._tokenizer = llguidance.LLTokenizer(with_names(tokenizer, names), n_vocab=size, eos_token=list(end_tokens))

    def compile(self, lark: str) -> "Grammar":
        """Compiles a grammar in llguidance's form of Lark; raises ValueError if it is wrong or too large."""
        return Grammar(self, lark)

    def json_schema(self, schema: dict[str, Any]) -> "Grammar":
        """Compiles a JSON schema; raises ValueError if it is wrong, too large, or uses what llguidance lacks."""
        return self.compile(f"start: {json_rule(schema)}")


class Grammar:
    """A compiled grammar. Immutable, so that many requests can share it.

    Attributes:
      vocabulary: its tokens.
    """

    def __init__(self, vocabulary: Vocabulary, lark: str):
        """See `Vocabulary.compile`."""
        self.vocabulary = vocabulary
        text = llguidance.LLMatcher.grammar_from_lark(lark)
        self._matcher = llguidance.LLMatcher(vocabulary._tokenizer, text, log_level=0, limits=_limits())
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error().partition("\n<state>")[0])

    def start(self) -> "GrammarMatcher":
        """Returns a matcher that has read nothing."""
        return GrammarMatcher(self._matcher.deep_copy())


class GrammarMatcher:
    """Finds the tokens that may follow on those that a request has drawn.

    Attributes:
      num_tokens: number of tokens that it has read.
    """

    def __init__(self, matcher: llguidance.LLMatcher, num_tokens: int = 0):
        """Made by `Grammar.start`."""
        self._matcher = matcher
        self.num_tokens = num_tokens

    def copy(self) -> "GrammarMatcher":
        """Returns a matcher that goes on from here on its own."""
        return GrammarMatcher(self._matcher.deep_copy(), self.num_tokens)

    def reset(self) -> None:
        """Forgets all tokens."""
        self._matcher.reset()
        self.num_tokens = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens. One that the grammar does not allow is an error from then on, see `error`."""
        self._matcher.consume_tokens(list(tokens))
        self.num_tokens += len(tokens)

    @property
    def error(self) -> str:
        """Why it can go on no more, as after a token that the grammar does not allow; empty if it can."""
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else ""


def token_masks(
    rows: Sequence[tuple[GrammarMatcher, int, Sequence[int]]], num_rows: int, vocab_size: int
) -> np.ndarray:
    """Finds the tokens that may be drawn, with several threads if there are four cores.

    Args:
      rows: for each matcher its first row, and the drafts whose next tokens have the rows behind it.
      num_rows: number of rows. Rows of no matcher, and those behind a draft that is not allowed, allow all tokens.
      vocab_size: number of tokens.

    Returns:
      [num_rows, ceil(vocab_size / 32)] uint32, the `token_mask` of `decode.sampling.sample`.
    """
    masks = allocate_token_bitmask(num_rows, vocab_size)
    with_drafts = [(matcher._matcher, row, list(drafts)) for matcher, row, drafts in rows if drafts]
    if with_drafts:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), with_drafts, masks)
    without_drafts = [(matcher._matcher, row) for matcher, row, drafts in rows if not drafts]
    # On two cores that a model keeps busy too, threads took 2 to 3 ms for 26 matchers, and one by one 0.5.
    if len(without_drafts) > 1 and (os.cpu_count() or 1) >= 4:
        fill_next_token_bitmask_par(_executor(), without_drafts, masks)
    else:
        for matcher, row in without_drafts:
            fill_next_token_bitmask(matcher, masks, row)
    return masks.view(np.uint32)


def with_names(tokenizer: Tokenizer, names: Mapping[str, str]) -> str:
    """Returns the JSON of a tokenizer some of whose added tokens have other names, and are special."""
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        if token["content"] in names:
            token["special"] = True
            token["content"] = names[token["content"]]
    vocab = content["model"]["vocab"]
    if isinstance(vocab, dict):
        content["model"]["vocab"] = {names.get(name, name): id for name, id in vocab.items()}
    return json.dumps(content)


def json_rule(schema: Any, is_lenient: bool = False) -> str:
    """Returns a rule of a Lark grammar for JSON of a schema. At most 32 white-space characters stand side by side.

    A lenient rule leaves out the keywords that llguidance lacks, and one that is not is an error then.
    """
    schema = {} if schema is True else schema
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": {"whitespace_pattern": r"[ \t\n\r]{0,32}", "lenient": is_lenient}}
    return f"%json {json.dumps(schema)}"


def json_fault(schema: Any, is_lenient: bool = False) -> str:
    """Returns why the rule of a schema is an error; empty if it is none."""
    lark = llguidance.LLMatcher.grammar_from_lark(f"start: {json_rule(schema, is_lenient)}")
    fault = llguidance.LLMatcher.validate_grammar(lark, limits=_limits())
    return " ".join(fault.partition("\n   1 | ")[0].rpartition("JSON schema: ")[2].split())


@functools.cache
def _executor() -> llguidance.LLExecutor:
    return llguidance.LLExecutor()


def _limits() -> llguidance.LLParserLimits:
    return llguidance.LLParserLimits(verbose_errors=False)
