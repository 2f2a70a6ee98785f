"""Grammars for structured output, by the package llguidance: a JSON schema, a regular expression or a Lark grammar."""

import dataclasses
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


_LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class Vocabulary:
    """A model's tokens in the form that llguidance needs to compile grammars.

    Attributes:
      size: number of tokens in the model's vocabulary.
      end_tokens: ids of the tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, size: int, end_tokens: Sequence[int]):
        """Reads a tokenizer, which takes about a second for 129,280 tokens.

        The text in a grammar never matches an added token of the tokenizer, such as an end token. A grammar refers to
        the added token with id i as `<[i]>`.

        Args:
          tokenizer: a tokenizer of bytes: BPE with a `ByteLevel` or `ByteFallback` decoder.
          size: number of tokens in the model's vocabulary, at least that of the tokenizer. Ids that the tokenizer lacks
            are never drawn under a grammar.
          end_tokens: ids of the tokens that end an answer, at least one.

        Raises:
          ValueError: the tokenizer is of another kind, or there is no end token.
        """
        if not end_tokens:
            raise ValueError("end_tokens is empty: an answer that follows a grammar ends with one of them")
        self.size = size
        self.end_tokens = tuple(end_tokens)
        # Added tokens get other names, since the text that a grammar prescribes may contain their real names.
        names = {token.content: f"\U000f0000{id}" for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._tokenizer = llguidance.LLTokenizer(with_names(tokenizer, names), n_vocab=size, eos_token=list(end_tokens))

    def compile(self, lark: str) -> "Grammar":
        """Compiles a grammar in llguidance's dialect of Lark; raises ValueError if it is invalid or too large."""
        return Grammar(self, lark)

    def json_schema(self, schema: dict[str, Any]) -> "Grammar":
        """Compiles a JSON schema; raises ValueError if it is invalid, too large, or has keywords llguidance lacks."""
        return self.compile(f"start: {json_rule(schema)}")


class Grammar:
    """A compiled grammar. Immutable, so that many requests can share it.

    Attributes:
      vocabulary: the Vocabulary that it was compiled for.
    """

    def __init__(self, vocabulary: Vocabulary, lark: str):
        """See `Vocabulary.compile`."""
        self.vocabulary = vocabulary
        text = llguidance.LLMatcher.grammar_from_lark(lark)
        self._matcher = llguidance.LLMatcher(vocabulary._tokenizer, text, log_level=0, limits=_LIMITS)
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error().partition("\n<state>")[0])

    def start(self) -> "GrammarMatcher":
        """Returns a matcher that has read no token."""
        return GrammarMatcher(self._matcher.deep_copy())


@dataclasses.dataclass(eq=False)
class GrammarMatcher:
    """The state of a grammar after the tokens that a request has drawn. `token_masks` finds the allowed next tokens.

    `Grammar.start` makes it.

    Attributes:
      num_tokens: number of tokens that the matcher has read.
    """

    _matcher: llguidance.LLMatcher
    num_tokens: int = 0

    def copy(self) -> "GrammarMatcher":
        """Returns an independent matcher in the same state."""
        return GrammarMatcher(self._matcher.deep_copy(), self.num_tokens)

    def reset(self) -> None:
        """Forgets all tokens."""
        self._matcher.reset()
        self.num_tokens = 0

    def read(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens. If the grammar does not allow one of them, `error` says so from then on."""
        self._matcher.consume_tokens(list(tokens))
        self.num_tokens += len(tokens)

    @property
    def error(self) -> str:
        """The reason why the matcher cannot go on, such as a token that is not allowed; empty if it can."""
        return self._matcher.get_error().partition("\n")[0] if self._matcher.is_error() else ""


def token_masks(
    rows: Sequence[tuple[GrammarMatcher, int, Sequence[int]]], num_rows: int, vocab_size: int
) -> np.ndarray:
    """Finds the tokens that grammars allow in each row of a step's logits.

    The first row of a matcher follows the tokens that the matcher has read. The next rows each follow one more draft.
    Several threads handle the matchers with drafts, and the other matchers if there are at least four cores.

    Args:
      rows: (matcher, index of its first row, its draft tokens) for each matcher.
      num_rows: number of rows of the logits. A row allows all tokens if it belongs to no matcher, or follows a draft
        that the grammar does not allow.
      vocab_size: number of tokens in the vocabulary.

    Returns:
      [num_rows, ceil(vocab_size / 32)] uint32, the `token_mask` of `decode.sampling.sample`.
    """
    masks = allocate_token_bitmask(num_rows, vocab_size)
    with_drafts = [(matcher._matcher, row, list(drafts)) for matcher, row, drafts in rows if drafts]
    if with_drafts:
        fill_next_token_bitmask_par_with_draft_tokens(_executor(), with_drafts, masks)
    without_drafts = [(matcher._matcher, row) for matcher, row, drafts in rows if not drafts]
    # Threads need cores of their own: on two cores, which also run the model, 26 matchers took 2 to 3 ms with threads
    # and 0.5 ms one by one.
    if len(without_drafts) > 1 and (os.cpu_count() or 1) >= 4:
        fill_next_token_bitmask_par(_executor(), without_drafts, masks)
    else:
        for matcher, row in without_drafts:
            fill_next_token_bitmask(matcher, masks, row)
    return masks.view(np.uint32)


def with_names(tokenizer: Tokenizer, names: Mapping[str, str]) -> str:
    """Returns the JSON of a tokenizer in which some added tokens are renamed and made special.

    Args:
      tokenizer: the tokenizer; not changed.
      names: {name of an added token: its new name}.
    """
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
    """Returns the right side of a Lark rule for JSON text that follows a schema.

    The JSON text has at most 32 consecutive white-space characters.

    Args:
      schema: the JSON schema; True = any JSON.
      is_lenient: whether keywords that llguidance does not support are ignored. If not, they make the rule invalid.
    """
    schema = {} if schema is True else schema
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": {"whitespace_pattern": r"[ \t\n\r]{0,32}", "lenient": is_lenient}}
    return f"%json {json.dumps(schema)}"


def json_fault(schema: Any, is_lenient: bool = False) -> str:
    """Returns the reason why `json_rule` with these arguments is invalid; an empty string if it is valid."""
    lark = llguidance.LLMatcher.grammar_from_lark(f"start: {json_rule(schema, is_lenient)}")
    fault = llguidance.LLMatcher.validate_grammar(lark, limits=_LIMITS)
    return " ".join(fault.partition("\n   1 | ")[0].rpartition("JSON schema: ")[2].split())


@functools.cache
def _executor():
    return llguidance.LLExecutor()
