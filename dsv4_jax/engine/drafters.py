"""Draft tokens: their sources, and the rule that accepts them."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Drafter(Protocol):
    """Guesses how a request continues. A wrong guess costs time but never changes a token.

    Any object with a method `draft` is a drafter. The engine calls it for many requests in turn, so guesses should
    depend on the arguments only.
    """

    def draft(self, tokens: np.ndarray, count: int) -> Sequence[int]:
        """Guesses the tokens that follow.

        Args:
          tokens: [n] int32, the request's prompt and all tokens it has generated.
          count: the most tokens to guess; at least 1.

        Returns:
          0 to `count` token ids.
        """
        ...


class PromptLookup:
    """Guesses that the last tokens continue as they did at their latest earlier occurrence (n-gram lookup).

    It needs no model. Guesses are good for text that repeats its prompt, such as edited code, quotations or tool
    output, and useless for other text.

    Attributes:
      longest, shortest: range of the number of last tokens to look for; the longest match decides.
    """

    def __init__(self, longest: int = 3, shortest: int = 1):
        """Sets the range; raises ValueError unless `1 <= shortest <= longest`."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"{shortest=} and {longest=} must be 1 <= shortest <= longest")
        self.longest = longest
        self.shortest = shortest

    def draft(self, tokens: np.ndarray, count: int) -> list[int]:
        """Returns the tokens that followed the latest earlier occurrence of the last tokens; see `Drafter`."""
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            # Candidate positions of an earlier occurrence, narrowed token by token.
            starts = np.arange(len(tokens) - size)
            for offset in range(size):
                starts = starts[tokens[starts + offset] == tokens[len(tokens) - size + offset]]
            if starts.size:
                after = starts[-1] + size
                return tokens[after : after + count].tolist()
        return []


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Returns the tokens that a step with k drafts yields: the accepted drafts and the token drawn after them.

    `drawn[i]` of the k + 1 drawn tokens comes from the model's own distribution after the known tokens and
    `drafts[:i]`. As long as drafts equal the drawn tokens, their contexts are equal too. So an accepted token is the
    one that a step without drafts draws with the same random bits. A draft is accepted with the model's probability of
    it, as in rejection sampling from a drafter that is always certain (Leviathan et al., 2023, arXiv:2211.17192).
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == drawn[accepted]:
        accepted += 1
    return list(drawn[: accepted + 1])
