"""A step of an engine: the requests that it runs, and its output while the device computes it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsv4_jax.decode.step import StepOutput
from dsv4_jax.engine.requests import Request


# In place of the id of a token that only the device knows.
UNKNOWN = np.zeros((1,), np.int32)


@dataclasses.dataclass(frozen=True)
class ScheduledRequest:
    """A request and the tokens that it brings to a step.

    Attributes:
      request: the request.
      tokens: [n] int32 ids that follow those in the cache.
      start: position of the first of these tokens.
      is_prefill: whether they are prompt tokens or read again after a restart, rather than the last drawn token.
      num_drafts: number of drafts at the end of `tokens`.
      forced_tokens: [m] known tokens that follow the last m of `tokens`, to be scored; -1 = draw one.
      source: the row of the previous step's output with the only token, if the host does not know it yet; else -1.
    """

    request: Request
    tokens: np.ndarray
    start: int
    is_prefill: bool = False
    num_drafts: int = 0
    forced_tokens: Sequence[int] = (-1,)
    source: int = -1

    @property
    def samples(self) -> bool:
        """Whether a token is drawn after the last one."""
        return bool(self.forced_tokens) and self.forced_tokens[-1] < 0

    @property
    def num_scored(self) -> int:
        """The number of `forced_tokens` that belong to the prompt."""
        return sum(token >= 0 for token in self.forced_tokens)

    @property
    def end(self) -> int:
        """The number of tokens that the request holds after the step, drafts included."""
        return self.start + len(self.tokens)


@dataclasses.dataclass(frozen=True)
class LaunchedStep:
    """A step that was launched and whose output the host has not read.

    Attributes:
      scheduled: the requests that it runs, with their tokens.
      tokens: [n] int32, the tokens that it draws, for the step behind it.
      output: StepOutput on its way to the host.
      rows: {slot: the rows of the output that belong to its request}.
      num_tokens: number of tokens of its program.
      prefill: whether it ran the program of `token_budget` tokens.
      snapshots: {request: its rows at a block boundary, for the prefix cache}, taken before a later step was launched.
    """

    scheduled: Sequence[ScheduledRequest]
    tokens: Any
    output: StepOutput
    rows: Mapping[int, slice]
    num_tokens: int
    prefill: bool
    snapshots: dict[Request, Any] = dataclasses.field(default_factory=dict)

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests that it runs."""
        return tuple(item.request for item in self.scheduled)

    @property
    def is_in_vain(self) -> bool:
        """Whether all of its requests have ended since."""
        return all(item.request.finish_reason is not None for item in self.scheduled)

    def newest_tokens(self) -> dict[Request, int]:
        """Returns {unfinished request for which the step draws a token: the row of the output with this token}."""
        unfinished = (item for item in self.scheduled if item.samples and item.request.finish_reason is None)
        return {item.request: self.rows[item.request.slot].stop - 1 for item in unfinished}
