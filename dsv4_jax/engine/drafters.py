"""Drafters on the host, which guess a request's next tokens, and the rule by which drafts are accepted."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Drafter(Protocol):
    """Guesses how a request continues. A wrong guess costs time but never changes a token.

    Any object with a method `draft` is a drafter. The engine calls one drafter for many requests in turn, so guesses
    should depend only on the arguments.
    """

    def draft(self, tokens: np.ndarray, count: int) -> Sequence[int]:
        """Guesses the next tokens of a request.

        Args:
          tokens: [n] int32, the request's prompt and all tokens that it has generated.
          count: maximum number of tokens to guess, at least 1.

        Returns:
          0 to `count` token ids.
        """


class PromptLookup:
    """A drafter that looks up the request's newest tokens in its earlier tokens (n-gram lookup).

    It guesses the tokens that followed the latest earlier occurrence of the newest tokens, and needs no model. Guesses
    are good for text that repeats its prompt, such as edited code, quotations or tool output, and useless for other
    text.

    Attributes:
      longest, shortest: maximum and minimum number of newest tokens to look for. The longest n-gram that occurs earlier
        is used.
    """

    def __init__(self, longest: int = 3, shortest: int = 1):
        """Makes a drafter; raises ValueError unless `1 <= shortest <= longest`. See the class for the arguments."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"{shortest=} and {longest=} must be 1 <= shortest <= longest")
        self.longest = longest
        self.shortest = shortest

    def draft(self, tokens: np.ndarray, count: int) -> list[int]:
        """Returns the tokens that followed the latest earlier occurrence of the newest tokens; see `Drafter`."""
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            # `starts` holds the positions where an earlier occurrence may begin. Each token of the n-gram filters them.
            starts = np.arange(len(tokens) - size)
            for offset in range(size):
                starts = starts[tokens[starts + offset] == tokens[len(tokens) - size + offset]]
            if starts.size:
                after = starts[-1] + size
                return tokens[after : after + count].tolist()
        return []


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Returns the tokens that a step with k drafts yields: the accepted drafts and the token drawn after them.

    A draft is accepted if it and all earlier drafts equal the drawn tokens. The result is the same as without drafts,
    because each token is drawn after the same tokens with the same random bits. A draft is accepted with the model's
    probability of this token, as in rejection sampling from a drafter that is always certain (Leviathan et al., 2023,
    arXiv:2211.17192).

    Args:
      drafts: [k] draft tokens.
      drawn: [k + 1] drawn tokens; `drawn[i]` is drawn from the model's distribution after the known tokens and
        `drafts[:i]`.

    Returns:
      The first 1 to k + 1 tokens of `drawn`.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == drawn[accepted]:
        accepted += 1
    return list(drawn[: accepted + 1])
