"""Draft tokens: where they come from, and which of them are accepted."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Drafter(Protocol):
    """Guesses how a request continues. A wrong guess costs time but never changes a token.

    Any object with `draft` will do. It is asked about many requests in turn, so it should derive its guesses from its
    arguments. One whose `on_device` is true is not asked: steps make the drafts, with the model's
    multi-token-prediction block.
    """

    def draft(self, tokens: np.ndarray, count: int) -> Sequence[int]:
        """Guesses the tokens that follow.

        Args:
          tokens: [n] int32, the request's prompt and all tokens it has generated.
          count: how many tokens to guess at most; at least 1.

        Returns:
          0 to `count` token ids.
        """
        ...


class MTPDrafter:
    """Drafts of the model's multi-token-prediction block, made on the device in the step that draws the token before.

    The engine's model and manager must have the block: read their configuration with
    `DSV4Config.from_hf(..., mtp=True)`.
    """

    on_device = True

    def draft(self, tokens: np.ndarray, count: int) -> Sequence[int]:
        """None: the step makes them. See `Drafter`."""
        return ()


class PromptLookup:
    """Guesses that the last tokens are followed by what followed them before.

    This needs no model. Text that repeats its prompt (code under edit, quotations, tool output) is guessed well, other
    text not at all.

    Attributes:
      longest, shortest: how many of the last tokens to look for; the longest match decides.
    """

    def __init__(self, longest: int = 3, shortest: int = 1):
        """See the class.

        Raises:
          ValueError: not `1 <= shortest <= longest`.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"{shortest=} and {longest=} must be 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest

    def draft(self, tokens: np.ndarray, count: int) -> list[int]:
        """What followed the latest earlier occurrence of the last tokens [n]: see `Drafter`."""
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            # Where they may have occurred earlier.
            starts = np.arange(len(tokens) - size)
            for offset in range(size):
                starts = starts[tokens[starts + offset] == tokens[len(tokens) - size + offset]]
            if starts.size:
                after = starts[-1] + size
                return tokens[after : after + count].tolist()
        return []


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens that a step with k drafts and k + 1 drawn tokens yields: the drafts that were right, and one more.

    `drawn[i]` is drawn from the model's own distribution after the request's known tokens and `drafts[:i]`. As long as
    the drafts agree with what is drawn, so do the contexts: every accepted token is one that a step without drafts
    would have drawn, with the same random bits. So drafts change neither a greedy result nor a sampled one, and a draft
    is accepted with the model's probability of it, as in rejection sampling (Leviathan et al., 2023, arXiv:2211.17192)
    from a drafter that is always certain.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == drawn[accepted]:
        accepted += 1
    return list(drawn[: accepted + 1])
